"""The interface of a strategy: how one optimizer step is computed by all ranks together.

In: a `StepBatch` with this rank's micro-batches, and the learning rate. Out: a `StepResult`, and weights that are the
same on all ranks.
Every method is collective: all ranks call it, in the same order. A strategy keeps no schedule, step count, log or file.
It is composed of parts: `Precision`, `StepTotals`, `TrainedWeights` (who updates what), `WeightUpdate`, `TrainingState`
(what is saved), `MemoryEstimate`, `DryRun` (the trial before the first step), `Recomputation` (of a micro-batch, for
`sdc_check`) and `recovery.py` (from the loss of a rank). Read `single.py` first, from beginning to end.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from lockstep.config.run import RunError
from lockstep.data.batch import MicroBatch, StepBatch, StepResult
from lockstep.data.job import Job, StrategyRules
from lockstep.data.job import WeightFormats as WeightFormats
from lockstep.distributed.randomness import seed_everything
from lockstep.distributed.step_timer import StepTimer
from lockstep.distributed.world import DataShard, World, all_reduce
from lockstep.strategies.engines import attention_kernels, side_effects
from lockstep.strategies.engines.side_effects import SideEffects, preserved
from lockstep.strategies.exact.gradient_sum import share
from lockstep.strategies.exact.precision import Precision
from lockstep.strategies.exact.step_totals import Statistics, StepTotals
from lockstep.strategies.exact.stepper import Stepper
from lockstep.strategies.exact.training_state import TrainedWeights, TrainingState
from lockstep.strategies.exact.update import Gradient, WeightUpdate
from lockstep.strategies.exact.update import NotFinite as NotFinite
from lockstep.strategies.observer import StepObserver
from lockstep.tasks.task import Task

if TYPE_CHECKING:
    from lockstep.strategies.recovery import ReplicaRecovery, ShardRecovery
    from lockstep.tasks.models.inference import Decoding


def all_reduce_in(group: dist.ProcessGroup) -> Callable[[Tensor], Tensor]:
    """Return a function that sums a tensor over the ranks of a group, in place."""

    return lambda tensor: all_reduce(tensor, group)


class Strategy(StrategyRules):
    """One optimizer step over all ranks: `train_step` updates the weights once, with the gradient of `sum of losses /
    targets` over all micro-batches of all ranks, clipped once, at the given learning rate."""

    plugin: ClassVar[str] = "strategies"
    recomputation: ClassVar[type[Recomputation] | None] = None  # of micro-batches, for `sdc_check`
    recovery: ClassVar[type[ReplicaRecovery] | type[ShardRecovery] | None] = None  # from the loss of a rank

    task: Task
    model: nn.Module  # this rank's part of the model, with the task's parameter names
    weights: TrainedWeights  # the tensors that this rank updates; created by `build`, like `update` and `state`
    update: WeightUpdate
    state: TrainingState  # what is saved, loaded and exported
    data_parallel: DataShard
    statistics: Statistics | None = None  # the model's running statistics, if the strategy reduces them
    build_empty = False  # whether to `build` without weights, because a state is loaded next
    remarks: tuple[str, ...] = ()  # for the user, at the start of a run
    observer: StepObserver | None = None  # observes every `train_step`; of the same class on every rank

    def __init__(self, job: Job, world: World) -> None:
        """Record the topology, without building or communicating anything."""
        self.job, self.run, self.world = job, job.run, world
        self.phases = StepTimer(world.device)
        self.data_parallel = DataShard(world.rank, world.size, world.all_reduce)
        self.precision = Precision(job, world.device)
        self.dry_run = DryRun(self)
        self.totals = StepTotals(world.device, len(job.run.data.sources or ()), lambda: self.dry_run.note_switched())
        self.totals.sum_over_ranks = lambda tensor: self.data_parallel.all_reduce(tensor)  # a regrouping replaces it

    def own_micro_batches(self) -> Iterable[int]:
        """Return the indices of the micro-batches that this rank runs in a step, ascending."""
        return share(self.run.micro_batches, self.data_parallel.rank, self.data_parallel.size)

    @abstractmethod
    def build(self, task: Task) -> None:
        """Build the model, its wrapper and the optimizer."""

    def set_optimizer(self, optimizer: Stepper, state: TrainingState | None = None) -> None:
        """Create the update that uses this optimizer. `state`: what is saved, if the ranks hold other tensors than
        whole weights."""
        self.update = WeightUpdate(self.job, self.model, self.precision, optimizer, self.weights.changed)
        self.state = state or TrainingState(self.weights, optimizer, self.precision.loss_scale, self.world)
        if self.world.members is not None and self.state.has_copies:
            self.update.barrier = lambda: self.world.barrier()

    # -- one step ----------------------------------------------------------------------------------------------------

    @abstractmethod
    def train_step(self, batch: StepBatch, learning_rate: float) -> StepResult:
        """Run one step: all micro-batches, one update."""

    def optimizer_step(
        self, batch: StepBatch, gradient: Gradient, learning_rate: float, losses: Tensor, uses: Sequence[int]
    ) -> StepResult:
        """Update the weights, then the running statistics. `losses` and `uses` are results of `totals.all_reduce`.
        Collective. Errors: `NotFinite`, also about the previous step."""
        with self.phases("optimizer"):
            norm, used = self.update.make(batch.step, gradient, learning_rate, losses, uses, self.observer)
        if self.statistics is not None:
            self.statistics.finish(self.data_parallel.all_reduce, used)
        return StepResult(losses.sum() / batch.targets, norm.to(self.world.device), used, self.totals.loss_sums_of)

    # -- evaluation --------------------------------------------------------------------------------------------------

    @abstractmethod
    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return logits in evaluation mode, without gradients."""

    def generate(self, inputs: Mapping[str, Tensor], how: Decoding) -> Tensor:
        """Generate tokens, int64 [B, N]. Each rank passes its own inputs. Collective."""
        from lockstep.tasks.models import inference

        assert (how.beams, how.temperature) == (1, 0), "`resolve` refuses decoding other than greedy"
        return inference.by_forward(
            self.forward, lambda count: self.data_parallel.all_reduce(count.float()), inputs, how
        )

    def close(self) -> None:
        """Release all resources."""


