"""Requests to stop: signals, and how often a person has pressed Ctrl-C.

In: signals. Out: which of them are listened to here, and whether one came. Imports nothing of ours, and no torch.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

# The last one is sent by a terminal that closes; nohup ignores it.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
# Of one Ctrl-C a process may hear several times: from the terminal, and from a torchrun or a timeout that passes it on.
AGAIN_S = 1.0


Handler = Callable[[int, FrameType | None], Any] | signal.Handlers


class Stopped(BaseException):
    """A stop signal came within `StopRequest.interrupts`."""


def heard() -> list[signal.Signals]:
    """The stop signals that whoever started this process has not had ignored; only SIGHUP ever is on purpose."""
    return [n for n in STOP_SIGNALS if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]


@contextmanager
def handled(handler: Handler, numbers: Iterable[int] | None = None) -> Iterator[None]:
    """A context in which `handler` has these signals (default: those that are `heard`). In another thread than the main
    one, which may not set any, it changes nothing."""
    main = threading.current_thread() is threading.main_thread()
    before = {n: signal.signal(n, handler) for n in (heard() if numbers is None else numbers)} if main else {}
    try:
        yield
    finally:
        for number, handler_before in before.items():
            signal.signal(number, handler_before or signal.SIG_DFL)


def say_what_ended() -> None:
    """Until training listens: one of these ends this process as ever, but not without a word. Ctrl-C has its own."""
    if threading.current_thread() is threading.main_thread() and os.environ.get("RANK", "0") == "0":
        for number in heard():
            if number != signal.SIGINT:
                signal.signal(number, _end)


def _end(number: int, frame: FrameType | None) -> None:
    _say_that_it_ended(number)
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _say_that_it_ended(number: int) -> None:
    name = signal.Signals(number).name
    text = f"lockstep: ended by {name}, which came while nothing was being trained; what was saved before is there\n"
    os.write(2, text.encode())  # a handler must not wait for a lock that what it interrupts may hold


def listen_no_more() -> None:
    """All is done but to end with the right status: a signal must not make it another one."""
    if threading.current_thread() is threading.main_thread():
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)


class StopRequest:
    """Whether this process has been asked to stop: by a signal once it listens, or by the clock."""

    def __init__(self, after_s: float | None = None) -> None:
        """`after_s`: by the clock, so many seconds from now."""
        self.came = False
        self._number = signal.SIGTERM  # the one that came last
        self._raises = False
        self._until = time.monotonic() + (math.inf if after_s is None else after_s)

    def listen(self) -> None:
        """Handle stop signals from now on. The second Ctrl-C ends this process at once."""
        for number in heard():
            signal.signal(number, self.on_signal)
        end_at_second_interrupt()

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        self.came, self._number = True, signal.Signals(number)
        if self._raises:
            self._raises = False  # once: what tidies up is left alone
            raise Stopped

    def requested(self, by_clock: bool = True) -> bool:
        """Whether one came; `by_clock`: or the time is over, which counts as one from then on."""
        self.came = self.came or (by_clock and time.monotonic() > self._until)
        return self.came

    @contextmanager
    def interrupts(self) -> Iterator[None]:
        """A context in which a stop signal raises at once, and does not wait for the end of a step. Errors: `Stopped`,
        also where the signal came before."""
        self._raises = not self.came
        try:
            if self.came:
                raise Stopped
            yield
        finally:
            self._raises = False

    @contextmanager
    def ends(self, alone: bool) -> Iterator[None]:
        """A context in which nothing can be lost yet: a stop signal ends this process at once. `alone`: it is the whole
        job, and says so; else its launcher does. Errors: `KeyboardInterrupt` for Ctrl-C where it is alone."""
        try:
            with self.interrupts():
                yield
        except Stopped:
            if alone and self._number == signal.SIGINT:
                raise KeyboardInterrupt from None
            if alone:
                _say_that_it_ended(self._number)
            end_by_signal()

    def wait(self, seconds: float) -> bool:
        """Until a stop signal comes, or for so long. Returns whether one came."""
        until = time.monotonic() + seconds
        while not self.came and time.monotonic() < until:
            time.sleep(0.02)
        return self.came


def end_by_signal() -> NoReturn:
    """End as SIGTERM ends a process that does not listen to it: whoever asked takes it for what it is."""
    sys.stdout.flush()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)
    os._exit(128 + signal.SIGTERM)  # where it is blocked


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


def end_at_second_interrupt() -> None:
    """The first Ctrl-C asks for a stop at the end of the step; the second one ends this process at once, also while it
    waits in a collective, where no signal handler of Python runs."""
    if threading.current_thread() is not threading.main_thread():
        return
    receive, send = socket.socketpair()
    send.setblocking(False)
    signal.set_wakeup_fd(send.fileno(), warn_on_full_buffer=False)

    def count(receive: socket.socket, send: socket.socket) -> None:  # both stay open as long as this thread
        interrupts = Interrupts()
        while data := receive.recv(64):
            if any(interrupts.again(number) for number in data):
                os._exit(130)

    threading.Thread(target=count, args=(receive, send), name="lockstep-signals", daemon=True).start()
