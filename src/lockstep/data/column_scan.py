"""A column of a data set read a part at a time: what is asked of all its rows holds no more of them than that.

In: a data set and the name of a column. Out: its values by parts, as Arrow has them or as Python does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

if TYPE_CHECKING:
    from datasets import Dataset

ROWS = 10_000  # of a part
_NEW = "read-by-parts"  # given, for what is only read: `datasets` would pickle functions and hash them to make one


def arrays(dataset: Dataset, column: str) -> Iterator[pa.ChunkedArray]:
    """The column in parts, as Arrow holds it."""
    held = dataset.select_columns([column], new_fingerprint=_NEW)
    held.set_format("arrow")  # of this copy; `with_format` would make another one
    for start in range(0, len(held), ROWS):
        yield held[start : start + ROWS].column(0)


def lists(dataset: Dataset, *columns: str) -> Iterator[tuple[int, list[Any]]]:
    """Parts of a column as Python's values, or of several as tuples of them, each with the number of its first row."""
    held = dataset.select_columns(list(dict.fromkeys(columns)), new_fingerprint=_NEW)
    held.set_format(None)
    for start in range(0, len(held), ROWS):
        part = held[start : start + ROWS]
        one = [part[column] for column in columns]
        yield start, one[0] if len(one) == 1 else list(zip(*one, strict=True))


def numbers(dataset: Dataset, column: str) -> np.ndarray:
    """A column of whole numbers without nulls: as small in memory as Arrow holds it."""
    parts = [np.asarray(part.combine_chunks()) for part in arrays(dataset, column)]
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


def plain(dataset: Dataset, column: str) -> bool:
    """Whether Arrow holds whole numbers or texts in it, and nothing that Python would see otherwise."""
    kind = dataset.features[column]
    dtype = str(getattr(kind, "dtype", None))
    return type(kind).__name__ in ("Value", "ClassLabel") and dtype.startswith(
        ("string", "large_string", "int", "uint")
    )


def distinct(dataset: Dataset, column: str) -> set[Any]:
    """What a column holds, each once."""
    found: set[Any] = set()
    if plain(dataset, column):
        for part in arrays(dataset, column):
            found.update(pc.unique(part).to_pylist())
    else:
        for _, values in lists(dataset, column):
            found.update(values)
    return found


def rows_where(dataset: Dataset, column: str, told: Callable[[pa.ChunkedArray], Any]) -> np.ndarray:
    """What `told` says of each row by parts: bool [rows]."""
    found = [np.asarray(told(part)) for part in arrays(dataset, column)]
    return np.concatenate([np.empty(0, bool), *found])
