"""While something takes seconds before training (imports, downloads, tokenising): a line that says what it is.

In: a function that says what is going on. Out: on a terminal one line that moves and vanishes, elsewhere a plain line
now and then, each later than the one before.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console as RichConsole
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

PAUSES_S = (2.0, 3.0, 5.0, 10.0, 20.0, 30.0)  # between plain lines; then a minute


class Busy:
    """For `with`. What is said meanwhile on the same console stands above the line."""

    def __init__(self, rich: RichConsole, say: Callable[[str], None], place: Callable[[], str]) -> None:
        self._rich, self._say, self._place = rich, say, place
        self._over = threading.Event()
        self._live: Live | None = None
        self._spinner = Spinner("dots")

    def __enter__(self) -> Busy:
        self._began = time.monotonic()
        if self._rich.is_interactive:
            self._live = Live(console=self._rich, get_renderable=self._line, transient=True, refresh_per_second=4)
            self._live.start(refresh=True)
            self._rich.show_cursor(True)  # a process that is killed now leaves it as it is
        else:
            self._thread = threading.Thread(target=self._speak, name="lockstep-busy", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, caught: BaseException | None, at: TracebackType | None
    ) -> None:
        self._over.set()
        if self._live is not None:
            self._live.stop()
        else:
            self._thread.join()

    def _line(self) -> Table:
        row = Table.grid(padding=(0, 1))
        row.add_row(
            self._spinner.render(time.monotonic()), Text(self._place(), no_wrap=True, overflow="ellipsis"), self._clock
        )
        return row

    def _speak(self) -> None:
        pauses = iter(PAUSES_S)
        while not self._over.wait(next(pauses, 60.0)):
            self._say(f"{self._place()} ({self._clock})")

    @property
    def _clock(self) -> str:
        seconds = int(time.monotonic() - self._began)
        return f"{seconds // 60}:{seconds % 60:02d}"
