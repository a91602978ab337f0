"""Reads a data set (Hub id, local files, the built-in set, or a mixture) as one `datasets.Dataset` per split: train,
validation and test.

In: the `data` section of the run. Out: a `Source`, or a `RunError` that names the key, the source or file, and the
existing alternatives; links that lead out of their folders are refused. Sources of a mixture are concatenated, with a
column for each row's source. Imports `datasets` only when called.
"""

from __future__ import annotations

import glob
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from lockstep.config.data_sources import OWN, USUAL, OneSource, is_address
from lockstep.config.lazy import lazy
from lockstep.config.run import RunError
from lockstep.config.sections import DataSection
from lockstep.data import arrow_cache
from lockstep.data.arrow_cache import digest, examples_in
from lockstep_trace.coded import quantity

if TYPE_CHECKING:
    from datasets import Dataset

    from lockstep.config import key_aliases
    from lockstep.data import (
        annotated,
        builtin,
        column_types,
        file_formats,
        hub_rows,
        labels,
        remote,
        row_files,
        usable_rows,
        value_types,
    )
    from lockstep.data import hub as pinning
    from lockstep.data.column_types import ColumnUse, Kind
    from lockstep.data.usable_rows import TokenCounts
else:  # readers: none of them for data in the cache
    (key_aliases,) = lazy("lockstep.config", "key_aliases")
    pinning, annotated, builtin, column_types = lazy("lockstep.data", "hub", "annotated", "builtin", "column_types")
    file_formats, hub_rows, labels, remote = lazy("lockstep.data", "file_formats", "hub_rows", "labels", "remote")
    row_files, usable_rows, value_types = lazy("lockstep.data", "row_files", "usable_rows", "value_types")


def check_links(data: DataSection, files: Mapping[str, list[Path]]) -> None:
    """Refuse links that lead out of the named folders. `files`: split -> files, listed or named. Errors: `RunError` if
    one lies outside everything the section names and `data.follow_links` is not set."""
    if data.follow_links:
        return
    named = set(_named_places(data))
    inside: dict[Path, Path | None] = {}  # folder -> resolved path; None: outside
    for split, some in files.items():
        out = []
        for file in some:
            if file.parent not in inside:
                real = file.parent.resolve()
                inside[file.parent] = real if _is_below(real, named) else None
            if (inside[file.parent] is None or file.is_symlink()) and not _is_below(file.resolve(), named):
                out.append(file)
        if out:
            more = f" (and {len(out) - 1:,} more like it)" if len(out) > 1 else ""
            raise RunError(
                "LS2240",
                f"data.{split}: {out[0]} is a link to {out[0].resolve()}{more}, which is outside of the folder "
                "that the run file names. A folder from someone else could expose a private file this way; if "
                "the links are intended, set data.follow_links=true",
            )


def _is_below(path: Path, named: set[Path]) -> bool:
    return path in named or any(parent in named for parent in path.parents)


def _named_places(data: DataSection) -> Iterator[Path]:
    """Resolved paths of the files, folders and glob roots that the section names."""
    root = Path(data.source).expanduser() if data.source is not None else None
    texts = itertools.chain(*data.splits_named.values())
    for text in (*texts, *([data.source] if data.source is not None else [])):
        path = Path(text).expanduser()
        for place in (path, root / path if root is not None else path):
            if not place.exists():
                parts = place.parts
                end = next((i for i, part in enumerate(parts) if re.search(r"[*?\[]", part)), len(parts))
                place = Path(*parts[:end])
                if end == len(parts) or not place.is_dir():
                    continue
            real = place.resolve()
            yield real
            for folder in real.parents:
                if folder.name == "snapshots":  # the Hub's cache: files are links to a sibling folder
                    yield folder.parent / "blobs"


SOURCE = "source of the mixture"  # column of source numbers
_PAIR = "translation"  # the Hub's column of {language: text}


@dataclass(frozen=True)
class Source:
    """The splits of a data set; `validation` is absent if the data has none."""

    name: str
    splits: dict[str, Dataset]
    left_out: dict[str, int] = field(default_factory=dict)  # split -> rows removed by `data.filter`
    sources: list[str] = field(default_factory=list)  # mixture: names by number in `SOURCE`
    columns: tuple[str, ...] = ()  # columns that the task reads
    notes: list[str] = field(default_factory=list)  # on how columns were read
    of_texts: frozenset[str] = frozenset()  # splits whose files hold untyped text


_Of = TypeVar("_Of")


