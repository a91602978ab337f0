"""Reads local files: decompresses them, checks their encoding, and parses tables.

In: a path. Out: blocks, lines, or the columns of a .csv or .tsv file; or an error that names the file and the line.
Files that would fill the disk are not decompressed.

Tables use quotes as in RFC 4180. A file whose rows fit the header only with quotes as ordinary characters is unquoted.
A file that can be read both ways, with different rows, is refused.
"""

from __future__ import annotations

import bz2
import codecs
import csv
import gzip
import hashlib
import io
import itertools
import lzma
import os
import re
import shutil
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

from lockstep.config.errors import remedy_of
from lockstep.config.run import RunError
from lockstep.config.sections import DataSection
from lockstep.data.cache import cache_folder, locked
from lockstep_trace.coded import quantity

ENDINGS = {".gz": "gzip", ".bz2": "bzip2", ".xz": "xz", ".zst": "zstd"}
BLOCK = 2**20  # bytes read at a time
_SMALL = 2**16
MOST = 1000  # maximum decompression ratio, for files that decompress to at least `LARGE`
LARGE = 2**30  # bytes


def is_compressed(file: Path) -> bool:
    """Return whether a file has the name of a compressed file."""
    return file.suffix.lower() in ENDINGS


def plain(file: Path) -> Path:
    """The file's name after decompression."""
    return file.with_suffix("") if is_compressed(file) else file


def ending(file: Path) -> str:
    """The full ending: .jsonl, or .jsonl.gz."""
    return plain(file).suffix + (file.suffix if is_compressed(file) else "")


def opened(file: Path) -> Any:
    """Open a file and decompress it. Errors: those of the decompression library."""
    return unpacking(file, file)


def unpacking(source: Path | BinaryIO, name: Path) -> Any:
    """Decompress a file, or an open one, by its `name`. Errors: those of the decompression library."""
    kind = ENDINGS.get(name.suffix.lower())
    if kind == "zstd":
        import pyarrow as pa

        return pa.CompressedInputStream(pa.OSFile(str(source)) if isinstance(source, Path) else source, "zstd")
    if kind is None:
        return open(source, "rb") if isinstance(source, Path) else source
    if kind == "gzip":
        return gzip.open(source, "rb")
    kinds: dict[str, Callable[[], Any]] = {"bzip2": bz2.BZ2Decompressor, "xz": lzma.LZMADecompressor}
    return io.BufferedReader(_Streams(source, kinds[kind]), BLOCK)


