"""A shard of a stream: a local file that is read a chunk of rows at a time, and never whole.

In: .jsonl, .txt (a line a row), .tar (files of one name, as WebDataset has them) and .parquet; all but the last also
compressed. Out: its chunks, and the rows of one of them as columns, or a `RunError` that names the file and the row.

Where a chunk begins is kept: a place in the file as it is unpacked, or a row group. A file that is not compressed is
read from there. One that is gives its bytes in order only: the next chunk costs nothing extra, another one costs
unpacking the shard from its start. Of .parquet a row group is read from its start.
"""

from __future__ import annotations

import bz2
import gzip
import io
import itertools
import json
import lzma
import os
import re
import tarfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from lockstep.config.run import RunError
from lockstep.data import file_formats

ROWS = 1000  # of a chunk, at most
BYTES = 2**20  # that they hold, about
_SKIPPED = 2**20  # bytes unpacked at a time on the way to a chunk
_BLOCK = 512  # of a tar archive
READ = ".jsonl, .txt, .tar (also compressed) and .parquet"
_FAILS = (OSError, EOFError, zlib.error, lzma.LZMAError, tarfile.TarError, pa.ArrowException)

Columns = dict[str, list[Any]]
Found = Any  # pa.Table or Columns: rows as they were read


@dataclass(frozen=True)
class Chunk:
    """Some rows of a shard that follow each other."""

    row: int  # of the shard: the first
    rows: int
    at: int  # where they begin: bytes of what is unpacked, or a row group
    size: int  # bytes there; of .parquet 0


Opened = Callable[[Path], BinaryIO]  # the bytes of a shard as they are stored; `seek` works


def opened(path: Path) -> BinaryIO:
    """Those of a file on this machine."""
    return open(path, "rb")


def shard(path: Path, plain: str | None = None, wanted: Sequence[str] = (), how: Opened = opened) -> ShardFile:
    """A shard by its name. `plain`: a .txt file has texts and no labels, and each `line` is one. `wanted`: the columns,
    or the paths into them, that are asked for; none: all. `how` opens it. Errors: `RunError`."""
    kinds: dict[str, type[ShardFile]] = {".jsonl": LineShard, ".txt": LineShard, ".tar": Archive, ".parquet": Parquet}
    kind = kinds.get(file_formats.plain(path).suffix)
    if kind is None or (kind is Parquet and file_formats.is_compressed(path)):
        raise RunError(
            "LS2220",
            f"data.train: {path} cannot be streamed, since nothing tells where its rows begin; a stream reads {READ}",
        )
    if file_formats.plain(path).suffix == ".txt" and plain == "file":
        raise RunError("LS2221", f"data.train: {path}: a stream reads a .txt file line by line; set task.document=line")
    return kind(path, plain, wanted, how)


class ShardFile(ABC):
    """One file. What was opened last stays open, for the chunk that follows."""

    def __init__(self, path: Path, plain: str | None, wanted: Sequence[str], how: Opened) -> None:
        self.path, self.plain, self.wanted, self.how = path, plain, wanted, how

    def walk(self) -> Iterator[tuple[Chunk, Found]]:
        """All chunks with their rows, in order. Errors: `RunError`."""
        row, walked = 0, self._walk()
        while True:
            try:
                found = next(walked, None)
            except _FAILS as error:
                raise self.failed(error, row) from error
            if found is None:
                return
            yield found
            row = found[0].row + found[0].rows

    def read(self, chunk: Chunk) -> Found:
        """The rows of a chunk. Errors: `RunError`."""
        try:
            return self._read(chunk)
        except _FAILS as error:
            self.close()
            raise self.failed(error, chunk.row) from error

    def failed(self, error: BaseException, row: int) -> RunError:
        """Whatever a library says of it, for a person. `row`: the first that could not be read."""
        if isinstance(error, FileNotFoundError):
            return RunError("LS2222", f"data.train: {self.path} is gone; row {row:,} of it is wanted")
        said = getattr(error, "strerror", None) or " ".join(str(error).split()) or type(error).__name__
        what = "unpack" if file_formats.is_compressed(self.path) else "read"
        return RunError(
            "LS2223",
            f"data.train: cannot {what} {self.path} from row {row:,} on ({said}): it is cut off or damaged, or is no "
            "such file; fetch or write it again",
        )

    @abstractmethod
    def _walk(self) -> Iterator[tuple[Chunk, Found]]: ...

    @abstractmethod
    def _read(self, chunk: Chunk) -> Found: ...

    @abstractmethod
    def close(self) -> None:
        """Give the file back."""


