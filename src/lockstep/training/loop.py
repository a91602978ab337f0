"""THE loop, and evaluate. Order of events is order of lines; a collective is in plain sight.

In: everything already built. Out: trained weights in the strategy, numbers in the trackers, checkpoints on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from lockstep.config.exit_status import FAILED
from lockstep.config.run import Run
from lockstep.data.batch import Sums
from lockstep.data.tokens import Columns
from lockstep.distributed.activity import ACTIVITY
from lockstep.distributed.profiling import Profiler
from lockstep.distributed.randomness import seed_everything
from lockstep.distributed.world import World
from lockstep.strategies.exact import optim
from lockstep.strategies.strategy import NotFinite, Strategy
from lockstep.tasks.abilities import Generates
from lockstep.tasks.models.decoding import Decoding
from lockstep.tasks.task import Task
from lockstep.training import eval_reduce
from lockstep.training.data_loader import StepLoader, stopping
from lockstep.training.eviction import evict
from lockstep.training.guard import Corrupted, Guard
from lockstep.training.model_stats import evaluated_at_once, validation_rows
from lockstep.training.rebalance import LoadBalancer
from lockstep.training.session import Session
from lockstep.training.throughput import Counts as Counts
from lockstep.training.throughput import Meter
from lockstep.training.train_state import Regroup, TrainState


class Interrupted(Exception):
    """An evaluation was to stop, on every rank."""


class TrainingFailed(Exception):
    """Training cannot go on: one message for the user, and the exit status of this rank. `everywhere`: each machine
    says it."""

    def __init__(self, told: str, status: int = FAILED, everywhere: bool = False) -> None:
        super().__init__(told)
        self.status, self.everywhere = status, everywhere


def explained(caught: NotFinite, feed: StepLoader, rows: np.ndarray, when: str = "") -> str:
    """Which step (or `when`), micro-batches and examples; `rows` are those of the step."""
    groups = feed.task.cut(feed.columns, rows)
    lines = []
    for micro_batch in caught.micro_batches:
        ids = ", ".join(map(str, rows[groups[micro_batch]][:20]))
        more = len(groups[micro_batch]) - 20
        lines.append(
            f"  micro-batch {micro_batch}: rows {ids}{f' and {more} more' if more > 0 else ''} of the training split"
        )
    what = "the loss" if caught.micro_batches else f"the gradient (norm {caught.norm}), though no loss,"
    return (
        f"{when or f'step {caught.step}'}: {what} is not a finite number; nothing was updated. Look at these examples, "
        "or lower optim.learning_rate or optim.max_grad_norm; on_nonfinite=skip leaves such steps out"
    ) + "".join("\n" + line for line in lines)


def train(session: Session, step: int, stand: TrainState | None = None) -> tuple[int, Counts]:
    """Train from `step` updates done to the run's last, or until asked to stop. Collective.

    Returns updates done and what they took. They are fewer than `feed.total` after a stop, or where
    `evaluate.patience` has ended training; a checkpoint of them is written. `stand`: where this rank stands, which is
    kept up to date; where it has stood before, training goes on from there. Errors: what a collective raises where a
    rank is lost, `Regroup` where one more is to come in.
    """
    run, world, strategy, feed = session.run, session.world, session.strategy, session.feed
    checkpoints = session.checkpoints
    meter = stand.meter if stand and stand.meter else Meter(checkpoints.meter, feed.sources)
    meter.restart_clock()
    profiler, phases, guard = Profiler(run, world), strategy.phases, Guard(session)
    stand = stand or TrainState(step)
    stand.now = meter
    if checkpoints.meter.get("owed") and due(step, feed.interval(run.evaluate.every), False) and not stand.result:
        with meter.paused():
            scores = evaluation(session, step)
        if not scores:
            return step, meter.total
        checkpoints.evaluated(step, scores)
        checkpoints.add(scores, meter.state())
        checkpoints.meter = {k: v for k, v in checkpoints.meter.items() if k != "owed"}
    if checkpoints.progress.over(run) and not stand.open:
        return step, meter.total
    phases.take()  # what came before the first step is not in its phases
    steps = phases.during("data", LoadBalancer(session).steps(step, stopping(world)))
    try:
        last = stand.open and after_step(session, guard, meter, profiler, stand)
        for batch in () if last else steps:
            ACTIVITY.at(f"step {step}")
            rate = optim.learning_rate(run.optim, step, feed.total)
            result = guard.trained(batch, rate)
            step += 1
            with phases("optimizer"):
                session.averaged.follow(step)
            meter.add(batch, result, strategy.scaling)
            session.fingerprints.step(step, result)
            kept = world.members is not None and due(step, run.track.every, step in (1, feed.total))
            stand.updated(step, result, rate, meter, checkpoints.progress, kept)
            if after_step(session, guard, meter, profiler, stand):
                break
    except NotFinite as caught:
        raise TrainingFailed(explained(caught, feed, feed.order.step(caught.step))) from caught
    except Corrupted as caught:
        if (status := evict(session, guard, meter, step, caught)) is None:
            raise Regroup from caught
        raise TrainingFailed(str(caught), status, bool(caught.leaves)) from caught
    finally:
        steps.close()
    ACTIVITY.at("waiting for the last checkpoint")
    with phases("checkpoint"):
        checkpoints.settle()
    session.journal.saved(checkpoints.newest)
    with phases("profile"):
        profiler.close()
    session.journal.last_times(step, phases.take())
    return step, meter.total


def after_step(session: Session, guard: Guard, meter: Meter, profiler: Profiler, stand: TrainState) -> bool:
    """What is to be done after the last update that was made. Returns whether no step comes after it. Doing it once
    more from where it began comes to the same. Collective. Errors: `Regroup`."""
    run, world, feed, phases = session.run, session.world, session.feed, session.strategy.phases
    step, sinks = stand.step, session.sinks
    assert stand.result is not None
    last = world.asked_to_stop() or step == feed.total  # the same answer on every rank
    sinks.advance(step)
    session.journal.answer()
    if due(step, run.track.every, step in (1, feed.total)):  # no line more where a run was stopped on the way
        scaling = session.strategy.scaling
        sinks.log(step, "train", meter.line(stand.result, stand.rate, session.task.unit is not None, scaling))
        session.journal.times(step, phases.take())
        if world.is_main and (text := session.checkpoints.room.warning(last)) is not None:
            session.checkpoints.say(text)
    with meter.paused():
        last = between_steps(session, guard, meter, profiler, step, last, stand.saves)
        if due(step, run.track.every, last):  # the host has waited for the device already
            session.fingerprints.write()
    stand.closed()
    if world.grows and not last:
        session.checkpoints.settle()
        if session.recut is not None:
            session.recut.before_more(stand)
        world.barrier()
        raise Regroup
    if session.recut is not None and not last:
        with phases("checkpoint"):
            session.recut.after_step(stand)
    return last


def between_steps(
    session: Session, guard: Guard, meter: Meter, profiler: Profiler, step: int, last: bool, saves: bool = False
) -> bool:
    """What is due after `step` updates: an evaluation, a checkpoint. `last`: no step comes after it now; `saves`: a
    checkpoint is due in any case. Returns the former, as it is afterwards. Collective."""
    run, strategy, checkpoints, phases = session.run, session.strategy, session.checkpoints, session.strategy.phases
    feed = session.feed
    scores, owed = {}, False
    with phases("profile"):
        profiler.advance(step)
    with phases("checkpoint"):
        checkpoints.advance()
    session.journal.saved(checkpoints.newest)
    if due(step, feed.interval(run.evaluate.every), False) and step < feed.total:
        strategy.settle()
        scores = evaluation(session, step, last)
        owed = not scores
        last = last or owed or checkpoints.evaluated(step, scores)  # asked to stop before: nothing was evaluated
    saves |= due(step, feed.interval(run.checkpoint.every), last or step in run.checkpoint.at)
    saves = saves or bool(scores and checkpoints.is_best(scores))
    if saves or due(step, feed.interval(run.fingerprint.every), False):
        strategy.settle()
        with phases("checkpoint"):
            session.fingerprints.state(strategy)
    if saves:
        ACTIVITY.at(f"saving after step {step}")
        guard.agree(step)  # what is saved is what all ranks hold
        checkpoints.meter = meter.state() | ({"owed": True} if owed else {})
        with phases("checkpoint"):
            checkpoints.save(step, session.averaged, scores)  # the step waits for a copy, and for the save before
    return last


def evaluation(session: Session, step: int, last: bool = False) -> dict[str, float]:
    """Scores after `step`; none once all are asked to stop: the next start makes up for it. Collective."""
    run, world, task, strategy = session.run, session.world, session.task, session.strategy
    columns = task.splits["validation"]

    def stop() -> bool:
        return last or world.asked_to_stop(by_clock=False)

    with strategy.phases("evaluation"), session.averaged.in_place():
        try:
            scores, _ = scored(run, world, task, strategy, columns, validation_rows(run, columns), stop=stop)
        except Interrupted:
            return {}
        session.sinks.log(step, "validation", scores)
        session.sinks.show(step, samples(task, strategy, world))
    session.journal.event("evaluation", step)
    return scores


def samples(
    task: Task,
    strategy: Strategy,
    world: World,
    generate: Callable[[Mapping[str, Tensor], Decoding], Tensor] | None = None,
) -> list[dict[str, str]]:
    """What the model makes of a few examples, by `generate` or the strategy's own. Collective."""

    def here(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.to(world.device) for name, tensor in inputs.items()}

    seed_everything(task.run.seed, -2)
    with strategy.averaged():
        return task.samples(
            lambda inputs, how: (generate or strategy.generate)(here(inputs), how),
            lambda inputs: strategy.forward(here(inputs)),
        )


