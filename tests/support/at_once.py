"""Checkpoints that are on the disk two steps later, whatever else the machine does: for strategies that hold a job.

A rank's file is written in a thread beside the steps, and the folder gets its name at a step boundary once that is
done: how many steps lie between depends on the machine, and none comes once the job is held.
"""

from collections.abc import Callable
from typing import Any

from lockstep.checkpoint import storage


class AtOnce(storage.Background):
    """Work that is done when this has been made."""

    def __init__(self, work: Callable[[], Any]) -> None:
        super().__init__(work)
        self.wait()


class SavesAtOnce:
    """Mixed into a strategy: its ranks wait for the thread that writes."""

    def build(self, task: Any) -> None:
        storage.Background = AtOnce  # type: ignore[misc] - in a rank's process; `checkpoint.py` looks for it there
        super().build(task)  # type: ignore[misc]