class _Streams(io.RawIOBase):
    """Reader of concatenated bzip2 or xz streams, which zeros may separate. Python's own readers end silently at bytes
    that begin no further stream, as after damage; this one raises an error."""

    def __init__(self, source: Path | BinaryIO, kind: Callable[[], Any]) -> None:
        self._own = isinstance(source, Path)
        self._file: BinaryIO = open(source, "rb") if isinstance(source, Path) else source  # noqa: SIM115
        self._kind, self._now = kind, kind()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Read decompressed bytes. Errors: those of the decompression library, and `EOFError` within a stream."""
        data = b""
        while not data:
            packed = b""
            if self._now.eof:
                packed = self._now.unused_data.lstrip(b"\0")
                while not packed and (read := self._file.read(BLOCK)):
                    packed = read.lstrip(b"\0")
                if not packed:
                    return 0
                self._now = self._kind()
            elif self._now.needs_input and not (packed := self._file.read(BLOCK)):
                raise EOFError("it ends within a stream")
            data = self._now.decompress(packed, len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if self._own and not self.closed:
            self._file.close()
        super().close()


def blocks(file: Path, key: str) -> Iterator[bytes]:
    """Yield the decompressed bytes in blocks. Errors: `RunError` for a file that is unreadable, truncated or damaged,
    or that decompresses to an implausible size."""
    total, lines = 0, 1
    try:
        size = file.stat().st_size
        with opened(file) as stream:
            # Yield everything before a truncation; zstd loses all that is read in the same call.
            while block := stream.read1(_SMALL if file.suffix.lower() == ".zst" else BLOCK):
                total += len(block)
                if is_compressed(file) and total > max(LARGE, MOST * size):
                    raise RunError(
                        "LS2060",
                        f"{key}: {file} has {size:,} bytes and unpacks to more than {total / 2**30:,.1f} GiB, which "
                        "looks like a mistake or a decompression bomb; if it is intended, unpack the file first",
                    )
                yield block
                lines += block.count(b"\n")
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        if not is_compressed(file):
            raise RunError(
                "LS2061", f"{key}: cannot read {file}: {getattr(error, 'strerror', None) or error}"
            ) from error
        raise RunError(
            "LS2062",
            f"{key}: cannot unpack {file} beyond line {lines:,} ({ENDINGS[file.suffix.lower()]}: "
            f"{getattr(error, 'strerror', None) or str(error) or type(error).__name__}): the file is "
            "truncated, damaged or of another format; download or write it again",
        ) from None


@contextmanager
def unpacked(files: list[Path], key: str, encoding: str = "utf-8") -> Iterator[list[Path]]:
    """Decompress files into the cache and convert other encodings to UTF-8, while the context is active; other files
    stay in place.

    Paths and times are stable across calls, because `datasets` keys its cache by them. Errors: `RunError`; those raised
    inside the context name the original file."""
    source = None if codecs.lookup(encoding).name == "utf-8" else encoding
    changed = {file for file in files if is_compressed(file) or (source and file.suffix not in BINARY)}
    if not changed:
        yield files
        return
    identity: list[Any] = [[str(f.resolve()), f.stat().st_size, f.stat().st_mtime_ns] for f in files]
    identity += [source] if source else []
    name = hashlib.sha256(repr(identity).encode()).hexdigest()[:24]
    with ExitStack() as stack:
        stack.enter_context(locked(f"unpacked-{name}"))
        folder = cache_folder() / "unpacked" / name
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        there = {
            file: folder / f"{i:05d}-{plain(file).name}" if file in changed else file for i, file in enumerate(files)
        }
        for file, to in there.items():
            if to is not file:
                _unpack(file, to, key, source)
        try:
            yield [there[file] for file in files]
        except RunError as error:
            message = error.message
            for file, to in there.items():
                message = message.replace(str(to), str(file))
            raise RunError(error.code, message) from error


def _unpack(file: Path, to: Path, key: str, encoding: str | None) -> None:
    """Decompress a file. `encoding`: of the text; None: keep the bytes. Errors: `RunError`."""
    decoder = codecs.getincrementaldecoder(encoding)() if encoding else None
    try:
        with open(to, "wb") as out:
            for block in blocks(file, key):
                out.write(decoder.decode(block).encode("utf-8", "surrogatepass") if decoder else block)
        os.utime(to, ns=(file.stat().st_atime_ns, file.stat().st_mtime_ns))
    except OSError as error:
        raise RunError(
            "LS2063",
            f"{key}: cannot unpack {file} into {to.parent}: {error.strerror or error}; {remedy_of(error)} "
            "(LOCKSTEP_CACHE sets this folder)",
        ) from error


BINARY = (".parquet", ".arrow")  # endings of binary files
# Magic bytes of compressed files: `datasets` would decompress them regardless of name, to any size.
_PACKED = {
    "gzip": (0, b"\x1f\x8b"),
    "bzip2": (4, b"1AY&SY"),
    "xz": (0, b"\xfd7zXZ\x00"),
    "zstd": (0, b"\x28\xb5\x2f\xfd"),
    "zip": (0, b"PK\x03\x04"),
    "lz4": (0, b"\x04\x22\x4d\x18"),
}


def check(file: Path, key: str, encoding: str) -> None:
    """Refuse a file that is compressed but not named so, that is not text in this encoding, or that would fill the
    disk.

    Reads the whole file. Errors: `RunError`."""
    parts = blocks(file, key)
    start = next(parts, b"")
    if file.suffix in BINARY:
        return _check_unpacked(file, key) if file.suffix == ".parquet" else None
    check_packing(start, file, key)
    return _check_text(file, key, encoding, itertools.chain([start], parts))


def check_packing(start: bytes, file: Path, key: str) -> None:
    """Refuse a file that starts like a compressed file but is not named so. Errors: `RunError`."""
    for name, (place, mark) in _PACKED.items():
        if start.startswith(mark, place):
            what = "holds another compressed file" if is_compressed(file) else "is compressed"
            endings = {kind: ending for ending, kind in ENDINGS.items()}
            mend = f"rename it to {plain(file).name}{endings[name]}, or unpack it" if name in endings else "unpack it"
            raise RunError("LS2064", f"{key}: {file} {what} ({name}), although its name ends differently: {mend}")


def codec(encoding: str) -> str:
    """The codec for an encoding; for UTF-8, one that skips a byte order mark."""
    return "utf-8-sig" if codecs.lookup(encoding).name == "utf-8" else encoding


def text_of(file: Path, encoding: str) -> str:
    """The text of a checked file, with Unix line endings."""
    return "\n".join(unix_lines(b"".join(blocks(file, "data")).decode(codec(encoding))))


def unix_lines(text: str) -> list[str]:
    """Split a text at line feeds and carriage returns only (`splitlines` would also split at U+2028 and the like)."""
    return text.replace("\r\n", "\n").replace("\r", "\n").split("\n")


def _check_text(file: Path, key: str, encoding: str, blocks: Iterator[bytes]) -> None:
    decoder, line, guess = codecs.getincrementaldecoder(encoding)(), 1, None
    try:
        for number, block in enumerate(blocks):
            guess = guess if number else _looks_like(block[:4096])
            line += decoder.decode(block).count("\n")
        decoder.decode(b"", final=True)
        if guess is None or codecs.lookup(guess).name[:6] == codecs.lookup(encoding).name[:6]:
            return
        reason = "it decodes, but to letters with zeros between them"
    except UnicodeError as error:
        line += str(getattr(error, "object", b"")[: getattr(error, "start", 0)], "latin-1").count("\n")
        reason = f"line {line}: {getattr(error, 'reason', error)}"
    others = f"{guess}: it begins as that does" if guess else "cp1252, latin-1, utf-16, or its actual encoding"
    raise RunError(
        "LS2065",
        f"{key}: {file} is not text in {encoding.upper() if encoding == 'utf-8' else encoding} ({reason}): set "
        f"data.encoding ({others}), or convert the file",
    )


def _looks_like(start: bytes) -> str | None:
    """Detect UTF-16 or UTF-32 from the start of a file; None otherwise."""
    for mark, name in ((codecs.BOM_UTF32_LE, "utf-32"), (codecs.BOM_UTF32_BE, "utf-32")):
        if start.startswith(mark):
            return name
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    even, odd = start[::2].count(0), start[1::2].count(0)
    if max(even, odd) * 4 > len(start):
        return "utf-16-le" if odd > even else "utf-16-be"
    return None


def _check_unpacked(file: Path, key: str) -> None:
    """Refuse a Parquet file that would fill the disk. Its decompressed size is estimated from metadata and the first
    rows of each row group."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    size, unpacked = file.stat().st_size, 0.0
    try:
        parquet = pq.ParquetFile(file)
        for group in range(parquet.metadata.num_row_groups):
            metadata = parquet.metadata.row_group(group)
            first = next(parquet.iter_batches(batch_size=16, row_groups=[group]), None)
            rows = first.nbytes / len(first) * metadata.num_rows if first is not None and len(first) else 0
            unpacked += max(rows, metadata.total_byte_size)
    except (pa.ArrowException, OSError):
        return  # its reader reports the error
    if unpacked >= LARGE and unpacked > MOST * size:
        raise RunError(
            "LS2066",
            f"{key}: {file} has {size:,} bytes and unpacks to about {unpacked / 2**30:,.1f} GiB, "
            f"{unpacked / size:,.0f} times as much, which looks like a mistake or a decompression bomb; if it "
            "is intended, write the data as .jsonl or .csv",
        )


