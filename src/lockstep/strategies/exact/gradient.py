"""The gradient of a step, sharded or not: its norm, clipping, and its place in `.grad` while the optimizer steps.

In: this rank's part of each parameter's gradient. Out: the norm of the whole gradient and the clipped gradient, the
same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.distributed.sharded import gather, local
from lockstep.distributed.torch_internals import on_device, to_device, values_of
from lockstep.distributed.world import World
from lockstep.strategies.exact.stepper import as_it_is


@dataclass
class Part:
    """This rank's part of the gradient of one parameter."""

    name: str
    parameter: Tensor  # as the optimizer has it
    gradient: Tensor  # whole, row-sparse, or a DTensor
    counted: float = 1.0  # weight of its squares in the norm: 1 / replicas, or 0 if another rank counts it
    to_dtensor: Callable[[str, Tensor], Tensor] = as_it_is  # (name, local part) -> DTensor

    @property
    def values(self) -> Tensor:
        """This rank's values, as a plain tensor."""
        return values_of(self.gradient) if self.gradient.is_sparse else local(self.gradient)


class Gradient:
    """The gradient of one step. `names`: all trained parameters in the model's order, the same on every rank. `add_up`:
    sums a tensor over the ranks that hold other parts, in place; collective."""

    def __init__(
        self, parts: Sequence[Part], names: Sequence[str], add_up: Callable[[Tensor], Tensor] = lambda tensor: tensor
    ) -> None:
        self.parts, self.names, self._add_up = parts, names, add_up
        place = {name: i for i, name in enumerate(names)}
        self._places = [place[part.name] for part in parts]

    def norm(self) -> Tensor:
        """Return the 2-norm of the whole gradient: float32 scalar. Each parameter's squares are summed in float64, then
        those sums in the model's order, independent of sharding; rounded once. Collective."""
        own = torch.stack(torch._foreach_norm([part.values for part in self.parts], 2, torch.float64)).square()
        counted = [part.counted for part in self.parts]
        if set(counted) != {1.0}:
            own *= to_device(torch.tensor(counted, dtype=torch.float64), own.device)
        squares = torch.zeros(len(self.names), dtype=torch.float64, device=own.device)  # [P]
        squares.index_add_(0, on_device(self._places, squares.device), own)
        return self._add_up(squares).sum().sqrt().float()

    def whole(self, world: World) -> dict[str, Tensor]:
        """Return the whole gradient by parameter name on rank 0; empty elsewhere. Collective."""
        dense = [(p, p.gradient.to_dense() if p.gradient.is_sparse else p.gradient) for p in self.parts if p.counted]
        gradients = gather({part.name: part.to_dtensor(part.name, gradient) for part, gradient in dense}, world)
        return {name: gradients[name] for name in self.names} if world.is_main else {}

    def scale_(self, factor: Tensor) -> None:
        """Multiply the gradient by a float32 scalar, in place."""
        torch._foreach_mul_([part.values for part in self.parts], factor)

    def clip_(self, norm: Tensor, limit: float | None) -> None:
        """Clip the gradient to the norm `limit`, in place; `norm` is its present norm."""
        clip_([part.values for part in self.parts], norm, limit)

    def assign_to_params(self, uses: Sequence[int]) -> None:
        """Assign the gradient to `.grad` of the parameters. `uses`: how many micro-batches gave each of `names` a
        gradient; the update skips a parameter with none: no decay, no momentum."""
        for place, part in zip(self._places, self.parts, strict=True):
            if not uses[place]:
                part.parameter.grad = None
            else:
                part.parameter.grad = part.gradient.to_dense() if part.gradient.is_sparse else part.gradient

    def clear(self) -> None:
        """Clear `.grad` of the parameters."""
        for part in self.parts:
            part.parameter.grad = None


def clip_(gradients: Sequence[Tensor], norm: Tensor, limit: float | None) -> None:
    """Scale gradients of total norm `norm` down to the norm `limit` (None: never), in place, by the factor of
    `torch.nn.utils.clip_grad_norm_`."""
    if limit:
        factor = (limit / (norm + 1e-6)).clamp(max=1.0)
        if factor.device.type != "cpu" or factor < 1.0:  # on CUDA, multiplying is cheaper than synchronizing
            torch._foreach_mul_(list(gradients), factor)
