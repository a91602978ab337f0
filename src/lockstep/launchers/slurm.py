"""SLURM: writes an sbatch file that a person can read and submit again, checks it, submits it and follows the job.

In: `launch: {name: slurm, machines: N, processes: P, ...}` on a machine with `sbatch`; it needs no torch. Out: a job
whose tasks run `lockstep train OUTPUT/run.yaml`, and the exit status of the training; with `--detach`, 0 as soon as the
job is queued. A job that stops on request (status 75: signalled before its time limit, or preempted) is requeued and
resumes from its checkpoint. `status`, `logs` and `stop` query SLURM from any machine of the cluster.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from lockstep._version import __version__
from lockstep.config.errors import FAILED, STOPPED, InvalidValue
from lockstep.config.run import Run, RunError
from lockstep.config.sections import LaunchSection, Positive, Section
from lockstep.distributed import job_record, network
from lockstep.distributed.job_record import JobRecord, State
from lockstep.launchers.launcher import LaunchPlan, SubmittedJob, write_files
from lockstep.launchers.processes import srun
from lockstep.launchers.processes.srun import SlurmTask
from lockstep.track.console import Console
from lockstep_trace.coded import quantity

_POLL_S = 3.0  # polling interval of SLURM
_MORE_S = 120.0  # timeout for a missing node, if the job can run without it
_LIVE = ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING")
_WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD")


class Slurm(SubmittedJob):
    """Launcher for a SLURM cluster with a shared file system."""

    submits_arrays = True
    takes_srun = True

    class Options(Section):
        """Options of the SLURM job."""

        machines: Positive = Field(1, description="nodes")
        ranks: Literal["srun", "elastic"] = Field(
            "srun",
            description="what starts a node's ranks: srun, one task per rank; or torch elastic, one task per node",
        )
        partition: str | None = Field(None, description="partition; default: the cluster's")
        account: str | None = Field(None, description="account that is charged")
        qos: str | None = Field(None, description="quality of service")
        constraint: str | None = Field(None, description="required features of the nodes")
        time: str | None = Field(None, description="limit, 4h or 1d12h; or SLURM's own form, in quotes")
        signal_before: str = Field("2m", description="time before the limit at which the ranks are told to save")
        gpus: int = Field(0, ge=0, description="GPUs per node")
        cpus: Positive | None = Field(None, description="cores per process")
        memory: str | None = Field(None, pattern=r"^\d+[KMGT]?$", description="memory per node, for example 64G")
        requeue: bool = Field(True, description="requeue the job after the warning, a preemption or a node failure")
        setup: list[str] = Field(
            default_factory=list, description="shell lines before the ranks start: module load ..."
        )
        extra: list[str] = Field(
            default_factory=list, description="further options of sbatch, written out: --mail-type=END"
        )
        python: str | None = Field(None, description="the nodes' Python; default: this one")
        detach: bool = Field(False, description="return as soon as the job is queued (also: --detach)")

        @field_validator("time", "signal_before", mode="before")
        @classmethod
        def _a_time(cls, value: Any) -> Any:
            if isinstance(value, int):
                raise InvalidValue(
                    "LS7380",
                    f'invalid value {value}; expected a time such as 4h, or "4:00:00" in quotes (YAML reads '
                    "4:00:00 as 14400)",
                )
            if isinstance(value, str):
                minutes_of(value)
            return value

        @field_validator("partition", "account", "qos", "constraint", "python")
        @classmethod
        def _one_word(cls, value: str | None) -> str | None:
            if value is not None and not re.fullmatch(r"[^\s\"']+", value):
                raise InvalidValue("LS7381", f"invalid value {value!r}; expected a single word")
            return value

        @field_validator("extra", "setup")
        @classmethod
        def _lines(cls, value: list[str], info: Any) -> list[str]:
            option = info.field_name == "extra"
            for line in value:
                if "\n" in line or (option and not line.startswith("-")):
                    expected = "an option such as --mail-type=END" if option else "a single line"
                    raise InvalidValue("LS7382", f"invalid value {line!r}; expected {expected}")
            return value

    def plan(self, run: Run) -> LaunchPlan:
        file = _absolute(run.folder) / FILE
        job = self._job(run, [str(_absolute(run.folder) / "run.yaml")])
        ranks = job.nodes * job.tasks * job.processes
        notes = [f"submitted with sbatch; the ranks' output is in {run.folder}/slurm-JOB.out"]
        if not job.minutes:
            notes.append(
                "launch.time is not set, so the ranks get no warning before the partition's limit ends the job"
            )
        if run.launch.threads == "auto":
            notes.append(
                "each process uses as many threads as its task has cores; set launch.threads to compare "
                "bits with other machines"
            )
        return LaunchPlan(run, ranks, ["sbatch", "--parsable", str(file)], files={str(file): text_of(job)}, notes=notes)

    def check(self, plan: LaunchPlan) -> None:
        check(plan)

    def memory(self, plan: LaunchPlan) -> float | None:
        options = self.options(plan.launch)
        if options.memory is None or options.gpus:  # GPU memory of the nodes is not known here
            return None
        number, unit = re.fullmatch(r"(\d+)([KMGT]?)", options.memory).groups()  # type: ignore[union-attr]
        return int(number) * 1024.0 ** ("KMGT".index(unit or "M") + 1) * options.machines / plan.processes

    def submit(self, plan: LaunchPlan) -> JobRecord:
        return job_record.here("slurm", plan.processes, submit(plan))

    def label(self, record: JobRecord) -> str:
        return f"job {record.job}"

    def waits(self, launch: LaunchSection) -> bool:
        return not self.options(launch).detach

    # -- looking after a job -----------------------------------------------------------------------------------------

    def state(self, folder: Path, record: JobRecord) -> State:
        return state_of(record)

    def logs(self, folder: Path, record: JobRecord, follow: bool) -> Iterator[str]:
        return job_record.lines_of(log_of(folder, record), follow, _slowly(lambda: self.state(folder, record).live))

    def stop(self, folder: Path, record: JobRecord) -> str:
        job = str(record.job)
        if self.state(folder, record).word == "waiting":
            _ask("scancel", job)
            return f"job {job} is cancelled; it was still queued"
        if "step" in record.facts:
            _ask("scancel", "--signal=TERM", record.facts["step"])
            return f"SIGTERM sent to the ranks of step {record.facts['step']}"
        _ask("scontrol", "update", f"JobId={job}", "Requeue=0")  # otherwise its script would requeue it
        _ask("scancel", "--signal=TERM", job)
        return f"SIGTERM sent to the ranks of job {job}, and its requeueing is disabled"

    def watch(self, plan: LaunchPlan, record: JobRecord) -> int:
        """Print the job's log and state changes until it ends, and return the exit status."""
        last, console = [State("unknown")], Console(True)

        def live() -> bool:
            now = self.state(plan.folder, record)
            if (now.word, now.text) != (last[0].word, last[0].text):
                console.say(f"job {record.job}: {now.word}{f', {now.text}' if now.text else ''}")
            last[0] = now
            return now.live

        try:
            for line in job_record.lines_of(log_of(plan.folder, record), True, _slowly(live)):
                console.say(line)
        except KeyboardInterrupt:
            where = shlex.quote(str(plan.folder))
            console.say(
                f"the job keeps running: lockstep logs --follow {where} shows its log, lockstep stop {where} ends it"
            )
            return 130
        if last[0].status is not None:
            return last[0].status
        return STOPPED if last[0].word == "stopped" else FAILED

    # -- the file ----------------------------------------------------------------------------------------------------

    def _job(self, run: Run, files: Sequence[str]) -> BatchJob:
        """Return the batch job of one run. Errors: `RunError`."""
        options = self.options(run.launch)
        processes = processes_of(run.launch, options, run.strategy.alone)
        world = options.machines * processes
        run.check_shared(
            world, f"launch.machines: {quantity(options.machines, 'machine')} of {quantity(processes, 'process')}"
        )
        minutes = minutes_of(options.time) if options.time else None
        warn = 60 * minutes_of(options.signal_before)
        if minutes and warn >= 60 * minutes:
            raise RunError(
                "LS7384",
                f"launch.signal_before: {options.signal_before} must be shorter than launch.time ({options.time})",
            )
        elastic = options.ranks == "elastic"
        return BatchJob(
            name=run.name,
            nodes=options.machines,
            tasks=1 if elastic else processes,
            processes=processes if elastic else 1,
            folder=_absolute(run.folder),
            command=[options.python or sys.executable, "-m", "lockstep", "train", *files],
            here=Path.cwd(),
            cpus=options.cpus,
            gpus=options.gpus,
            minutes=minutes,
            warn_s=warn,
            restarts=0 if elastic else run.launch.max_restarts,
            requeue=options.requeue,
            no_kill=_outlives_nodes(run.launch) and options.machines > 1,
            options={
                "partition": options.partition,
                "account": options.account,
                "qos": options.qos,
                "constraint": options.constraint,
                "mem": options.memory,
            },
            extra=options.extra,
            setup=options.setup,
        )


