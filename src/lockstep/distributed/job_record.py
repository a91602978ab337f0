"""What OUTPUT says of where a run was launched: `launch.json`, and one `excluded-HOST.json` a machine taken out.

In: what the launching process knows (launcher, scheduler's id, host, pid), later what rank 0 knows (steps in all, its
own pid), at last the exit status; a host that computed wrongly, and in which step. Out: one small file that is replaced
as a whole, which `status`, `logs` and `stop` read; a file that a later start on that host reads, and ends, until
somebody deletes it. No secrets, nothing that training needs. Nothing here imports torch.
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
from lockstep.config.run import RunError, replace_text
from lockstep.distributed import host_memory

FILE = "launch.json"
# What ranks do: the dotted name of a function of (run, world), and further words for it.
TRAIN = ("lockstep.training.rank.work",)
# Variables for ranks that another program starts for a launcher: how many there shall be in all; a file for the exit
# status of a machine's first rank, where that program has only one of its own; what ranks do, where it is not `TRAIN`.
PLANNED_SIZE, STATUS, JOB_WORDS = "LOCKSTEP_WORLD_SIZE", "LOCKSTEP_STATUS_FILE", "LOCKSTEP_JOB"
RESOLVED = "LOCKSTEP_RESOLVED_JOB"  # a file of the launching process that holds what it has decided
INTRODUCED = "LOCKSTEP_INTRODUCED"  # set for ranks whose terminal has the lines about what runs already
# Set for ranks by a launcher that has written launch.json itself; ranks without it were started by hand (torchrun,
# accelerate launch, srun), and rank 0 writes the file.
VARIABLE = "LOCKSTEP_LAUNCHER"
JOB = "LOCKSTEP_JOB_ID"  # with it, the job's id, where it is known only once the job runs
FACT = "LOCKSTEP_FACT"  # and one of the facts, as name=value

_ASIDE = re.compile(r"\..+\.(?P<host>[^/]+)-(?P<pid>\d+)\.partial")  # what `aside_of` gives
# What a scheduler's ids, names of namespaces, regions and steps look like: never like an option of a program.
LESS_MEMORY = "Use more micro_batches, a smaller batch_size or data.max_length, or fewer processes"
_NAME = re.compile(r"[A-Za-z0-9][\w.:@/\[\]%+,-]*")

Word = Literal["waiting", "running", "done", "stopped", "failed", "gone", "unknown"]


@dataclass(frozen=True)
class Process:
    """A process, told from a later one that was given its number."""

    host: str
    pid: int
    born: str  # when it started, in the system's own words

    @classmethod
    def this(cls) -> Process:
        return cls(socket.gethostname(), os.getpid(), born(os.getpid()) or "")

    def alive(self) -> bool | None:
        """Whether it runs; None where that cannot be seen from this host."""
        if self.host != socket.gethostname():
            return None
        return self.born != "" and born(self.pid) == self.born


@dataclass(frozen=True)
class JobRecord:
    """One launch of a run."""

    launcher: str  # its name in the run file; "": ranks that were started by hand
    processes: int  # in all
    began: float  # seconds since 1970
    process: Process  # `lockstep train`, or rank 0 where it was started by hand
    job: str | None = None  # the scheduler's or service's id
    facts: Mapping[str, str] = field(default_factory=dict)  # what the launcher needs to find the job again
    main: Process | None = None  # rank 0, once it is there
    steps: int | None = None  # of the whole run, once rank 0 has counted them
    reached: int | None = None  # updates done when training ended; metrics.jsonl may end before, on a full disk
    kills: tuple[int, int] | None = None  # processes killed for memory when it began: in its cgroup, on the machine
    cgroup: str = ""  # in which it began
    ended: float | None = None
    status: int | None = None  # exit status, once there is one


@dataclass(frozen=True)
class State:
    """The present activity of a launched run."""

    word: Word
    text: str = ""  # more, for a person: why it waits, where it runs
    status: int | None = None  # exit status, where it is known

    @property
    def live(self) -> bool:
        """Whether it may still change by itself."""
        return self.word in ("waiting", "running")


def here(launcher: str, processes: int, job: str | None = None, facts: Mapping[str, str] | None = None) -> JobRecord:
    """A launch from this process, now."""
    kills = host_memory.kills()
    return JobRecord(
        launcher, processes, time.time(), Process.this(), job, facts or {}, kills=kills, cgroup=host_memory.cgroup()
    )


def write(folder: Path, launched: JobRecord) -> bool:
    """Write OUTPUT/launch.json atomically, or in place if the disk is full, which needs no room. Returns whether it was
    written; reports no error, because whatever needs the folder does."""
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
            with open(folder / FILE, "r+b", buffering=0) as file:  # it is smaller than a block of any disk
                file.truncate(file.write(text.encode()))
        return True
    return False


def sweep_up(folder: Path) -> None:
    """Remove what processes of this host that are gone have left of files they wrote aside. Errors: `OSError`."""
    for path in folder.glob(".*.partial"):
        match = _ASIDE.fullmatch(path.name)
        if match and match["host"] == socket.gethostname() and born(int(match["pid"])) is None:
            path.unlink(missing_ok=True)


def read(folder: Path) -> JobRecord | None:
    """The last launch of a run, or None where no readable file says so."""
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
        return record
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return None


def stranger(folder: Path) -> int | None:
    """The user that OUTPUT/launch.json or its lock belongs to, if that is not this one: they name a process."""
    for name in (FILE, ".lock"):
        with suppress(OSError):
            owner = (folder / name).stat().st_uid
            if hasattr(os, "geteuid") and owner != os.geteuid():
                return owner
    return None


def inside(path: Path, folder: Path) -> Path:
    """The path, if what it leads to is below the folder. Errors: `RunError`: a link in a stranger's OUTPUT, or a path
    in its files, may lead anywhere."""
    if not path.resolve().is_relative_to(folder.resolve()):
        raise RunError("LS7000", f"{path} is outside of {folder}, so it is not read")
    return path


def note(folder: Path, **changes: Any) -> bool:
    """Change what OUTPUT/launch.json says, where there is one. Returns whether it says so now, or there is none."""
    launched = read(folder)
    return launched is None or write(folder, replace(launched, **changes))


def arrived(folder: Path, processes: int, steps: int) -> None:
    """Rank 0 is there and knows how many steps there are. A job that was submitted again by hand, or queued again, has
    a launch of its own."""
    record, job = read(folder), os.environ.get(JOB)
    name, equals, value = os.environ.get(FACT, "").partition("=")
    facts = {name: value} if equals else {}
    if record is None or record.status is not None or (job is not None and (job, facts) != (record.job, record.facts)):
        record = here(os.environ.get(VARIABLE, ""), processes, job, facts)
    write(folder, replace(record, main=Process.this(), steps=steps))


def restarts_left() -> bool:
    """Whether torch elastic starts this job again when this rank fails."""
    count, most = (int(os.environ.get(f"TORCHELASTIC_{name}", 0)) for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    return count < most


def outcome(status: int | None, text: str = "") -> State:
    """The state of what has ended with this exit status."""
    if status is None:
        return State("gone", text)
    words: dict[int, Word] = {DONE: "done", STOPPED: "stopped"}
    return State(words.get(status, "failed"), text, status)


# -- a launch whose processes are on this machine, or began on it ----------------------------------------------------


def state_of_process(launched: JobRecord) -> State:
    """The state of a job that ran without a scheduler, from the processes that this host can see and from the exit
    status that the launcher and rank 0 wrote down."""
    if launched.status is not None:
        return outcome(launched.status)
    process = launched.process
    who = f"process {process.pid} on {process.host}"
    alive = process.alive()
    if alive is None:
        return State("unknown", f"{who} cannot be seen from {socket.gethostname()}; ask there")
    if alive:
        return State("running", who)
    return State("gone", f"{who} is not there any more and left no exit status: {why_gone(launched)}")


def why_gone(launched: JobRecord) -> str:
    """What this machine's kernel tells of the end of a launch that left no exit status."""
    boot, now = launched.process.born.partition("/")[0], (born(os.getpid()) or "").partition("/")[0]
    if boot and now and boot != now:
        return "the machine has been restarted since"
    for name, process in (("it", launched.process), ("rank 0", launched.main)):
        if process is not None and host_memory.killed_since(process.pid, launched.began):
            return f"the kernel killed {name} because memory ran out. {LESS_MEMORY}"
    if launched.kills is not None:
        inside, machine = (now - then for now, then in zip(host_memory.kills(), launched.kills, strict=True))
        killed = "because memory ran out"
        if inside > 0 and launched.cgroup == host_memory.cgroup():
            return f"since it began the kernel killed {inside} process(es) of its cgroup {killed}. {LESS_MEMORY}"
        if machine > 0:
            return (
                f"it was killed, or the machine was. Since it began the kernel killed {machine} process(es) of this "
                f"machine {killed}; if it was one of them: {LESS_MEMORY[0].lower()}{LESS_MEMORY[1:]}"
            )
    return "it was killed, or the machine was"


