"""The trained weights of a rank: tensors that forward reads, that the optimizer updates and that a checkpoint saves.

In: a model. Out: parameter name -> tensor that this rank updates: a whole weight, as here, or a part of it
(`ShardedWeights` in `fsdp2.py`); the weight itself, or the float32 master of a bfloat16 weight.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lockstep.strategies.exact import held_state
from lockstep.strategies.exact.gradient import Gradient, Part
from lockstep.tasks.models import quantized


class TrainedWeights:
    """The weights of a rank that holds each of them as forward reads it."""

    def __init__(self, model: nn.Module, masters: bool = False) -> None:
        """`masters`: the optimizer updates float32 copies."""
        self.model = model
        self.named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._read = self.own_parts()  # tensors that forward reads, for what this rank updates
        self._masters = masters
        self.updated = {n: nn.Parameter(p.detach().float()) for n, p in self._read.items()} if masters else self._read

    @property
    def parameter_count(self) -> int:
        """Number of parameters of the whole model."""
        return quantized.parameters(self.model)

    @property
    def trained_count(self) -> int:
        """Number of trained parameters: all, unless the run uses an adapter or some are frozen."""
        return sum(p.numel() for p in self.model.parameters() if p.requires_grad)

    def own_parts(self) -> dict[str, nn.Parameter]:
        """Return this rank's part of each trained weight, sharing its memory."""
        return self.named

    def to_dtensor(self, name: str, tensor: Tensor) -> Tensor:
        """Return this rank's part of a weight, gradient or moment, as a DTensor if it is sharded."""
        return tensor

    def gradient(self, gradients: Sequence[Tensor]) -> Gradient:
        """Return the gradient of a step from this rank's parts, in the order of `updated`."""
        updated = zip(self.updated.items(), gradients, strict=True)
        return Gradient([Part(name, p, g) for (name, p), g in updated], list(self.named))

    @torch.no_grad()
    def changed(self) -> None:
        """Copy the updated tensors to those that forward reads, with rounding. Collective if ranks update parts."""
        if self._masters:
            for master, place in zip(self.updated.values(), self._read.values(), strict=True):
                place.copy_(master)

    def updated_parts(self) -> list[tuple[str, Tensor]]:
        """Return the tensors that this rank updates, sharing their memory; sharded ones as DTensors. A tied weight may
        occur twice."""
        return [(name, self.to_dtensor(name, tensor.detach())) for name, tensor in self.updated.items()]

    def to_save(self) -> dict[str, Tensor]:
        """Return this rank's weights and buffers; float32 masters in place of the weights they belong to."""
        return held_state.tensors_of(self.model) | (dict(self.updated_parts()) if self._masters else {})

    def loaded(self) -> None:
        """Make forward read the tensors of `to_save` after they were loaded. Collective, as `changed`."""
        if self._masters:
            self.changed()
