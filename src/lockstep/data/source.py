"""Hub id, local files or the built-in set -> one `datasets.Dataset` a split, under the names train, validation and
test.

In: the `data` section of the run. Out: a `Source`, or a `RunError` that names the key, the file and what is there
instead. Imports `datasets` only when called: a worker that finds its tokens in the cache never needs it.
"""

from __future__ import annotations

import codecs
import csv
import glob
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.config.run import RunError
from lockstep.config.sections import DataSection
from lockstep.data import readable, text_files
from lockstep.data.downloads import downloading
from lockstep.data.hub_errors import explained

if TYPE_CHECKING:
    from datasets import Dataset

BUILTIN = "builtin/emotion"
# file ending -> the builder of `datasets` that reads it, and its options
FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    ".json": ("json", {}),
    ".jsonl": ("json", {}),
    ".csv": ("csv", {"keep_default_na": False}),  # a text that says "null" or "NA" is a text
    ".tsv": ("csv", {"keep_default_na": False, "sep": "\t", "quoting": 3}),
    ".parquet": ("parquet", {}),
    ".txt": ("lines", {}),
}
USUAL = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test",),
}
# layout -> which files a split has, and how they are read
_LAYOUTS = {
    "class_folders": (text_files.class_files, text_files.read_classes),
    "parallel": (text_files.parallel_files, text_files.read_parallel),
}


@dataclass(frozen=True)
class Source:
    """The splits of a data set; `validation` is absent when none was given or found."""

    name: str
    splits: dict[str, Dataset]


def files_of(data: DataSection) -> list[Path]:
    """The local files a source is read from, in order; empty for a Hub id, for the built-in set, and for a task that
    makes its data by itself."""
    if not given(data):
        return []
    return [file for files in (local_splits(data) or {}).values() for file in files]


def given(data: DataSection) -> bool:
    """Whether the run file says where data are."""
    return any(getattr(data, key) is not None for key in ("source", *USUAL))


def load(data: DataSection, seed: int, plain: str | None = None) -> Source:
    """Read all splits. `plain`: a .txt file is text and nothing else, each `line` or the whole `file` an example.

    Errors: `RunError`."""
    _quiet()
    if (data.source == BUILTIN or local_splits(data) is None) and (data.layout != "rows" or data.columns is not None):
        key = "columns" if data.columns is not None else "layout"
        raise RunError(f"data.{key}: for local files, and {data.source} is none; leave it out")
    if data.source == BUILTIN:
        source = _builtin(seed)
    elif (local := local_splits(data)) is not None:
        if data.columns is not None:
            _check_columns(local, data.columns)
        source = Source(
            data.source or "local files",
            {s: _read(files, f"data.{s}", plain, data) for s, files in local.items() if files},
        )
    else:
        source = _from_hub(data)
    if "train" not in source.splits:
        raise RunError(f"data.train: no training split in {source.name}; name it or its files in data.train")
    splits = source.splits
    if data.limit is not None:
        splits = {name: split.select(range(min(data.limit, len(split)))) for name, split in splits.items()}
    for name, split in splits.items():
        if len(split) == 0:
            raise RunError(f"data.{name}: the {name} split of {source.name} is empty")
    return Source(source.name, splits)


# -- local files -----------------------------------------------------------------------------------------------------


def _looks_local(text: str) -> bool:
    return text.startswith((".", "/", "~")) or text.endswith(tuple(FORMATS)) or any(c in text for c in "*?[")


