"""Reads the rows of a file chunk by chunk: JSON, lines of text, archives and Parquet, for streamed data and for data
that are read whole.

In: .jsonl, .txt (one row per line), .tar (WebDataset: files of one name form a row) and .parquet; all but the last may
be compressed. Out: the file's chunks, and the rows of a chunk as columns; or a `RunError` that names the file and the
line, or the row if lines are not counted.

A chunk is located by its offset in the decompressed file, or by its row group. Uncompressed files are read from there.
Compressed files can only be read in order: the next chunk is free, any other requires decompressing from the start. A
Parquet row group is read from its start.
"""

from __future__ import annotations

import codecs
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
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from lockstep.config import error_messages as messages
from lockstep.config.run import RunError
from lockstep.data import file_formats

ROWS = 1000  # maximum rows per chunk
BYTES = 2**20  # approximate bytes per chunk
_SKIPPED = 2**20  # bytes decompressed at a time while skipping to a chunk
_BLOCK = 512  # of a tar archive
READ = ".jsonl, .txt, .tar (also compressed) and .parquet"
TEXTS = 1  # version of splitting .txt files into lines
_FAILS = (OSError, EOFError, zlib.error, lzma.LZMAError, tarfile.TarError, pa.ArrowException)

Columns = dict[str, list[Any]]
Rows = Any  # pa.Table or Columns: rows as they were read


@dataclass(frozen=True)
class Chunk:
    """Consecutive rows of a file."""

    row: int  # number of its first row in the file
    rows: int
    at: int  # offset in the decompressed bytes, or row group
    size: int  # bytes; 0 for .parquet


Opened = Callable[[Path], BinaryIO]  # opens the stored bytes of a file, seekable


def opened(path: Path) -> BinaryIO:
    """Open a local file."""
    return open(path, "rb")


def reader(
    path: Path,
    plain: str | None = None,
    column_paths: Sequence[str] = (),
    how: Opened = opened,
    key: str = "data.train",
) -> RowReader:
    """Create the reader for a file, by its name.

    `plain`: `line` if a .txt file holds unlabeled lines. `column_paths`: columns, or paths into them, to read; empty:
    all. `how`: opens the file. `key`: names the file in messages. Errors: `RunError`."""
    kinds: dict[str, type[RowReader]] = {
        ".jsonl": LineReader,
        ".txt": LineReader,
        ".tar": ArchiveReader,
        ".parquet": ParquetReader,
    }
    kind = kinds.get(file_formats.plain(path).suffix)
    if kind is None or (kind is ParquetReader and file_formats.is_compressed(path)):
        raise RunError(
            "LS2220",
            f"{key}: {path} cannot be streamed, because the start of its rows cannot be located; a stream reads {READ}",
        )
    if file_formats.plain(path).suffix == ".txt" and plain == "file":
        raise RunError("LS2221", f"{key}: {path}: a stream reads a .txt file line by line; set task.document=line")
    return kind(path, plain, column_paths, how, key)


def whole(file: Path, key: str, plain: str | None = None) -> Iterator[Rows]:
    """Yield all rows of a UTF-8 file as columns, one chunk at a time. A JSON file may hold a single list of rows or
    texts, and a .json file rows that span lines. Errors: `RunError`."""
    if file.suffix in (".json", ".jsonl") and (text := _document(file)) is not None:
        try:
            _check_levels(text)
            yield columns_of(_json_list(text) if text.lstrip()[:1] == "[" else _json_sequence(text))
        except ValueError as error:
            raise RunError("LS2227", f"{key}: {file}{error}") from None
        return
    of_file = LineReader(file, key=key) if file.suffix == ".json" else reader(file, plain, key=key)
    for _, rows in of_file.walk():
        yield rows


def count(rows: Rows) -> int:
    """Number of rows."""
    return len(next(iter(rows.values()), ())) if isinstance(rows, dict) else len(rows)


def _document(file: Path) -> str | None:
    """Text of a JSON file whose rows are not lines, or None if they are."""
    with open(file, encoding="utf-8-sig") as lines:
        first = next((line for line in lines if line.strip(_BLANK.decode())), "")
    if first.lstrip()[:1] == "[":
        return file.read_text(encoding="utf-8-sig")
    if file.suffix == ".jsonl" or not first or _is_value(first):
        return None
    text = file.read_text(encoding="utf-8-sig")
    with suppress(ValueError):
        _json_sequence(text)
        return text
    return None  # the line reader names the faulty line


