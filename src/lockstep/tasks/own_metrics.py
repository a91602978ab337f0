"""The user's own metric functions (`metrics` in the run file), and the curves of a report.

In: dotted names, and the gathered predictions and labels of a split. Out: numbers by name, or a `RunError` that names
the function. Each function is tried on dummy predictions before any process starts.

A function is `def score(predictions: numpy.ndarray, labels: numpy.ndarray) -> float | dict[str, float]`. The rows of
both arrays are the examples of the split in order, each once, at any number of processes. Its result is logged under
its own name, or under the names of the mapping. Imports no torch at the top.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep.config import plugins
from lockstep.config.run import RunError
from lockstep.data.job import Job
from lockstep.distributed.randomness import seed_everything
from lockstep.tasks.task import GivesPredictions, make_task

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.data.arrow_cache import Columns


# -- gathered rows: equal width in every batch -----------------------------------------------------------------------

NOTHING = -1  # marks positions without a token


def as_wide(tokens: Tensor, width: int, fill: int = NOTHING) -> Tensor:
    """Pad rows [B, T] to the width of the split's longest row: int32 [B, width]."""
    import torch

    return torch.nn.functional.pad(tokens.int(), (0, width - tokens.shape[1]), value=fill)


def longest(columns: Columns) -> int:
    """Number of tokens of the longest example of a split; equal on every rank."""
    return int(columns.lengths[columns.longest(1)][0])


def listed(values: Sequence[Any]) -> np.ndarray:
    """Texts or lists, one per example, as an object array [N]."""
    array = np.empty(len(values), dtype=object)
    for place, value in enumerate(values):
        array[place] = value
    return array


# -- curves of a report: scores by size, as sums in bins that ranks add up, and numbers in order ---------------------

# Lower bound of each bin.
BINS = np.array([0, 1, 2, 3, 4, 6, 8, 11, 16, 23, 32, 46, 64, 91, 128, 182, 256, 363, 512, 725, 1024, 2048, 4096])
_POINTS = 101  # points of a curve of sorted values


def bin_of(sizes: Sequence[int]) -> np.ndarray:
    """Bin index of each size: int64 [N]."""
    return np.searchsorted(BINS, np.asarray(sizes, dtype=np.int64), side="right") - 1


def binned(sizes: Sequence[int], *values: Sequence[float]) -> np.ndarray:
    """Per bin, the count, the sum of sizes and the sum of each value: float64 [bins, 2 + values]."""
    columns = [
        np.ones(len(sizes)),
        np.asarray(sizes, dtype=np.float64),
        *(np.asarray(v, dtype=np.float64) for v in values),
    ]
    return np.stack([np.bincount(bin_of(sizes), column, len(BINS)) for column in columns], 1)


def curve(sums: Tensor | np.ndarray, value: Callable[[int], float]) -> list[list[float]]:
    """One point per non-empty bin: mean size, and `value` of the bin. `sums`: from `binned`."""
    totals = np.asarray(sums, dtype=np.float64)
    return [[totals[b, 1] / totals[b, 0], value(b)] for b in np.flatnonzero(totals[:, 0]).tolist()]


def in_order(title: str, of: str, values: np.ndarray) -> dict[str, Any]:
    """Plot of sorted values against the share of values below."""
    if len(values) == 0 or not np.isfinite(values).all():
        return {}
    shares = np.linspace(0.0, 1.0, min(_POINTS, len(values)))
    line = [[float(share), float(value)] for share, value in zip(shares, np.quantile(values, shares), strict=True)]
    return {"plots": [{"title": title, "x": "share below", "lines": {of: line}}]}


# -- user functions --------------------------------------------------------------------------------------------------

Metric = Callable[[np.ndarray, np.ndarray], float | Mapping[str, float]]

_DRAWN = -3  # step number that seeds random draws of metric functions


