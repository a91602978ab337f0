"""Time of a rank by phase of a step, and by operator if the run sets `profile: {steps: 5}`.

In: `with phases("forward"): ...`, in the loop and in strategies. Out: seconds of each phase since the last `take`:
every moment between two log points belongs to one phase. On a CPU, a change of phase reads a clock. On CUDA, it records
an event on the current stream, and a phase is the time between two events; only `take` synchronizes, at log points,
where the host waits anyway. A profile is one trace per rank under OUTPUT/profile/ (`rank-0.json.gz`, for
https://ui.perfetto.dev or chrome://tracing) and a summary for the report. Profiling does not change results; profiled
steps are slower.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Generator, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from lockstep.config.errors import coded
from lockstep.config.output_files import FolderInside
from lockstep.config.sections import ProfileSection
from lockstep.distributed.world import World
from lockstep.track.console import error

# The order in messages between ranks. docs/how-to/report.md explains the phases.
NAMES = (
    "other",
    "data",
    "forward",
    "backward",
    "forward+backward",
    "overlapped",
    "reduction",
    "optimizer",
    "evaluation",
    "checkpoint",
    "profile",
)
COMPUTING = ("forward", "backward", "forward+backward", "overlapped")  # phases of forward and backward
_PLACES = {name: place for place, name in enumerate(NAMES)}
_MOST_EVENTS = 4096  # maximum pending events, for distant log points

T = TypeVar("T")


class StepTimer:
    """The phase timer of one rank. Phases nest: an inner phase's time does not count for the outer one."""

    def __init__(self, device: torch.device) -> None:
        self._seconds = [0.0] * len(NAMES)
        self._entries = [0] * len(NAMES)  # how often each phase began, inner phases' returns excluded
        self._computed = 0.0  # seconds of COMPUTING already taken
        self._now = 0
        self._since = time.perf_counter()
        self._marks: deque[tuple[int, Any]] | None = None  # CUDA: (phase that ends, event)
        self._spare: list[Any] = []
        if device.type == "cuda":
            self._device = device
            self._marks = deque([(0, self._record())])

    @property
    def clock(self) -> str:
        """`host` or `device`: the clock of the times."""
        return "host" if self._marks is None else "device"

    def __call__(self, name: str) -> _Phase:
        """Return a context manager for a phase."""
        return _Phase(self, _PLACES[name])

    def during(self, name: str, items: Iterable[T]) -> Generator[T]:
        """Iterate over items; the time to get each item counts for this phase."""
        iterator = iter(items)
        try:
            while True:
                with self(name):
                    try:
                        item = next(iterator)
                    except StopIteration:
                        return
                yield item
        finally:
            if (close := getattr(iterator, "close", None)) is not None:
                close()

    def take(self) -> list[float]:
        """Return the seconds of each phase since the last call, in the order of NAMES. On CUDA the host waits for the
        device."""
        self.change(self._now)
        if self._marks is not None:
            self._marks[-1][1].synchronize()
            self._fold()
        self._computed = self.computed()
        seconds, self._seconds = self._seconds, [0.0] * len(NAMES)
        return seconds

    def report(self) -> list[float]:
        """Return `take()`, followed by how often each phase of COMPUTING began in that time: once per micro-batch,
        including those without examples, which some engines add so that all ranks compute equally many."""
        seconds, entries = self.take(), [float(self._entries[_PLACES[name]]) for name in COMPUTING]
        self._entries = [0] * len(NAMES)
        return [*seconds, *entries]

    def begin(self, place: int) -> int:
        """Begin another phase and count it. Returns the one that is interrupted."""
        self._entries[place] += 1
        return self.change(place)

    def computed(self) -> float:
        """Return the total seconds of forward and backward up to the last change of phase. On CUDA, up to the device's
        progress, without waiting."""
        if self._marks is not None:
            self._fold()
        return self._computed + sum(self._seconds[_PLACES[name]] for name in COMPUTING)

    def change(self, place: int) -> int:
        """Begin another phase. Returns the one that ends."""
        before, self._now = self._now, place
        if self._marks is None:
            now = time.perf_counter()
            self._seconds[before] += now - self._since
            self._since = now
        else:
            self._marks.append((before, self._record()))
            if len(self._marks) > _MOST_EVENTS:
                self._fold()
        return before

    def _record(self) -> Any:
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _fold(self) -> None:
        """Add up the phases that the device has completed."""
        assert self._marks is not None
        while len(self._marks) > 1 and self._marks[1][1].query():
            _, begin = self._marks.popleft()
            phase, end = self._marks[0]
            self._seconds[phase] += begin.elapsed_time(end) / 1e3
            self._spare.append(begin)


