"""The current activity of this process, and the progress line that shows it during slow work before training: imports,
downloads, tokenizing.

A process does one thing at a time, so there is one activity, `ACTIVITY`; the watchdog reports it if the process hangs.
The progress line takes a function that returns it. On a terminal it is one animated line that disappears at the end;
elsewhere, plain lines at growing intervals.

A process that exits at once, without its `finally` clauses, first calls `clear_displays`, so that no line that it
redraws in the terminal stays behind.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import cycle
from types import TracebackType
from typing import Any, TextIO, cast

from rich.console import Console as RichConsole
from rich.console import RenderableType
from rich.constrain import Constrain
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from lockstep_trace import streams
from lockstep_trace.redaction import printable

_COUNTED = re.compile(r"([0-9][0-9,]*) of ([0-9][0-9,]*)")
_SURE_S = 3.0  # seconds of counting before the remaining time is shown
ECHO = 2  # free columns at the end of an animated line, where the terminal echoes ^C without a line break
FIRST_S = 0.5  # delay before the line of a command appears
PAUSES_S = (10.0, 20.0, 30.0)  # between the first plain lines; afterwards 60 s


class Activity:
    """The name of the current activity, and how often it changed. Updating it costs two assignments."""

    def __init__(self) -> None:
        self.name, self.moves = "at the start", 0

    def set(self, name: str) -> None:
        """Set the current activity."""
        self.name = name
        self.moves += 1

    @contextmanager
    def during(self, name: str) -> Iterator[None]:
        """Set the current activity, and restore the previous one afterwards."""
        before = self.name
        self.set(name)
        try:
            yield
        finally:
            self.set(before)


ACTIVITY = Activity()


class ProgressNote:
    """Context manager that shows the progress line below other output of the same console. On a terminal where a
    `CommandNote` already shows the activity, it shows nothing."""

    def __init__(self, rich: RichConsole, say: Callable[[str], None], place: Callable[[], str]) -> None:
        self._rich, self._say, self._place = rich, say, place
        self._over = threading.Event()
        self._live: Live | None = None
        self._thread: threading.Thread | None = None
        self._counted: tuple[str, int, float] | None = None  # what is counted, first count, its time
        self._spinner = Spinner("dots")

    def __enter__(self) -> ProgressNote:
        self._began = time.monotonic()
        if CommandNote.visible_on_terminal:
            return self  # two animated lines would overwrite each other
        if self._rich.is_interactive:
            self._live = Live(console=self._rich, get_renderable=self._line, transient=True, refresh_per_second=4)
            self._live.start(refresh=True)
            add_display(self._live.stop)
            self._rich.show_cursor(True)  # keep the cursor visible if the process is killed
        else:
            self._thread = threading.Thread(target=self._speak, name="lockstep-busy", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, caught: BaseException | None, at: TracebackType | None
    ) -> None:
        self._over.set()
        if self._live is not None:
            remove_display(self._live.stop)
            self._live.stop()
        elif self._thread is not None:
            self._thread.join()

    def _line(self) -> Constrain:
        row = Table.grid(padding=(0, 1))
        place = self._place()
        label = Text(place, no_wrap=True, overflow="ellipsis")
        row.add_row(self._spinner.render(time.monotonic()), label, *self._progress(place), self._clock)
        return Constrain(row, self._rich.width - ECHO)

    def _progress(self, place: str) -> list[RenderableType]:
        """Return a bar and the remaining time if the activity contains `N of M`."""
        if (match := _COUNTED.search(place)) is None:
            return []
        (done, total), what = (int(number.replace(",", "")) for number in match.groups()), place[: match.start()]
        if self._counted is None or self._counted[0] != what:
            self._counted = what, done, time.monotonic()
        _, first, since = self._counted
        took = time.monotonic() - since
        remaining = int(took * (total - done) / (done - first)) if done > first and took > _SURE_S else None
        bar = ProgressBar(total=max(1, total), completed=min(done, total), width=20)
        return [bar, *([] if remaining is None else [f"{remaining // 60}:{remaining % 60:02d} left,"])]

    def _speak(self) -> None:
        pauses = iter(PAUSES_S)
        while not self._over.wait(next(pauses, 60.0)):
            self._say(f"{self._place()} ({self._clock})")

    @property
    def _clock(self) -> str:
        seconds = int(time.monotonic() - self._began)
        return f"{seconds // 60}:{seconds % 60:02d}"


# -- slow commands -----------------------------------------------------------------------------------------------------


class CommandNote:
    """Context manager that animates a line on standard error while a command computes.

    The line disappears before anything is written to standard output. Without a terminal it is not shown."""

    visible_on_terminal = False

    def __init__(self, place: Callable[[], str]) -> None:
        self._place, self._out, self._err = place, sys.stdout, sys.stderr
        self._lock, self._over, self._visible = threading.RLock(), threading.Event(), False
        self._thread: threading.Thread | None = None

    def __enter__(self) -> CommandNote:
        if sys.stderr.isatty() and os.environ.get("TERM") != "dumb" and "RANK" not in os.environ:
            self._began = time.monotonic()
            self._err = sys.stderr  # a display of rich may replace sys.stderr, and waits for its own lock
            self._out, sys.stdout = sys.stdout, cast(TextIO, _Above(sys.stdout, self))
            self._thread = threading.Thread(target=self._show, name="lockstep-waiting", daemon=True)
            self._thread.start()
            CommandNote.visible_on_terminal = True
        return self

    def __exit__(self, kind: object, caught: object, at: object) -> None:
        if self._thread is not None:
            self._over.set()
            self._thread.join()
            self.clear()
            CommandNote.visible_on_terminal = False
            sys.stdout = self._out

    def clear(self) -> None:
        """Erase the line until it is drawn again."""
        with self._lock:
            if self._visible:
                streams.put(self._err, streams.CLEAR, flush=True)
                self._visible = False

    def write_above(self, file: TextIO, text: str) -> int:
        """Erase the line and write to `file`, before the line can be drawn again."""
        with self._lock:
            self.clear()
            count = file.write(text)
            if file.isatty():
                file.flush()
            return count

    def _show(self) -> None:
        spinner = cycle("⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏")
        pause = FIRST_S
        while not self._over.wait(pause):
            pause = 0.2
            passed = int(time.monotonic() - self._began)
            tail = f" {passed // 60}:{passed % 60:02d}"
            room = max(10, shutil.get_terminal_size((80, 24)).columns - len(tail) - 3)
            with self._lock:
                # return the cursor, so that output of child processes starts in the first column
                line = f"{streams.CLEAR}{next(spinner)} {printable(self._place())[:room]}{tail}\r"
                streams.put(self._err, line, flush=True)
                self._visible = True


class _Above:
    """Standard output that erases the animated line before each write."""

    def __init__(self, file: TextIO, note: CommandNote) -> None:
        self._file, self._note = file, note

    def write(self, text: str) -> int:
        return self._note.write_above(self._file, text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


# -- lines that this process redraws ------------------------------------------------------------------------------

_STOPS: list[Callable[[], object]] = []  # one per display that is shown


def add_display(stop: Callable[[], object]) -> None:
    """Register a display. `stop`: removes it from the terminal."""
    _STOPS.append(stop)


def remove_display(stop: Callable[[], object]) -> None:
    """Unregister a display; no effect if `stop` is not registered."""
    with suppress(ValueError):
        _STOPS.remove(stop)


def clear_displays(timeout_s: float = 0.5) -> None:
    """Remove all displays from the terminal; may be called in any thread. Gives up after `timeout_s` seconds, because
    another thread may hold a display's lock for ever."""

    def stop_all() -> None:
        for stop in list(_STOPS):
            with suppress(Exception):
                stop()

    thread = threading.Thread(target=stop_all, name="lockstep-displays", daemon=True)
    thread.start()
    thread.join(timeout_s)
