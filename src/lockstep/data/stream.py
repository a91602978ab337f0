"""The rows of a training split that is larger than the cache, and the index of them, which is all that is kept.

In: the files of `data.train`, and a function that encodes some of their rows. Out: where each chunk of rows begins, how
many examples it makes and a hash of these, in the cache; or a `RunError` that names the file and its rows.

The index is made by all cores, a shard each, and what is done stays done when the rest is killed: every row is read,
checked, encoded and counted once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from lockstep.config.run import Run, RunError
from lockstep.config.sections import DataSection
from lockstep.data import missing, nested, selected, shard_files, shards, source, tokenizer
from lockstep.data.cache import discard, folder_of, kept
from lockstep.data.columns import table_of
from lockstep.data.shard_files import Chunk, Found, Shard
from lockstep.data.tokens import digest

if TYPE_CHECKING:
    from datasets import Dataset

VERSION = 1  # of what an index holds
ENDING = ".stream"  # of an index in the cache
CHUNKS, ABOUT = "chunks.arrow", "about.json"
_KINDS = {"row": "int64", "rows": "int32", "at": "int64", "size": "int64", "examples": "int32", "tokens": "int64"}
_SCHEMA = pa.schema(_KINDS | {"longest": "int32", "hash": "uint64"})
_SIDES = ("input_ids", "target_ids")

Whole = Callable[["Dataset", str], "Dataset"]  # of rows of a file of this name those that lack nothing
Make = Callable[["Dataset"], pa.RecordBatch]  # their examples


@dataclass(frozen=True)
class Stream:
    """The rows of the training split."""

    data: DataSection
    columns: Mapping[str, str]  # that the task reads, by their keys in the run file
    whole: Whole
    plain: str | None = None  # as `shard_files.shard` has it
    files: list[Path] = field(default_factory=list)

    def found(self) -> Stream:
        """With its files. Errors: `RunError` where there are none, or one that cannot be streamed."""
        files = (source.local_splits(self.data) or {}).get("train") or []
        if not files:
            raise RunError("data.train: there is no file to stream; name them in data.train or data.source")
        for file in files:
            self.opened(file)
        return replace(self, files=files)

    def opened(self, file: Path) -> Shard:
        """A shard. Errors: `RunError` where it is none that can be streamed."""
        return shard_files.shard(file, self.plain, self.wanted)

    @property
    def wanted(self) -> list[str]:
        """All columns, or paths, that are looked at."""
        return list(dict.fromkeys([*self.columns.values(), *self.data.filter]))

    def used(self, found: Found, file: Path) -> tuple[Dataset, int]:
        """The rows of a chunk that are used, and how many `data.filter` leaves out. Errors: `RunError`."""
        rows = _dataset(found, self.wanted, file, self.data.drop_missing)
        _, holds = selected.holding(rows, self.data, "train", file.name, None)
        some = rows if holds.all() else rows.select(np.flatnonzero(holds))
        if len(some):
            some = nested.added(some, self.columns, "train", file.name)
            try:
                some = self.whole(some, file.name)
            except missing.NothingLeft:
                some = some.select([])
        return some, int(len(holds) - holds.sum())

    def made(self, found: Found, file: Path, chunk: Chunk, make: Make) -> tuple[pa.RecordBatch | None, int, int]:
        """The examples of a chunk, of how many rows they are, and how many others `data.filter` leaves out. Errors:
        `RunError`."""
        with _counting(file, chunk):
            some, fewer = self.used(found, file)
            return make(some) if len(some) else None, len(some), fewer

    def rows(self, file: Path) -> Iterator[Dataset]:
        """The rows that are used of a shard, a chunk at a time. Errors: `RunError`."""
        for chunk, found in self.opened(file).walk():
            with _counting(file, chunk):
                some, _ = self.used(found, file)
            yield some

    def texts(self, batches: Callable[[Dataset], Iterator[list[str]]]) -> Iterator[list[str]]:
        """What `batches` makes of all rows that are used, shard by shard. Errors: `RunError`."""
        for file in self.files:
            for rows in self.rows(file):
                yield from batches(rows)

    def tokenizer(self, run: Run, batches: Callable[[Dataset], Iterator[list[str]]], generative: bool = False) -> Path:
        """As `tokenizer.prepare`. `batches`: the texts of some rows. Errors: `RunError`."""
        content = "" if run.tokenizer.train is None else self.content
        return tokenizer.prepare(run, self.texts(batches), content, generative)

    @property
    def content(self) -> str:
        """A hash of the files' bytes, in order, whatever they are called."""
        found = hashlib.sha256()
        for file in self.files:
            each = hashlib.sha256()
            with shard_files.opened(file) as opened:
                while block := opened.read(2**20):
                    each.update(block)
            found.update(each.digest())
        return found.hexdigest()[:24]

    @property
    def identities(self) -> list[tuple[str, int, int]]:
        """Path, size and time of each file."""
        return [(str(f.resolve()), f.stat().st_size, f.stat().st_mtime_ns) for f in self.files]

    def _key(self, *more: Any) -> str:
        chosen = self.data.model_dump(include={"filter", "drop_missing"}, mode="json")
        return digest("stream", VERSION, self.identities, dict(self.columns), self.plain, chosen, *more)

    def told(self, tell: Callable[[Dataset], Any], key: str, doing: str) -> list[Any]:
        """What `tell` says of the rows of each chunk, as JSON has it, in order. `key` stands for `tell`. The caller
        holds the lock. Errors: `RunError`."""

        def one(numbers: range, path: Path, done: Callable[[int], None]) -> None:
            found = [tell(rows) for rows in self.rows(self.files[numbers[0]]) if len(rows)]
            path.write_text(json.dumps(found), encoding="utf-8")
            done(1)

        path = self._made(self._key("told", key), ".json", one, doing, lambda folder: None)
        told = [each for file in sorted(path.glob("*.json")) for each in json.loads(file.read_text(encoding="utf-8"))]
        if not told:
            raise self._nothing("hold no row that is used")
        return told

    def _nothing(self, what: str) -> RunError:
        return RunError(f"data.train: nothing to train on: {len(self.files)} shard(s), {self.files[0]} first, {what}")

    def index(self, make: Make, key: str) -> Path:
        """The folder of the index, made if it is not in the cache, or not as it was. `key` stands for `make`. The
        caller holds the lock. Errors: `RunError`."""

        def one(numbers: range, path: Path, done: Callable[[int], None]) -> None:
            file = self.files[numbers[0]]
            entries: list[dict[str, int]] = []
            names: list[str] = []
            used = filtered = 0
            for chunk, found in self.opened(file).walk():
                batch, rows, fewer = self.made(found, file, chunk, make)
                used, filtered = used + rows, filtered + fewer
                names = names if batch is None else batch.schema.names
                entries.append(vars(chunk) | counted(batch))
            told = {"used": used, "filtered": filtered, "names": names}
            table = pa.Table.from_pylist(entries, _SCHEMA.with_metadata({"told": json.dumps(told)}))
            _write(table, path)
            done(1)

        return self._made(self._key("index", key), ".shard", one, "reading and counting the shards", self._together)

    def _made(
        self,
        key: str,
        ending: str,
        one: Callable[[range, Path, Callable[[int], None]], None],
        doing: str,
        together: Callable[[Path], None],
    ) -> Path:
        """A folder of the cache with a file a shard, of which `together` makes what is kept."""

        def fill(folder: Path) -> None:
            parts = [range(number, number + 1) for number in range(len(self.files))]
            shards.fill(folder, parts, ending, one, doing, "shards")
            together(folder)

        path = folder_of("tokens") / f"{key}{ENDING}"
        return kept(path, fill, path.with_name(f"{path.name}.parts"))

    def _together(self, folder: Path) -> None:
        """One index of those of all shards. Errors: `RunError` where there is no example."""
        files = sorted(folder.glob("*.shard"))
        tables = [table_of(file) for file in files]
        whole = pa.concat_tables([each.replace_schema_metadata(None) for each in tables]).combine_chunks()
        told = [json.loads(each.schema.metadata[b"told"]) for each in tables]
        examples = numbers_of(whole, "examples")
        if not examples.sum():
            raise self._nothing("make no example")
        rows = sum(int(numbers_of(each, "rows").sum()) for each in tables)
        filtered = sum(each["filtered"] for each in told)
        about = {
            "files": self.identities,
            "chunks": [len(each) for each in tables],
            "rows": rows,
            "filtered": filtered,
            "left_out": rows - filtered - sum(each["used"] for each in told),
            "tokens": int(numbers_of(whole, "tokens").sum()),
            "longest": int(numbers_of(whole, "longest").argmax()),  # the chunk that has it
            "names": next(each["names"] for each in told if each["names"]),
            "content": hashlib.sha256(numbers_of(whole, "hash").tobytes() + examples.tobytes()).hexdigest()[:24],
        }
        _write(whole, folder / CHUNKS)
        (folder / ABOUT).write_text(json.dumps(about), encoding="utf-8")
        for file in files:
            discard(file)