# -- tables ---------------------------------------------------------------------------------------------------------

SEPARATORS = {".csv": ",", ".tsv": "\t"}  # ending -> default separator
NAMES = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}
QUOTES = {"double": '"', "single": "'", "none": ""}
BATCH = 10_000  # rows per type-inference batch of the `datasets` reader
VERSION = 2  # version of table reading
_NUMBER = re.compile(
    r"\s*[+-]?((?P<whole>[0-9]+)|([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?|inf|infinity)\s*", re.A | re.I
)
_EXCEL = re.compile(r'"?sep=."?')
_AS_WRITTEN = re.compile("0|-?[1-9][0-9]*")
_TRUTHS = ("true", "True", "TRUE", "false", "False", "FALSE")

csv.field_size_limit(2**31 - 1)  # cells may hold books


class Misfit(RunError):
    """A row does not fit the table with this separator and quote, from a line on."""

    def __init__(self, code: str, message: str, line: int = 0) -> None:
        super().__init__(code, message)
        self.line = line


class TwoWays(Misfit):
    """The file is a valid table both with and without quotes, with different rows."""


@dataclass(frozen=True)
class Dialect:
    """Separator of a table's cells, and quote character (empty: none)."""

    separator: str
    quote: str

    def reader(self, lines: Iterator[str]) -> Any:
        """Python's csv reader, which raises `csv.Error` for quotes that violate RFC 4180."""
        if self.quote:
            return csv.reader(lines, delimiter=self.separator, quotechar=self.quote, strict=True)
        return csv.reader(lines, delimiter=self.separator, quoting=csv.QUOTE_NONE, quotechar=None)

    @property
    def options(self) -> dict[str, Any]:
        """Options for pandas' reader. The first column is never an index."""
        quotes = {"quotechar": self.quote} if self.quote else {"quoting": csv.QUOTE_NONE}
        return {"sep": self.separator, "index_col": False, "keep_default_na": False, **quotes}


