"""Which rows of what was read are used, and in which split: `data.filter` and `data.split_column`.

In: the splits of a data set and the `data` section. Out: the same splits, or those that a column tells apart, and how
many rows of each were left out; or a `RunError` that says what a column holds instead.
"""

from __future__ import annotations

from collections import Counter
from functools import reduce
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lockstep.config.data_sources import Condition, Scalar
from lockstep.config.run import RunError
from lockstep.config.sections import DataSection
from lockstep.data import nested_columns
from lockstep.data.token_counts import TokenCounts

if TYPE_CHECKING:
    from datasets import Dataset

Wanted = Scalar | list[Scalar] | Condition


# -- by conditions ---------------------------------------------------------------------------------------------------


def filtered(
    splits: dict[str, Dataset], data: DataSection, name: str, tokens: TokenCounts | None
) -> tuple[dict[str, Dataset], dict[str, int]]:
    """The rows for which every condition of `data.filter` holds, and how many others each split had. `tokens`: counts
    them, where there is a tokenizer. Errors: `RunError`, also where a split has none left."""
    found, fewer = {}, {}
    for split, dataset in splits.items():
        masks, kept = holding(dataset, data, split, name, tokens)
        if len(dataset) and not kept.any():
            each = ", ".join(f"{_told(data.filter[c])} of {c!r} in {mask.sum():,}" for c, mask in masks.items())
            raise RunError(f"data.filter: no row of the {split} split of {name} is left; of {len(dataset):,}: {each}")
        fewer[split] = int(len(dataset) - kept.sum())
        found[split] = dataset.select(np.flatnonzero(kept)) if fewer[split] else dataset
    return found, {split: count for split, count in fewer.items() if count}


