"""Safe standard streams, which never raise: unencodable characters are replaced, output to a closed pipe is dropped.

In: the standard streams of this process. Out: the same streams, made safe for the whole process (`make_safe`), or one
text written to any stream (`put`).
"""

from __future__ import annotations

import codecs
import errno
import io
import os
import select
import sys
from contextlib import suppress
from typing import Any, TextIO

ERRORS = "lockstep"  # name of the error handler below, for `open(..., errors=ERRORS)`
# Non-ASCII characters in our own output (sparklines, samples, ellipses) -> ASCII
_ALIKE = {"\u27f6": "->", "\u2026": "...", "\u2014": "--", "\u2013": "-", "\u00b7": ".", "\u00d7": "x"}
_ALIKE |= dict(zip("\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588", "_.-=+*#@", strict=True))
_READER_GONE = (errno.EPIPE, errno.EIO, errno.EBADF)  # a closed pipe, a terminal that hung up

CLEAR = "\r\x1b[2K"  # clears a terminal's line, also what it has echoed of Ctrl-C, and returns to its first column


def _replaced(error: UnicodeError) -> tuple[str | bytes, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    character = error.object[error.start]
    if "\udc80" <= character <= "\udcff":
        return bytes([ord(character) - 0xDC00]), error.start + 1
    if "\u2800" <= character <= "\u28ff":  # braille: a spinner
        return "*", error.start + 1
    alike = _ALIKE.get(character) or character.encode("ascii", "backslashreplace").decode()
    return alike, error.start + 1


codecs.register_error(ERRORS, _replaced)


class _SafeFile(io.FileIO):
    """File of a standard stream whose writes never raise; `failure` is the first error. When the reader is gone, the
    descriptor is redirected to /dev/null, also for other code that writes to it."""

    failure: OSError | None = None

    def write(self, data: Any) -> int:
        rest = memoryview(data).cast("B")
        while rest:
            try:
                written = super().write(rest)
            except OSError as error:
                self.failure = self.failure or error
                if error.errno in _READER_GONE:
                    _to_nowhere(self.fileno())
                break
            if written is None:  # a non-blocking pipe or terminal is full
                select.select([], [self], [])
            rest = rest[written or 0 :]
        return memoryview(data).nbytes


def make_safe() -> None:
    """Make the standard streams safe, so that printing cannot end this process.

    Closed streams are redirected to /dev/null (otherwise a file opened later would get their descriptor), unencodable
    characters are replaced, and write errors are kept for `unwritten`. Replaced streams (of a notebook, of a test) stay
    unchanged."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream, mode = getattr(sys, name), "w" if number else "r"
        try:
            os.fstat(number)
        except OSError:
            _to_nowhere(number)
        if stream is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", errors=ERRORS, closefd=False))  # noqa: SIM115
        elif number and type(stream) is io.TextIOWrapper and not _is_safe(stream) and _number(stream) == number:
            setattr(sys, name, _safe(stream, number))


def reader_is_gone() -> bool:
    """Return whether the reader of standard output has closed it (`| head`), so that following a log is pointless."""
    failure = _failure(sys.stdout)
    return failure is not None and failure.errno in _READER_GONE


def unwritten() -> OSError | None:
    """Return the error that lost printed output, such as a full disk; None if there is none, or the reader is gone."""
    if sys.stdout is not None:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
    return None if reader_is_gone() else _failure(sys.stdout)


def put(stream: TextIO | None, text: str, flush: bool = False) -> None:
    """Write to any stream without raising: unencodable characters are replaced, and a closed stream is skipped."""
    if stream is None:
        return
    try:
        try:
            stream.write(text)
        except UnicodeEncodeError as error:
            stream.write(text.encode(error.encoding, ERRORS).decode(error.encoding, "replace"))
        if flush:
            stream.flush()
    except OSError as error:
        # otherwise Python would write the buffer at exit
        if error.errno in _READER_GONE and (number := _number(stream)) in (1, 2):
            _to_nowhere(number)
    except ValueError:  # closed
        pass


def say(text: str) -> None:
    """Print a line without raising."""
    put(sys.stdout, f"{text}\n", flush=True)


def encodes(stream: TextIO, text: str) -> bool:
    """Return whether a stream can encode a text."""
    try:
        text.encode(getattr(stream, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _safe(stream: io.TextIOWrapper, number: int) -> io.TextIOWrapper:
    with suppress(OSError):
        stream.flush()
    stream.reconfigure(errors=ERRORS)
    file = _SafeFile(number, "w", closefd=False)
    file.name = stream.name
    return io.TextIOWrapper(
        file if stream.write_through else io.BufferedWriter(file),
        encoding=stream.encoding,
        errors=ERRORS,
        newline="\n",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def _number(stream: TextIO) -> int | None:
    with suppress(OSError, ValueError):
        return stream.fileno()
    return None


def _file(stream: Any) -> _SafeFile | None:
    stream = getattr(stream, "rich_proxied_file", stream)
    if not isinstance(stream, io.TextIOWrapper) or stream.closed:
        return None
    file = getattr(stream.buffer, "raw", stream.buffer)
    return file if isinstance(file, _SafeFile) else None


def _is_safe(stream: io.TextIOWrapper) -> bool:
    return _file(stream) is not None


def _failure(stream: Any) -> OSError | None:
    file = _file(stream)
    return None if file is None else file.failure


def _to_nowhere(number: int) -> None:
    with suppress(OSError):
        nowhere = os.open(os.devnull, os.O_RDWR)
        os.dup2(nowhere, number)  # child processes inherit it
        if nowhere != number:
            os.close(nowhere)
        else:
            os.set_inheritable(number, True)
