"""One process at a time, on this machine and on others that share a folder, whether or not its locks reach them.

In: a path for a lock. Out: `held`, for `with`. On this machine a file lock decides. Between machines a lease does, a
file that is made once and touched while its owner works: many network folders keep locks to the machine that asks.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

BEAT_S = 5.0  # between signs of life
SILENCE_S = 60.0  # of another machine's, after which its work is taken over
_UNABLE = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)  # a folder that knows no locks


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Wait until nobody else has `path`, and have it. Errors: `OSError` when the folder cannot be written."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    alone = True
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in _UNABLE:
                raise
            alone = False  # the lease alone has to do
        with _leased(path.with_suffix(".lease"), alone):
            yield
    finally:
        os.close(lock)


@contextmanager
def _leased(path: Path, alone: bool) -> Iterator[None]:
    """`alone`: no other process of this machine is here."""
    mine = {"machine": machine(), "host": platform.node(), "pid": os.getpid(), "id": uuid4().hex}
    _wait(path, mine, alone)
    over = threading.Event()

    def beat() -> None:
        while not over.wait(BEAT_S):
            with suppress(OSError):  # taken over, or a network that is gone for a while
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
    """Until the lease is ours. Its owner is gone if it was a process of this machine, whose lock we have; or if it was
    still for a while, as this machine's clock counts: those of two machines need not agree."""
    aside = path.with_name(f"{path.name}.{mine['id']}.tmp")
    aside.write_text(json.dumps(mine), encoding="utf-8")
    seen, since = "", time.monotonic()
    try:
        while True:
            with suppress(FileExistsError):
                os.link(aside, path)  # whole or not at all
                return
            owner, told = _read(path), _beat_of(path)
            if (now := f"{owner} {told}") != seen:
                seen, since = now, time.monotonic()
            ours = alone and owner is not None and owner.get("machine") == mine["machine"]
            if path.exists() and (ours or time.monotonic() - since > SILENCE_S):
                gone = path.with_name(f"{path.name}.{mine['id']}.gone")
                with suppress(FileNotFoundError):  # somebody else did it
                    os.rename(path, gone)
                    if _read(gone) != owner:  # a new owner's, of this very moment
                        with suppress(FileExistsError):
                            os.link(gone, path)
                    gone.unlink()
                continue
            time.sleep(0.2)
    finally:
        aside.unlink(missing_ok=True)


def machine() -> str:
    """The kernel at work, which file locks are known to."""
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
