"""Hub id, local files or the built-in set -> one `datasets.Dataset` a split, under the names train, validation and
test.

In: the `data` section of the run. Out: a `Source`, or a `RunError` that names the key, the file and what is there
instead. Imports `datasets` only when called: a worker that finds its tokens in the cache never needs it.
"""

from __future__ import annotations

import glob
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.config.data_sources import OWN, is_address
from lockstep.config.run import RunError
from lockstep.config.sections import DataSection
from lockstep.data import annotated, compressed, filtering, links, mixed, nested_columns, remote, row_files, text_files
from lockstep.data import pinned as pinning
from lockstep.data.downloads import downloading
from lockstep.data.hub_errors import explained
from lockstep.data.mixed import SOURCE as SOURCE
from lockstep.data.mixed import Source as Source
from lockstep.data.mixed import sections as sections
from lockstep.data.token_counts import TokenCounts

if TYPE_CHECKING:
    from datasets import Dataset

BUILTIN = "builtin/emotion"
USUAL = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test",),
}
# layout -> which files a split has, where names of files say that otherwise than of rows
_FILES = {"class_folders": text_files.class_files, "parallel": text_files.parallel_files}
# layout -> how they are read
_READERS = {
    "class_folders": text_files.read_classes,
    "parallel": text_files.read_parallel,
    "conll": annotated.read_conll,
    "squad": annotated.read_squad,
    "columns": annotated.read_columns,
    "records": annotated.read_records,
}


def files_of(data: DataSection) -> list[Path]:
    """The local files a source is read from, in order; empty for a Hub id, for what is elsewhere, for the built-in set,
    and for a task that makes its data by itself."""
    if data.sources is not None:
        return [file for section in sections(data) for file in files_of(section)]
    if not given(data) or remote.given(data):
        return []
    return [file for files in (local_splits(data) or {}).values() for file in files]


def given(data: DataSection) -> bool:
    """Whether the run file says where data are."""
    return any(getattr(data, key) is not None for key in ("source", "sources", *USUAL))


def is_local(data: DataSection) -> bool:
    """Whether nothing of it is on the Hub. Errors: `RunError` for local files that are not there."""
    return all(each.source in (BUILTIN, None) or remote.given(each) or bool(files_of(each)) for each in sections(data))


def elsewhere(data: DataSection) -> list[list[remote.Fact]]:
    """Address, size and tag of every file that each source reads from an object store or another server. Asks them.
    Errors: `RunError`."""
    return [remote.facts(section, local_splits) for section in sections(data) if remote.given(section)]


def pinned(data: DataSection) -> DataSection:
    """A stream's with a commit wherever it reads from the Hub; asks it. Errors: `RunError`."""
    if not data.stream:
        return data
    if data.sources is not None:
        each = [(entry, pinned(section)) for entry, section in zip(data.sources, sections(data), strict=True)]
        own = [entry.model_copy(update={key: getattr(section, key) for key in OWN}) for entry, section in each]
        return data.model_copy(update={"sources": own})
    if data.source not in (None, BUILTIN) and not is_address(data.source) and local_splits(data) is None:
        data = pinning.repository(data, USUAL)
    return pinning.addresses(data)


def load(
    data: DataSection,
    seed: int,
    plain: str | None = None,
    columns: Mapping[str, str] | None = None,
    tokens: TokenCounts | None = None,
) -> Source:
    """Read all splits. `plain`: a .txt file is text and nothing else, each `line` or the whole `file` an example.
    `columns`: those that are read, by their keys in the run file; dotted paths among them become columns. `tokens`:
    counts them for `data.filter`. Of a stream all splits but train.

    Errors: `RunError`."""
    if data.sources is not None:
        return mixed.load(data, seed, plain, columns or {}, tokens, load)
    if remote.given(data):
        with remote.here(data, local_splits) as downloaded:
            return replace(load(downloaded, seed, plain, columns, tokens), name=remote.called(data))
    _quiet()
    own = [key for key in ("columns", "separator", "quote") if getattr(data, key) is not None]
    own += ["layout"] if data.layout != "rows" else []
    if own and (data.source == BUILTIN or local_splits(data) is None):
        raise RunError(f"data.{own[0]}: for local files, and {data.source} is none; leave it out")
    if data.source == BUILTIN and not data.stream:
        source = _builtin(seed)
    elif (files := local_splits(data)) is not None:
        _check_keys(files, data)
        source = Source(
            data.source or "local files",
            {
                s: _read(each, f"data.{s}", plain, data)
                for s, each in files.items()
                if each and not (data.stream and s == "train")
            },
        )
    elif data.stream:
        raise RunError(f"data.stream: {data.source} has no shards to stream; name files, or a data set of the Hub")
    else:
        source = _from_hub(data)
    if "train" not in source.splits and not data.stream:
        raise RunError(f"data.train: no training split in {source.name}; name it or its files in data.train")
    splits, left_out = filtering.filtered(source.splits, data, source.name, tokens)
    if data.split_column is not None:
        splits = filtering.told_apart(splits, data, source.name, USUAL)
    splits = {split: nested_columns.added(rows, columns or {}, split, source.name) for split, rows in splits.items()}
    if data.limit is not None:
        splits = {name: split.select(range(min(data.limit, len(split)))) for name, split in splits.items()}
    for name, split in splits.items():
        if len(split) == 0:
            raise RunError(f"data.{name}: the {name} split of {source.name} is empty")
    return Source(source.name, splits, left_out, columns=tuple((columns or {}).values()))