def recomputes(job: Job) -> bool:
    """Whether a rank of this job can compute any micro-batch of a step again."""
    assert issubclass(job.strategy, Strategy), job.strategy
    return job.strategy.recomputation is not None and job.strategy.recomputation.supports(job)


def shard_recovery(strategy: type[StrategyRules]) -> type[ShardRecovery] | None:
    """Return the `ShardRecovery` of a strategy's class; None for one whose ranks hold the whole state, or that has no
    recovery."""
    recovery: type[ShardRecovery] | None = getattr(strategy, "recovery", None)
    return recovery if recovery is not None and recovery.of_shards else None


def make_strategy(job: Job, world: World) -> Strategy:
    """Return the job's strategy, not built yet."""
    assert issubclass(job.strategy, Strategy), job.strategy
    return job.strategy(job, world)


class Recomputation(ABC):
    """Recomputes micro-batches of a strategy, for `sdc_check`."""

    together: ClassVar[bool] = False  # whether `compute` is collective

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy

    @classmethod
    def supports(cls, job: Job) -> bool:
        """Whether this feature works with the job's options."""
        return True

    @abstractmethod
    def compute(self, step: int, micro: MicroBatch, targets: float) -> None:
        """Compute a micro-batch outside its step, on any rank, while no parameter has a `.grad`. Only the observer
        receives the gradient."""

    @abstractmethod
    def replicated_weights(self) -> list[Tensor]:
        """Return the weights that every rank holds in full."""

    @abstractmethod
    def replicated_state(self) -> list[Tensor]:
        """Return the part of the state that every rank holds in full. Collective."""


# -- the trial step before training ------------------------------------------------------------------------------------


class DryRun:
    """The trial step of a strategy, and what it revealed: insufficient memory, and side effects of forward. Everything
    except `effects` is unchanged by it. Strategies whose engine cannot reproduce some side effects refuse them in their
    own `DryRun`. Every method is collective."""

    def __init__(self, strategy: Strategy) -> None:
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
            device, exact = strategy.world.device, bool(strategy.run.strategy.exact)
            with attention_kernels.checked(strategy.model, device, exact, strategy.world.all_gather):
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