def array_plan(run: Run, runs: Sequence[Path], folder: Path, at_most: int | None = None) -> LaunchPlan:
    """Return the plan of an array job over resolved run files, such as the trials of a sweep.

    Each array task trains one run with the options in `run.launch` (slurm), and is requeued and resumed independently.
    `submit` submits the plan; task i is job `ID_i`.

    `folder`: folder of the sbatch file and the logs. `at_most`: most array tasks at a time. Errors: `RunError`.
    """
    if not runs:
        raise RunError("LS7385", "an array job needs at least one run file")
    job = replace(
        Slurm()._job(run, ["$run"]), folder=_absolute(folder), array=[_absolute(p) for p in runs], at_most=at_most
    )
    file = str(_absolute(folder) / FILE)
    ranks = job.nodes * job.tasks * job.processes
    return LaunchPlan(
        run, ranks, ["sbatch", "--parsable", file], files={file: text_of(job)}, notes=[f"{len(runs)} runs"]
    )


def check(plan: LaunchPlan) -> None:
    """Validate the plan's file with `sbatch --test-only`. Errors: `RunError` with SLURM's message."""
    if shutil.which("sbatch") is None:
        raise RunError(
            "LS7386",
            "launch.name: slurm needs the program sbatch, which is not on this machine's PATH; run this on a login "
            "node of the cluster, or use launch.name=local",
        )
    text = plan.files[plan.command[-1]]
    tested = subprocess.run(
        ["sbatch", "--test-only"], input=text, capture_output=True, encoding="utf-8", errors="replace", check=False
    )
    if tested.returncode:
        raise RunError("LS7387", f"launch: SLURM rejected the job, and nothing was queued: {_words(tested.stderr)}")


