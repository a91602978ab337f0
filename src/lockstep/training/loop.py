"""THE loop, and evaluate. Order of events is order of lines; a collective is in plain sight.

In: everything already built. Out: trained weights in the strategy, numbers in the trackers, checkpoints on disk.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass
from typing import Any

import numpy as np
from torch import Tensor

from lockstep.config.run import Run
from lockstep.data.batch import StepBatch, StepResult, Sums
from lockstep.data.tokens import Columns
from lockstep.distributed.place import PLACE
from lockstep.distributed.profiling import Profiler
from lockstep.distributed.randomness import seed_everything
from lockstep.distributed.world import World
from lockstep.strategies.exact import optim
from lockstep.strategies.exact.scaling import LossScale
from lockstep.strategies.strategy import NotFinite, Strategy
from lockstep.tasks.models.decoding import Decoding
from lockstep.tasks.task import Task
from lockstep.training import gathering
from lockstep.training.feed import Feed, stopping
from lockstep.training.guard import Corrupted, Guard
from lockstep.training.session import Session
from lockstep.training.sizes import evaluated_at_once, validation_rows
from lockstep.training.source_losses import SourceLosses


class Meter:
    """Counts examples, tokens and seconds of steps; evaluation and checkpoints do not count as time."""

    def __init__(self, state: Mapping[str, Any] | None = None, sources: Iterable[str] = ()) -> None:
        """`state`: what `state` gave at the checkpoint that the run goes on from. `sources`: names, of a mixture."""
        began = Counts(**state["line"]) if state else Counts()
        self.total = Counts(*(-number for number in astuple(began)))  # what was done before does not count
        self._line = began
        self._spikes = Spikes(*state["spikes"]) if state else Spikes()
        self._used: list[Tensor | bool] = []  # of the steps since the last line; may still be on the device
        self._overflowed: list[Tensor] = []  # the same: by the loss scale of fp16
        self._of_sources = SourceLosses(list(sources), (state or {}).get("sources"))
        self._since = time.perf_counter()

    def state(self) -> dict[str, Any]:
        """What the next line of the log needs to know of the steps so far; the same on every rank but for seconds."""
        self._count_skipped()
        return {"line": asdict(self._line), "spikes": self._spikes.state} | self._of_sources.state

    def add(self, batch: StepBatch, result: StepResult, scaling: LossScale | None = None) -> None:
        """One step more; `scaling`: of the loss, after it."""
        counts = (batch.examples, batch.tokens, batch.padded, batch.padded_by_chance)
        self._line += Counts(1, *counts)
        self._used.append(result.used)
        self._of_sources.add(batch, result)
        self._overflowed += [scaling.overflowed] if scaling else []

    def line(
        self, result: StepResult, rate: float, lengths: bool = True, scaling: LossScale | None = None
    ) -> dict[str, float]:
        """The numbers of a line of the log: this step's, and rates since the last line. `lengths`: whether examples
        have any. `scaling`: of the loss. The host waits for the device here."""
        numbers = {"loss": float(result.loss), "learning_rate": rate, "grad_norm": float(result.grad_norm)}
        self._stop_clock()
        self._count_skipped()
        numbers |= self._of_sources.take()
        line, self.total, self._line = self._line, self.total + self._line, Counts()
        if line.skipped:
            numbers["skipped_steps"] = line.skipped
        if line.overflowed:
            numbers["overflowed_steps"] = line.overflowed
        if scaling is not None:
            numbers["loss_scale"] = float(scaling.value)
        if self._spikes.seen(numbers["loss"]):
            numbers["spike"] = 1
        numbers |= {
            "examples_per_s": line.examples / line.seconds,
            "seconds_per_step": line.seconds / line.steps,
        }
        if not lengths:
            return numbers
        return numbers | {
            "tokens_per_s": line.tokens / line.seconds,
            "padding": line.padded / line.tokens,
            "padding_by_chance": line.padded_by_chance / line.tokens,
        }

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What happens in here takes no time."""
        self._stop_clock()
        yield
        self._since = time.perf_counter()

    def _count_skipped(self) -> None:
        """The host waits for the device here."""
        overflowed = sum(bool(each) for each in self._overflowed)
        skipped = sum(not used for used in self._used) - overflowed
        self._line += Counts(skipped=skipped, overflowed=overflowed)
        self._used.clear()
        self._overflowed.clear()

    def _stop_clock(self) -> None:
        now = time.perf_counter()
        self._line += Counts(seconds=now - self._since)
        self._since = now


class Spikes:
    """Tells a loss that jumps from one that wanders: running mean and variance, in which a jump does not count."""

    def __init__(self, count: int = 0, mean: float = 0.0, variance: float = 0.0) -> None:
        self._count, self._mean, self._variance = count, mean, variance

    @property
    def state(self) -> tuple[int, float, float]:
        return self._count, self._mean, self._variance

    def seen(self, loss: float) -> bool:
        """Whether this one is more than six standard deviations above those before it."""
        apart = loss - self._mean
        if not math.isfinite(loss) or (self._count >= 20 and apart > 6 * self._variance**0.5):
            return True
        self._count += 1
        weight = max(0.02, 1 / self._count)
        self._mean += weight * apart
        self._variance = (1 - weight) * (self._variance + weight * apart**2)
        return False


