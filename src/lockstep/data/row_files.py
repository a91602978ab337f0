"""Local files as one `datasets.Dataset`: rows of .jsonl, .csv, .parquet and others; one folder per class; parallel
texts.

In: paths and the `data` section. Out: a data set, or a `RunError` that names the file, or how two files differ.
"""

from __future__ import annotations

import glob
import hashlib
import itertools
import os
import platform
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from lockstep.config.data_sources import USUAL
from lockstep.config.run import RunError
from lockstep.config.sections import DataSection
from lockstep.data import column_types, file_formats, row_reader, usable_rows, value_types
from lockstep.data.cache import ROWS
from lockstep.data.column_types import ALL, ColumnUse

if TYPE_CHECKING:
    from datasets import Dataset, Features


# file ending -> builder of `datasets`, or our own reader
FORMATS = {
    ".jsonl": "json",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",  # written by save_to_disk
    ".txt": "lines",
    ".tar": "archive",
}
_SAVED = re.compile(r"(data-\d{5}-of-\d{5}|dataset)\.arrow")
_ABOUT = ("state.json", "dataset_info.json")  # metadata files of save_to_disk
_FILES = "files of one split"
_SIMPLE = ("bool", "string", "large_string", "int8", "int16", "int32", "int64", "float32", "float64")  # of one value
INDEX = "__index_level_0__"  # column in which pandas stores an unnamed index
READ = (
    f"{', '.join(FORMATS)} (all but .parquet and .arrow also with {', '.join(file_formats.ENDINGS)} after it; .tar "
    "with data.stream=true)"
)


def format_of(file: Path) -> str | None:
    """The supported ending of a file, ignoring compression; None for any other."""
    ending = file_formats.plain(file).suffix
    if ending not in FORMATS or (ending in file_formats.BINARY and file_formats.is_compressed(file)):
        return None
    return ending


def is_of_folder(file: Path) -> bool:
    """Whether a file in a folder holds rows, by its name. In the output of save_to_disk, these are the .arrow files,
    without metadata and the caches of `map`."""
    ending = format_of(file)
    if ending == ".arrow":
        return _SAVED.fullmatch(file.name) is not None
    about = file.name in _ABOUT and all((file.parent / name).is_file() for name in _ABOUT)
    return ending is not None and file.name != "dataset_dict.json" and not about


def check_columns(local: dict[str, list[Path]], data: DataSection) -> None:
    """Check that keys for tables are set only if the files are tables. Errors: `RunError`."""
    if data.columns is not None and len(set(data.columns)) < len(data.columns):
        raise RunError(
            "LS2190",
            f"data.columns: {', '.join(data.columns)}: a name appears twice; give each column a different name",
        )
    files = [file for some in local.values() for file in some]
    others = [file for file in files if format_of(file) not in file_formats.SEPARATORS]
    if data.columns is not None and others:
        raise RunError(
            "LS2191",
            f"data.columns: applies to .csv and .tsv files without a header only, and {others[0]} is not one; "
            "remove data.columns",
        )
    for key in ("separator", "quote"):
        if getattr(data, key) is not None and others == files:
            raise RunError("LS2192", f"data.{key}: applies to .csv and .tsv files only, and there are none; remove it")
    if "encoding" in data.changed_keys and all(format_of(file) in file_formats.BINARY for file in files):
        raise RunError("LS2189", "data.encoding: applies to text files only, and there are none; remove it")


def are_texts(files: Sequence[Path]) -> bool:
    """Return whether all values in these files are untyped text: cells of tables, lines, and archives."""
    return all(format_of(file) in (*file_formats.SEPARATORS, ".txt", ".tar") for file in files)


