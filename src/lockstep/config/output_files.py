"""Writes files of OUTPUT: never through a symbolic link, atomically, and only into folders that are still the run's;
and checks that a folder is one, or can become one.

In: a path in OUTPUT; OUTPUT and the name of a folder in it (checkpoints, profiles, TensorBoard), when training begins.
Out: the opened or replaced file, or an `OSError` that names the link; later, why nothing may be written in the folder,
or None. Data of other programs may be behind a link, such as the cache of a data versioning tool. Files that are
replaced atomically need no check: the link goes.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import socket
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from lockstep.config.errors import CodedError, RunError

# Files that a run appends to; `.lock` is read again and again.
APPENDED = (
    *(f"{name}.jsonl" for name in ("metrics", "system", "samples", "fingerprints", "events", "ranks")),
    "log.txt",
    ".lock",
)


def open_file(path: Path, mode: str, **options: Any) -> IO[Any]:
    """Open a file for writing; `mode` and `options` as `open` takes them. Errors: `OSError`, also for a link."""
    return open(path, mode, opener=_opener, **options)


def links(folder: Path) -> dict[str, Path]:
    """Return the names in APPENDED that are symbolic links in `folder`, with the files they lead to."""
    return {name: Path(os.path.realpath(folder / name)) for name in APPENDED if (folder / name).is_symlink()}


def _opener(path: str, flags: int) -> int:
    try:
        return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)
    except OSError:
        if os.path.islink(path):
            text = f"{path} is a link to {os.path.realpath(path)}, and nothing is written through it"
            raise OSError(errno.EINVAL, text) from None
        raise


def redirected(folder: Path) -> str | None:
    """Return why a folder, a resolved path, must not be written to any more, or None: it, or a folder above it, is now
    a link to another folder than the one in which this process (rank 0) began."""
    if (now := folder.resolve()) == folder:
        return None
    with suppress(OSError, ValueError, KeyError, TypeError):
        if json.loads((now / "launch.json").read_bytes())["main"]["pid"] == os.getpid():
            return None  # the folder was moved, and a link to it created
    return f"{folder} was replaced by a link to {now}, where nothing is written"


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Context manager that writes a file atomically: yields a temporary path, which replaces `path` on exit. Errors:
    `OSError`; the old file is then unchanged and the temporary one removed."""
    aside = path.with_name(aside_of(path.name))
    try:
        if aside.is_symlink():  # not ours: nothing is written through it
            aside.unlink()
        yield aside
        os.replace(aside, path)
    finally:
        with suppress(OSError):
            aside.unlink(missing_ok=True)


def replace_text(path: Path, text: str) -> None:
    """Write a small file atomically. Errors: `OSError`; the old file is then unchanged."""
    with replacing(path) as aside:
        aside.write_text(text, encoding="utf-8")


@contextmanager
def wrapped_os_errors(path: Path, only: Collection[int] = ()) -> Iterator[None]:
    """Context manager around what writes `path`: safetensors and tokenizers wrap OS errors in their own classes, which
    become `OSError`s. `only`: error numbers, where the same code also reads other files; default: all."""
    try:
        yield
    except Exception as caught:
        number = re.search(r"\(os error (\d+)\)", str(caught))
        if number is None or isinstance(caught, OSError | CodedError) or (only and int(number[1]) not in only):
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from caught


def aside_of(name: str) -> str:
    """Return a temporary file name, unique per machine and process, because machines may share OUTPUT."""
    return f".{name}.{socket.gethostname()}-{os.getpid()}.partial"


def clear(path: Path) -> None:
    """Remove a temporary folder, ignoring errors; for a link, only the link."""
    with suppress(OSError):
        if path.is_symlink():
            path.unlink()
        else:
            shutil.rmtree(path, ignore_errors=True)


def sync(path: Path) -> None:
    """fsync a file or a folder, so that it survives a power failure. Errors: `OSError`."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class FolderInside:
    """A folder in OUTPUT that may be a link from the start, but must not become or change one during the run."""

    def __init__(self, output: Path, name: str) -> None:
        """Record the folder's present target. The folder need not exist yet."""
        self.path, self._output = output / name, output.resolve()
        target = _real(self.path)
        self._target = None if target == self._output / name else target  # target of an initial link

    def redirected(self) -> str | None:
        """Return why nothing may be written if OUTPUT or this folder now links elsewhere, else None."""
        if (fault := redirected(self._output)) is not None:
            return fault
        if (now := _real(self.path)) == (self._target or self._output.resolve() / self.path.name):
            return None
        return f"{self.path} was replaced by a link to {now}, where nothing is written; restart the run to write there"

    def not_of_run(self, pattern: str) -> str | None:
        """Return why a resumed run may not write here: the folder is a link to one without a file of this `pattern`,
        so it was linked since the run wrote such files. None if it may."""
        if self._target is None or any(self.path.glob(pattern)):
            return None
        return (
            f"{self.path} is a link to {self._target}, which has nothing of this run ({pattern}); remove the link, or "
            "move the run's files there"
        )


def _real(path: Path) -> Path:
    """Resolve a path's links; a link to itself is resolved as far as possible."""
    return Path(os.path.realpath(path))


def require_output(output: Path) -> None:
    """Check that a folder is the output folder of a run. Errors: `RunError`."""
    if not output.is_dir():
        raise RunError(
            "LS1122",
            f"{output}: {'not a folder' if output.exists() else 'no such folder'}; give the output folder of a run "
            "(`output` in its run file)",
        )
    if not (output / "run.yaml").is_file():
        raise RunError(
            "LS1123",
            f"{output} is not the output folder of a run: it has no run.yaml. Give the folder that `output` in the run "
            "file names",
        )


def check_output(folder: Path) -> None:
    """Check that OUTPUT exists or can be created. Errors: `RunError`."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not there.is_dir():
        raise RunError("LS1115", f"output: cannot write to {folder}: {there} is not a folder; choose another output")
    if not os.access(there, os.W_OK):
        read_only = hasattr(os, "statvfs") and os.statvfs(there).f_flag & os.ST_RDONLY
        why = "the file system is read-only at" if read_only else "this user has no permission to write to"
        raise RunError("LS1116", f"output: cannot write to {folder}: {why} {there}; choose another output")