def sections(data: DataSection) -> list[DataSection]:
    """The section of each source of a mixture, or `data` itself for a single source."""
    if data.sources is None:
        return [data]
    common = data.model_dump(
        include={"follow_links", "limit", "drop_missing", "drop_unusable", "stream", "stream_window", "stream_cache_gb"}
    )
    return [DataSection(**entry.own, **common) for entry in data.sources]


def _of_each(data: DataSection, read: Callable[[DataSection], _Of]) -> list[_Of]:
    """Read each source of a mixture, or `data` itself. Errors: `RunError`, which names the source of a mixture."""
    if data.sources is None:
        return [read(data)]
    values = []
    for entry, section in zip(data.sources, sections(data), strict=True):
        try:
            values.append(read(section))
        except RunError as error:
            raise RunError(error.code, f"data.sources: {entry.name}: {error.message}") from error
    return values


def load_mixture(
    data: DataSection,
    seed: int,
    plain: str | None,
    columns: Mapping[str, str],
    tokens: TokenCounts | None,
    kinds: Mapping[str, Kind],
) -> Source:
    """Read every source. `columns`: key of the run file -> column to read; empty: all. Errors: `RunError`."""
    assert data.sources is not None
    parts: dict[str, list[tuple[str, Dataset]]] = {}
    fewer: Counter[str] = Counter()
    notes: list[str] = []
    of_texts: set[tuple[str, str]] = set()
    for number, (entry, section) in enumerate(zip(data.sources, sections(data), strict=True)):
        try:
            theirs = {entry.rename.get(column, column): kind for column, kind in kinds.items()}
            read = source_columns(entry, columns)
            source = _load(
                section, seed, plain, {}, tokens and tokens.renamed(entry.rename), _use_of(section, read, theirs)
            )
        except RunError as error:
            raise RunError(error.code, f"data.sources: {entry.name}: {error.message}") from error
        fewer.update(source.left_out)
        notes += [f"data.sources: {entry.name}: {note}" for note in source.notes]
        of_texts |= {(entry.name, split) for split in source.of_texts}
        for split, rows in source.splits.items():
            rows = with_task_columns(rows, entry, columns, split, source.name)
            rows = with_names(rows) if data.stream else rows  # train's labels are still unknown
            rows = rows.add_column(SOURCE, np.full(len(rows), number, dtype=np.int8))
            parts.setdefault(split, []).append((entry.name, rows))
    splits = {}
    for split, some in parts.items():
        loose = [(name, split) in of_texts for name, _ in some]
        some = _numbers_as_texts(_named_mixed(some), loose, [c for c, kind in kinds.items() if kind == "label"])
        splits[split] = row_files.together(some, f"data.sources: {split}", "sources of one mixture")
    names = [entry.name for entry in data.sources]
    return Source(
        f"{len(names)} sources ({', '.join(names)})", splits, dict(fewer), names, tuple(columns.values()), notes
    )


def _numbers_as_texts(
    some: list[tuple[str, Dataset]], loose: list[bool], labels: list[str]
) -> list[tuple[str, Dataset]]:
    """Convert integer labels of tables and lines (`loose`) back to the original texts if other sources have text
    labels."""
    for column in labels:
        if any(column_types.is_text(rows, column) for _, rows in some):
            some = [
                (name, column_types.declared(rows, {column: "text"}, "train", name) if of_texts else rows)
                for (name, rows), of_texts in zip(some, loose, strict=True)
            ]
    return some


def encode_by_source(dataset: Dataset, key: str, encode: Callable[[Dataset, str], str]) -> tuple[str, list[int]]:
    """Encode a split with `encode` under this key. A mixture is encoded source by source, so that no block of tokens
    mixes sources, and concatenated, with the number of examples per source. Errors: `RunError`."""
    if SOURCE not in dataset.column_names:
        return encode(dataset, key), []
    of = usable_rows.numbers(dataset, SOURCE)
    files = []
    for number in range(int(of.max()) + 1):
        rows = np.flatnonzero(of == number)
        files.append(encode(dataset.select(rows), digest(key, number)) if len(rows) else None)
    counts = [examples_in(file) if file else 0 for file in files]
    return arrow_cache.concat([file for file in files if file], digest(key, counts)), counts