def stop_process(launched: JobRecord) -> str:
    """Send SIGTERM to the launching process; it stops all ranks after their step, with a checkpoint and status 75.
    Returns what was done. Errors: `RunError` where it cannot be reached."""
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
    """The lines of a log file without their line ends; with `follow`, those that come while `live()`, and half a line
    at the end once nothing more comes. A file that is replaced or cut is read from its start."""
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
        last = not live()  # read once more: the last lines may have come meanwhile
        if not last:
            time.sleep(every_s)
    if rest:
        yield rest


def born(pid: int) -> str | None:
    """When a process started, or None where it is not there (or dead, and only its parent has not looked)."""
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
    """One machine."""

    host: str
    step: int  # the one that it computed wrongly, counted from 1
    time: float  # seconds since 1970

    def __str__(self) -> str:
        return f"{self.host}, which computed wrong values in step {self.step} (sdc_check)"


def eviction_file(host: str) -> str:
    return f"excluded-{host}.json"


def note_eviction(folder: Path, host: str, step: int) -> None:
    """Write it down; several ranks may. A folder that cannot be written to is told by what needs it, not here."""
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        replace_text(
            folder / eviction_file(host), json.dumps(asdict(Excluded(host, step, round(time.time(), 3)))) + "\n"
        )


def evictions_of(folder: Path) -> list[Excluded]:
    """Those that are written down, in the order of their steps."""
    hosts = []
    for path in folder.glob(eviction_file("*")):
        with suppress(OSError, ValueError, TypeError, AttributeError, KeyError, RecursionError):
            record = json.loads(path.read_text(encoding="utf-8"))
            hosts.append(Excluded(str(record["host"]), int(record["step"]), float(record["time"])))
    return sorted(hosts, key=lambda each: (each.step, each.host))


def refuse_evicted(folder: Path) -> None:
    """This machine may train this run. Errors: `RunError`."""
    here = socket.gethostname()
    if (path := folder / eviction_file(here)).exists():
        raise RunError(
            "LS7004",
            f"{here} was evicted from this run, because it computed wrong values (sdc_check); after the "
            f"machine is repaired, delete {path}",
        )
