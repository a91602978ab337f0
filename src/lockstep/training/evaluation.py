"""Evaluate a split: metrics, tables and samples, equal at any number of ranks.

In: a strategy and the examples of a split. Out: metrics and tables. Batches are cut independently of the number of
ranks, and ranks take turns with them; each example counts once. Sums over ranks are exact; rank 0 computes the metrics
from them.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from lockstep.config.run import RunError
from lockstep.data.arrow_cache import Columns
from lockstep.data.batch import Sums
from lockstep.distributed.randomness import seed_everything
from lockstep.distributed.world import World
from lockstep.strategies.exact.training_state import optimizer_average
from lockstep.strategies.strategy import Strategy
from lockstep.tasks.task import Generates, GivesPredictions, Task
from lockstep.track.busy import ACTIVITY
from lockstep.training.data_loader import usual_batch
from lockstep.training.errors import EvaluationInterrupted
from lockstep.training.session import Session

if TYPE_CHECKING:
    from lockstep.tasks.models.inference import Decoding

T = TypeVar("T")

PART = 17  # combined with the seed, so that the validation subset has its own random stream


def evaluate_during_training(session: Session, step: int, last: bool = False) -> dict[str, float]:
    """Evaluate the validation split after `step` and log the scores. Returns the scores; empty if a stop is requested,
    or after the last step (`last`). Collective."""
    world, task, strategy = session.world, session.task, session.strategy
    columns = task.splits["validation"]

    def stop() -> bool:
        return last or world.asked_to_stop(by_clock=False)

    with strategy.phases("evaluation"), session.averaged.in_place():
        try:
            scores, _ = evaluate_with_tables(world, task, strategy, columns, validation_rows(task, columns), stop=stop)
        except EvaluationInterrupted:
            return {}
        session.sinks.log(step, "validation", scores)
        session.sinks.show(step, generate_samples(task, strategy, world))
    session.journal.event("evaluation", step)
    return scores


def generate_samples(
    task: Task,
    strategy: Strategy,
    world: World,
    generate: Callable[[Mapping[str, Tensor], Decoding], Tensor] | None = None,
) -> list[dict[str, str]]:
    """Generate the model's outputs for a few examples, with `generate` or the strategy's own method. Collective."""

    def here(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.to(world.device) for name, tensor in inputs.items()}

    seed_everything(task.run.seed, -2)
    with optimizer_average(strategy):
        return task.samples(
            lambda inputs, how: (generate or strategy.generate)(here(inputs), how),
            lambda inputs: strategy.forward(here(inputs)),
        )


def evaluate(
    world: World,
    task: Task,
    strategy: Strategy,
    columns: Columns,
    rows: np.ndarray | None = None,
    texts: bool = True,
    at_once: int | None = None,
) -> dict[str, float]:
    """Compute the metrics of a split (or of some of its rows) on all ranks; every example counts exactly once.
    `at_once`: examples in a batch, if not those of the run. Collective."""
    return evaluate_with_tables(world, task, strategy, columns, rows, texts, at_once=at_once)[0]


def evaluate_with_tables(
    world: World,
    task: Task,
    strategy: Strategy,
    columns: Columns,
    rows: np.ndarray | None = None,
    texts: bool = True,
    stop: Callable[[], bool] = lambda: False,
    generate: Callable[[Mapping[str, Tensor], Decoding], Tensor] | None = None,
    at_once: int | None = None,
) -> tuple[dict[str, float], dict[str, Any]]:
    """Compute the metrics of a split, as `evaluate`, and its tables, which a report shows. Collective.

    Batches are cut from the examples sorted by length, independently of the number of ranks. Ranks take turns; padding
    batches (every target ignored) even out their number. Sums are rounded to 2^-20, so that addition is exact and its
    order cannot matter.

    `texts`: also score generated text (by `generate` or the strategy's own method), the slowest part. `stop`: called
    before every batch, with the same answer on every rank. Errors: `EvaluationInterrupted`, if `stop` returns True.
    """
    size = at_once or evaluated_at_once(task)
    rows = np.arange(len(columns)) if rows is None else rows
    parts = {name: rows[(rows >= r.start) & (rows < r.stop)] for name, r in task.sources(columns).items()} or {"": rows}
    of_each, interrupted = {}, None
    with optimizer_average(strategy):
        try:
            for name, part in parts.items():
                of_each[name] = sum_split(world, task, strategy, columns, part, size, texts, stop, generate)
        except EvaluationInterrupted as caught:  # on every rank
            interrupted = caught
    if interrupted is not None:
        raise interrupted
    return finalize_metrics(world, task, of_each, columns, np.concatenate([*parts.values()]), texts)


def sum_split(
    world: World,
    task: Task,
    strategy: Strategy,
    columns: Columns,
    rows: np.ndarray,
    size: int,
    texts: bool,
    stop: Callable[[], bool],
    generate: Callable[[Mapping[str, Tensor], Decoding], Tensor] | None,
) -> Sums:
    """Sums over some rows, from all ranks together, and the gathered per-example values in the order of `rows`. Empty
    for no rows. `size`: examples in a batch. Collective."""
    places = np.argsort(-columns.lengths[rows], kind="stable")
    order = rows[places]
    batches = [order[i : i + size] for i in range(0, len(order), size)]
    sums: Sums = {}
    for turn in range(0, len(batches), strategy.data_parallel.size):
        ACTIVITY.set(f"evaluation, {turn:,} of {len(batches):,} batches")
        if stop():
            raise EvaluationInterrupted
        mine = turn + strategy.data_parallel.rank
        chosen = batches[mine] if mine < len(batches) else order[:0]
        seed_everything(task.run.seed, -1, mine)  # random numbers depend on the batch, not on the rank
        batch = task.collate(columns, chosen, 0).to(world.device)
        scores = task.score_at(strategy.forward, batch, columns, chosen)
        if texts and isinstance(task, Generates):
            scores |= task.score_texts(generate or strategy.generate, batch, columns, chosen)
        add_sums(task, sums, scores, places[mine * size : (mine + 1) * size], len(rows))
    summed = {name: strategy.data_parallel.all_reduce(value).cpu() for name, value in sorted(sums.items())}
    if texts and len(rows):
        add_sums(task, summed, task.score_split(strategy.forward, columns, rows, world.device), rows, len(rows))
    return summed


# -- sums over batches and ranks ---------------------------------------------------------------------------------------


def add_sums(task: Task, sums: Sums, scores: Sums, places: np.ndarray, count: int) -> None:
    """Add the sums of a batch to those of this rank. `places`: indices of its examples among the `count` of the split.
    Per-example values of other ranks stay zero here, so that adding them is exact; no row occurs twice."""
    for name, value in scores.items():
        if name not in task.per_example_outputs:
            value = torch.round(value.double() * 2**20) / 2**20
            sums[name] = sums[name] + value if name in sums else value
            continue
        if name not in sums:
            sums[name] = value.new_zeros(count, *value.shape[1:])
        here = torch.from_numpy(places[: len(value)]).to(value.device)
        sums[name][here] = value[: len(here)]  # a padding batch has a row of values but no entry in `places`


def finalize_metrics(
    world: World, task: Task, of_each: Mapping[str, Sums], columns: Columns, rows: np.ndarray, texts: bool
) -> tuple[dict[str, float], dict[str, Any]]:
    """Compute metrics and tables of the examples at `rows` from the sums of each source, in order. `texts`: whether
    generated text is scored. Collective. Errors: `RunError` from a user function, on every rank."""
    run = task.run
    parts = [of for of in of_each.values() if of]
    sums = {
        name: torch.cat([of[name] for of in parts])
        if name in task.per_example_outputs
        else functools.reduce(operator.add, (of[name] for of in parts))
        for name in parts[0]
    }
    count = len(rows)
    assert int(sums["examples"]) == count, f"{int(sums['examples'])} of {count} examples were evaluated"

    def numbers() -> tuple[dict[str, float], dict[str, Any]]:
        losses = {f"loss_{name}": task.metrics(of)["loss"] for name, of in of_each.items() if name and of}
        metrics = task.metrics(sums)
        if math.isnan(metrics.get("loss", 0.0)):  # the outputs are NaN, so rankings by them mean nothing
            metrics = dict.fromkeys(metrics, math.nan)
        known = {**metrics, **losses}
        complete = texts or sums.keys() >= {*task.per_example_outputs}
        if run.metrics and complete and isinstance(task, GivesPredictions):
            from lockstep.tasks import own_metrics

            predictions = task.predictions(sums, columns, rows)
            known |= own_metrics.scored(run.seed, own_metrics.functions(run.metrics), predictions, list(known))
        return known | {"examples": count}, task.tables(sums)

    return call_on_rank_zero(world, numbers)


def call_on_rank_zero(world: World, function: Callable[[], T]) -> T:
    """Call a function on rank 0 and broadcast its result: one machine's arithmetic, one call of the user's functions.
    Collective. Errors: its `RunError`, on every rank."""
    result: T | RunError | None = None
    if world.is_main:
        try:
            result = function()
        except RunError as error:
            result = error
    result = world.broadcast(result)
    if isinstance(result, RunError):
        raise result
    return cast(T, result)


def validation_rows(task: Task, columns: Columns) -> np.ndarray | None:
    """Validation examples that evaluations use, drawn with the seed: int64. None: all."""
    run = task.run
    most = run.evaluate.limit
    if most is None or most >= len(columns):
        return None
    return np.sort(np.random.default_rng([run.seed, PART]).permutation(len(columns))[:most])


def evaluated_at_once(task: Task) -> int:
    """Examples per evaluation batch on a rank."""
    return task.run.evaluate.batch_size or usual_batch(task)
