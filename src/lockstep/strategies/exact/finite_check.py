"""Decide from a step's losses and gradient norm whether to apply its update: the same on every rank."""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.distributed.torch_internals import ToHost
from lockstep.strategies.exact.loss_scale import LOWEST_SCALE


class NotFinite(ArithmeticError):
    """A loss or gradient is not finite, under `on_nonfinite: stop`; nothing was updated."""

    def __init__(self, step: int, micro_batches: list[int], norm: float) -> None:
        super().__init__(f"step {step}: micro-batches {micro_batches}, gradient norm {norm}")
        self.step, self.micro_batches, self.norm = step, micro_batches, norm  # micro-batches whose loss is not finite


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
