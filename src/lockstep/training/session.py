"""Bring up one rank of a job; used by training, `verify`, `bench` and `evaluate`.

In: a job, and a World that has not joined other ranks yet. Out: a `Session`, the objects that a rank works with.
`join_ranks` joins the other ranks and checks that all agree; `build_session` creates the task, the model and its data
loader.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from lockstep.checkpoint.checkpoint import Checkpoints
from lockstep.config.lazy import lazy
from lockstep.config.run import Run
from lockstep.data.job import Job
from lockstep.distributed.event_log import EventLog
from lockstep.distributed.randomness import seed_libraries
from lockstep.distributed.system_metrics import capacity, tensor_bytes
from lockstep.distributed.world import World
from lockstep.strategies.exact.training_state import Averaged, freeze
from lockstep.strategies.strategy import Strategy, make_strategy, shard_recovery
from lockstep.tasks.models.storage_dtype import counts
from lockstep.tasks.task import Task, make_task
from lockstep.track.tracker import Sample
from lockstep.training.data_loader import StepLoader
from lockstep.training.resolve import packages_of
from lockstep.training.train_state import TrainState

if TYPE_CHECKING:
    from lockstep.strategies.engines import blocks, cuda_graphs, region
    from lockstep.training import consistency_check
else:  # for several processes, and for compiled models
    (consistency_check,) = lazy("lockstep.training", "consistency_check")
    blocks, cuda_graphs, region = lazy("lockstep.strategies.engines", "blocks", "cuda_graphs", "region")


class Sinks:
    """Interface for logging during training; this base class discards everything."""

    def log(self, step: int, split: str, numbers: dict[str, float], closing: bool = False) -> None:
        """Log the numbers of a split after `step` updates. `closing`: they also appear in the closing table."""

    def advance(self, step: int) -> None:
        """Report that `step` updates are done. Collective."""

    def show(self, step: int, samples: Sequence[Sample]) -> None:
        """Show the model's outputs for a few examples."""


@dataclass(frozen=True)
class Session:
    """Objects that a rank works with. Use `dataclasses.replace` to set other sinks or another journal."""

    job: Job
    world: World
    task: Task
    strategy: Strategy  # built
    averaged: Averaged  # the strategy's state as saved, including the moving average if enabled
    feed: StepLoader
    checkpoints: Checkpoints
    bytes_before: int  # bytes of tensors before the model was built
    journal: EventLog = field(default_factory=lambda: EventLog(None))
    sinks: Sinks = field(default_factory=Sinks)
    between_steps: Callable[[TrainState], None] = lambda state: None  # called after all hooks; set by recovery
    compared: str = ""  # result of the comparison with a plain computation, for display

    @property
    def run(self) -> Run:
        """The run file."""
        return self.job.run

    def new_state(self, step: int = 0) -> TrainState:
        """New training state after `step` updates, with no other history."""
        feed, lengths = self.feed, self.task.unit is not None
        return TrainState(self.job, feed.total, feed.sources, lengths, step)


def gloo_threads(job: Job) -> int:
    """Threads of each gloo group. One if functional collectives may be used; a class's own declaration is not
    inherited."""
    return vars(job.strategy).get("gloo_threads", 1) if job.run.strategy.exact else 1


def join_ranks(job: Job, world: World) -> None:
    """Join the other ranks and check that all have the same job. Collective. Errors: `RunError`, `Unreached`."""
    world.gloo_threads = gloo_threads(job)
    world.join()
    if world.size == 1 and world.members is None:  # nobody is there, and nobody joins
        return
    more = {"what is padded": job.padding or "nothing"} if job.task.head else {}
    versions = consistency_check.versions_of(packages_of(job))
    consistency_check.agree(job, world, more | versions)


def build_session(
    job: Job,
    world: World,
    say: Callable[[str], None] = lambda text: None,
    trained: bool = False,
) -> Session:
    """Build task, model and data loader. `say` prints messages about checkpoints. `trained`: the model is already
    trained, not the starting point of training. Collective. Errors: `RunError`."""
    if job.task.head:
        from lockstep.training import preload  # noqa: F401 - in a process that was not forked from one that has it
    before, run, prepared = tensor_bytes(), job.run, job.data
    task = make_task(job)
    # a joining rank is built together with its new group
    recovery = shard_recovery(job.strategy)
    later = world.joining and recovery is not None and recovery.rebuilds
    fitted = job if later else resolve_by_memory(job, task, world)  # depends on the memory of all machines
    if fitted.run.model.compile == "whole":
        fitted = region.fitted(fitted)
    strategy, whole = make_strategy(fitted, world), fitted.run
    seed_libraries(run.seed)  # for a task whose `model` initializes weights itself
    if not later:
        strategy.build(task)
        if whole.model.compile == "whole":
            region.warm_up(strategy, task)
            if whole.model.cuda_graphs:
                cuda_graphs.warm_up(strategy, task)
        elif whole.model.compiles_layers:
            blocks.warm_up(strategy, task)
        if task.needs_reference:
            from lockstep.training import reference_pass

            reference_pass.provide(world, task, strategy, prepared, trained)
    feed = StepLoader(task, () if later else strategy.own_micro_batches(), world.device)
    every = feed.interval(run.checkpoint.every)
    checkpoints = Checkpoints(job, world, feed.total, say, every)
    # the job as it was resolved: `strategy.run` has the options that the memory of all machines decided
    return Session(job, world, task, strategy, Averaged(strategy), feed, checkpoints, before)


def resolve_by_memory(job: Job, task: Task, world: World) -> Job:
    """Return the job with the strategy options that depend on the machines' memory filled in; equal on every rank.
    Collective."""
    run, estimate = job.run, job.strategy.memory
    if not estimate.needs_choice(job):
        return job
    memory = min(world.all_gather(capacity(world.device, world.local_size)))
    here = replace(job, processes=world.size)
    return job.having(estimate.choose(here, *counts(freeze(run.model, task.model(empty=True))), memory))