class _Phase:
    """A class-based context manager, which costs well under a microsecond."""

    __slots__ = ("_before", "_phases", "_place")

    def __init__(self, phases: StepTimer, place: int) -> None:
        self._phases, self._place = phases, place

    def __enter__(self) -> None:
        self._before = self._phases.begin(self._place)

    def __exit__(self, *_: object) -> None:
        self._phases.change(self._before)


TOP_OPERATORS = 20  # operators in a summary


def quiet_profiler() -> None:
    """Keep torch's profiler from printing when it starts and stops."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")


class Profiler:
    """Profiles `profile.steps` steps of this process, after `profile.after` others and one warmup step."""

    def __init__(self, section: ProfileSection, output: Path, world: World) -> None:
        self._rank, self._place, self._count = world.rank, FolderInside(output, "profile"), section.steps
        self._cuda = world.device.type == "cuda"
        self._step: int | None = None  # steps done of the run
        self._first = 0  # the first profiled step of the run
        self._after = section.after
        self._profile: profile | None = None
        if self._count:
            quiet_profiler()
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._cuda else [])]
            self._profile = profile(
                activities=activities,
                schedule=schedule(wait=section.after, warmup=1, active=self._count, repeat=1),
                on_trace_ready=self._write,
                acc_events=True,
            )
            self._profile.start()

    def advance(self, step: int) -> None:
        """Call after each step; `step`: the run's total of steps. Takes seconds after the last profiled step."""
        if self._profile is not None:
            if self._step is None:
                self._first = step + self._after + 1
            self._step = step
            self._profile.step()

    def close(self) -> None:
        """End profiling; the steps profiled so far are kept."""
        if self._profile is not None:
            self._profile.stop()
            self._profile = None

    def _write(self, trace_profile: profile) -> None:
        """Write trace and summary; ignores disk errors, so that training continues."""
        if self._step is None or self._step < self._first:  # the run ended during warmup
            return
        if (fault := self._place.redirected()) is not None:
            error(coded("LS7130", f"rank {self._rank}: the profile could not be written: {fault}"))
            return
        folder = self._place.path
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            trace = folder / f"rank-{self._rank}.json.gz"
            trace_profile.export_chrome_trace(str(trace))
            summary = summary_of(trace_profile, self._cuda)
            summary |= {"rank": self._rank, "first": self._first, "last": self._step}
            path = folder / f"rank-{self._rank}.summary.json"
            path.write_text(json.dumps(summary | {"trace": trace.name}, indent=1), encoding="utf-8")


def summary_of(trace_profile: profile, cuda: bool) -> dict[str, Any]:
    """Return the operators with the most self time, in seconds over all profiled steps: GPU time if there is a GPU,
    else CPU time."""
    rows = [
        {
            "name": event.key,
            "calls": event.count,
            "cpu_s": event.self_cpu_time_total / 1e6,
            "device_s": event.self_device_time_total / 1e6 if cuda else 0.0,
        }
        for event in trace_profile.key_averages()
        if not event.key.startswith("ProfilerStep")
    ]
    key = "device_s" if cuda else "cpu_s"
    total = sum(row[key] for row in rows) or 1.0
    rows.sort(key=lambda row: -row[key])
    operators = [row | {"share": row[key] / total} for row in rows[:TOP_OPERATORS]]
    return {"device": cuda, "seconds": total, "operators": operators, "torch": torch.__version__}
