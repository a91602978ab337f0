"""Where a rank stands in its run: what ranks that have lost one compare, and what one that is behind is given.

In: every update that is made, and the end of what is due after it. Out: the last update whose state this rank holds,
and what the loop needs to go on from there.

An update is made on a rank or it is not: nothing is exchanged while weights change. What comes after it (a line, an
evaluation, a checkpoint) can be broken off, and is then done once more from what was counted before it began.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from lockstep.checkpoint.progress import Progress
from lockstep.data.batch import StepResult


class Regroup(Exception):
    """After this step ranks meet again, with more of them: raised on all ranks at the same step."""


@dataclass
class TrainState:
    """Of one rank."""

    step: int  # updates made; their state is what this rank holds
    done: int = -1  # the same, once everything is done that is due after them
    rate: float = 0.0
    result: StepResult | None = None  # of the last update, where it was made since the job came to train
    before: Any = None  # the loop's meter, and the progress of evaluations, before what is due after the update began
    progress: Progress | None = None
    now: Any = None  # the meter as it is
    saves: bool = False  # whether a checkpoint is owed, for one that a lost rank has broken off

    def __post_init__(self) -> None:
        self.done = max(self.done, self.step)

    @property
    def open(self) -> bool:
        """Whether something is to be done after the last update."""
        return self.done < self.step

    @property
    def meter(self) -> Any:
        """For the loop that goes on from here."""
        if self.open:
            self.now = deepcopy(self.before)
        return self.now

    def updated(
        self, step: int, result: StepResult, rate: float, meter: Any, progress: Progress, changes: bool
    ) -> None:
        """An update was made. `changes`: what comes after it writes into `meter`."""
        self.step, self.result, self.rate, self.progress, self.now = step, result, rate, progress, meter
        self.before = deepcopy(meter) if changes else meter

    def closed(self) -> None:
        """All is done that was due."""
        self.done, self.saves = self.step, False

    def reopen(self, saves: bool = False) -> None:
        """What is due after the last update is to be done once more; there is none where the job has just come to
        train."""
        if self.result is not None:
            self.done, self.saves = self.step - 1, saves
