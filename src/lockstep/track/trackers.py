"""Forwards numbers to all trackers of a run, so that none of them can delay or stop training.

In: `log` and `show` on rank 0. Out: calls of each tracker in its own thread. A tracker that fails or falls behind is
reported once and dropped; `metrics.jsonl` is written synchronously and has everything. Secrets and control characters
are removed from all texts.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from lockstep.config import plugins
from lockstep.config.run import Run
from lockstep.track.jsonl import Jsonl
from lockstep.track.report import history
from lockstep.track.tracker import End, Sample, Tracker
from lockstep_trace.redaction import one_line, printable, redact_all

MOST_WAITING = 10_000  # calls; a tracker further behind will not catch up


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
        self._jsonl: Tracker | None = Jsonl(run, None, after, None) if loud else None
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
