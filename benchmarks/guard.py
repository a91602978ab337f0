"""What fingerprints and `guard` cost, in processor time on one thread, and whether `guard` raises a false alarm.

In: a run file (key=value after it), as `lockstep train` takes them. Out: seconds of a step, with `sdc_check.every: 1`
and without, turn and turn about; seconds of a hash of weights and optimizer state; alarms in so many guarded steps.

python benchmarks/guard.py runs/minilm-emotion.yaml model.source=MINILM data.source=null data.train=TRAIN --steps 7
"""

from __future__ import annotations

import argparse
import statistics
import time
from types import SimpleNamespace
from typing import Any

import torch

from lockstep.checkpoint.shard_files import StateHash
from lockstep.config.run import load
from lockstep.data.job import Job, strategy_class
from lockstep.distributed.world import World
from lockstep.tasks.task import make_task
from lockstep.training.data_loader import StepLoader
from lockstep.training.sdc_check import SdcCheck


def built(path: str, overrides: list[str], every: int) -> tuple[Any, StepLoader, Any]:
    """Build a strategy on one process; returns the step function, batches and strategy."""
    run = load(path, [*overrides, "strategy.name=single", "launch.processes=1", f"sdc_check.every={every}"])
    world = World(run)
    task, strategy = make_task(Job.of(run).with_data()), strategy_class(run)(Job.of(run, world.size), world)
    strategy.build(task)
    feed = StepLoader(task, strategy.own_micro_batches(), world.device)
    session: Any = SimpleNamespace(run=run, job=strategy.job, world=world, feed=feed, strategy=strategy)
    return SdcCheck(session) if every else strategy, feed, strategy


def took(call: Any) -> float:
    """CPU seconds of a call."""
    began = time.process_time()
    call()
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--steps", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    plain, feed, strategy = built(args.run, args.overrides, 0)
    guarded, *_ = built(args.run, args.overrides, 1)
    steps = []
    for number in range(args.steps):
        batch = feed.make(number)
        steps.append(
            (took(lambda b=batch: plain.train_step(b, 1e-4)), took(lambda b=batch: guarded.train_step(b, 1e-4)))
        )
    hashes, parts = StateHash(strategy.world), strategy.state.sharded_state_dict()
    hashes.of(parts)
    hashed = statistics.median(took(lambda: hashes.of(parts)) for _ in range(5))
    ratio = statistics.median(b / a for a, b in steps[1:] or steps)
    numbers = sum(tensor.numel() for tensor in parts.values())
    print(f"a step: {statistics.median(a for a, _ in steps):.3f} s; with sdc_check.every=1 {ratio:.2f} times as long")
    print(f"a hash of {numbers / 1e6:.1f}M numbers: {hashed:.3f} s")
    print(f"no alarm in {args.steps} guarded steps: {args.steps * plain.run.micro_batches} micro-batches")


if __name__ == "__main__":
    main()
