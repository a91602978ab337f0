"""Data classes of a training step, from collated micro-batches to results, with a glossary.

Glossary:
  step          one optimizer update, numbered from 0; a step's result is the weights "after step t+1"
  global batch  the examples of one step over the whole job
  micro-batch   one of the `micro_batches` parts of a global batch, collated: the input of one forward and backward; its
                gradient is the leaf of the reduction tree that has its index
  target        a label that the loss is summed over (-100 marks a position without one)
  tokens        real tokens; padded: tokens including padding
Letters in shape comments: B examples of a micro-batch, T padded length, C classes, M micro-batches of a step, W ranks,
S sources of a mixture. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from lockstep.data import host_facts

if TYPE_CHECKING:
    import torch
    from torch import Tensor

IGNORED = -100  # ignored target, as in torch.nn.functional.cross_entropy

TARGETS = host_facts.TARGETS

# Name -> float64 sum over examples, of any shape, or one row per example (`Task.per_example_outputs`); metrics are
# computed from these.
Sums = dict[str, "Tensor"]


@dataclass(frozen=True)
class MicroBatch:
    """One collated micro-batch."""

    index: int  # within the step, 0..M-1; also of its gradient's leaf in the reduction tree
    inputs: Mapping[str, Tensor]  # keyword arguments of the model, each [B, T]
    targets: Tensor  # int64 [B], [B, T] or [B, C], depending on the task; IGNORED where there is none
    sources: Tensor | None = None  # int64 [B]: which source of a mixture each example is from

    def to(self, device: torch.device) -> MicroBatch:
        """Return this micro-batch on `device`; copies from pinned memory may still be in flight."""
        inputs = host_facts.on_device(self.inputs, device)
        sources = None if self.sources is None else self.sources.to(device, non_blocking=True)
        return MicroBatch(self.index, inputs, self.targets.to(device, non_blocking=True), sources)

    def pinned(self) -> MicroBatch:
        """Return this micro-batch in pinned memory, for asynchronous copies to a GPU."""
        inputs = host_facts.pinned(self.inputs)
        sources = None if self.sources is None else self.sources.pin_memory()
        return MicroBatch(self.index, inputs, self.targets.pin_memory(), sources)

    def blank(self) -> MicroBatch:
        """A padding micro-batch of the first two examples (batch normalization needs two), or the only one. All targets
        are ignored, so its gradient is zero."""
        targets = self.targets[:2].clone().fill_(IGNORED)
        return MicroBatch(self.index, host_facts.blank(self.inputs, targets), targets)


@dataclass(frozen=True)
class StepBatch:
    """This rank's part of one step, and counts of the whole step (equal on every rank, without communication)."""

    step: int
    micro_batches: list[MicroBatch]  # this rank's, by index
    count: int  # M, over all ranks
    examples: int  # of the whole step
    targets: float  # of the whole step: the loss divisor; weighted if targets have weights
    tokens: int  # of the whole step, without padding
    padded: int  # of the whole step, with padding
    padded_by_chance: int  # padded tokens if examples were split in their original order
    ids: np.ndarray  # int64, of the whole step: positions in the training split
    shares: tuple[range, ...] | None = None  # micro-batches of each rank; None: even shares
    own_tokens: int = 0  # of this rank's micro-batches, with padding
    targets_of: np.ndarray | None = None  # float64 [S], of the whole step: targets of each source of a mixture

    def to(self, device: torch.device) -> StepBatch:
        """Return this batch with its micro-batches on `device`."""
        return replace(self, micro_batches=[m.to(device) for m in self.micro_batches])


@dataclass(frozen=True)
class StepResult:
    """Results of a step, equal on every rank. Tensors may still be on the device: reading them synchronizes."""

    loss: Tensor  # float64 scalar: mean over the step's targets, before the update
    grad_norm: Tensor  # float32 scalar: 2-norm of the whole gradient, before clipping
    used: Tensor | bool = True  # False: no update was made; loss or gradient is not finite (`on_nonfinite: skip`)
    loss_sums_of: Tensor | None = None  # float64 [S]: loss sum of each source, if the task reports example losses