def submit(plan: LaunchPlan) -> str:
    """Check the plan, write its files, queue the job, and return its id. Errors: `RunError`; then nothing is queued."""
    check(plan)
    write_files(plan)
    # the job's tasks inherit sbatch's environment
    os.environ.setdefault(network.SECRET_VARIABLE, network.secret_or_new())
    return _ask(*plan.command).strip().partition(";")[0]


def processes_of(launch: LaunchSection, options: Any, alone: bool) -> int:
    """Return the number of processes per node. `alone`: the strategy runs one process. Errors: `RunError` if no key
    determines it."""
    places = options.gpus * launch.processes_per_gpu
    if launch.processes != "auto":
        if places and launch.device != "cpu" and int(launch.processes) > places:
            raise RunError(
                "LS7389",
                f"launch.processes: {launch.processes} per node, but launch.gpus is {options.gpus} per node; "
                "raise launch.gpus, or set launch.device=cpu, or launch.processes_per_gpu for processes that "
                "share one",
            )
        return int(launch.processes)
    if alone:
        return 1
    if not options.gpus:
        raise RunError(
            "LS7390",
            "launch.gpus is not set, so the number of processes per node is unknown: set launch.processes to it, or "
            "launch.gpus to the GPUs per node",
        )
    return int(places)


