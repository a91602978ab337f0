"""Run one rank of a job, from the run file to the export. Every launcher starts `main`.

In: a run and torchrun's environment variables. Out: an exit status (0 done, 1 failed, 2 invalid run, 75 stopped and
resumable), and on rank 0 the contents of OUTPUT/.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import transformers

from lockstep.checkpoint import export_hashes, remote_sync, tracker_runs
from lockstep.checkpoint.checkpoint import CheckpointError, check_resumable, finished
from lockstep.checkpoint.hub_push import require
from lockstep.checkpoint.manifest import export_of
from lockstep.config import output_files
from lockstep.config.errors import BAD, DONE, EXCLUDED, FAILED, HALTED, STOPPED, coded
from lockstep.config.redaction import printable, redact_all
from lockstep.config.run import Run, RunError, load, redirected, replace_text, write_run_yaml
from lockstep.config.sections import TrackSection
from lockstep.config.written import with_defaults_named
from lockstep.data.job import Job, Scope
from lockstep.distributed import job_record
from lockstep.distributed.activity import ACTIVITY
from lockstep.distributed.event_log import EventLog
from lockstep.distributed.hang_watchdog import Watchdog
from lockstep.distributed.job_record import TRAIN
from lockstep.distributed.lost_contact import lost_contact, tell_failure
from lockstep.distributed.randomness import own_generators
from lockstep.distributed.rendezvous import Unreached
from lockstep.distributed.signals import end_by_signal
from lockstep.distributed.system_metrics import SystemMetrics
from lockstep.distributed.world import World
from lockstep.strategies.strategy import Strategy
from lockstep.tasks.task import Task, make_task
from lockstep.track.console import LOG, Console, append, error, strike_tracebacks
from lockstep.track.report import history
from lockstep.track.report.history import history_complete
from lockstep.track.tracker import End, Sample
from lockstep.track.trackers import Trackers
from lockstep.training import export_check
from lockstep.training.errors import TrainingFailed
from lockstep.training.evaluation import generate_samples
from lockstep.training.finalize import Final, final_scores
from lockstep.training.fingerprints import Fingerprints
from lockstep.training.loop import train
from lockstep.training.publish import at_a_stop, publish_until_stopped, write_model
from lockstep.training.resolve import for_rank
from lockstep.training.session import Session, Sinks, build_session, join_ranks
from lockstep.training.startup import start_or_resume
from lockstep.training.summary import Promised, best_so_far, better_step, closing, digest_of, promised
from lockstep.training.throughput import Counts
from lockstep.training.train_state import TrainState
from lockstep_trace import streams
from lockstep_trace.plurals import quantity

if TYPE_CHECKING:
    from lockstep.training.recovery.recovery import Recovery


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
        world = World(run, init_method)
        world.refusal = refusal
        module, _, function = words[0].rpartition(".")
        call = getattr(importlib.import_module(module), function)  # `work` below, if the job trains
        return note_end(run, world, words, call(for_rank(job, world), world, *words[1:]))
    except RunError as caught:
        if world is None or world.local_rank == 0:  # on every machine, for its user
            text = with_defaults_named(str(caught), run)
            error(text, log if world is None or world.refusal is None else None)
        return note_end(run, world, words, BAD)
    except Exception as caught:
        if world is not None and world.stop.came and lost_contact(caught):
            note_end(run, world, words, FAILED)
            end_by_signal()  # another rank was not yet handling signals when the job was stopped
        if not isinstance(caught, CheckpointError | TrainingFailed | Unreached):
            tell_failure(caught, world, log)
        elif world is None or world.is_main or (isinstance(caught, Unreached) and world.local_rank == 0):
            error(str(caught), log)
        elif world.local_rank == 0 and isinstance(caught, TrainingFailed) and caught.everywhere:
            error(str(caught))
        status = caught.status if isinstance(caught, TrainingFailed) else FAILED
        note_end(run, world, words, FAILED if status == HALTED else status)
        if world is not None and world.size > 1:
            if lost_contact(caught):
                world.stop.wait(1.0)  # so that the launcher first sees the rank that caused the failure
            sys.stdout.flush()
            os._exit(status)  # a normal exit would wait for ranks that may be gone
        return status
    finally:
        if world is not None:
            world.close()


def note_end(run: Run, world: World | None, words: Sequence[str], status: int) -> int:
    """Record how training ended, for `lockstep status`. Rank 0 only. Returns `status`."""
    if status == EXCLUDED or (status == FAILED and job_record.restarts_left()):
        return status  # the job will be restarted
    if world is None or redirected(world.log.parent) is not None:
        return status  # launch.json there belongs to another run
    if world.is_main and tuple(words) == TRAIN and world.refusal is None:
        job_record.note(run.folder, status=status, ended=time.time())
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


@dataclass(frozen=True)
class Trained:
    """Result of a run that reached its last step."""

    step: int  # updates done; fewer than planned after early stopping
    exported: int  # the step whose model is exported
    counts: Counts
    scores: dict[str, dict[str, float]]  # split -> metrics
    tables: dict[str, dict[str, Any]]  # split -> name -> table
    strategy: Strategy  # the final strategy; recovery from a failed rank may have replaced the first one


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
            ids.update(tracker_runs.of_earlier_start(job, code))
        self._trackers = Trackers(session.run, step, ids, console.tracker, console.note, loud)
        if loud and not step:
            tracker_runs.keep(job, code, dict(ids))
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
            tracker_runs.forget(self._session.run)


def work(job: Job, world: World) -> int:
    """Build, resume, train, evaluate, export. Returns the exit status. Collective."""
    run = job.run
    join_ranks(job, world)
    console = Console(world.is_main, world.log, run.track.console)
    done = not world.joining and finished_already(job, world)
    if world.is_main:
        append(
            world.log,
            f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} {quantity(world.size, 'process')}, rank 0 on {world.host}",
        )
    elsewhere = console_of_other_machine(run.track, world)
    if done:
        console.say(f"{run.folder} is finished; the model is in {run.folder}/export")
        elsewhere.say(f"{run.folder} is finished; the model is in {run.folder}/export on {world.hosts[0]} (rank 0)")
        return publish_until_stopped(job, world, console) if world.is_main else DONE
    ACTIVITY.set("building the model")
    with console.busy(lambda: ACTIVITY.name):
        with world.stop.ends(alone=world.size == 1), watched_while_building(job, world):
            session = build_session(job, world, console.note)
        session = replace(session, journal=EventLog(world, run.folder))
        state, compared = (session.new_state(-1), "") if world.joining else start_or_resume(session, console)
        session = replace(session, compared=compared)
    trained = train_and_evaluate(session, console, state)
    if trained is None:
        where = f"; the checkpoint is on {world.hosts[0]} (rank 0)" if session.checkpoints.newest else ""
        elsewhere.say(f"stopped on request after step {state.step}{where}")
        return STOPPED if session.checkpoints.newest else FAILED
    weights = trained.strategy.exported()
    evaluated = export_check.evaluated(session.task, trained.strategy)
    doubts = session.task.warnings + own_generators(session.task, trained.strategy.model)
    trained.strategy.close()
    known = promised(trained.strategy, doubts)
    elsewhere.facts({"model": f"rank 0 writes it to {run.folder}/export on {world.hosts[0]}"})
    return DONE if weights is None else export_and_publish(session, console, trained, weights, known, evaluated)


def console_of_other_machine(track: TrackSection, world: World) -> Console:
    """Return a console that prints on machines without rank 0, once each, and is silent on all other ranks. Silent
    under SLURM too, where all machines write to one log."""
    loud = world.local_rank == 0 and not world.is_main and "SLURM_PROCID" not in os.environ
    return Console(loud, voice=track.console)


@contextmanager
def watched_while_building(job: Job, world: World) -> Iterator[None]:
    """Watch for hangs while building: end the job after `launch.hang_timeout_s` if all ranks wait in collectives or one
    falls silent. With recovery enabled, only the timeout of collectives applies: there is no state yet to recover from.
    """
    watchdog = Watchdog(world, 0 if world.members is not None else job.run.launch.hang_timeout_s, building=True).start()
    try:
        yield
    finally:
        watchdog.stop()


def may_recover(session: Session, state: TrainState, watchdog: Watchdog, sinks: RankZeroSinks) -> Recovery | None:
    """Return what lets training survive the loss of ranks, if the run asks for it. Errors: `RunError`."""
    run = session.run
    if session.world.members is None and run.launch.on_rank_failure != "continue" and not run.sdc_check.every:
        return None
    from lockstep.training.recovery.recovery import recovery_for

    return recovery_for(session, state, watchdog, sinks.regroup)


def train_and_evaluate(session: Session, console: Console, state: TrainState) -> Trained | None:
    """Train from `state` to the end and evaluate the final model. Returns None if the run was asked to stop first.
    Collective."""
    run, world, step = session.run, session.world, state.step
    sinks = RankZeroSinks(session, console, step)
    session = replace(session, sinks=sinks)
    state.fingerprints = Fingerprints(world, run.folder, step)
    watchdog = Watchdog(world, run.launch.hang_timeout_s).start()
    watching: Watchdog | Recovery = watchdog
    end: End = "failed"
    best = best_so_far(session.job, step if world.is_main else 0)
    try:
        console.start(session.feed.total, step, lambda: ACTIVITY.name, session.feed.order.steps_per_epoch, best)
        try:
            if (recovery := may_recover(session, state, watchdog, sinks)) is None:
                train(session, state)
            else:
                watching = recovery
                recovery.run(train)
                session = recovery.session
        finally:
            state.fingerprints.close()
        strategy, step = session.strategy, state.step
        sinks.advance(step)
        console.stop()
        if world.is_main and redirected(world.log.parent) is None:
            job_record.note(run.folder, reached=step)
        ended = step == session.feed.total or state.over
        with console.busy(lambda: ACTIVITY.name, "finishing"):
            final = final_scores(session, console, sinks, state) if ended else None
        if final is None:
            console.say(stopped_at(session, step))
            at_a_stop(session, console)
            strategy.close()
            session.journal.event("stop", step)
            end = "stopped"
            return None
        exported, finals = final
        if world.is_main and (cleared := session.checkpoints.clear()) is not None:
            console.say(cleared)  # make space before the scores are written
        show_final_scores(session, state, exported, finals)
        end = "done"
        return Trained(
            step,
            exported,
            state.meter.total,
            {split: scores for split, (scores, _) in finals.items()},
            {split: tables for split, (_, tables) in finals.items()},
            strategy,
        )
    except BaseException as caught:
        session.journal.failed(caught, ACTIVITY.name)
        raise
    finally:
        watching.stop()
        console.stop()
        sinks.close(end)


def show_final_scores(session: Session, state: TrainState, exported: int, final: Mapping[str, Final]) -> None:
    """Send the metrics and samples of the model of step `exported` to the sinks. Collective."""
    strategy, step = session.strategy, state.step
    logged = state.over and session.run.average.last is None  # right after its step
    with strategy.phases("evaluation"):
        for split, (scores, _) in final.items():
            if split != "validation" or (exported == step and not logged):
                session.sinks.log(step, split, scores, closing=True)
        session.sinks.show(step, generate_samples(session.task, strategy, session.world))
    session.journal.event("evaluation", step)
    session.journal.last_times(step, strategy.phases.take())


def stopped_at(session: Session, step: int) -> str:
    """Final message of a run that was asked to stop."""
    newest = session.checkpoints.newest
    there = "there" if newest == step else f"step {newest}"
    then = f"the same command continues from {there}"
    if not newest:
        then = "no checkpoint could be written, so the same command starts over"
    elif (away := session.checkpoints.room.away()) is not None:
        then = f"{away}; the checkpoint of step {newest} is wherever that folder was moved to"
    return f"stopped on request after step {step} of {session.feed.total}; {then}"


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


transformers.logging.set_verbosity_error()
