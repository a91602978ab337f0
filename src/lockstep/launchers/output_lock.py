"""The lock of OUTPUT, `OUTPUT/.lock`: one job at a time writes there, over all machines that share the folder.

In: OUTPUT. Out: a `Lock` with a heartbeat until its release, or a `RunError` that names the holder, or foreign files in
the folder. Three signs show that a holder is alive: flock, which ends with its process; without flock, pid, start time
and boot of its machine; between machines, the heartbeat. In doubt a holder counts as alive until this machine has seen
no heartbeat for `STALE_S`. Imports no torch.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import yaml

from lockstep.config import output_files
from lockstep.config.errors import FAILED, coded
from lockstep.config.output_files import check_output
from lockstep.config.run import Run, RunError
from lockstep.distributed import hardware, job_record
from lockstep.distributed.job_record import JobRecord, Process, State
from lockstep.track.console import error

FILE = ".lock"
BEAT_S, STALE_S = 5.0, 60.0
VARIABLE = "LOCKSTEP_LOCK"  # token of the launcher's lock, for its ranks


@dataclass(frozen=True)
class Holder:
    """The process that holds a lock."""

    token: str
    process: Process
    kernel: str  # identifies one boot of a machine, across containers
    space: str  # pid namespace
    flocks: bool  # whether flock worked for it
    since: float  # seconds since 1970
    kills: tuple[int, int] = (0, 0)  # OOM kill counters at the start, as in `JobRecord`
    cgroup: str = ""

    def __str__(self) -> str:
        return f"process {self.process.pid} on {self.process.host}"

    def launch(self) -> JobRecord:
        """Return the record of a launch that only the lock knows."""
        return JobRecord("local", 1, self.since, self.process, kills=self.kills, cgroup=self.cgroup)


@dataclass(frozen=True)
class OutputState:
    """The observed state of a lock."""

    holder: Holder | None  # None: unreadable
    alive: bool | None  # None: only the heartbeat decides
    beat: tuple[bytes, int]  # changes with every beat
    age_s: float  # since the last beat, by two clocks that may differ


def look(path: Path) -> OutputState | None:
    """Return the state of a lock, or None if there is none. Errors: `OSError`."""
    try:
        descriptor = _opened(path)
    except FileNotFoundError:
        return None
    try:
        free = _flock(descriptor)
        text, file_stat = os.read(descriptor, 65536), os.fstat(descriptor)
    finally:
        os.close(descriptor)
    holder = _parsed(text)
    alive: bool | None = None
    if free is False:
        alive = True
    elif holder is not None and holder.kernel == _kernel():
        if free and holder.flocks:
            alive = False
        elif holder.space == _space():
            alive = job_record.born(holder.process.pid) == holder.process.born
    return OutputState(holder, alive, (text, file_stat.st_mtime_ns), time.time() - file_stat.st_mtime)


class Lock:
    """A held lock of OUTPUT, until `release`. A thread writes the heartbeat, and detects the loss of the lock."""

    def __init__(self, folder: Path, descriptor: int, holder: Holder, new_folders: list[Path], beat_s: float) -> None:
        self.folder, self.holder, self.lost = folder, holder, False
        self._path, self._descriptor, self._new_folders, self._beat_s = folder / FILE, descriptor, new_folders, beat_s
        self._beats, self._over, self._turn = 0, threading.Event(), threading.Lock()
        self._folder = os.open(folder, os.O_RDONLY)  # while open, its inode number is not reused
        self._real = folder.resolve()
        self._written = False  # whether a run has written here
        self._thread = threading.Thread(target=self._run, name="lockstep-lock", daemon=True)
        self._thread.start()

    def verdict(self, status: int) -> int:
        """Return the exit status of a job: `status`, or FAILED if OUTPUT was lost meanwhile."""
        with self._turn:
            if not self._over.is_set():
                self._look_after()
        if self.lost and status != FAILED and self._elsewhere() is None:
            job_record.note(self.folder, status=FAILED)
        return FAILED if self.lost else status

    def release(self) -> None:
        """Release the lock (idempotent), and remove folders created only for it."""
        if self._over.is_set():
            return
        self._over.set()
        with self._turn:
            if self._state() == "mine":
                with suppress(OSError):
                    self._path.unlink()
            os.close(self._descriptor)
            os.close(self._folder)
        for path in self._new_folders:
            with suppress(OSError):  # not empty: used by a run
                path.rmdir()

    def _run(self) -> None:
        while not self._over.wait(self._beat_s):
            with self._turn:
                if self._over.is_set():
                    return
                lost = self.lost
                self._look_after()
            if self.lost and not lost:  # like a user's stop: saves a checkpoint
                os.kill(os.getpid(), signal.SIGTERM)

    def _look_after(self) -> None:
        """Write a heartbeat. Recreate a deleted lock, or OUTPUT; end this process at once if another one has the
        lock."""
        there = self._there()
        elsewhere = None if there else self._elsewhere()
        state = self._state() if elsewhere is None else "unknown"
        if not there and state != "taken" and not self.lost and (elsewhere is not None or state != "unknown"):
            self.lost = True
            what, rest = "deleted or moved away", "files saved afterwards are in a new folder of that name"
            if elsewhere is not None:
                what, rest = f"replaced by a link to {elsewhere}", "nothing is written through the link"
            error(
                coded(
                    "LS7340",
                    f"{self.folder} was {what} during training, so the files of the run are gone. The run ends with "
                    f"status 1; {rest}",
                )
            )
        elif state == "gone":
            error(coded("LS7341", f"{self._path} was deleted during training in {self.folder}; it is created again"))
        if state == "gone":
            with suppress(OSError):
                self.folder.mkdir(parents=True, exist_ok=True)
                if (created := _created(self._path, self.holder)) is None:
                    state = self._state()
                else:
                    os.close(self._descriptor)
                    self._descriptor = created
        if state == "taken":
            error(
                coded(
                    "LS7342",
                    f"{self.folder} is now locked by another process, which considered this one dead; this process "
                    "ends",
                )
            )
            os._exit(FAILED)
        self._beats += 1
        with suppress(OSError):
            os.pwrite(self._descriptor, b"%012d" % self._beats, 0)
            os.fsync(self._descriptor)

    def _elsewhere(self) -> Path | None:
        """Return the new target if OUTPUT, or a folder above it, was replaced by a link, else None."""
        now = self.folder.resolve()
        return None if now == self._real else now

    def _there(self) -> bool:
        """Return whether OUTPUT is still the same folder, with the run's files."""
        try:
            here, own = os.stat(self.folder), os.fstat(self._folder)
        except FileNotFoundError:
            return False
        except OSError:  # a network disk that does not answer
            return True
        written = any((self.folder / name).exists() for name in ("run.yaml", job_record.FILE))
        gone, self._written = self._written and not written, self._written or written
        return (here.st_dev, here.st_ino) == (own.st_dev, own.st_ino) and not gone

    def _state(self) -> Literal["mine", "gone", "taken", "unknown"]:
        try:
            here, own = os.stat(self._path), os.fstat(self._descriptor)
            if (here.st_dev, here.st_ino) == (own.st_dev, own.st_ino):
                return "mine"
            content = _parsed(self._path.read_bytes())
        except FileNotFoundError:
            return "gone"
        except OSError:  # a network disk that does not answer
            return "unknown"
        return "mine" if content is not None and content.token == self.holder.token else "taken"