class _Bytes(ShardFile):
    """A file of which chunks are ranges of bytes, as it is unpacked."""

    def __init__(self, path: Path, plain: str | None, wanted: Sequence[str], how: Opened) -> None:
        super().__init__(path, plain, wanted, how)
        self._stream: Any = None
        self._at = 0  # bytes of it that were read

    def _begin(self) -> Any:
        self.close()
        kind, raw = file_formats.ENDINGS.get(self.path.suffix.lower()), self.how(self.path)
        if kind is not None and not raw.read(1):
            raise EOFError("it has no bytes")
        raw.seek(0)
        if kind == "zstd":
            self._stream = io.BufferedReader(pa.CompressedInputStream(raw, "zstd"), _SKIPPED)
        else:
            readers: dict[str | None, Any] = {"gzip": gzip.GzipFile, "bzip2": bz2.BZ2File, "xz": lzma.LZMAFile}
            self._stream = raw if kind is None else readers[kind](**{"fileobj" if kind == "gzip" else "filename": raw})
        return self._stream

    def _read(self, chunk: Chunk) -> Columns:
        if self._stream is None or chunk.at < self._at or not file_formats.is_compressed(self.path):
            self._begin()
        if not file_formats.is_compressed(self.path):
            self._stream.seek(chunk.at)
            self._at = chunk.at
        while self._at < chunk.at:
            skipped = len(self._stream.read(min(_SKIPPED, chunk.at - self._at)))
            if not skipped:
                raise EOFError("it ends before that")
            self._at += skipped
        block = self._stream.read(chunk.size)
        self._at += len(block)
        if len(block) < chunk.size:
            raise EOFError("it ends before that")
        return self._parsed(block, chunk.row)

    @abstractmethod
    def _parsed(self, block: bytes, row: int) -> Columns:
        """The rows of a chunk, of which `row` is the first. Errors: `RunError`."""

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
        self._stream, self._at = None, 0


class LineShard(_Bytes):
    """A row a line; blank lines are none."""

    def _walk(self) -> Iterator[tuple[Chunk, Columns]]:
        stream, row, at = self._begin(), 0, 0
        block: list[bytes] = []
        size = rows = 0
        for line in itertools.chain(stream, [b""]):
            if line:
                block.append(line)
                size, rows = size + len(line), rows + bool(line.strip())
            if rows == ROWS or size >= BYTES or not line:
                if rows:
                    yield Chunk(row, rows, at, size), self._parsed(b"".join(block), row)
                row, at = row + rows, at + size
                block, size, rows = [], 0, 0
        self.close()

    def _parsed(self, block: bytes, row: int) -> Columns:
        try:
            lines = [line for line in block.decode("utf-8-sig" if row == 0 else "utf-8").split("\n") if line.strip()]
        except UnicodeDecodeError as error:
            raise RunError(
                "LS2224", f"data.train: {self.path}, rows from {row:,} on: it is not UTF-8 ({error.reason})"
            ) from None
        if file_formats.plain(self.path).suffix == ".jsonl":
            return _columns([self._value(line, row + i) for i, line in enumerate(lines)])
        if self.plain:
            return {"text": lines}
        parts = [line.rpartition(";") for line in lines]
        for i, (_, mark, _) in enumerate(parts):
            if not mark:
                raise RunError(
                    "LS2225", f"data.train: {self.path}, row {row + i:,}: wanted is 'text;label', there is no semicolon"
                )
        return {"text": [text for text, _, _ in parts], "label": [label.strip() for _, _, label in parts]}

    def _value(self, line: str, row: int) -> dict[str, Any]:
        try:
            value = json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            said = getattr(error, "msg", "nested too deeply")
            raise RunError(
                "LS2226", f"data.train: {self.path}, row {row:,}: it is not JSON ({said}): {line[:60]!r}"
            ) from None
        if not isinstance(value, dict):
            raise RunError(
                "LS2227", f"data.train: {self.path}, row {row:,}: wanted is a mapping of columns, and not {line[:60]!r}"
            )
        return value


