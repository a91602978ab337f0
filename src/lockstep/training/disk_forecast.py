"""Check before any process starts that a run's checkpoints and export fit on the disk of OUTPUT.

In: a job with its data. Out: notes, or the `RunError` that `lockstep train` would raise. Rank 0 makes the same check
with measured sizes; the sizes here are lower bounds, computed from a model without weights.
"""

from __future__ import annotations

import torch

from lockstep.checkpoint.folder import DiskSpace
from lockstep.checkpoint.manifest import Goal
from lockstep.data.job import Job
from lockstep.tasks.task import make_task
from lockstep.training.data_loader import StepLoader
from lockstep.training.model_stats import ModelFacts, model_facts


def check(job: Job) -> list[str]:
    """Return notes on the disk of OUTPUT, for a run whose rank 0 is on this machine. Errors: `RunError` if the files of
    the run do not fit, or exceed the system's limit of file sizes."""
    run, newest = job.run, job.newest
    if newest is not None and Goal.of(run).met_by(newest):
        return []
    task = make_task(job)
    feed, space = StepLoader(task, [], torch.device("cpu")), DiskSpace(job)
    space.checkpoint, space.export = sizes(job, model_facts(task))
    step = 0 if newest is None else newest.step
    return space.check(step, feed.total, feed.interval(run.checkpoint.every), job.processes)


def sizes(job: Job, model: ModelFacts) -> tuple[int, int]:
    """Return lower bounds of the sizes of a checkpoint and of an export, in bytes."""
    run = job.run
    weight = 4 if run.optim.master_weights or not run.model.trained_in_bfloat16 else 2
    exported = model.trained if run.model.adapter else model.every
    return (
        int(model.trained * (weight + model.state_bytes)),
        int((exported - model.packed * (not run.model.adapter)) * (2 if run.model.dtype == "bfloat16" else 4)),
    )
