"""The interface of a tracker: a sink for numbers, on rank 0 only.

In: `log(step, split, numbers)`. Out: a terminal, a file, a service. A tracker never changes what is trained.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from lockstep.run import Run


class Tracker(ABC):
    """One sink."""

    plugin: ClassVar[str] = "track"

    def __init__(self, run: Run, after: int) -> None:
        """`after`: updates done before this process; what the sink holds of later steps is to be written again."""
        self.run = run

    @classmethod  # noqa: B027 - most need nothing
    def check(cls) -> None:
        """Refuse, before any process starts, what this tracker lacks. Errors: `RunError`."""

    @abstractmethod
    def log(self, step: int, split: str, numbers: dict[str, float]) -> None:
        """Numbers of a split (`train`, `validation`, `test`) after `step` updates."""

    def show(self, step: int, samples: list[str]) -> None:  # noqa: B027 - not every sink holds texts
        """Texts that the model wrote after `step` updates."""

    def close(self) -> None:  # noqa: B027 - most have nothing to flush
        """Flush and give everything back."""