@contextmanager
def owned(folder: Path, say: Callable[[str], None]) -> Iterator[Lock]:
    """Context manager that holds the lock of OUTPUT for this process and its children. Errors: `RunError` if another
    job has it, or the folder has foreign files."""
    check_output(folder)
    check_ours(folder)
    lock = take(folder, say)
    os.environ[VARIABLE] = lock.holder.token
    try:
        yield lock
    finally:
        os.environ.pop(VARIABLE, None)
        lock.release()


def held_by_launcher(folder: Path) -> bool:
    """Return whether the launcher of this rank holds the lock."""
    token = os.environ.get(VARIABLE)
    with suppress(OSError):
        content = _parsed((folder / FILE).read_bytes())
        return token is not None and content is not None and content.token == token
    return False


def take(folder: Path, say: Callable[[str], None], beat_s: float = BEAT_S, stale_s: float = STALE_S) -> Lock:
    """Take the lock of a folder, creating the folder if necessary. Waits, with a message, if a holder on another
    machine may be dead. Errors: `RunError` if it is alive, or the folder is not writable."""
    path = folder / FILE
    this = Process.this()
    counters = hardware.kills(), hardware.cgroup()
    holder = Holder(secrets.token_hex(8), this, _kernel(), _space(), True, time.time(), *counters)
    new_folders = [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        while (descriptor := _created(path, holder)) is None:
            if (state := look(path)) is not None:
                _wait_for_the_end(path, state, say, beat_s, stale_s)
    except OSError as caught:
        raise RunError(
            "LS7343", f"output: cannot write to {folder}: {caught.strerror}; choose another output"
        ) from caught
    return Lock(folder, descriptor, holder, new_folders, beat_s)


def _wait_for_the_end(
    path: Path, state: OutputState, say: Callable[[str], None], beat_s: float, stale_s: float
) -> None:
    """Wait until a holder is known to be dead, and remove its lock. Errors: `RunError` if it is alive, `OSError`."""
    since = time.monotonic()
    patience_s = 3 * beat_s if _clock_of(path.parent) - state.beat[1] / 1e9 > stale_s else stale_s
    announced = False
    now: OutputState | None = state
    while now is not None:
        if now.alive or now.beat != state.beat:
            raise RunError("LS7347", taken(path.parent, now))
        watched_s = time.monotonic() - since
        if now.alive is False or watched_s >= patience_s:
            lost = _unrecorded(now.holder, job_record.read(path.parent)) if now.alive is False else None
            if _take_away(path, now) and lost is not None:
                say(f"the previous start: {_end_of(lost)}")
            return
        # else it may be about to write its content
        if not announced and (now.holder is not None or watched_s > beat_s / 2):
            announced = True
            say(
                f"{path.parent} is held by {now.holder or 'an unknown process'}, which cannot be checked from "
                f"{socket.gethostname()}; its last heartbeat is {now.age_s:.0f} s old. Waiting {patience_s:g} s for "
                f"another one; without it, the run begins. If that process is gone, delete {path}"
            )
        time.sleep(min(1.0, beat_s / 5))
        now = look(path)


def now(folder: Path, record: JobRecord | None) -> tuple[JobRecord | None, State | None]:
    """Return record and state of the job that holds the lock of OUTPUT, if launch.json does not know it (it prepares
    data, died while it did, or was started by hand) or it is on another machine; else (`record`, None)."""
    try:
        output_state = look(folder / FILE)
    except OSError:
        output_state = None
    if output_state is None or output_state.holder is None:
        return record, None
    if output_state.alive is False:
        lost = _unrecorded(output_state.holder, record)
        return (record, None) if lost is None else (lost, State("gone", _end_of(lost)))
    process = output_state.holder.process
    if output_state.alive is None and output_state.age_s > STALE_S:
        text = f"{output_state.holder} has sent no heartbeat for {output_state.age_s:.0f} s"
        return record, State("gone", text) if record is not None and record.process == process else None
    if record is not None and record.job is not None and record.status is None:
        return record, None  # its scheduler knows
    if record is None or record.status is not None or process not in (record.process, record.main):
        record = JobRecord("local", 1, output_state.holder.since, process)
    return record, State("running", str(output_state.holder))


def _unrecorded(holder: Holder | None, record: JobRecord | None) -> JobRecord | None:
    """Return the launch of a dead holder that launch.json does not know, because it died before it wrote there; None
    if it does, or the run was finished before."""
    if holder is None or (record is not None and (record.status == 0 or record.job is not None)):
        return None
    known = record is not None and (record.began >= holder.since or holder.process in (record.process, record.main))
    return None if known else holder.launch()


def _end_of(lost: JobRecord) -> str:
    """Describe how a launch ended that died before it wrote launch.json."""
    why = job_record.evidence_of_end(lost) or "it was killed, or the machine was"
    return f"process {lost.process.pid} on {lost.process.host} ended before the training began: {why}"


def taken(folder: Path, state: OutputState) -> str:
    """Return the error for an OUTPUT that another job has locked."""
    who = "another process"
    if state.holder is not None:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(state.holder.since))
        who = f"{state.holder}, since {when}"
    return (
        f"output: {folder} is already in use by a training run ({who}). `lockstep stop {folder}` ends that run; or "
        "give another output=FOLDER"
    )


