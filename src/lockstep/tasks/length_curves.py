"""What a report shows of a split beside its metrics: scores by the size of what was to be found, and numbers in order.

In: sizes, such as words, with scores. Out: sums in bins, as many for every batch, that ranks add up; points of curves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

# The least size of each bin.
BINS = np.array([0, 1, 2, 3, 4, 6, 8, 11, 16, 23, 32, 46, 64, 91, 128, 182, 256, 363, 512, 725, 1024, 2048, 4096])
_POINTS = 101  # of a curve of numbers in order


def bin_of(sizes: Sequence[int]) -> np.ndarray:
    """Which bin each belongs to: int64 [N]."""
    return np.searchsorted(BINS, np.asarray(sizes, dtype=np.int64), side="right") - 1


def binned(sizes: Sequence[int], *values: Sequence[float]) -> np.ndarray:
    """How many there are in each bin, the sum of their sizes, and of each of their values: float64
    [bins, 2 + values]."""
    columns = [
        np.ones(len(sizes)),
        np.asarray(sizes, dtype=np.float64),
        *(np.asarray(v, dtype=np.float64) for v in values),
    ]
    return np.stack([np.bincount(bin_of(sizes), column, len(BINS)) for column in columns], 1)


def curve(sums: Tensor | np.ndarray, value: Callable[[int], float]) -> list[list[float]]:
    """A point for each bin that holds something: the mean of its sizes, and the value of the bin. `sums`: of
    `binned`."""
    found = np.asarray(sums, dtype=np.float64)
    return [[found[b, 1] / found[b, 0], value(b)] for b in np.flatnonzero(found[:, 0]).tolist()]


def in_order(title: str, of: str, values: np.ndarray) -> dict[str, Any]:
    """A plot of numbers from the least to the greatest, by the share of them that is below."""
    if len(values) == 0 or not np.isfinite(values).all():
        return {}
    shares = np.linspace(0.0, 1.0, min(_POINTS, len(values)))
    line = [[float(share), float(value)] for share, value in zip(shares, np.quantile(values, shares), strict=True)]
    return {"plots": [{"title": title, "x": "share that is below", "lines": {of: line}}]}
