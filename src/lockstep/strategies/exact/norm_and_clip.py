"""The gradient of a step, sharded or not; the loss scale of fp16; the check for non-finite numbers.

In: this rank's part of each parameter's gradient, and the loss of each micro-batch. Out: the norm of the whole
gradient; the clipped gradient, in `.grad` while the optimizer steps; the scaled loss and the next loss scale; whether
to apply the update. All results are the same on every rank.
The loss scale follows torch's GradScaler (Micikevicius et al., "Mixed Precision Training", ICLR 2018): halved when the
gradient overflows, doubled after `SCALE_INTERVAL` steps in a row without overflow. It is a power of two, so it changes
no bit of a float32 gradient unless fp16 overflows or underflows.
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
from lockstep.strategies.exact.reduction_tree import clip_
from lockstep.strategies.exact.stepper import as_it_is

FIRST_SCALE = 2.0**16
SCALE_INTERVAL = 2000  # steps in a row without overflow before the scale doubles
LOWEST_SCALE = 1.0  # at this scale, a non-finite gradient is not the scale's fault
HIGHEST_SCALE = 2.0**126  # its inverse is still a normal float32


class NotFinite(ArithmeticError):
    """A loss or gradient is not finite, under `on_nonfinite: stop`; nothing was updated."""

    def __init__(self, step: int, micro_batches: list[int], norm: float) -> None:
        super().__init__(f"step {step}: micro-batches {micro_batches}, gradient norm {norm}")
        self.step, self.micro_batches, self.norm = step, micro_batches, norm  # micro-batches whose loss is not finite


class LossScale:
    """The loss scale of an fp16 run: float32 scalars on the device, so that the host never waits for them."""

    def __init__(self, device: torch.device) -> None:
        self.value = torch.tensor(FIRST_SCALE, device=device)
        self.good_steps = torch.zeros((), device=device)  # in a row, since it was changed
        self.overflowed = torch.zeros((), dtype=torch.bool, device=device)  # the last step, by this scale

    def follow(self, losses: Tensor, norm: Tensor) -> None:
        """Update the scale after a step. `losses` [M] and `norm` of the whole gradient: unscaled, the same on every
        rank. A non-finite loss leaves the scale as it is, because it says nothing about the scale."""
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
        """Return the tensors to save in a checkpoint. Only loading writes into them."""
        return {"scaling.scale": self.value, "scaling.good_steps": self.good_steps}


class FiniteCheck:
    """Decides from a step's losses and gradient norm whether to apply the update."""

    def __init__(self, stops: bool, late: bool) -> None:
        """`stops`: a non-finite number ends the run (else the step is skipped). `late`: the host checks a step while it
        computes the next one."""
        self._stops, self.late = stops, late
        self._unread: tuple[int, ToHost] | None = None  # step; its unchecked losses, norm and maybe scale

    def accept(self, step: int, losses: Tensor, norm: Tensor, scale: Tensor | None = None) -> Tensor | bool:
        """Whether to apply the update; with `late`, a bool scalar on the device. Errors: `NotFinite`, possibly about
        the previous step."""
        if not self.late:
            return self.check(step, losses, norm, scale)
        self.wait()
        self._unread = step, ToHost(losses, norm, *([] if scale is None else [scale]))
        return torch.isfinite(losses).all() & torch.isfinite(norm).to(losses.device)

    def check(self, step: int, losses: Tensor, norm: Tensor, scale: Tensor | None = None) -> bool:
        """Whether to apply an update with this gradient norm and these losses of the step's micro-batches (summed over
        ranks: [M]): the same on every rank. The host waits for the device. `scale`: the loss scale; a step that
        overflowed because of it is skipped in any case. Errors: `NotFinite`, unless the run skips such steps."""
        bad = (~torch.isfinite(losses)).nonzero().flatten().tolist()
        if not bad and bool(torch.isfinite(norm)):
            return True
        if not bad and scale is not None and float(scale) > LOWEST_SCALE:
            return False
        if self._stops:
            raise NotFinite(step, bad, float(norm))
        return False

    def wait(self) -> None:
        """Check the last update, waiting for it. Errors: `NotFinite` if it was skipped and the run stops on non-finite
        numbers."""
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