class _Lines:
    """Lines of a file with their line endings; records whether any contains a quote. Errors: `Misfit`."""

    def __init__(self, file: Path, encoding: str, quote: str) -> None:
        self.file, self.encoding, self.quote = file, encoding, quote
        self.quoted, self.doubled, self.last = False, False, ""

    def __iter__(self) -> Iterator[str]:
        with io.TextIOWrapper(opened(self.file), codec(self.encoding), newline="") as text:
            for number, line in enumerate(text, 1):
                if number == 1 and _EXCEL.fullmatch(line.strip()):
                    raise Misfit(
                        "LS2068",
                        f"{self.file}, line 1: {line.strip()!r} is an instruction for Excel; remove the line, and set "
                        "data.separator",
                        1,
                    )
                if "\0" in line:
                    raise Misfit(
                        "LS2069", f"{self.file}, line {number:,}: the row contains a zero byte; remove it", number
                    )
                if (self.quote or '"') in line:
                    self.quoted, self.doubled = True, self.doubled or '""' in line
                self.last = line
                yield line


def rows(file: Path, encoding: str, dialect: Dialect) -> Iterator[tuple[int, list[str]]]:
    """Yield the first line number and cells of each row, skipping blank lines. Errors: `Misfit`."""
    return _rows(_Lines(file, encoding, dialect.quote), dialect)


def _rows(lines: _Lines, dialect: Dialect) -> Iterator[tuple[int, list[str]]]:
    reader = dialect.reader(iter(lines))
    while True:
        start = reader.line_num + 1
        try:
            row = next(reader, None)
        except csv.Error as error:
            raise Misfit(
                "LS2070",
                f"{lines.file}, line {start:,}: {_quoting(str(error), dialect.quote)}: {_excerpt([lines.last])}. "
                "Double a quote inside of quotes, or set data.quote: none to read quotes as plain characters",
                start,
            ) from None
        if row is None:
            return
        if len(row) > 1 or (row and row[0].strip(" \t")) or (row and dialect.quote and dialect.quote in lines.last):
            yield start, row