def functions(names: Sequence[str]) -> dict[str, Metric]:
    """Import the user's metric functions by dotted name. Errors: `RunError` if a function does not exist or takes other
    arguments."""
    from lockstep.tasks.modules.dataset import error_line

    metrics: dict[str, Metric] = {}
    for name in names:
        if "." not in name:
            raise RunError(
                "LS3300", f"metrics: {name!r} does not name a file; write my_file.{name} for {name} in my_file.py"
            )
        try:
            function = plugins.attribute(name)
        except plugins.PluginError as error:
            raise RunError(error.code, f"metrics: {error.message}") from error
        except Exception as error:  # user code at import
            raise RunError("LS3301", f"metrics: cannot import {name}: {error_line(error)}") from error
        if not callable(function) or isinstance(function, type):
            raise RunError("LS3302", f"metrics: {name} is a {type(function).__name__}; expected a function")
        try:
            inspect.signature(function).bind(None, None)
        except TypeError as error:
            raise RunError(
                "LS3303", f"metrics: {name} must accept two arguments, (predictions, labels): {error}"
            ) from error
        except ValueError:  # the arguments of a built-in function are unknown
            pass
        metrics[name] = function
    return metrics


def check(job: Job) -> tuple[str, ...]:
    """Call each metric function on dummy predictions. Returns the names of their results. Errors: `RunError`."""
    run = job.run
    if not run.metrics:
        return ()
    metrics = functions(run.metrics)
    task = make_task(job)
    if not isinstance(task, GivesPredictions):
        raise RunError(
            "LS3304",
            f"metrics: the task {run.task.name} collects no predictions that functions could receive: "
            f"{task.no_metric_inputs_reason}",
        )
    return (*scored(run.seed, metrics, task.dummy_predictions(), task.metric_names, " (tried on dummy predictions)"),)


def scored(
    seed: int,
    metrics: Mapping[str, Metric],
    arrays: tuple[np.ndarray, np.ndarray],
    taken: Sequence[str],
    where: str = "",
) -> dict[str, float]:
    """Apply the metric functions to predictions and labels. `taken`: metric names already in use. Errors: `RunError`
    that names a function that fails or does not return numbers."""
    from lockstep.tasks.modules.dataset import error_line

    numbers: dict[str, float] = {}
    for name, function in metrics.items():
        seed_everything(seed, _DRAWN)
        predictions, labels = copy.deepcopy(arrays)  # isolates functions that modify their arguments
        try:
            result = function(predictions, labels)
        except Exception as error:
            raise RunError("LS3305", f"metrics: {name} failed{where}: {error_line(error)}") from error
        for key, value in _by_name(name, result, where).items():
            if key in taken or key in numbers or key in ("examples", "loss", "step", "split"):
                raise RunError(
                    "LS3306",
                    f"metrics: {name} returns {key!r}, which is the name of another metric; choose a different name",
                )
            numbers[key] = value
    return numbers


def _by_name(name: str, result: Any, where: str) -> dict[str, float]:
    """Numbers of a function's result by metric name. Errors: `RunError`."""
    several = result if isinstance(result, Mapping) else {name.rpartition(".")[2]: result}
    numbers: dict[str, float] = {}
    for key, value in several.items():
        if not isinstance(key, str) or not re.fullmatch(r"\w+", key):
            raise RunError(
                "LS3307",
                f"metrics: {name} returns a number named {key!r}{where}; a name may contain letters, digits and _",
            )
        plain = value.item() if getattr(value, "ndim", None) == 0 else value  # numpy and torch scalars
        if isinstance(plain, bool) or not isinstance(plain, int | float):
            raise RunError(
                "LS3308",
                f"metrics: {name} must return a number, or a mapping of numbers by name{where}; "
                f"{'it returned' if value is result else f'{key} is'} {type(value).__name__} "
                f"{str(value)[:40]!r}",
            )
        numbers[key] = float(plain)
    return numbers
