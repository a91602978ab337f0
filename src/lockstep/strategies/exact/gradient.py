"""The whole gradient of a step, of which a rank holds some, the loss scale of fp16, and numbers that are not finite.

In: for each parameter that this rank updates what it holds of its gradient, however it is cut; the loss of each
micro-batch. Out: the norm of the whole, the same gradient clipped, and `.grad` of the parameters while the optimizer
steps; the loss times the scale, and the scale of the next step; whether an update may be made. All are the same on
every rank. The rule of the scale is that of torch's GradScaler (Micikevicius et al., "Mixed Precision Training", ICLR
2018): halved where the gradient overflows, doubled after so many steps in a row where it does not. It is a power of
two, so that it changes no bit of a float32 gradient but where fp16 overflows or underflows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.distributed.sharded import gather, local
from lockstep.distributed.torch_internals import ToHost, on_device, to_device, values_of
from lockstep.distributed.world import World
from lockstep.strategies.exact.optim import as_it_is
from lockstep.strategies.exact.reduction import clip_

FIRST_SCALE = 2.0**16
SCALE_INTERVAL = 2000  # steps in a row without an overflow, after which it is doubled
LOWEST_SCALE = 1.0  # a gradient that is not finite at this scale is not so by the scale
HIGHEST_SCALE = 2.0**126  # its inverse is still an ordinary float32


class NotFinite(ArithmeticError):
    """A loss or a gradient that is no finite number, under `on_nonfinite: stop`; nothing was updated."""

    def __init__(self, step: int, micro_batches: list[int], norm: float) -> None:
        super().__init__(f"step {step}: micro-batches {micro_batches}, gradient norm {norm}")
        self.step, self.micro_batches, self.norm = step, micro_batches, norm  # micro-batches whose loss is not finite


class LossScale:
    """The loss scale of a run (fp16): float32 scalars on the device, so that the host waits for nothing."""

    def __init__(self, device: torch.device) -> None:
        self.value = torch.tensor(FIRST_SCALE, device=device)
        self.good_steps = torch.zeros((), device=device)  # in a row, since it was changed
        self.overflowed = torch.zeros((), dtype=torch.bool, device=device)  # the last step, by this scale

    def follow(self, losses: Tensor, norm: Tensor) -> None:
        """After a step: `losses` [M] and `norm` of the whole gradient, unscaled, the same on every rank. A loss that is
        not finite says nothing of the scale, which then stays."""
        sound = torch.isfinite(losses).all()
        whole = torch.isfinite(norm).to(self.value.device)
        self.overflowed = sound & ~whole & (self.value > LOWEST_SCALE)
        good = torch.where(whole, self.good_steps + 1, torch.zeros_like(self.good_steps))
        grows = good >= SCALE_INTERVAL
        scale = torch.where(whole, torch.where(grows, self.value * 2, self.value), self.value / 2)
        self.value = torch.where(sound, scale.clamp(LOWEST_SCALE, HIGHEST_SCALE), self.value)
        self.good_steps = torch.where(sound, torch.where(grows, 0.0, good), self.good_steps)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """A context in which the loss scale is 1."""
        before = self.value, self.good_steps
        self.value = torch.ones_like(self.value)
        yield
        self.value, self.good_steps = before

    def state(self) -> Mapping[str, Tensor]:
        """What a checkpoint keeps of it. Those tensors are never written into but by loading."""
        return {"scaling.scale": self.value, "scaling.good_steps": self.good_steps}


class FiniteCheck:
    """Decides whether an update may be made of a step's losses and gradient."""

    def __init__(self, stops: bool, late: bool) -> None:
        """`stops`: whether the run ends at a number that is not finite, and does not skip the step. `late`: whether the
        host hears of a step while it computes the next one."""
        self._stops, self.late = stops, late
        self._unread: tuple[int, ToHost] | None = None  # step; losses, norm and maybe scale that were not looked at

    def used(self, step: int, losses: Tensor, norm: Tensor, scale: Tensor | None = None) -> Tensor | bool:
        """Whether an update is made; where the host hears of it late, a bool scalar on the device. Errors: `NotFinite`,
        maybe of the step before."""
        if not self.late:
            return self.check(step, losses, norm, scale)
        self.settle()
        self._unread = step, ToHost(losses, norm, *([] if scale is None else [scale]))
        return torch.isfinite(losses).all() & torch.isfinite(norm).to(losses.device)

    def check(self, step: int, losses: Tensor, norm: Tensor, scale: Tensor | None = None) -> bool:
        """Whether an update may be made of a gradient with this norm and these losses of the step's micro-batches
        (summed over ranks: [M]): the same on every rank. The host waits for the device here. `scale`: that of the loss;
        a step that it made overflow is left out, whatever the run says of others. Errors: `NotFinite`, unless the run
        says to skip such steps."""
        bad = (~torch.isfinite(losses)).nonzero().flatten().tolist()
        if not bad and bool(torch.isfinite(norm)):
            return True
        if not bad and scale is not None and float(scale) > LOWEST_SCALE:
            return False
        if self._stops:
            raise NotFinite(step, bad, float(norm))
        return False

    def settle(self) -> None:
        """Wait for the last update. Errors: `NotFinite`, where it was not made and the run says to stop then."""
        unread, self._unread = self._unread, None
        if unread is not None:
            step, numbers = unread
            self.check(step, *numbers.wait())


@dataclass
class Part:
    """This rank's part of the gradient of one parameter."""

    name: str
    parameter: Tensor  # as the optimizer has it
    gradient: Tensor  # whole, row-sparse, or a DTensor
    counted: float = 1.0  # of its squares, in the norm: 1 / copies, or 0 where another rank answers for it
    spread: Callable[[str, Tensor], Tensor] = as_it_is  # its name and a plain part -> the DTensor it is a part of

    @property
    def values(self) -> Tensor:
        """This rank's numbers."""
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
        """The 2-norm of the whole: float32 scalar. Each parameter's squares are summed in float64, then those of all in
        the model's order, whoever holds them; rounded once. Collective."""
        own = torch.stack(torch._foreach_norm([part.values for part in self.parts], 2, torch.float64)).square()
        counted = [part.counted for part in self.parts]
        if set(counted) != {1.0}:
            own *= to_device(torch.tensor(counted, dtype=torch.float64), own.device)
        squares = torch.zeros(len(self.names), dtype=torch.float64, device=own.device)  # [P]
        squares.index_add_(0, on_device(self._places, squares.device), own)
        return self._add_up(squares).sum().sqrt().float()

    def whole(self, world: World) -> dict[str, Tensor]:
        """The whole gradient by parameter name, on rank 0; empty elsewhere. Collective."""
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
                part.parameter.grad = part.gradient.to_dense() if part.gradient.is_sparse else part.gradient

    def take_back(self) -> None:
        """The parameters hold none any more."""
        for part in self.parts:
            part.parameter.grad = None
