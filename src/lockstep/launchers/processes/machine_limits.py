"""What several ranks need of a machine: threads, open files, shared memory, /proc, and the loopback interface.

In: nothing. Out: a message that says what is missing, before any rank starts.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import socket
import sys

from lockstep.config.errors import RunError
from lockstep.distributed.process_limits import lacking_threads, threads_of_imports

_CONNECT_S = 2.0
# Open files of the process that has the most: measured 41 with 2 ranks, 62 with 4, 79 with 8
_FILES, _FILES_OF_A_RANK = 48, 4
# Threads and processes: measured 13 of the launcher, 3 of its servers, 12 to 15 of a rank; libraries may start fewer
_THREADS, _THREADS_OF_A_RANK = 8, 10


def check(loopback: str | None, processes: int) -> None:
    """Refuse a machine on which ranks cannot start. `loopback`: the address at which they meet if it is this
    machine's own; `processes`: the number of ranks on it. Errors: `RunError`."""
    check_open_files(processes)
    check_threads(processes)
    check_shared_memory()
    if loopback is not None:
        check_loopback(loopback)


def check_open_files(processes: int) -> None:
    """Raise the limit of open files of this process and its children as far as the machine permits. Errors: `RunError`
    if that is too low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return
    needed = _FILES + _FILES_OF_A_RANK * processes
    permitted = max(soft, 65_536) if hard == resource.RLIM_INFINITY else hard
    if soft < permitted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (permitted, hard))
            soft = permitted
        except (ValueError, OSError):  # the kernel has another bound
            pass
    if soft < needed:
        raise RunError(
            "LS7510",
            f"ulimit -n allows {soft} open files, and {processes} ranks on a machine need about {needed}; set "
            "ulimit -n 1024",
        )


def check_threads(processes: int) -> None:
    """Refuse a machine on which the threads of `processes` ranks and their launcher cannot run. Errors: `RunError`."""
    imports = 0 if "numpy" in sys.modules else threads_of_imports()
    needed = _THREADS + imports + _THREADS_OF_A_RANK * processes
    if (text := lacking_threads(needed)) is not None:
        raise RunError("LS7511", f"{text}; {processes} ranks on a machine need at least {needed} more threads")


def check_shared_memory() -> None:
    """Refuse a machine without shared memory or /proc. Errors: `RunError`."""
    try:
        multiprocessing.RawValue("i")
        multiprocessing.Semaphore()
    except OSError as error:
        raise RunError(
            "LS7530",
            f"shared memory is not usable ({error.strerror or error}): ranks on one machine need /dev/shm for "
            "memory and locks. Mount it writable with free space (in a container: --shm-size=1g)",
        ) from error
    if sys.platform == "linux" and not os.path.isdir("/proc/self/fd"):
        raise RunError(
            "LS7531",
            "/proc is not mounted, which several ranks on a machine need; mount it (mount -t proc proc /proc), or "
            "train with launch.processes=1",
        )


def check_loopback(address: str) -> None:
    """Refuse a machine whose own address cannot be reached. Errors: `RunError`."""
    try:
        with (
            socket.create_server((address, 0)) as server,
            socket.create_connection(server.getsockname(), _CONNECT_S),
        ):
            pass
    except OSError as error:
        why = str(error.strerror or error).partition(" (while ")[0]  # Python adds the address that is named already
        raise RunError(
            "LS7532",
            f"{address}, the address at which this machine's ranks meet, cannot be reached ({why}); bring up the "
            "loopback interface with that address (ip link set lo up), or train with launch.processes=1",
        ) from error
