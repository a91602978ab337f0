"""The update of a step: compute the norm of the whole gradient, check that it is finite, clip once, step once.

In: the gradient of a step, whole or sharded, and the losses of all micro-batches. Out: weights after one update, or
unchanged if a number was not finite. Shared by all strategies; DeepSpeed with `exact: false` makes its own update.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from lockstep.config.run import RunError
from lockstep.data.job import Job
from lockstep.strategies.engines.side_effects import first_few
from lockstep.strategies.exact import stepper
from lockstep.strategies.exact.finite_check import FiniteCheck
from lockstep.strategies.exact.gradient import Gradient
from lockstep.strategies.exact.precision import Precision
from lockstep.strategies.observer import StepObserver


class WeightUpdate:
    """The optimizer of a strategy and its last update.

    If several ranks hold the same state (`barrier`), the update is all-or-nothing: no rank updates before all ranks
    can. A rank that lost contact and missed an update that others applied applies it later (`ready`).
    """

    def __init__(
        self,
        job: Job,
        model: nn.Module,
        precision: Precision,
        optimizer: stepper.Stepper,
        weights_changed: Callable[[], None],
    ) -> None:
        """`weights_changed`: called after each update; may be collective."""
        self._model, self._scale, self._limit = model, precision.loss_scale, job.run.optim.max_grad_norm
        self._weights_changed = weights_changed
        self.barrier: Callable[[], None] | None = None  # waits for all ranks
        self.stepper = optimizer
        self.optimizer: Any = optimizer  # the stepper, or an engine's wrapper of it
        late = precision.device.type == "cuda" and optimizer.rule.heeds_skipped
        self.finite = FiniteCheck(job.run.on_nonfinite == "stop", late)
        # Set before the barrier: if a rank is interrupted there, it applies its update later, alone.
        self.ready: Callable[[], Tensor | bool] | None = None
        self.incomplete = False  # whether an update was interrupted halfway

    def make(
        self,
        step: int,
        gradient: Gradient,
        learning_rate: float,
        losses: Tensor,
        uses: Sequence[int],
        observer: StepObserver | None = None,
    ) -> tuple[Tensor, Tensor | bool]:
        """Update the weights. `losses` [M] and `uses` (micro-batches that gave each parameter a gradient): summed over
        ranks. Returns the norm of the gradient before clipping, and whether the update was applied; on CUDA that stays
        on the device: a skipped step leaves the weights unchanged, and the host learns of it in the next step.
        Collective. Errors: `NotFinite`, also about the previous step."""
        scale = None if self._scale is None else self._scale.value
        if scale is not None:
            gradient.scale_(1 / scale)
        norm = gradient.norm()
        if observer is not None:
            observer.reduced(gradient)
        self.ready = partial(self._apply, step, gradient, norm, scale, learning_rate, losses, uses)
        if self.barrier is not None:
            self.barrier()
        return norm, self.apply_ready()

    def apply_ready(self) -> Tensor | bool:
        """Apply the update that `make` prepared. Collective only if the optimizer needs whole tensors."""
        assert self.ready is not None
        apply, self.ready = self.ready, None
        self.incomplete = True
        used = apply()
        self.incomplete = False
        return used

    def _apply(
        self,
        step: int,
        gradient: Gradient,
        norm: Tensor,
        scale: Tensor | None,
        learning_rate: float,
        losses: Tensor,
        uses: Sequence[int],
    ) -> Tensor | bool:
        if self._scale is not None:
            self._scale.follow(losses, norm)
        used = self.finite.accept(step, losses, norm, scale)
        if used is not False:
            gradient.clip_(norm, self._limit)
            gradient.assign_to_params(uses)
            stepper.set_rate(self.optimizer, learning_rate, used if isinstance(used, Tensor) else None)
            self._check_layout()
            self.optimizer.step()
        gradient.clear()
        if used is not False:
            self._weights_changed()
        return used

    def _check_layout(self) -> None:
        """Refuse weights that are no longer contiguous in memory. Fused kernels ignore strides: they would add each
        number of the gradient to another weight. Errors: `RunError`."""
        weights = self._model.named_parameters()
        strided = [name for name, weight in weights if weight.requires_grad and not weight.is_contiguous()]
        if strided:
            raise RunError(
                "LS4460",
                f"model(): forward changes how {first_few(strided)} lies in memory, as to(memory_format=...) does, and "
                "the optimizer works on contiguous weights; convert the inputs instead, which is enough for "
                "channels_last kernels",
            )

    def settle(self) -> None:
        """Wait for the last update. Errors: `NotFinite` if that update was skipped and the run stops on non-finite
        numbers."""
        self.finite.wait()
