"""Checkpoints that are complete two steps later on any machine, for strategies that hold a job.

A rank's file is written in a thread beside the steps, and the folder is renamed at a later step boundary. How many
steps that takes depends on the machine, and a held job makes none.
"""

from collections.abc import Callable
from typing import Any

from lockstep.checkpoint import shard_files


class AtOnce(shard_files.Background):
    """Work that is finished on creation."""

    def __init__(self, work: Callable[[], Any]) -> None:
        super().__init__(work)
        self.wait()


class SavesAtOnce:
    """Mixin of a strategy: its ranks wait for the writing thread."""

    def build(self, task: Any) -> None:
        shard_files.Background = AtOnce  # type: ignore[misc] - in a rank's process; `checkpoint.py` looks for it there
        super().build(task)  # type: ignore[misc]
