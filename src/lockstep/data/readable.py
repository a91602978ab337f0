"""Whether a data file can be read as what its name says, and which line is at fault where it cannot.

In: a local file and the encoding of texts. Out: nothing, or a `RunError` that names key, file, line and what to do.
"""

from __future__ import annotations

import codecs
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lockstep.config import error_messages as messages
from lockstep.config.run import RunError
from lockstep.data import compressed

BINARY = (".parquet", ".arrow")  # endings of files that are no text
# How compressed files begin: `datasets` would unpack them whatever they are called, to any size.
_PACKED = {
    "gzip": (0, b"\x1f\x8b"),
    "bzip2": (4, b"1AY&SY"),
    "xz": (0, b"\xfd7zXZ\x00"),
    "zstd": (0, b"\x28\xb5\x2f\xfd"),
    "zip": (0, b"PK\x03\x04"),
    "lz4": (0, b"\x04\x22\x4d\x18"),
}


def check(file: Path, key: str, encoding: str) -> None:
    """Refuse what is compressed and not called so, what is not text of this encoding, and a file that would fill the
    disk.

    Reads the whole file. Errors: `RunError`."""
    parts = compressed.blocks(file, key)
    start = next(parts, b"")
    if file.suffix in BINARY:
        return _check_unpacked(file, key) if file.suffix == ".parquet" else None
    for name, (place, mark) in _PACKED.items():
        if start.startswith(mark, place):
            found = "holds another compressed file" if compressed.is_compressed(file) else "is compressed"
            endings = {kind: ending for ending, kind in compressed.ENDINGS.items()}
            mend = (
                f"call it {compressed.plain(file).name}{endings[name]}, or unpack it"
                if name in endings
                else "unpack it"
            )
            raise RunError(f"{key}: {file} {found} ({name}), whatever its name says: {mend}")
    return _check_text(file, key, encoding, itertools.chain([start], parts))


def codec(encoding: str) -> str:
    """The encoding, without the mark that a file in UTF-8 may begin with."""
    return "utf-8-sig" if codecs.lookup(encoding).name == "utf-8" else encoding


def text_of(file: Path, encoding: str) -> str:
    """The text of a file that was found readable, with its ends of lines as they are on Unix."""
    text = b"".join(compressed.blocks(file, "data")).decode(codec(encoding))
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _check_text(file: Path, key: str, encoding: str, blocks: Iterator[bytes]) -> None:
    decoder, line, guess = codecs.getincrementaldecoder(encoding)(), 1, None
    try:
        for number, block in enumerate(blocks):
            guess = guess if number else _looks_like(block[:4096])
            line += decoder.decode(block).count("\n")
        decoder.decode(b"", final=True)
        if guess is None or codecs.lookup(guess).name[:6] == codecs.lookup(encoding).name[:6]:
            return
        reason = "it decodes, but as zeros between letters"
    except UnicodeError as error:
        line += str(getattr(error, "object", b"")[: getattr(error, "start", 0)], "latin-1").count("\n")
        reason = f"line {line}: {getattr(error, 'reason', error)}"
    others = f"{guess}: it begins as that does" if guess else "cp1252, latin-1, utf-16, or what it was written in"
    raise RunError(
        f"{key}: {file} is not text in {encoding.upper() if encoding == 'utf-8' else encoding} ({reason}): set "
        f"data.encoding ({others}), or convert the file"
    )


def _looks_like(start: bytes) -> str | None:
    """The encoding of two or four bytes a letter that a file begins in, or None."""
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
    """What a Parquet file unpacks to is estimated from its metadata and the first rows of each group of rows."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    size, unpacked = file.stat().st_size, 0.0
    try:
        parquet = pq.ParquetFile(file)
        for group in range(parquet.metadata.num_row_groups):
            told = parquet.metadata.row_group(group)
            first = next(parquet.iter_batches(batch_size=16, row_groups=[group]), None)
            rows = first.nbytes / len(first) * told.num_rows if first is not None and len(first) else 0
            unpacked += max(rows, told.total_byte_size)
    except (pa.ArrowException, OSError):
        return  # its reader says what is wrong with it
    if unpacked >= compressed.LARGE and unpacked > compressed.MOST * size:
        raise RunError(
            f"{key}: {file} has {size:,} bytes and unpacks to about {unpacked / 2**30:,.1f} GiB, "
            f"{unpacked / size:,.0f} times as much, which looks like a mistake or a trap; if it is "
            "meant, write it as .jsonl or .csv"
        )


# -- JSON ------------------------------------------------------------------------------------------------------------

LEVELS = 200  # of lists and mappings in each other; pyarrow's reader ends the process at some ten thousand
_STRINGS = re.compile(rb'"(?:[^"\\]|\\.)*"?')
_OTHERS = bytes(set(range(256)) - set(b"[]{}"))


def check_levels(file: Path, key: str) -> None:
    """Refuse a .json or .jsonl file, not compressed, with a line that is nested more than `LEVELS` deep. Errors:
    `RunError`."""
    with open(file, "rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.count(b"[") + line.count(b"{") <= LEVELS:
                continue
            depth = 0
            for mark in _STRINGS.sub(b"", line).translate(None, _OTHERS):
                depth += 1 if mark in b"[{" else -1
                if depth > LEVELS:
                    raise RunError(f"{key}: {file}, line {number}: nested more than {LEVELS} levels deep")


def json_rows(file: Path, encoding: str) -> list[dict[str, Any]]:
    """The rows of a .json or .jsonl file. Errors: `ValueError`, which says what is wrong and on which line."""
    text = file.read_bytes().decode(codec(encoding))
    if text.lstrip()[:1] == "[":
        try:
            rows = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"line {error.lineno}, column {error.colno}: {_said(error)}") from None
        except RecursionError:
            raise ValueError("it is nested too deeply") from None
        for number, row in enumerate(rows):
            _check_row(row, f"row {number}")
        return rows
    rows = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise ValueError(f"line {number}, column {error.colno}: {_said(error)}: {_shown(line)}") from None
            except RecursionError:
                raise ValueError(f"line {number}: nested too deeply") from None
            except ValueError as error:  # a number of 5,000 digits
                raise ValueError(f"line {number}: {str(error).partition(';')[0]}") from None
            _check_row(rows[-1], f"line {number}")
    return rows


def _check_row(row: Any, place: str) -> None:
    if not isinstance(row, dict):
        raise ValueError(f"{place} holds {messages.kind(row)}; wanted is a mapping of columns on each line")


def _said(error: json.JSONDecodeError) -> str:
    return error.msg[:1].lower() + error.msg[1:]


def _shown(line: str) -> str:
    line = line.strip()
    return repr(line if len(line) <= 80 else f"{line[:77]}...")
