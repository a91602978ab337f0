"""The update of a step: the norm of the whole gradient, a check that it is finite, one clip, one optimizer step.

In: this rank's part of each parameter's gradient, whole or sharded, and the losses of all micro-batches. Out: weights
after one update, or unchanged if a number was not finite; the norm and the decision are the same on every rank. Shared
by all strategies; DeepSpeed with `exact: false` makes its own update.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.config.run import RunError
from lockstep.data.job import Job
from lockstep.distributed.sharded import gather
from lockstep.distributed.torch_internals import ToHost, local, on_device, to_device, values_of
from lockstep.distributed.world import World
from lockstep.strategies.engines.side_effects import first_few
from lockstep.strategies.exact import stepper
from lockstep.strategies.exact.precision import LOWEST_SCALE, Precision
from lockstep.strategies.exact.stepper import as_it_is
from lockstep.strategies.observer import StepObserver


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
