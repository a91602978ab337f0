"""Strategies with classic bugs, for `lockstep verify` to detect. Each changes the hand-written strategy in one
place."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from lockstep.data.batch import MicroBatch, StepBatch, StepResult
from lockstep.distributed.randomness import seed_everything
from lockstep.strategies.allreduce import AllReduce


class MeanOfMeans(AllReduce):
    """Divides each micro-batch's loss by its own targets, and averages the means."""

    def backward(self, micro: MicroBatch, targets: int, last: bool) -> Tensor:
        return super().backward(micro, len(micro.targets) * self.run.micro_batches, last)


class OneNotReduced(AllReduce):
    """Does not reduce one parameter's gradient."""

    def reduce(self) -> list[Tensor]:
        place = list(self.weights.named).index("transformer.h.1.mlp.c_fc.weight")
        own = next(iter(self.leaves.tree.nodes.values()))[place].clone()
        gradients = super().reduce()
        gradients[place] = own
        return gradients


class CountedTwice(AllReduce):
    """Sums gradients twice."""

    def reduce(self) -> list[Tensor]:
        return [g * 2 for g in super().reduce()]


class SeedsByRank(AllReduce):
    """Draws dropout from the rank's own generator."""

    def backward(self, micro: MicroBatch, targets: int, last: bool) -> Tensor:
        seed_everything(self.run.seed, self.world.rank, micro.index)
        return super().backward(micro, targets, last)


class LastDropped(AllReduce):
    """Leaves out the last micro-batch of the last rank."""

    def train_step(self, batch: StepBatch, learning_rate: float) -> StepResult:
        if self.world.rank == self.world.size - 1:
            *others, last = batch.micro_batches
            batch = replace(batch, micro_batches=[*others, last.blank()])
        return super().train_step(batch, learning_rate)


class OwnRate(AllReduce):
    """Scales the learning rate by the number of processes."""

    def train_step(self, batch: StepBatch, learning_rate: float) -> StepResult:
        return super().train_step(batch, learning_rate * self.world.size)