def read(files: list[Path], key: str, plain: str | None, data: DataSection, use: ColumnUse = ALL) -> Dataset:
    """Read all rows, in file order. `plain`: a .txt file is unlabeled text, with one example per `line` or per `file`.
    Errors: `RunError`."""
    for file in files:
        if format_of(file) == ".tar":
            raise RunError(
                "LS2193",
                f"{key}: {file} is an archive, and archives can only be streamed in data.train; set "
                "data.stream=true, or unpack it",
            )
        file_formats.check(file, key, data.encoding)
    parts: list[tuple[Path, Dataset]] = []
    with file_formats.unpacked(files, key, data.encoding) as here:
        names = dict(zip(here, files, strict=True))
        section = data.model_copy(update={"encoding": "utf-8"})
        tables = {f: file_formats.table(f, key, section) for f in here if format_of(f) in file_formats.SEPARATORS}
        for (ending, _), group in itertools.groupby(here, lambda f: (format_of(f), _schema(f, tables))):
            assert ending is not None
            alike = list(group)
            builder = FORMATS[ending]
            if alike[0] in tables:
                rows = _table(alike, key, data, tables, use)
            elif builder == "lines":
                rows = _texts(alike, key, plain)
            elif builder == "json":
                rows = _json(alike, key, use)
            else:
                rows = _loaded(builder, alike, key, {})
            parts.append((names[alike[0]], without_index(rows)))
    return together(_alike_labels(declared(parts, key, data), use), key, use=use, lenient=data.drop_missing)


def _schema(file: Path, tables: Mapping[Path, file_formats.Table]) -> Any:
    """Properties that files must share to be read together. `datasets` applies the first file's types to all, which
    would turn the text "01" into the number 1."""
    if file in tables:
        return tables[file].dialect, tuple(tables[file].names)
    with suppress(pa.ArrowException, OSError):  # its reader reports the error
        if format_of(file) == ".parquet":
            return pq.read_schema(file)
        if format_of(file) == ".arrow":
            with pa.memory_map(str(file)) as mapped, suppress(pa.ArrowInvalid):
                return pa.ipc.open_stream(mapped).schema
            with pa.memory_map(str(file)) as mapped:
                return pa.ipc.open_file(mapped).schema
    return None


def declared(parts: list[tuple[Path, Dataset]], key: str, data: DataSection) -> list[tuple[Path, Dataset]]:
    """Apply `data.types` to columns that hold one type in some files and another in others. Errors: `RunError`."""
    for column, kind in (data.types or {}).items():
        kinds = [rows.features[column] for _, rows in parts if column in rows.column_names]
        if kinds and column_types.common(kinds) is None:
            split = key.removeprefix("data.")
            parts = [(f, column_types.declared(rows, {column: kind}, split, str(f))) for f, rows in parts]
    return parts


def _alike_labels(parts: list[tuple[Path, Dataset]], use: ColumnUse) -> list[tuple[Path, Dataset]]:
    """Convert text labels of tables and lines to integers if they are integers and other files hold numbers."""
    for column in use.maybe_numbers:
        kinds = [str(getattr(rows.features.get(column), "dtype", None)) for _, rows in parts]
        if any(kind.startswith(("int", "uint")) for kind in kinds):
            loose = [rows for file, rows in parts if are_texts([file]) and column_types.is_text(rows, column)]
            numbered = iter(as_numbers(loose, column))
            parts = [(f, next(numbered) if any(rows is one for one in loose) else rows) for f, rows in parts]
    return parts


def as_numbers(several: list[Dataset], column: str) -> list[Dataset]:
    """Convert text labels to integers if all are `whole_numbers`; blank ones become null. Otherwise return the rows
    unchanged."""
    texts = {text for rows in several for text in usable_rows.distinct(rows, column) if text is not None}
    if not column_types.whole_numbers({text for text in texts if text.strip()}):
        return several
    return [usable_rows.replaced(rows, column, _numbers, "int64") for rows in several]


def _numbers(texts: list[str | None]) -> list[int | None]:
    return [column_types.number_of(text) if text is not None and text.strip() else None for text in texts]


def without_index(rows: Dataset) -> Dataset:
    """Remove pandas' index column."""
    return rows.remove_columns(INDEX) if INDEX in rows.column_names else rows


