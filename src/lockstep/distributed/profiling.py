"""`profile: {steps: 5}`: where the time of a few steps goes, operator by operator, on each rank.

In: the run's steps. Out: under OUTPUT/profile/ a trace a rank (`rank-0.json.gz`, for https://ui.perfetto.dev or
chrome://tracing) and a summary that the report shows. Nothing that is trained changes; the steps that are looked at are
slower.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from lockstep.config.run import Run
from lockstep.distributed.world import World

SHOWN = 20  # operators in a summary


class Profiler:
    """Looks at `profile.steps` steps of this process, after `profile.after` others and one to warm up."""

    def __init__(self, run: Run, world: World) -> None:
        self._rank, self._folder, self._count = world.rank, run.folder / "profile", run.profile.steps
        self._cuda = world.device.type == "cuda"
        self._step: int | None = None  # the run's steps done
        self._first = 0  # the first step of the run that is looked at
        self._after = run.profile.after
        self._profile: profile | None = None
        if self._count:
            os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # or it says on the terminal when it starts and stops
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._cuda else [])]
            self._profile = profile(
                activities=activities,
                schedule=schedule(wait=run.profile.after, warmup=1, active=self._count, repeat=1),
                on_trace_ready=self._write,
                acc_events=True,
            )
            self._profile.start()

    def advance(self, step: int) -> None:
        """A step is done, the run's `step` in all. Takes seconds after the last one that is looked at."""
        if self._profile is not None:
            if self._step is None:
                self._first = step + self._after + 1
            self._step = step
            self._profile.step()

    def close(self) -> None:
        """The run is over; what was looked at until then is kept."""
        if self._profile is not None:
            self._profile.stop()
            self._profile = None

    def _write(self, trace_profile: profile) -> None:
        """A disk that does not take it is no reason to stop training."""
        if self._step is None or self._step < self._first:  # the run ended while it was warming up
            return
        with suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            trace = self._folder / f"rank-{self._rank}.json.gz"
            trace_profile.export_chrome_trace(str(trace))
            summary = summary_of(trace_profile, self._cuda)
            summary |= {"rank": self._rank, "first": self._first, "last": self._step}
            path = Path(self._folder / f"rank-{self._rank}.summary.json")
            path.write_text(json.dumps(summary | {"trace": trace.name}, indent=1), encoding="utf-8")


def summary_of(trace_profile: profile, cuda: bool) -> dict[str, Any]:
    """The operators that took the longest by themselves, in seconds over all steps that were looked at: on the GPU
    where there is one, else on the CPU."""
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
    operators = [row | {"share": row[key] / total} for row in rows[:SHOWN]]
    return {"device": cuda, "seconds": total, "operators": operators, "torch": torch.__version__}
