"""Stand-ins for ended processes."""

from __future__ import annotations


class Ended:
    """An ended process with the interface of `multiprocessing`."""

    def __init__(self, exitcode: int | None) -> None:
        self.exitcode, self.pid, self.sentinel = exitcode, 0, 0
