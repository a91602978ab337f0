"""Limits of a process: threads (ulimit -u, and those of containers and machines) and address space (ulimit -v).

In: nothing, or an error that a limit caused. Out: a message that names the limit, or None. Imports no library.
"""

from __future__ import annotations

import errno
import os
import threading
from contextlib import suppress

LEAST_SPACE = 1_250_000_000  # bytes of address space; with fewer, torch, transformers and tokenizers cannot be loaded


def no_threads(error: BaseException) -> str | None:
    """Return the message for a thread or process that cannot be started because of a limit, or None for other
    errors."""
    is_fork = isinstance(error, BlockingIOError) and error.filename is None and error.errno == errno.EAGAIN
    if not is_fork and "can't start new thread" not in str(error):
        return None
    limit = "" if (most := _limit("RLIMIT_NPROC")) is None else f" (ulimit -u: {most})"
    space = "" if _address_space() is None or is_fork else f"address space (ulimit -v: {_address_space()} kB) or of "
    return f"no further thread can be started: the limit of {space}processes and threads{limit} is reached; raise it"


def _limit(name: str) -> int | None:
    """Return a limit of this process, as `resource` names it; None without that limit, and on Windows."""
    try:
        import resource
    except ImportError:
        return None
    most = resource.getrlimit(getattr(resource, name))[0]
    return None if most == resource.RLIM_INFINITY else most


def _address_space() -> int | None:
    """Return the kilobytes of address space that a process may use; None if unlimited."""
    most = _limit("RLIMIT_AS")
    return None if most is None else most // 1024


def no_space() -> str | None:
    """Return the message for a limit of address space under which no model can be loaded, or None."""
    if (most := _address_space()) is None or 1024 * most >= LEAST_SPACE:
        return None
    return (
        f"a process may use {most} kB of address space here (ulimit -v), and torch and transformers need more than "
        f"{LEAST_SPACE // 1024}; run ulimit -v unlimited first"
    )


def no_memory() -> str:
    """Return the message for a `MemoryError`."""
    most = _address_space()
    limit = "" if most is None else f": a process may use {most} kB of address space here (ulimit -v)"
    return f"out of memory{limit}"


def raise_process_limit() -> None:
    """Raise the user's limit of processes and threads for this process and its children as far as permitted."""
    with suppress(ImportError, ValueError, OSError):
        import resource

        hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]
        resource.setrlimit(resource.RLIMIT_NPROC, (hard, hard))


def lacking_threads(count: int | None = None) -> str | None:
    """Return the message for a limit under which `count` further threads cannot run at the same time, or None. Default:
    those that a process starts when it imports numpy, pyarrow and torch.

    Starts and ends that many, because users, containers and machines have limits of their own. Native libraries do not
    survive them: an OpenBLAS that could not start its threads waits for them at exit and before each fork, where no
    signal handler of Python runs."""
    raise_process_limit()
    if _address_space() is not None:  # each thread would reserve a heap
        return None
    release, threads = threading.Event(), []
    size = threading.stack_size(256 * 1024)
    try:
        for _ in range(threads_of_imports() if count is None else count):
            thread = threading.Thread(target=release.wait, daemon=True)
            thread.start()
            threads.append(thread)
    except RuntimeError as caught:
        return no_threads(caught)
    finally:
        threading.stack_size(size)
        release.set()
        for thread in threads:
            thread.join()
    return None


def threads_of_imports() -> int:
    """Return how many threads numpy, pyarrow and torch start when a process imports them."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    variables = [os.environ.get(name, "") for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")]
    most = next((int(value) for value in variables if value.isdecimal() and int(value)), cores)
    return min(most, cores, 64) + 2  # OpenBLAS has 64 at most
