"""Strategies that fail in one way at a known moment, otherwise `allreduce`: code named by a run file."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch

from lockstep.config.run import RunError
from lockstep.data.job import Job
from lockstep.strategies.allreduce import AllReduce
from lockstep.strategies.strategy import Strategy


class Refuses(AllReduce):
    @classmethod
    def check(cls, job: Job) -> None:
        raise RunError("strategy.name: not on this machine")


class Lacks(AllReduce):
    needs = ("no_such_engine",)


class Breaks(AllReduce):
    def reduce(self):
        raise OSError("the link is <down>")


class Crashing(AllReduce):
    """Crashes in its second step."""

    def train_step(self, batch: Any, learning_rate: float) -> Any:
        if batch.step == 1:
            raise ValueError("there is no second step")
        return super().train_step(batch, learning_rate)


BAD_STEP = 7


class Exploding(AllReduce):
    """The loss of one micro-batch is infinite in step 7."""

    def backward(self, micro: Any, targets: int, last: bool) -> Any:
        if self.step == BAD_STEP and micro.index == 3:
            loss = super().backward(micro, targets, last)
            return loss * float("inf")
        return super().backward(micro, targets, last)

    def train_step(self, batch: Any, learning_rate: float) -> Any:
        self.step = batch.step if learning_rate else -1
        return super().train_step(batch, learning_rate)


class NoMemory(AllReduce):
    """The last rank runs out of memory on the longest examples."""

    def build(self, task: Any) -> None:
        super().build(task)
        if self.world.rank == self.world.size - 1:
            self.dry_run = self._fail  # type: ignore[assignment]

    def _fail(self, *arguments: Any) -> None:
        raise torch.OutOfMemoryError("wanted 3 GiB more")


def planted(strategy: Strategy, overflows: dict[int, float], infinite: int = -1) -> None:
    """Scale the loss of these steps so that fp16 overflows in backward at the usual loss scale; for `infinite`, make it
    infinite."""
    loss_sum, step = strategy.task.loss_sum, strategy.train_step  # type: ignore[attr-defined]
    at = [-1]

    def loss(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
        found = loss_sum(outputs, targets)
        return found * (float("inf") if at[0] == infinite else overflows.get(at[0], 1.0))

    def train_step(batch: Any, rate: float) -> Any:
        at[0] = batch.step
        return step(batch, rate)

    strategy.task.loss_sum = loss  # type: ignore[attr-defined]
    strategy.train_step = train_step  # type: ignore[method-assign]
    strategy.at = at  # type: ignore[attr-defined]


class Overflowing(AllReduce):
    """Steps 3 and 7 overflow; without a file `go`, the job is killed in the middle of step 8."""

    def build(self, task: Any) -> None:
        super().build(task)
        planted(self, {3: 1e4, 7: 1e4})

    def backward(self, micro: Any, targets: int, last: bool) -> Any:
        if micro.index == 2 and self.at[0] == 8 and not Path("go").exists():
            Path("go").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().backward(micro, targets, last)


class Endless(AllReduce):
    """Step 15 never ends."""

    def train_step(self, batch: Any, learning_rate: float) -> Any:
        while batch.step == 15:
            time.sleep(0.1)
        return super().train_step(batch, learning_rate)


class Dawdling(AllReduce):
    """Rank 1 hangs in the middle of step 20, the first time."""

    def train_step(self, batch: Any, learning_rate: float) -> Any:
        marker = Path("dawdled")
        if batch.step == 20 and self.world.rank == 1 and not marker.exists():
            marker.touch()
            while True:
                time.sleep(0.1)
        return super().train_step(batch, learning_rate)


class Hungry(AllReduce):
    """Rank 1 takes up all memory at step 15; a file `ate` says so."""

    def train_step(self, batch: Any, learning_rate: float) -> Any:
        if batch.step == 15 and self.world.rank == 1 and not Path("ate").exists():
            Path("ate").touch()
            eaten = []
            while True:
                eaten.append(torch.ones(2_000_000))
                time.sleep(0.002)  # its launcher looks once per second
        return super().train_step(batch, learning_rate)
