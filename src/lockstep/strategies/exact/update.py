"""The optimizer step that all strategies share: reduce losses, check the gradient, clip, step the optimizer.

In: the gradient of a step, sharded or not, and the losses of this rank's micro-batches. Out: weights after one update,
or unchanged if a number was not finite. DeepSpeed makes its own update and uses the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.config.run import Run, RunError
from lockstep.data.batch import MicroBatch, StepBatch, StepResult
from lockstep.distributed.randomness import seed_everything
from lockstep.distributed.sharded import Saved
from lockstep.distributed.world import World
from lockstep.strategies.engines import side_effects
from lockstep.strategies.engines.side_effects import SideEffects, first_few, preserved
from lockstep.strategies.exact import held_state, stepper
from lockstep.strategies.exact.norm_and_clip import FiniteCheck, Gradient
from lockstep.strategies.exact.statistics import SourceSums
from lockstep.strategies.optimizers import optimizer as optimizers
from lockstep.strategies.strategy import Strategy
from lockstep.tasks.models import quantized


class GradientUpdate(Strategy):
    """A strategy that reduces one gradient and makes one update with it."""

    named: dict[str, nn.Parameter]  # this rank's trained parameters, by the task's names
    optimizer: Any  # the stepper, or an engine's wrapper of it
    stepper: stepper.Stepper
    switched = 0  # micro-batches that switched off a weight's `requires_grad`; counted on whole models

    def __init__(self, run: Run, world: World) -> None:
        super().__init__(run, world)
        late = world.device.type == "cuda" and optimizers.rule(run.optim).heeds_skipped
        self.finite = FiniteCheck(run.on_nonfinite == "stop", late)
        self.sources = SourceSums(len(run.data.sources or ()))

    @property
    def parameter_count(self) -> int:
        return quantized.parameters(self.model)

    @property
    def trained_count(self) -> int:
        return sum(p.numel() for p in self.model.parameters() if p.requires_grad)

    # -- one step ----------------------------------------------------------------------------------------------------

    def scaled(self, loss: Tensor) -> Tensor:
        """Return the loss times the loss scale, if there is one; backward starts from it."""
        return loss if self.scaling is None else loss * self.scaling.value

    def loss_sum(self, outputs: Any, micro: MicroBatch) -> Tensor:
        """Return the loss sum of a micro-batch from the model's outputs: a scalar with its graph."""
        loss = self.sources.loss_sum(self.task, outputs, micro)
        if self.observer is not None:
            self.observer.loss(micro.index, loss)
        return loss

    def agree(self, losses: Tensor, uses: Sequence[int]) -> tuple[Tensor, list[int]]:
        """Sum over ranks the losses of the step's micro-batches [M], and the counts of micro-batches that gave each
        trainable parameter a gradient. Collective. Errors: `RunError` on every rank if there is no gradient at all."""
        losses, counts = self.sums_of_step(losses, [*uses, self.switched, self.sources.noted])
        self.sources.agree(counts.pop(), losses, self.sum_of_step)
        if counts.pop():
            self.effects = self.check_side_effects(replace(self.effects, switched=frozenset(["weights"])))
        if not any(counts):
            raise RunError(
                "LS4180",
                "no weight of the model gets a gradient: the loss does not depend on its trainable weights "
                "(check the loss of the task, and what is frozen or detached)",
            )
        return losses, counts

    def sums_of_step(self, losses: Tensor, numbers: Sequence[int]) -> tuple[Tensor, list[int]]:
        """Sum losses and counts over ranks. The counts stay in host memory, so there is no device synchronization.
        Collective."""
        counts = torch.tensor(numbers, dtype=torch.float64)
        if losses.device.type == "cpu":  # in one message
            losses, counts = self.sum_of_step(torch.cat([losses, counts])).split([len(losses), len(counts)])
        else:
            losses, counts = self.sum_of_step(losses), self.sum_of_step(counts)
        return losses, [int(count) for count in counts.tolist()]

    def sum_of_step(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over the ranks with their own losses and gradients, in place. Collective."""
        return self.data_parallel.sum(tensor)

    def optimizer_step(
        self, batch: StepBatch, gradient: Gradient, learning_rate: float, losses: Tensor, uses: Sequence[int]
    ) -> StepResult:
        """Check that the gradient is finite, clip it, set the learning rate and step the optimizer; then update the
        running statistics. `losses` and `uses` are results of `agree`. On CUDA, whether the update applies stays on the
        device: a skipped step leaves the weights unchanged, and the host learns of it in the next step. Collective.
        Errors: `NotFinite`, also about the previous step."""
        with self.phases("optimizer"):
            scale = None
            if self.scaling is not None:
                gradient.scale_(1 / (scale := self.scaling.value))
            norm = gradient.norm()
            if self.observer is not None:
                self.observer.reduced(gradient)
            used = self.apply_gradient(batch.step, gradient, norm, scale, learning_rate, losses, uses)
        if self.statistics is not None:
            self.statistics.finish(self.data_parallel.sum, used)
        return StepResult(losses.sum() / batch.targets, norm.to(self.world.device), used, self.sources.of_step)

    def zero_losses(self, batch: StepBatch) -> Tensor:
        """Return zeros for all micro-batches of a step [M]; each rank fills in its own."""
        return torch.zeros(batch.count, dtype=torch.float64, device=self.world.device)

    def apply_gradient(
        self,
        step: int,
        gradient: Gradient,
        norm: Tensor,
        scale: Tensor | None,
        learning_rate: float,
        losses: Tensor,
        uses: Sequence[int],
    ) -> Tensor | bool:
        """Run the part of `optimizer_step` that needs nothing more from other ranks."""
        if self.scaling is not None:
            self.scaling.follow(losses, norm)
        used = self.finite.accept(step, losses, norm, scale)
        if used is not False:
            gradient.clip_(norm, self.run.optim.max_grad_norm)
            gradient.assign_to_params(uses)
            stepper.set_rate(self.optimizer, learning_rate, used if isinstance(used, Tensor) else None)
            self.check_layout()
            self.optimizer.step()
        gradient.clear()
        if used is not False:
            self.weights_changed()
        return used

    def check_layout(self) -> None:
        """Refuse weights that are no longer contiguous in memory. Fused kernels ignore strides: they would add each
        number of the gradient to another weight. Errors: `RunError`."""
        weights = self.model.named_parameters()
        strided = [name for name, weight in weights if weight.requires_grad and not weight.is_contiguous()]
        if strided:
            raise RunError(
                "LS4460",
                f"model(): forward changes how {first_few(strided)} lies in memory, as to(memory_format=...) does, and "
                "the optimizer works on contiguous weights; convert the inputs instead, which is enough for "
                "channels_last kernels",
            )

    def settle(self) -> None:
        self.finite.wait()

    # -- dry run -----------------------------------------------------------------------------------------------------

    def dry_run(self, batch: StepBatch, then: Callable[[], None] = lambda: None) -> None:
        names = () if self.statistics is None else self.statistics.names
        self.effects = self.check_side_effects(side_effects.effects_of(self.model, self.forwards(batch), names))
        scaling = self.scaling.aside() if self.scaling else nullcontext()
        with preserved(self.model, self.effects.written) as changed, scaling:
            self.train_step(batch, 0.0)  # learning rate 0: weights do not change
            self.settle()
            then()
            self.optimizer.state.clear()
        changed -= {*self.effects.written, *names}
        self.effects = self.check_side_effects(replace(self.effects, written=self.effects.written | changed))

    def forwards(self, batch: StepBatch) -> list[Callable[[], None]]:
        """Return calls of forward with this rank's first and last micro-batch, to detect side effects; empty if no rank
        calls the model as a whole."""

        def call(micro: MicroBatch) -> None:
            seed_everything(self.run.seed, batch.step, micro.index)
            with self.autocast():
                self.model(**micro.inputs)

        return [partial(call, micro) for micro in (batch.micro_batches[0], batch.micro_batches[-1])]

    def check_side_effects(self, effects: SideEffects) -> SideEffects:
        """Return the side effects on all ranks. Collective. Errors: `RunError`, on every rank, for effects that this
        strategy cannot reproduce."""
        agreed = effects.together(self.world.all_gather)
        if agreed.replaced:
            raise RunError("LS4181", f"model(): {side_effects.replacement(agreed.replaced)}")
        if agreed.per_process and self.world.size > 1:
            raise RunError(
                "LS4182", side_effects.refusal(self.run.strategy.name, agreed, self.model, self.statistics is not None)
            )
        return agreed

    # -- state -------------------------------------------------------------------------------------------------------

    def updated_parts(self) -> list[tuple[str, Tensor]]:
        return [(name, parameter.detach()) for name, parameter in self.named.items()]

    def averaged(self) -> AbstractContextManager[bool]:
        return self.stepper.averaged(self.weights_changed)

    def sharded_state_dict(self) -> dict[str, Tensor]:
        return held_state.sharded(held_state.tensors_of(self.model), self.stepper, self.scaling)

    def load_sharded_state_dict(self, saved: Saved) -> None:
        held_state.load(saved, held_state.tensors_of(self.model), self.stepper, self.scaling)
