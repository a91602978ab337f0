"""The token cache: a folder that only this user can write, with a seal (sizes and hashes) beside each file or folder.

In: a path in the cache and a function that creates its content. Out: the same path, created once, synced and checked at
every start; damaged content, and content of another user, is recreated.

`with file_lock(path)` admits one process at a time, on this machine and on others that share the folder, even if its
locks do not reach them. Within a machine a file lock decides; between machines a lease: a file that is created
atomically and touched while its owner works, because many network folders keep locks local to a machine.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import platform
import random
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow as pa

from lockstep.config.errors import OF_DISKS, reason_of, remedy_of
from lockstep.config.output_files import wrapped_os_errors
from lockstep.config.run import RunError
from lockstep.distributed.hardware import available_cores

STREAM = ".stream"  # ending of an index in the cache
ROWS = 4  # version of row reading (`row_files.py`); part of the key of prepared data
BEAT_S = 5.0  # heartbeat interval of a lease
SILENCE_S = 60.0  # seconds without a heartbeat after which another machine's lease is taken over
_UNABLE = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)  # errors of folders without lock support


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Acquire the lock on `path`, waiting for other processes and machines. Errors: `OSError` if the folder cannot be
    written."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    alone = True
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in _UNABLE:
                raise
            alone = False  # no file lock: only the lease protects
        with _leased(path.with_suffix(".lease"), alone):
            yield
    finally:
        os.close(lock)


@contextmanager
def _leased(path: Path, alone: bool) -> Iterator[None]:
    """Hold the lease. `alone`: this process holds the machine's file lock."""
    mine = {"machine": machine(), "host": platform.node(), "pid": os.getpid(), "id": uuid4().hex}
    _wait(path, mine, alone)
    over = threading.Event()

    def beat() -> None:
        while not over.wait(BEAT_S):
            with suppress(OSError):  # taken over, or a temporary network failure
                if _read(path) == mine:
                    os.utime(path)

    thread = threading.Thread(target=beat, name="lockstep-lease", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        with suppress(OSError):
            if _read(path) == mine:
                path.unlink()


def _wait(path: Path, mine: dict[str, object], alone: bool) -> None:
    """Wait until the lease is ours. A lease is abandoned if its owner was a process of this machine, whose file lock we
    hold, or if it was not touched for a while by this machine's clock (clocks of two machines may differ)."""
    aside = path.with_name(f"{path.name}.{mine['id']}.tmp")
    aside.write_text(json.dumps(mine), encoding="utf-8")
    lease, since = "", time.monotonic()
    try:
        while True:
            with suppress(FileExistsError):
                os.link(aside, path)  # atomic
                return
            owner, beat = _read(path), _beat_of(path)
            if (now := f"{owner} {beat}") != lease:
                lease, since = now, time.monotonic()
            ours = alone and owner is not None and owner.get("machine") == mine["machine"]
            if path.exists() and (ours or time.monotonic() - since > SILENCE_S):
                gone = path.with_name(f"{path.name}.{mine['id']}.gone")
                with suppress(FileNotFoundError):  # another process did it
                    os.rename(path, gone)
                    if _read(gone) != owner:  # a new owner has just acquired it
                        with suppress(FileExistsError):
                            os.link(gone, path)
                    gone.unlink()
                continue
            time.sleep(0.2)
    finally:
        aside.unlink(missing_ok=True)


def machine() -> str:
    """Boot id of the running kernel, within which file locks are effective."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return platform.node()


def _read(path: Path) -> dict[str, object] | None:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return None


def _beat_of(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


BLOCK = 4 * 2**20  # bytes per hash block
PARTS = ("locks", "prepared", "tokenizers", "tokens", "models", "padding", "remote", "shards", "sizes", "exports")
SAMPLED = 4  # blocks checked per file once the whole was read since boot
MACHINES = 256  # maximum number of machines remembered in a seal
SAMPLED_FILES = 8  # files of a folder whose blocks are sampled; for the others, only the size is checked


def cache_folder() -> Path:
    """$LOCKSTEP_CACHE, else ~/.cache/lockstep; a per-user folder in it if others may write there."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    root = Path(os.environ.get("LOCKSTEP_CACHE") or f"{home}/lockstep").expanduser()
    try:
        status = root.stat()
    except OSError:
        return root
    return root if status.st_uid == os.getuid() and _private(status) else root / f"user-{os.getuid()}"


_code: ContextVar[str] = ContextVar("code", default="")
_with: ContextVar[frozenset[str]] = ContextVar("with", default=frozenset())


@contextmanager
def made_by(code: str) -> Iterator[None]:
    """Separate cache entries created in this context from those of other code; `code` identifies it."""
    before, also = _code.set(code), _with.set(frozenset())
    try:
        yield
    finally:
        _code.reset(before)
        _with.reset(also)


def made_with(content: str) -> None:
    """Separate subsequent cache entries, within `made_by`, by an input that keys do not cover, such as a tokenizer's
    template. `content` identifies it."""
    _with.set(_with.get() | {content})


def folder_of(part: str) -> Path:
    """Cache folder of `part` for the current code. Names inside do not depend on the code, because later keys and
    checkpoints use them."""
    also = sorted(_with.get())
    code = hashlib.sha256(" ".join([_code.get(), *also]).encode()).hexdigest()[:24] if also else _code.get()
    return cache_folder() / part / code


@contextmanager
def locked(name: str) -> Iterator[None]:
    """Admit one process at a time among all that share the cache. Errors: `RunError` if the cache cannot be written, or
    if others may write it."""
    folder = cache_folder()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_own(folder)
        for part in PARTS:  # regardless of the umask
            (folder / part).mkdir(mode=0o700, exist_ok=True)
            (folder / part).chmod(0o700)
        lock = file_lock(folder / "locks" / f"{name}.lock")
        lock.__enter__()
    except OSError as error:
        raise RunError(
            "LS2030",
            f"the token cache {folder} cannot be written: {error.strerror or error}; set LOCKSTEP_CACHE to a "
            "writable folder",
        ) from error
    try:
        yield
    finally:
        lock.__exit__(None, None, None)


def cached(path: Path, make: Callable[[Path], None], aside: Path | None = None) -> Path:
    """Return `path`, a cache file or folder, creating it with `make(aside)` if it is missing or damaged. `aside`: a
    folder that `make` fills incrementally; after a kill the next call continues with it. Errors: `RunError` if it
    cannot be written."""
    with locked(path.name):
        if damage(path) is not None:
            discard(path)
            placed(path, make, aside)
    return path


def placed(path: Path, make: Callable[[Path], None], resumed: Path | None = None) -> None:
    """Create the content of `path` under a temporary name, seal it and rename it. Errors: `RunError` if it cannot be
    written."""
    aside = resumed or _aside(path, "tmp")
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        with wrapped_os_errors(aside, OF_DISKS):
            make(aside)
        seal(aside, path)
        os.rename(aside, path)
        _sync(path.parent)
    except (OSError, RunError) as error:
        if damage(path) is None:  # another machine was faster (locks do not reach it)
            _remove(aside)
            return
        if isinstance(error, RunError):
            raise
        raise RunError(
            "LS2031",
            f"cannot write to the cache {cache_folder()}: {reason_of(error)}; {remedy_of(error)}; "
            "LOCKSTEP_CACHE=FOLDER chooses another cache",
        ) from error
    finally:
        if resumed is None:
            _remove(aside)


def _aside(path: Path, ending: str) -> Path:
    """A temporary name beside `path`, unique across processes and machines."""
    return path.with_name(f"{path.name}.{platform.node()}-{os.getpid()}.{ending}")


def seal(path: Path, name: Path | None = None) -> None:
    """Sync the file or folder at `path` and write a seal with the hashes of its content beside it (or beside `name`,
    its future name)."""
    contents = {}
    for inner, file in _files(path).items():
        if file != path and sealed(file):  # a shard, already synced and hashed
            contents[inner] = json.loads(_seal_of(file).read_text(encoding="utf-8"))["files"][""] | {"rows": None}
            continue
        _sync(file)
        size = file.stat().st_size
        contents[inner] = {"size": size, "rows": _rows(file, path), "blocks": _hashes(file, range(_count(size)))}
    for folder in {file.parent for file in _files(path).values()} if path.is_dir() else ():
        _sync(folder)
    _write_seal(name or path, {"files": contents})


def damage(path: Path) -> str | None:
    """Describe the damage of a cache file or folder, or return None. Everything is read at the first use since it was
    written or since the machine started; later only sizes and a few random blocks of a few files."""
    try:
        seal = json.loads(_seal_of(path).read_text(encoding="utf-8"))
        files = _files(path)
        if seal["files"].keys() != files.keys() or not files:
            return f"{path.name} is missing, or contains other files"
        checked_by = seal["seen"] if isinstance(seal.get("seen"), dict) else {}  # machine -> last check
        found_now = hashlib.sha256(repr([(n, _identity(f)) for n, f in files.items()]).encode()).hexdigest()
        whole = checked_by.get(_boot()) != found_now
        looked = set(files if whole or len(files) <= SAMPLED_FILES else random.Random().sample([*files], SAMPLED_FILES))

        def wrong(inner: str) -> str | None:
            reason = _differs(files[inner], path, seal["files"][inner], whole, inner in looked)
            return None if reason is None else f"{files[inner].name} {reason}"

        with ThreadPoolExecutor(min(len(files), available_cores())) as pool:  # hashing and reading release the GIL
            for reason in pool.map(wrong, files):
                if reason is not None:
                    return reason
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"{path.name} is missing, or has no seal"
    if whole:
        with suppress(OSError):  # the next check then reads everything again
            others = [(boot, state) for boot, state in checked_by.items() if boot != _boot()][-MACHINES:]
            _write_seal(path, seal | {"seen": dict(others) | {_boot(): found_now}})
    return None


def sealed(path: Path) -> bool:
    """Return whether `path` has a seal."""
    return _seal_of(path).exists()


def inside(path: Path) -> bool:
    """Whether `path` is in the cache. Files that a user's task stores elsewhere are neither checked nor removed."""
    return path.absolute().is_relative_to(cache_folder().absolute())


def discard(path: Path) -> None:
    """Remove a cache file or folder and its seal, if present."""
    for each in (_seal_of(path), path):
        _remove(each)


# -- permissions -----------------------------------------------------------------------------------------------------


def _private(status: os.stat_result) -> bool:
    return not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _check_own(folder: Path) -> None:
    """Check that no other user can write to the folder. Errors: `RunError`."""
    status = folder.lstat()
    with tempfile.TemporaryFile(dir=folder) as probe:  # network disks may map this user to another uid
        own = os.fstat(probe.fileno()).st_uid == status.st_uid
    if (not stat.S_ISDIR(status.st_mode) and folder.name.startswith("user-")) or not own or not _private(status):
        raise RunError(
            "LS2032",
            f"the token cache {folder} is writable by other users, who could replace the data; set "
            "LOCKSTEP_CACHE to a folder that only you can write",
        )


# -- seals -----------------------------------------------------------------------------------------------------------


def _seal_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.seal")


def _write_seal(path: Path, content: dict[str, Any]) -> None:
    aside = _aside(path, "seal.tmp")
    try:
        aside.write_text(json.dumps(content), encoding="utf-8")
        _sync(aside)
        os.replace(aside, _seal_of(path))
    finally:
        _remove(aside)


def _files(path: Path) -> dict[str, Path]:
    """Map relative names to files under `path` (a file maps to itself), metadata files excluded."""
    if path.is_file():
        return {"": path}
    files = (file for file in sorted(path.rglob("*")) if file.is_file() and file.suffix not in (".seal", ".tmp"))
    return {str(file.relative_to(path)): file for file in files}


def _differs(file: Path, path: Path, record: dict[str, Any], whole: bool, looked: bool) -> str | None:
    """Describe how a file differs from its seal, or return None. Unless `looked`, only its size and owner are
    compared."""
    status = file.stat()
    if status.st_uid != path.parent.stat().st_uid:
        return "belongs to another user"
    if status.st_size != record["size"]:
        return f"has {status.st_size} bytes instead of {record['size']}"
    if not looked:
        return None
    count = _count(status.st_size)
    blocks = list(range(count))
    if not whole and count > SAMPLED:  # the ends, where truncation shows, and random blocks between
        blocks = sorted({0, count - 1, *random.Random().sample(blocks[1:-1], SAMPLED - 2)})
    if _hashes(file, blocks) != [record["blocks"][i] for i in blocks]:
        return "differs from what was written"
    if _rows(file, path) != record["rows"]:
        return "has another number of examples than was written"
    return None


def _count(size: int) -> int:
    return -(-size // BLOCK)


def _hashes(file: Path, blocks: range | list[int]) -> list[str]:
    """SHA-256 of some blocks of a file."""
    hashes = []
    with open(file, "rb") as opened:
        for i in blocks:
            opened.seek(i * BLOCK)
            hashes.append(hashlib.sha256(opened.read(BLOCK)).hexdigest())
    return hashes


def _rows(file: Path, path: Path) -> int | None:
    """Number of examples of an Arrow token file, reading only the batch headers; None for any other file."""
    if file != path or path.name.split(".")[1:2] != ["arrow"]:
        return None
    with pa.memory_map(str(file)) as mapped:
        return int(pa.ipc.open_stream(mapped).read_all().num_rows)


def _identity(file: Path) -> tuple[int, ...]:
    status = file.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _boot() -> str:
    """Boot id: data written before the last boot may have been lost."""
    return machine()


def _sync(path: Path) -> None:
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
