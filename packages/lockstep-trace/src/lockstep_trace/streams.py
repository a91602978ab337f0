"""Standard streams that never end a program. What a terminal cannot show is replaced; what nobody reads is dropped.

In: the standard streams of a process of ours. Out: the same ones, made safe for the whole process (`make_safe`), or
one text written to a stream of somebody else's (`put`).
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

ERRORS = "lockstep"  # the name of the error handler below: `open(..., errors=ERRORS)`
# What we print ourselves beside ASCII: sparklines of a plan, samples, ellipses
_ALIKE = {"\u27f6": "->", "\u2026": "...", "\u2014": "--", "\u2013": "-", "\u00b7": ".", "\u00d7": "x"}
_ALIKE |= dict(zip("\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588", "_.-=+*#@", strict=True))
_READER_GONE = (errno.EPIPE, errno.EIO, errno.EBADF)  # a closed pipe, a terminal that hung up


def _replaced(error: UnicodeError) -> tuple[str | bytes, int]:
    """The character that an encoding lacks: one that looks like it, or its escape; a byte of a file's name that is no
    text is itself."""
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
    """The descriptor of a standard stream. Writing raises nothing: `failure` is the first error. Once the reader is
    gone the descriptor is that of /dev/null, also for what other code writes to it."""

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
            if written is None:  # somebody made the pipe or terminal non-blocking, and it is full
                select.select([], [self], [])
            rest = rest[written or 0 :]
        return memoryview(data).nbytes


def make_safe() -> None:
    """Let nothing that this process prints end it, from now on: standard streams that are closed lead to /dev/null (a
    file that is opened later would get their number), characters that they cannot show are replaced, and errors of
    writing are kept for `unwritten`. Streams that are not Python's own (a notebook's, a test's) stay as they are."""
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
    """Whether standard output was closed by whoever read it (`| head`): what follows a log has no purpose any more."""
    failure = _failure(sys.stdout)
    return failure is not None and failure.errno in _READER_GONE


def unwritten() -> OSError | None:
    """The error for which some of what was printed is nowhere, such as a full disk; None also if nobody wants it."""
    if sys.stdout is not None:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
    return None if reader_is_gone() else _failure(sys.stdout)


def put(stream: TextIO | None, text: str, flush: bool = False) -> None:
    """Write to a stream of any kind, of which nothing is known: what it cannot show is replaced, and one that is closed
    gets nothing. Raises no error."""
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
        # what waits in its buffer would be written at Python's exit
        if error.errno in _READER_GONE and (number := _number(stream)) in (1, 2):
            _to_nowhere(number)
    except ValueError:  # it is closed
        pass


def say(text: str) -> None:
    """`print`, without errors."""
    put(sys.stdout, f"{text}\n", flush=True)


def encodes(stream: TextIO, text: str) -> bool:
    """Whether a stream can show a text as it is."""
    try:
        text.encode(getattr(stream, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _safe(stream: io.TextIOWrapper, number: int) -> io.TextIOWrapper:
    """In its place; others, such as handlers of logs, may have kept the one that was there."""
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
    """The descriptor under a stream that `make_safe` has made. rich's progress bars put a proxy over it."""
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
        os.dup2(nowhere, number)  # also inherited by what is started
        if nowhere != number:
            os.close(nowhere)
        else:
            os.set_inheritable(number, True)
