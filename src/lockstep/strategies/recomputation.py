"""One micro-batch computed again, outside its step, and what every rank must hold in full: for `sdc_check`.

In: a built strategy. Out: the micro-batch's gradient, for the strategy's observer, bitwise equal to that of the step;
and the tensors to compare between ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lockstep.data.batch import MicroBatch
from lockstep.data.job import Job
from lockstep.distributed.sharded import local


class Recomputation(ABC):
    """Micro-batches of a strategy, computed again."""

    together: ClassVar[bool] = False  # whether `compute` is collective

    def __init__(self, strategy: Any) -> None:
        self.strategy = strategy

    @classmethod
    def supports(cls, job: Job) -> bool:
        """Whether it works with the job's options."""
        return True

    @abstractmethod
    def compute(self, step: int, micro: MicroBatch, targets: float) -> None:
        """Compute a micro-batch outside its step, on any rank, while no parameter has a `.grad`. Only the observer
        receives the gradient."""

    @abstractmethod
    def replicated_weights(self) -> list[Tensor]:
        """Return the weights that every rank holds in full."""

    @abstractmethod
    def replicated_state(self) -> list[Tensor]:
        """Return the part of the state that every rank holds in full. Collective."""


class ReplicatedRecomputation(Recomputation):
    """Of a `ReplicatedStrategy`: each rank has the whole model, so one rank computes alone."""

    @override
    def compute(self, step: int, micro: MicroBatch, targets: float) -> None:
        strategy, totals, precision = self.strategy, self.strategy.totals, self.strategy.precision

        def backward() -> Tensor:
            outputs = strategy.model(**strategy.inputs_of(micro))
            loss = totals.loss_sum(strategy.task, outputs, micro, strategy.observer)
            with precision.autocast(False):
                torch.autograd.grad(precision.scaled(loss / targets), strategy.parameters, allow_unused=True)
            return loss.detach()

        with precision.autocast(), totals.preserved():
            strategy.compute(step, micro, backward)

    @override
    def replicated_weights(self) -> list[Tensor]:
        return [p.detach() for p in self.strategy.parameters]

    @override
    def replicated_state(self) -> list[Tensor]:
        state = sorted(self.strategy.state.sharded_state_dict().items())
        return [tensor.detach() for _, tensor in state if local(tensor) is tensor]