class Interrupted(Exception):
    """An evaluation was to stop, on every rank."""


class TrainingFailed(Exception):
    """Training cannot go on: one message for the user, exit status 1."""


def explained(caught: NotFinite, feed: Feed, rows: np.ndarray, when: str = "") -> str:
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
        "or lower optim.learning_rate or optim.clip; on_nonfinite=skip leaves such steps out"
    ) + "".join("\n" + line for line in lines)


@dataclass(frozen=True)
class Counts:
    """What a stretch of training took: over the whole job, in seconds of the wall clock."""

    steps: int = 0
    examples: int = 0
    tokens: int = 0
    padded: int = 0
    padded_by_chance: int = 0
    seconds: float = 0.0
    skipped: int = 0  # steps whose update was left out: not finite
    overflowed: int = 0  # those left out because fp16 overflowed at their loss scale

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


def train(session: Session, step: int) -> tuple[int, Counts]:
    """Train from `step` updates done to the run's last, or until asked to stop. Collective.

    Returns updates done and what they took. They are fewer than `feed.total` after a stop, or where
    `evaluate.patience` has ended training; a checkpoint of them is written.
    """
    run, world, strategy, feed = session.run, session.world, session.strategy, session.feed
    checkpoints, journal, sinks = session.checkpoints, session.journal, session.sinks
    fingerprints = session.fingerprints
    meter, profiler, phases = Meter(checkpoints.meter, feed.sources), Profiler(run, world), strategy.phases
    guard = Guard(session)
    if checkpoints.meter.get("owed") and due(step, feed.interval(run.evaluate.every), False):
        with meter.paused():
            scores = evaluation(session, step)
        if not scores:
            return step, meter.total
        checkpoints.evaluated(step, scores)
        checkpoints.add(scores, meter.state())
    if checkpoints.progress.over(run):
        return step, meter.total
    phases.take()  # what came before the first step is not in its phases
    try:
        for batch in phases.during("data", feed.steps(step, stopping(world))):
            PLACE.at(f"step {step}")
            rate = optim.learning_rate(run.optim, step, feed.total)
            result = guard.trained(batch, rate)
            step += 1
            with phases("optimizer"):
                session.averaged.follow(step)
            last = world.asked_to_stop() or step == feed.total  # the same answer on every rank
            meter.add(batch, result, strategy.scaling)
            fingerprints.step(step, result)
            sinks.advance(step)
            journal.answer()
            if due(step, run.track.every, step in (1, feed.total)):  # no line more where a run was stopped on the way
                line = meter.line(result, rate, session.task.unit is not None, strategy.scaling)
                sinks.log(step, "train", line)
                journal.times(step, phases.take())
            with meter.paused():
                last = between_steps(session, meter, profiler, step, last)
                if due(step, run.track.every, last):  # the host has waited for the device already
                    fingerprints.write()
            if last:
                break
    except NotFinite as caught:
        raise TrainingFailed(explained(caught, feed, feed.order.step(caught.step))) from caught
    except Corrupted as caught:
        saved_before(session, step, caught)
        raise TrainingFailed(str(caught)) from caught
    finally:
        fingerprints.close()
    PLACE.at("waiting for the last checkpoint")
    with phases("checkpoint"):
        checkpoints.settle()
    journal.saved(checkpoints.newest)
    with phases("profile"):
        profiler.close()
    journal.last_times(step, phases.take())
    return step, meter.total


def saved_before(session: Session, step: int, caught: Corrupted) -> None:
    """Save the state after `step` updates, if it is sound, where the next one went wrong. Collective."""
    session.journal.event("guard", step, weights_agree=caught.sound)
    if caught.sound:
        session.checkpoints.save(step, session.strategy)
        session.checkpoints.settle()


def between_steps(session: Session, meter: Meter, profiler: Profiler, step: int, last: bool) -> bool:
    """What is due after `step` updates: an evaluation, a checkpoint. `last`: no step comes after it now. Returns the
    same, as it is afterwards. Collective."""
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
    saves = due(step, feed.interval(run.checkpoint.every), last) or bool(scores and checkpoints.is_best(scores))
    if saves or due(step, feed.interval(run.fingerprint.every), False):
        strategy.settle()
        with phases("checkpoint"):
            session.fingerprints.state(strategy)
    if saves:
        PLACE.at(f"saving after step {step}")
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
    return gathering.told(run, world, task, of_each, len(rows))


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
        PLACE.at(f"evaluation, batch {turn}")
        if stop():
            raise Interrupted
        mine = turn + strategy.data_parallel.rank
        chosen = batches[mine] if mine < len(batches) else order[:0]
        seed_everything(run.seed, -1, mine)  # what is drawn depends on the batch, not on the rank
        batch = task.collate(columns, chosen, 0).to(world.device)
        found = task.score_at(strategy.forward, batch, columns, chosen)
        if texts:
            found |= task.score_texts(generate or strategy.generate, batch, columns, chosen)
        gathering.add(task, sums, found, places[mine * size : (mine + 1) * size], len(rows))
    return {name: strategy.data_parallel.sum(value).cpu() for name, value in sorted(sums.items())}
