"""The interface of a strategy: how one optimizer step is computed by all ranks together.

In: a `StepBatch` with this rank's micro-batches, and the learning rate. Out: a `StepResult`, and weights that are the
same on all ranks.
Every method is collective: all ranks call it, in the same order. A strategy keeps no schedule, step count, log or file.
It is composed of parts: `Precision`, `StepTotals`, `TrainedWeights` (who updates what), `WeightUpdate`, `TrainingState`
(what is saved), `MemoryEstimate` and `Recomputation`. Read `single.py` first, from beginning to end; `abilities.py` has
how a strategy survives the loss of a rank.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch.distributed as dist
from torch import Tensor, nn

from lockstep.config.run import RunError
from lockstep.data.batch import MicroBatch, StepBatch, StepResult
from lockstep.data.job import Job, StrategyRules
from lockstep.data.job import WeightFormats as WeightFormats
from lockstep.distributed.randomness import seed_everything
from lockstep.distributed.step_timer import StepTimer
from lockstep.distributed.world import World, all_reduce
from lockstep.strategies.engines import side_effects
from lockstep.strategies.engines.side_effects import SideEffects, preserved
from lockstep.strategies.exact.finite_check import NotFinite as NotFinite
from lockstep.strategies.exact.gradient import Gradient
from lockstep.strategies.exact.precision import Precision
from lockstep.strategies.exact.reduction_tree import share
from lockstep.strategies.exact.statistics import Statistics
from lockstep.strategies.exact.step_totals import StepTotals
from lockstep.strategies.exact.stepper import Stepper
from lockstep.strategies.exact.trained_weights import TrainedWeights
from lockstep.strategies.exact.training_state import TrainingState
from lockstep.strategies.exact.update import WeightUpdate
from lockstep.strategies.observer import StepObserver
from lockstep.strategies.recomputation import Recomputation
from lockstep.tasks.task import Task

if TYPE_CHECKING:
    from lockstep.tasks.models.inference import Decoding


@dataclass(frozen=True)
class DataShard:
    """This rank's position in data parallelism. Ranks with the same `rank` process the same examples together (pipeline
    stages, tensor parallel ranks)."""

    rank: int
    size: int
    all_reduce: Callable[[Tensor], Tensor]  # over the ranks that work on different examples, in place; collective


def all_reduce_in(group: dist.ProcessGroup) -> Any:
    """Return a function that sums a tensor over the ranks of a group, in place."""

    return lambda tensor: all_reduce(tensor, group)


class Strategy(StrategyRules):
    """One optimizer step over all ranks: `train_step` updates the weights once, with the gradient of `sum of losses /
    targets` over all micro-batches of all ranks, clipped once, at the given learning rate."""

    plugin: ClassVar[str] = "strategies"
    recomputation: ClassVar[type[Recomputation] | None] = None  # of micro-batches, for `sdc_check`
    waits_inside: ClassVar[tuple[str, ...]] = ("reduction", "overlapped")
    """Phases of a step (`StepTimer`) in which this rank also waits for other ranks."""

    task: Task
    model: nn.Module  # this rank's part of the model, with the task's parameter names
    weights: TrainedWeights  # the tensors that this rank updates; created by `build`, like `update` and `state`
    update: WeightUpdate
    state: TrainingState  # what is saved, loaded and exported
    data_parallel: DataShard
    statistics: Statistics | None = None  # the model's running statistics, if the strategy reduces them
    effects: SideEffects = SideEffects()  # side effects of forward, recorded by `dry_run`
    remarks: tuple[str, ...] = ()  # for the user, at the start of a run
    observer: StepObserver | None = None  # observes every `train_step`; of the same class on every rank

    def __init__(self, job: Job, world: World) -> None:
        """Record the topology, without building or communicating anything."""
        self.job, self.run, self.world = job, job.run, world
        self.phases = StepTimer(world.device)
        self.data_parallel = DataShard(world.rank, world.size, world.all_reduce)
        self.precision = Precision(job, world.device)
        self.totals = StepTotals(world.device, len(job.run.data.sources or ()))

    def own_micro_batches(self) -> Iterable[int]:
        """Return the indices of the micro-batches that this rank runs in a step, ascending."""
        return share(self.run.micro_batches, self.data_parallel.rank, self.data_parallel.size)

    @abstractmethod
    def build(self, task: Task) -> None:
        """Build the model, its wrapper and the optimizer."""

    def set_optimizer(self, optimizer: Stepper) -> None:
        """Create the update that uses this optimizer, and the state that is saved."""
        self.update = WeightUpdate(self.job, self.model, self.precision, optimizer, self.weights.changed)
        self.state = self.make_state()

    def make_state(self) -> TrainingState:
        """Return what this rank saves and loads."""
        return TrainingState(self.weights, self.update.stepper, self.precision.loss_scale, self.world)

    # -- one step ----------------------------------------------------------------------------------------------------

    @abstractmethod
    def train_step(self, batch: StepBatch, learning_rate: float) -> StepResult:
        """Run one step: all micro-batches, one update."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over the ranks with their own losses and gradients, in place. Collective."""
        return self.data_parallel.all_reduce(tensor)

    def all_reduce_totals(
        self, losses: Tensor, uses: Sequence[int], also: Sequence[int] = ()
    ) -> tuple[Tensor, list[int]]:
        """Sum over ranks the losses of the step's micro-batches [M], the counts of micro-batches that gave each
        trainable parameter a gradient, and other counts. Collective. Errors: `RunError` on every rank if there is no
        gradient at all."""
        losses, counts = self.totals.all_reduce(losses, [*uses, *also], self.all_reduce)
        if counts.pop():
            self.effects = self.check_side_effects(replace(self.effects, switched=frozenset(["weights"])))
        if not any(counts[: len(uses)]):
            raise RunError(
                "LS4180",
                "no weight of the model gets a gradient: the loss does not depend on its trainable weights "
                "(check the loss of the task, and what is frozen or detached)",
            )
        return losses, counts

    def optimizer_step(
        self, batch: StepBatch, gradient: Gradient, learning_rate: float, losses: Tensor, uses: Sequence[int]
    ) -> StepResult:
        """Update the weights, then the running statistics. `losses` and `uses` are results of `all_reduce_totals`.
        Collective. Errors: `NotFinite`, also about the previous step."""
        with self.phases("optimizer"):
            norm, used = self.update.make(batch.step, gradient, learning_rate, losses, uses, self.observer)
        if self.statistics is not None:
            self.statistics.finish(self.data_parallel.all_reduce, used)
        return StepResult(losses.sum() / batch.targets, norm.to(self.world.device), used, self.totals.loss_sums_of)

    # -- dry run -----------------------------------------------------------------------------------------------------

    def dry_run(self, batch: StepBatch, then: Callable[[], None] = lambda: None) -> None:
        """Run a trial step that leaves no trace, so that running out of memory shows before training. `then`: called
        while optimizer state exists. Collective. Errors: `RunError` if forward changes state that would differ between
        ranks."""
        names = () if self.statistics is None else self.statistics.names
        self.effects = self.check_side_effects(side_effects.effects_of(self.model, self.forwards(batch), names))
        scale = self.precision.loss_scale
        with preserved(self.model, self.effects.written) as changed, scale.aside() if scale else nullcontext():
            self.train_step(batch, 0.0)  # learning rate 0: weights do not change
            self.update.settle()
            then()
            self.update.optimizer.state.clear()
        changed -= {*self.effects.written, *names}
        self.effects = self.check_side_effects(replace(self.effects, written=self.effects.written | changed))

    def forwards(self, batch: StepBatch) -> list[Callable[[], None]]:
        """Return functions that call forward with this rank's first and last micro-batch, to detect side effects; empty
        if no rank calls the model as a whole."""

        def call(micro: MicroBatch) -> None:
            seed_everything(self.run.seed, batch.step, micro.index)
            with self.precision.autocast():
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


def make_strategy(job: Job, world: World) -> Strategy:
    """Return the job's strategy, not built yet."""
    assert issubclass(job.strategy, Strategy), job.strategy
    return job.strategy(job, world)