# -- local files -----------------------------------------------------------------------------------------------------


def _looks_local(text: str) -> bool:
    return (
        text.startswith((".", "/", "~")) or row_files.format_of(Path(text)) is not None or any(c in text for c in "*?[")
    )


def local_splits(data: DataSection) -> dict[str, list[Path]] | None:
    """Split -> files, or None when the source is not local. Errors: `RunError`, naming what is not there, or a link
    that leads elsewhere."""
    if remote.given(data):
        return None
    if (found := _local_splits(data)) is not None:
        links.check(data, found)
    return found


def _local_splits(data: DataSection) -> dict[str, list[Path]] | None:
    given = {split: getattr(data, split) for split in USUAL if getattr(data, split) is not None}
    if data.source is None:
        if not given:
            raise RunError("data: give data.source (a Hub id, a folder or a file) or data.train (files)")
        if data.layout in _FILES:
            return _FILES[data.layout](data, USUAL)
        return {split: _expand(value, f"data.{split}", data.layout) for split, value in given.items()}
    if data.source == BUILTIN:
        return None
    if data.layout in _FILES:
        return _FILES[data.layout](data, USUAL)
    root = Path(data.source).expanduser()
    if root.is_dir():
        found = {split: in_folder(root, split, data.layout) for split in USUAL}
        if not any(found.values()) and "train" not in given:
            single = sorted(f for f in root.iterdir() if is_rows(f, data.layout))
            if not single:
                endings = row_files.READ if data.layout == "rows" else ", ".join(annotated.ENDINGS[data.layout])
                raise RunError(
                    f"data.source: the folder {root} holds no data file; "
                    f"wanted are files like train.jsonl with one of the endings {endings}"
                )
            found["train"] = single
        for split, value in given.items():
            found[split] = _expand(value, f"data.{split}", data.layout, root)
        return found
    if root.is_file() or _looks_local(data.source):
        found = {"train": _expand(data.source, "data.source", data.layout)}
        return found | {split: _expand(value, f"data.{split}", data.layout) for split, value in given.items()}
    return None


def in_folder(root: Path, split: str, layout: str) -> list[Path]:
    """The files of a folder whose names, or whose folder's, say that they are of this split."""
    for word in USUAL[split]:
        files = sorted(f for f in root.iterdir() if is_rows(f, layout) and f.name.split(".")[0] == word)
        for pattern in (f"{word}[-_]*", f"{word}/*"):
            files = files or sorted(f for f in root.glob(pattern) if is_rows(f, layout))
        if files:
            return files
    return []


def is_rows(file: Path, layout: str) -> bool:
    """Whether a file of a folder is one of the data set, by its name."""
    if not file.is_file():
        return False
    if layout != "rows":
        return compressed.plain(file).suffix in annotated.ENDINGS[layout]
    return row_files.is_of_folder(file)


def _check_keys(files: dict[str, list[Path]], data: DataSection) -> None:
    """Errors: `RunError` for keys about tables that these files are not."""
    if data.layout == "rows":
        row_files.check_columns(files, data)
        return
    for key in ("separator", "quote") if data.layout == "conll" else ("columns", "separator", "quote"):
        if getattr(data, key) is not None:
            raise RunError(f"data.{key}: does not go with data.layout: {data.layout}; leave it out")


def _expand(value: str | list[str], key: str, layout: str, root: Path | None = None) -> list[Path]:
    files: list[Path] = []
    for text in [value] if isinstance(value, str) else value:
        path = Path(text).expanduser()
        if root is not None and not path.is_absolute() and not path.exists():
            path = root / path
        found = [path] if path.is_file() else sorted(Path(f) for f in glob.glob(str(path)) if Path(f).is_file())
        if not found:
            raise RunError(f"{key}: no such file: {path}")
        for file in found:
            if layout == "rows" and row_files.format_of(file) is None:
                raise RunError(f"{key}: {file} has none of the endings that can be read: {row_files.READ}")
        files += found
    return files


def _read(files: list[Path], key: str, plain: str | None, data: DataSection) -> Dataset:
    if data.layout != "rows":
        return _READERS[data.layout](files, key, data)
    for file in files:
        annotated.check_rows(file, key, data.encoding)
    return row_files.read(files, key, plain, data)


# -- elsewhere -------------------------------------------------------------------------------------------------------


def _builtin(seed: int) -> Source:
    return Source(BUILTIN, dict(_emotion(seed)))


@lru_cache(maxsize=1)
def _emotion(seed: int) -> dict[str, Dataset]:
    """Made once: a tenth of a second, and preparations of one process mostly ask for the same."""
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
    return {name: datasets.Dataset.from_dict(split, features=features) for name, split in columns.items()}


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
    for name, rows in found.items():
        if row_files.INDEX in rows.column_names and rows.info.builder_name == "csv":  # as pandas reads wider rows
            raise RunError(
                f"data.source: the {name} split of {data.source} is a table whose rows have more cells than its "
                "header, so that each text is in the next column; download its files, and name them in data.train"
            )
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
    return Source(data.source, {split: row_files.without_index(rows) for split, rows in splits.items()})


def _quiet() -> None:
    import datasets

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what its readers raise is told once, by us
