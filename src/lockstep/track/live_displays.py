"""Registry of the live displays of this process: progress lines that it redraws in its terminal.

A process that exits at once, without its `finally` clauses, calls `clear` first, so that no display stays behind.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

_STOPS: list[Callable[[], object]] = []  # one per display that is shown


def add(stop: Callable[[], object]) -> None:
    """Register a display. `stop`: removes it from the terminal."""
    _STOPS.append(stop)


def remove(stop: Callable[[], object]) -> None:
    """Unregister a display; no effect if `stop` is not registered."""
    with suppress(ValueError):
        _STOPS.remove(stop)


def clear(timeout_s: float = 0.5) -> None:
    """Remove all displays from the terminal; may be called in any thread. Gives up after `timeout_s` seconds, because
    another thread may hold a display's lock for ever."""

    def stop_all() -> None:
        for stop in list(_STOPS):
            with suppress(Exception):
                stop()

    thread = threading.Thread(target=stop_all, name="lockstep-displays", daemon=True)
    thread.start()
    thread.join(timeout_s)
