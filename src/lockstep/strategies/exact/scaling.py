"""Numbers that are not finite: the loss scale of fp16, which avoids them, and the check of a step before its update.

In: the loss of each micro-batch, and the norm of a step's whole gradient. Out: the loss times the scale; the scale of
the next step; whether an update may be made. All are the same on every rank. The rule of the scale is that of torch's
GradScaler (Micikevicius et al., "Mixed Precision Training", ICLR 2018): halved where the gradient overflows, doubled
after so many steps in a row where it does not. It is a power of two, so that it changes no bit of a float32 gradient
but where fp16 overflows or underflows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from lockstep.distributed.transfers import ToHost

START = 2.0**16
INTERVAL = 2000  # steps in a row without an overflow, after which it is doubled
LOWEST = 1.0  # a gradient that is not finite at this scale is not so by the scale
HIGHEST = 2.0**126  # its inverse is still an ordinary float32


class NotFinite(ArithmeticError):
    """A loss or a gradient that is no finite number, under `on_nonfinite: stop`; nothing was updated."""

    def __init__(self, step: int, micro_batches: list[int], norm: float) -> None:
        super().__init__(f"step {step}: micro-batches {micro_batches}, gradient norm {norm}")
        self.step, self.micro_batches, self.norm = step, micro_batches, norm  # micro-batches whose loss is not finite


class LossScale:
    """Of one run. Float32 scalars on the device; nobody waits for it here."""

    def __init__(self, device: torch.device) -> None:
        self.value = torch.tensor(START, device=device)
        self.good_steps = torch.zeros((), device=device)  # in a row, since it was changed
        self.overflowed = torch.zeros((), dtype=torch.bool, device=device)  # the last step, by this scale

    def follow(self, losses: Tensor, norm: Tensor) -> None:
        """After a step: `losses` [M] and `norm` of the whole gradient, unscaled, the same on every rank. A loss that is
        not finite says nothing of the scale, which then stays."""
        sound = torch.isfinite(losses).all()
        whole = torch.isfinite(norm).to(self.value.device)
        self.overflowed = sound & ~whole & (self.value > LOWEST)
        good = torch.where(whole, self.good_steps + 1, torch.zeros_like(self.good_steps))
        grows = good >= INTERVAL
        scale = torch.where(whole, torch.where(grows, self.value * 2, self.value), self.value / 2)
        self.value = torch.where(sound, scale.clamp(LOWEST, HIGHEST), self.value)
        self.good_steps = torch.where(sound, torch.where(grows, 0.0, good), self.good_steps)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """In here the scale is 1, and afterwards what it was."""
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
        if not bad and scale is not None and float(scale) > LOWEST:
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
