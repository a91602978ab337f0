"""The interface of a tracker: a sink for numbers and samples, on rank 0 only.

In: `log(step, split, numbers)`. Out: a file, a service. A tracker never changes or stops training: `track/trackers.py`
calls each one in its own thread and drops one that fails.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from lockstep.config import plugins
from lockstep.config.run import Run, RunError
from lockstep.config.sections import Section
from lockstep_trace.redaction import printable, redact_all

# How a run ended: at its last step, stopped on request (resumable), or failed.
End = Literal["done", "stopped", "failed"]
Sample = Mapping[str, str]  # one prediction, by column: source, written, reference, ...


class Tracker(ABC):
    """Base class of trackers. All methods are called in sequence in one thread; none is collective."""

    plugin: ClassVar[str] = "track"
    packages: ClassVar[tuple[str, ...]] = ()  # required packages; the extra that installs them has the tracker's name

    class Options(Section):
        """The tracker's keys in the run file: `track.NAME`."""

    stored: int | None = None  # set by `open`: last step in the sink of a continued run, if it may lack some; see `log`

    def __init__(self, run: Run, options: Any, after: int, run_id: str | None) -> None:
        """`options`: an instance of `Options`. `after`: updates done before this process; later steps in the sink will
        be logged again. `run_id`: the sink's id of this run, from the checkpoint it resumes from, or None. A
        tracker that chooses the id itself does so here, because the first checkpoint may be written before `open`
        returns."""
        self.run, self.options, self.after, self.run_id = run, options, after, run_id

    @property
    def config(self) -> dict[str, Any]:
        """The resolved run as plain values without secrets, for sinks that store it."""
        return redact_all(self.run.model_dump(mode="json"), printable)

    @classmethod
    def check(cls) -> None:
        """Check, before any process starts, that the tracker's packages are installed. Errors: `RunError`."""
        if missing := plugins.lacking(cls.packages):
            extra = cls.__module__.rpartition(".")[2]
            raise RunError(
                "LS0500",
                f"track.to: {extra} needs {', '.join(missing)}, which is not installed: "
                f"pip install 'lockstep-train[{extra}]'",
            )

    @abstractmethod
    def open(self) -> str:
        """Connect, continuing the run `run_id` if it is set; otherwise set `run_id` if the sink has ids. Returns where
        the user can see the numbers. May take long. Errors: any exception; training continues without the sink."""

    @abstractmethod
    def log(self, step: int, split: str, numbers: dict[str, float]) -> None:
        """Log numbers of a split (`train`, `validation`, `test`) after `step` updates, or of all ranks (`system`).
        Steps never decrease. After `open`, steps after `stored` and up to `after` are logged again, because a kill
        loses what a sink holds back."""

    def show(self, step: int, samples: Sequence[Sample]) -> None:  # noqa: B027 - not every sink holds texts
        """Log predictions for a few examples after `step` updates; all have the same columns."""

    def close(self, end: End) -> None:  # noqa: B027 - most have nothing to flush
        """Flush and release all resources."""


def named(split: str, numbers: Mapping[str, float]) -> dict[str, float]:
    """Rename numbers to the usual keys: `train/loss`, `eval/accuracy`, `test/loss`, `system/memory_gb/rank0`."""
    place = "eval" if split == "validation" else split
    return {f"{place}/{name}": value for name, value in numbers.items()}