def map_rows(
    rows: Dataset, convert: Callable[[dict[str, list]], dict[str, list]], features: Mapping[str, Any]
) -> Dataset:
    """Map batches of rows with `convert`, replacing their columns; a mixture keeps its source column."""
    import datasets

    others = [column for column in rows.column_names if column != SOURCE]
    of_source = {column: rows.features[column] for column in rows.column_names if column == SOURCE}
    return rows.map(
        convert,
        batched=True,
        remove_columns=others,
        features=datasets.Features({**features, **of_source}),
        load_from_cache_file=False,  # its key does not cover functions of other modules that `convert` calls
    )


def source_columns(entry: OneSource | None, columns: Mapping[str, str]) -> dict[str, str]:
    """Key of the run file -> column, as named in this source. Errors: `RunError`."""
    if entry is None:
        return dict(columns)
    if unknown := [ours for ours in entry.rename if ours not in columns.values()]:
        raise RunError(
            "LS2241",
            f"data.sources: {entry.name}: rename: the task reads no column {unknown[0]!r}; it reads "
            f"{', '.join(columns.values())}",
        )
    return {key: entry.rename.get(column, column) for key, column in columns.items()}


def with_task_columns(rows: Dataset, entry: OneSource, columns: Mapping[str, str], split: str, name: str) -> Dataset:
    """Select the task's columns and rename them to the task's names. Errors: `RunError`."""
    names = source_columns(entry, columns)
    for key, column in names.items():  # languages of a `translation` column
        if column not in rows.column_names and isinstance(inner := rows.features.get(_PAIR), Mapping):
            names[key] = f"{_PAIR}.{column}" if column in inner else column
    rows = usable_rows.added(rows, names, split, name)
    for key, column in names.items():
        if column not in rows.column_names:
            raise RunError(
                "LS2242",
                f"data.sources: {entry.name}: {key}: the {split} split of {name} has no column {column!r}; it "
                f"has {', '.join(rows.column_names)}. Map the column of this source: rename: {{{columns[key]}: "
                "...}",
            )
    rows = rows.select_columns(list(dict.fromkeys(names.values())))
    return rows.rename_columns({names[key]: ours for key, ours in columns.items() if names[key] != ours})


def with_names(rows: Dataset) -> Dataset:
    """Replace label codes by their names."""
    for column in rows.column_names:
        rows = _as_texts(rows, column)
    return rows


def _named_mixed(some: list[tuple[str, Dataset]]) -> list[tuple[str, Dataset]]:
    """Replace label codes by their names if sources differ in their names."""
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


BUILTIN = "builtin/emotion"


def files_of(data: DataSection) -> list[Path]:
    """Local files of a source, in order. Empty for a Hub id, remote files, the built-in set, and tasks that create
    their own data."""
    if data.sources is not None:
        return [file for files in _of_each(data, files_of) for file in files]
    if not names_data(data) or data.addresses:
        return []
    return [file for files in (local_splits(data) or {}).values() for file in files]


def names_data(data: DataSection) -> bool:
    """Return whether the run file names any data."""
    return any(getattr(data, key) is not None for key in ("source", "sources", *USUAL))


def names_hub(data: DataSection, *sources: str | None) -> bool:
    """Whether data, or another of a run's `sources`, may be on the Hub: neither an address nor local."""
    every = [*sources, data.source, *(each.source for each in data.sources or ())]
    names = [source for source in every if source is not None and not source.startswith("builtin/")]
    return any(not is_address(name) and not Path(name).expanduser().exists() for name in names)


def is_local(data: DataSection) -> bool:
    """Return whether no data is on the Hub. Errors: `RunError` for missing local files."""
    here = _of_each(data, lambda each: each.source in (BUILTIN, None) or bool(each.addresses) or bool(files_of(each)))
    return all(here)


def check_document(data: DataSection, document: str | None) -> None:
    """Refuse `task.document` if no local file is a .txt file. Errors: `RunError`."""
    local = document == "line" and is_local(data) and not any(each.addresses for each in sections(data))
    if local and not any(file_formats.plain(file).suffix == ".txt" for file in files_of(data)):
        raise RunError("LS2256", "task.document: applies to .txt files only, and data names none; remove it")


def remote_facts(data: DataSection) -> list[list[remote.Fact]]:
    """Address, size and tag of every remote file, per source; queries the stores. Errors: `RunError`."""
    facts = _of_each(data, lambda each: remote.facts(each, local_splits) if each.addresses else None)
    return [each for each in facts if each is not None]


