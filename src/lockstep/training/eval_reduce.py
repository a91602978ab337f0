"""What evaluations found, batch by batch and rank by rank -> the numbers of a split.

In: sums, and rows that are gathered in the order of the split. Out: metrics and tables, made once, by rank 0.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import numpy as np
import torch

from lockstep.config.run import Run, RunError
from lockstep.data.batch import Sums
from lockstep.data.tokens import Columns
from lockstep.distributed.world import World
from lockstep.tasks import own_metrics
from lockstep.tasks.abilities import GivesPredictions
from lockstep.tasks.task import Task

T = TypeVar("T")


def add(task: Task, sums: Sums, found: Sums, places: np.ndarray, count: int) -> None:
    """Add a batch's to a rank's. `places`: where its examples stand among the `count` of the split. What other ranks
    have is zero here: adding that is exact, and no row is there twice."""
    for name, value in found.items():
        if name not in task.per_example_outputs:
            value = torch.round(value.double() * 2**20) / 2**20
            sums[name] = sums[name] + value if name in sums else value
            continue
        if name not in sums:
            sums[name] = value.new_zeros(count, *value.shape[1:])
        here = torch.from_numpy(places[: len(value)]).to(value.device)
        sums[name][here] = value[: len(here)]  # a blank batch has a row, and no place


def finalize_metrics(
    run: Run, world: World, task: Task, of_each: Mapping[str, Sums], columns: Columns, rows: np.ndarray, texts: bool
) -> tuple[dict[str, float], dict[str, Any]]:
    """Metrics and tables of the examples at `rows`, from what each source of them came to, one after the other.
    `texts`: whether what the model writes was asked for. Collective. Errors: `RunError` of a function of the user's, on
    every rank."""
    found = [of for of in of_each.values() if of]
    sums = {
        name: torch.cat([of[name] for of in found])
        if name in task.per_example_outputs
        else functools.reduce(operator.add, (of[name] for of in found))
        for name in found[0]
    }
    count = len(rows)
    assert int(sums["examples"]) == count, f"{int(sums['examples'])} of {count} examples were evaluated"

    def numbers() -> tuple[dict[str, float], dict[str, Any]]:
        losses = {f"loss_{name}": task.metrics(of)["loss"] for name, of in of_each.items() if name and of}
        metrics = task.metrics(sums)
        if math.isnan(metrics.get("loss", 0.0)):  # of outputs that are no numbers: what they rank first says nothing
            metrics = dict.fromkeys(metrics, math.nan)
        known = {**metrics, **losses}
        complete = texts or sums.keys() >= {*task.per_example_outputs}
        if run.metrics and complete and isinstance(task, GivesPredictions):
            given = task.predictions(sums, columns, rows)
            known |= own_metrics.scored(run, own_metrics.functions(run), given, list(known))
        return known | {"examples": count}, task.tables(sums)

    return _by_the_first(world, numbers)


def _by_the_first(world: World, made: Callable[[], T]) -> T:
    """What rank 0 makes of what every rank has: the arithmetic of one machine, and one call of what the user wrote.
    Collective. Errors: its `RunError`, on every rank."""
    found: T | RunError | None = None
    if world.is_main:
        try:
            found = made()
        except RunError as error:
            found = error
    found = world.broadcast(found)
    if isinstance(found, RunError):
        raise found
    return cast(T, found)