def local_splits(data: DataSection) -> dict[str, list[Path]] | None:
    """Split -> files, or None when the source is not local. Errors: `RunError`, naming what is not there."""
    given = {split: getattr(data, split) for split in USUAL if getattr(data, split) is not None}
    if data.source is None:
        if not given:
            raise RunError("data: give data.source (a Hub id, a folder or a file) or data.train (files)")
        if data.layout != "rows":
            return _LAYOUTS[data.layout][0](data, USUAL)
        return {split: _expand(value, f"data.{split}") for split, value in given.items()}
    if data.source == BUILTIN:
        return None
    if data.layout != "rows":
        return _LAYOUTS[data.layout][0](data, USUAL)
    root = Path(data.source).expanduser()
    if root.is_dir():
        found = {split: _in_folder(root, split) for split in USUAL}
        if not any(found.values()) and "train" not in given:
            single = sorted(f for f in root.iterdir() if f.suffix in FORMATS)
            if not single:
                raise RunError(
                    f"data.source: the folder {root} holds no data file; "
                    f"wanted are files like train.jsonl with one of the endings {', '.join(FORMATS)}"
                )
            found["train"] = single
        for split, value in given.items():
            found[split] = _expand(value, f"data.{split}", root)
        return found
    if root.is_file() or _looks_local(data.source):
        found = {"train": _expand(data.source, "data.source")}
        return found | {split: _expand(value, f"data.{split}") for split, value in given.items()}
    return None


def _in_folder(root: Path, split: str) -> list[Path]:
    for word in USUAL[split]:
        files = sorted(
            f for f in root.iterdir() if f.is_file() and f.suffix in FORMATS and f.name.split(".")[0] == word
        )
        for pattern in (f"{word}[-_]*", f"{word}/*"):
            files = files or sorted(f for f in root.glob(pattern) if f.is_file() and f.suffix in FORMATS)
        if files:
            return files
    return []


def _expand(value: str | list[str], key: str, root: Path | None = None) -> list[Path]:
    files: list[Path] = []
    for text in [value] if isinstance(value, str) else value:
        path = Path(text).expanduser()
        if root is not None and not path.is_absolute() and not path.exists():
            path = root / path
        found = [path] if path.is_file() else sorted(Path(f) for f in glob.glob(str(path)) if Path(f).is_file())
        if not found:
            raise RunError(f"{key}: no such file: {path}")
        for file in found:
            if file.suffix not in FORMATS:
                raise RunError(f"{key}: {file} has none of the endings that can be read: {', '.join(FORMATS)}")
        files += found
    return files


def _check_columns(local: dict[str, list[Path]], names: list[str]) -> None:
    """Errors: `RunError` where `data.columns` does not name what is in a file, column by column."""
    if len(set(names)) < len(names):
        raise RunError(f"data.columns: {', '.join(names)}: a name is there twice")
    for files in local.values():
        for file in files:
            if FORMATS.get(file.suffix, ("", {}))[0] != "csv":
                raise RunError(f"data.columns: for .csv and .tsv files without a header, and {file} is none")


def _read(files: list[Path], key: str, plain: str | None, data: DataSection) -> Dataset:
    import datasets

    encoding = data.encoding
    if data.layout != "rows":
        return _LAYOUTS[data.layout][1](files, key, encoding)
    formats = {FORMATS[f.suffix][0] for f in files}
    if len(formats) != 1:
        raise RunError(
            f"{key}: files of different formats ({', '.join(str(f) for f in files)}); use one format a split"
        )
    for file in files:
        readable.check(file, key, encoding)
    builder, options = FORMATS[files[0].suffix]
    if builder == "lines":
        return _read_plain(files, plain, encoding) if plain else _read_lines(files, key, encoding)
    utf8 = codecs.lookup(encoding).name == "utf-8"
    if builder == "json" and not utf8:  # its reader knows UTF-8 only
        return datasets.Dataset.from_list([row for file in files for row in _rows_of(file, key, encoding)])
    if builder == "csv" and not utf8:
        options = options | {"encoding": encoding}
    if data.columns is not None:
        for file in files:
            if (there := len(first_row(file, encoding))) not in (0, len(data.columns)):
                raise RunError(f"{key}: {file} has {there} column(s), and data.columns names {len(data.columns)}")
        options = options | {"column_names": data.columns}
    try:
        return datasets.load_dataset(builder, data_files=[str(f) for f in files], split="train", **options)
    except Exception as error:  # datasets wraps whatever its readers raise
        if any(f.stat().st_size == 0 for f in files) or "corresponds to no data" in str(error):  # a header alone
            raise RunError(f"{key}: {', '.join(str(f) for f in files)} is empty, it holds no example") from None
        for file in files if builder == "json" else ():
            _rows_of(file, key, encoding)  # says on which line it goes wrong
        cause = " ".join(str(error.__cause__ or error).split())
        raise RunError(f"{key}: cannot read {', '.join(str(f) for f in files)} as {builder}: {cause}") from error


