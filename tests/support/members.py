"""Processes that have ended, without one."""

from __future__ import annotations


class Ended:
    """A process as `multiprocessing` has it."""

    def __init__(self, exitcode: int | None) -> None:
        self.exitcode, self.pid, self.sentinel = exitcode, 0, 0
