"""Running statistics of a model, such as BatchNorm's: one update per step, the same at any number of processes.

In: the statistics after each micro-batch of a step, on any rank. Out: the buffers after the step.

Each micro-batch starts from the statistics before the step, so it does not matter where it runs. The step's result is
the mean of the micro-batches' statistics, weighted by examples: a step counts as one batch, however it is divided.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from lockstep.data.batch import IGNORED, MicroBatch

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
