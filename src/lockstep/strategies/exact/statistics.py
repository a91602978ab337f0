"""Per-step reductions other than the gradient: running statistics of the model, and the loss of each source of a
mixture.

In: the micro-batches of a step, on any rank. Out: one update per step of buffers such as BatchNorm's; the loss sum of
each source's examples. Both are bitwise equal at any number of processes.

Each micro-batch starts from the statistics before the step, so it does not matter where it runs. The step's result is
the mean of the micro-batches' statistics, weighted by examples: a step counts as one batch, however it is divided.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lockstep.data.batch import IGNORED, MicroBatch
from lockstep.tasks.task import Task

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
_OTHERS = {"QuantAct"}  # I-BERT: running minima and maxima of activations


def averaged(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that a step averages over its micro-batches, by name."""
    modules = {
        name
        for name, m in model.named_modules()
        if isinstance(m, _BATCH_NORMS + _INSTANCE_NORMS) or type(m).__name__ in _OTHERS
    }
    return {name: b for name, b in model.named_buffers() if name.rpartition(".")[0] in modules}


class Statistics:
    """The running statistics (BatchNorm's) of a model that every rank holds in full."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.names = model, list(averaged(model))

    def start(self, count: int) -> None:
        """Prepare a step of `count` micro-batches over all ranks."""
        if self.names:
            self._before = self._now()  # [N]
            self._per_micro_batch = self._before.new_zeros(count, len(self._before) + 1)  # [M, N + 1]: examples last

    def take(self, micro: MicroBatch) -> None:
        """Record a micro-batch's statistics after its backward, and reset them to those before the step. Not for
        padding micro-batches."""
        if self.names:
            examples = len(micro.targets) * (micro.targets != IGNORED).any()  # a padding micro-batch has none
            self._per_micro_batch[micro.index] = torch.cat([self._now(), examples.double()[None]])
            self.reset()

    def reset(self) -> None:
        """Restore the statistics from before the step."""
        if self.names:
            self._set(self._before)

    def finish(self, sum_over_ranks: Callable[[Tensor], Tensor], used: Tensor | bool = True) -> None:
        """Set the step's statistics after its micro-batches; `used`: whether the update was applied. Every rank has
        zeros for other ranks' micro-batches, and adding zeros is exact. Collective."""
        if self.names:
            gathered = sum_over_ranks(self._per_micro_batch)
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


class LossOutput(NamedTuple):
    """What a model returns that computes the task's loss itself (`strategies/engines/region.py`)."""

    loss: Tensor  # loss sum: a scalar with its graph
    each: Tensor | None  # loss of each example [B], without gradient, if losses of several sources are recorded


class SourceSums:
    """The losses of a step's micro-batches, by source."""

    def __init__(self, sources: int) -> None:
        self._sources = sources
        self._noted: dict[int, Tensor] = {}  # index of a micro-batch -> float64 [S]
        self.of_step: Tensor | None = None  # float64 [S], set by `agree`; None without per-example losses

    @property
    def noted(self) -> int:
        """Number of this rank's micro-batches with per-example losses."""
        return len(self._noted)

    def loss_sum(self, task: Task, outputs: Any, micro: MicroBatch) -> Tensor:
        """Return the loss sum of one micro-batch, with its graph, and record its sums by source."""
        if isinstance(outputs, LossOutput):
            self.note(micro, outputs.each)
            return outputs.loss
        if micro.sources is None or not task.reports_example_losses:
            return task.loss_sum(outputs, micro.targets)
        loss, each = task.loss_each(outputs, micro.targets)
        self.note(micro, each)
        return loss

    def note(self, micro: MicroBatch, each: Tensor | None) -> None:
        """Record the losses of a micro-batch's examples [B], if there are any."""
        if each is not None and micro.sources is not None and each.shape == micro.sources.shape:
            mine = micro.sources == torch.arange(self._sources, device=each.device)[:, None]  # [S, B]
            self._noted[micro.index] = torch.where(mine, each.double(), 0.0).sum(1)

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """A context whose micro-batches belong to no step."""
        noted = dict(self._noted)
        try:
            yield
        finally:
            self._noted = noted

    def agree(self, noted: int, losses: Tensor, summed: Callable[[Tensor], Tensor]) -> None:
        """Sum the losses by source over the step. `noted`: recorded micro-batches of all ranks, whose losses are
        `losses` [M]. `summed`: sums over ranks; each rank fills in its own micro-batches and zeros elsewhere, which is
        exact, and then all add the same list in the same order. Collective if all micro-batches are recorded."""
        self.of_step = None
        if noted == len(losses):
            table = losses.new_zeros(len(losses), self._sources)  # [M, S]
            for index, sums in self._noted.items():
                table[index] = sums
            self.of_step = summed(table).sum(0)
        self._noted = {}
