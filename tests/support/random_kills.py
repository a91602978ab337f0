"""Fault injection: jobs whose processes are killed at random moments and restarted with other numbers of processes and
strategies until they end.

In: a seed and the number of kills. Out: the kills, and whether each job ended with the bits of an undisturbed one. The
seed determines victims, worlds and kinds of moments; the exact instant depends on the machine.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from support.command import (
    LOCKSTEP,
    STEPS,
    bits,
    each_step_once,
    ended,
    finish,
    processes_in,
    ranks_of,
    saved,
    start,
    step_of,
    until,
    write,
)

STRATEGIES = ("allreduce", "ddp", "fsdp2", "hf_accelerate", "hf_trainer")  # and single with one process
MOMENTS = ("starting", "training", "saving", "ending")
WEIGHTS = (3, 4, 3, 1)  # probabilities of the moments
VICTIMS = ("a rank", "the launcher", "all")


@dataclass(frozen=True)
class Kill:
    """One start that ended by kill -9."""

    job: int
    strategy: str
    processes: int
    moment: str
    victim: str
    resumed_from: int  # newest checkpoint before the start
    reached: int  # last step in metrics.jsonl at the kill


@dataclass
class Record:
    """Attempts and results."""

    seed: int
    kills: list[Kill] = field(default_factory=list)
    jobs: int = 0
    lost: int = 0  # jobs with other bits or metrics

    def plain(self) -> dict:
        return asdict(self)


def kill_and_resume(folder: Path, cache: Path, untouched: Path, kills: int, seed: int) -> Record:
    """Run jobs under `folder`, one after the other, until `kills` processes were killed; `untouched` has the expected
    bits. Errors: AssertionError with the record if a job ends with others."""
    chance = random.Random(seed)
    record = Record(seed)
    start_s = 1.5  # seconds from the command to its first step, as last observed
    while len(record.kills) < kills:
        job = folder / f"job-{record.jobs}"
        write(job)
        while len(record.kills) < kills and not (job / "out/export").exists():
            processes = chance.randint(1, 4)
            strategy = "single" if processes == 1 else chance.choice(STRATEGIES)
            (moment,), victim = chance.choices(MOMENTS, WEIGHTS), chance.choice(VICTIMS)
            delay, ahead = chance.random(), chance.randint(1, 25)
            before = saved(job)
            options = [f"launch.processes={processes}", f"strategy.name={strategy}"]
            began = time.monotonic()
            process = start([*LOCKSTEP, "train", "run.yaml", *options], job, cache)
            true = moment_of(job, moment, began + delay * start_s, min(before + ahead, STEPS), starts_of(job))
            came = wait_for(true, process)
            if moment == "training" and came:
                start_s = min(20.0, time.monotonic() - began)
            if not came:  # it ended before the kill
                status, out, err = ended(process)
                assert status == 0, (record.plain(), out, err)
                break
            record.kills.append(Kill(record.jobs, strategy, processes, moment, victim, before, step_of(job)))
            kill(victim, process, job, chance)
            ended(process)
            until(lambda j=job: not processes_in(j), "the ranks to end with their launcher")  # type: ignore[misc]
        finish(job, cache)
        record.jobs += 1
        try:
            assert bits(job) == bits(untouched)
            each_step_once(job, untouched)
        except AssertionError as error:
            record.lost += 1
            raise AssertionError(f"job {record.jobs - 1} lost something: {record.plain()}") from error
    return record


def moment_of(job: Path, moment: str, instant: float, step: int, starts: int) -> Callable[[], bool]:
    """Whether it is time to kill the job. For `starting`: only after this start has followed `starts` others."""
    checkpoints = job / "out/checkpoints"
    come = {
        "training": lambda: step_of(job) >= step,
        "saving": lambda: any(checkpoints.glob(".step-*.partial")),
        "exporting": lambda: (job / "out/.export.partial").exists(),
        "ending": lambda: step_of(job) >= STEPS,
    }
    if moment == "starting":
        return lambda: time.monotonic() > instant
    return lambda: starts_of(job) > starts and come[moment]()


def starts_of(job: Path) -> int:
    """Return how often the job has started to train."""
    events = job / "out/events.jsonl"
    return events.read_bytes().count(b'"event": "start"') if events.exists() else 0


def wait_for(true: Callable[[], bool], process: subprocess.Popen[str]) -> bool:
    """Wait until it is true; False if the process ended first."""
    limit = time.monotonic() + 550
    while not true():
        if process.poll() is not None:
            return False
        assert time.monotonic() < limit, "the job neither moves nor ends"
        time.sleep(0.001)
    return process.poll() is None


def kill(victim: str, process: subprocess.Popen[str], job: Path, chance: random.Random) -> None:
    if victim == "a rank":
        ranks = ranks_of(process, job) or [process.pid]  # one process, or none started yet
        _end(chance.choice(ranks))
    elif victim == "the launcher":
        process.kill()
    else:
        for pid in [process.pid, *processes_in(job)]:
            _end(pid)


def _end(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
