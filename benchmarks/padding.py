"""What leaving padding out saves: steps of one run file with `data.padding: none` and `batch`, turn and turn about.

In: a run file and overrides. Out: a line of JSON a precision: seconds of processor time of a step under both (median
over steps), their ratio, and tokens computed for each real one under `batch`. One process, one thread; processor time,
so that other work on the machine counts little.
Example: python benchmarks/padding.py runs/emotion.yaml --steps 15 model.source=PATH
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from lockstep.config.run import Run, load
from lockstep.data.job import Job
from lockstep.distributed.world import World
from lockstep.strategies.single import Single
from lockstep.tasks.task import make_task
from lockstep.training.data_loader import StepLoader

WAYS = ("none", "batch")


def built(run: Run) -> tuple[Single, StepLoader]:
    """Build a strategy of one process and its batches."""
    world = World(run)
    strategy = Single(Job.of(run), world)
    task = make_task(Job.of(run).with_data())
    strategy.build(task)
    return strategy, StepLoader(task, strategy.own_micro_batches(), world.device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_file")
    parser.add_argument("--steps", type=int, default=11)
    parser.add_argument("--precisions", nargs="*", default=["fp32", "bf16"])
    args, overrides = parser.parse_known_args()
    torch.set_num_threads(1)
    for precision in args.precisions:
        more = ["strategy.name=single", "launch.processes=1", "launch.device=cpu", f"precision={precision}"]
        sides = {way: built(load(args.run_file, [*overrides, *more, f"data.padding={way}"])) for way in WAYS}
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        padded = real = 0
        for step in range(args.steps + 1):
            for way, (strategy, feed) in sides.items():
                batch = feed.make(step)
                before = time.process_time()
                strategy.train_step(batch, 1e-5)
                if step:  # the first is a warm-up
                    seconds[way].append(time.process_time() - before)
                if way == "batch":
                    padded, real = padded + batch.padded, real + batch.tokens
        ratios = [b / n for n, b in zip(*seconds.values(), strict=True)]
        found = {f"{way}_s": round(statistics.median(times), 3) for way, times in seconds.items()}
        spread = [round(x, 3) for x in (min(ratios), max(ratios))]
        line = {"precision": precision, **found, "ratio": round(statistics.median(ratios), 3), "lowest_highest": spread}
        print(json.dumps(line | {"padding_of_batch": round(padded / real, 3)}), flush=True)


if __name__ == "__main__":
    main()
