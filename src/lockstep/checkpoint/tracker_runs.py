"""The trackers' run ids of a run that has no checkpoint yet: OUTPUT/trackers.json.

In: a job and its code. Out: the ids of an earlier start that was killed before its first checkpoint, so that
the next start continues the same run of each tracker. A start with other keys, data or code is a new run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress

from lockstep.config.run import Run, replacing
from lockstep.data.arrow_cache import digest
from lockstep.data.job import Job

FILE = "trackers.json"


def of_earlier_start(job: Job, code: Mapping[str, str]) -> dict[str, str]:
    """Tracker -> run id; empty if there was no such start. `code`: hashes of the user's files."""
    with suppress(OSError, ValueError, RecursionError):
        values = json.loads((job.run.folder / FILE).read_text(encoding="utf-8"))
        if isinstance(values, dict) and values.get("run") == _digest(job, code):
            ids = values.get("ids")
            return {str(n): str(i) for n, i in ids.items()} if isinstance(ids, dict) else {}
    return {}


def keep(job: Job, code: Mapping[str, str], ids: Mapping[str, str]) -> None:
    """Write the ids, before the first step. A failure to write is ignored."""
    if ids:
        with suppress(OSError), replacing(job.run.folder / FILE) as aside:
            aside.write_text(json.dumps({"run": _digest(job, code), "ids": dict(ids)}, indent=1) + "\n")


def forget(run: Run) -> None:
    """Remove the file at the end of a run, so that a later start in the same folder is a new run of each tracker."""
    with suppress(OSError):
        (run.folder / FILE).unlink(missing_ok=True)


def _digest(job: Job, code: Mapping[str, str]) -> str:
    return digest(job.arithmetic(), job.data.key, dict(code))