@contextmanager
def _counting(file: Path, chunk: Chunk) -> Iterator[None]:
    """Errors that are raised in here name the file, and from which of its rows on they count."""
    try:
        yield
    except RunError as error:
        raise RunError(f"{error} (rows are counted from row {chunk.row:,} of {file})") from None


def about(folder: Path) -> dict[str, Any]:
    """What is kept of a stream beside its chunks."""
    return dict(json.loads((folder / ABOUT).read_text(encoding="utf-8")))


def facts(folder: Path, others: Mapping[str, Any]) -> dict[str, Any]:
    """How many rows of train are left out, beside what is said of the other splits."""
    told = about(folder)
    fewer = {key: {"train": told[key]} for key in ("left_out", "filtered") if told[key]}
    return {**others, **{key: {**each, **others.get(key, {})} for key, each in fewer.items()}}


def names_of(files: Mapping[str, str]) -> list[tuple[str, str]]:
    """What stands for the content of each split, by the folder that `encode` or `Stream.index` made."""
    return sorted(
        (split, about(Path(file))["content"] if file.endswith(ENDING) else Path(file).name)
        for split, file in files.items()
    )


def counted(batch: pa.RecordBatch | None) -> dict[str, int]:
    """What the index says of the examples of a chunk."""
    if batch is None:
        return {"examples": 0, "tokens": 0, "longest": 0, "hash": 0}
    sides = [np.diff(np.from_dlpack(batch.column(name).offsets)) for name in _SIDES if name in batch.schema.names]
    lengths = np.sum(sides, axis=0, dtype=np.int64)
    hashed = hashlib.blake2b(digest_size=8)
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        hashed.update(name.encode())
        if pa.types.is_list(column.type):
            hashed.update(np.diff(np.from_dlpack(column.offsets)).tobytes())
            column = column.flatten()
        hashed.update(np.from_dlpack(column).tobytes())
    return {
        "examples": len(batch),
        "tokens": int(lengths.sum()),
        "longest": int(lengths.max(initial=0)),
        "hash": int.from_bytes(hashed.digest(), "little"),
    }


