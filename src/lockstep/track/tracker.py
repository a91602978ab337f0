"""Trackers: the interface of a sink for numbers and samples, on rank 0 only, and `Trackers`, which calls all sinks of a
run so that none of them can delay or stop training.

In: `log(step, split, numbers)` and `show`. Out: a file, a service. Each tracker has its own thread; one that fails or
falls behind is reported once and dropped. `metrics.jsonl` is written synchronously and has everything. Secrets and
control characters are removed from all texts.
"""

from __future__ import annotations

import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

from lockstep.config import plugins
from lockstep.config.redaction import one_line, redact_all
from lockstep.config.run import Run, RunError
from lockstep.config.sections import Section
from lockstep.track import history
from lockstep_trace.redaction import printable

MOST_WAITING = 10_000  # calls; a tracker further behind will not catch up
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


class Trackers:
    """All trackers of a run. No method raises, and only `close` waits. Not collective."""

    def __init__(
        self,
        run: Run,
        after: int,
        ids: dict[str, str],
        say: Callable[[str], None],
        warn: Callable[[str], None],
        loud: bool = True,
    ) -> None:
        """`after`: updates done. `ids`: tracker -> run id, from the checkpoint; ids of new runs are added when known.
        `say`, `warn`: print to the user. `loud`: whether this rank writes; one rank of a job does."""
        self._wait_s, self._warn, self._warned = run.track.close_timeout_s, warn, False
        jsonl: Any = plugins.find("track", "jsonl")
        self._jsonl: Tracker | None = jsonl(run, None, after, None) if loud else None
        self._lanes = []
        self._names: dict[str, str] = {}  # name of a number -> its printable form
        self._at_once("open")
        for name in dict.fromkeys(run.track.to) if loud else ():
            if name != "jsonl":
                kind: Any = plugins.find("track", name)
                options = kind.Options.model_validate(run.track.options.get(name, {}))
                self._lanes.append(_Lane(name, kind(run, options, after, ids.get(name)), ids, say, warn))

    def log(self, step: int, split: str, numbers: dict[str, float]) -> None:
        """Pass numbers to all trackers (`Tracker.log`)."""
        names = self._names
        plain = {names.get(name) or names.setdefault(name, printable(name)): value for name, value in numbers.items()}
        self._hand_on("log", step, split, plain)

    def show(self, step: int, samples: Sequence[Sample]) -> None:
        """Pass samples to all trackers (`Tracker.show`)."""
        if samples:
            self._hand_on("show", step, redact_all(list(samples), printable))

    def close(self, end: End) -> None:
        """Close all trackers, within `track.close_timeout_s` seconds in total."""
        self._hand_on("close", end)
        until = time.monotonic() + self._wait_s
        for lane in self._lanes:
            lane.finish(until)
        self._lanes, self._jsonl = [], None

    def _hand_on(self, method: str, *arguments: Any) -> None:
        self._at_once(method, *arguments)
        for lane in self._lanes:
            lane.put(method, *arguments)

    def _at_once(self, method: str, *arguments: Any) -> None:
        """Write to the JSONL files synchronously, before calling any tracker."""
        if self._jsonl is None:
            return
        try:
            getattr(self._jsonl, method)(*arguments)
            self._warned = False
        except OSError as caught:
            if not self._warned:
                self._warn(f"metrics.jsonl: {reason(caught)}; the unwritten lines are kept and retried")
            self._warned = True


class _Lane:
    """One tracker and its thread."""

    def __init__(
        self, name: str, tracker: Tracker, ids: dict[str, str], say: Callable[[str], None], warn: Callable[[str], None]
    ) -> None:
        self.name, self.tracker, self._ids, self._say, self._warn = name, tracker, ids, say, warn
        self._calls: queue.SimpleQueue[tuple[str, tuple[Any, ...]]] = queue.SimpleQueue()
        self._ended = False
        if tracker.run_id is not None:
            ids[name] = tracker.run_id
        self._thread = threading.Thread(target=self._run, name=f"lockstep-{name}", daemon=True)
        self._thread.start()

    def put(self, method: str, *arguments: Any) -> None:
        if not self._ended and self._calls.qsize() >= MOST_WAITING:
            self._give_up(f"is {MOST_WAITING:,} calls behind; training continues without it")
        if not self._ended:
            self._calls.put((method, arguments))

    def finish(self, until: float) -> None:
        """Wait until the thread has processed `close`."""
        self._thread.join(max(0.0, until - time.monotonic()))
        if self._thread.is_alive() and not self._ended:
            self._give_up("was still sending after track.close_timeout_s")

    def _run(self) -> None:
        try:
            if place := self.tracker.open():
                self._say(f"{self.name}: {place}")
            self._log_missing()
            method = ""
            while method != "close" and not self._ended:
                if self.tracker.run_id is not None:
                    self._ids[self.name] = self.tracker.run_id
                method, arguments = self._calls.get()
                getattr(self.tracker, method)(*arguments)
            self._ended = True
        except BaseException as caught:  # including SystemExit raised by a library
            self._give_up(f"failed: {reason(caught)}. Training continues without it")

    def _log_missing(self) -> None:
        """Log what the sink of a continued run lacks of the steps before this process, from metrics.jsonl."""
        stored, after = self.tracker.stored, self.tracker.after
        if stored is None or stored >= after:
            return
        for line in history.lines_of(self.tracker.run.folder / "metrics.jsonl", ("step", "split")):
            if stored < line["step"] <= after:
                numbers = {k: v for k, v in line.items() if k not in ("step", "split") and isinstance(v, int | float)}
                self.tracker.log(line["step"], line["split"], numbers)

    def _give_up(self, why: str) -> None:
        if not self._ended:
            self._ended = True
            self._warn(f"{self.name} {why}; metrics.jsonl has everything")


def reason(caught: BaseException) -> str:
    """Describe an exception on one line."""
    if isinstance(caught, OSError) and caught.strerror:
        return caught.strerror + (f": {caught.filename}" if caught.filename else "")
    return f"{type(caught).__name__}: {one_line(caught, 300)}"
