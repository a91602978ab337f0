"""The interface of a tracker: a sink for numbers and samples, on rank 0 only.

In: `log(step, split, numbers)`. Out: a file, a service. A tracker never changes what is trained, and never stops it:
`track/trackers.py` calls each one in a thread of its own and goes on without one that fails.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from lockstep.config import plugins
from lockstep.config.redaction import printable, redact_all
from lockstep.config.run import Run, RunError
from lockstep.config.sections import Section

# How a run ended: it reached its last step, was stopped on request and can be resumed, or failed.
End = Literal["done", "stopped", "failed"]
Sample = Mapping[str, str]  # something the model made of an example, by column, such as source, written, reference


class Tracker(ABC):
    """One sink. Every method is called in the same thread, one after the other; none is collective."""

    plugin: ClassVar[str] = "track"
    packages: ClassVar[tuple[str, ...]] = ()  # what it imports; the extra that installs them has the tracker's name

    class Options(Section):
        """The tracker's own keys in the run file: `track.NAME`."""

    def __init__(self, run: Run, options: Any, after: int, run_id: str | None) -> None:
        """`options`: its own `Options`. `after`: updates done before this process; what the sink holds of later steps
        will be logged again. `run_id`: what the sink called this run when the checkpoint was made that it goes on
        from, or None."""
        self.run, self.options, self.after, self.run_id = run, options, after, run_id

    @property
    def config(self) -> dict[str, Any]:
        """The resolved run as plain values, for a sink that keeps it: without secrets."""
        return redact_all(self.run.model_dump(mode="json"), printable)

    @classmethod
    def check(cls) -> None:
        """Refuse, before any process starts, a tracker that is not installed. Errors: `RunError`."""
        if missing := plugins.lacking(cls.packages):
            extra = cls.__module__.rpartition(".")[2]
            raise RunError(
                "LS0500",
                f"track.to: {extra} needs {', '.join(missing)}, which is not installed: "
                f"pip install 'lockstep-train[{extra}]'",
            )

    @abstractmethod
    def open(self) -> str:
        """Connect, as the run `run_id` where there is one, and set `run_id` if the sink has such a thing. Returns where
        the numbers can be seen, for the user. May take long. Errors: any exception; training goes on without."""

    @abstractmethod
    def log(self, step: int, split: str, numbers: dict[str, float]) -> None:
        """Numbers of a split (`train`, `validation`, `test`) after `step` updates, or of all ranks (`system`). Steps
        never go back."""

    def show(self, step: int, samples: Sequence[Sample]) -> None:  # noqa: B027 - not every sink holds texts
        """What the model makes of a few examples after `step` updates; all have the same columns."""

    def close(self, end: End) -> None:  # noqa: B027 - most have nothing to flush
        """Flush and give everything back."""


def named(split: str, numbers: Mapping[str, float]) -> dict[str, float]:
    """Numbers under the field's names: `train/loss`, `eval/accuracy`, `test/loss`, `system/memory_gb/rank0`."""
    place = "eval" if split == "validation" else split
    return {f"{place}/{name}": value for name, value in numbers.items()}
