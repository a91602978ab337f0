"""Rows of a training split larger than the cache, from one or several sources. Only their index is stored.

In: the files of `data.train`, the columns that a task reads, and a function that encodes rows. Out: the usable rows of
a file, one chunk at a time; in the cache, an index with each chunk's location, number of examples and hash; or a
`RunError` that names the source, the file and its rows.

All cores build the index, one shard each. Finished shards survive a kill. Every row is read, checked, encoded and
counted once.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from lockstep.config.data_sources import OneSource, is_address
from lockstep.config.run import RunError
from lockstep.config.sections import DataSection
from lockstep.data import (
    arrow_cache,
    column_types,
    file_formats,
    remote,
    row_reader,
    source,
    tokenizer,
    usable_rows,
    value_types,
)
from lockstep.data.arrow_cache import SIDES, Make, digest, encoded, table_of, write_table
from lockstep.data.cache import STREAM, cached, discard, folder_of
from lockstep.data.remote import ShardCache, Unfetched, unpinned, with_addresses
from lockstep.data.row_reader import Chunk, RowReader, Rows
from lockstep.data.splitting import EvalHashes
from lockstep_trace.coded import quantity

if TYPE_CHECKING:
    from datasets import Dataset, Features


Identity = tuple[str, int, int | str]
Whole = Callable[["Dataset", str], "Dataset"]  # (rows, file name) -> complete rows


@dataclass(frozen=True)
class Used:
    """The rows of a chunk that are used."""

    rows: Dataset
    filtered: int  # rows removed by `data.filter`
    dropped: int  # rows that occur in validation or test
    held_out_numbers: np.ndarray  # their distinct example numbers, int64


@dataclass(frozen=True)
class StreamingSource:
    """The rows of one source."""

    data: DataSection
    columns: Mapping[str, str]  # key of the run file -> column
    whole: Whole
    plain: str | None = None  # as in `row_reader.reader`
    within: str | None = None  # struct column for missing columns
    entry: OneSource | None = None  # of a mixture
    among: int = 1  # sources of it
    held_out: EvalHashes | None = None
    files: list[Path] = field(default_factory=list)
    copies: ShardCache | None = None  # for remote files: `files` are then the local copies

    def with_files(self) -> StreamingSource:
        """Return a copy that lists the source's files. Errors: `RunError` if there are none, or if one cannot be
        streamed."""
        with self.named():
            source.source_columns(self.entry, self.columns)
            shards = remote.shards(self.data, source.local_splits, self.among) if self.data.addresses else None
            copies = shards if isinstance(shards, ShardCache) else None
            here = shards if isinstance(shards, list) else []
            files = copies.paths if copies else here or (source.local_splits(self.data) or {}).get("train") or []
            if not files:
                raise RunError("LS2270", "data.train: no file to stream; name the files in data.train or data.source")
            for file in files:
                self.opened(file)
            if copies:
                copies.check()
        return replace(self, files=files, copies=copies)

    def of_index(self, facts: Sequence[Identity]) -> StreamingSource:
        """Return a copy with the files of an index."""
        if not any(is_address(name) for name, _, _ in facts):
            return replace(self, files=[Path(name) for name, _, _ in facts])
        identities = [(name, size, str(tag)) for name, size, tag in facts]
        copies = ShardCache(identities, self.data.stream_cache_gb, self.among)
        return replace(self, files=copies.paths, copies=copies)

    @contextmanager
    def named(self) -> Iterator[None]:
        """Prefix errors raised in this context with the source's name, in a mixture."""
        try:
            yield
        except Unfetched as error:
            raise Unfetched(error.code, self.with_source(error.message)) from error
        except RunError as error:
            if self.entry is None:
                raise
            raise RunError(error.code, self.with_source(error.message)) from error

    def with_source(self, text: str) -> str:
        """Prefix a message with the source's name, in a mixture."""
        begins = "data.sources: "
        return text if self.entry is None or text.startswith(begins) else f"{begins}{self.entry.name}: {text}"

    def display_name(self, file: Path) -> str:
        """Readable name of a shard."""
        return with_addresses(str(file)) if self.copies else str(file)

    def opened(self, file: Path) -> RowReader:
        """The reader of a shard. Errors: `RunError` if the file cannot be streamed."""
        how = self.copies.opened if self.copies else row_reader.opened
        return row_reader.reader(file, self.plain, self.column_paths, how)

    @property
    def column_paths(self) -> list[str]:
        """All columns, or paths, to read, as named in the files."""
        read = source.source_columns(self.entry, self.columns).values()
        return list(dict.fromkeys([*read, *self.data.filter, *(self.data.types or ())]))

    def typed(self, chunk_rows: Rows, file: Path) -> Dataset:
        """All rows of a chunk, with the types of `data.types`. Errors: `RunError`."""
        rows = _dataset(chunk_rows, self.column_paths, file, self.data.drop_missing, self.within)
        return column_types.declared(rows, self.data.types, "train", file.name)

    def usable(self, chunk_rows: Rows, file: Path) -> Used:
        """Select the usable rows of a chunk. Errors: `RunError`."""
        rows = self.typed(chunk_rows, file)
        _, holds = usable_rows.holding(rows, self.data, "train", file.name, None)
        some = rows if holds.all() else rows.select(np.flatnonzero(holds))
        if len(some):
            if self.entry is None:
                some = usable_rows.added(some, self.columns, "train", file.name)
            else:
                some = source.with_names(source.with_task_columns(some, self.entry, self.columns, "train", file.name))
            try:
                some = self.whole(some, file.name)
            except usable_rows.NothingLeft:
                some = some.select([])
        numbers_of_rows = self.held_out.example_numbers(some) if self.held_out and len(some) else np.full(len(some), -1)
        numbers, dropped = np.unique(numbers_of_rows[numbers_of_rows >= 0]), 0
        if self.held_out and self.held_out.drop and len(numbers):
            dropped = int((numbers_of_rows >= 0).sum())
            some = some.select(np.flatnonzero(numbers_of_rows < 0))
        return Used(some, int(len(holds) - holds.sum()), dropped, numbers)

    def examples(self, rows: Rows, file: Path, chunk: Chunk, make: Make) -> tuple[pa.RecordBatch | None, Used]:
        """Encode a chunk; return its examples and its used rows. Errors: `RunError`."""
        with self.counting(file, chunk):
            used = self.usable(rows, file)
            return make(used.rows) if len(used.rows) else None, used

    def of(self, file: Path) -> Iterator[Dataset]:
        """Yield the used rows of a shard, one chunk at a time. Errors: `RunError`."""
        with self.named():
            for chunk, rows_read in self.opened(file).walk():
                with self.counting(file, chunk):
                    used = self.usable(rows_read, file)
                yield used.rows

    @contextmanager
    def counting(self, file: Path, chunk: Chunk) -> Iterator[None]:
        """Add the file, and the row from which rows are counted, to errors raised in this context."""
        try:
            yield
        except RunError as error:
            raise RunError(error.code, f"{error.message} (rows are counted from row {chunk.row:,} of {file})") from None

    @property
    def facts(self) -> list[Identity]:
        """Path, size and time of each file, or address, size and tag."""
        if self.copies is not None:
            return [*self.copies.facts]
        return [(str(f.resolve()), f.stat().st_size, f.stat().st_mtime_ns) for f in self.files]

    @property
    def identities(self) -> list[Identity]:
        """Return `facts` without Hub revisions in addresses."""
        return [(unpinned(name), size, tag) for name, size, tag in self.facts]


