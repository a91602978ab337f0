"""What several ranks on one machine need from it: shared memory, /proc, and the loopback interface.

In: nothing. Out: a message that says what is missing, before any rank starts.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys

from lockstep.config.errors import RunError

_CONNECT_S = 2.0


def check(loopback: str | None) -> None:
    """Refuse a machine on which ranks cannot start. `loopback`: the address at which they meet if it is this
    machine's own. Errors: `RunError`."""
    try:
        multiprocessing.RawValue("i")
        multiprocessing.Semaphore()
    except OSError as error:
        raise RunError(
            "LS7530",
            f"shared memory cannot be used ({error.strerror or error}): the ranks of a machine share memory and locks "
            "in /dev/shm. Mount it writable, with some free space (a container: --shm-size=1g)",
        ) from error
    if sys.platform == "linux" and not os.path.isdir("/proc/self/fd"):
        raise RunError(
            "LS7531",
            "/proc is not mounted, which several ranks on a machine need; mount it (mount -t proc proc /proc), or "
            "train with launch.processes=1",
        )
    if loopback is not None:
        try:
            with (
                socket.create_server((loopback, 0)) as server,
                socket.create_connection(server.getsockname(), _CONNECT_S),
            ):
                pass
        except OSError as error:
            raise RunError(
                "LS7532",
                f"{loopback} cannot be reached ({error.strerror or error}), where the ranks of a machine meet; bring "
                "the loopback interface up (ip link set lo up), or train with launch.processes=1",
            ) from error
