"""OUTPUT, the folder that a run writes to: whether it can be written, and the run file as it was resolved.

In: a run. Out: OUTPUT/run.yaml, or a `RunError`.
"""

from __future__ import annotations

import os
import socket

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
        aside = run.folder / aside_of("run.yaml")
        aside.write_text(run.dump(), encoding="utf-8")
        os.replace(aside, run.folder / "run.yaml")
    except OSError as error:
        raise RunError(f"output: cannot write to {run.folder}: {error.strerror}") from error


def aside_of(name: str) -> str:
    """Where a small file of OUTPUT is written before it is renamed: machines may share OUTPUT."""
    return f".{name}.{socket.gethostname()}-{os.getpid()}.partial"
