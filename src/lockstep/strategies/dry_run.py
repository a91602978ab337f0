"""The trial step before training: it shows insufficient memory and side effects of forward before the first step.

In: a built strategy, and the batch of the longest examples. Out: `effects`, the same on every rank; everything else is
unchanged. Strategies whose engine cannot reproduce some side effects refuse them in their own `DryRun`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Protocol

from torch import nn
from typing_extensions import override

from lockstep.config.run import Run, RunError
from lockstep.data.batch import MicroBatch, StepBatch, StepResult
from lockstep.distributed.randomness import seed_everything
from lockstep.distributed.world import World
from lockstep.strategies.engines import side_effects
from lockstep.strategies.engines.side_effects import SideEffects, preserved
from lockstep.strategies.exact.precision import Precision
from lockstep.strategies.exact.step_totals import Statistics
from lockstep.strategies.exact.update import WeightUpdate


class Trainable(Protocol):
    """What a trial step reads of a strategy."""

    run: Run
    world: World
    model: nn.Module
    precision: Precision
    update: WeightUpdate

    @property
    def statistics(self) -> Statistics | None: ...

    def train_step(self, batch: StepBatch, learning_rate: float) -> StepResult: ...


class DryRun:
    """The trial step of a strategy, and what it revealed. Every method is collective."""

    def __init__(self, strategy: Trainable) -> None:
        self.strategy = strategy
        self.effects = SideEffects()  # side effects of forward

    def __call__(self, batch: StepBatch, then: Callable[[], None] = lambda: None) -> None:
        """Run a trial step that leaves no trace. `then`: called while optimizer state exists. Errors: `RunError` if
        forward changes state that would differ between ranks."""
        strategy = self.strategy
        names = () if strategy.statistics is None else strategy.statistics.names
        self.effects = self.check(side_effects.effects_of(strategy.model, self.forwards(batch), names))
        scale = strategy.precision.loss_scale
        with preserved(strategy.model, self.effects.written) as changed, scale.aside() if scale else nullcontext():
            strategy.train_step(batch, 0.0)  # learning rate 0: weights do not change
            strategy.update.settle()
            then()
            strategy.update.optimizer.state.clear()
        changed -= {*self.effects.written, *names}
        self.effects = self.check(replace(self.effects, written=self.effects.written | changed))

    def forwards(self, batch: StepBatch) -> list[Callable[[], None]]:
        """Return functions that call forward with this rank's first and last micro-batch, to detect side effects; empty
        if no rank calls the model as a whole."""
        strategy = self.strategy

        def call(micro: MicroBatch) -> None:
            seed_everything(strategy.run.seed, batch.step, micro.index)
            with strategy.precision.autocast():
                strategy.model(**micro.inputs)

        return [partial(call, micro) for micro in (batch.micro_batches[0], batch.micro_batches[-1])]

    def check(self, effects: SideEffects) -> SideEffects:
        """Return the side effects on all ranks. Errors: `RunError`, on every rank, for effects that this strategy
        cannot reproduce."""
        strategy = self.strategy
        agreed = effects.together(strategy.world.all_gather)
        if agreed.replaced:
            raise RunError("LS4181", f"model(): {side_effects.replacement(agreed.replaced)}")
        if agreed.per_process and strategy.world.size > 1:
            averages = strategy.statistics is not None
            raise RunError("LS4182", side_effects.refusal(strategy.run.strategy.name, agreed, strategy.model, averages))
        return agreed

    def note_switched(self) -> None:
        """Record that forward switched off a weight's `requires_grad` in a step. Errors: those of `check`."""
        self.effects = self.check(replace(self.effects, switched=frozenset(["weights"])))


class WithoutForwards(DryRun):
    """The trial step of a strategy in which no rank calls the whole model directly."""

    @override
    def forwards(self, batch: StepBatch) -> list[Callable[[], None]]:
        return []
