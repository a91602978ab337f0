"""OUTPUT, the folder that a run writes to: whether it can be written, and the run file as it was resolved.

In: a run. Out: OUTPUT/run.yaml, or a `RunError`.
"""

from __future__ import annotations

import json
import os
import socket
from contextlib import suppress
from pathlib import Path

from lockstep.config.run import Run, RunError


def check_output(run: Run) -> None:
    """OUTPUT is there or can be made. Errors: `RunError`."""
    there = next(path for path in (run.folder, *run.folder.parents) if path.exists())
    if not there.is_dir():
        raise RunError(f"output: cannot write to {run.folder}: {there} is a file")
    if not os.access(there, os.W_OK):
        raise RunError(f"output: cannot write to {run.folder}: {there} may not be written by this user")


def keep(run: Run) -> None:
    """OUTPUT/run.yaml, every default filled in. Errors: `RunError` when OUTPUT cannot be written."""
    try:
        run.folder.mkdir(parents=True, exist_ok=True)
        replace_text(run.folder / "run.yaml", run.dump())
    except OSError as error:
        raise RunError(f"output: cannot write to {run.folder}: {error.strerror}") from error


def led_away(folder: Path) -> str | None:
    """Why nothing is written any more into a folder that was `resolve`d before: it, or one above it, is a link now, to
    another folder than that in which rank 0, this process, began; else None."""
    if (now := folder.resolve()) == folder:
        return None
    with suppress(OSError, ValueError, KeyError, TypeError):
        if json.loads((now / "launch.json").read_bytes())["main"]["pid"] == os.getpid():
            return None  # it was moved, and a link put in its place
    return f"{folder} was replaced by a link to {now}, where nothing is written"


def replace_text(path: Path, text: str) -> None:
    """A small file, aside and then renamed. Errors: `OSError`; then what was there is there, and nothing else."""
    aside = path.with_name(aside_of(path.name))
    try:
        aside.write_text(text, encoding="utf-8")
        os.replace(aside, path)
    except OSError:
        with suppress(OSError):
            aside.unlink(missing_ok=True)
        raise


def aside_of(name: str) -> str:
    """Where a small file of OUTPUT is written before it is renamed: machines may share OUTPUT."""
    return f".{name}.{socket.gethostname()}-{os.getpid()}.partial"
