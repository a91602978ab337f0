"""The `lockstep` command forked from this process, which has imported what it imports: a start in a tenth of the time.

In: words of a command line, a folder, a cache. Out: what looks like `subprocess.Popen`. Only the imports are left out:
handlers of signals, working directory, session, environment and limits are a new process's own.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import time
import traceback
from multiprocessing import forkserver, resource_tracker, util
from pathlib import Path

from harness import lockstep_environment

from lockstep import cli
from lockstep.launchers.processes import elastic  # noqa: F401

_spawned = util.spawnv_passfds  # type: ignore[attr-defined]


def _forked_server(path: bytes, words: list[str], descriptors: list[int]) -> int:
    """Instead of `multiprocessing.util.spawnv_passfds`: also the server that ranks are forked from has imported all."""
    if "forkserver import main" not in words[-1]:
        return _spawned(path, words, descriptors)
    if pid := os.fork():
        return pid
    kept = {0, 1, 2, *descriptors}
    for number in [int(name) for name in os.listdir("/proc/self/fd")]:
        if number not in kept:
            with contextlib.suppress(OSError):
                os.close(number)
    for signal_number in signal.valid_signals():
        if callable(signal.getsignal(signal_number)):
            signal.signal(signal_number, signal.SIG_DFL)
    try:
        exec(words[-1])
    finally:
        os._exit(0)


class Forked:
    """A running command."""

    def __init__(self, words: list[str], folder: Path, cache: Path, most_bytes: int | None = None) -> None:
        """`most_bytes`: beyond which none of its files may grow."""
        self.args, self.returncode = words, None
        number = time.monotonic_ns()
        self._said = [Path(f"{cache}/{number}.{name}") for name in ("out", "err")]  # not on the disk that is filled
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                self._become(folder, cache, most_bytes)
                status = cli.main(words)
            except SystemExit as left:
                status = left.code if isinstance(left.code, int) else 1
            except BaseException:
                traceback.print_exc()
                status = 1
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def _become(self, folder: Path, cache: Path, most_bytes: int | None) -> None:
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGALRM):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.setsid()
        os.chdir(folder)
        for path, place in zip(self._said, (1, 2), strict=True):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), place)
        sys.stdout, sys.stderr = (os.fdopen(place, "w", buffering=1, closefd=False) for place in (1, 2))
        os.environ.update(lockstep_environment(cache) | {"GLOO_SOCKET_IFNAME": "lo"})
        forkserver._forkserver.__init__()  # type: ignore[misc] - those of this process are none of its own
        resource_tracker._resource_tracker.__init__()  # type: ignore[misc]
        util.spawnv_passfds = _forked_server  # type: ignore[attr-defined]
        if most_bytes is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float) -> int:
        limit = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > limit:
                raise subprocess.TimeoutExpired(self.args, timeout)
            time.sleep(0.01)
        return int(self.returncode or 0)

    def communicate(self, timeout: float) -> tuple[str, str]:
        self.wait(timeout)
        out, err = (path.read_text(errors="replace") for path in self._said)
        for path in self._said:
            path.unlink()
        return out, err

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
