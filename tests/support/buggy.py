"""Strategies with the classic mistakes, for `lockstep verify` to find. Each is one change to the hand-written one."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from lockstep.data.batch import MicroBatch, StepBatch, StepResult
from lockstep.distributed.randomness import seed_everything
from lockstep.strategies.allreduce import AllReduce


class MeanOfMeans(AllReduce):
    """Each micro-batch's loss is divided by its own targets, and the means are averaged."""

    def backward(self, micro: MicroBatch, targets: int, last: bool) -> Tensor:
        return super().backward(micro, len(micro.targets) * self.run.micro_batches, last)


class OneNotReduced(AllReduce):
    """One parameter's gradient stays what this rank computed."""

    def reduce(self) -> list[Tensor]:
        place = list(self.named).index("transformer.h.1.mlp.c_fc.weight")
        own = next(iter(self.leaves.tree.nodes.values()))[place].clone()
        gradients = super().reduce()
        gradients[place] = own
        return gradients


class CountedTwice(AllReduce):
    """Gradients are summed, and summed again."""

    def reduce(self) -> list[Tensor]:
        return [g * 2 for g in super().reduce()]


class SeedsByRank(AllReduce):
    """Dropout draws from the rank's own random numbers."""

    def backward(self, micro: MicroBatch, targets: int, last: bool) -> Tensor:
        seed_everything(self.run.seed, self.world.rank, micro.index)
        return super().backward(micro, targets, last)


class LastDropped(AllReduce):
    """The last micro-batch of the last rank is left out."""

    def train_step(self, batch: StepBatch, learning_rate: float) -> StepResult:
        if self.world.rank == self.world.size - 1:
            *others, last = batch.micro_batches
            batch = replace(batch, micro_batches=[*others, last.blank()])
        return super().train_step(batch, learning_rate)


class OwnRate(AllReduce):
    """The learning rate is scaled by the number of processes."""

    def train_step(self, batch: StepBatch, learning_rate: float) -> StepResult:
        return super().train_step(batch, learning_rate * self.world.size)
