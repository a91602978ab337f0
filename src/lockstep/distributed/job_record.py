"""The job record in OUTPUT: `launch.json`, and one `excluded-HOST.json` per evicted machine.

In: the launcher, scheduler id, host and pid of the launching process; the pid and the total of steps from rank 0; the
exit status at the end; the evicted host and the step in which it computed wrong values. Out: launch.json, replaced
atomically, which `status`, `logs` and `stop` read; excluded-HOST.json, which makes later starts on that host end until
a person deletes it. Neither holds secrets, and training needs neither. Does not import torch.
"""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from lockstep.config.errors import DONE, STOPPED
from lockstep.config.output_files import open_file, replace_text
from lockstep.config.run import RunError
from lockstep.distributed import hardware
from lockstep_trace.coded import quantity

FILE = "launch.json"
# The job of the ranks: dotted name of a function of (run, world), and further arguments.
TRAIN = ("lockstep.training.train_job.train_job",)
# Variables for ranks that another program starts for a launcher: their total number; a file for the exit status of a
# machine's first rank, if that program only reports its own; the ranks' job, if it is not `TRAIN`.
PLANNED_SIZE, STATUS, JOB_WORDS = "LOCKSTEP_WORLD_SIZE", "LOCKSTEP_STATUS_FILE", "LOCKSTEP_JOB"
RESOLVED = "LOCKSTEP_RESOLVED_JOB"  # file with the launching process's resolved decisions
TORCHRUN_ENV = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
INTRODUCED = "LOCKSTEP_INTRODUCED"  # set for ranks if the terminal already shows the run's opening lines
# Set for ranks by a launcher that wrote launch.json itself; ranks without it were started by hand (torchrun,
# accelerate launch, srun), and rank 0 writes the file.
VARIABLE = "LOCKSTEP_LAUNCHER"
MEMBER = "LOCKSTEP_MEMBER"  # set by a launcher with a roster: the `MemberAddress` as JSON
JOB = "LOCKSTEP_JOB_ID"  # with it, the job's id, if it is known only once the job runs
FACT = "LOCKSTEP_FACT"  # and one of the launcher's facts, as name=value

_ASIDE = re.compile(r"\..+\.(?P<host>[^/]+)-(?P<pid>\d+)\.partial")  # names from `aside_of`
# Hint for users whose run was killed for memory.
LESS_MEMORY = "Use more micro_batches, a smaller batch_size or data.max_length, or fewer processes"
_NAME = re.compile(r"[A-Za-z0-9][\w.:@/\[\]%+,-]*")  # scheduler ids, namespaces, regions, steps: never like an option

Word = Literal["waiting", "running", "done", "stopped", "failed", "gone", "unknown"]


@dataclass(frozen=True)
class Process:
    """A process, distinguishable from a later one with the same pid."""

    host: str
    pid: int
    born: str  # its start time, as the system formats it

    @classmethod
    def this(cls) -> Process:
        return cls(socket.gethostname(), os.getpid(), born(os.getpid()) or "")

    def alive(self) -> bool | None:
        """Whether the process runs; None if it is on another host."""
        if self.host != socket.gethostname():
            return None
        return self.born != "" and born(self.pid) == self.born


@dataclass(frozen=True)
class JobRecord:
    """One launch of a run."""

    launcher: str  # its name in the run file; "": ranks started by hand
    processes: int  # in all
    began: float  # seconds since 1970
    process: Process  # `lockstep train`, or rank 0 if started by hand
    job: str | None = None  # the scheduler's or service's id
    facts: Mapping[str, str] = field(default_factory=dict)  # for the launcher to find the job again
    main: Process | None = None  # rank 0, once it runs
    steps: int | None = None  # of the whole run, set by rank 0
    reached: int | None = None  # updates done when training ended; metrics.jsonl may be shorter if the disk was full
    kills: tuple[int, int] | None = None  # OOM kill counters at the start: of its cgroup, of the machine
    cgroup: str = ""  # at the start
    ended: float | None = None
    status: int | None = None  # exit status, once known
    rescued: str | None = None  # export written to another folder because OUTPUT could not be written


@dataclass(frozen=True)
class State:
    """The current state of a launched run."""

    word: Word
    text: str = ""  # details for the user: why it waits, where it runs
    status: int | None = None  # exit status, if known

    @property
    def live(self) -> bool:
        """Whether this state may still change."""
        return self.word in ("waiting", "running")


def here(launcher: str, processes: int, job: str | None = None, facts: Mapping[str, str] | None = None) -> JobRecord:
    """Return a record of a launch from this process, now."""
    kills = hardware.kills()
    return JobRecord(
        launcher, processes, time.time(), Process.this(), job, facts or {}, kills=kills, cgroup=hardware.cgroup()
    )


