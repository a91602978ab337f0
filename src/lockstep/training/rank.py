"""One process becomes a rank of a job: join, call the job's function, end with a status. Every launcher starts `main`.

In: a run and torchrun's environment variables. Out: an exit status (0 done, 1 failed, 2 invalid run, 75 stopped and
resumable). The function is `train_job`, or that of another command, such as `lockstep verify`.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import transformers

from lockstep.checkpoint.checkpoint import CheckpointError
from lockstep.config.errors import BAD, EXCLUDED, FAILED, HALTED
from lockstep.config.lazy import lazy
from lockstep.config.output_files import redirected
from lockstep.config.plugins import importing
from lockstep.config.run import Run, RunError, load
from lockstep.config.written import with_defaults_named
from lockstep.data.job import Job
from lockstep.distributed import job_record
from lockstep.distributed.job_record import TRAIN
from lockstep.distributed.lost_contact import lost_contact, tell_failure
from lockstep.distributed.signals import end_by_signal
from lockstep.distributed.world import World
from lockstep.track.console import LOG, error, strike_tracebacks
from lockstep.training.errors import TrainingFailed
from lockstep.training.resolve import for_rank
from lockstep_trace import streams

if TYPE_CHECKING:
    from lockstep.distributed import rendezvous
else:
    (rendezvous,) = lazy("lockstep.distributed", "rendezvous")


def main(job: Run | Job, init_method: str = "env://", words: Sequence[str] = TRAIN, refusal: str | None = None) -> int:
    """Run one rank to its end and return its exit status. Collective.

    `job`: the job resolved by the launching process, or a run to resolve here. `words`: the function that each rank
    calls, and its arguments. `refusal`: why this rank (the first) may not write to OUTPUT; reported once all ranks have
    joined. A failure is reported once for the job, with rank and host, and has status 1."""
    run = job.run if isinstance(job, Job) else job
    world, log = None, run.folder.resolve() / LOG
    streams.make_safe()
    strike_tracebacks()
    try:
        module, _, function = words[0].rpartition(".")
        with importing():
            call = getattr(importlib.import_module(module), function)  # `train_job`, if the job trains
        world = World(run, init_method)
        world.refusal = refusal
        return note_end(run.folder, world, words, call(for_rank(job, world), world, *words[1:]))
    except RunError as caught:
        if world is None or world.local_rank == 0:  # on every machine, for its user
            text = with_defaults_named(str(caught), run)
            error(text, log if world is None or world.refusal is None else None)
        return note_end(run.folder, world, words, BAD)
    except Exception as caught:
        if world is not None and world.stop.came and lost_contact(caught):
            note_end(run.folder, world, words, FAILED)
            end_by_signal()  # another rank was not yet handling signals when the job was stopped
        unreached = isinstance(caught, rendezvous.Unreached)
        if not (unreached or isinstance(caught, CheckpointError | TrainingFailed)):
            tell_failure(caught, world, log)
        elif world is None or world.is_main or (unreached and world.local_rank == 0):
            error(str(caught), log)
        elif world.local_rank == 0 and isinstance(caught, TrainingFailed) and caught.everywhere:
            error(str(caught))
        status = caught.status if isinstance(caught, TrainingFailed) else FAILED
        note_end(run.folder, world, words, FAILED if status == HALTED else status)
        if world is not None and world.size > 1:
            if lost_contact(caught):
                world.stop.wait(1.0)  # so that the launcher first sees the rank that caused the failure
            sys.stdout.flush()
            os._exit(status)  # a normal exit would wait for ranks that may be gone
        return status
    finally:
        if world is not None:
            world.close()


def note_end(folder: Path, world: World | None, words: Sequence[str], status: int) -> int:
    """Record how training ended, for `lockstep status`. Rank 0 only. Returns `status`."""
    if status == EXCLUDED or (status == FAILED and job_record.restarts_left()):
        return status  # the job will be restarted
    if world is None or redirected(world.log.parent) is not None:
        return status  # launch.json there belongs to another run
    if world.is_main and tuple(words) == TRAIN and world.refusal is None:
        job_record.note(folder, status=status, ended=time.time())
    return status


def main_of_file(path: str, words: Sequence[str] = TRAIN) -> None:
    """Run one rank of a run file in a process of its own, started by a launcher. Exits."""
    status = main(load(path, []), words=words)
    sys.stdout.flush()
    sys.exit(status)


def main_of_job(text: str, words: Sequence[str] = TRAIN) -> None:
    """Run one rank of a job from `Job.dump`. Exits; says why if this rank cannot read the job."""
    try:
        job = Job.load(text)
    except RunError as caught:
        error(str(caught))
        sys.exit(BAD)
    status = main(job, words=words)
    sys.stdout.flush()
    sys.exit(status)


transformers.logging.set_verbosity_error()
