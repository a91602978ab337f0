"""One rank of a job, brought up: training, `verify`, `bench` and `evaluate` all begin here.

In: a job, and a World that has joined nobody yet. Out: a `Session`, what a rank works with. `join_ranks` joins the
other ranks and compares with them what must be equal; `build_session` makes the task, the model and its feed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lockstep.checkpoint.checkpoint import Checkpoints
from lockstep.config.run import Run
from lockstep.distributed.consistency_check import agree, versions_of
from lockstep.distributed.event_log import EventLog
from lockstep.distributed.randomness import seed_libraries
from lockstep.distributed.system_metrics import tensor_bytes
from lockstep.distributed.world import World
from lockstep.strategies import strategy as strategies
from lockstep.strategies.abilities import ShardedRecovery
from lockstep.strategies.engines import blocks
from lockstep.strategies.exact.averaging import Averaged
from lockstep.strategies.strategy import Strategy
from lockstep.tasks.task import Task
from lockstep.track.tracker import Sample
from lockstep.training import reference_pass
from lockstep.training.data_loader import StepLoader
from lockstep.training.model_stats import resolve_options
from lockstep.training.resolve import Job, packages_of
from lockstep.training.train_state import TrainState


class Sinks:
    """Where numbers and texts go while a run trains; this one keeps nothing."""

    def log(self, step: int, split: str, numbers: dict[str, float], closing: bool = False) -> None:
        """Numbers of a split after `step` updates. `closing`: the closing table will have them, too."""

    def advance(self, step: int) -> None:
        """`step` updates are done. Collective."""

    def show(self, step: int, samples: Sequence[Sample]) -> None:
        """The model's answers to a few examples."""


@dataclass(frozen=True)
class Session:
    """The objects that a rank works with. `dataclasses.replace` gives it other sinks, or another journal."""

    job: Job
    world: World
    task: Task
    strategy: Strategy  # built
    averaged: Averaged  # the state of it that is saved, with the average of its weights where the run asks for one
    feed: StepLoader
    checkpoints: Checkpoints
    bytes_before: int  # of tensors, before there was a model
    journal: EventLog = field(default_factory=lambda: EventLog(None))
    sinks: Sinks = field(default_factory=Sinks)
    between_steps: Callable[[TrainState], None] = lambda state: None  # set by recovery; after all hooks
    compared: str = ""  # how its first numbers compare with a plain computation, for a person

    @property
    def run(self) -> Run:
        """The run file."""
        return self.job.run

    def new_state(self, step: int = 0) -> TrainState:
        """The state of a training that starts after `step` updates, with nothing else known about them."""
        feed, lengths = self.feed, self.task.unit is not None
        return TrainState(self.run, feed.total, feed.sources, lengths, step)


def gloo_threads(run: Run, strategy: type[Strategy]) -> int:
    """Threads of each gloo group. One where functional collectives may be made: what a class declares holds for itself
    and for no class that inherits from it."""
    return vars(strategy).get("gloo_threads", 1) if run.strategy.exact else 1


def join_ranks(job: Job, world: World) -> None:
    """Join the other ranks, and agree with them that all have the same. Collective. Errors: `RunError`, `Unreached`."""
    world.gloo_threads = gloo_threads(job.run, job.strategy)
    world.join()
    more = {"what is padded": job.padding or "nothing"} if job.task.head else {}
    agree(job.run, world, job.data.key, more | versions_of(packages_of(job.run, job.strategy)))


def build_session(
    job: Job,
    world: World,
    say: Callable[[str], None] = lambda text: None,
    trained: bool = False,
) -> Session:
    """Build task, model and feed. `say` prints what happens with checkpoints. `trained`: the model is a trained one,
    not the one that training starts from. Collective. Errors: `RunError`."""
    if job.task.head:
        from lockstep.training import preload  # noqa: F401 - in a process that was not forked from one that has it
    before, run, prepared = tensor_bytes(), job.run, job.data
    task = job.task(run, prepared)
    # built with those that it comes to
    later = world.joining and issubclass(job.strategy, ShardedRecovery) and job.strategy.supports_reshard
    whole = run if later else resolve_options(run, task, world)  # by the memory of all machines
    strategy_class = job.strategy if whole is run else strategies.strategy_class(whole)
    strategy = strategy_class(whole, world)
    seed_libraries(run.seed)  # for a task whose `model` draws weights by itself
    if not later:
        strategy.build(task)
        blocks.warm_up(run, strategy, task)
        reference_pass.provide(whole, world, task, strategy, prepared, trained)
    feed = StepLoader(run, task, () if later else strategy.own_micro_batches(), world.device)
    every = feed.interval(run.checkpoint.every)
    checkpoints = Checkpoints(run, world, prepared, feed.total, say, every)
    return Session(job, world, task, strategy, Averaged(run, strategy), feed, checkpoints, before)