def _quoting(message: str, quote: str) -> str:
    if "unexpected end" in message:
        return f"a cell that begins with {quote} there is never closed"
    return f"there is text between the {quote} that ends a cell and the next separator" if quote else message


@dataclass
class Table:
    """A file as read with one dialect."""

    dialect: Dialect
    names: list[str]
    rows: int = 0
    quoted: bool = False  # whether it contains a quote
    doubled: bool = False  # whether it contains a doubled quote
    kinds: list[set[str]] = field(default_factory=list)  # of each column: values of `_kind`
    begins: list[set[str]] = field(default_factory=list)  # of each column, in the first rows
    needless: bool = False  # whether some cells are quoted needlessly and others are not
    wrapped: bool = False  # whether most texts of a column are quoted
    escaped: bool = False  # whether quotes are escaped by backslashes


def table(file: Path, key: str, data: DataSection) -> Table:
    """Scan a file and check its column names. Errors: `RunError`, also for duplicate names."""
    table = scanned(file, key, data)
    for place, name in enumerate(table.names):
        if name and name in table.names[:place]:
            raise RunError(
                "LS2071",
                f"{key}: {file}: columns {table.names.index(name) + 1} and {place + 1} are both named {name!r}; "
                "give each column a different name",
            )
    return table


def scanned(file: Path, key: str, data: DataSection) -> Table:
    """Detect a file's dialect and scan the whole file with it. Errors: `RunError`."""
    separator = data.separator or SEPARATORS[plain(file).suffix]
    try:
        if data.quote is not None:
            return _scan(file, data, Dialect(separator, QUOTES[data.quote]))
        return _with_quotes(file, data, separator)
    except Misfit as error:
        raise RunError(error.code, f"{key}: {error.message}") from None


def _with_quotes(file: Path, data: DataSection, separator: str) -> Table:
    """Scan a table with the quote character that the file uses. Errors: `Misfit`."""
    quoted, bare = Dialect(separator, '"'), Dialect(separator, "")
    try:
        table = _scan(file, data, quoted)
    except Misfit as error:
        try:
            other = _scan(file, data, bare)
        except Misfit as later:
            raise max(error, later, key=lambda each: each.line) from None  # report the dialect that fits further
        if other.escaped:
            raise Misfit(
                error.code,
                f'{error.message}. Quotes within quotes seem to be escaped by backslashes (\\"); double them ("")',
            ) from None
        if other.wrapped:  # a quoted file with one faulty quote
            raise error from None
        return other
    tabs = plain(file).suffix == ".tsv"
    if not table.quoted or (len(table.names) < 2 and not tabs):  # with one column, every line is a valid unquoted row
        return table
    try:
        other = _scan(file, data, bare)
    except Misfit:
        return table
    if other.rows == table.rows:
        return other if other.needless and tabs else table
    if other.names[0].startswith('"') or (other.doubled and len(table.names) < 2):
        return table
    raise TwoWays(
        "LS2072",
        f"{file} can be read in two ways: {table.rows:,} rows if quotes enclose cells, some of them over "
        f"several lines, and {other.rows:,} rows if quotes are plain characters. Set data.quote to double or "
        "to none",
    )


