"""One rank of a job, brought up: training, `verify`, `bench` and `evaluate` all begin here.

In: a run, and a World that has joined nobody yet. Out: a `Session`, what a job works with. The way there is one:
`met` checks, prepares the data, joins the other ranks and agrees with them; `built` makes the task, the model and its
feed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lockstep.checkpoint import remote_sync
from lockstep.checkpoint.checkpoint import Checkpoints
from lockstep.config import plugins
from lockstep.config.run import Run
from lockstep.data.prepare import prepare
from lockstep.data.tokens import Prepared
from lockstep.distributed.consistency_check import agree
from lockstep.distributed.event_log import EventLog
from lockstep.distributed.memory import tensor_bytes
from lockstep.distributed.randomness import seed_libraries
from lockstep.distributed.world import World
from lockstep.strategies import strategy as strategies
from lockstep.strategies.engines import blocks, compiled
from lockstep.strategies.exact.averaging import Averaged
from lockstep.strategies.strategy import Strategy
from lockstep.tasks import own_metrics
from lockstep.tasks.models import attention, chunked_loss, padding
from lockstep.tasks.task import Task
from lockstep.track.tracker import Sample
from lockstep.training import reference_pass
from lockstep.training.checkpoint_model import fetch
from lockstep.training.data_loader import StepLoader
from lockstep.training.model_stats import check_average, resolve_options
from lockstep.training.train_state import TrainState


class Sinks:
    """Where numbers and texts go while a run trains; this one keeps nothing."""

    def log(self, step: int, split: str, numbers: dict[str, float]) -> None:
        """Numbers of a split after `step` updates."""

    def advance(self, step: int) -> None:
        """`step` updates are done. Collective."""

    def show(self, step: int, samples: Sequence[Sample]) -> None:
        """What the model makes of a few examples."""


@dataclass(frozen=True)
class Session:
    """What a rank holds of its job. `dataclasses.replace` gives it other sinks, or another journal."""

    run: Run
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

    def new_state(self, step: int = 0) -> TrainState:
        """Training that begins with `step` updates made, of which nothing else is known."""
        feed, lengths = self.feed, self.task.unit is not None
        return TrainState(self.run, feed.total, feed.sources, lengths, step)


def prepare_and_join(run: Run, world: World, data: Run | None = None) -> Prepared:
    """Check, prepare the data, join the other ranks, and agree with them that all have the same. `data`: the run whose
    data they are, where that is another. Collective. Errors: `RunError`, `Unreached`."""
    attention.check(run, here=True)
    chunked_loss.check(run, here=True)
    run.check_shared(world.size, f"launch: {world.size} processes")
    if not world.apart:  # it is checked for the ranks that it comes to
        strategies.checked_strategy(run, world.size)
    blocks.check(run, here=True)
    remote_sync.require_extra(run)
    fetch(run)
    task: Any = plugins.find("tasks", run.task.name)
    prepared = prepare(data or run, task)
    own_metrics.check(run, prepared)
    world.join()
    os.environ.setdefault("DS_ACCELERATOR", world.device.type)  # transformers may import DeepSpeed, which asks aloud
    agree(
        run,
        world,
        prepared.key,
        {"what is padded": padding.unsupported_reason(run, task.head) or "nothing"} if task.head else {},
    )
    return prepared


def build_session(
    run: Run,
    world: World,
    prepared: Prepared,
    say: Callable[[str], None] = lambda text: None,
    trained: bool = False,
) -> Session:
    """Task, model and feed. `say` is told what becomes of checkpoints. `trained`: the model is not one that training
    starts from. Collective. Errors: `RunError`."""
    before = tensor_bytes()
    task_class: Any = plugins.find("tasks", run.task.name)
    task: Task = task_class(run, prepared)
    later = world.apart and strategies.strategy_class(run).rebuilds  # built with those that it comes to
    whole = run if later else resolve_options(run, task, world)
    strategy = strategies.strategy_class(whole)(whole, world)
    seed_libraries(run.seed)  # for a task whose `model` draws weights by itself
    if not later:
        strategy.build(task)
        compiled.warm_up(run, strategy, task)
        reference_pass.provide(whole, world, task, strategy, prepared, trained)
    feed = StepLoader(run, task, () if later else strategy.own_micro_batches(), world.device)
    check_average(run, feed)
    every = feed.interval(run.checkpoint.every)
    checkpoints = Checkpoints(run, world, prepared, feed.total, say, every)
    return Session(run, world, task, strategy, Averaged(run, strategy), feed, checkpoints, before)
