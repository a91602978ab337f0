"""The current activity of this process, shown if it hangs.

A process does one thing at a time, so there is one value, `ACTIVITY`. Updating it costs two assignments. Imports
nothing of lockstep.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class Activity:
    """The name of the current activity, and how often it changed."""

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