def pinned(data: DataSection) -> DataSection:
    """Add the current commit to every Hub address of a stream; queries the Hub. Errors: `RunError`."""
    if not data.stream:
        return data
    if data.sources is not None:
        each = list(zip(data.sources, _of_each(data, pinned), strict=True))
        entries = [entry.model_copy(update={key: getattr(section, key) for key in OWN}) for entry, section in each]
        return data.model_copy(update={"sources": entries})
    if data.source not in (None, BUILTIN) and not is_address(data.source) and local_splits(data) is None:
        data = pinning.repository(data)
    return pinning.addresses(data)


def load(
    data: DataSection,
    seed: int,
    plain: str | None = None,
    columns: Mapping[str, str] | None = None,
    tokens: TokenCounts | None = None,
    kinds: Mapping[str, Kind] | None = None,
) -> Source:
    """Read all splits; for a stream, all but train.

    `plain`: .txt files are unlabeled text, one example per `line` or per `file`. `columns`: key of the run file ->
    column to read, where dotted paths become columns; None: all. `tokens`: counts tokens for `data.filter`. `kinds`:
    kinds of columns, as the task reads them. Errors: `RunError`."""
    if data.sources is not None:
        return load_mixture(data, seed, plain, columns or {}, tokens, kinds or {})
    return _load(data, seed, plain, columns or {}, tokens, _use_of(data, columns, kinds))


def _use_of(data: DataSection, columns: Mapping[str, str] | None, kinds: Mapping[str, Kind] | None) -> ColumnUse:
    """The columns of a source to read, and columns that may name labels."""
    if columns is None:
        return column_types.ColumnUse(None, kinds or {})
    also = [f"{column}{suffix}" for column in kinds or () for suffix in labels.NAME_SUFFIXES]
    split_column = [] if data.split_column is None else [data.split_column]
    paths = [*columns.values(), *data.filter, *(data.types or ()), *split_column]
    return column_types.ColumnUse(tuple(dict.fromkeys(paths)), kinds or {}, tuple(also), (_PAIR,))


def _load(
    data: DataSection,
    seed: int,
    plain: str | None,
    columns: Mapping[str, str],
    tokens: TokenCounts | None,
    use: ColumnUse,
) -> Source:
    """Read one source. Errors: `RunError`."""
    if data.addresses:
        with remote.downloaded(data, local_splits) as local:
            return replace(_load(local, seed, plain, columns, tokens, use), name=remote.display_name(data))
    _quiet()
    files = local_splits(data)
    _check_kind(data, files is not None)
    if data.source == BUILTIN and not data.stream and files is None:
        source = Source(BUILTIN, dict(_emotion(seed)))
    elif files is not None and not (data.source == BUILTIN and data.stream):
        _check_keys(files, data)
        name = data.source or _name_of(files)
        files = {split: some for split, some in files.items() if some and not (data.stream and split == "train")}
        read = {split: _read(some, f"data.{split}", plain, data, use) for split, some in files.items()}
        of_texts = {split for split, some in files.items() if data.layout == "rows" and row_files.are_texts(some)}
        if data.source == BUILTIN:  # labels of files are names
            read = {split: with_names(rows) for split, rows in _emotion(seed).items()} | read
        source = Source(name, read, of_texts=frozenset(of_texts))
    elif data.stream:
        raise RunError(
            "LS2244", f"data.stream: {data.source} has no shards to stream; name files or a data set of the Hub"
        )
    else:
        hub = hub_rows.load(data, use)
        source = Source(data.source or "", hub.splits, notes=hub.notes, of_texts=hub.of_texts)
    if "train" not in source.splits and not data.stream:
        raise RunError(
            "LS2245", f"data.train: {source.name} has no training split; name the split or its files in data.train"
        )
    source = _typed(source, data, use)
    splits, left_out = usable_rows.filtered(source.splits, data, source.name, tokens)
    if data.split_column is not None:
        splits = usable_rows.by_split_column(splits, data, source.name)
    splits = {split: usable_rows.added(rows, columns, split, source.name) for split, rows in splits.items()}
    if data.limit is not None:
        splits = {name: split.select(range(min(data.limit, len(split)))) for name, split in splits.items()}
    for name, split in splits.items():
        if len(split) == 0:
            raise RunError("LS2246", f"data.{name}: the {name} split of {source.name} is empty")
    return replace(source, splits=splits, left_out=left_out, columns=tuple(columns.values()))


