"""The whole gradient of a step, of which a rank holds some: one view for every strategy that makes its own update.

In: for each parameter that this rank updates what it holds of its gradient, however it is cut. Out: the norm of the
whole, the same gradient clipped, and `.grad` of the parameters while the optimizer steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.distributed.sharded import gather, local
from lockstep.distributed.torch_internals import values_of
from lockstep.distributed.transfers import on_device
from lockstep.distributed.world import World
from lockstep.strategies.exact.optim import as_it_is
from lockstep.strategies.exact.reduction import clip_
from lockstep.strategies.exact.sparse_rows import DenseRows


@dataclass
class Part:
    """This rank's part of the gradient of one parameter."""

    name: str
    parameter: Tensor  # as the optimizer has it
    gradient: Tensor  # whole, row-sparse, or a DTensor
    counted: float = 1.0  # of its squares, in the norm: 1 / copies, or 0 where another rank answers for it
    rows: DenseRows | None = None  # where the dense form of a row-sparse gradient lies while the optimizer steps
    spread: Callable[[str, Tensor], Tensor] = as_it_is  # its name and a plain part -> the DTensor it is a part of

    @property
    def values(self) -> Tensor:
        """This rank's numbers."""
        return values_of(self.gradient) if self.gradient.is_sparse else local(self.gradient)


class Gradient:
    """Of one step. `names`: all trained parameters in the model's order, the same on every rank. `add_up`: sums a
    tensor over the ranks that hold other parts, in place; collective."""

    def __init__(
        self, parts: Sequence[Part], names: Sequence[str], add_up: Callable[[Tensor], Tensor] = lambda tensor: tensor
    ) -> None:
        self.parts, self.names, self._add_up = parts, names, add_up
        place = {name: i for i, name in enumerate(names)}
        self._places = [place[part.name] for part in parts]

    def norm(self) -> Tensor:
        """The 2-norm of the whole: float32 scalar. Each parameter's squares are summed in float64, then those of all in
        the model's order, whoever holds them; rounded once. Collective."""
        own = [torch.linalg.vector_norm(p.values, dtype=torch.float64).square() * p.counted for p in self.parts]
        squares = torch.zeros(len(self.names), dtype=torch.float64, device=own[0].device)  # [P]
        squares.index_add_(0, on_device(self._places, squares.device), torch.stack(own))
        return self._add_up(squares).sum().sqrt().float()

    def whole(self, world: World) -> dict[str, Tensor]:
        """By parameter name on rank 0, nothing elsewhere. Collective."""
        dense = [(p, p.gradient.to_dense() if p.gradient.is_sparse else p.gradient) for p in self.parts if p.counted]
        gradients = gather({part.name: part.spread(part.name, gradient) for part, gradient in dense}, world)
        return {name: gradients[name] for name in self.names} if world.is_main else {}

    def scale_(self, factor: Tensor) -> None:
        """Multiply it by a float32 scalar, in place."""
        torch._foreach_mul_([part.values for part in self.parts], factor)

    def clip_(self, norm: Tensor, limit: float | None) -> None:
        """Scale it down to the norm `limit`, in place; `norm` is what it has."""
        clip_([part.values for part in self.parts], norm, limit)

    def give(self, uses: Sequence[int]) -> None:
        """Into `.grad` of the parameters. `uses`: how many micro-batches gave each of `names` a gradient; a parameter
        that none did is left alone by the update, neither decayed nor moved by its momentum."""
        for place, part in zip(self._places, self.parts, strict=True):
            if not uses[place]:
                part.parameter.grad = None
            else:
                part.parameter.grad = part.rows.filled(part.gradient) if part.rows else part.gradient

    def take_back(self) -> None:
        """The parameters hold none any more."""
        for part in self.parts:
            part.parameter.grad = None
            if part.rows is not None:
                part.rows.wipe()