def columns_of(rows: Sequence[dict[str, Any]]) -> Columns:
    """Convert rows to columns; missing keys become None."""
    names = dict.fromkeys(itertools.chain.from_iterable(rows))
    return {name: [row.get(name) for row in rows] for name in names}


@dataclass(eq=False)
class RowReader(ABC):
    """Reader of one file. The file stays open for the next chunk."""

    path: Path
    plain: str | None = None
    column_paths: Sequence[str] = ()
    how: Opened = opened
    key: str = "data.train"

    def walk(self) -> Iterator[tuple[Chunk, Rows]]:
        """Yield all chunks with their rows, in order. Errors: `RunError`."""
        row, chunks = 0, self._walk()
        while True:
            try:
                step = next(chunks, None)
            except _FAILS as error:
                raise self.failed(error, row) from error
            if step is None:
                return
            yield step
            row = step[0].row + step[0].rows

    def read(self, chunk: Chunk) -> Rows:
        """Read the rows of a chunk. Errors: `RunError`."""
        try:
            return self._read(chunk)
        except _FAILS as error:
            self.close()
            raise self.failed(error, chunk.row) from error

    def failed(self, error: BaseException, row: int) -> RunError:
        """Convert a library error to a readable `RunError`. `row`: first unreadable row."""
        if isinstance(error, FileNotFoundError):
            return RunError(
                "LS2222", f"{self.key}: {self.path} no longer exists, and row {row:,} of it is needed; restore the file"
            )
        reason = getattr(error, "strerror", None) or " ".join(str(error).split()) or type(error).__name__
        what = "unpack" if file_formats.is_compressed(self.path) else "read"
        return RunError(
            "LS2223",
            f"{self.key}: cannot {what} {self.path} from row {row:,} on ({reason}): the file is truncated, "
            "damaged or of another format; download or write it again",
        )

    @abstractmethod
    def _walk(self) -> Iterator[tuple[Chunk, Rows]]: ...

    @abstractmethod
    def _read(self, chunk: Chunk) -> Rows: ...

    @abstractmethod
    def close(self) -> None:
        """Close the file."""


class _ByteReader(RowReader):
    """Reader of a file whose chunks are ranges of its decompressed bytes."""

    _stream: Any = None
    _at = 0  # bytes read so far

    def _begin(self) -> Any:
        self.close()
        raw = self.how(self.path)
        if file_formats.is_compressed(self.path) and not raw.read(1):
            raise EOFError("it has no bytes")
        raw.seek(0)
        stream = file_formats.unpacking(raw, self.path)
        self._stream = io.BufferedReader(stream, _SKIPPED) if isinstance(stream, pa.NativeFile) else stream
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
        """Parse a chunk whose first row has the number `row`. Errors: `RunError`."""

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
        self._stream, self._at = None, 0


class LineReader(_ByteReader):
    """One row per line, JSON or text; blank lines are skipped."""

    @property
    def _is_json(self) -> bool:
        return file_formats.plain(self.path).suffix in (".jsonl", ".json")

    def _walk(self) -> Iterator[tuple[Chunk, Columns]]:
        stream, row, at, line = self._begin(), 0, 0, 1
        file_formats.check_packing(stream.peek(8), self.path, self.key)
        block: list[bytes] = []
        size = rows = 0
        for part in itertools.chain(stream, [b""]):
            if part:
                block.append(part)
                rows += self._count(part if at or size else part.removeprefix(codecs.BOM_UTF8))
                size += len(part)
            if rows >= ROWS or size >= BYTES or not part:
                if rows:
                    yield Chunk(row, rows, at, size), self._parsed(b"".join(block), row, line)
                row, at, line = row + rows, at + size, line + len(block)
                block, size, rows = [], 0, 0
        self.close()

    def _count(self, part: bytes) -> int:
        """Number of rows in a part of the file that ends with its only line feed."""
        if self._is_json:
            return bool(part.strip(_BLANK))
        if part.isascii() and b"\r" not in part.rstrip(b"\r\n"):
            return bool(part.strip(_BLANK_TEXT))
        return sum(bool(line.strip()) for line in file_formats.unix_lines(part.decode("utf-8", "replace")))

    def _parsed(self, block: bytes, row: int, line: int | None = None) -> Columns:
        """`line`: number of the block's first line, if known."""
        try:
            text = block.decode("utf-8-sig" if row == 0 else "utf-8")
        except UnicodeDecodeError as error:
            before = block.count(b"\n", 0, error.start)
            at = f"rows from {row:,} on" if line is None else f"line {line + before}"
            raise RunError(
                "LS2224",
                f"{self.key}: {self.path} is not text in UTF-8 ({at}: {error.reason}), and a stream reads UTF-8 "
                "only; convert the file",
            ) from None
        if self._is_json:
            lines = [(n, each) for n, each in enumerate(text.split("\n")) if each.strip(_BLANK.decode())]
            return columns_of([self._value(each, row + i, line and line + n) for i, (n, each) in enumerate(lines)])
        lines = [(n, each) for n, each in enumerate(file_formats.unix_lines(text)) if each.strip()]
        if self.plain:
            return {"text": [each for _, each in lines]}
        parts = [each.rpartition(";") for _, each in lines]
        for i, (_, mark, _) in enumerate(parts):
            if not mark:
                raise RunError(
                    "LS2225",
                    f"{self._place(row + i, line and line + lines[i][0])}: expected 'text;label', but the line has "
                    "no semicolon",
                )
        return {"text": [text for text, _, _ in parts], "label": [label.strip() for _, _, label in parts]}

    def _value(self, text: str, row: int, line: int | None) -> dict[str, Any]:
        try:
            return json_row(text)
        except ValueError as error:
            raise RunError("LS2226", f"{self._place(row, line)}{error}") from None

    def _place(self, row: int, line: int | None) -> str:
        return f"{self.key}: {self.path}, " + (f"row {row:,}" if line is None else f"line {line}")


