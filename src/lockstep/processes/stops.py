"""What asks a process to stop, and how often a person has pressed Ctrl-C.

In: signals. Out: which of them are listened to here. Imports nothing of ours, and no torch.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from types import FrameType

# The last one is what a terminal sends when it is closed; nohup has it ignored.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
# Of one Ctrl-C a process may hear several times: from the terminal, and from a torchrun or a timeout that passes it on.
AGAIN_S = 1.0


def heard() -> list[signal.Signals]:
    """The stop signals that whoever started this process has not had ignored; only SIGHUP ever is on purpose."""
    return [n for n in STOP_SIGNALS if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]


def say_what_ended() -> None:
    """Until training listens: one of these ends this process as ever, but not without a word. Ctrl-C has its own."""
    if threading.current_thread() is threading.main_thread() and os.environ.get("RANK", "0") == "0":
        for number in heard():
            if number != signal.SIGINT:
                signal.signal(number, _end)


def _end(number: int, frame: FrameType | None) -> None:
    name = signal.Signals(number).name
    text = f"lockstep: ended by {name}, which came while nothing was being trained; what was saved before is there\n"
    os.write(2, text.encode())  # a handler must not wait for a lock that what it interrupts may hold
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def listen_no_more() -> None:
    """All is done but to end with the right status: a signal must not make it another one."""
    if threading.current_thread() is threading.main_thread():
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)


class Interrupts:
    """Tells a second Ctrl-C from the first one that is heard twice."""

    def __init__(self) -> None:
        self._first = math.inf

    def again(self, number: int) -> bool:
        """Whether this signal is a Ctrl-C, `AGAIN_S` or more after the first."""
        if number != signal.SIGINT:
            return False
        now = time.monotonic()
        self._first = min(now, self._first)
        return now - self._first >= AGAIN_S
