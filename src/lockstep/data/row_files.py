"""Rows in local files: .json, .jsonl, .csv, .tsv, .parquet, .arrow and .txt, also compressed, also of several formats.

In: the files of a split, in order. Out: their rows as a `datasets.Dataset`, or a `RunError` that names the key, the
file and the line, or in what two files differ. Imports `datasets` only when called.
"""

from __future__ import annotations

import codecs
import hashlib
import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.config.run import RunError
from lockstep.config.sections import DataSection
from lockstep.data import compressed, readable, tables

if TYPE_CHECKING:
    from datasets import Dataset

# file ending -> the builder of `datasets` that reads it, and its options
FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    ".jsonl": ("json", {}),
    ".json": ("json", {}),
    ".csv": ("csv", {}),  # with the options of its dialect
    ".tsv": ("csv", {}),
    ".parquet": ("parquet", {}),
    ".arrow": ("arrow", {}),  # as save_to_disk writes them
    ".txt": ("lines", {}),
    ".tar": ("archive", {}),
}
_SAVED = re.compile(r"(data-\d{5}-of-\d{5}|dataset)\.arrow")
_ABOUT = ("state.json", "dataset_info.json")  # files of save_to_disk beside the rows
INDEX = "__index_level_0__"  # what pandas calls an index without a name, which it writes as a column
READ = (
    f"{', '.join(FORMATS)} (all but .parquet and .arrow also with {', '.join(compressed.ENDINGS)} after it; .tar with "
    "data.stream=true)"
)


def format_of(file: Path) -> str | None:
    """The ending, of those that are read, that a file has, whether or not it is compressed; None for any other."""
    found = compressed.plain(file).suffix
    return found if found in FORMATS and not (found in readable.BINARY and compressed.is_compressed(file)) else None


def is_of_folder(file: Path) -> bool:
    """Whether a file of a folder holds rows, by its name: of what save_to_disk wrote, its .arrow files do, and not what
    it says about them, nor what `map` left there."""
    ending = format_of(file)
    if ending == ".arrow":
        return _SAVED.fullmatch(file.name) is not None
    about = file.name in _ABOUT and all((file.parent / name).is_file() for name in _ABOUT)
    return ending is not None and file.name != "dataset_dict.json" and not about


def check_columns(local: dict[str, list[Path]], data: DataSection) -> None:
    """Errors: `RunError` where keys about tables are given, and files are none."""
    if data.columns is not None and len(set(data.columns)) < len(data.columns):
        raise RunError(f"data.columns: {', '.join(data.columns)}: a name is there twice")
    files = [file for some in local.values() for file in some]
    others = [file for file in files if format_of(file) not in tables.SEPARATORS]
    if data.columns is not None and others:
        raise RunError(f"data.columns: for .csv and .tsv files without a header, and {others[0]} is none")
    for key in ("separator", "quote"):
        if getattr(data, key) is not None and others == files:
            raise RunError(f"data.{key}: for .csv and .tsv files, and there are none")


def read(files: list[Path], key: str, plain: str | None, data: DataSection) -> Dataset:
    """All rows, in the order of the files. `plain`: a .txt file is text and nothing else, each `line` or the whole
    `file` an example. Errors: `RunError`."""
    import datasets

    for file in files:
        if format_of(file) == ".tar":
            raise RunError(f"{key}: {file} is an archive; archives are read in train, with data.stream=true")
        readable.check(file, key, data.encoding)
    parts: list[tuple[Path, Dataset]] = []
    with compressed.unpacked(files, key) as there:
        given = dict(zip(there, files, strict=True))
        found = {file: tables.table(file, key, data) for file in there if format_of(file) in tables.SEPARATORS}
        for (ending, _), some in itertools.groupby(there, lambda f: (format_of(f), f in found and found[f].dialect)):
            assert ending is not None
            alike = list(some)
            rows = _table(alike, key, data, found) if alike[0] in found else _read(alike, ending, key, plain, data)
            parts.append((given[alike[0]], without_index(rows)))
    if len(parts) == 1:
        return parts[0][1]
    return datasets.concatenate_datasets(agreeing(parts, key))


def _read(files: list[Path], ending: str, key: str, plain: str | None, data: DataSection) -> Dataset:
    """Files of one format, none of them compressed. Errors: `RunError`."""
    encoding = data.encoding
    builder, options = FORMATS[ending]
    if builder == "lines":
        return _plain(files, plain, encoding) if plain else _lines(files, key, encoding)
    utf8 = codecs.lookup(encoding).name == "utf-8"
    if builder == "json" and not utf8:  # its reader knows UTF-8 only
        return of_rows([row for file in files for row in _rows_of(file, key, encoding)])
    if builder == "json":
        for file in files:
            readable.check_levels(file, key)
    return _loaded(builder, files, key, encoding, options)


def of_rows(rows: Sequence[Mapping[str, Any]]) -> Dataset:
    """Rows with all columns that any of them has, and null where one has none (`Dataset.from_list` takes the columns of
    the first row). Errors: what pyarrow raises for a column of several kinds."""
    import datasets

    columns = dict.fromkeys(name for row in rows for name in row)
    return datasets.Dataset.from_dict({name: [row.get(name) for row in rows] for name in columns})


def without_index(rows: Dataset) -> Dataset:
    """Without the column that pandas makes of an index."""
    return rows.remove_columns(INDEX) if INDEX in rows.column_names else rows


