"""The number formats of forward and backward: `precision` of the run file, the same under every strategy.

In: a run and a device. Out: autocast for the forward, and the scaled loss for backward. Weights, gradients
and the optimizer's state stay in float32, or in the formats of `model.dtype`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.data.job import Job
from lockstep.strategies.exact.loss_scale import LossScale

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