def numbers_of(table: pa.Table, name: str) -> np.ndarray:
    """A column of numbers of an index."""
    parts = [np.from_dlpack(chunk) for chunk in table.column(name).chunks]
    return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, np.int64), *parts])


def _write(table: pa.Table, path: Path) -> None:
    with pa.OSFile(str(path), "wb") as out, pa.ipc.new_stream(out, table.schema) as stream:
        stream.write_table(table)


def _dataset(found: Found, wanted: list[str], file: Path, lenient: bool) -> Dataset:
    """The columns of a chunk that are read, or that the paths among `wanted` lead into. `lenient`: one that is not
    there has nothing in every row. Errors: `RunError`."""
    import datasets

    names = found.column_names if isinstance(found, pa.Table) else list(found)
    roots: list[str] = []
    lacking: list[str] = []
    for path in wanted:
        parts = path.split(".")
        prefixes = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
        root = next((prefix for prefix in prefixes if prefix in names), None)
        if root is None and not lenient:
            raise RunError(f"data.train: {file.name} has no column {path!r}; it has {', '.join(names)}")
        (lacking if root is None else roots).append(root or path)
    roots = list(dict.fromkeys(roots))
    try:
        if isinstance(found, pa.Table):
            kinds = datasets.Features.from_arrow_schema(found.schema)
            some = found.select(roots).replace_schema_metadata(None)
            made = datasets.Dataset(
                datasets.table.InMemoryTable(some),
                info=datasets.DatasetInfo(features=datasets.Features({root: kinds[root] for root in roots})),
            )
        else:
            made = datasets.Dataset.from_dict({root: found[root] for root in roots})
    except (pa.ArrowException, TypeError, OverflowError, ValueError) as error:
        said = " ".join(str(error).split())
        raise RunError(f"data.train: columns of {file.name} hold values of several kinds: {said}") from None
    for path in lacking:
        made = made.add_column(path, [None] * len(made))
    return made