def _dataset(rows: Rows, column_paths: list[str], file: Path, lenient: bool, within: str | None) -> Dataset:
    """The columns of a chunk that are read directly or through paths. `lenient`: missing columns are null. Errors:
    `RunError`."""
    import datasets

    names = rows.column_names if isinstance(rows, pa.Table) else list(rows)
    roots: list[str] = []
    lacking: list[str] = []
    for path in column_paths:
        parts = path.split(".")
        prefixes = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
        root = next((prefix for prefix in prefixes if prefix in names), None)
        root = within if root is None and within in names else root
        if root is None and not lenient:
            raise RunError("LS2271", f"data.train: {file.name} has no column {path!r}; it has {', '.join(names)}")
        (lacking if root is None else roots).append(root or path)
    roots = list(dict.fromkeys(roots))
    try:
        if isinstance(rows, pa.Table):
            kinds = datasets.Features.from_arrow_schema(rows.schema)
            chunk = datasets.Dataset(
                datasets.table.InMemoryTable(rows.select(roots).replace_schema_metadata(None)),
                info=datasets.DatasetInfo(features=datasets.Features({root: kinds[root] for root in roots})),
                fingerprint=value_types.IN_MEMORY,
            )
        else:
            chunk = value_types.dataset_of({root: rows[root] for root in roots})
    except (pa.ArrowException, TypeError, OverflowError, ValueError) as error:
        raise RunError(
            "LS2272", f"data.train: columns of {file.name} cannot be read: {' '.join(str(error).split())}"
        ) from None
    except RunError as error:
        raise RunError(error.code, f"data.train: {file.name}: {error.message}") from None
    for path in lacking:
        chunk = chunk.add_column(path, [None] * len(chunk))
    return chunk


