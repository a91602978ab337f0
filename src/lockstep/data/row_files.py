"""Local files as one `datasets.Dataset`: rows of .jsonl, .csv, .parquet and others; folders of a class each; parallel
texts.

In: paths and the `data` section. Out: a data set, or a `RunError` that names the file, and where two of them disagree.
"""

from __future__ import annotations

import glob
import hashlib
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.config.data_sources import USUAL
from lockstep.config.run import RunError
from lockstep.config.sections import DataSection
from lockstep.data import file_formats, row_reader

if TYPE_CHECKING:
    from datasets import Dataset


# file ending -> the builder of `datasets` that reads it, or what we read
FORMATS = {
    ".jsonl": "json",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",  # as save_to_disk writes them
    ".txt": "lines",
    ".tar": "archive",
}
_SAVED = re.compile(r"(data-\d{5}-of-\d{5}|dataset)\.arrow")
_ABOUT = ("state.json", "dataset_info.json")  # files of save_to_disk beside the rows
INDEX = "__index_level_0__"  # what pandas calls an index without a name, which it writes as a column
READ = (
    f"{', '.join(FORMATS)} (all but .parquet and .arrow also with {', '.join(file_formats.ENDINGS)} after it; .tar "
    "with data.stream=true)"
)


def format_of(file: Path) -> str | None:
    """The ending, of those that are read, that a file has, whether or not it is compressed; None for any other."""
    ending = file_formats.plain(file).suffix
    if ending not in FORMATS or (ending in file_formats.BINARY and file_formats.is_compressed(file)):
        return None
    return ending


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
        raise RunError("LS2189", "data.encoding: applies to files of text only, and there are none; remove it")


def read(files: list[Path], key: str, plain: str | None, data: DataSection) -> Dataset:
    """All rows, in the order of the files. `plain`: a .txt file is text and nothing else, each `line` or the whole
    `file` an example. Errors: `RunError`."""
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
        for (ending, _), group in itertools.groupby(here, lambda f: (format_of(f), f in tables and tables[f].dialect)):
            assert ending is not None
            alike = list(group)
            builder = FORMATS[ending]
            if alike[0] in tables:
                rows = _table(alike, key, data, tables)
            elif builder == "lines":
                rows = _texts(alike, key, plain)
            else:
                rows = _loaded(builder, alike, key, {})
            parts.append((names[alike[0]], without_index(rows)))
    return together(parts, key)


def of_rows(rows: Sequence[Mapping[str, Any]]) -> Dataset:
    """Rows with all columns that any of them has, and null where one has none (`Dataset.from_list` takes the columns of
    the first row). Errors: what pyarrow raises for a column of several kinds."""
    import datasets

    columns = dict.fromkeys(name for row in rows for name in row)
    return datasets.Dataset.from_dict({name: [row.get(name) for row in rows] for name in columns})


def without_index(rows: Dataset) -> Dataset:
    """Without the column that pandas makes of an index."""
    return rows.remove_columns(INDEX) if INDEX in rows.column_names else rows


