"""What the columns of a data set hold: texts, labels, numbers, conversations, and how much of it.

In: a data source (Hub id, folder, file or the built-in set). Out: a `Look` at it, from which `fit.py` tells what task
it is for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep.config.run import RunError
from lockstep.config.sections import DataSection
from lockstep.data import row_files, source, usable_rows

if TYPE_CHECKING:
    from datasets import Dataset

_ROWS = 1000  # looked at of the training split, from its beginning to its end
_FEW = 200  # different values that a column of labels may have, at most
_COUNTED = ("text", "label", "number", "decimal", "true/false")  # kinds whose values are counted


@dataclass(frozen=True)
class Look:
    """What a data set holds, from rows of its training split."""

    source: str
    sizes: dict[str, int]  # split -> examples
    kinds: dict[
        str, str
    ]  # column -> text, texts, label, labels, number, decimal, true/false, messages, image or another
    few: dict[str, int]  # column of few different values -> how many
    characters: dict[str, int]  # text column -> characters, of which 99 of 100 rows have no more
    languages: tuple[str, ...] = ()  # of a column of pairs
    plain: bool = False  # a .txt file without labels
    binary: tuple[str, ...] = ()  # columns of 0 and 1
    aligned: frozenset[tuple[str, str]] = frozenset()  # columns of lists that are as long as each other in every row
    lacking: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # split -> columns of train it has not
    same: tuple[str, ...] = ()  # columns that hold the same in every row
    joined: tuple[str, ...] = ()  # columns of few texts that are lists of each other's: "a", "b", "a,b"
    apart: str | None = None  # the column that says which split each row belongs to
    ends: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # of numbers, the least and the greatest
    deep: bool = False  # whether columns hold others, which were not looked at
    nearly_apart: tuple[str, tuple[str, ...]] | None = None  # a column that says it of most rows, and what else it says

    hollow: tuple[str, ...] = ()  # columns of mappings that hold nothing in some rows, as answers of questions without

    @property
    def texts(self) -> list[str]:
        return [name for name, kind in self.kinds.items() if kind == "text"]

    def described(self) -> str:
        """The columns for a person: `text (text), label (label)`."""
        return ", ".join(f"{name} ({kind})" for name, kind in self.kinds.items())


def look(data: DataSection, seed: int = 0, deep: bool = False) -> Look:
    """Read a data set's training split. `deep`: also the columns within its columns, by dotted paths. Errors:
    `RunError`, as `source.load`."""
    found, plain = _read(data, seed)
    inner = {path: path for path in _within(found.splits["train"])}
    if deep:
        splits = {split: usable_rows.added(rows, inner, split, found.name) for split, rows in found.splits.items()}
        outer = {path.partition(".")[0] for path in inner}
        found = replace(found, splits={s: rows.remove_columns(sorted(outer)) for s, rows in splits.items()})
    if data.split_column in found.splits["train"].column_names:
        found = replace(found, splits={s: r.remove_columns([data.split_column]) for s, r in found.splits.items()})
    whole = found.splits["train"]
    train = whole.select(np.linspace(0, len(whole) - 1, min(_ROWS, len(whole))).astype(int))
    kinds = {name: _kind(train, name) for name in whole.column_names}
    for name in whole.column_names:
        _check_texts(whole, train, name, found.name)
    values = {name: [v for v in train[name] if v is not None] for name in kinds if kinds[name] in _COUNTED}
    for name, there in values.items():
        if kinds[name] == "decimal" and all(v != v or v == int(v) for v in there):
            kinds[name] = "number"  # 1.0, 2.0: as tables have whole numbers where some are missing
    counts = {name: len(set(there)) for name, there in values.items() if kinds[name] != "decimal"}
    lists = [name for name, kind in kinds.items() if kind in ("texts", "labels")]
    return Look(
        found.name,
        {split: len(rows) for split, rows in found.splits.items()},
        kinds,
        {name: count for name, count in counts.items() if _is_few(count, len(train))},
        {name: _most(len(text or "") for text in train[name]) for name, kind in kinds.items() if kind == "text"},
        next((tuple(train[0][name]) for name, kind in kinds.items() if kind == "pair"), ()),
        plain,
        tuple(name for name, there in values.items() if kinds[name] in _COUNTED[2:] and set(there) == {0, 1}),
        frozenset((a, b) for a in lists for b in lists if a != b and _as_long(train, a, b)),
        {split: tuple(c for c in kinds if c not in rows.column_names) for split, rows in found.splits.items()},
        tuple(name for name, count in counts.items() if count == 1 and len(train) > 1),
        tuple(name for name, there in values.items() if kinds[name] == "text" and _are_lists(set(there))),
        next((name for name in values if kinds[name] == "text" and _are_splits(set(values[name]))), None),
        {name: (min(there), max(there)) for name, there in values.items() if kinds[name] == "decimal"},
        bool(inner) and not deep,
        next(((n, odd) for n in values if kinds[n] == "text" and (odd := _no_splits(set(values[n])))), None),
        tuple(n for n, kind in kinds.items() if kind == "mapping" and any(map(_is_hollow, train[n]))),
    )


def _is_hollow(held: Mapping[str, Any] | None) -> bool:
    return held is not None and all(value == [] for value in held.values())


def _check_texts(whole: Dataset, train: Dataset, name: str, source: str) -> None:
    """Errors: `RunError` for a column of texts, but for some rows: no task reads it so. `train`: some of its rows."""
    if type(whole.features[name]).__name__ != "Json":
        return
    texts = [isinstance(value, str) for value in train[name] if value is not None]
    if sum(texts) <= len(texts) // 2:
        return
    for first, part in usable_rows.lists(whole, name):
        for row, value in enumerate(part, first):
            if value is not None and not isinstance(value, str):
                raise RunError(
                    f"data.train: column {name!r} of {source} holds texts, but row {row:,} holds {str(value)[:60]!r}: "
                    "make it a text, or take the row out"
                )


def _read(data: DataSection, seed: int) -> tuple[source.Source, bool]:
    """The data, and whether they are lines of text and nothing else."""
    lines = data.layout == "rows" and any(row_files.format_of(file) == ".txt" for file in source.files_of(data))
    try:
        found = source.load(data, seed)
    except RunError as error:
        if "no semicolon" not in str(error):
            raise
    else:  # a book has semicolons, too
        labels = found.splits["train"]["label"] if lines else ()
        if not lines or _is_few(len(set(labels)), len(labels)):
            return found, False
    return source.load(data, seed, plain="line"), True


def _within(rows: Dataset) -> Iterator[str]:
    """The paths of texts, numbers and the like within columns that are mappings; of lists of them, the first."""
    for name, feature in rows.features.items():
        if isinstance(feature, dict) and _kind(rows, name) == "mapping":
            yield from _leaves(name, feature)


def _leaves(path: str, feature: Any) -> Iterator[str]:
    if isinstance(feature, dict):
        for name, inner in feature.items():
            yield from _leaves(f"{path}.{name}", inner)
    elif (first := getattr(feature, "feature", None)) is not None:
        yield from _leaves(f"{path}.0", first)
    else:
        yield path


def _are_splits(values: set[str]) -> bool:
    """Whether all values are what splits are called."""
    words = {value.strip().lower() for value in values}
    known = {word for usual in source.USUAL.values() for word in usual}
    return len(words) > 1 and words <= known and bool(words & set(source.USUAL["train"]))


def _no_splits(values: set[str]) -> tuple[str, ...]:
    """What else is said where train and another split are named."""
    known = {word for usual in source.USUAL.values() for word in usual}
    words = {value.strip().lower() for value in values}
    odd = tuple(sorted(value for value in values if value.strip().lower() not in known))
    near = len(words & known) > 1 and words & set(source.USUAL["train"])
    return odd if near and len(odd) <= len(words & known) else ()


def _kind(rows: Dataset, name: str) -> str:
    """What a column holds, from its type."""
    feature: Any = rows.features[name]
    if type(feature).__name__ == "Image" or getattr(feature, "dtype", "") == "binary":
        return "image"
    inner = getattr(feature, "feature", None)
    if inner is None and isinstance(feature, list) and feature:
        inner = feature[0]
    if inner is not None:
        if isinstance(inner, dict):
            return (
                "messages"
                if {"role", "content"} <= set(inner)
                else "turns"
                if {"from", "value"} <= set(inner)
                else "list"
            )
        dtype = str(getattr(inner, "dtype", ""))
        if getattr(inner, "names", None):
            return "labels"
        return "texts" if "string" in dtype else "labels" if dtype.startswith(("int", "uint")) else "list"
    if isinstance(feature, dict):
        if set(feature) == {"bytes", "path"}:
            return "image"
        if name == "translation" and len(feature) >= 2:
            return "pair"
        return "turn" if {"role", "content"} <= set(feature) or {"from", "value"} <= set(feature) else "mapping"
    if type(feature).__name__.startswith("Translation"):
        return "pair"
    if getattr(feature, "names", None):
        return "label"
    dtype = str(getattr(feature, "dtype", ""))
    if "string" in dtype:
        return "text"
    known = {"int": "number", "uint": "number", "bool": "true/false", "float": "decimal", "double": "decimal"}
    return next((kind for start, kind in known.items() if dtype.startswith(start)), dtype or type(feature).__name__)


def _is_few(values: int, rows: int) -> bool:
    """Whether a column repeats a few values, as labels do."""
    return 2 <= values <= min(_FEW, max(2, rows // 2))


def _are_lists(values: set[str]) -> bool:
    """Whether texts with a separator are put together of others of them."""
    if len(values) > _FEW or any(len(value) > 100 for value in values):
        return False
    for mark in (",", ";", "|"):
        lists = [[part.strip() for part in value.split(mark)] for value in values]
        alone = {parts[0] for parts in lists if len(parts) == 1}
        if any(len(parts) > 1 and set(parts) & alone for parts in lists):
            return True
    return False


def _as_long(rows: Dataset, a: str, b: str) -> bool:
    return all(len(left or ()) == len(right or ()) for left, right in zip(rows[a], rows[b], strict=True))


def _most(lengths: Iterable[int]) -> int:
    """The length that 99 of 100 do not exceed."""
    ordered = sorted(lengths)
    return ordered[int(0.99 * (len(ordered) - 1))] if ordered else 0