def _table(
    files: list[Path], key: str, data: DataSection, table_of: dict[Path, file_formats.Table], use: ColumnUse
) -> Dataset:
    """Read tables of one dialect with the same columns. Errors: `RunError`."""
    tables = [table_of[file] for file in files]
    options = tables[0].dialect.options
    if data.columns is not None:
        options |= {"column_names": data.columns}
    kinds = {**use.kinds, **dict.fromkeys(data.types or (), "text")}
    if converters := file_formats.converters(tables, kinds):
        options |= {"converters": converters}
    rows = _loaded("csv", files, key, options)
    if len(rows) != (row_count := sum(each.rows for each in tables)):
        raise RunError(
            "LS2194",
            f"{key}: {', '.join(map(str, files))}: {len(rows):,} rows were read but the file has {row_count:,}; "
            "write the data as .jsonl",
        )
    return rows


def _loaded(builder: str, files: list[Path], key: str, options: dict[str, Any]) -> Dataset:
    """Read UTF-8 files with a builder of `datasets`. Errors: `RunError`."""
    import datasets

    try:
        rows = datasets.load_dataset(
            builder, _identity(files), data_files=[str(f) for f in files], split="train", **options
        )
    except Exception as error:  # datasets wraps its readers' errors
        names = ", ".join(map(str, files))
        blank = any(f.stat().st_size == 0 for f in files) or "corresponds to no data" in str(error)  # only a header
        if not blank and builder == "parquet":
            blank = sum(len(rows) for file in files for rows in row_reader.whole(file, key)) == 0
        if blank:
            raise _nothing(key, files) from None
        cause = " ".join(str(error.__cause__ or error).split())
        raise RunError("LS2196", f"{key}: cannot read {names} as {builder}: {cause}") from error
    return rows


