"""Where in the program this process is, for whoever asks when it does not move any more.

A process is in one place: there is one value, `ACTIVITY`. Saying where one is costs two assignments. Imports nothing.
"""

from __future__ import annotations


class Activity:
    """A name for people, and how often it was changed."""

    def __init__(self) -> None:
        self.name, self.moves = "at the start", 0

    def at(self, name: str) -> None:
        """This process is at `name` now."""
        self.name = name
        self.moves += 1


ACTIVITY = Activity()