class ArchiveReader(_ByteReader):
    """Reader of WebDataset archives. Consecutive files with the same name up to the first dot form a row; the rest of
    the name is the column: txt, json (a value), cls (a label, stripped). `key` is the common name."""

    def _walk(self) -> Iterator[tuple[Chunk, Columns]]:
        stream = self._begin()
        rows: list[dict[str, Any]] = []
        row = at = 0
        with tarfile.open(fileobj=stream, mode="r|") as archive:
            for begin, values in self._rows(archive, 0):
                if len(rows) == ROWS or (rows and begin - at >= BYTES):
                    yield Chunk(row, len(rows), at, begin - at), columns_of(rows)
                    rows, row, at = [], row + len(rows), begin
                rows.append(values)
            end = archive.offset
        if not file_formats.is_compressed(self.path) and os.fstat(stream.fileno()).st_size < end + _BLOCK:
            raise EOFError("the archive has no end")
        if rows:
            yield Chunk(row, len(rows), at, end - at), columns_of(rows)
        self.close()

    def _parsed(self, block: bytes, row: int) -> Columns:
        with tarfile.open(fileobj=io.BytesIO(block + bytes(2 * _BLOCK)), mode="r:") as archive:
            return columns_of([values for _, values in self._rows(archive, row)])

    def _rows(self, archive: tarfile.TarFile, row: int) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield offset and values of each row. `row`: number of the first."""
        for key, members in itertools.groupby(archive, lambda m: _key(m) if m.isfile() else ""):
            if not key:
                continue
            first = next(members)
            fields = (self._field(archive, member, row) for member in itertools.chain([first], members))
            yield first.offset, {"key": key, **{name: value for name, value in fields if name}}
            row += 1

    def _field(self, archive: tarfile.TarFile, member: tarfile.TarInfo, row: int) -> tuple[str, Any]:
        name = member.name.rpartition("/")[2].partition(".")[2].lower()
        if name.rpartition(".")[2] not in ("txt", "json", "cls"):
            return "", None  # such as an image
        member_file = archive.extractfile(member)
        assert member_file is not None
        data = member_file.read()
        try:
            text = data.decode("utf-8")
            if name.endswith("json"):
                return name, json.loads(text)
            return name, text.strip() if name.endswith("cls") else text
        except ValueError as error:
            raise RunError(
                "LS2228", f"{self.key}: {self.path}, row {row:,}: {member.name} cannot be read: {error}"
            ) from None


def _key(member: tarfile.TarInfo) -> str:
    folder, slash, name = member.name.rpartition("/")
    return folder + slash + name.partition(".")[0]


class ParquetReader(RowReader):
    """Reader of Parquet files; a chunk is all or some of a row group's rows."""

    _file: Any = None
    _next: tuple[int, int, Iterator[pa.RecordBatch]] = (-1, 0, iter(()))  # row group, row, remaining batches

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
            ends = [
                next((name for name in names if f"{path}.".startswith(f"{name}.")), None) for path in self.column_paths
            ]
            batches = file.iter_batches(ROWS, [chunk.at], None if None in ends else list(dict.fromkeys(ends)) or None)
        parts: list[pa.RecordBatch] = []
        while (have := sum(map(len, parts))) < chunk.rows:
            batch = next(batches, None)
            if batch is None:
                raise EOFError("it has fewer rows")
            first, stop = max(chunk.row - row, 0), min(chunk.row - row + chunk.rows, len(batch))
            row += len(batch)
            parts += [batch.slice(first, stop - first)] if first < stop else []
            if stop < len(batch) and have + stop - first == chunk.rows:  # the rest belongs to the next chunk
                batches = itertools.chain([batch.slice(stop)], batches)
                row -= len(batch) - stop
        self._next = chunk.at, row, batches
        return pa.Table.from_batches(parts).replace_schema_metadata(file.schema_arrow.metadata)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file, self._next = None, (-1, 0, iter(()))