def _typed(source: Source, data: DataSection, use: ColumnUse) -> Source:
    """Apply `data.types`, and convert labels of tables and lines to integers if all are integers. Errors:
    `RunError`."""
    splits, notes = dict(source.splits), list(source.notes)
    for split, rows in splits.items():
        column_types.check_names(data.types, rows.column_names, f"the {split} split of {source.name}")
        splits[split] = column_types.declared(rows, data.types, split, source.name)
    for column, kind in use.maybe_numbers.items() if not data.stream else ():
        loose = [s for s in splits if s in source.of_texts and column_types.is_text(splits[s], column)]
        others = [s for s in splits if s not in source.of_texts and column_types.is_text(splits[s], column)]
        if column in (data.types or ()) or not loose or others:
            continue
        texts = {t for s in loose for t in usable_rows.distinct(splits[s], column) if t and t.strip()}
        numbered = row_files.as_numbers([splits[split] for split in loose], column)
        splits |= dict(zip(loose, numbered, strict=True))
        if kind == "number":
            for split in loose:
                with suppress(RunError):  # the label reader names an invalid row
                    splits[split] = column_types.declared(splits[split], {column: "number"}, split, source.name)
        else:
            for note_of in (column_types.label_note, column_types.points_note, column_types.blanks_note):
                notes += note_of(column, texts)
    return replace(source, splits=splits, notes=notes)


def _name_of(files: Mapping[str, Sequence[Path]]) -> str:
    """Name files that no key names together: the first one, without its folder, and the number of others."""
    paths = list(dict.fromkeys(path for some in files.values() for path in some))
    return paths[0].name + (f" and {quantity(len(paths) - 1, 'other file')}" if len(paths) > 1 else "")


def _check_kind(data: DataSection, is_local: bool) -> None:
    """Refuse keys that do not apply to this kind of data: files, Hub data set, built-in set. Errors: `RunError`."""
    for key in ("columns", "separator", "quote", "layout", "encoding"):
        if not is_local and key in data.changed_keys:
            name = data.source
            raise RunError("LS2243", f"data.{key}: applies to local files only, and {name} is not one; remove it")
    if data.source == BUILTIN and data.train is not None:
        raise RunError(
            "LS2420",
            f"data.train: cannot be combined with data.source: {BUILTIN}, which has a training split; remove "
            "data.train, or set data.source to null (on a command line: data.source=null)",
        )
    for key in ("config", "revision"):
        if (is_local or data.source == BUILTIN) and key in data.changed_keys:
            name = data.source or "data.train"
            raise RunError(
                "LS2255", f"data.{key}: applies to data sets of the Hub only, and {name} is not one; remove it"
            )


# -- local files -----------------------------------------------------------------------------------------------------


def local_splits(data: DataSection) -> dict[str, list[Path]] | None:
    """Split -> files, or None if the source is not local. Errors: `RunError` for missing files and for links that lead
    elsewhere."""
    if data.addresses:
        return None
    if (splits := _local_splits(data)) is not None:
        check_links(data, splits)
    return splits


def _local_splits(data: DataSection) -> dict[str, list[Path]] | None:
    named_splits = data.splits_named
    if data.source is None:
        if not named_splits:
            raise RunError(
                "LS2247", "data: no data given; set data.source (a Hub id, a folder or a file) or data.train (files)"
            )
        if (files := _files_of_layout(data)) is not None:
            return files
        return {split: _expand(value, f"data.{split}", data.layout) for split, value in named_splits.items()}
    if data.source == BUILTIN:
        return {split: _expand(value, f"data.{split}", data.layout) for split, value in named_splits.items()} or None
    if (files := _files_of_layout(data)) is not None:
        return files
    root = Path(data.source).expanduser()
    if root.is_dir():
        splits = {split: [] if split in named_splits else in_folder(root, split, data.layout) for split in USUAL}
        if not any(splits.values()) and "train" not in named_splits:
            single = sorted(f for f in root.iterdir() if is_rows(f, data.layout))
            if not single:
                endings = row_files.READ if data.layout == "rows" else ", ".join(annotated.ENDINGS[data.layout])
                raise RunError(
                    "LS2248",
                    f"data.source: the folder {root} holds no data file; "
                    f"expected files like train.jsonl with one of the endings {endings}",
                )
            splits["train"] = single
        for split, value in named_splits.items():
            splits[split] = _expand(value, f"data.{split}", data.layout, root)
        return splits
    named_as_files = row_files.format_of(root) is not None or any(c in data.source for c in "*?[")
    if root.is_file() or named_as_files or pinning.names_place(data.source):
        splits = {"train": _expand([data.source], "data.source", data.layout)}
        return splits | {split: _expand(value, f"data.{split}", data.layout) for split, value in named_splits.items()}
    return None


