"""Read a data set from the Hub, with all values as its files hold them.

In: a Hub id. Out: one `datasets.Dataset` per split, or a `RunError`. `datasets` infers types of JSON and CSV files: it
turns "01" into 1 and drops "null", "NA" and the like. Such files are therefore read again by `row_files`, unless the
data set's own page declares the types of its columns.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.config.data_sources import USUAL
from lockstep.config.run import RunError
from lockstep.config.sections import DataSection
from lockstep.data import annotated, column_types, file_formats, row_files, usable_rows, value_types
from lockstep.data.column_types import ColumnUse
from lockstep.data.hub import downloading, explained

if TYPE_CHECKING:
    from datasets import Dataset, DatasetBuilder

_INFERRED = {"json": (".json", ".jsonl"), "csv": (".csv", ".tsv")}  # builder that infers types -> endings
_FILE = re.compile(r"hf://datasets/(?P<repository>[^/]+(/[^/@]+)?)@(?P<commit>[^/]+)/(?P<path>.+)")
# Options of a data set's page that the readers of `row_files` know, or that do not change values.
_KNOWN = {"name", "version", "data_dir", "data_files", "description", "sep", "delimiter", "features"}


@dataclass(frozen=True)
class HubRows:
    """The splits of a Hub data set, those whose files hold untyped text, and notes on how they were read."""

    splits: dict[str, Dataset]
    of_texts: frozenset[str]
    notes: list[str]


def load(data: DataSection, use: ColumnUse) -> HubRows:
    """Download and read all splits. Errors: `RunError`."""
    import datasets

    assert data.source is not None
    try:
        with downloading(data.source, "dataset"):
            dataset = datasets.load_dataset(data.source, data.config, revision=data.revision)
    except Exception as error:  # network, permission, missing data set or config: user errors
        raise RunError(
            "LS2252",
            f"data.source: {data.source!r} is not a local file or folder, and loading it from the Hub failed: "
            f"{explained(error, data.revision)}",
        ) from error
    for name, rows in dataset.items():
        if row_files.INDEX in rows.column_names and rows.info.builder_name == "csv":  # rows wider than the header
            raise RunError(
                "LS2253",
                f"data.source: the {name} split of {data.source} is a table whose rows have more cells than its "
                "header, which shifts every value by one column; download the files and name them in "
                "data.train",
            )
    names = _names_of_splits(data, dataset)
    splits = {split: row_files.without_index(dataset[name]) for split, name in names.items()}
    kinds = {rows.info.builder_name for rows in splits.values()}
    if not kinds & _INFERRED.keys():
        return HubRows(splits, frozenset(), [])
    return _as_written(data, splits, names, use)


def _names_of_splits(data: DataSection, there: Mapping[Any, Any]) -> dict[str, str]:
    """Split -> its name in the data set. Errors: `RunError`."""
    names: dict[str, str] = {}
    for split, usual in USUAL.items():
        split_name = getattr(data, split)
        for name in [split_name] if split_name is not None else usual:
            if name in there:
                names[split] = name
                break
        else:
            if split_name is not None:
                raise RunError(
                    "LS2254",
                    f"data.{split}: {data.source} has no split {split_name!r}; it has {', '.join(map(str, there))}",
                )
    return names


# -- values as in the files ------------------------------------------------------------------------------------------


def _as_written(data: DataSection, splits: dict[str, Dataset], names: dict[str, str], use: ColumnUse) -> HubRows:
    """Read JSON and CSV files again, with all values unchanged. Errors: `RunError`, also for columns of texts and
    numbers in files that only `datasets` reads."""
    builder, file_of = _builder(data)
    inferred = next(iter({rows.info.builder_name for rows in splits.values()} & _INFERRED.keys()))
    declared = None if builder is None else builder.info.features
    section = None if builder is None else _section(data, builder.config)
    files: dict[str, list[Path]] = {}
    if builder is not None and section is not None:
        of_split = {str(split): paths for split, paths in (builder.config.data_files or {}).items()}
        files = {split: [file_of(str(path)) for path in of_split.get(name, ())] for split, name in names.items()}
    there = [file for some in files.values() for file in some]
    if not there or not all(_is_read(file, inferred) for file in there):
        return _unread(data, splits, use, declared is not None)
    assert section is not None
    read, of_texts = dict(splits), set()
    texts = [column for column, feature in (declared or {}).items() if getattr(feature, "dtype", None) == "string"]
    use = replace(use, kinds={**use.kinds, **dict.fromkeys(texts, "text")})
    for split, some in files.items():
        written = _read(some, f"data.{split}", section, use)
        read[split] = written if declared is None else _with_texts(splits[split], written, split, data)
        if declared is None and row_files.are_texts(some):
            of_texts.add(split)
    return HubRows(read, frozenset(of_texts), [])


def _is_read(file: Path, builder: str) -> bool:
    """Return whether `row_files` reads a file of this builder; documents in JSON have layouts of their own."""
    ending = row_files.format_of(file)
    return ending in _INFERRED[builder] and (ending != ".json" or annotated.layout_of(file, "utf-8") is None)


def _builder(data: DataSection) -> tuple[DatasetBuilder | None, Callable[[str], Path]]:
    """The data set's builder, which knows its files and its page, and the function that returns the local copy of a
    file; None if neither the Hub nor its cache has them."""
    import datasets
    from huggingface_hub import constants, hf_hub_download, snapshot_download

    def downloaded(address: str) -> Path:
        if (file := _FILE.fullmatch(address)) is None:
            return Path(address)  # elsewhere: no file of the Hub
        return Path(
            hf_hub_download(
                file["repository"], file["path"], repo_type="dataset", revision=file["commit"].replace("%2F", "/")
            )
        )

    assert data.source is not None
    name, there = data.source, downloaded
    try:
        if constants.HF_HUB_OFFLINE:
            name = snapshot_download(name, repo_type="dataset", revision=data.revision, local_files_only=True)
            there = Path
        revision = None if constants.HF_HUB_OFFLINE else data.revision
        with tempfile.TemporaryDirectory() as empty:  # the usual cache adds the inferred types to those of the page
            return datasets.load_dataset_builder(name, data.config, revision=revision, cache_dir=empty), there
    except Exception:  # the rows are readable, but not the files themselves
        return None, Path


def _section(data: DataSection, config: Any) -> DataSection | None:
    """The section to read the files with, or None if the data set's page sets an option that only `datasets` knows."""
    from datasets.packaged_modules.csv.csv import CsvConfig
    from datasets.packaged_modules.json.json import JsonConfig

    if not isinstance(config, CsvConfig | JsonConfig):
        return None
    usual = type(config)()
    odd = [f.name for f in fields(config) if getattr(config, f.name) != getattr(usual, f.name)]
    if not set(odd) <= _KNOWN:
        return None
    separator = getattr(config, "delimiter", None) or getattr(config, "sep", ",")
    if separator == ",":
        return data
    return data.model_copy(update={"separator": separator}) if separator in file_formats.NAMES else None