# -- JSON ------------------------------------------------------------------------------------------------------------

LEVELS = 200  # maximum nesting; pyarrow's reader crashes at about ten thousand levels
_BLANK = b" \t\r\n\v\f"
_BLANK_TEXT = _BLANK + b"\x1c\x1d\x1e\x1f"  # ASCII characters removed by `str.strip`
_STRINGS = re.compile(rb'"(?:[^"\\]|\\.)*"?')
_OTHERS = bytes(set(range(256)) - set(b"[]{}"))


def _check_levels(text: str) -> None:
    """Check that no line is nested deeper than `LEVELS`. Errors: `ValueError`; its message continues a file's name."""
    for number, line in enumerate(text.split("\n"), 1):
        if line.count("[") + line.count("{") > LEVELS and _is_deep(line.encode()):
            raise ValueError(f", line {number}{_DEEP}")


_DEEP = f": nested more than {LEVELS} levels deep"


def _is_deep(line: bytes) -> bool:
    marks = _STRINGS.sub(b"", line).translate(None, _OTHERS)
    return max(itertools.accumulate(1 if mark in b"[{" else -1 for mark in marks), default=0) > LEVELS


def json_row(line: str) -> dict[str, Any]:
    """Parse the row on a line. Errors: `ValueError`; the message continues the line's number."""
    if line.count("[") + line.count("{") > LEVELS and _is_deep(line.encode()):
        raise ValueError(_DEEP)
    return _mapping(_parsed(line, f": {_excerpt(line)}"))


def _json_list(text: str) -> list[dict[str, Any]]:
    """Rows of a file that holds a single list. Errors: `ValueError`; the message continues the file's name."""
    rows = _parsed(text, "")
    if rows and all(isinstance(row, str) for row in rows):
        return [{"text": row} for row in rows]
    for number, row in enumerate(rows):
        _mapping(row, f", row {number}")
    return list(rows)


def _json_sequence(text: str) -> list[dict[str, Any]]:
    """Rows that follow one another regardless of line breaks. Errors: `ValueError`."""
    rows, at = [], 0
    while rest := text[at:].lstrip():
        at = len(text) - len(rest)
        try:
            row, at = _DECODER.raw_decode(text, at)
        except RecursionError:
            raise ValueError(": nested too deeply") from None
        rows.append(_mapping(row))
    return rows


def _is_value(line: str) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a mapping. Errors: `ValueError` for a duplicate key, of which Python would keep the last."""
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f": the key {twice[:60]!r} occurs twice in one mapping")
    return mapping


_DECODER = json.JSONDecoder(object_pairs_hook=_once)


def _parsed(text: str, excerpt: str) -> Any:
    try:
        return _DECODER.decode(text)
    except json.JSONDecodeError as error:
        line = "" if excerpt else f", line {error.lineno}"
        raise ValueError(f"{line}, column {error.colno}: {error.msg[:1].lower()}{error.msg[1:]}{excerpt}") from None
    except RecursionError:
        raise ValueError(": nested too deeply") from None
    except ValueError as error:  # a number of 5,000 digits, or a duplicate key
        raise ValueError(f": {str(error).partition(';')[0].removeprefix(': ')}") from None


def _mapping(row: Any, place: str = "") -> dict[str, Any]:
    if not isinstance(row, dict):
        raise ValueError(f"{place} holds {messages.kind(row)}; expected a mapping of columns on each line")
    return row


def _excerpt(line: str) -> str:
    line = line.strip(_BLANK.decode())
    return repr(line if len(line) <= 80 else f"{line[:77]}...")
