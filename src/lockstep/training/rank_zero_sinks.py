"""Sends the numbers and samples of a run to the terminal and the trackers, on rank 0.

In: what training, evaluation and recovery report, by step. Out: lines and trackers' calls, each step once.

A run that has no checkpoint yet keeps the trackers' run ids in OUTPUT/trackers.json, so that the next start after a
kill continues the same run of each tracker. A start with other keys, data or code is a new run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from lockstep.config.output_files import replacing
from lockstep.data.arrow_cache import digest
from lockstep.data.job import Job
from lockstep.distributed import job_record
from lockstep.distributed.system_metrics import SystemMetrics
from lockstep.track.busy import ACTIVITY
from lockstep.track.console import Console
from lockstep.track.tracker import End, Sample, Trackers
from lockstep.training.session import Session, Sinks


class RankZeroSinks(Sinks):
    """Log to the terminal and the trackers, on rank 0."""

    def __init__(self, session: Session, console: Console, step: int) -> None:
        self._session, self._console, self._loud = session, console, session.world.is_main
        self._reported_steps: dict[str, int] = {}  # split -> last step reported
        self._open(step)

    def _open(self, step: int) -> None:
        session, console = self._session, self._console
        ids, loud, job, code = session.checkpoints.trackers, self._loud, session.job, session.checkpoints.code
        if loud and not step and not ids:
            ids.update(ids_of_earlier_start(job, code))
        self._trackers = Trackers(session.run, step, ids, console.tracker, console.note, loud)
        if loud and not step:
            keep_ids(job, code, dict(ids))
        self._usage = SystemMetrics(session.world)

    def log(self, step: int, split: str, numbers: dict[str, float], closing: bool = False) -> None:
        if self._reported_steps.get(split, -1) < step:  # otherwise a repetition after a rank failure
            self._reported_steps[split] = step
            self._console.log(step, split, numbers, closing)
            self._trackers.log(step, split, numbers)
        if split == "train":
            self._usage.ask(step)

    def advance(self, step: int) -> None:
        self._console.advance(step)
        if (usage := self._usage.take()) is not None:
            self.log(usage[0], "system", usage[1])

    def show(self, step: int, samples: Sequence[Sample]) -> None:
        if self._reported_steps.get("samples", -1) < step:
            self._reported_steps["samples"] = step
            self._console.show(step, samples)
            self._trackers.show(step, samples)

    def regroup(self, step: int, what: str) -> None:
        """Report a change of ranks after `step` updates; `what` describes it. A process that has become rank 0 opens
        the console and trackers."""
        session, console, world = self._session, self._console, self._session.world
        self._usage = SystemMetrics(world)
        if world.is_main and not self._loud:
            self._loud, self._reported_steps = True, {}
            with suppress(OSError):
                session.run.folder.mkdir(parents=True, exist_ok=True)
            console.take_over(world.log)
            self._open(step)
            console.start(session.feed.total, step, lambda: ACTIVITY.name, session.feed.order.steps_per_epoch)
            job_record.arrived(session.run.folder, world.size, session.feed.total)
        console.note(f"{what}; {world.size} rank{'s continue' if world.size > 1 else ' continues'} from step {step}")
        session.journal.event("regroup", step, what=what, processes=world.size, hosts=world.hosts)

    def close(self, end: End) -> None:
        """Close the trackers. No calls may follow."""
        self._trackers.close(end)
        if self._loud and end == "done":
            forget_ids(self._session.run.folder)


RUN_IDS = "trackers.json"


def ids_of_earlier_start(job: Job, code: Mapping[str, str]) -> dict[str, str]:
    """Tracker -> run id; empty if there was no such start. `code`: hashes of the user's files."""
    with suppress(OSError, ValueError, RecursionError):
        values = json.loads((job.run.folder / RUN_IDS).read_text(encoding="utf-8"))
        if isinstance(values, dict) and values.get("run") == _digest(job, code):
            ids = values.get("ids")
            return {str(n): str(i) for n, i in ids.items()} if isinstance(ids, dict) else {}
    return {}


def keep_ids(job: Job, code: Mapping[str, str], ids: Mapping[str, str]) -> None:
    """Write the ids, before the first step. A failure to write is ignored."""
    if ids:
        with suppress(OSError), replacing(job.run.folder / RUN_IDS) as aside:
            aside.write_text(json.dumps({"run": _digest(job, code), "ids": dict(ids)}, indent=1) + "\n")


def forget_ids(folder: Path) -> None:
    """Remove the file at the end of a run, so that a later start in the same folder is a new run of each tracker."""
    with suppress(OSError):
        (folder / RUN_IDS).unlink(missing_ok=True)


def _digest(job: Job, code: Mapping[str, str]) -> str:
    return digest(job.arithmetic(), job.data.key, dict(code))
