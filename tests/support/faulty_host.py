"""Machines and ranks that compute wrongly, for `sdc_check` to evict: each changes `allreduce` in one place."""

from __future__ import annotations

import socket

import torch
from torch import Tensor

from lockstep.data.batch import StepBatch, StepResult
from lockstep.strategies.exact.gradient_sum import share
from lockstep.tasks.task import Task
from lockstep.training.sdc_check import drawn
from support.waiting_at_steps import Held

FROM = 8  # updates made before the fault
WEIGHT = "transformer.h.1.mlp.c_fc.weight"


class WrongGradient(Held):
    """On `host-1` of three ranks, flip a bit of a gradient in steps whose drawn micro-batch belongs to this rank:
    everything before the detection has the right bits."""

    host = "host-1"
    wrong = False  # whether it is wrong at the moment

    def faulty(self) -> bool:
        return socket.gethostname() == self.host and self.world.size == 3

    def build(self, task: Task) -> None:
        super().build(task)
        self.weights.named[WEIGHT].register_hook(self.flip)  # before sdc_check registers its hook

    def train_step(self, batch: StepBatch, learning_rate: float) -> StepResult:
        mine = share(self.run.micro_batches, self.world.rank, self.world.size)
        self.wrong = self.faulty() and batch.step >= FROM and drawn(self.job, batch.step) in mine
        return super().train_step(batch, learning_rate)

    def flip(self, gradient: Tensor) -> Tensor:
        changed = gradient.clone()
        if self.wrong:
            changed.view(-1)[:1].view(torch.int32)[...] ^= 1
        return changed


class WrongOnFirstHost(WrongGradient):
    """`WrongGradient` on the machine of the rendezvous, which has rank 0."""

    host = "host-0"


class WrongRank(WrongGradient):
    """`WrongGradient` on one of three ranks of a machine, which keeps its identity when ranks are renumbered."""

    def faulty(self) -> bool:
        assert self.world.members is not None
        return self.world.members.me == "1" and self.world.size == 3


class WrongFirstRank(WrongGradient):
    """`WrongGradient` on rank 0."""

    def faulty(self) -> bool:
        assert self.world.members is not None
        return self.world.members.me == "0" and self.world.size == 3


class WrongWeight(Held):
    """On `host-1` of three ranks, change a bit of a weight after step `FROM`."""

    def faulty(self) -> bool:
        return socket.gethostname() == "host-1" and self.world.size == 3

    def train_step(self, batch: StepBatch, learning_rate: float) -> StepResult:
        result = super().train_step(batch, learning_rate)
        if self.faulty() and batch.step + 1 == FROM:
            with torch.no_grad():
                self.weights.named[WEIGHT].view(-1)[:1].view(torch.int32)[...] ^= 1
        return result


class WrongWeightOfRank(WrongWeight):
    """`WrongWeight` on one of three ranks of a machine."""

    def faulty(self) -> bool:
        assert self.world.members is not None
        return self.world.members.me == "2" and self.world.size == 3