def holding(
    dataset: Dataset, data: DataSection, split: str, name: str, tokens: TokenCounts | None
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Whether each condition of `data.filter`, by its column, holds for each row, and whether all do: bool [rows].
    Errors: `RunError`."""
    masks = {c: _mask(dataset, c, wanted, split, name, tokens) for c, wanted in data.filter.items()}
    return masks, np.logical_and.reduce([np.ones(len(dataset), dtype=bool), *masks.values()])


def _told(wanted: Wanted) -> str:
    if isinstance(wanted, Condition):
        return "{" + ", ".join(f"{key}: {value}" for key, value in wanted.given.items()) + "}"
    return repr(wanted)


def _mask(dataset: Dataset, path: str, wanted: Wanted, split: str, name: str, tokens: TokenCounts | None) -> np.ndarray:
    """Whether a condition holds for each row: bool [rows]. A row that has nothing there is left out."""
    names = getattr(dataset.features.get(path), "names", None)
    parts = [np.empty(0, dtype=bool)]
    for column in nested_columns.values(dataset, "data.filter", path, split, name):
        try:
            holds = _holds(_with_names(column, names), wanted)
        except _Unlike as error:
            raise RunError(f"data.filter: {path}: the {split} split of {name} holds {error}") from None
        parts.append(pc.fill_null(holds, False).to_numpy(zero_copy_only=False))
    mask = np.concatenate(parts)
    if not isinstance(wanted, Condition) or not wanted.counts_tokens or len(mask) == 0:
        return mask
    if tokens is None:
        raise RunError(f"data.filter: {path}: this task has no tokenizer that counts tokens; give min_words, max_words")
    counts = tokens(dataset, path, split, name)
    least, most = wanted.min_tokens or 0, np.inf if wanted.max_tokens is None else wanted.max_tokens
    return mask & (counts >= least) & (counts <= most)


class _Unlike(ValueError):
    """A condition that makes no sense for what a column holds."""


def _with_names(column: pa.Array, names: list[str] | None) -> pa.Array:
    """Labels that a data set names, as these names."""
    if names is None:
        return column
    return pa.array(names).take(pc.if_else(pc.greater_equal(column, 0), column, pa.scalar(None, column.type)))


def _holds(column: pa.Array, wanted: Wanted) -> pa.Array:
    """Bool [rows], null where the column is. Errors: `_Unlike`."""
    if not isinstance(wanted, Condition):
        return _among(column, wanted if isinstance(wanted, list) else [wanted])
    found = [pc.is_valid(column)]
    for key, value in wanted.given.items():
        if key.endswith("_tokens"):
            continue  # of all rows at once, by `_mask`
        if key == "none_of":
            found.append(pc.invert(_among(column, value)))
        else:
            measured = _measured(column, key.partition("_")[2])
            found.append((pc.greater_equal if key.startswith("min") else pc.less_equal)(measured, value))
    return reduce(pc.and_, found)


def _among(column: pa.Array, values: list[Scalar]) -> pa.Array:
    kind = column.type
    if pa.types.is_null(kind):
        return pa.nulls(len(column), pa.bool_())
    for value in values:
        told = {bool: "true or false", str: "a text"}.get(type(value), "a number")
        if told != _kind(kind):
            quoted = ": put it between quotes" if _kind(kind) == "a text" else ""
            raise _Unlike(f"{_several(kind)} there, and {value!r} is {told}{quoted}")
    if any(isinstance(value, float) for value in values):
        column = column.cast(pa.float64())
    try:
        found = pc.is_in(column, value_set=pa.array(values).cast(column.type))
    except pa.ArrowInvalid as error:  # a number that the column's type has no room for
        raise _Unlike(f"{kind} there: {error}") from None
    return pc.if_else(pc.is_null(column), pa.scalar(None, pa.bool_()), found)


def _measured(column: pa.Array, what: str) -> pa.Array:
    """Numbers as they are, or lengths of texts and lists: null where there is nothing."""
    kind = column.type
    if pa.types.is_null(kind):
        return pa.nulls(len(column), pa.int64())
    listed = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    if what == "words" and listed:
        return pc.list_value_length(column)
    if (_kind(kind) == "a text") != bool(what) or _kind(kind) not in ("a text", "a number"):
        fits = {"": "min and max are for numbers", "words": "words are counted in texts and lists"}
        raise _Unlike(f"{_several(kind)} there; {fits.get(what, 'characters are counted in texts')}")
    if what == "words":
        trimmed = pc.utf8_trim_whitespace(column)
        counts = pc.list_value_length(pc.utf8_split_whitespace(trimmed))
        return pc.if_else(pc.equal(trimmed, ""), pa.scalar(0, counts.type), counts)
    return pc.utf8_length(column) if what else column


def _kind(kind: pa.DataType) -> str:
    if pa.types.is_boolean(kind):
        return "true or false"
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return "a text"
    return "a number" if pa.types.is_integer(kind) or pa.types.is_floating(kind) else str(kind)


def _several(kind: pa.DataType) -> str:
    return {"true or false": "true and false", "a text": "texts", "a number": "numbers"}.get(_kind(kind), str(kind))


# -- by a column -----------------------------------------------------------------------------------------------------


def told_apart(
    splits: dict[str, Dataset], data: DataSection, name: str, usual: dict[str, tuple[str, ...]]
) -> dict[str, Dataset]:
    """The splits that `data.split_column` tells apart. `usual`: what splits are called. Errors: `RunError`."""
    assert data.split_column is not None
    if list(splits) != ["train"]:
        raise RunError(
            f"data.split_column: {name} has {' and '.join(splits)} already; give all rows in data.source or data.train "
            "alone, or leave data.split_column out"
        )
    train, column = splits["train"], data.split_column
    names = getattr(train.features.get(column), "names", None)
    known = {word: split for split, words in usual.items() for word in words}
    order, others, first = list(usual), Counter[Any](), None
    places = [np.empty(0, dtype=np.int8)]  # of each row's split in `order`
    there: list[Any] = []  # values that are known
    for part in nested_columns.values(train, "data.split_column", column, "train", name):
        values = _with_names(part, names).to_pylist()
        to = {value: known.get(str(value).strip().lower()) for value in set(values)}
        there += sorted({str(value) for value in to if to[value]} - set(there))
        unknown = [row for row, value in enumerate(values) if to[value] is None]
        if unknown and first is None:
            first = sum(map(len, places)) + unknown[0], values[unknown[0]]
        others.update(values[row] for row in unknown)
        places.append(np.array([order.index(to[v] or "train") for v in values], dtype=np.int8))
    if first is not None:
        raise RunError(
            f"data.split_column: column {column!r} of {name} says {first[1]!r} in {others[first[1]]:,} row(s), the "
            f"first is row {first[0]:,}; known are {', '.join(known)}. To leave other rows out: data.filter: "
            f"{{{column}: [{', '.join(there) or 'train'}]}}"
        )
    split_of = np.concatenate(places)
    found = {split: np.flatnonzero(split_of == place) for place, split in enumerate(order)}
    if len(found["train"]) == 0:
        raise RunError(f"data.split_column: {column!r} of {name} says train in no row")
    return {split: train.select(rows) for split, rows in found.items() if len(rows)}
