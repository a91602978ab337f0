"""Sums over ranks in a step besides the gradient: losses of micro-batches and of the sources of a mixture, and counts.

In: the outputs of a model for a micro-batch; the task computes the loss. Out: the loss sum of a micro-batch, with its
graph, and sums over ranks that are bitwise equal at any number of processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.config.run import RunError
from lockstep.data.batch import MicroBatch
from lockstep.strategies.observer import StepObserver
from lockstep.tasks.task import Task


class LossOutput(NamedTuple):
    """Output of a model that computes the task's loss itself (`strategies/engines/region.py`)."""

    loss: Tensor  # loss sum: a scalar with its graph
    each: Tensor | None  # loss of each example [B], without gradient, if losses of several sources are recorded


class StepTotals:
    """Sums losses and counts of a step over ranks."""

    def __init__(self, device: torch.device, sources: int, on_switched: Callable[[], None]) -> None:
        """`on_switched`: called, on every rank, if forward switched off `requires_grad` of a weight; collective."""
        self._device, self._sources, self._on_switched = device, sources, on_switched
        self.sum_over_ranks: Callable[[Tensor], Tensor] = lambda tensor: tensor
        """Sums a tensor over the ranks with their own losses and gradients, in place; collective."""

        self._by_source: dict[int, Tensor] = {}  # index of a micro-batch -> float64 [S]
        self.loss_sums_of: Tensor | None = None  # float64 [S], set by `all_reduce`; None without per-example losses
        self.switched = 0  # micro-batches that switched off a weight's `requires_grad`; counted on whole models

    def start(self, count: int) -> Tensor:
        """Return zeros for all `count` micro-batches of a step [M]; each rank fills in the losses of its own."""
        self._by_source = {}
        return torch.zeros(count, dtype=torch.float64, device=self._device)

    def loss_sum(self, task: Task, outputs: Any, micro: MicroBatch, observer: StepObserver | None = None) -> Tensor:
        """Return the loss sum of one micro-batch from the model's outputs: a scalar with its graph. Records its sums by
        source."""
        loss = self._loss_sum(task, outputs, micro)
        if observer is not None:
            observer.loss(micro.index, loss)
        return loss

    def _loss_sum(self, task: Task, outputs: Any, micro: MicroBatch) -> Tensor:
        if isinstance(outputs, LossOutput):
            self._note(micro, outputs.each)
            return outputs.loss
        if micro.sources is None or not task.reports_example_losses:
            return task.loss_sum(outputs, micro.targets)
        loss, each = task.loss_each(outputs, micro.targets)
        self._note(micro, each)
        return loss

    def _note(self, micro: MicroBatch, each: Tensor | None) -> None:
        """Record the losses of a micro-batch's examples [B], if there are any."""
        if each is not None and micro.sources is not None and each.shape == micro.sources.shape:
            mine = micro.sources == torch.arange(self._sources, device=each.device)[:, None]  # [S, B]
            self._by_source[micro.index] = torch.where(mine, each.double(), 0.0).sum(1)

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """A context whose micro-batches belong to no step."""
        before = dict(self._by_source)
        try:
            yield
        finally:
            self._by_source = before

    def all_reduce(self, losses: Tensor, uses: Sequence[int], also: Sequence[int] = ()) -> tuple[Tensor, list[int]]:
        """Sum over ranks the losses of the step's micro-batches [M], the counts of micro-batches that gave each
        trainable parameter a gradient, and other counts. Each rank fills in its own micro-batches and zeros elsewhere,
        so that adding is exact; losses by source are then added in the same order on every rank. Collective. Errors:
        `RunError` on every rank if there is no gradient at all."""
        losses, counts = self._in_one_message(losses, [*uses, *also, self.switched, len(self._by_source)])
        self.loss_sums_of = None
        if counts.pop() == len(losses):  # every micro-batch has per-example losses
            table = losses.new_zeros(len(losses), self._sources)  # [M, S]
            for index, sums in self._by_source.items():
                table[index] = sums
            self.loss_sums_of = self.sum_over_ranks(table).sum(0)
        self._by_source = {}
        if counts.pop():
            self._on_switched()
        if not any(counts[: len(uses)]):
            raise RunError(
                "LS4180",
                "no weight of the model gets a gradient: the loss does not depend on its trainable weights "
                "(check the loss of the task, and what is frozen or detached)",
            )
        return losses, counts

    def _in_one_message(self, losses: Tensor, counts: Sequence[int]) -> tuple[Tensor, list[int]]:
        """Sum losses and counts over ranks. The counts stay in host memory, so there is no device synchronization.
        Collective."""
        numbers = torch.tensor(counts, dtype=torch.float64)
        all_reduce = self.sum_over_ranks
        if losses.device.type == "cpu":  # in one message
            losses, numbers = all_reduce(torch.cat([losses, numbers])).split([len(losses), len(numbers)])
        else:
            losses, numbers = all_reduce(losses), all_reduce(numbers)
        return losses, [int(number) for number in numbers.tolist()]
