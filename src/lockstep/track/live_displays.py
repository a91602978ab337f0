"""Live displays of this process: what it draws again and again in its terminal.

A process that ends at once, without its `finally` clauses, takes them off the terminal first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

_STOPS: list[Callable[[], object]] = []  # of the displays that are shown


def add(stop: Callable[[], object]) -> None:
    """Register a display, by the function that takes it off the terminal."""
    _STOPS.append(stop)


def remove(stop: Callable[[], object]) -> None:
    """Take back what `add` has registered; nothing if it is not."""
    with suppress(ValueError):
        _STOPS.remove(stop)


def clear(timeout_s: float = 0.5) -> None:
    """Take all displays off the terminal, from any thread. Gives up after `timeout_s` seconds: another thread may hold
    a display's lock and never come back."""

    def stop_all() -> None:
        for stop in list(_STOPS):
            with suppress(Exception):
                stop()

    thread = threading.Thread(target=stop_all, name="lockstep-displays", daemon=True)
    thread.start()
    thread.join(timeout_s)
