"""Requests to stop: signals, and repeated Ctrl-C.

In: signals. Out: which signals this process handles, and whether one came. Imports neither lockstep nor torch.
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

from lockstep.track import busy

# A terminal that closes sends SIGHUP; nohup ignores it.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
# One Ctrl-C may arrive several times: from the terminal, and from a torchrun or timeout that forwards it.
AGAIN_S = 1.0


Handler = Callable[[int, FrameType | None], Any] | signal.Handlers


class Stopped(BaseException):
    """A stop signal came within `StopRequest.interrupts`."""


def heard() -> list[signal.Signals]:
    """Return the stop signals to handle: all except SIGHUP if the parent process ignored it (nohup)."""
    return [n for n in STOP_SIGNALS if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]


@contextmanager
def handled(handler: Handler, numbers: Iterable[int] | None = None) -> Iterator[None]:
    """A context in which `handler` handles these signals (default: those of `heard`). Does nothing outside the main
    thread, which alone may set handlers."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in (heard() if numbers is None else numbers)}
    try:
        yield
    finally:
        for number, handler_before in before.items():
            signal.signal(number, handler_before or signal.SIG_DFL)


def say_what_ended() -> None:
    """Until training handles signals: let each end this process as usual, but with a message. Ctrl-C has its own
    message."""
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
    text = f"lockstep: ended by {name} while nothing was being trained; files saved before are intact\n"
    os.write(2, text.encode())  # a handler must not take a lock that the interrupted code may hold


def listen_no_more() -> None:
    """Ignore stop signals: only the exit with the right status is left."""
    if threading.current_thread() is threading.main_thread():
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)


class StopRequest:
    """A request to stop this process: by a signal, or by the clock."""

    def __init__(self, after_s: float | None = None) -> None:
        """`after_s`: request a stop this many seconds from now."""
        self.came = False
        self._number = signal.SIGTERM  # the last one
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
            self._raises = False  # only once, so that cleanup is not interrupted
            raise Stopped

    def requested(self, by_clock: bool = True) -> bool:
        """Whether a stop signal came. With `by_clock`, the end of the time limit counts as one."""
        self.came = self.came or (by_clock and time.monotonic() > self._until)
        return self.came

    @contextmanager
    def interrupts(self) -> Iterator[None]:
        """A context in which a stop signal raises at once instead of waiting for the end of a step. Errors: `Stopped`,
        also if the signal came before."""
        self._raises = not self.came
        try:
            if self.came:
                raise Stopped
            yield
        finally:
            self._raises = False

    @contextmanager
    def ends(self, alone: bool) -> Iterator[None]:
        """A context without progress to lose: a stop signal ends this process at once. `alone`: this process is the
        whole job and prints a message; else its launcher does. Errors: `KeyboardInterrupt` for Ctrl-C if alone."""
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
        """Wait until a stop signal comes or `seconds` have passed. Returns whether one came."""
        until = time.monotonic() + seconds
        while not self.came and time.monotonic() < until:
            time.sleep(0.02)
        return self.came


def end_by_signal() -> NoReturn:
    """End as if by an unhandled SIGTERM, so that the parent process sees that signal."""
    sys.stdout.flush()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)
    os._exit(128 + signal.SIGTERM)  # if SIGTERM is blocked


class Interrupts:
    """Distinguishes a second Ctrl-C from a first one that arrives twice."""

    def __init__(self) -> None:
        self._first = math.inf

    def again(self, number: int) -> bool:
        """Whether this signal is a Ctrl-C `AGAIN_S` or more after the first."""
        if number != signal.SIGINT:
            return False
        now = time.monotonic()
        self._first = min(now, self._first)
        return now - self._first >= AGAIN_S


@contextmanager
def interrupted_at_once(text: str, record: Callable[[], None]) -> Iterator[None]:
    """A context in which Ctrl-C ends this process with status 130 even while its main thread waits for other processes
    in native code, where no Python signal handler runs. `text`: written to standard error. `record`: called
    before. Does nothing if Ctrl-C is ignored or handled already."""
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield
        return

    ending = threading.Lock()  # the watcher and the main thread may both arrive here; only one ends the process

    def end() -> None:
        ending.acquire()
        try:
            record()
        finally:  # also if another Ctrl-C interrupts it
            os.write(2, text.encode())
            os._exit(130)

    receive, send = socket.socketpair()
    send.setblocking(False)

    def watch() -> None:
        while data := receive.recv(64):
            if signal.SIGINT in data:
                end()

    before = signal.set_wakeup_fd(send.fileno(), warn_on_full_buffer=False)
    watcher = threading.Thread(target=watch, name="lockstep-interrupt", daemon=True)
    watcher.start()
    try:
        yield
    except KeyboardInterrupt:  # the watcher may not have had its turn yet
        end()
    finally:
        signal.set_wakeup_fd(before)
        send.close()
        watcher.join()
        receive.close()


def end_at_second_interrupt() -> None:
    """End this process at the second Ctrl-C, even while it waits in a collective, where no Python signal handler runs.
    (The first requests a stop at the end of the step.)"""
    if threading.current_thread() is not threading.main_thread():
        return
    receive, send = socket.socketpair()
    send.setblocking(False)
    signal.set_wakeup_fd(send.fileno(), warn_on_full_buffer=False)

    def count(receive: socket.socket, send: socket.socket) -> None:  # arguments keep the sockets open
        interrupts = Interrupts()
        while data := receive.recv(64):
            if any(interrupts.again(number) for number in data):
                busy.clear_displays()
                os._exit(130)

    threading.Thread(target=count, args=(receive, send), name="lockstep-signals", daemon=True).start()