def _identity(files: list[Path], *more: Any) -> str:
    """Identify file contents in the cache of `datasets`, which uses only modification times."""
    identities = [(f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    return hashlib.sha256(repr([identities, *more] if more else identities).encode()).hexdigest()[:16]


def _nothing(key: str, files: list[Path]) -> RunError:
    names = ", ".join(map(str, files))
    return RunError("LS2195", f"{key}: {names} holds no example: the file is empty or has a header only")


def _json(files: list[Path], key: str, use: ColumnUse) -> Dataset:
    """Read the needed columns of JSON files into the cache of `datasets`, with types that hold every value of every
    file. Errors: `RunError`.

    (The reader of `datasets` infers types from the first rows and converts texts among numbers to numbers.)"""
    import datasets
    from datasets.arrow_writer import ArrowWriter

    paths = [str(file.resolve()) for file in files]
    name = _identity(files, ROWS, paths, use.paths, use.also, use.within)
    path = Path(datasets.config.HF_DATASETS_CACHE) / "lockstep" / f"{name}.arrow"
    if path.is_file():
        return datasets.Dataset.from_file(str(path))
    shapes: dict[str, value_types.Shape] = {}
    count = 0
    for file in files:
        for chunk in row_reader.whole(file, key):
            count += row_reader.count(chunk)
            for column, values in chunk.items():
                shapes.setdefault(column, value_types.Shape()).look(values if use.may_be(column) else ())
    if not count:
        raise _nothing(key, files)
    features = datasets.Features({column: shapes[column].feature for column in use.of(list(shapes))})
    aside = path.with_name(f"{path.name}.{platform.node()}-{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with ArrowWriter(features=features, path=str(aside)) as writer:
            for file in files:
                for table in _tables(file, key, features):
                    writer.write_table(table)
            writer.finalize()
        os.replace(aside, path)
    except OSError as error:
        raise RunError(
            "LS2403",
            f"{key}: the cache of datasets, {path.parent}, cannot be written: {error.strerror or error}; free disk "
            "space, or set HF_DATASETS_CACHE to another folder",
        ) from error
    finally:
        aside.unlink(missing_ok=True)
    return datasets.Dataset.from_file(str(path))


def _is_null(feature: Any) -> bool:
    return getattr(feature, "dtype", None) == "null"


def _tables(file: Path, key: str, features: Features) -> Iterator[pa.Table]:
    row = 0
    for chunk in row_reader.whole(file, key):
        count = row_reader.count(chunk)
        columns = {name: chunk.get(name) or [None] * count for name in features}
        columns |= {name: [None] * count for name, feature in features.items() if _is_null(feature)}
        try:
            yield value_types.table_of(columns, features)
        except RunError as error:
            rows = f"rows {row:,} to {row + count - 1:,}"
            raise RunError(error.code, f"{key}: {file}, {rows}: {error.message}") from None
        row += count


# -- several formats -------------------------------------------------------------------------------------------------


def together(
    parts: Sequence[tuple[Any, Dataset]],
    key: str,
    what: str = _FILES,
    use: ColumnUse = ALL,
    lenient: bool = False,
) -> Dataset:
    """Concatenate all parts, with columns of one order and type: those of `use`, if known. `lenient`: a missing column
    is filled with null. Errors: `RunError`, which describes how two parts differ."""
    import datasets

    first, start = parts[0]
    names = use.of(list(dict.fromkeys(name for _, part in parts for name in part.column_names)))
    if len(parts) == 1:
        return start if names == start.column_names else start.select_columns(names)
    for file, part in parts[1:] if not lenient else ():
        if missing := [c for c in names if c in start.column_names and c not in part.column_names]:
            raise RunError(
                "LS2211",
                _differ(f"{key}: {what}", first, file, f"has no column {missing[0]!r}: it has {_named(part)}", start),
            )
        if more := [c for c in names if c in part.column_names and c not in start.column_names]:
            raise RunError(
                "LS2212", _differ(f"{key}: {what}", first, file, f"has an additional column {more[0]!r}", start)
            )
    features = datasets.Features()
    for column in names:
        kinds = {file: part.features[column] for file, part in parts if column in part.column_names}
        features[column] = column_types.common(list(kinds.values()))
        if features[column] is None:
            one = next(iter(kinds))
            other = next(file for file, kind in kinds.items() if column_types.common([kinds[one], kind]) is None)
            simple = what == _FILES and all(str(getattr(kinds[f], "dtype", "")) in _SIMPLE for f in (one, other))
            mend = f"; write all alike, or set data.types={{{column}: text}}" if simple else ""
            raise RunError(
                "LS2197",
                f"{key}: {what} must have columns of the same types, but {column!r} holds {_kind(kinds[one])} "
                f"in {one} and {_kind(kinds[other])} in {other}{mend}",
            )
    return datasets.concatenate_datasets([_cast(part, features, f"{key}: {what}", file) for file, part in parts])


def _cast(part: Dataset, features: Features, what: str, file: Any) -> Dataset:
    """Give a part these columns and types. Errors: `RunError` for a number that the common type cannot represent."""
    import datasets
    import pyarrow as pa

    part = _with_columns(part, list(features))
    mapped = [
        name for name in features if value_types.has_json(features[name]) and part.features[name] != features[name]
    ]
    try:
        if mapped:  # `datasets` cannot cast mappings to JSON
            written = value_types.in_memory(
                {name: list(part[name]) for name in mapped},
                datasets.Features({name: features[name] for name in mapped}),
            )
            rest = part.remove_columns(mapped)
            others = datasets.Features({name: features[name] for name in rest.column_names})
            parts = [*([rest.cast(others)] if others else []), written]
            return datasets.concatenate_datasets(parts, axis=1).select_columns(list(features))
        return part.cast(features)
    except pa.ArrowInvalid as error:
        raise RunError(
            "LS2410",
            f"{what} must have columns of the same types, and {file} has a number that does not fit the type of the "
            f"others: {error}; write integers and decimals in separate columns",
        ) from None


def _with_columns(part: Dataset, names: list[str]) -> Dataset:
    """Select these columns, adding missing ones as null."""
    for name in names:
        if name not in part.column_names:
            part = part.add_column(name, [None] * len(part))
    return part.select_columns(names)


def _kind(feature: Any) -> str:
    """Readable name of a type."""
    if isinstance(feature, Mapping):
        return f"mappings of {', '.join(feature)}"
    if value_types.is_json(feature):
        return "values of several types"
    if (items := getattr(feature, "feature", None)) is not None:
        return f"lists of {_kind(items)}"
    dtype = str(getattr(feature, "dtype", ""))
    descriptions = {"string": "texts", "large_string": "texts", "bool": "true and false"}
    starts = {"int": "whole numbers", "uint": "whole numbers", "float": "numbers with decimals"}
    if getattr(feature, "names", None):
        return "labels with names"
    return descriptions.get(dtype) or next(
        (description for start, description in starts.items() if dtype.startswith(start)), str(feature)
    )


def _named(dataset: Dataset) -> str:
    return ", ".join(dataset.column_names)


def _differ(what: str, first: Any, file: Any, how: str, start: Dataset) -> str:
    return f"{what} must have the same columns: {first} has {_named(start)}, and {file} {how}"


# -- lines -----------------------------------------------------------------------------------------------------------


def _texts(files: list[Path], key: str, plain: str | None) -> Dataset:
    """Read UTF-8 text files: one unlabeled text per non-blank `line` or per `file`; or `text;label` lines, where only
    the text may contain semicolons. Errors: `RunError`."""
    import datasets

    if plain == "file":
        texts = [file_formats.text_of(file, "utf-8") for file in files]
        return datasets.Dataset.from_dict({"text": [text for text in texts if text.strip()]})
    columns: dict[str, list[Any]] = {"text": [], **({} if plain else {"label": []})}
    for chunk in itertools.chain.from_iterable(row_reader.whole(file, key, plain) for file in files):
        for name, values in chunk.items():
            columns[name] += values
    return datasets.Dataset.from_dict(columns)


# ISO 639-1 codes, and the three-letter codes most common in corpora.
_CODES = (
    "aa ab ae af ak am an ar as av ay az ba be bg bi bm bn bo br bs ca ce ch co cr cs cu cv cy da de dv dz ee el en eo "
    "es et eu fa ff fi fj fo fr fy ga gd gl gn gu gv ha he hi ho hr ht hu hy hz ia id ie ig ii ik io is it iu ja jv ka "
    "kg ki kj kk kl km kn ko kr ks ku kv kw ky la lb lg li ln lo lt lu lv mg mh mi mk ml mn mr ms mt my na nb nd ne ng "
    "nl nn no nr nv ny oc oj om or os pa pi pl ps pt qu rm rn ro ru rw sa sc sd se sg si sk sl sm sn so sq sr ss st su "
    "sv sw ta te tg th ti tk tl tn to tr ts tt tw ty ug uk ur uz ve vi vo wa wo xh yi yo za zh zu "
    "eng deu ger fra fre spa ita por rus zho chi jpn kor ara hin ben ces cze pol nld dut swe dan fin ell gre tur ukr "
    "vie ind ron rum hun"
)
_LANGUAGES = frozenset(_CODES.split())
SIDES = (("source", "target"), ("src", "tgt"), ("src", "trg"))  # names of the two sides, besides languages


def is_language(name: str) -> bool:
    """Return whether a column name or ending is a language code: en, de_DE, pt-BR, eng_Latn."""
    code = re.fullmatch(r"([A-Za-z]{2,3})([-_][A-Za-z]{2,4})?", name)
    return code is not None and code[1].lower() in _LANGUAGES


IMAGES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")

# -- one folder per label ---------------------------------------------------------------------------------------------


def classes_in(folder: Path) -> list[Path]:
    """Subfolders that contain texts or images, sorted by name; their names are the labels."""
    if not folder.is_dir():
        return []
    return sorted(f for f in folder.iterdir() if f.is_dir() and not f.name.startswith(".") and _texts_in(f))


def _texts_in(folder: Path) -> list[Path]:
    """Text files (.txt or no ending, possibly compressed) and images in a folder."""
    return sorted(
        f
        for f in folder.iterdir()
        if (file_formats.plain(f).suffix in (".txt", "") or is_image(f)) and not f.name.startswith(".") and f.is_file()
    )


def is_image(file: Path) -> bool:
    """Return whether a file is an image, by its name."""
    return file.suffix.lower() in IMAGES


def _no_folder(root: Path) -> str:
    return "is not a folder" if root.exists() else "does not exist"


def class_files(data: DataSection) -> dict[str, list[Path]]:
    """Split -> its files, grouped by label. Errors: `RunError`."""
    named_splits = data.splits_named
    files: dict[str, list[Path]] = {}
    if data.source is not None:
        root = Path(data.source).expanduser()
        if not root.is_dir():
            raise RunError(
                "LS2200",
                f"data.source: {root} {_no_folder(root)}; layout: class_folders expects a folder with one "
                "subfolder per label",
            )
        folder_of = {s: next((root / w for w in words if classes_in(root / w)), None) for s, words in USUAL.items()}
        files = {split: _of_classes(classes_in(folder)) for split, folder in folder_of.items() if folder is not None}
        if not files and "train" not in named_splits:
            files = {"train": _of_classes(classes_in(root))}
            if not files["train"]:
                raise RunError(
                    "LS2201",
                    f"data.source: no folder in {root} holds texts or images; expected files like "
                    "train/LABEL/1.txt or LABEL/1.jpg",
                )
    for split, texts in named_splits.items():
        files[split] = []
        for text in texts:
            if not (folders := _matches(text, data, Path.is_dir)):
                raise RunError("LS2203", f"data.{split}: no such folder: {text}")
            files[split] += [file for f in folders for file in (_texts_in(f) or _of_classes(classes_in(f)))]
        if not files[split]:
            names = ", ".join(texts)
            raise RunError("LS2202", f"data.{split}: {names} holds no texts or images in folders named by label")
    return files


def _matches(text: str, data: DataSection, kind: Callable[[Path], bool]) -> list[Path]:
    """Matches of a path or pattern, relative to the working directory, or else to `data.source`."""
    places = (Path(text).expanduser(), Path(data.source or "").expanduser() / text)
    lists = (sorted(filter(kind, map(Path, glob.glob(str(place))))) for place in places)
    return next(filter(None, lists), [])


def _of_classes(folders: Iterable[Path]) -> list[Path]:
    return [file for folder in folders for file in _texts_in(folder)]


def read_classes(files: list[Path], key: str, data: DataSection) -> Dataset:
    """Columns text and label, or image (encoded bytes) and label. Errors: `RunError`."""
    import datasets

    encoding, images = data.encoding, [is_image(file) for file in files]
    if all(images):
        rows = {"image": [file.read_bytes() for file in files], "label": [file.parent.name for file in files]}
        kinds = {"image": datasets.Value("binary"), "label": datasets.Value("string")}
        return datasets.Dataset.from_dict(rows, features=datasets.Features(kinds))
    if any(images):
        text, image = files[images.index(False)], files[images.index(True)]
        raise RunError(
            "LS2204", f"{key}: {text} is a text file and {image} is an image; a data set holds either texts or images"
        )

    for file in files:
        file_formats.check(file, key, encoding)
    rows = {"text": [file_formats.text_of(f, encoding).strip() for f in files], "label": [f.parent.name for f in files]}
    return datasets.Dataset.from_dict(rows)


# -- one file per language -------------------------------------------------------------------------------------------


def named(file: Path) -> tuple[str, str]:
    """Stem and side of a file in a parallel corpus: train.en.gz and train.en.txt are (train, en)."""
    name = file_formats.plain(file).name
    if name.count(".") > 1:
        name = name.removesuffix(".txt")
    stem, _, side = name.rpartition(".")
    return stem, side


def parallel_in(folder: Path) -> dict[str, list[Path]]:
    """Stem -> its files, at least two, whose endings are languages or sides."""
    sides = {side for pair in SIDES for side in pair}
    files = sorted(f for f in folder.iterdir() if f.is_file()) if folder.is_dir() else []
    groups: dict[str, list[Path]] = {}
    for file in files:
        stem, side = named(file)
        if stem and (side in sides or is_language(side)):
            groups.setdefault(stem, []).append(file)
    return {stem: files for stem, files in groups.items() if len({named(f)[1] for f in files}) > 1}


def parallel_files(data: DataSection) -> dict[str, list[Path]]:
    """Split -> its files. Errors: `RunError`."""
    named_splits = data.splits_named
    splits: dict[str, list[Path]] = {}
    if data.source is not None:
        root = Path(data.source).expanduser()
        if not root.is_dir():
            raise RunError(
                "LS2205", f"data.source: {root} {_no_folder(root)}; name files in data.train: [train.en, train.de]"
            )
        splits = {split: files for split, words in USUAL.items() if (files := _of_split(root, words))}
        if not splits and "train" not in named_splits:
            splits = {"train": list(itertools.chain(*parallel_in(root).values()))}
            if not splits["train"]:
                raise RunError(
                    "LS2206",
                    f"data.source: {root} has no pair of files whose names differ only in the language, such as "
                    "train.en and train.de; name the two files in data.train",
                )
    for split, texts in named_splits.items():
        splits[split] = []
        for text in texts:
            if not (files := _matches(text, data, Path.exists)):
                raise RunError("LS2207", f"data.{split}: no such file: {text}")
            splits[split] += files
    return splits


def _of_split(root: Path, words: tuple[str, ...]) -> list[Path]:
    stems = parallel_in(root)
    for word in words:
        inside = parallel_in(root / word)
        for candidates in (
            stems.get(word, []),
            [file for stem, files in stems.items() if re.match(rf"{word}[-_.]", stem) for file in files],
            [file for files in inside.values() for file in files],
        ):
            if candidates:
                return candidates
    return []


def read_parallel(files: list[Path], key: str, data: DataSection) -> Dataset:
    """Read a parallel corpus: one column per side, in alphabetical order. Errors: `RunError`, also for files of
    different length."""
    import datasets

    columns: dict[str, list[str]] = {}
    together: dict[Path, dict[str, Path]] = {}
    for file in files:
        stem, side = named(file)
        group = together.setdefault(file.parent / stem, {})
        if side in group:
            raise RunError("LS2208", f"{key}: {group[side]} and {file} are both the {side} side; remove one of them")
        group[side] = file
    sides = sorted({side for group in together.values() for side in group})
    for called, group in together.items():
        if sorted(group) != sides or len(sides) < 2:
            raise RunError(
                "LS2209",
                f"{key}: {called} has {' and '.join(sorted(group))}; expected files of the same name for "
                f"{' and '.join(sides) if len(sides) > 1 else 'two sides'}, such as train.en and train.de",
            )
        lines = {side: _lines_text_files(file, key, data.encoding) for side, file in sorted(group.items())}
        counts = {side: len(texts) for side, texts in lines.items()}
        if len(set(counts.values())) > 1:
            line_counts = ", ".join(f"{group[side]} has {count:,} lines" for side, count in counts.items())
            raise RunError(
                "LS2210", f"{key}: {line_counts}: line n of one file must be the translation of line n of the other"
            )
        for side, texts in lines.items():
            columns.setdefault(side, []).extend(texts)
    return datasets.Dataset.from_dict(columns)


def _lines_text_files(file: Path, key: str, encoding: str) -> list[str]:
    """All lines, including blank ones, which keep parallel files aligned."""
    file_formats.check(file, key, encoding)
    lines = file_formats.text_of(file, encoding).split("\n")
    return lines[:-1] if lines[-1] == "" else lines
