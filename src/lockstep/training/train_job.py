"""Train a job on one rank, from building the model to the export. `rank.py` calls `train_job`.

In: a job and the world of its ranks. Out: an exit status, and on rank 0 the contents of OUTPUT/.

A run that has no checkpoint yet keeps the trackers' run ids in OUTPUT/trackers.json, so that the next start after a
kill continues the same run of each tracker. A start with other keys, data or code is a new run.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.config.errors import DONE, FAILED, STOPPED
from lockstep.config.lazy import lazy
from lockstep.config.output_files import redirected, replacing
from lockstep.config.sections import TrackSection
from lockstep.data.arrow_cache import digest
from lockstep.data.job import Job
from lockstep.distributed import job_record
from lockstep.distributed.event_log import EventLog
from lockstep.distributed.randomness import own_generators
from lockstep.distributed.system_metrics import SystemMetrics
from lockstep.distributed.world import World
from lockstep.strategies.exact import training_state
from lockstep.track.busy import ACTIVITY
from lockstep.track.console import Console, append
from lockstep.track.tracker import End, Sample, Trackers
from lockstep.training import export_check
from lockstep.training.evaluation import generate_samples
from lockstep.training.fingerprints import Fingerprints
from lockstep.training.finish import Final, Trained, export_and_publish, final_scores
from lockstep.training.loop import train
from lockstep.training.publish import at_a_stop, publish_until_stopped
from lockstep.training.session import Session, Sinks, build_session, join_ranks
from lockstep.training.startup import finished_already, start_or_resume
from lockstep.training.summary import best_so_far, promised
from lockstep.training.train_state import TrainState
from lockstep_trace.coded import quantity

if TYPE_CHECKING:
    from lockstep.distributed import hang_watchdog
    from lockstep.distributed.hang_watchdog import Watchdog
    from lockstep.training.recovery.recovery import Recovery
else:  # for several processes
    (hang_watchdog,) = lazy("lockstep.distributed", "hang_watchdog")


def train_job(job: Job, world: World) -> int:
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
        where = f"{run.folder} is finished, so nothing was trained; the model is in {run.folder}/export"
        console.say(f"{where}. To train again, give another output=FOLDER")
        elsewhere.say(f"{where} on {world.hosts[0]} (rank 0)")
        return publish_until_stopped(job, world, console) if world.is_main else DONE
    ACTIVITY.set("building the model")
    with console.busy(lambda: ACTIVITY.name):
        with world.stop.ends(alone=world.size == 1), watched_while_building(job, world):
            session = build_session(job, world, console.note)
        session = replace(session, journal=EventLog(world, run.folder))
        state, compared = (session.new_state(-1), "") if world.joining else start_or_resume(session, console)
        session = replace(session, compared=compared)
    elsewhere.say(f"training; the steps are shown by rank 0 on {world.hosts[0]}")
    trained = train_and_evaluate(session, console, state)
    if trained is None:
        where = f"; the checkpoint is on {world.hosts[0]} (rank 0)" if session.checkpoints.newest else ""
        elsewhere.say(f"stopped on request after step {state.step}{where}")
        return STOPPED if session.checkpoints.newest else FAILED
    weights = training_state.export_averaged(trained.strategy)
    evaluated = export_check.evaluated(session.task, trained.strategy)
    doubts = session.task.warnings + own_generators(session.task, trained.strategy.model)
    trained.strategy.close()
    known = promised(trained.strategy, doubts)
    elsewhere.facts({"model": f"rank 0 on {world.hosts[0]} writes it to {run.folder}/export"})
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
    watchdog = watched(world, 0 if world.members is not None else job.run.launch.hang_timeout_s, building=True)
    try:
        yield
    finally:
        if watchdog is not None:
            watchdog.stop()


def watched(world: World, limit_s: float, building: bool = False) -> Watchdog | None:
    """Return a started watchdog; None if this process is alone, and stays alone."""
    if world.size == 1 and world.members is None:
        return None
    return hang_watchdog.Watchdog(world, limit_s, building).start()


def may_recover(
    session: Session, state: TrainState, watchdog: Watchdog | None, sinks: RankZeroSinks
) -> Recovery | None:
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
    watchdog = watched(world, run.launch.hang_timeout_s)
    watching: Watchdog | Recovery | None = watchdog
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
        if watching is not None:
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
    session.journal.last_times(step, strategy.phases.report())


def stopped_at(session: Session, step: int) -> str:
    """Final message of a run that was asked to stop."""
    newest = session.checkpoints.newest
    there = "there" if newest == step else f"step {newest}"
    then = f"the same command continues from {there}"
    if not newest:
        then = "no checkpoint could be written, so the same command starts over"
    elif (away := session.checkpoints.disk.away()) is not None:
        then = f"{away}; the checkpoint of step {newest} is wherever that folder was moved to"
    return f"stopped on request after step {step} of {session.feed.total}; {then}"


# -- numbers and samples -----------------------------------------------------------------------------------------------


class RankZeroSinks(Sinks):
    """Log to the terminal and the trackers, on rank 0, each step once."""

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
