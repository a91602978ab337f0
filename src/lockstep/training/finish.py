"""Finish a run: from its trained weights to the export, the report and the closing table.

In: `Trained`. Out: a finished OUTPUT and an exit status. A finish that was interrupted is completed by the next start.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.checkpoint import export_hashes, remote_sync
from lockstep.checkpoint.checkpoint import check_resumable, finished
from lockstep.checkpoint.hub_push import require
from lockstep.checkpoint.manifest import export_of
from lockstep.config import output_files
from lockstep.config.errors import FAILED, coded
from lockstep.config.redaction import printable, redact_all
from lockstep.config.run import RunError, redirected, replace_text, write_run_yaml
from lockstep.data.job import Job, Scope
from lockstep.distributed.activity import ACTIVITY
from lockstep.distributed.event_log import EventLog
from lockstep.distributed.world import World
from lockstep.strategies.strategy import Strategy
from lockstep.tasks.task import Task, make_task
from lockstep.track.console import LOG, Console, error
from lockstep.track.report import history
from lockstep.track.report.history import history_complete
from lockstep.training import export_check
from lockstep.training.publish import publish_until_stopped, write_model
from lockstep.training.session import Session
from lockstep.training.summary import Promised, best_so_far, better_step, closing, digest_of
from lockstep.training.throughput import Counts


@dataclass(frozen=True)
class Trained:
    """Result of a run that reached its last step."""

    step: int  # updates done; fewer than planned after early stopping
    exported: int  # the step whose model is exported
    counts: Counts
    scores: dict[str, dict[str, float]]  # split -> metrics
    tables: dict[str, dict[str, Any]]  # split -> name -> table
    strategy: Strategy  # the final strategy; recovery from a failed rank may have replaced the first one


def finished_already(job: Job, world: World) -> bool:
    """Whether the run in OUTPUT is already finished. Rank 0 checks, and writes run.yaml. Collective. Errors: `RunError`
    on every rank, if OUTPUT holds another run or cannot be written."""
    run = job.run
    outcome: bool | str = False
    if world.is_main:
        try:
            if world.refusal is not None:
                raise RunError.read(world.refusal)
            manifest = check_resumable(job)
            outcome = finished(run, manifest)
            write_run_yaml(run)
            if job.scope < Scope.START:  # not checked by the launcher
                require(run)
                remote_sync.check(run)
                remote_sync.check_other(job)
            if outcome and manifest is not None and not history_complete(run.folder):
                finish_interrupted(job, manifest.step)
        except RunError as caught:
            outcome = str(caught)
    outcome = world.broadcast(outcome)
    if isinstance(outcome, str):
        raise RunError.read(outcome)
    return outcome


def export_and_publish(
    session: Session,
    console: Console,
    trained: Trained,
    weights: Mapping[str, torch.Tensor],
    known: Promised,
    evaluated: export_check.Evaluated,
) -> int:
    """Write the export, the report and the closing table, then push to the Hub. Rank 0 only; no other rank waits in a
    collective, because the push may take long. Returns the exit status: 1 for an export whose losses differ from the
    run's, which is not published."""
    run, task, steps = session.run, session.task, trained.step
    scores = {"step": trained.exported, "export": export_of(run), "splits": trained.scores}
    records = {"tables.json": trained.tables, history.SCORES: scores}
    ours = redirected(session.world.log.parent) is None
    with suppress(OSError):
        if ours:  # an existing export is not the model of these scores
            export_hashes.withdraw(run.folder)
    # before the export, which marks the run as finished
    for name, values in records.items() if ours else ():
        try:
            replace_text(run.folder / name, json.dumps(redact_all(values, printable)))
        except OSError as caught:
            console.note(f"{run.folder / name} could not be written: {caught.strerror or caught}")
    ACTIVITY.set("writing the export")
    with console.busy(lambda: ACTIVITY.name, "finishing"):
        write_model(session, weights, trained.scores, steps, trained.exported)
        compared = export_check.compare_export(task, evaluated, run.folder / "export", session.world.device)
        checked = {"export": compared.text, "export_agrees": compared.agrees}
        sha256 = write_summary(task, session.journal, console, steps, weights, checked)
    console.detail({"export": compared.text} if compared.agrees else {})
    better = better_step(session.job, best_so_far(session.job, steps), trained.exported, trained.scores)
    closing(console, session.job, task, trained.scores, trained.counts, session.world, sha256, known, better)
    if not compared.agrees:
        export_hashes.withdraw(run.folder)
        error(coded("LS5182", compared.text), session.world.log)
        return FAILED
    return publish_until_stopped(session.job, session.world, console, session.checkpoints.mirror)


def write_summary(
    task: Task,
    journal: EventLog,
    console: Console,
    steps: int,
    weights: Mapping[str, torch.Tensor] | None = None,
    checked: Mapping[str, Any] | None = None,
) -> str | None:
    """Write the final journal event and the report. Rank 0 only. `weights`: the exported weights, if in memory.
    `checked`: the result of the export check. Returns the hash of the exported weights."""
    run = task.run
    for name, target in output_files.links(run.folder).items():
        console.note(f"{run.folder / name} is a link to {target}: lines of this run were not written through it")
    sha256 = digest_of(run.folder / "export", weights)
    best = {split: task.best_possible(split) for split in ("validation", "test") if split in task.splits}
    journal.event("finish", steps, weights=sha256, best_possible=best, **(checked or {}))
    try:
        from lockstep.track.report.report import write_report  # charts and templates, which only the end needs

        write_report(run.folder)
    except Exception as caught:  # the run is finished even if its report fails
        console.note(f"{run.folder}/report.html could not be written: {type(caught).__name__}: {caught}")
    return sha256


def finish_interrupted(job: Job, steps: int) -> None:
    """Complete a finished run whose previous process was killed after writing the export. Rank 0 only."""
    run, task = job.run, make_task(job)
    for name in (".export.partial", ".export.removed"):
        export_hashes.clear(run.folder / name)
    console = Console(True, run.folder.resolve() / LOG, run.track.console)
    if not (run.folder / "metrics.jsonl").is_file():
        console.note(
            f"{run.folder} holds the model but no metrics.jsonl, because the folder was moved or deleted during "
            "training; the report has no curves"
        )
    write_summary(task, EventLog(World(run), run.folder), console, steps)
