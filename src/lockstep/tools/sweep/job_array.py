"""The trials of a sweep as one SLURM array job: a task each, requeued and resumed by itself.

In: trials whose run files are written. Out: the job's id, and OUTPUT/launch.json of each trial, so that
`lockstep status`, `logs` and `stop` look after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lockstep.config.run import Run, RunError
from lockstep.distributed import job_record
from lockstep.launchers import slurm


def check(keys: Sequence[str]) -> None:
    """Errors: `RunError` for a key that all tasks of an array have in common."""
    if common := [key for key in keys if key.startswith("launch.")]:
        raise RunError(f"{common[0]}: all trials of an array job have the same launch section; it cannot be varied")


def live(folder: Path) -> str | None:
    """What a trial's task is doing, if SLURM still has it. Errors: `RunError` when SLURM does not answer."""
    record = job_record.read(folder)
    if record is None or record.launcher != "slurm":
        return None
    state = slurm.state_of(record)
    return state.word if state.live else None


def submit(run: Run, runs: Sequence[Run], folder: Path, at_most: int | None) -> str:
    """Queue `runs`, whose run files are in their folders, with what `run.launch` asks for. Returns the job's id.
    Errors: `RunError`, and nothing is queued."""
    plan = slurm.array_plan(run, [each.folder / "run.yaml" for each in runs], folder, at_most)
    job = slurm.submit(plan)
    for task, each in enumerate(runs):
        job_record.write(each.folder, job_record.here("slurm", plan.processes, f"{job}_{task}"))
    return job