class Archive(_Bytes):
    """Files of an archive that follow each other and have one name up to the first point are a row, whose columns are
    called as the rest of their names: txt, json (a value), cls (a whole number); `key` is the name."""

    def _walk(self) -> Iterator[tuple[Chunk, Columns]]:
        stream = self._begin()
        rows: list[dict[str, Any]] = []
        row = at = 0
        with tarfile.open(fileobj=stream, mode="r|") as archive:
            for key, members in itertools.groupby(archive, lambda m: _key(m) if m.isfile() else ""):
                some = iter(members)
                first = next(some)
                if not key:
                    continue
                if len(rows) == ROWS or (rows and first.offset - at >= BYTES):
                    yield Chunk(row, len(rows), at, first.offset - at), _columns(rows)
                    rows, row, at = [], row + len(rows), first.offset
                fields = (self._field(archive, m, row + len(rows)) for m in itertools.chain([first], some))
                rows.append({"key": key, **{name: value for name, value in fields if name}})
            end = archive.offset
        if not file_formats.is_compressed(self.path) and os.fstat(stream.fileno()).st_size < end + _BLOCK:
            raise EOFError("the archive has no end")
        if rows:
            yield Chunk(row, len(rows), at, end - at), _columns(rows)
        self.close()

    def _parsed(self, block: bytes, row: int) -> Columns:
        rows: list[dict[str, Any]] = []
        with tarfile.open(fileobj=io.BytesIO(block + bytes(2 * _BLOCK)), mode="r:") as archive:
            for key, members in itertools.groupby((m for m in archive if m.isfile() and _key(m)), _key):
                fields = [self._field(archive, member, row + len(rows)) for member in members]
                rows.append({"key": key, **{name: value for name, value in fields if name}})
        return _columns(rows)

    def _field(self, archive: tarfile.TarFile, member: tarfile.TarInfo, row: int) -> tuple[str, Any]:
        name = member.name.rpartition("/")[2].partition(".")[2].lower()
        if name.rpartition(".")[2] not in ("txt", "json", "cls"):
            return "", None  # an image, or the like
        held = archive.extractfile(member)
        assert held is not None
        data = held.read()
        try:
            text = data.decode("utf-8")
            if name.endswith("json"):
                return name, json.loads(text)
            return name, int(text) if name.endswith("cls") and re.fullmatch(r"\s*-?\d+\s*", text) else text
        except ValueError as error:
            raise RunError(
                "LS2228", f"data.train: {self.path}, row {row:,}: {member.name} cannot be read: {error}"
            ) from None


def _key(member: tarfile.TarInfo) -> str:
    folder, slash, name = member.name.rpartition("/")
    return folder + slash + name.partition(".")[0]


class Parquet(ShardFile):
    """Rows of a row group are a chunk, or some of them."""

    def __init__(self, path: Path, plain: str | None, wanted: Sequence[str], how: Opened) -> None:
        super().__init__(path, plain, wanted, how)
        self._file: Any = None
        self._next: tuple[int, int, Iterator[pa.RecordBatch]] = (
            -1,
            0,
            iter(()),
        )  # group, row of the shard, what follows

    def _walk(self) -> Iterator[tuple[Chunk, pa.Table]]:
        about, row = self._opened().metadata, 0
        for group in range(about.num_row_groups):
            rows, size = about.row_group(group).num_rows, about.row_group(group).total_byte_size
            each = int(max(1, min(ROWS, BYTES * rows // max(1, size))))
            for start in range(0, rows, each):
                chunk = Chunk(row + start, min(each, rows - start), group, 0)
                yield chunk, self._read(chunk)
            row += rows
        self.close()

    def _opened(self) -> Any:
        if self._file is None:
            self._file = pq.ParquetFile(self.how(self.path))
        return self._file

    def _read(self, chunk: Chunk) -> pa.Table:
        file = self._opened()
        group, row, batches = self._next
        if group != chunk.at or row > chunk.row:
            if chunk.at >= file.metadata.num_row_groups:
                raise EOFError("it has fewer rows")
            row = sum(file.metadata.row_group(each).num_rows for each in range(chunk.at))
            names = file.schema_arrow.names
            ends = [next((name for name in names if f"{path}.".startswith(f"{name}.")), None) for path in self.wanted]
            batches = file.iter_batches(ROWS, [chunk.at], None if None in ends else list(dict.fromkeys(ends)) or None)
        found: list[pa.RecordBatch] = []
        while (have := sum(map(len, found))) < chunk.rows:
            batch = next(batches, None)
            if batch is None:
                raise EOFError("it has fewer rows")
            first, stop = max(chunk.row - row, 0), min(chunk.row - row + chunk.rows, len(batch))
            row += len(batch)
            found += [batch.slice(first, stop - first)] if first < stop else []
            if stop < len(batch) and have + stop - first == chunk.rows:  # the rest is of the next chunk
                batches = itertools.chain([batch.slice(stop)], batches)
                row -= len(batch) - stop
        self._next = chunk.at, row, batches
        return pa.Table.from_batches(found).replace_schema_metadata(file.schema_arrow.metadata)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file, self._next = None, (-1, 0, iter(()))


def _columns(rows: list[dict[str, Any]]) -> Columns:
    """Rows as columns, of which each has all that any of them has."""
    names = dict.fromkeys(itertools.chain.from_iterable(rows))
    return {name: [row.get(name) for row in rows] for name in names}