def _table(files: list[Path], key: str, data: DataSection, table_of: dict[Path, file_formats.Table]) -> Dataset:
    """Tables of one dialect. Errors: `RunError`."""
    tables = [table_of[file] for file in files]
    options = tables[0].dialect.options
    if data.columns is not None:
        options |= {"column_names": data.columns}
    if converters := file_formats.converters(tables):
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
    """The rows of files in UTF-8 by a reader of `datasets`, which is faster than ours and keeps columns of mixed types.
    What it fails on is read by ours, which names the line. Errors: `RunError`."""
    import datasets

    for file in files if builder == "json" else ():
        row_reader.check_levels(file, key)
    identities = [(f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    name = hashlib.sha256(repr(identities).encode()).hexdigest()[:16]  # its own cache tells files by their times alone
    try:
        rows = datasets.load_dataset(builder, name, data_files=[str(f) for f in files], split="train", **options)
    except Exception as error:  # datasets wraps whatever its readers raise
        names = ", ".join(map(str, files))
        blank = any(f.stat().st_size == 0 for f in files) or "corresponds to no data" in str(error)  # a header alone
        if not blank and builder in ("json", "parquet"):
            blank = sum(_count(rows) for file in files for rows in row_reader.whole(file, key)) == 0
        if blank:
            raise RunError(
                "LS2195", f"{key}: {names} holds no example: the file is empty or has a header only"
            ) from None
        cause = " ".join(str(error.__cause__ or error).split())
        raise RunError("LS2196", f"{key}: cannot read {names} as {builder}: {cause}") from error
    return _without_times(rows, files, key) if builder == "json" else rows


def _count(rows: row_reader.Rows) -> int:
    return len(next(iter(rows.values()), ())) if isinstance(rows, dict) else len(rows)


def _without_times(rows: Dataset, files: list[Path], key: str) -> Dataset:
    """Replace times by the texts of the file: JSON has no type for times, and `datasets` reads texts as times if all of
    a column look like them, or all at one place within its lists and mappings."""
    for name, feature in list(rows.features.items()):
        if "Value('timestamp" in str(feature):
            names = rows.column_names
            chunks = [chunk for file in files for chunk in row_reader.whole(file, key)]
            texts = [text for chunk in chunks for text in chunk.get(name, [None] * _count(chunk))]
            rows = rows.rename_column(name, f"{name} as a time").add_column(name, texts).select_columns(names)
    return rows


# -- several formats -------------------------------------------------------------------------------------------------


def together(parts: Sequence[tuple[Any, Dataset]], key: str, what: str = "files of one split") -> Dataset:
    """All parts, one after the other, with columns of one order and type. Errors: `RunError`, which says in what two of
    them differ."""
    import datasets

    first, start = parts[0]
    if len(parts) == 1:
        return start
    features = start.features
    for file, part in parts[1:]:
        if missing := [c for c in start.column_names if c not in part.column_names]:
            raise RunError(
                "LS2211",
                _differ(f"{key}: {what}", first, file, f"has no column {missing[0]!r}: it has {_named(part)}", start),
            )
        if more := [c for c in part.column_names if c not in features]:
            raise RunError("LS2212", _differ(f"{key}: {what}", first, file, f"has a column {more[0]!r} more", start))
    for column in start.column_names:
        kinds = {file: part.features[column] for file, part in parts}
        common = _common(list(kinds.values()))
        if common is None:
            other = next(file for file, kind in kinds.items() if _common([kinds[first], kind]) is None)
            raise RunError(
                "LS2197",
                f"{key}: {what} must have columns of the same types, but {column!r} holds {_kind(kinds[first])} "
                f"in {first} and {_kind(kinds[other])} in {other}",
            )
        features = type(features)({**features, column: common})
    alike = [part.select_columns(start.column_names).cast(features) for _, part in parts]
    return datasets.concatenate_datasets(alike)


def _common(kinds: list[Any]) -> Any:
    """The type that stands for all of these without a loss, or None."""
    import datasets

    names = [getattr(kind, "dtype", None) for kind in kinds]
    typed = [kind for kind, name in zip(kinds, names, strict=True) if name != "null"]
    if not typed or all(kind == typed[0] for kind in typed):
        return typed[0] if typed else kinds[0]
    dtypes = {str(getattr(kind, "dtype", kind)) for kind in typed}
    if any(getattr(kind, "names", None) for kind in typed):
        return None
    for alike, to in ((("string", "large_string"), "large_string"), (("int8", "int16", "int32", "int64"), "int64")):
        if dtypes <= set(alike):
            return next((kind for kind in typed if getattr(kind, "dtype", "") == to), None) or datasets.Value(to)
    return None


def _kind(feature: Any) -> str:
    """A type for a person."""
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
    """Texts without labels, each `line` that is not blank or each whole `file`; or `text;label` a line, where the text
    may hold semicolons and the label may not. Files are in UTF-8. Errors: `RunError`."""
    import datasets

    if plain == "file":
        texts = [file_formats.text_of(file, "utf-8") for file in files]
        return datasets.Dataset.from_dict({"text": [text for text in texts if text.strip()]})
    columns: dict[str, list[Any]] = {"text": [], **({} if plain else {"label": []})}
    for chunk in itertools.chain.from_iterable(row_reader.whole(file, key, plain) for file in files):
        for name, values in chunk.items():
            columns[name] += values
    if (labels := columns.get("label")) and all(re.fullmatch("-?[0-9]+", label) for label in labels):
        columns["label"] = [int(label) for label in labels]
    return datasets.Dataset.from_dict(columns)


# The codes of ISO 639-1, and those of three letters that corpora are called by most.
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
SIDES = (("source", "target"), ("src", "tgt"), ("src", "trg"))  # what the two sides are called, besides languages


def is_language(name: str) -> bool:
    """Whether a column or an ending stands for a language: en, de_DE, pt-BR, eng_Latn."""
    code = re.fullmatch(r"([A-Za-z]{2,3})([-_][A-Za-z]{2,4})?", name)
    return code is not None and code[1].lower() in _LANGUAGES


IMAGES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")

# -- a folder for each label -----------------------------------------------------------------------------------------


def splits_named(data: DataSection) -> dict[str, list[str]]:
    """Split -> the paths that the run file names for it."""
    values = {split: getattr(data, split) for split in USUAL}
    return {s: [value] if isinstance(value, str) else value for s, value in values.items() if value is not None}


def classes_in(folder: Path) -> list[Path]:
    """The folders in a folder that hold texts or images, in order of their names, which are the labels."""
    if not folder.is_dir():
        return []
    return sorted(f for f in folder.iterdir() if f.is_dir() and not f.name.startswith(".") and _texts_in(f))


def _texts_in(folder: Path) -> list[Path]:
    """Files that end in .txt, or whose names have no ending, compressed or not; and images."""
    return sorted(
        f
        for f in folder.iterdir()
        if (file_formats.plain(f).suffix in (".txt", "") or is_image(f)) and not f.name.startswith(".") and f.is_file()
    )


def is_image(file: Path) -> bool:
    """Whether the name of a file says that it is an image."""
    return file.suffix.lower() in IMAGES


def class_files(data: DataSection) -> dict[str, list[Path]]:
    """Split -> its files, those of a label together. Errors: `RunError`."""
    named_splits = splits_named(data)
    files: dict[str, list[Path]] = {}
    if data.source is not None:
        root = Path(data.source).expanduser()
        if not root.is_dir():
            raise RunError(
                "LS2200",
                f"data.source: {root} is not a folder; layout: class_folders expects a folder with one "
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
    """What a path or a pattern of the run file names: from here, or else in `data.source`."""
    places = (Path(text).expanduser(), Path(data.source or "").expanduser() / text)
    lists = (sorted(filter(kind, map(Path, glob.glob(str(place))))) for place in places)
    return next(filter(None, lists), [])


def _of_classes(folders: Iterable[Path]) -> list[Path]:
    return [file for folder in folders for file in _texts_in(folder)]


def read_classes(files: list[Path], key: str, data: DataSection) -> Dataset:
    """Columns text and label, or image (the file as bytes) and label. Errors: `RunError`."""
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


# -- a file for each language ----------------------------------------------------------------------------------------


def named(file: Path) -> tuple[str, str]:
    """What a file of lines is called without its ending, and the ending that says which side it is: train.en.gz is
    (train, en), and so is train.en.txt."""
    name = file_formats.plain(file).name
    if name.count(".") > 1:
        name = name.removesuffix(".txt")
    stem, _, side = name.rpartition(".")
    return stem, side


def parallel_in(folder: Path) -> dict[str, list[Path]]:
    """What files are called -> the files of it, at least two, whose endings are languages or sides."""
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
    named_splits = splits_named(data)
    splits: dict[str, list[Path]] = {}
    if data.source is not None:
        root = Path(data.source).expanduser()
        if not root.is_dir():
            raise RunError(
                "LS2205", f"data.source: {root} is not a folder; name files in data.train: [train.en, train.de]"
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
    """A column for each side, in alphabetical order. Errors: `RunError`, among them for files of unlike length."""
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
    """All lines, blank ones too: they keep the files beside each other."""
    file_formats.check(file, key, encoding)
    lines = file_formats.text_of(file, encoding).split("\n")
    return lines[:-1] if lines[-1] == "" else lines
