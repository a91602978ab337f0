"""Loss scaling for fp16: gradients that would be too small for it are kept by a factor, and a step in which they are
too large is left out.

In: the loss of each micro-batch, and what the whole gradient of a step came to. Out: the loss times the scale; the
scale of the next step, the same on every rank. The rule is that of torch's GradScaler (Micikevicius et al., "Mixed
Precision Training", ICLR 2018): halved where the gradient overflows, doubled after so many steps in a row where it does
not. It is a power of two, so that it changes no bit of a float32 gradient but where fp16 overflows or underflows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

START = 2.0**16
INTERVAL = 2000  # steps in a row without an overflow, after which it is doubled
LOWEST = 1.0  # a gradient that is not finite at this scale is not so by the scale
HIGHEST = 2.0**126  # its inverse is still an ordinary float32


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