def _scan(file: Path, data: DataSection, dialect: Dialect) -> Table:
    """Scan all rows. Errors: `Misfit` for the first row that does not fit."""
    lines = _Lines(file, data.encoding, dialect.quote)
    table = Table(dialect, list(data.columns or ()))
    batch: list[list[str]] = []
    marks: list[Counter[str]] = []
    for line, row in _rows(lines, dialect):
        if not table.names:
            table.names = row
            continue
        if len(row) != len(table.names):
            raise Misfit("LS2073", _misfit(file, line, row, table, data), line)
        batch.append(row)
        table.rows += 1
        if len(batch) == BATCH:
            _look(batch, table, marks)
            batch = []
    if batch:
        _look(batch, table, marks)
    table.quoted, table.doubled = lines.quoted, lines.doubled
    table.needless = any(counts["quoted"] and counts["plain"] for counts in marks)
    table.wrapped = any(counts["quoted"] + counts["needed"] > counts["plain"] for counts in marks)
    return table


def _misfit(file: Path, line: int, row: list[str], table: Table, data: DataSection) -> str:
    """The message for a row that is wider or narrower than the header."""
    header = "data.columns names" if data.columns else "the header has"
    separator = table.dialect.separator
    called = NAMES.get(separator, repr(separator))
    alone = table.names[0] if len(table.names) == 1 else ""
    other = next((mark for mark in NAMES if mark != separator and mark in alone), None)
    if alone.startswith("#"):
        how = f"The first line seems to be a comment, {alone[:40]!r}: remove it"
    elif other is not None:
        how = f"The header seems to be separated by {NAMES[other]}: set data.separator"
    elif len(row) == 1 and row[0].lstrip().startswith("#"):
        how = "Remove comments"
    elif len(row) == len(table.names) + 1 and not row[-1]:
        how = f"It ends with a separator ({called}) and the header does not: end both or neither with one"
    else:
        how = f"Put a cell that contains {called} in double quotes"
        how += "; name a file with one text per line .txt" if alone else ""
    widths = f"the row has {quantity(len(row), 'column')}, and {header} {len(table.names)}"
    return f"{file}, line {line:,}: {widths}: {_excerpt(row)}. {how}"


def _excerpt(row: list[str]) -> str:
    text = " | ".join(" ".join(cell.split()) for cell in row)
    return repr(text if len(text) <= 100 else f"{text[:97]}...")


def _look(batch: list[list[str]], table: Table, marks: list[Counter[str]]) -> None:
    """Record the kinds of cells in each column."""
    first = not table.kinds
    if first:
        table.kinds = [set() for _ in table.names]
        marks += [Counter() for _ in table.names]
    for place, cells in enumerate(zip(*batch, strict=True)):
        if len(table.kinds[place]) < len(_KINDS):
            table.kinds[place] |= set(map(_kind, cells))
        if not table.dialect.quote:
            table.escaped = table.escaped or any(cell.startswith('"') and '\\"' in cell for cell in cells)
            marks[place].update(map(_mark, cells))
    if first:
        table.begins = [set(kinds) for kinds in table.kinds]


def _mark(cell: str) -> str:
    """Classify a cell: needlessly quoted, needing its quotes, an unquoted text, or empty."""
    if len(cell) > 1 and cell[0] == cell[-1] == '"':
        return "needed" if '"' in cell[1:-1] or len(cell) == 2 else "quoted"
    return "plain" if cell and _kind(cell) == "t" else "empty"


_KINDS = "izfbt"


def _kind(cell: str) -> str:
    """The type that pandas infers for a column of such cells: i (integers), z (integers not in canonical form: 01, +1),
    f (decimals), b (booleans) or t (texts)."""
    if cell[:1].isalpha() and cell[:1] not in "tTfFiI":
        return "t"
    if cell in _TRUTHS:
        return "b"
    match = _NUMBER.fullmatch(cell)
    if match is None or not match["whole"]:
        return "t" if match is None else "f"
    return "i" if _AS_WRITTEN.fullmatch(cell.strip()) else "z"


