"""Strategies with one fault in one step, for `lockstep diff` to find: each changes `allreduce` in one place."""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.data.batch import MicroBatch, StepBatch, StepResult
from lockstep.distributed.randomness import seed_everything
from lockstep.strategies.allreduce import AllReduce
from lockstep.tasks.task import Task
from lockstep.training.sdc_check import drawn

STEP, MICRO_BATCH = 6, 3  # as counted in fingerprints
WEIGHT = "transformer.h.1.mlp.c_fc.weight"


class _Planted(AllReduce):
    at = 0

    def train_step(self, batch: StepBatch, learning_rate: float) -> StepResult:
        self.at = batch.step + 1
        return super().train_step(batch, learning_rate)


class OtherDropout(_Planted):
    """One micro-batch draws other random numbers."""

    def backward(self, micro: MicroBatch, targets: int, last: bool) -> Tensor:
        if (self.at, micro.index) == (STEP, MICRO_BATCH):
            seed_everything(self.run.seed + 1, self.at, micro.index)
        return super().backward(micro, targets, last)


class WrongLeaf(_Planted):
    """One number of one weight's gradient is wrong in one micro-batch."""

    def backward(self, micro: MicroBatch, targets: int, last: bool) -> Tensor:
        def flip(gradient: Tensor) -> Tensor:
            return gradient + 1e-3 * torch.eye(*gradient.shape)

        wrong = (self.at, micro.index) == (STEP, MICRO_BATCH)
        hook = self.weights.named[WEIGHT].register_hook(flip) if wrong else None
        loss = super().backward(micro, targets, last)
        if hook is not None:
            hook.remove()
        return loss


class WrongSum(_Planted):
    """One gradient is counted twice."""

    def reduce(self) -> list[Tensor]:
        gradients = super().reduce()
        if self.at == STEP:
            gradients[list(self.weights.named).index(WEIGHT)] *= 2
        return gradients


class AllTwice(_Planted):
    """All gradients are counted twice."""

    def reduce(self) -> list[Tensor]:
        return [g * (2 if self.at == STEP else 1) for g in super().reduce()]


class WrongRate(_Planted):
    """The update uses another rate."""

    def train_step(self, batch: StepBatch, learning_rate: float) -> StepResult:
        return super().train_step(batch, learning_rate * (1.001 if batch.step + 1 == STEP else 1))


class BitFlip(_Planted):
    """The lowest bit of one number of a gradient flips in the micro-batch that `sdc_check` draws, in one step."""

    times = 1000
    under_way = -1

    def build(self, task: Task) -> None:
        super().build(task)
        self.weights.named[WEIGHT].register_hook(self.flip)

    def run_micro_batch(self, micro: MicroBatch, divisor: float) -> Tensor:
        self.under_way = micro.index
        loss = super().run_micro_batch(micro, divisor)
        self.under_way = -1
        return loss

    def flip(self, gradient: Tensor) -> Tensor:
        if self.at != STEP or self.under_way != drawn(self.job, self.at - 1) or self.times == 0:
            return gradient
        self.times -= 1
        changed = gradient.clone()
        changed.view(-1)[:1].view(torch.int32)[...] ^= 1
        return changed


class BitFlipOnce(BitFlip):
    """Like `BitFlip`, but only in the first computation of the step, not in a recomputation."""

    times = 1
