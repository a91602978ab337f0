"""Runs with a mirror in an object store."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from support.saving import Job, run_in
from support.store_server import BUCKET, Asked

MIRROR = f"s3://{BUCKET}/runs/tiny"


def job(folder: Path, *overrides: str) -> Job:
    return Job(run_in(folder, f"remote_dir={MIRROR}", "checkpoint.keep=2", *overrides))


def copied(job: Job) -> str | None:
    """Wait until everything is copied. Returns the errors."""
    assert job.checkpoints.mirror is not None
    return job.checkpoints.mirror.finish()


def once(*faults: str | int, on: str, method: str = "PUT") -> Callable[[Asked], str | int | None]:
    """Return these faults, one after another, for requests whose name contains `on`."""
    left, lock = list(faults), threading.Lock()

    def fault(asked: Asked) -> str | int | None:
        with lock:
            return left.pop(0) if left and on in asked.key and asked.method == method and not asked.listing else None

    return fault


def always(what: str | int, on: str = "", method: str = "PUT") -> Callable[[Asked], str | int | None]:
    return lambda asked: what if on in asked.key and asked.method == method else None