def write(folder: Path, launched: JobRecord) -> bool:
    """Write OUTPUT/launch.json atomically, or in place if the disk is full, which needs no room. Returns whether it was
    written; raises no error, because other users of the folder report it."""
    if launched.rescued is None and (before := read(folder)) is not None:
        launched = replace(launched, rescued=before.rescued)  # of an earlier launch of the same run
    text = json.dumps(asdict(launched), indent=1) + "\n"
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        with suppress(OSError):
            sweep_up(folder)
        try:
            replace_text(folder / FILE, text)
        except OSError as caught:
            if caught.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            with open_file(folder / FILE, "r+b", buffering=0) as file:  # smaller than any disk's block
                file.truncate(file.write(text.encode()))
        return True
    return False


def sweep_up(folder: Path) -> None:
    """Remove temporary files left by dead processes of this host. Errors: `OSError`."""
    for path in folder.glob(".*.partial"):
        match = _ASIDE.fullmatch(path.name)
        if match and match["host"] == socket.gethostname() and born(int(match["pid"])) is None:
            path.unlink(missing_ok=True)


def read(folder: Path) -> JobRecord | None:
    """Return the last launch of a run, or None without a readable record."""
    try:
        values: dict[str, Any] = json.loads((folder / FILE).read_text(encoding="utf-8"))
        known = {f.name for f in fields(JobRecord)}
        values = {name: value for name, value in values.items() if name in known}
        for name in ("process", "main"):
            values[name] = Process(**values[name]) if values.get(name) else None
        kills = values.get("kills")
        values["kills"] = None if kills is None else (int(kills[0]), int(kills[1]))
        record = JobRecord(**values)
        names = [record.job, *(value for name, value in record.facts.items() if name != "log")]
        if not all(not name or _NAME.fullmatch(name) for name in names):
            return None
        return record if _well_typed(record) else None
    except (OSError, ValueError, TypeError, AttributeError, LookupError, RecursionError):
        return None


def _well_typed(record: JobRecord) -> bool:
    """Return whether the fields that commands show have their types, so that a damaged record is an unreadable one."""
    numbers = (record.steps, record.reached, record.status, record.ended)
    most = 1e11  # of seconds: a year that a calendar has; more than any count
    return (
        isinstance(record.launcher, str)
        and isinstance(record.processes, int)
        and abs(record.processes) < most
        and isinstance(record.began, int | float)
        and abs(record.began) < most
        and isinstance(record.process, Process)
        and isinstance(record.process.pid, int)
        and isinstance(record.cgroup, str)
        and isinstance(record.rescued, str | None)
        and all(n is None or (isinstance(n, int | float) and abs(n) < most) for n in numbers)
    )


def stranger(folder: Path) -> int | None:
    """Return the owner of OUTPUT/launch.json or its lock if it is another user, else None: those files name a process
    to signal."""
    for name in (FILE, ".lock"):
        with suppress(OSError):
            owner = (folder / name).stat().st_uid
            if hasattr(os, "geteuid") and owner != os.geteuid():
                return owner
    return None


def inside(path: Path, folder: Path) -> Path:
    """Return the path if it resolves to a place below the folder. Errors: `RunError`, because a link in another user's
    OUTPUT, or a path in its files, may lead anywhere."""
    if not path.resolve().is_relative_to(folder.resolve()):
        raise RunError("LS7000", f"{path} is outside of {folder}, so it is not read")
    return path


def note(folder: Path, **changes: Any) -> bool:
    """Change fields of OUTPUT/launch.json, if it exists. Returns whether it is up to date or does not exist."""
    launched = read(folder)
    return launched is None or write(folder, replace(launched, **changes))


def arrived(folder: Path, processes: int, steps: int) -> None:
    """Record that rank 0 runs, and the number of steps. A job that was resubmitted or requeued gets a new record."""
    record, job = read(folder), os.environ.get(JOB)
    name, equals, value = os.environ.get(FACT, "").partition("=")
    facts = {name: value} if equals else {}
    if record is None or record.status is not None or (job is not None and (job, facts) != (record.job, record.facts)):
        record = here(os.environ.get(VARIABLE, ""), processes, job, facts)
    write(folder, replace(record, main=Process.this(), steps=steps))