def agent_of(run: Run, task: SlurmTask) -> int:
    """Run as the torch elastic agent of one node, with the rendezvous of the `torchrun` launcher. Returns the exit
    status, the same on every node."""
    from lockstep.launchers.local import prestart
    from lockstep.launchers.torchrun import Torchrun

    common: dict[str, Any] = {name: getattr(run.launch, name) for name in LaunchSection.model_fields}
    common |= {"name": "torchrun", "processes": processes_of(run.launch, Slurm.options(run.launch), run.strategy.alone)}
    where: dict[str, Any] = {"machines": task.size, "rendezvous": f"{task.host}:{task.port}", "node_rank": task.rank}
    if _outlives_nodes(run.launch) and task.size > 1:
        where |= {"machines": f"1:{task.size}", "last_call_timeout_s": _MORE_S}
    inner = run.model_copy(update={"launch": LaunchSection(**common, **where)})
    prestart(inner.launch, common["processes"], Torchrun.meets_on_loopback(inner.launch))
    if task.rank:  # node 0 opens the port
        network.reach(task.host, task.port, run.launch.timeout_s, Console(True).say)
    status = Torchrun().start(Torchrun().plan(inner))
    if path := os.environ.get(STATUS):  # if the job survives node failures
        if task.rank == 0:
            Path(path).write_text(str(status), encoding="utf-8")
        elif status == FAILED:
            srun.see_to_script(task, Path(path), Slurm.options(run.launch).requeue, Console(True).say)
    return status


def _outlives_nodes(launch: LaunchSection) -> bool:
    """Return whether a job continues after a node failure."""
    elastic = Slurm.options(launch).ranks == "elastic"
    return elastic and launch.on_rank_failure == "continue" and launch.max_restarts > 0


def log_of(folder: Path, record: JobRecord) -> Path:
    """Return the log file of a job's ranks. Errors: `RunError`."""
    if "log" in record.facts:
        path = Path(record.facts["log"])  # an array task logs next to the folders of the runs
        if not re.fullmatch(r"slurm-\d+_\d+\.out", path.name):
            raise RunError("LS7391", f"{job_record.FILE}: {path} is not the log of an array task, so it is not read")
        return job_record.inside(path, folder.absolute().parent)
    log_path = folder / f"slurm-{record.job}.out"
    return job_record.inside(log_path if "step" not in record.facts else folder / "log.txt", folder)


def state_of(record: JobRecord) -> State:
    """Return the state of a job from SLURM, or else from the status that rank 0 recorded."""
    if record.facts.get("step") and record.status is not None:
        return job_record.outcome(record.status)
    if shutil.which("scontrol") is None:
        return State("unknown", "this machine has no scontrol, so SLURM cannot be queried")
    facts = _facts(str(record.job))
    if facts is None:
        return _remembered(record)
    word, reason = facts["JobState"], facts.get("Reason", "None")
    restarts = f", restarted {quantity(facts['Restarts'], 'time')}" if facts.get("Restarts", "0") != "0" else ""
    if word in _WAITING:
        return State("waiting", f"{word.lower()} ({reason}){restarts}")
    if word in _LIVE:
        return State("running", f"{word.lower()} on {facts.get('NodeList', '?')}{restarts}")
    return _ended(word, facts.get("ExitCode", ""), restarts, record)


def _ended(word: str, code: str, more: str, record: JobRecord) -> State:
    status, _, number = code.partition(":")
    if word == "CANCELLED":
        return State("stopped", f"cancelled{more}", record.status)
    if word in ("COMPLETED", "FAILED") and status.isdecimal():
        killed = f"ended by signal {number}{more}" if number not in ("", "0") else more.removeprefix(", ")
        return job_record.outcome(int(status) or (0 if word == "COMPLETED" else 1), killed)
    return State("failed", f"{word.lower().replace('_', ' ')}{more}")


def _facts(job: str) -> Mapping[str, str] | None:
    """Parse `scontrol show job`; None if SLURM no longer lists the job. Errors: `RunError` if SLURM does not answer."""
    reply = subprocess.run(
        ["scontrol", "-o", "show", "job", job], capture_output=True, encoding="utf-8", errors="replace", check=False
    )
    if reply.returncode == 0 and "JobState=" in reply.stdout:
        return dict(re.findall(r"(\w+)=(\S*)", reply.stdout.splitlines()[0]))
    if "Invalid job id" in reply.stderr + reply.stdout:
        return None
    raise RunError("LS7392", f"SLURM did not answer a query about job {job}: {_words(reply.stderr)}")


def _remembered(record: JobRecord) -> State:
    """Return the state of a job that the SLURM controller no longer lists: from sacct if available, else from
    launch.json."""
    if shutil.which("sacct"):
        words = ["sacct", "-X", "-n", "-P", "-j", str(record.job), "-o", "State,ExitCode"]
        reply = subprocess.run(words, capture_output=True, encoding="utf-8", errors="replace", check=False)
        if reply.returncode == 0 and reply.stdout.strip():
            word, _, code = reply.stdout.splitlines()[-1].partition("|")
            return _ended(word.split()[0], code, "", record)
    if record.status is not None:
        return job_record.outcome(record.status, f"SLURM no longer lists job {record.job}")
    return State("gone", f"SLURM no longer lists job {record.job}, and its ranks left no exit status")