def _take_away(path: Path, state: OutputState) -> bool:
    """Remove the lock of a dead holder, but not a newer one. Returns whether this call did. Errors: `OSError`."""
    try:
        descriptor = _opened(path)
    except FileNotFoundError:
        return False
    try:
        if _flock(descriptor) is False:
            return False  # another process is removing it
        here, own = os.stat(path), os.fstat(descriptor)
        if (here.st_dev, here.st_ino) != (own.st_dev, own.st_ino) or os.read(descriptor, 65536) != state.beat[0]:
            return False
        aside = path.with_name(f"{FILE}.{secrets.token_hex(4)}")
        os.rename(path, aside)
        if _parsed(aside.read_bytes()) != state.holder:  # without flock, a newer lock may have appeared: restore it
            with suppress(FileExistsError):
                os.link(aside, path)
        aside.unlink()
        return True
    except FileNotFoundError:
        return False
    finally:
        os.close(descriptor)


def _created(path: Path, holder: Holder) -> int | None:
    """Create and open a lock; None if one exists. Errors: `OSError`; then no file is left."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        return None
    try:
        values = asdict(holder) | {"flocks": _flock(descriptor) is True}
        os.pwrite(descriptor, b"%012d\n" % 0 + json.dumps(values).encode() + b"\n", 0)
        os.fsync(descriptor)
    except OSError:
        path.unlink(missing_ok=True)
        os.close(descriptor)
        raise
    return descriptor


def _opened(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR)
    except PermissionError:  # another user's
        return os.open(path, os.O_RDONLY)


def _flock(descriptor: int, limit_s: float = 1.0) -> bool | None:
    """Lock an open file by flock: True if locked, False if another process holds it for longer than `limit_s`, None if
    the file system does not support it."""
    until = time.monotonic() + limit_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > until:
                return False
            time.sleep(0.05)
        except OSError:
            return None


def _parsed(text: bytes) -> Holder | None:
    try:
        values = json.loads(text.partition(b"\n")[2])
        inside, machine = values["kills"]
        return Holder(**values | {"process": Process(**values["process"]), "kills": (int(inside), int(machine))})
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _clock_of(folder: Path) -> float:
    """Return the Unix time of the file system's clock, which may be a server's. Errors: `OSError`."""
    probe = folder / f"{FILE}.{secrets.token_hex(4)}"
    try:
        probe.touch()
        return probe.stat().st_mtime
    finally:
        probe.unlink(missing_ok=True)


def _kernel() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def _space() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


# Files allowed in a new output folder: a scheduler's, a sweep's, a mount point's.
_HARMLESS = ("lost+found", "log.txt", "launch", "job.sbatch", "train.out", "train.err")


def check_ours(folder: Path) -> None:
    """Check that OUTPUT is empty or a run's, with a replaceable export. Errors: `RunError`, naming foreign files."""
    export = folder / "export"
    if not folder.is_dir():
        return
    if export.is_symlink() or (export.exists() and not export.is_dir()):
        what = f"a link to {os.readlink(export)}" if export.is_symlink() else "a file"
        raise RunError(
            "LS7344",
            f"output: {export} is {what}, but the model is exported to a folder of that name; remove it, or "
            "give another output=FOLDER",
        )
    for name, target in output_files.links(folder).items():
        raise RunError(
            "LS7348",
            f"output: {folder / name} is a link to {target}, and nothing is written through a link; remove it, put the "
            "file in its place, or give another output=FOLDER",
        )
    try:  # list first: another start of this run may be writing its first files
        names = sorted(name for name in os.listdir(folder) if not name.startswith("."))
    except OSError as caught:
        raise RunError("LS7345", f"output: cannot read {folder}: {caught.strerror}; choose another output") from None
    own = job_record.read(folder) is not None or _written_for(folder)
    if own or any(folder.glob("checkpoints/step-*/manifest.json")):
        return
    strange = [name for name in names if name not in _HARMLESS and not name.startswith("slurm-")]
    if strange:
        more = f" and {len(strange) - 5} more" if len(strange) > 5 else ""
        raise RunError(
            "LS7346",
            f"output: {folder} is not empty and is not the output folder of a run: it contains "
            f"{', '.join(strange[:5])}{more}. A run could overwrite files there; give another output=FOLDER",
        )


def _written_for(folder: Path) -> bool:
    """Return whether lockstep wrote run.yaml for this folder: it has every key, unlike a user's file."""
    try:
        values = yaml.safe_load((folder / "run.yaml").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return False
    if not isinstance(values, dict) or not set(Run.model_fields) <= values.keys():
        return False
    return Path(str(values["output"])).name == folder.resolve().name
