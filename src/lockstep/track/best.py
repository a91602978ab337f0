"""The best evaluation of a run so far, by one metric of its validation split.

In: metrics of each evaluation. Out: the step with the best one, for the terminal and the report. `checkpoint.best` in
the run file names the metric; default: the loss.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


class Best:
    """Tracks the best evaluation by the metric `by`; a leading `-` (`-loss`) means lower is better."""

    def __init__(self, by: str | None = None) -> None:
        self.name = (by or "-loss").removeprefix("-")
        self._less = (by or "-loss").startswith("-")
        self.step: int | None = None
        self.value = 0.0
        self.numbers: Mapping[str, Any] = {}  # all metrics of that evaluation

    def update(self, step: int, numbers: Mapping[str, Any]) -> bool:
        """Add an evaluation and return whether it is better than all earlier ones."""
        value = numbers.get(self.name)
        if not isinstance(value, int | float) or not math.isfinite(value):
            return False
        if self.step is not None and not self._beats(value, self.value):
            return False
        self.step, self.value, self.numbers = step, float(value), dict(numbers)
        return True

    def beats(self, value: float) -> bool:
        """Return whether the best evaluation is better than `value`."""
        return self.step is not None and self._beats(self.value, value)

    def _beats(self, value: float, other: float) -> bool:
        return value < other if self._less else value > other

    @property
    def text(self) -> str:
        """`best validation loss 0.5 (step 200)`; empty before the first evaluation."""
        return f"best validation {self.name} {self.value:.4g} (step {self.step})" if self.step is not None else ""