def converters(
    tables: list[Table], as_read: Mapping[str, str] = MappingProxyType({})
) -> dict[str, Callable[[str], Any]]:
    """Column -> cell converter, for columns where pandas, which infers types from a batch of rows, would read some
    batches differently.

    Also for `as_read`, the kinds that a task reads: texts and labels stay verbatim. Integers not in canonical form stay
    texts too, unless the column is known to hold numbers."""
    kinds: dict[str, set[str]] = {}
    begins: dict[str, set[str]] = {}
    for each in tables:
        for name, found_kinds, first in zip(each.names, each.kinds, each.begins, strict=False):
            kinds.setdefault(name, set()).update(found_kinds)
            begins.setdefault(name, first)
    readers: dict[str, Callable[[str], Any]] = {}
    for name, found_kinds in kinds.items():
        if as_read.get(name) == "number":
            found_kinds, begins[name] = ({"i" if k == "z" else k for k in some} for some in (found_kinds, begins[name]))
        if found_kinds != {"t"} and (as_read.get(name) in ("text", "label") or "z" in found_kinds):
            readers[name] = str
        elif found_kinds == {"i", "f"} and begins[name] == {"i"}:
            readers[name] = float
        elif len(found_kinds) > 1 and found_kinds != {"i", "f"}:
            readers[name] = str
    return readers


# -- dialect detection -----------------------------------------------------------------------------------------------


def detected(file: Path, data: DataSection, is_name: Callable[[str], bool]) -> list[dict[str, str]]:
    """Values of `separator` and `quote` with which all, or nearly all, rows have the same number of columns, at least
    two; most likely first, {} for the ending's default. `is_name`: whether a text names a column."""
    usual = SEPARATORS[plain(file).suffix]
    marks = [usual, *(mark for mark in NAMES if mark != usual)] if data.separator is None else [data.separator]
    good: list[tuple[bool, dict[str, str]]] = []
    for mark in marks:
        separator = {} if mark == usual else {"separator": mark}
        if (quote_and_names := _quotes(file, data, mark)) is not None:
            quote, names = quote_and_names
            good.append((not any(map(is_name, names)), separator | quote))
    if good or len(marks) == 1:
        return [keys for _, keys in sorted(good, key=lambda each: each[0])]
    likely = [mark for mark in marks if _is_likely(file, data, mark, is_name)]
    return [{"separator": likely[0]}] if likely and likely[0] != usual else []


def _quotes(file: Path, data: DataSection, separator: str) -> tuple[dict[str, str], list[str]] | None:
    """The `quote` with which all rows have the same number of columns, at least two, and the first row."""
    for quote in ("double", "single", "none") if data.quote is None else (data.quote,):
        try:
            if len(next(rows(file, data.encoding, Dialect(separator, QUOTES[quote])), (0, []))[1]) < 2:
                continue
            if quote == "double":
                table = _with_quotes(file, data, separator)
            else:
                table = _scan(file, data, Dialect(separator, QUOTES[quote]))
        except TwoWays:
            return {}, []  # its reader reports the error
        except Misfit:
            continue
        if quote != "double" or data.quote is not None or not _all_single(file, data, table):
            return {} if quote == "double" else {"quote": quote}, table.names
    return None


def _is_likely(file: Path, data: DataSection, separator: str, is_name: Callable[[str], bool]) -> bool:
    """Whether the first row contains a column name, or nearly all of the first rows have the same number of columns, at
    least two."""
    widths: Counter[int] = Counter()
    try:
        for _, row in itertools.islice(rows(file, data.encoding, Dialect(separator, '"')), BATCH):
            if not widths and len(row) > 1 and any(map(is_name, row)):
                return True
            widths[len(row)] += 1
    except Misfit:
        pass
    return any(width > 1 and count > 0.9 * widths.total() for width, count in widths.items())


def _all_single(file: Path, data: DataSection, table: Table) -> bool:
    """Return whether all cells of some column, including its name, are in single quotes."""
    columns: list[bool] = []
    for _, row in rows(file, data.encoding, table.dialect):
        alone = [len(cell) > 1 and cell[0] == cell[-1] == "'" for cell in row]
        columns = alone if not columns else [a and b for a, b in zip(columns, alone, strict=False)]
        if not any(columns):
            return False
    return table.rows > 0 and any(columns)