def due(step: int, every: int, last: bool) -> bool:
    """Whether something that happens every so many steps (0: never) and at the last one happens now."""
    return last or (every > 0 and step % every == 0)


def evaluate(
    run: Run,
    world: World,
    task: Task,
    strategy: Strategy,
    columns: Columns,
    rows: np.ndarray | None = None,
    texts: bool = True,
) -> dict[str, float]:
    """Metrics of a split (or of some of its rows), every example exactly once, on all ranks. Collective."""
    return scored(run, world, task, strategy, columns, rows, texts)[0]


def scored(
    run: Run,
    world: World,
    task: Task,
    strategy: Strategy,
    columns: Columns,
    rows: np.ndarray | None = None,
    texts: bool = True,
    stop: Callable[[], bool] = lambda: False,
    generate: Callable[[Mapping[str, Tensor], Decoding], Tensor] | None = None,
) -> tuple[dict[str, float], dict[str, Any]]:
    """Metrics of a split, as `evaluate`, and its tables, which a report shows. Collective. `stop`: asked before every
    batch, the same on every rank. Errors: `Interrupted`, once it says so.

    Batches are cut from the examples sorted by length, the same at any number of ranks; ranks take turns, and
    blank batches (every target ignored) level them. Sums are rounded to 2^-20, so that adding them is exact and its
    order cannot matter. `texts`: with the scores of what the model writes, by `generate` or the strategy's own, which
    take the longest.
    """
    rows = np.arange(len(columns)) if rows is None else rows
    parts = {name: rows[(rows >= r.start) & (rows < r.stop)] for name, r in task.sources(columns).items()} or {"": rows}
    of_each, interrupted = {}, None
    with strategy.averaged():
        try:
            for name, part in parts.items():
                of_each[name] = _summed(run, world, task, strategy, columns, part, texts, stop, generate)
        except Interrupted as caught:  # on every rank
            interrupted = caught
    if interrupted is not None:
        raise interrupted
    return eval_reduce.finalize_metrics(run, world, task, of_each, columns, np.concatenate([*parts.values()]), texts)