def restarts_left() -> bool:
    """Whether torch elastic restarts this job if this rank fails."""
    count, most = (int(os.environ.get(f"TORCHELASTIC_{name}", 0)) for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    return count < most


def outcome(status: int | None, text: str = "") -> State:
    """Return the state of a run that ended with this exit status."""
    if status is None:
        return State("gone", text)
    words: dict[int, Word] = {DONE: "done", STOPPED: "stopped"}
    return State(words.get(status, "failed"), text, status)


# -- a launch whose processes are on this machine, or began on it ----------------------------------------------------


def state_of_process(launched: JobRecord) -> State:
    """Return the state of a job without a scheduler, from the processes visible on this host and the exit status
    written by the launcher and rank 0."""
    if launched.status is not None:
        return outcome(launched.status)
    process = launched.process
    who = f"process {process.pid} on {process.host}"
    alive = process.alive()
    if alive is None:
        return State("unknown", f"{who} cannot be seen from {socket.gethostname()}; run the command there")
    if alive:
        return State("running", who)
    why = evidence_of_end(launched) or "it was killed, or the machine was"
    return State("gone", f"{who} has ended without an exit status: {why}")


def recorded_loss(launched: JobRecord) -> str | None:
    """Explain what ended a launch on this host that left no exit status, if this machine's kernel records it; else
    None, also if a user killed it, who knows the cause."""
    if launched.job is not None or state_of_process(launched).word != "gone":
        return None
    return evidence_of_end(launched)


def evidence_of_end(launched: JobRecord) -> str | None:
    """Explain why a launch left no exit status, from what this machine's kernel records; None if it records nothing."""
    boot, now = launched.process.born.partition("/")[0], (born(os.getpid()) or "").partition("/")[0]
    if boot and now and boot != now:
        return "the machine has been restarted since"
    for name, process in (("it", launched.process), ("rank 0", launched.main)):
        if process is not None and hardware.killed_since(process.pid, launched.began):
            return f"the kernel killed {name} because memory ran out. {LESS_MEMORY}"
    if launched.kills is not None:
        inside, machine = (now - then for now, then in zip(hardware.kills(), launched.kills, strict=True))
        killed = "because memory ran out"
        if inside > 0 and launched.cgroup == hardware.cgroup():
            return (
                f"since it began the kernel killed {quantity(inside, 'process')} of its cgroup {killed}. {LESS_MEMORY}"
            )
        if machine > 0:
            return (
                f"it was killed, or the machine was. Since it began the kernel killed "
                f"{quantity(machine, 'process')} of this "
                f"machine {killed}; if it was one of them: {LESS_MEMORY[0].lower()}{LESS_MEMORY[1:]}"
            )
    return None


def stop_process(launched: JobRecord) -> str:
    """Send SIGTERM to the launching process, which stops all ranks after their step, with a checkpoint and status 75.
    Returns a message. Errors: `RunError` if it cannot be reached."""
    process = launched.process
    alive = process.alive()
    if alive is None:
        raise RunError(
            "LS7001",
            f"the run was launched on {process.host}, and this machine is {socket.gethostname()}; run the "
            "command there",
        )
    if not alive:
        raise RunError("LS7002", f"process {process.pid} no longer exists; there is nothing to stop")
    try:
        os.kill(process.pid, signal.SIGTERM)
    except PermissionError:
        raise RunError("LS7003", f"process {process.pid} belongs to another user; only that user can stop it") from None
    return f"SIGTERM sent to process {process.pid}"


def lines_of(path: Path, follow: bool, live: Any = lambda: True, every_s: float = 0.3) -> Iterator[str]:
    """Yield the lines of a log file without line ends. `follow`: keep yielding new lines while `live()`, then a last
    incomplete line. A file that is replaced or truncated is read from its start."""
    place, rest, last = 0, "", False
    while True:
        with suppress(FileNotFoundError), open(path, encoding="utf-8", errors="replace", newline="") as file:
            if os.fstat(file.fileno()).st_size < place:
                place, rest = 0, ""
            file.seek(place)
            text = file.read()
            place = file.tell()
            *whole, rest = (rest + text).split("\n")
            yield from whole
        if not follow or last:
            break
        last = not live()  # read once more for the last lines
        if not last:
            time.sleep(every_s)
    if rest:
        yield rest


def born(pid: int) -> str | None:
    """Return the start time of a process, or None if it does not exist or is a zombie."""
    try:
        state, *fields_of = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return None if state in "ZX" else f"{boot}/{fields_of[18]}"
    except OSError:
        if Path("/proc/self/stat").exists():
            return None
    try:  # no /proc: macOS, BSD
        done = subprocess.run(
            ["ps", "-o", "lstart=", "-p", str(pid)],
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            check=False,
        )
    except OSError:
        return None
    return done.stdout.strip() or None


@dataclass(frozen=True)
class Excluded:
    """An evicted machine."""

    host: str
    step: int  # the step with wrong values, from 1
    time: float  # seconds since 1970

    def __str__(self) -> str:
        return f"{self.host}, which computed wrong values in step {self.step} (sdc_check)"


def eviction_file(host: str) -> str:
    return f"excluded-{host}.json"


def note_eviction(folder: Path, host: str, step: int) -> None:
    """Record an eviction; several ranks may do so. Ignores write errors, which other users of the folder report."""
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        replace_text(
            folder / eviction_file(host), json.dumps(asdict(Excluded(host, step, round(time.time(), 3)))) + "\n"
        )


def evictions_of(folder: Path) -> list[Excluded]:
    """Return the recorded evictions, ordered by step."""
    hosts = []
    for path in folder.glob(eviction_file("*")):
        with suppress(OSError, ValueError, TypeError, AttributeError, KeyError, RecursionError):
            record = json.loads(path.read_text(encoding="utf-8"))
            hosts.append(Excluded(str(record["host"]), int(record["step"]), float(record["time"])))
    return sorted(hosts, key=lambda each: (each.step, each.host))


def refuse_evicted(folder: Path) -> None:
    """Raise `RunError` if this machine was evicted from this run."""
    here = socket.gethostname()
    if (path := folder / eviction_file(here)).exists():
        raise RunError(
            "LS7004",
            f"{here} was evicted from this run, because it computed wrong values (sdc_check); after the "
            f"machine is repaired, delete {path}",
        )
