"""Finish a run: choose the exported model, evaluate it, write the export, the report and the closing table.

In: a session whose last step is done, then `Trained`. Out: the strategy holds the exported model (last, best, or an
average), its metrics and tables by split; a finished OUTPUT and an exit status. A finish that was interrupted is
completed by the next start.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.checkpoint import export_hashes
from lockstep.checkpoint.manifest import Goal, score_of
from lockstep.config import output_files
from lockstep.config.errors import FAILED, coded
from lockstep.config.output_files import redirected, replace_text
from lockstep.config.redaction import redact_all
from lockstep.data.job import Job
from lockstep.distributed.event_log import EventLog
from lockstep.distributed.world import World
from lockstep.strategies.strategy import Strategy
from lockstep.tasks.task import Calibrates, Task, make_task
from lockstep.track import history
from lockstep.track.busy import ACTIVITY
from lockstep.track.console import LOG, Console, error
from lockstep.training import export_check
from lockstep.training.errors import EvaluationInterrupted
from lockstep.training.evaluation import evaluate_with_tables, validation_rows
from lockstep.training.publish import publish_until_stopped, write_model
from lockstep.training.session import Session, Sinks
from lockstep.training.summary import Promised, best_so_far, better_step, closing, digest_of, precisions
from lockstep.training.train_state import Counts, TrainState
from lockstep_trace.redaction import printable

Final = tuple[dict[str, float], dict[str, Any]]  # (metrics, tables) of a split


def final_scores(
    session: Session, console: Console, sinks: Sinks, state: TrainState
) -> tuple[int, dict[str, Final]] | None:
    """Load the exported model into the strategy and evaluate it. Returns its step, and metrics and tables by split.
    None if all ranks were asked to stop and the next start can resume from the last step. Collective."""
    run, world, task, strategy, step = session.run, session.world, session.task, session.strategy, state.step
    console.detail({"precision": precisions(strategy)})

    def final(split: str) -> Final:
        def stop() -> bool:
            return world.asked_to_stop(by_clock=False) and session.checkpoints.newest == step

        rows = validation_rows(task, task.splits[split]) if split == "validation" else None
        return evaluate_with_tables(world, task, strategy, task.splits[split], rows, stop=stop)

    with strategy.phases("evaluation"):
        splits = [split for split in ("validation", "test") if split in task.splits]
        try:
            exported = step
            finals: dict[str, Final] = {}
            if run.average.last is not None:
                steps = session.checkpoints.take_mean(session.averaged, step)
                console.say(f"the mean of the weights after steps {', '.join(map(str, steps))} is exported")
            session.averaged.exchange()
            if run.export == "best":
                exported, finals = best_model(session, console, state, final)
                if exported != step and finals:
                    sinks.log(step, "validation", finals.pop("validation")[0])
            for split in splits:  # validation first: it calibrates the scores of the others
                finals[split] = finals[split] if split in finals else final(split)
                if split == "validation" and isinstance(task, Calibrates):
                    task.calibrate(finals[split][0])
            return exported, finals
        except EvaluationInterrupted:
            return None


def best_model(
    session: Session, console: Console, state: TrainState, final: Callable[[str], Final]
) -> tuple[int, dict[str, Final]]:
    """Load the best evaluated model that has a checkpoint into the strategy, unless the last model is better. Returns
    its step, and the last model's score if it was evaluated. Collective. Errors: `EvaluationInterrupted`."""
    run, checkpoints, progress, step = session.run, session.checkpoints, state.progress, state.step
    finals = {}
    if state.over:  # the last model was evaluated already
        by = f" by more than {run.evaluate.min_delta:g}" if run.evaluate.min_delta else ""
        console.say(
            f"training ends after step {step} of {session.feed.total}: {progress.since} evaluations since step "
            f"{progress.step} were not better{by or f' by {run.checkpoint.best}'} (evaluate.patience)"
        )
    else:
        finals["validation"] = final("validation")
    last = score_of(run.checkpoint.best, finals["validation"][0]) if finals else None
    exported, notes = checkpoints.take_best(session.averaged, step, last)
    if exported != step:
        session.averaged.exchange()  # swap: the loaded average is in the average's buffers
    for text in notes:
        console.note(text)
    which = "that of the last step" if exported == step else f"that of step {exported} of {step}"
    best = best_so_far(session.job, step if session.world.is_main else 0)
    beaten = exported == step and last is not None and not best.beats(finals["validation"][0][best.name])
    gone = best.step not in (None, exported, step) and not beaten  # without checkpoint.best the newest are there
    if gone:
        console.note(f"there is no usable checkpoint of step {best.step}, which was evaluated as the best")
    those = "the best model of those with a checkpoint" if gone else "the best model"
    console.say(f"{those} by {run.checkpoint.best} is {which}, and is exported")
    return exported, finals


@dataclass(frozen=True)
class Trained:
    """Result of a run that reached its last step."""

    step: int  # updates done; fewer than planned after early stopping
    exported: int  # the step whose model is exported
    counts: Counts
    scores: dict[str, dict[str, float]]  # split -> metrics
    tables: dict[str, dict[str, Any]]  # split -> name -> table
    strategy: Strategy  # the final strategy; recovery from a failed rank may have replaced the first one


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
    scores = {"step": trained.exported, "export": Goal.of(run).export, "splits": trained.scores}
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
        output_files.clear(run.folder / name)
    console = Console(True, run.folder.resolve() / LOG, run.track.console)
    if not (run.folder / "metrics.jsonl").is_file():
        console.note(
            f"{run.folder} holds the model but no metrics.jsonl, because the folder was moved or deleted during "
            "training; the report has no curves"
        )
    write_summary(task, EventLog(World(run), run.folder), console, steps)
