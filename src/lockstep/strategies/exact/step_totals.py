"""Sums over ranks in a step besides the gradient: losses, counts, and running statistics such as BatchNorm's.

In: the outputs of a model for a micro-batch, of which the task computes the loss, and the statistics after it. Out: the
loss sum of a micro-batch, with its graph; sums over ranks, and the buffers after the step, which are bitwise equal at
any number of processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lockstep.config.run import RunError
from lockstep.data.batch import IGNORED, MicroBatch
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


_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
_OTHERS = {"QuantAct"}  # I-BERT: running minima and maxima of activations


def averaged_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that a step averages over its micro-batches, by name."""
    modules = {
        name
        for name, m in model.named_modules()
        if isinstance(m, _BATCH_NORMS + _INSTANCE_NORMS) or type(m).__name__ in _OTHERS
    }
    return {name: b for name, b in model.named_buffers() if name.rpartition(".")[0] in modules}


class Statistics:
    """The running statistics (BatchNorm's) of a model that every rank holds in full: one update per step.

    Each micro-batch starts from the statistics before the step, so it does not matter where it runs. The step's result
    is the mean of the micro-batches' statistics, weighted by examples: a step counts as one batch, however divided.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self.names = model, list(averaged_buffers(model))

    def start(self, count: int) -> None:
        """Prepare a step of `count` micro-batches over all ranks."""
        if self.names:
            self._before = self._now()  # [N]
            self._per_micro_batch = self._before.new_zeros(count, len(self._before) + 1)  # [M, N + 1]: examples last

    def take(self, micro: MicroBatch) -> None:
        """Record a micro-batch's statistics after its backward, and reset them to those before the step. A
        padding micro-batch of a short step counts as no examples."""
        if self.names:
            examples = len(micro.targets) * (micro.targets != IGNORED).any()  # a padding micro-batch has none
            self._per_micro_batch[micro.index] = torch.cat([self._now(), examples.double()[None]])
            self.reset()

    def reset(self) -> None:
        """Restore the statistics from before the step."""
        if self.names:
            self._set(self._before)

    def finish(self, all_reduce: Callable[[Tensor], Tensor], used: Tensor | bool = True) -> None:
        """Set the step's statistics after its micro-batches; `used`: whether the update was applied. Every rank has
        zeros for other ranks' micro-batches, and adding zeros is exact. Collective."""
        if self.names:
            gathered = all_reduce(self._per_micro_batch)
            examples = gathered[:, -1:]  # [M, 1]
            mean = (gathered[:, :-1] * examples).sum(0) / examples.sum().clamp(min=1)
            self._set(torch.where((examples.sum() > 0) & used, mean, self._before) + 0.0)  # no negative zeros
            del self._per_micro_batch

    def _buffers(self) -> list[Tensor]:
        """Look up the buffers: engines replace them, and so does every forward of I-BERT."""
        return [self.model.get_buffer(name) for name in self.names]

    def _now(self) -> Tensor:
        return torch.cat([b.detach().reshape(-1).double() for b in self._buffers()])

    def _set(self, values: Tensor) -> None:
        buffers = self._buffers()
        with torch.no_grad():
            for buffer, part in zip(buffers, values.split([b.numel() for b in buffers]), strict=True):
                buffer.copy_(part.view_as(buffer))
