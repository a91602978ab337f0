"""End of a run: write the export wherever there is space, copy it to the mirror, and push it to the Hub.

In: OUTPUT and the weights. Out: an exit status and messages for the user. Imports no torch at the top.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.checkpoint.export import write_export
from lockstep.checkpoint.manifest import name_of, newest_whole
from lockstep.config.errors import DONE, FAILED, HALTED, STOPPED, coded, remedy_of
from lockstep.config.lazy import lazy
from lockstep.data.job import Job
from lockstep.distributed import job_record
from lockstep.distributed.signals import Stopped
from lockstep.track.console import Console, error
from lockstep_trace import streams

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.checkpoint import hub_push, remote_sync
    from lockstep.checkpoint.remote_sync import RemoteSync
    from lockstep.data import object_store
    from lockstep.distributed.world import World
    from lockstep.training.session import Session
else:
    hub_push, remote_sync = lazy("lockstep.checkpoint", "hub_push", "remote_sync")
    (object_store,) = lazy("lockstep.data", "object_store")


def write_model(
    session: Session, weights: Mapping[str, Tensor], scores: dict[str, dict[str, float]], steps: int, exported: int
) -> None:
    """Write the export after `steps` updates, of the model of step `exported`, to OUTPUT. If that fails and no
    checkpoint holds the state, write it to another folder. Rank 0 only. Errors: `TrainingFailed`, which reports where
    the model is and how to continue."""
    from lockstep.training.errors import TrainingFailed

    run, task, checkpoints = session.run, session.task, session.checkpoints
    try:
        if (fault := checkpoints.disk.away()) is not None:
            raise OSError(fault)
        try:
            write_export(task, weights, scores, exported)
            return
        except OSError:
            if (cleared := checkpoints.clear()) is None:
                raise
            checkpoints.say(cleared)
            write_export(task, weights, scores, exported)
            return
    except OSError as caught:
        text = f"{run.folder}/export could not be written ({caught.strerror or caught})"
        remedy = remedy_of(caught)
    status = HALTED if job_record.restarts_left() else FAILED  # an automatic restart would hit the same disk
    newest = newest_whole(run.folder) if fault is None else None
    if newest == steps:
        raise TrainingFailed(
            "LS5090",
            f"{text}; {remedy}, then run the same command again, which writes it from {name_of(newest)}",
            status,
        )
    again = f"resumes from step {newest}" if newest else "starts over: there is no checkpoint"
    for folder in checkpoints.disk.elsewhere():
        try:
            place = write_export(task, weights, scores, exported, folder)
        except OSError:
            with suppress(OSError):
                folder.rmdir()
            continue
        text += f". The model is in {place} instead ({task.loader} loads it): keep it"
        if fault is None:  # else OUTPUT is another folder
            job_record.note(run.folder, rescued=str(place))
        text += _mirrored(session.job, place.parent, checkpoints.mirror)
        raise TrainingFailed("LS5091", f"{text}. The same command {again}", status)
    raise TrainingFailed(
        "LS5092", f"{text}, and there is no other copy: the model is lost. The same command {again}", status
    )


def _mirrored(job: Job, folder: Path, mirror: RemoteSync | None) -> str:
    """Copy the export of a folder other than OUTPUT to the mirror, if there is one. Returns text for the message."""
    run = job.run
    if mirror is None:
        return ""
    try:
        mirror.copy_export(folder)
    except (OSError, object_store.StoreError) as caught:
        return f"; it could not be copied to {run.remote_dir} ({caught})"
    return f"; a copy is in {run.remote_dir}/export"


def publish(job: Job, say: Callable[[str], None], mirror: RemoteSync | None = None) -> int:
    """Copy and push everything not yet published. Rank 0 only. Returns the exit status: 1 if something failed and needs
    another attempt."""
    run = job.run
    fault = None if run.remote_dir is None else (mirror or remote_sync.RemoteSync(run, say)).finish()
    if fault is not None:
        error(
            coded(
                "LS5093",
                f"remote_dir: {run.remote_dir} does not have a complete copy of {run.folder}: {fault}. {run.folder} "
                "itself is complete; run the same command again to copy the rest",
            )
        )
    elif run.remote_dir is not None:
        say(f"checkpoints and export are in {run.remote_dir}")
    pushed = DONE if run.hub.push_to is None else hub_push.push_pending(run.folder, run.hub, say)
    return max(DONE if fault is None else FAILED, pushed)


def publish_until_stopped(job: Job, world: World, console: Console, mirror: RemoteSync | None = None) -> int:
    """Copy and push everything not yet published, until a stop signal. Rank 0 only. Returns the exit status."""
    run = job.run
    if run.remote_dir is None and run.hub.push_to is None:
        return DONE
    try:
        with world.stop.interrupts():
            return publish(job, console.say, mirror)
    except Stopped:
        where = " and ".join(place for place in (run.remote_dir, run.hub.push_to) if place)
        if sys.stdout.isatty():
            streams.put(sys.stdout, streams.CLEAR)
        console.note(
            f"stopped on request before {where} had the model, which is in {run.folder}/export; the same command "
            "continues the upload"
        )
        return STOPPED


def at_a_stop(session: Session, console: Console) -> None:
    """Wait for uploads in progress, limited by the timeout of collectives, because the sender of the stop may not wait
    longer. Reports what the mirror lacks. Collective."""
    run = session.run
    missing = session.checkpoints.catalog.rest(run.launch.timeout_s / 2)
    if missing is not None:
        console.note(f"{missing}. On this machine the run resumes from {run.folder}, elsewhere from that copy")