def _files_of_layout(data: DataSection) -> dict[str, list[Path]] | None:
    """List the files of a layout that names them in its own way, or return None."""
    if data.layout == "class_folders":
        return row_files.class_files(data)
    return row_files.parallel_files(data) if data.layout == "parallel" else None


def in_folder(root: Path, split: str, layout: str) -> list[Path]:
    """Files of a folder that belong to a split by their name or subfolder. Errors: `RunError` if files of the split
    follow two naming schemes, so that the choice is ambiguous."""
    groups = []  # by naming scheme
    for word in USUAL[split]:
        groups.append([f for f in root.iterdir() if f.name.split(".")[0] == word])
        groups += [list(root.glob(pattern)) for pattern in (f"{word}[-_]*", f"{word}/*")]
    rows = (sorted(f for f in files if is_rows(f, layout)) for files in groups)
    files, *others = [each for each in rows if each] or [[]]
    for file in (*files[1:], *(file for each in others for file in each)) if layout == "rows" else ():
        same_format = row_files.format_of(file) == row_files.format_of(files[0])
        if same_format != (file in files):
            names = " and ".join(str(each.relative_to(root)) for each in (files[0], file))
            raise RunError(
                "LS2257", f"data.source: {root} holds {names}; name the files of the split {split}: data.{split}=[...]"
            )
    return files


def is_rows(file: Path, layout: str) -> bool:
    """Return whether a file of a folder belongs to the data set, by its name."""
    if not file.is_file():
        return False
    if layout != "rows":
        return file_formats.plain(file).suffix in annotated.ENDINGS[layout]
    return row_files.is_of_folder(file)


def _check_keys(files: dict[str, list[Path]], data: DataSection) -> None:
    """Refuse keys of tables that do not apply to these files. Errors: `RunError`."""
    if data.layout == "rows":
        row_files.check_columns(files, data)
        return
    for key in ("separator", "quote") if data.layout == "conll" else ("columns", "separator", "quote"):
        if getattr(data, key) is not None:
            raise RunError("LS2249", f"data.{key}: cannot be combined with data.layout: {data.layout}; remove it")


def _near(path: Path) -> str:
    """Suggest a similar existing file, for a message."""
    with suppress(OSError):
        if (near := key_aliases.close_file(path, path.parent.iterdir())) is not None:
            return f"; did you mean {near}?"
    return ""


def _or_folder(key: str) -> str:
    return " or folder" if key == "data.source" else ""


def _expand(texts: list[str], key: str, layout: str, root: Path | None = None) -> list[Path]:
    files: list[Path] = []
    for text in texts:
        path = Path(text).expanduser()
        if root is not None and not path.is_absolute() and not path.exists():
            path = root / path
        matches = [path] if path.is_file() else sorted(Path(f) for f in glob.glob(str(path)) if Path(f).is_file())
        if not matches:
            reason = f"no such file{_or_folder(key)}: {path}{_near(path)}"
            if path.is_dir():
                reason = f"{path} is a folder; name its files, for example {path / '*.jsonl'}"
            raise RunError("LS2250", f"{key}: {reason}")
        for file in matches:
            if layout == "rows" and row_files.format_of(file) is None:
                raise RunError("LS2251", f"{key}: {file} has an unknown file type; expected {row_files.READ}")
        files += matches
    return files


def _read(files: list[Path], key: str, plain: str | None, data: DataSection, use: ColumnUse) -> Dataset:
    match data.layout:
        case "class_folders":
            return row_files.read_classes(files, key, data)
        case "parallel":
            return row_files.read_parallel(files, key, data)
        case "conll":
            return annotated.read_conll(files, key, data)
        case "squad":
            return annotated.read_squad(files, key, data)
        case "columns" | "records":
            return annotated.read_documents(files, key, data, use)
    for file in files:
        annotated.check_rows(file, key, data.encoding)
    return row_files.read(files, key, plain, data, use)


# -- Hub and built-in data -------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _emotion(seed: int) -> dict[str, Dataset]:
    """Generate the built-in set, cached: it takes 0.1 s and is usually requested repeatedly."""
    import datasets

    features = datasets.Features(
        {
            "text": datasets.Value("string"),
            "label": datasets.ClassLabel(names=list(builtin.LABELS)),
            "true_label": datasets.Value("int64"),
        }
    )
    columns = builtin.emotion(seed, train=12_000)
    return {name: datasets.Dataset.from_dict(split, features=features) for name, split in columns.items()}


def _quiet() -> None:
    import datasets

    datasets.disable_progress_bars()
    value_types.keep_json_exact()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # reader errors are reported by us, once
