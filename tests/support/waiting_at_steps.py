"""A strategy that waits before a step for as long as a test wants, so that something can happen within a job. Same
bits.
"""

import os
import time
from pathlib import Path
from typing import Any

from lockstep.strategies.allreduce import AllReduce
from support.at_once import SavesAtOnce

HOLD = Path("hold")


def must_wait(step: int) -> bool:
    """Whether a step may not start yet. The file may disappear at any moment."""
    try:
        return step >= int(HOLD.read_text() or 0)
    except FileNotFoundError:
        return False


class Held(SavesAtOnce, AllReduce):
    """`allreduce`; while a file `hold` exists in the working directory, no step from the one it names begins, unless a
    rank is asked to stop, which a file `asked` reports. The checkpoint of two steps before exists then."""

    def train_step(self, batch: Any, learning_rate: float) -> Any:
        while must_wait(batch.step) and not self.world.stop.came:
            time.sleep(0.05)
        if HOLD.exists() and self.world.stop.came:
            Path("asked").touch()
        return super().train_step(batch, learning_rate)


class Together(SavesAtOnce):
    """Mixin for ranks that will rendezvous again: a held rank goes on if a rank fails or joins."""

    world: Any

    def train_step(self, batch: Any, learning_rate: float) -> Any:
        members = self.world.members
        while must_wait(batch.step) and not self.world.stop.came:
            if members is not None and (members.lost or members.offered):
                break
            time.sleep(0.05)
        if HOLD.exists() and self.world.stop.came:
            Path("asked").touch()
        return super().train_step(batch, learning_rate)  # type: ignore[misc]


class HeldTogether(Together, AllReduce):
    """`allreduce`."""


class Told(Held):
    """`Held` that writes the port of the ranks' store to a file."""

    def train_step(self, batch: Any, learning_rate: float) -> Any:
        Path("port").write_text(os.environ["MASTER_PORT"])
        return super().train_step(batch, learning_rate)