def _summed(
    run: Run,
    world: World,
    task: Task,
    strategy: Strategy,
    columns: Columns,
    rows: np.ndarray,
    texts: bool,
    stop: Callable[[], bool],
    generate: Callable[[Mapping[str, Tensor], Decoding], Tensor] | None,
) -> Sums:
    """The sums over some rows, all ranks together, and what is gathered of each, in the order of `rows`; none for no
    rows. Collective."""
    size = evaluated_at_once(run)
    places = np.argsort(-columns.lengths[rows], kind="stable")
    order = rows[places]
    batches = [order[i : i + size] for i in range(0, len(order), size)]
    sums: Sums = {}
    for turn in range(0, len(batches), strategy.data_parallel.size):
        ACTIVITY.at(f"evaluation, batch {turn}")
        if stop():
            raise Interrupted
        mine = turn + strategy.data_parallel.rank
        chosen = batches[mine] if mine < len(batches) else order[:0]
        seed_everything(run.seed, -1, mine)  # what is drawn depends on the batch, not on the rank
        batch = task.collate(columns, chosen, 0).to(world.device)
        found = task.score_at(strategy.forward, batch, columns, chosen)
        if texts and isinstance(task, Generates):
            found |= task.score_texts(generate or strategy.generate, batch, columns, chosen)
        eval_reduce.add(task, sums, found, places[mine * size : (mine + 1) * size], len(rows))
    summed = {name: strategy.data_parallel.sum(value).cpu() for name, value in sorted(sums.items())}
    if texts and len(rows):
        eval_reduce.add(task, summed, task.score_split(strategy.forward, columns, rows, world.device), rows, len(rows))
    return summed
