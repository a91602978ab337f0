"""A wire with a delay between network namespaces, for kernels whose `tc` has none (no sch_netem).

In: names of namespaces, each with an address, and delays in ms on standard input, one a line. Out: a device `slow0` in
each of them, on one wire, until standard input ends. Frames wait in this process for as long as the delay says, each
way, and none is lost or overtaken; how many a second there may be is the kernel's matter (`tc tbf` on `slow0`). Needs
root and /dev/net/tun.
Example: printf '20\n' | python benchmarks/delayed_wire.py one=10.1.0.1/24 two=10.1.0.2/24
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import struct
import subprocess
import sys
import time
from collections import deque

DEVICE = "slow0"
MTU = 9000
_TUNSETIFF, _TAP, _PLAIN = 0x400454CA, 0x0002, 0x1000
_CLONE_NEWNET = 0x40000000
_EVERYBODY = b"\xff" * 6


def enter(space: str) -> None:
    """Move this process into a network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{space}", "rb") as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"namespace {space}")


def end_of(space: str, address: str) -> int:
    """Create the device `DEVICE` in a namespace as one end of the wire."""
    enter(space)
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH", DEVICE.encode(), _TAP | _PLAIN))
    for words in (
        ["link", "set", DEVICE, "mtu", str(MTU), "txqueuelen", "10000", "up"],
        ["addr", "add", address, "dev", DEVICE],
    ):
        subprocess.run(["ip", "-n", space, *words], check=True)
    return end


def carry(ends: list[int]) -> None:
    """Forward frames until standard input ends."""
    delay, waiting = 0.0, deque[tuple[float, int, bytes]]()  # (arrival time, source, frame)
    places: dict[bytes, int] = {}  # address -> where it was last seen
    poll = select.poll()
    for source in (0, *ends):
        poll.register(source, select.POLLIN)
    while True:
        left = None if not waiting else max(0.0, waiting[0][0] - time.monotonic()) * 1e3
        for source, _ in poll.poll(left):
            if source == 0:
                word = os.read(0, 100).decode().split()
                if not word:
                    return
                delay = float(word[-1]) / 1e3
                continue
            for _ in range(64):
                try:
                    frame = os.read(source, MTU + 100)
                except BlockingIOError:
                    break
                places[frame[6:12]] = source
                waiting.append((time.monotonic() + delay, source, frame))
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, source, frame = waiting.popleft()
            known = None if frame[:6] == _EVERYBODY else places.get(frame[:6])
            for end in ends if known is None else [known]:
                if end != source:
                    os.write(end, frame)


if __name__ == "__main__":
    carry([end_of(*word.split("=", 1)) for word in sys.argv[1:]])
