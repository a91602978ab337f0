"""The text of an sbatch file: readable, and complete, so that it can be submitted again by hand.

In: what a job asks of SLURM. Out: text, the same for the same job. A job that stops on request (status 75, after the
warning before its time limit, or when it is preempted) goes back to the queue and resumes from its checkpoint.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lockstep._version import __version__
from lockstep.config.run import RunError


@dataclass(frozen=True)
class Job:
    """What is asked of SLURM."""

    name: str
    nodes: int
    tasks: int  # of a node
    processes: int  # of a task: 1, or the ranks that an elastic agent starts
    folder: Path  # of the logs and of the file itself
    command: Sequence[str]  # of one task; of an array `$run` stands for the run file
    here: Path  # where it runs: relative paths of the run file are meant from here
    cpus: int | None = None  # of a process
    gpus: int = 0  # of a node
    minutes: int | None = None  # time limit
    warn_s: int = 120  # the ranks are told so long before the limit
    restarts: int = 0  # in the same allocation, after a failure
    requeue: bool = True
    no_kill: bool = False  # a node that is lost does not end the others
    asked: dict[str, str | None] = field(default_factory=dict)  # further options of sbatch, by their long names
    extra: Sequence[str] = ()  # and whole ones
    setup: Sequence[str] = ()  # shell lines before the ranks start
    array: Sequence[Path] = ()  # run files, an array task each
    at_most: int | None = None  # of them at a time


def text_of(job: Job) -> str:
    """The file. Errors: `RunError` for a folder whose name would end a line of it."""
    for path in (job.folder, job.here, *job.array):
        if not str(path).isprintable():
            raise RunError(f"output: the folder {str(path)!r} has a character in its name that no sbatch file can hold")
    return "\n".join([*_head(job), "", *_before(job), "", *_ranks(job), "", *_after(job)]) + "\n"


def _head(job: Job) -> list[str]:
    asked: dict[str, object] = {
        "job-name": job.name,
        "nodes": job.nodes,
        "ntasks-per-node": job.tasks,
        "cpus-per-task": job.cpus and job.cpus * job.processes,
        "gpus-per-node": job.gpus or None,
        **job.asked,
        "time": slurm_time(job.minutes) if job.minutes else None,
        "signal": f"TERM@{job.warn_s}" if job.minutes else None,
        "array": f"0-{len(job.array) - 1}{f'%{job.at_most}' if job.at_most else ''}" if job.array else None,
        "output": _path(job.folder) + ("/slurm-%A_%a.out" if job.array else "/slurm-%j.out"),
        "chdir": str(job.here),
        "open-mode": "append",
    }
    ranks = job.nodes * job.tasks * job.processes
    what = f"{len(job.array)} runs of {ranks} process(es) each" if job.array else f"{ranks} process(es)"
    again = f"sbatch {shlex.quote(str(job.folder / FILE))}"
    lines = [f"# {what}. Written by lockstep {__version__}; to submit it again by hand: {again}"]
    lines += [f"#SBATCH --{name}={_word(str(value))}" for name, value in asked.items() if value is not None]
    lines += ["#SBATCH --requeue" if job.requeue else "#SBATCH --no-requeue"]
    lines += ["#SBATCH --no-kill"] if job.no_kill else []
    return ["#!/bin/bash", *lines, *(f"#SBATCH {option}" for option in job.extra)]


FILE = "job.sbatch"
STATUS = "LOCKSTEP_SLURM_STATUS"  # the file in which the first task leaves its exit status


def _before(job: Job) -> list[str]:
    lines = ["export LOCKSTEP_LAUNCHER=slurm LOCKSTEP_JOB_ID=$SLURM_JOB_ID PYTHONUNBUFFERED=1", *job.setup]
    if job.no_kill:
        lines.append(f'export {STATUS}={shlex.quote(str(job.folder))}"/slurm-$SLURM_JOB_ID.status"')
    if job.array:
        folder = shlex.quote(f"log={job.folder}")  # the shell reads nothing in a folder's name
        lines.append(f'export LOCKSTEP_FACT={folder}"/slurm-${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID.out"')
        runs = [f"  {shlex.quote(str(path))}" for path in job.array]
        lines += ["runs=(", *runs, ")", "run=${runs[$SLURM_ARRAY_TASK_ID]}"]
    return lines


def _ranks(job: Job) -> list[str]:
    srun = ["srun", "--kill-on-bad-exit=0"]  # a rank that is through first must not end the others
    if job.no_kill:
        srun.append("--no-kill")
    if job.cpus:
        srun.append(f"--cpus-per-task={job.cpus * job.processes}")  # which srun does not take over from sbatch
    line = shlex.join([*srun, *job.command]).replace("'$run'", '"$run"')
    lines = ["trap : TERM  # what ends the ranks does not end this script before it has seen how they ended"]
    if job.no_kill:  # srun counts a node that is lost as a failure, whatever became of the others
        last = f'[ -s "${STATUS}" ] && status=$(cat "${STATUS}")'
        return [*lines, f'rm -f "${STATUS}"', line, "status=$?", last]
    if not job.restarts:
        return [*lines, line, "status=$?"]
    return [
        *lines,
        f"for restarts_left in $(seq {job.restarts} -1 0); do",
        f"  {line}",
        "  status=$?",
        "  case $status in 0|2|75|143) break ;; esac",
        '  echo "lockstep: the ranks ended with status $status, $restarts_left restart(s) left"',
        "done",
    ]


def _after(job: Job) -> list[str]:
    if not job.requeue:
        return ["exit $status"]
    return [
        "# 75: stopped before the end, with a checkpoint; 143: told to stop while still starting. Back to the queue,",
        "# unless the job is being cancelled, or `lockstep stop` has taken back its leave to requeue.",
        'if [[ $status =~ ^(75|143)$ ]] && [ "$(squeue -h -j $SLURM_JOB_ID -o %T)" = RUNNING ]; then',
        "  scontrol requeue $SLURM_JOB_ID && sleep 60  # SLURM ends this script",
        "fi",
        "exit $status",
    ]


def slurm_time(minutes: int) -> str:
    """`1-02:30:00`."""
    days, rest = divmod(minutes, 24 * 60)
    return f"{f'{days}-' if days else ''}{rest // 60:02d}:{rest % 60:02d}:00"


def minutes_of(text: str) -> int:
    """Whole minutes, rounded up, of `4h`, `1d12h`, or SLURM's `minutes`, `M:S`, `H:M:S`, `D-H`, `D-H:M`, `D-H:M:S`.
    Errors: `ValueError`."""
    if re.fullmatch(r"(\d+[dhms])+", text):
        units = {"d": 86400, "h": 3600, "m": 60, "s": 1}
        seconds = sum(int(number) * units[unit] for number, unit in re.findall(r"(\d+)([dhms])", text))
    elif match := re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text):
        days, *parts = (int(group) if group is not None else None for group in match.groups())
        given = [part for part in parts if part is not None]
        scale = [3600, 60, 1] if days is not None or len(given) == 3 else [60, 1]
        seconds = (days or 0) * 86400 + sum(n * unit for n, unit in zip(given, scale, strict=False))
    else:
        raise ValueError(f'{text!r} is no time: write 4h, 1d12h or 90m, or as SLURM does "4:00:00", "1-12", "90"')
    if not seconds:
        raise ValueError(f"{text!r} is no time at all")
    return -(-seconds // 60)


def _path(folder: Path) -> str:
    return str(folder).replace("%", "%%")


def _word(text: str) -> str:
    """As sbatch reads its lines: quotes hold words together."""
    return f'"{text}"' if re.search(r"[\s#'\\]", text) else text