VERSION = 3  # version of the index format
CHUNKS, ABOUT = "chunks.arrow", "about.json"
_KINDS = {"row": "int64", "rows": "int32", "at": "int64", "size": "int64", "examples": "int32", "tokens": "int64"}
_SCHEMA = pa.schema(_KINDS | {"longest": "int32", "hash": "uint64"})


@dataclass(frozen=True)
class Stream:
    """The rows of the training split, of one source or several in sequence."""

    data: DataSection
    columns: Mapping[str, str]  # key of the run file -> column
    whole: Whole
    plain: str | None = None  # as in `row_reader.reader`
    within: str | None = None  # struct column for missing columns
    parts: tuple[StreamingSource, ...] = ()  # one per source
    held_out: EvalHashes | None = None
    splits: Mapping[str, Dataset] = field(default_factory=dict)  # the other splits, for `held_out`

    def _sources(self) -> list[StreamingSource]:
        """The sources, without their files."""
        sections: list[DataSection] = source.sections(self.data)
        entries: Sequence[OneSource | None] = self.data.sources or [None]
        how = self.columns, self.whole, self.plain, self.within
        return [
            StreamingSource(each, *how, entry, len(sections)) for each, entry in zip(sections, entries, strict=True)
        ]

    def with_files(self, splits: Mapping[str, Dataset], texts: Sequence[str]) -> Stream:
        """Return a copy that lists the files of all sources.

        `splits`: other splits, whose examples are looked up in the stream by their content in the columns `texts`.
        Errors: `RunError` if there are no files, or if one cannot be streamed."""
        parts = [each.with_files() for each in self._sources()]
        held_out = EvalHashes.of(splits, texts, self.data.decontaminate)
        parts_with_hashes = tuple(replace(each, held_out=held_out if held_out.drop else None) for each in parts)
        return replace(self, parts=parts_with_hashes, held_out=held_out, splits=splits)

    def of_index(self, folder: Path) -> Stream:
        """Return a copy with the files of an index."""
        index = read_index(folder)
        held_out = EvalHashes.read(folder, index["texts"])
        ends = np.cumsum(index["sources"]).tolist()
        files = [index["files"][start:stop] for start, stop in itertools.pairwise([0, *ends])]
        parts = [each.of_index([tuple(f) for f in some]) for each, some in zip(self._sources(), files, strict=True)]
        return replace(self, parts=tuple(replace(each, held_out=held_out) for each in parts))

    @property
    def files(self) -> list[Path]:
        """Files of all sources."""
        return [file for each in self.parts for file in each.files]

    def part(self, number: int) -> int:
        """Index of the source of a file."""
        return int(np.searchsorted(np.cumsum([len(each.files) for each in self.parts]), number, side="right"))

    def texts(self, batches: Callable[[Dataset], Iterator[list[str]]]) -> Iterator[list[str]]:
        """Yield the results of `batches` for all used rows, shard by shard. Errors: `RunError`."""
        for each in self.parts:
            for file in each.files:
                for rows in each.of(file):
                    yield from batches(rows)

    def walk(self) -> Iterator[tuple[StreamingSource, Path, Chunk, Dataset]]:
        """Yield source, file, chunk and used rows of each chunk, in order. Errors: `RunError`."""
        for each in self.parts:
            for file in each.files:
                for chunk, rows in each.opened(file).walk():
                    yield each, file, chunk, each.usable(rows, file).rows

    def tokenizer(
        self,
        choice: tokenizer.TokenizerChoice,
        batches: Callable[[Dataset], Iterator[list[str]]],
        generative: bool = False,
    ) -> Path:
        """Prepare the tokenizer of the run. `batches`: yields the texts of rows. Errors: `RunError`."""
        content = "" if choice.section.train is None else self.content
        return tokenizer.prepare(choice, self.texts(batches), content, generative)

    @property
    def content(self) -> str:
        """Hash of the files' bytes, in order and regardless of names, and of the selection of rows and columns. The
        caller holds the lock."""

        def one(numbers: range, path: Path, done: Callable[[int], None]) -> None:
            each = hashlib.sha256()
            part, file = self._at(numbers)
            with part.named(), (shard := part.opened(file)).how(shard.path) as opened:
                while block := opened.read(2**20):
                    each.update(block)
            path.write_bytes(each.digest())
            done(1)

        key = digest("bytes of a stream", [each.identities for each in self.parts])
        folder = self._per_shard(key, ".sha256", one, "hashing the shards", lambda folder: None)
        digests = b"".join(file.read_bytes() for file in sorted(folder.glob("*.sha256")))
        return digest(hashlib.sha256(digests).hexdigest(), self._chosen)

    @property
    def _chosen(self) -> list[Any]:
        """Everything that decides which rows and columns are used."""
        choices: list[Any] = []
        for each in self.parts:
            rename = None if each.entry is None else each.entry.rename
            choices += [
                len(each.files),
                each.data.model_dump(include={"filter", "drop_missing", "drop_unusable", "types"}, mode="json"),
                rename,
            ]
        held_out = self.held_out.content if self.held_out and self.held_out.drop else None
        return [dict(self.columns), self.plain, held_out, *choices]

    def _key(self, *more: Any) -> str:
        texts = [row_reader.TEXTS] if any(file_formats.plain(file).suffix == ".txt" for file in self.files) else []
        return digest("stream", VERSION, [each.identities for each in self.parts], self._chosen, *texts, *more)

    def gather(self, tell: Callable[[Dataset], Any], key: str, doing: str) -> list[Any]:
        """Results of `tell` for the used rows of each chunk, as JSON, in order. `key` identifies `tell`. The caller
        holds the lock. Errors: `RunError`."""

        def one(numbers: range, path: Path, done: Callable[[int], None]) -> None:
            part, file = self._at(numbers)
            values = [tell(rows) for rows in part.of(file) if len(rows)]
            path.write_text(json.dumps(values), encoding="utf-8")
            done(1)

        path = self._per_shard(self._key("told", key), ".json", one, doing, lambda folder: None)
        values_of_chunks = [
            each for file in sorted(path.glob("*.json")) for each in json.loads(file.read_text(encoding="utf-8"))
        ]
        if not values_of_chunks:
            raise self._nothing(self.parts[0], "no row is used")
        return values_of_chunks

    def _at(self, numbers: range) -> tuple[StreamingSource, Path]:
        """Source and file of a one-number range."""
        return self.parts[self.part(numbers[0])], self.files[numbers[0]]

    @staticmethod
    def _nothing(part: StreamingSource, what: str) -> RunError:
        with part.named():
            raise RunError(
                "LS2273",
                f"data.train: nothing to train on: {what} in {quantity(len(part.files), 'shard')}, beginning with "
                f"{part.files[0]}",
            )

    def index(self, make: Make, key: str) -> Path:
        """Return the folder of the index, building it if it is not cached or damaged. `key` identifies `make`. The
        caller holds the lock. Errors: `RunError`."""
        assert self.held_out is not None
        held_out = self.held_out

        def one(numbers: range, path: Path, done: Callable[[int], None]) -> None:
            part, file = self._at(numbers)
            part = replace(part, held_out=held_out)
            entries: list[dict[str, int]] = []
            names: list[str] = []
            first_places: dict[int, str] = {}
            fewer = Counter[str]()
            with part.named():
                for chunk, rows in part.opened(file).walk():
                    batch, used = part.examples(rows, file, chunk, make)
                    fewer.update(used=len(used.rows), filtered=used.filtered, dropped=used.dropped)
                    place = f"rows {chunk.row:,} to {chunk.row + chunk.rows - 1:,} of {part.display_name(file)}"
                    first_places |= {n: place for n in used.held_out_numbers.tolist() if n not in first_places}
                    names = names if batch is None else batch.schema.names
                    entries.append(vars(chunk) | counted(batch))
            summary = {**fewer, "names": names, "standing": list(first_places.items())}
            table = pa.Table.from_pylist(entries, _SCHEMA.with_metadata({"told": json.dumps(summary)}))
            write_table(table, path)
            done(1)

        key = self._key("index", key, held_out.content)
        return self._per_shard(key, ".shard", one, "reading and counting the shards", self._together)

    def _per_shard(
        self,
        key: str,
        ending: str,
        one: Callable[[range, Path, Callable[[int], None]], None],
        doing: str,
        together: Callable[[Path], None],
    ) -> Path:
        """Create a cache folder with one file per shard, from which `together` builds the final content."""

        def each(shard: range, path: Path, done: Callable[[int], None]) -> None:
            one(shard, path, done)
            if (copies := self.parts[self.part(shard.start)].copies) is not None:
                copies.done_with(self.files[shard.start])

        def fill(folder: Path) -> None:
            parts = [range(number, number + 1) for number in range(len(self.files))]
            rooms = [each.copies.room for each in self.parts if each.copies is not None]
            first = (self._fetched, max(1, min(rooms) - 1)) if rooms else None
            arrow_cache.fill(folder, parts, ending, each, doing, "shards", first=first)
            together(folder)

        path = folder_of("tokens") / f"{key}{STREAM}"
        return cached(path, fill, path.with_name(f"{path.name}.parts"))

    def _fetched(self, number: int) -> None:
        """Fetch a shard, if it is remote. Errors: `RunError`."""
        part = self.parts[self.part(number)]
        if part.copies is not None:
            with part.named():
                part.copies.fetch(self.files[number])

    def _together(self, folder: Path) -> None:
        """Merge the shards' indexes. Errors: `RunError` if there is no example."""
        files = sorted(folder.glob("*.shard"))
        tables = [table_of(file) for file in files]
        whole = pa.concat_tables([each.replace_schema_metadata(None) for each in tables]).combine_chunks()
        summaries = [json.loads(each.schema.metadata[b"told"]) for each in tables]
        examples = numbers_of(whole, "examples")
        ends = np.cumsum([0, *(int(numbers_of(each, "examples").sum()) for each in tables)])
        bounds = np.cumsum([0, *(len(each.files) for each in self.parts)])
        of_each = np.diff(ends[bounds]).tolist()
        if 0 in of_each:
            empty = of_each.index(0)
            mine = summaries[bounds[empty] : bounds[empty + 1]]
            selective = any(each.get("filtered") or each.get("dropped") for each in mine)
            which = " after data.filter and data.decontaminate" if selective else ""
            raise self._nothing(self.parts[empty], f"no example{which}")
        names = next(each["names"] for each in summaries if each["names"])
        rows = sum(int(numbers_of(each, "rows").sum()) for each in tables)
        fewer = {key: sum(each.get(key, 0) for each in summaries) for key in ("used", "filtered", "dropped")}
        places: dict[int, str] = {}
        for each in summaries:
            places = dict(map(tuple, each["standing"])) | places
        assert self.held_out is not None
        about = {
            "files": [fact for each in self.parts for fact in each.facts],
            "sources": [len(each.files) for each in self.parts],
            "examples": of_each,
            "chunks": [len(each) for each in tables],
            "rows": rows,
            "filtered": fewer["filtered"],
            "dropped": fewer["dropped"],
            "left_out": rows - sum(fewer.values()),
            "overlap": self.held_out.overlap(self.splits, places),
            "texts": self.held_out.columns,
            "tokens": int(numbers_of(whole, "tokens").sum()),
            "longest": int(numbers_of(whole, "longest").argmax()),  # chunk with the longest example
            "names": names,
            "content": hashlib.sha256(numbers_of(whole, "hash").tobytes() + examples.tobytes()).hexdigest()[:24],
        }
        write_table(whole, folder / CHUNKS)
        self.held_out.write(folder)
        (folder / ABOUT).write_text(json.dumps(about), encoding="utf-8")
        for file in files:
            discard(file)


