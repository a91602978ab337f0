"""Of a mixture of sources: the sum of the losses of each source's examples in a step, the same on every rank.

In: what a model gives for a micro-batch, which says where its examples are from. Out: the micro-batch's loss sum, as
the task has it; and, once ranks have agreed, one number for each source, without a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lockstep.data.batch import MicroBatch
from lockstep.tasks.task import Task


class SourceSums:
    """The losses of a step's micro-batches, source by source."""

    def __init__(self, sources: int) -> None:
        self._sources = sources
        self._noted: dict[int, Tensor] = {}  # index of a micro-batch -> float64 [S]
        self.of_step: Tensor | None = None  # float64 [S], once `agree` is through; None where losses are not known

    @property
    def noted(self) -> int:
        """Micro-batches of this rank whose losses are known one by one."""
        return len(self._noted)

    def loss_sum(self, task: Task, outputs: Any, micro: MicroBatch) -> Tensor:
        """The loss sum of one micro-batch, with its gradient."""
        if micro.sources is None or not task.reports_example_losses:
            return task.loss_sum(outputs, micro.targets)
        loss, each = task.loss_each(outputs, micro.targets)
        if each is not None and each.shape == micro.sources.shape:
            mine = micro.sources == torch.arange(self._sources, device=each.device)[:, None]  # [S, B]
            self._noted[micro.index] = torch.where(mine, each.double(), 0.0).sum(1)
        return loss

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Micro-batches that are computed in here belong to no step."""
        noted = dict(self._noted)
        try:
            yield
        finally:
            self._noted = noted

    def agree(self, noted: int, losses: Tensor, summed: Callable[[Tensor], Tensor]) -> None:
        """`noted`: of all ranks, whose micro-batches have these `losses` [M]. `summed`: over ranks; each fills in its
        own micro-batches and zeros elsewhere, which is exact, and then all add the same list in the same order.
        Collective where all are noted."""
        self.of_step = None
        if noted == len(losses):
            held = losses.new_zeros(len(losses), self._sources)  # [M, S]
            for index, sums in self._noted.items():
                held[index] = sums
            self.of_step = summed(held).sum(0)
        self._noted = {}
