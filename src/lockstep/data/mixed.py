"""Several sources read as one data set, whose rows follow each other source by source.

In: `data.sources` and the columns that the task reads. Out: a `Source` with these columns alone, called as the task
calls them, and one that says which source a row is from; or a `RunError` that names the source.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep.config.data_sources import OneSource
from lockstep.config.run import RunError
from lockstep.config.sections import DataSection
from lockstep.data import arrow_cache, column_scan, nested_columns, row_files
from lockstep.data.token_counts import TokenCounts
from lockstep.data.tokens import digest, examples_in

if TYPE_CHECKING:
    from datasets import Dataset

SOURCE = "source of the mixture"  # the column of which source of a mixture a row is from
_PAIR = "translation"  # the Hub's column of {language: text}


@dataclass(frozen=True)
class Source:
    """The splits of a data set; `validation` is absent when none was given or found."""

    name: str
    splits: dict[str, Dataset]
    left_out: dict[str, int] = field(default_factory=dict)  # split -> rows that `data.filter` left out
    sources: list[str] = field(default_factory=list)  # names of those of a mixture, by their numbers in `SOURCE`
    columns: tuple[str, ...] = ()  # that the task reads


def sections(data: DataSection) -> list[DataSection]:
    """What each source of a mixture is read by; `data` itself where it is none."""
    if data.sources is None:
        return [data]
    common = data.model_dump(
        include={"follow_links", "limit", "drop_missing", "stream", "stream_window", "stream_cache_gb"}
    )
    return [DataSection(**entry.own, **common) for entry in data.sources]


def load(
    data: DataSection,
    seed: int,
    plain: str | None,
    columns: Mapping[str, str],
    tokens: TokenCounts | None,
    read: Callable[..., Source],
) -> Source:
    """Read every source by `read`, which reads one. `columns`: those that are read, by their keys in the run file;
    none: all. Errors: `RunError`."""
    import datasets

    assert data.sources is not None
    parts: dict[str, list[tuple[str, Dataset]]] = {}
    fewer: Counter[str] = Counter()
    for number, (entry, section) in enumerate(zip(data.sources, sections(data), strict=True)):
        try:
            found = read(section, seed, plain, tokens=tokens and tokens.renamed(entry.rename))
        except RunError as error:
            raise RunError(f"data.sources: {entry.name}: {error}") from error
        fewer.update(found.left_out)
        for split, rows in found.splits.items():
            rows = called(rows, entry, columns, split, found.name)
            rows = with_names(rows) if data.stream else rows  # of train no label is known yet
            rows = rows.add_column(SOURCE, np.full(len(rows), number, dtype=np.int8))
            parts.setdefault(split, []).append((entry.name, rows))
    splits = {}
    for split, some in parts.items():
        together = row_files.agreeing(_named(some), f"data.sources: {split}", "sources of one mixture")
        splits[split] = datasets.concatenate_datasets(together)
    names = [entry.name for entry in data.sources]
    return Source(f"{len(names)} sources ({', '.join(names)})", splits, dict(fewer), names, tuple(columns.values()))


def each_alone(dataset: Dataset, key: str, encode: Callable[[Dataset, str], str]) -> tuple[str, list[int]]:
    """The file that `encode` makes of a split, with this key, and nothing; of a mixture each source on its own, so that
    no block of tokens holds texts of two, in one file, and how many examples each has. Errors: `RunError`."""
    if SOURCE not in dataset.column_names:
        return encode(dataset, key), []
    of = column_scan.numbers(dataset, SOURCE)
    files = []
    for number in range(int(of.max()) + 1):
        rows = np.flatnonzero(of == number)
        files.append(encode(dataset.select(rows), digest(key, number)) if len(rows) else None)
    counts = [examples_in(file) if file else 0 for file in files]
    return arrow_cache.concat([file for file in files if file], digest(key, counts)), counts


def theirs(entry: OneSource | None, columns: Mapping[str, str]) -> dict[str, str]:
    """The columns that the task reads, by their keys in the run file, as a source calls them. Errors: `RunError`."""
    if entry is None:
        return dict(columns)
    if unknown := [ours for ours in entry.rename if ours not in columns.values()]:
        raise RunError(
            f"data.sources: {entry.name}: rename: the task reads no column {unknown[0]!r}; it reads "
            f"{', '.join(columns.values())}"
        )
    return {key: entry.rename.get(column, column) for key, column in columns.items()}


def called(rows: Dataset, entry: OneSource, columns: Mapping[str, str], split: str, name: str) -> Dataset:
    """The columns that the task reads, under the names that it has for them. Errors: `RunError`."""
    found = theirs(entry, columns)
    for key, column in found.items():  # languages of a column of translations
        if column not in rows.column_names and isinstance(inner := rows.features.get(_PAIR), Mapping):
            found[key] = f"{_PAIR}.{column}" if column in inner else column
    rows = nested_columns.added(rows, found, split, name)
    for key, column in found.items():
        if column not in rows.column_names:
            raise RunError(
                f"data.sources: {entry.name}: {key}: the {split} split of {name} has no column {column!r}; it has "
                f"{', '.join(rows.column_names)}. Say what it is called here: rename: {{{columns[key]}: ...}}"
            )
    rows = rows.select_columns(list(dict.fromkeys(found.values())))
    return rows.rename_columns({found[key]: ours for key, ours in columns.items() if found[key] != ours})


def with_names(rows: Dataset) -> Dataset:
    """Labels with names as these names."""
    for column in rows.column_names:
        rows = _as_texts(rows, column)
    return rows


def _named(some: list[tuple[str, Dataset]]) -> list[tuple[str, Dataset]]:
    """Labels with names as these names, where not all sources have the same ones."""
    for column in some[0][1].column_names:
        features = [rows.features.get(column) for _, rows in some]
        if any(getattr(each, "names", None) for each in features) and any(each != features[0] for each in features):
            some = [(name, _as_texts(rows, column)) for name, rows in some]
    return some


def _as_texts(rows: Dataset, column: str) -> Dataset:
    import datasets

    names: Any = getattr(rows.features.get(column), "names", None)
    if names is None:
        return rows
    texts = [names[code] if code is not None and code >= 0 else None for code in rows[column]]
    place = rows.column_names
    changed = rows.remove_columns([column]).add_column(column, texts, feature=datasets.Value("string"))
    return changed.select_columns(place)