def _read(files: list[Path], key: str, section: DataSection, use: ColumnUse) -> Dataset:
    """Read files of the Hub's cache. Errors: `RunError`, which name them by their address."""
    try:
        return row_files.read(files, key, None, section, use)
    except RunError as error:
        message = re.sub(
            r"[^\s,]*/datasets--([^/\s]+?)--([^/\s]+)/snapshots/([0-9a-f]+)/", r"hf://datasets/\1/\2@\3/", error.message
        )
        raise RunError(error.code, message) from None


def _with_texts(rows: Dataset, written: Dataset, split: str, data: DataSection) -> Dataset:
    """Return rows with declared types whose text columns hold the texts of the file: `datasets` drops "NA", reformats
    dates, and serializes texts among numbers as JSON."""
    assert data.source is not None
    for column in rows.column_names if len(written) == len(rows) else ():
        mixed = value_types.is_json(written.features.get(column))
        if column_types.is_text(rows, column) and (mixed or column_types.is_text(written, column)):
            only = written.select_columns(column)
            only = column_types.declared(only, {column: "text"}, split, data.source) if mixed else only
            rows = usable_rows.with_column(rows, column, only)
    return rows


def _unread(data: DataSection, splits: dict[str, Dataset], use: ColumnUse, declared: bool) -> HubRows:
    """Return rows as `datasets` read them, with a note if it read labels of a table as numbers. Errors: `RunError` if
    a used column mixes texts and numbers, because `datasets` would turn the texts into numbers."""
    notes = []
    for split, rows in splits.items():
        for column in use.of(rows.column_names):
            if rows.info.builder_name == "json" and value_types.has_json(rows.features[column]):
                raise RunError(
                    "LS2460",
                    f"data.source: column {column!r} of the {split} split of {data.source} mixes texts with values of "
                    'other types, and the library that reads its files here would turn the text "01" into the number 1 '
                    'and drop "null"; download the files, and name them in data.train',
                )
            numbers = str(getattr(rows.features[column], "dtype", "")).startswith(("int", "float"))
            if column in use.maybe_numbers and numbers and rows.info.builder_name == "csv" and not declared:
                notes.append(
                    f"column {column!r} of the {split} split of {data.source} was read as numbers, and the "
                    'texts are not available: labels such as "01" and "1" would be one label. To keep the texts, '
                    "download the files and name them in data.train"
                )
    return HubRows(splits, frozenset(), notes)
