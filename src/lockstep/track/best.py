"""The best evaluation of a run so far, by one metric of its validation split.

In: metrics as they come. Out: which step had the best, for the terminal and the report. `checkpoint.best` of the run
file names the metric; where it names none, the loss decides.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


class Best:
    """`by` is a metric's name, `-loss` where less is better."""

    def __init__(self, by: str | None = None) -> None:
        self.name = (by or "-loss").removeprefix("-")
        self._less = (by or "-loss").startswith("-")
        self.step: int | None = None
        self.value = 0.0
        self.numbers: Mapping[str, Any] = {}  # all metrics of that evaluation

    def update(self, step: int, numbers: Mapping[str, Any]) -> bool:
        """Whether the evaluation after `step` is better than all before it."""
        value = numbers.get(self.name)
        if not isinstance(value, int | float) or not math.isfinite(value):
            return False
        if self.step is not None and not self._beats(value, self.value):
            return False
        self.step, self.value, self.numbers = step, float(value), dict(numbers)
        return True

    def beats(self, value: float) -> bool:
        """Whether the best evaluation is better than one with this value."""
        return self.step is not None and self._beats(self.value, value)

    def _beats(self, value: float, other: float) -> bool:
        return value < other if self._less else value > other

    @property
    def text(self) -> str:
        """`best validation loss 0.5 (step 200)`; empty before the first evaluation."""
        return f"best validation {self.name} {self.value:.4g} (step {self.step})" if self.step is not None else ""