def _table(files: list[Path], key: str, data: DataSection, known: dict[Path, tables.Table]) -> Dataset:
    """Tables of one dialect. Errors: `RunError`."""
    found = [known[file] for file in files]
    options = found[0].dialect.options
    if codecs.lookup(data.encoding).name != "utf-8":
        options |= {"encoding": data.encoding}
    if data.columns is not None:
        options |= {"column_names": data.columns}
    if converters := tables.converters(found):
        options |= {"converters": converters}
    rows = _loaded("csv", files, key, data.encoding, options)
    if len(rows) != (wanted := sum(each.rows for each in found)):
        raise RunError(
            f"{key}: {', '.join(map(str, files))}: {len(rows):,} rows were read, and there are {wanted:,}; write them "
            "as .jsonl"
        )
    return rows


def _loaded(builder: str, files: list[Path], key: str, encoding: str, options: dict[str, Any]) -> Dataset:
    """What a reader of `datasets` makes of files. Errors: `RunError`."""
    import datasets

    found = [(f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    name = hashlib.sha256(repr(found).encode()).hexdigest()[:16]  # its own cache tells files by their times alone
    try:
        return datasets.load_dataset(builder, name, data_files=[str(f) for f in files], split="train", **options)
    except Exception as error:  # datasets wraps whatever its readers raise
        if any(f.stat().st_size == 0 for f in files) or "corresponds to no data" in str(error):  # a header alone
            raise RunError(f"{key}: {', '.join(str(f) for f in files)} is empty, it holds no example") from None
        for file in files if builder == "json" else ():
            _rows_of(file, key, encoding)  # says on which line it goes wrong
        cause = " ".join(str(error.__cause__ or error).split())
        raise RunError(f"{key}: cannot read {', '.join(str(f) for f in files)} as {builder}: {cause}") from error


# -- several formats -------------------------------------------------------------------------------------------------


def agreeing(parts: Sequence[tuple[Any, Dataset]], key: str, what: str = "files of one split") -> list[Dataset]:
    """Give all parts columns of one order and type. Errors: `RunError`, which says in what two of them differ."""
    first, start = parts[0]
    wanted = start.features
    for file, part in parts[1:]:
        if missing := [c for c in start.column_names if c not in part.column_names]:
            raise RunError(
                _differ(f"{key}: {what}", first, file, f"has no column {missing[0]!r}: it has {_named(part)}", start)
            )
        if more := [c for c in part.column_names if c not in wanted]:
            raise RunError(_differ(f"{key}: {what}", first, file, f"has a column {more[0]!r} more", start))
    for column in start.column_names:
        kinds = {file: part.features[column] for file, part in parts}
        common = _common(list(kinds.values()))
        if common is None:
            other = next(file for file, kind in kinds.items() if _common([kinds[first], kind]) is None)
            raise RunError(
                f"{key}: {what} must agree in what their columns hold: {column!r} holds "
                f"{_kind(kinds[first])} in {first} and {_kind(kinds[other])} in {other}"
            )
        wanted = type(wanted)({**wanted, column: common})
    return [part.select_columns(start.column_names).cast(wanted) for _, part in parts]


def _common(kinds: list[Any]) -> Any:
    """The type that stands for all of these without a loss, or None."""
    names = [getattr(kind, "dtype", None) for kind in kinds]
    known = [kind for kind, name in zip(kinds, names, strict=True) if name != "null"]
    if not known or all(kind == known[0] for kind in known):
        return known[0] if known else kinds[0]
    told = {str(getattr(kind, "dtype", kind)) for kind in known}
    if any(getattr(kind, "names", None) for kind in known):
        return None
    for alike, to in ((("string", "large_string"), "large_string"), (("int8", "int16", "int32", "int64"), "int64")):
        if told <= set(alike):
            return next((kind for kind in known if getattr(kind, "dtype", "") == to), None) or _value(to)
    return None


def _value(dtype: str) -> Any:
    import datasets

    return datasets.Value(dtype)


def _kind(feature: Any) -> str:
    """A type for a person."""
    dtype = str(getattr(feature, "dtype", ""))
    known = {"string": "texts", "large_string": "texts", "bool": "true and false"}
    starts = {"int": "whole numbers", "uint": "whole numbers", "float": "numbers with decimals"}
    if getattr(feature, "names", None):
        return "labels with names"
    return known.get(dtype) or next((told for start, told in starts.items() if dtype.startswith(start)), str(feature))


def _named(dataset: Dataset) -> str:
    return ", ".join(dataset.column_names)


def _differ(what: str, first: Any, file: Any, how: str, start: Dataset) -> str:
    return f"{what} must have the same columns: {first} has {_named(start)}, and {file} {how}"


# -- json and lines --------------------------------------------------------------------------------------------------


def _rows_of(file: Path, key: str, encoding: str) -> list[dict[str, Any]]:
    try:
        return readable.json_rows(file, encoding)
    except ValueError as error:
        raise RunError(f"{key}: {file}, {error}") from None


def _plain(files: list[Path], each: str, encoding: str) -> Dataset:
    """Texts without labels: each `line` that is not blank, or each whole `file`."""
    import datasets

    texts = [readable.text_of(file, encoding) for file in files]
    if each == "line":
        texts = [line for text in texts for line in text.split("\n")]
    return datasets.Dataset.from_dict({"text": [text for text in texts if text.strip()]})


def _lines(files: list[Path], key: str, encoding: str) -> Dataset:
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