def _ask(*words: str) -> str:
    """Run a SLURM program and return its output. Errors: `RunError` with its message."""
    try:
        done = subprocess.run(words, capture_output=True, encoding="utf-8", errors="replace", check=False)
    except OSError as error:
        raise RunError("LS7393", f"{words[0]} cannot be run here: {error.strerror}") from None
    if done.returncode:
        raise RunError("LS7394", f"{shlex.join(words)}: {_words(done.stderr)}")
    return done.stdout


def _slowly(live: Any) -> Any:
    """Wrap a query so that it runs at most once in `_POLL_S` seconds and otherwise returns its last answer."""
    answer, asked_at = True, -_POLL_S

    def ask() -> bool:
        nonlocal answer, asked_at
        if time.monotonic() - asked_at >= _POLL_S:
            answer, asked_at = live(), time.monotonic()
        return answer

    return ask


def _words(text: str) -> str:
    lines = [re.sub(r"^\w+: (error: )?", "", line).strip() for line in text.splitlines() if line.strip()]
    return "; ".join(lines) or "no message"


def _absolute(path: Path) -> Path:
    return Path.cwd() / path


@dataclass(frozen=True)
class BatchJob:
    """Content of an sbatch file."""

    name: str
    nodes: int
    tasks: int  # per node
    processes: int  # per task: 1, or the ranks that an elastic agent starts
    folder: Path  # for the logs and the sbatch file
    command: Sequence[str]  # of one task; in an array, `$run` is the run file
    here: Path  # working directory, for relative paths in the run file
    cpus: int | None = None  # per process
    gpus: int = 0  # per node
    minutes: int | None = None  # time limit
    warn_s: int = 120  # seconds before the limit at which ranks are signalled
    restarts: int = 0  # in the same allocation, after a failure
    requeue: bool = True
    no_kill: bool = False  # a failed node does not end the others
    options: dict[str, str | None] = field(default_factory=dict)  # options of sbatch: long name -> value
    extra: Sequence[str] = ()  # further options of sbatch, complete
    setup: Sequence[str] = ()  # shell lines before the ranks start
    array: Sequence[Path] = ()  # run files, one per array task
    at_most: int | None = None  # array tasks at a time


def text_of(job: BatchJob) -> str:
    """Return the text of the sbatch file. Errors: `RunError` for a folder name with unprintable characters."""
    for path in (job.folder, job.here, *job.array):
        if not str(path).isprintable():
            raise RunError(
                "LS7395",
                f"output: the folder {str(path)!r} contains a character that an sbatch file cannot contain; "
                "choose another output",
            )
    return "\n".join([*_head(job), "", *_before(job), "", *_ranks(job), "", *_after(job)]) + "\n"


def _head(job: BatchJob) -> list[str]:
    at_most = f"%{job.at_most}" if job.at_most else ""
    options: dict[str, object] = {
        "job-name": job.name,
        "nodes": job.nodes,
        "ntasks-per-node": job.tasks,
        "cpus-per-task": job.cpus and job.cpus * job.processes,
        "gpus-per-node": job.gpus or None,
        **job.options,
        "time": slurm_time(job.minutes) if job.minutes else None,
        "signal": f"TERM@{job.warn_s}" if job.minutes else None,
        "array": f"0-{len(job.array) - 1}{at_most}" if job.array else None,
        "output": _path(job.folder) + ("/slurm-%A_%a.out" if job.array else "/slurm-%j.out"),
        "chdir": str(job.here),
        "open-mode": "append",
    }
    ranks = job.nodes * job.tasks * job.processes
    what = quantity(ranks, "process")
    if job.array:
        what = f"{quantity(len(job.array), 'run')} of {what} each"
    again = f"sbatch {shlex.quote(str(job.folder / FILE))}"
    lines = [f"# {what}. Written by lockstep {__version__}; to submit it again by hand: {again}"]
    lines += [f"#SBATCH --{name}={_word(str(value))}" for name, value in options.items() if value is not None]
    lines += ["#SBATCH --requeue" if job.requeue else "#SBATCH --no-requeue"]
    lines += ["#SBATCH --no-kill"] if job.no_kill else []
    return ["#!/bin/bash", *lines, *(f"#SBATCH {option}" for option in job.extra)]