def maker(encoder: Callable[[dict[str, list]], dict[str, Any]], features: Features) -> Make:
    """Return the function that encodes rows with `encoder`, without text columns, which only evaluations read."""
    schema = pa.schema(
        field
        for field in features.arrow_schema
        if not pa.types.is_string(field.type.value_type if pa.types.is_list(field.type) else field.type)
    )
    return lambda rows: encoded(rows[:], encoder, schema)


def read_index(folder: Path) -> dict[str, Any]:
    """Metadata of a stream's index, without its chunks."""
    return dict(json.loads((folder / ABOUT).read_text(encoding="utf-8")))


def facts(folder: Path, others: Mapping[str, Any]) -> dict[str, Any]:
    """Facts about a streamed train split, merged with those of other splits: removed rows, evaluation examples in
    train, and examples per source."""
    index = read_index(folder)
    result = dict(others)
    for key in ("left_out", "filtered", "dropped"):
        if index[key]:
            result[key] = {"train": index[key], **others.get(key, {})}
    if index["overlap"]:
        result["overlap"] = index["overlap"]
    if "sources" in others:
        result["sources"] = others["sources"] | {"rows": {"train": index["examples"], **others["sources"]["rows"]}}
    return result


def names_of(files: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return (split, content identifier) of files that `encode` or `Stream.index` returned, for a cache key."""
    return sorted(
        (split, read_index(Path(file))["content"] if file.endswith(STREAM) else Path(file).name)
        for split, file in files.items()
    )


def counted(batch: pa.RecordBatch | None) -> dict[str, int]:
    """Index entry for the examples of a chunk."""
    if batch is None:
        return {"examples": 0, "tokens": 0, "longest": 0, "hash": 0}
    sides = [np.diff(np.from_dlpack(batch.column(name).offsets)) for name in SIDES if name in batch.schema.names]
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
    """A numeric column of an index."""
    parts = [np.from_dlpack(chunk) for chunk in table.column(name).chunks]
    return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, np.int64), *parts])
