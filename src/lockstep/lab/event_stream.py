"""Events of a run while it trains, for programs and notebooks.

In: OUTPUT, polled. Out: `Event`s, read from the files that the job writes there: launch.json, events.jsonl (the
journal), metrics.jsonl and samples.jsonl. Text meant for people is not parsed. `bar` shows events as a progress bar in
a notebook cell: HTML if the frontend supports it, else a line of text. Imports no torch.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any, Literal

from lockstep.config.model_selection import Best
from lockstep.distributed import job_record
from lockstep.track.history import objects_of

# described in docs/how-to/python.md
Kind = Literal["prepared", "start", "step", "evaluation", "samples", "checkpoint", "stop", "failed", "finish", "end"]
_ORDER: tuple[Kind, ...] = ("step", "evaluation", "samples", "checkpoint", "stop", "failed", "finish")


@dataclass(frozen=True)
class Event:
    """Something that a run reports while it trains, such as a logged step, an evaluation or a checkpoint."""

    kind: Kind
    step: int  # updates done
    steps: int | None  # of the whole run, once it is known
    split: str | None = None  # of numbers and samples: train, validation or test
    numbers: Mapping[str, float] = field(default_factory=dict)  # of a step or an evaluation, as in metrics.jsonl
    facts: Mapping[str, Any] = field(default_factory=dict)  # further facts, by kind


class Following:
    """Follows one run from now on; earlier content of OUTPUT is skipped."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._journal, self._metrics, self._samples = (
            _Tail(folder / f"{name}.jsonl") for name in ("events", "metrics", "samples")
        )
        record = job_record.read(folder)
        self._began = record.began if record else None
        self._steps: int | None = None
        self._after = 0  # updates done at the newest start
        self._reported: set[tuple[str, int, str]] = set()  # since that start: a repeated step is reported again

    def new(self) -> Iterator[Event]:
        """Return the events since the last call, in the order of steps."""
        record = job_record.read(self._folder)
        if record is not None and record.began != self._began:
            self._began = record.began
            yield Event("prepared", 0, None, facts={"launcher": record.launcher, "processes": record.processes})
        # Measured before the journal is read, which then has the start of every number within these sizes.
        sizes = self._metrics.size, self._samples.size
        events = []
        for line in self._journal.lines(self._journal.size, ("event", "step")):
            what = line["event"]
            if what == "start":
                self._after, self._reported = line["step"], set()
                record = job_record.read(self._folder)
                self._steps = record.steps if record else None
                yield Event("start", line["step"], self._steps, facts=_rest(line))
            elif what in _ORDER and what != "evaluation":  # reported with its numbers
                events.append(Event(what, line["step"], self._steps, facts=_rest(line)))
        for line in self._metrics.lines(sizes[0], ("step", "split")):
            kind: Kind = "step" if line["split"] == "train" else "evaluation"
            if self._is_new(kind, line):
                numbers = {k: float("nan") if v is None else v for k, v in line.items() if k not in ("step", "split")}
                events.append(Event(kind, line["step"], self._steps, line["split"], numbers))
        for line in self._samples.lines(sizes[1], ("step", "split", "samples")):
            if self._is_new("samples", line):
                events.append(
                    Event("samples", line["step"], self._steps, line["split"], facts={"samples": line["samples"]})
                )
        yield from sorted(events, key=lambda event: (event.step, _ORDER.index(event.kind)))

    def end(self, status: str) -> Event:
        """The last event: how the call ended."""
        return Event(
            "end",
            max((step for _, step, _ in self._reported), default=self._after),
            self._steps,
            facts={"status": status},
        )

    def _is_new(self, kind: str, line: Mapping[str, Any]) -> bool:
        key = (kind, line["step"], line["split"])
        if line["step"] <= self._after or key in self._reported:
            return False
        self._reported.add(key)
        return True


def _rest(line: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in line.items() if key not in ("event", "step")}


class _Tail:
    """Reads lines as they are appended to a file of JSON objects, which may be replaced by another file meanwhile."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file, self._at = self._now()

    @property
    def size(self) -> int:
        """Size of the file in bytes. A replaced file is read from its beginning."""
        file, size = self._now()
        if file != self._file or size < self._at:
            self._file, self._at = file, 0
        return size

    def lines(self, until: int, needed: tuple[str, ...]) -> Iterator[dict[str, Any]]:
        """Complete lines before byte `until` that have the keys `needed`."""
        if until <= self._at:
            return
        with open(self._path, "rb") as file:
            file.seek(self._at)
            data = file.read(until - self._at)
        whole = data.rpartition(b"\n")[0] + b"\n" if b"\n" in data else b""
        self._at += len(whole)
        yield from objects_of(whole.splitlines(), needed)

    def _now(self) -> tuple[int, int]:
        """Identity and size of the file."""
        try:
            file_stat = os.stat(self._path)
        except OSError:
            return 0, 0
        return file_stat.st_ino, file_stat.st_size


def bar(by: str | None = None) -> Bar | None:
    """Return a progress bar for the current notebook cell, or None outside of a notebook. `by`: the metric that defines
    the best evaluation."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if shell is None or "IPKernelApp" not in shell.config:  # IPython's terminal has no cells
        return None
    from IPython.display import display

    progress = Bar(by)
    progress.display_handle = display(progress, display_id=True)
    return progress


class Bar:
    """A progress bar with two representations, HTML and text, as IPython requires."""

    def __init__(self, by: str | None = None) -> None:
        self.step, self.steps, self.state = 0, 0, "preparing"
        self.numbers, self._best = "", Best(by)
        self.display_handle: Any = None  # the replaceable display in the cell

    def __call__(self, event: Event) -> None:
        """Show an event."""
        self.step, self.steps = event.step or self.step, event.steps or self.steps
        if event.kind in ("start", "step"):
            self.state = "training"
        elif event.kind == "end":
            self.state = str(event.facts["status"])
        if event.split == "validation":
            self._best.update(event.step, event.numbers)
        if event.kind == "step" and math.isfinite(event.numbers.get("loss", math.nan)):
            self.numbers = f"loss {event.numbers['loss']:.4f}"
        if self.display_handle is not None:
            self.display_handle.update(self)

    def __repr__(self) -> str:
        full = 30 * self.step // self.steps if self.steps else 0
        return f"[{'#' * full}{'.' * (30 - full)}] {self._text}"

    def _repr_html_(self) -> str:
        bar = f'<progress value="{self.step}" max="{self.steps or 1}" style="width: 20em"></progress>'
        return f"{bar} {escape(self._text)}"

    @property
    def _text(self) -> str:
        far = f"{self.step:,}/{self.steps:,}" if self.steps else ""
        return "  ".join(filter(None, (self.state, far, self.numbers, self._best.text)))