FILE = "job.sbatch"
STATUS = "LOCKSTEP_SLURM_STATUS"  # path of the file for the first task's exit status


def _before(job: BatchJob) -> list[str]:
    lines = ["export LOCKSTEP_LAUNCHER=slurm LOCKSTEP_JOB_ID=$SLURM_JOB_ID PYTHONUNBUFFERED=1", *job.setup]
    if job.no_kill:
        lines.append(f'export {STATUS}={shlex.quote(str(job.folder))}"/slurm-$SLURM_JOB_ID.status"')
    if job.array:
        folder = shlex.quote(f"log={job.folder}")  # no shell expansion in the folder's name
        lines.append(f'export LOCKSTEP_FACT={folder}"/slurm-${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID.out"')
        runs = [f"  {shlex.quote(str(path))}" for path in job.array]
        lines += ["runs=(", *runs, ")", "run=${runs[$SLURM_ARRAY_TASK_ID]}"]
    return lines


def _ranks(job: BatchJob) -> list[str]:
    srun = ["srun", "--kill-on-bad-exit=0"]  # the first rank to finish must not end the others
    if job.no_kill:
        srun.append("--no-kill")
    if job.cpus:
        srun.append(f"--cpus-per-task={job.cpus * job.processes}")  # srun does not inherit it from sbatch
    line = shlex.join([*srun, *job.command]).replace("'$run'", '"$run"')
    lines = ["trap : TERM  # a signal that ends the ranks must not end this script before it has read their status"]
    if job.no_kill:  # srun reports a failed node as a failure even if the job succeeds
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
        '  echo "lockstep: the ranks ended with status $status, restarts left: $restarts_left"',
        "done",
    ]


def _after(job: BatchJob) -> list[str]:
    if not job.requeue:
        return ["exit $status"]
    return [
        "# 75: stopped before the end, with a checkpoint; 143: stopped while still starting. Requeue the job,",
        "# unless it is being cancelled, or `lockstep stop` has disabled requeueing.",
        'if [[ $status =~ ^(75|143)$ ]] && [ "$(squeue -h -j $SLURM_JOB_ID -o %T)" = RUNNING ]; then',
        "  scontrol requeue $SLURM_JOB_ID && sleep 60  # SLURM ends this script",
        "fi",
        "exit $status",
    ]


def slurm_time(minutes: int) -> str:
    """Format minutes for SLURM, as in `1-02:30:00`."""
    days, rest = divmod(minutes, 24 * 60)
    return f"{f'{days}-' if days else ''}{rest // 60:02d}:{rest % 60:02d}:00"


def minutes_of(text: str) -> int:
    """Parse a time into minutes, rounded up: `4h`, `1d12h`, or SLURM's `M`, `M:S`, `H:M:S`, `D-H`, `D-H:M`, `D-H:M:S`.
    Errors: `ValueError`."""
    if re.fullmatch(r"(\d+[dhms])+", text):
        units = {"d": 86400, "h": 3600, "m": 60, "s": 1}
        seconds = sum(int(number) * units[unit] for number, unit in re.findall(r"(\d+)([dhms])", text))
    elif match := re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text):
        days, *parts = (int(group) if group is not None else None for group in match.groups())
        numbers = [part for part in parts if part is not None]
        scale = [3600, 60, 1] if days is not None or len(numbers) == 3 else [60, 1]
        seconds = (days or 0) * 86400 + sum(n * unit for n, unit in zip(numbers, scale, strict=False))
    else:
        raise InvalidValue(
            "LS7396", f'{text!r} is not a time; expected 4h, 1d12h or 90m, or SLURM\'s form "4:00:00", "1-12" or "90"'
        )
    if not seconds:
        raise InvalidValue("LS7397", f"{text!r} is a time of zero; expected more than 0")
    return -(-seconds // 60)


def _path(folder: Path) -> str:
    return str(folder).replace("%", "%%")


def _word(text: str) -> str:
    """Quote a text for an #SBATCH line, if necessary."""
    return f'"{text}"' if re.search(r"[\s#'\\]", text) else text
