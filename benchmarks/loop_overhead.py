"""What the loop costs the host beside forward, backward and optimizer: the real loop around a step that only waits.

In: nothing (the built-in data). Out: milliseconds a step, the median of several runs; process one, then two.
The step sleeps 20 ms, in which the feeding thread works as it would beside a real one; the rest is the loop's.
Example: python benchmarks/loop_overhead.py
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import torch
from torch import Tensor

from lockstep.checkpoint.checkpoint import Checkpoints
from lockstep.config.run import QUICK_START, Run, load
from lockstep.data.batch import StepBatch, StepResult
from lockstep.distributed.system_metrics import SystemMetrics
from lockstep.distributed.world import World
from lockstep.strategies.exact.gradient_sum import share
from lockstep.strategies.strategy import Strategy
from lockstep.tasks.task import Task
from lockstep.track.tracker import Trackers
from lockstep.training.loop import train
from lockstep.training.resolve import for_rank
from lockstep.training.session import Sinks, build_session
from support.harness import run_on

SLEEP_S = 0.02


class Waits(Strategy):
    """A strategy whose step only waits."""

    waited = 0.0
    state: Any = SimpleNamespace(sharded_state_dict=dict, export=lambda: None)
    weights: Any = SimpleNamespace(parameter_count=0, trained_count=0)
    check = classmethod(lambda cls, run, processes: None)

    def own_micro_batches(self) -> range:
        return share(self.run.micro_batches, self.world.rank, self.world.size)

    def build(self, task: Task) -> None: ...

    def train_step(self, batch: StepBatch, learning_rate: float) -> StepResult:
        start = time.perf_counter()
        time.sleep(SLEEP_S)
        self.waited += time.perf_counter() - start
        return StepResult(torch.tensor(1.0), torch.tensor(1.0))

    def dry_run(self, batch: StepBatch, then: Callable[[], None] = lambda: None) -> None: ...

    def updated_parts(self) -> list[tuple[str, Tensor]]:
        return []

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        raise AssertionError


class NoCheckpoints(Checkpoints):
    """Replaces checkpoints: disk speed is not measured."""

    def save(self, step: int, strategy: object, scores: object = None, state: object = None) -> None: ...


class Numbers(Sinks):
    """Replaces the console: numbers are kept, nothing is printed."""

    def __init__(self, trackers: Trackers, usage: SystemMetrics) -> None:
        self.trackers, self.usage = trackers, usage

    def log(self, step: int, split: str, numbers: dict[str, float]) -> None:
        self.trackers.log(step, split, numbers)
        if split == "train":
            self.usage.ask(step)

    def advance(self, step: int) -> None:
        if (found := self.usage.take()) is not None:
            self.log(found[0], "system", found[1])


def overhead_ms(world: World, run: Run) -> float:
    """Milliseconds per step outside of the step function."""
    job = for_rank(run, world)
    session = build_session(job, world)
    assert isinstance(session.strategy, Waits)
    with tempfile.TemporaryDirectory() as folder:
        trackers = Trackers(run.model_copy(update={"output": folder}), 0, {}, print, print, world.is_main)
        sinks = Numbers(trackers, SystemMetrics(world))
        none = NoCheckpoints(job, world, session.feed.total)
        session.feed.make(0)  # exclude costs of the first batch
        world.barrier()
        start = time.perf_counter()
        train(replace(session, checkpoints=none, sinks=sinks), session.new_state())
        took = time.perf_counter() - start
        trackers.close("done")
    return (took - session.strategy.waited) / session.feed.total * 1e3


def main() -> None:
    run = load(
        None,
        ["steps=200", "evaluate.every=200", "batch_size=128", "micro_batches=8", "strategy.name=loop_overhead.Waits"],
        QUICK_START,
    )
    for ranks in (1, 2):
        times = [max(run_on(ranks, overhead_ms, run, run=run)) for _ in range(5)]
        print(f"processes: {ranks}; {statistics.median(times):.2f} ms a step (runs: {[round(t, 2) for t in times]})")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