def first_row(file: Path, encoding: str) -> list[str]:
    """The cells of the first line of a .csv or .tsv file; none where it is empty."""
    return next(rows_of_table(file, encoding), [])


def rows_of_table(file: Path, encoding: str) -> Iterator[list[str]]:
    """The rows of a .csv or .tsv file, as they are."""
    options = FORMATS[file.suffix][1]
    with open(file, encoding=readable.codec(encoding), newline="") as opened:
        if "quoting" in options:
            yield from csv.reader(opened, delimiter=options["sep"], quoting=csv.QUOTE_NONE)
        else:
            yield from csv.reader(opened)


def _rows_of(file: Path, key: str, encoding: str) -> list[dict[str, Any]]:
    try:
        return readable.json_rows(file, encoding)
    except ValueError as error:
        raise RunError(f"{key}: {file}, {error}") from None


def _read_plain(files: list[Path], each: str, encoding: str) -> Dataset:
    """Texts without labels: each `line` that is not blank, or each whole `file`."""
    import datasets

    texts = [readable.text_of(file, encoding) for file in files]
    if each == "line":
        texts = [line for text in texts for line in text.split("\n")]
    return datasets.Dataset.from_dict({"text": [text for text in texts if text.strip()]})


def _read_lines(files: list[Path], key: str, encoding: str) -> Dataset:
    """`text;label` a line; the text may hold semicolons, the label may not."""
    import datasets

    texts: list[str] = []
    labels: list[str] = []
    for file in files:
        lines = readable.text_of(file, encoding).split("\n")  # splitlines would also cut at U+2028 and the like
        for number, line in enumerate(lines, 1):
            if line.strip():
                text, mark, label = line.rpartition(";")
                if not mark:
                    raise RunError(f"{key}: {file}, line {number}: wanted is 'text;label', there is no semicolon")
                texts.append(text)
                labels.append(label.strip())
    if labels and all(re.fullmatch("-?[0-9]+", label) for label in labels):
        return datasets.Dataset.from_dict({"text": texts, "label": [int(label) for label in labels]})
    return datasets.Dataset.from_dict({"text": texts, "label": labels})


# -- elsewhere -------------------------------------------------------------------------------------------------------


def _builtin(seed: int) -> Source:
    import datasets

    from lockstep.data import builtin

    features = datasets.Features(
        {
            "text": datasets.Value("string"),
            "label": datasets.ClassLabel(names=list(builtin.LABELS)),
            "true_label": datasets.Value("int64"),
        }
    )
    columns = builtin.emotion(seed, train=12_000)
    return Source(
        BUILTIN,
        {name: datasets.Dataset.from_dict(split, features=features) for name, split in columns.items()},
    )


def _from_hub(data: DataSection) -> Source:
    import datasets

    assert data.source is not None
    try:
        with downloading(data.source, "dataset"):
            found = datasets.load_dataset(data.source, data.config, revision=data.revision)
    except (
        Exception
    ) as error:  # network, authorisation, no such data set, a config to choose: all are the user's to mend
        raise RunError(
            f"data.source: {data.source!r} is not a local file or folder, and loading it from the Hub failed: "
            f"{explained(error, data.revision)}"
        ) from error
    splits: dict[str, Dataset] = {}
    for split, usual in USUAL.items():
        given = getattr(data, split)
        for name in [given] if given is not None else usual:
            if name in found:
                splits[split] = found[name]
                break
        else:
            if given is not None:
                raise RunError(
                    f"data.{split}: {data.source} has no split {given!r}; it has {', '.join(map(str, found))}"
                )
    return Source(data.source, splits)


def _quiet() -> None:
    import datasets

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what its readers raise is told once, by us
