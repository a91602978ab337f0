"""What a training step spends, operator by operator, in one process.

In: a model's folder, and a folder with train, validation and test .jsonl of texts and labels. Out: a table of the
operators' own share of a step's processor time, by torch.profiler, and a step's time without the profiler.
Example: OMP_NUM_THREADS=1 python benchmarks/step_parts.py path/to/minilm path/to/emotion bf16 model.attention=eager
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from torch.profiler import ProfilerActivity, profile

from lockstep.config.run import Run, load
from lockstep.data.batch import StepBatch
from lockstep.distributed.system_metrics import keep_freed_memory
from lockstep.distributed.world import World
from lockstep.strategies.strategy import Strategy
from lockstep.training.data_loader import StepLoader
from support.harness import build

STEPS = 5
SHOWN = 14


def run_of(model: str, data: str, precision: str, *more: str) -> Run:
    """128 examples in 8 micro-batches, in order."""
    values = {
        "task": {"name": "classification", "text": "text", "label": "label"},
        "data": {"source": data, "max_length": 128, "limit": 4000},
        "model": {"source": model},
        "precision": precision,
        "strategy": {"name": "single"},
        "launch": {"device": "cpu", "threads": 1},
    }
    return load(None, list(more), values)


def started(run: Run) -> tuple[Strategy, list[StepBatch]]:
    """Return a strategy after two steps, and the steps to profile."""
    world = World(run).join()
    task, strategy = build(run, world)
    keep_freed_memory()  # as `startup.try_a_step` does
    feed = StepLoader(task, strategy.own_micro_batches(), world.device)
    for step in range(2):
        strategy.train_step(feed.make(step), 1e-5)
    return strategy, [feed.make(2 + step) for step in range(STEPS)]


def seconds(strategy: Strategy, batches: list[StepBatch]) -> list[float]:
    """CPU time of each step."""
    found = []
    for batch in batches:
        start = time.process_time()
        strategy.train_step(batch, 1e-5)
        found.append(time.process_time() - start)
    return found


def main(model: str, data: str, precision: str, *more: str) -> None:
    strategy, batches = started(run_of(model, data, precision, *more))
    print(f"{precision}: {statistics.median(seconds(strategy, batches)):.3f} s of processor time a step")
    with profile(activities=[ProfilerActivity.CPU]) as found:
        for batch in batches:
            strategy.train_step(batch, 1e-5)
    rows = sorted(found.key_averages(), key=lambda event: -event.self_cpu_time_total)
    total = sum(event.self_cpu_time_total for event in rows)
    print("| operator | calls a step | share |\n|---|---|---|")
    for event in rows[:SHOWN]:
        print(f"| {event.key} | {event.count // STEPS} | {100 * event.self_cpu_time_total / total:.1f} % |")


if __name__ == "__main__":
    main(*sys.argv[1:])
