"""Training state of one rank besides the strategy's tensors: step, meter, evaluation progress, pending work.

In: every update. Out: `state_dict`, plain data, which checkpoints store, recovery sends to ranks that are behind or
new, and peer checkpoints keep with the tensors.

An update is made on a rank or it is not; `advance` counts it at once. A rank failure may interrupt the hooks that
follow an update (hooks.py). They then run again: each is idempotent for `step`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from lockstep.checkpoint.manifest import Progress, score_of
from lockstep.data.batch import StepBatch, StepResult
from lockstep.data.job import Job
from lockstep.strategies.exact.precision import LossScale
from lockstep.training.fingerprints import Fingerprints
from lockstep.training.throughput import Counts, Meter

EVALUATION = "evaluation"  # in `pending`: this step's evaluation was skipped because of a request to stop
CHECKPOINT = "checkpoint"  # in `pending`: a checkpoint that a rank failure interrupted


class TrainState:
    """Step, meter, evaluation progress and pending work of one rank."""

    def __init__(self, job: Job, total: int, sources: Iterable[str] = (), lengths: bool = True, step: int = 0) -> None:
        """`total`: steps of the run. `sources`: names of a mixture's sources. `lengths`: whether examples have lengths.
        `step`: updates made so far; -1: this rank has no state yet."""
        run = job.run
        self._run, self._total, self._sources, self._lengths = run, total, list(sources), lengths
        self.step = self.first = step  # updates made; updates made before this job
        self.meter = Meter(sources=self._sources)
        self.progress = Progress.of(run.checkpoint.best, {})  # all evaluations so far
        self._progress_before = self.progress  # without the evaluation of `step`
        self.fingerprints = Fingerprints()
        self.pending: set[str] = set()
        self.line: dict[str, float] = {}  # log line after `step`; empty: none is due
        self.scores: dict[str, float] = {}  # evaluation after `step`, once done
        self._hooks_done = step  # last step whose hooks have all run

    # -- events ------------------------------------------------------------------------------------------------------

    def advance(self, batch: StepBatch, result: StepResult, rate: float, scaling: LossScale | None = None) -> None:
        """Count an update. Synchronizes with the device if a log line is due."""
        self.step += 1
        self._progress_before, self.line, self.scores, self.pending = self.progress, {}, {}, set()
        self.meter.add(batch, result, scaling)
        self.fingerprints.step(self.step, result)
        if is_due(self.step, self._run.track.every, self.step in (1, self._total)):
            self.line = self.meter.line(result, rate, self._lengths, scaling)

    def count_evaluation(self, scores: Mapping[str, float]) -> bool:
        """Count the evaluation after `step`; repetitions count once. Returns whether early stopping ends training."""
        if self._run.checkpoint.best:
            delta = self._run.evaluate.min_delta
            self.progress = self._progress_before.after(self.step, score_of(self._run.checkpoint.best, scores), delta)
        self.scores = dict(scores)
        self.pending.discard(EVALUATION)
        return self.over

    def finish(self) -> None:
        """Record that all hooks have run."""
        self._hooks_done = self.step
        self.pending.discard(CHECKPOINT)

    @property
    def hooks_pending(self) -> bool:
        """Whether hooks still have to run for `step`."""
        return self._hooks_done < self.step

    def rerun_hooks(self, checkpoint: bool = False) -> None:
        """Mark the hooks of the last update as pending, unless the update precedes this job. `checkpoint`: save a
        checkpoint in any case."""
        if self.step > self.first:
            self._hooks_done = self.step - 1
            self.pending |= {CHECKPOINT} if checkpoint else set()

    @property
    def over(self) -> bool:
        """Whether early stopping (`evaluate.patience`) has ended training; equal on every rank."""
        return self.progress.over(self._run.evaluate.patience)

    # -- plain data for storage --------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain data that later steps do not change. Synchronizes with the device."""
        return {
            "step": self.step,
            "first": self.first,
            "hooks_done": self._hooks_done,
            "pending": sorted(self.pending),
            "meter": self.meter.state(),
            "total": asdict(self.meter.total),
            "line": dict(self.line),
            "progress": self.progress.dump(),
            "progress_before": self._progress_before.dump(),
            "fingerprints": self.fingerprints.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load another rank's `state_dict`, or the part of it that checkpoints store: `step`, `meter`, `progress` and
        `pending`."""
        self.step = state["step"]
        self.first, self._hooks_done = state.get("first", self.step), state.get("hooks_done", self.step)
        self.pending, self.line, self.scores = set(state["pending"]), dict(state.get("line", {})), {}
        utilization = self.meter.utilization
        self.meter = Meter(state["meter"], self._sources)
        self.meter.utilization = utilization
        if "total" in state:
            self.meter.total = Counts(**state["total"])
        self.progress = Progress.of(self._run.checkpoint.best, state["progress"])
        self._progress_before = Progress.of(self._run.checkpoint.best, state.get("progress_before", state["progress"]))
        if "fingerprints" in state:
            self.fingerprints.load_state_dict(state["fingerprints"])

    def digest(self) -> str:
        """Hash of the values that are equal on all ranks after the same updates, even if some ranks have run more
        hooks."""
        meter = self.meter.state()
        meter = {**meter, "line": {**meter["line"], "seconds": 0}}
        values = [self.step, self._hooks_done, meter, self._progress_before.dump()]
        return hashlib.sha256(json.dumps(values).encode()).hexdigest()


def is_due(step: int, every: int, last: bool) -> bool:
    """Whether an event that occurs every `every` steps (0: never) and at the last step is due now."""
    return last or (every > 0 and step % every == 0)
