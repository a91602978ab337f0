"""The number formats of forward and backward: `precision` of the run file, the same under every strategy.

In: a run and a device. Out: autocast for the forward, and the scaled loss for backward. Weights, gradients
and the optimizer's state stay in float32, or in the formats of `model.dtype`.

The loss scale of fp16 is the same on every rank. It follows torch's GradScaler (Micikevicius et al., "Mixed Precision
Training", ICLR 2018): halved when the gradient overflows, doubled after `SCALE_INTERVAL` steps in a row without
overflow. It is a power of two, so it changes no bit of a float32 gradient unless fp16 overflows or underflows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from lockstep.data.job import Job

_LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """Autocast and loss scale of one run."""

    def __init__(self, job: Job, device: torch.device) -> None:
        run = job.run
        self.device, self._dtype = device, _LOW.get(run.precision)
        self._casts = self._dtype is not None and not run.model.trained_in_bfloat16
        self.loss_scale = LossScale(device) if run.precision == "fp16" else None

    def autocast(self, enabled: bool = True) -> torch.autocast:
        """Return a context for bf16 or fp16 if the run uses it."""
        return torch.autocast(self.device.type, self._dtype or torch.bfloat16, enabled and self._casts)

    def scaled(self, loss: Tensor) -> Tensor:
        """Return the loss times the loss scale, if there is one; backward starts from it."""
        return loss if self.loss_scale is None else loss * self.loss_scale.value


FIRST_SCALE = 2.0**16
SCALE_INTERVAL = 2000  # steps in a row without overflow before the scale doubles
LOWEST_SCALE = 1.0  # at this scale, a non-finite gradient is not the scale's fault
HIGHEST_SCALE = 2.0**126  # its inverse is still a normal float32


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
