"""Rows that lack what is to be learned from: refused, or left out and counted where `data.drop_missing` says so.

In: a split and the columns that a task reads, by their keys in the run file. Out: the same split, whole in each of
them, or a `RunError` that says where something is missing, how often, and what to do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lockstep.config.run import RunError
from lockstep.data import column_scan, nested_columns

if TYPE_CHECKING:
    from datasets import Dataset


class NothingLeft(RunError):
    """Every row lacks something, and such rows are left out."""


def present(dataset: Dataset, columns: Mapping[str, str], split: str, name: str) -> None:
    """Every column is there. Errors: `RunError`."""
    for key, column in columns.items():
        if column not in dataset.column_names:
            raise RunError(
                f"{key}: the {split} split of {name} has no column {column!r}; it has {', '.join(dataset.column_names)}"
            )


def complete(dataset: Dataset, columns: Mapping[str, str], split: str, name: str, drop: bool) -> Dataset:
    """The rows that have something in every column: not null, no empty or blank text, no label -1 of a data set that
    names its labels. Errors: `RunError` when there are others and `drop` is not set, or no row is left."""
    return without(
        dataset, {key: (column, lacking(dataset, column)) for key, column in columns.items()}, split, name, drop
    )


def without(
    dataset: Dataset, lacks: Mapping[str, tuple[str, np.ndarray]], split: str, name: str, drop: bool
) -> Dataset:
    """The rows that lack nothing; `lacks` is column and bool [rows] by key. Errors: as those of `complete`."""
    lacks = {key: found for key, found in lacks.items() if found[1].any()}
    if not lacks:
        return dataset
    if not drop:
        told = [_describe(dataset, key, *found, split, name) for key, found in lacks.items()]
        raise RunError("\n  ".join(["columns lack something in some rows:", *told] if len(told) > 1 else told))
    kept = np.flatnonzero(~np.logical_or.reduce([rows for _, rows in lacks.values()]))
    if len(kept) == 0:
        columns = " and ".join(repr(column) for column, _ in lacks.values())
        raise NothingLeft(f"data.drop_missing: no row of the {split} split of {name} has something in {columns}")
    return dataset.select(kept)


def texts(dataset: Dataset, columns: Mapping[str, str], split: str, name: str, drop: bool) -> Dataset:
    """The rows whose columns all hold a text. Errors: `RunError` when a column is not there or holds something else,
    and as those of `complete`."""
    present(dataset, columns, split, name)
    dataset = complete(dataset, columns, split, name, drop)
    for key, column in columns.items():
        if getattr(dataset.features[column], "dtype", None) not in ("string", "large_string"):
            parts = column_scan.lists(dataset, column)
            bad = next((first + i for first, part in parts for i, v in enumerate(part) if not isinstance(v, str)), None)
            if bad is not None:
                raise RunError(
                    f"{key}: column {column!r} of the {split} split must hold texts; row {bad} holds "
                    f"{str(dataset[bad][column])[:80]}{nested_columns.within(column, dataset[bad][column])}"
                )
    return dataset


def left_out(read: Mapping[str, Dataset], kept: Mapping[str, Dataset]) -> dict[str, Any]:
    """The fact, for those who read about the run, of how many rows of each split were left out, or all of one whose
    labels are hidden; nothing where none."""
    fewer = {split: len(rows) - len(kept.get(split, ())) for split, rows in read.items()}
    found = {split: count for split, count in fewer.items() if count}
    return {"left_out": found} if found else {}


def lacking(dataset: Dataset, column: str) -> np.ndarray:
    """Whether each row has nothing in a column: bool [rows]."""
    named = getattr(dataset.features[column], "names", None)

    def told(values: pa.ChunkedArray) -> np.ndarray:
        found = pc.is_null(values, nan_is_null=True)
        if pa.types.is_string(values.type) or pa.types.is_large_string(values.type):
            found = pc.or_(found, pc.fill_null(pc.equal(pc.utf8_trim_whitespace(values), ""), True))
        elif named:
            found = pc.or_(found, pc.fill_null(pc.equal(values, -1), True))
        return np.from_dlpack(found.combine_chunks().cast(pa.uint8())).astype(bool)

    return column_scan.rows_where(dataset, column, told)


def _describe(dataset: Dataset, key: str, column: str, lacks: np.ndarray, split: str, name: str) -> str:
    first = int(np.flatnonzero(lacks)[0])
    return (
        f"{key}: column {column!r} of the {split} split of {name} must hold something in every row, and has none in "
        f"{int(lacks.sum())} of {len(lacks)} (row {first} holds {repr(dataset[first][column])[:60]}): fill it in, or "
        "set data.drop_missing=true to leave such rows out"
    )
