"""Training state of one rank besides the strategy's tensors: step, meter, evaluation progress, pending work.

In: every update. Out: `state_dict`, plain data, which checkpoints store, recovery sends to ranks that are behind or
new, and peer checkpoints keep with the tensors.

An update is made on a rank or it is not; `advance` counts it at once. A rank failure may interrupt the hooks that
follow an update (hooks.py). They then run again: each is idempotent for `step`. The meter counts examples, tokens and
seconds, and computes the numbers of a log line.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass
from typing import Any

import numpy as np
from torch import Tensor

from lockstep.checkpoint.manifest import Progress, score_of
from lockstep.data.batch import StepBatch, StepResult
from lockstep.data.job import Job
from lockstep.strategies.exact.precision import LossScale
from lockstep.training.fingerprints import Fingerprints

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


# -- the meter ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Counts:
    """Cost of a stretch of training over the whole job, in wall-clock seconds."""

    steps: int = 0
    examples: int = 0
    tokens: int = 0
    padded: int = 0
    padded_by_chance: int = 0
    seconds: float = 0.0
    skipped: int = 0  # steps without an update, because of a non-finite loss or gradient
    overflowed: int = 0  # steps without an update, because fp16 overflowed at the loss scale

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


class Spikes:
    """Detect loss spikes with a running mean and variance that exclude spikes."""

    def __init__(self, count: int = 0, mean: float = 0.0, variance: float = 0.0) -> None:
        self._count, self._mean, self._variance = count, mean, variance

    @property
    def state(self) -> tuple[int, float, float]:
        return self._count, self._mean, self._variance

    def is_spike(self, loss: float) -> bool:
        """Whether this loss is more than six standard deviations above earlier ones."""
        deviation = loss - self._mean
        if not math.isfinite(loss) or (self._count >= 20 and deviation > 6 * self._variance**0.5):
            return True
        self._count += 1
        weight = max(0.02, 1 / self._count)
        self._mean += weight * deviation
        self._variance = (1 - weight) * (self._variance + weight * deviation**2)
        return False


class SourceLosses:
    """Training loss of each mixture source since the last log line (a source may have few examples in one step). Sums
    losses and targets; equal on every rank and at every number of processes."""

    def __init__(self, names: Sequence[str], state: Mapping[str, Any] | None = None) -> None:
        """`state`: the `state` stored in the checkpoint that the run resumes from."""
        self.names = list(names)
        known = state if state and state["names"] == self.names else None
        self._sums = np.array(known["sums"] if known else [0.0] * len(self.names), dtype=np.float64)
        self._targets = np.array(known["targets"] if known else [0.0] * len(self.names), dtype=np.float64)
        self._waiting: list[tuple[Tensor, np.ndarray]] = []  # may still be on the device

    def add(self, batch: StepBatch, result: StepResult) -> None:
        """Add one step."""
        if result.loss_sums_of is not None and batch.targets_of is not None:
            self._waiting.append((result.loss_sums_of, batch.targets_of))

    def take(self) -> dict[str, float]:
        """Return `loss_NAME` of each source that had targets, and reset. Synchronizes with the device."""
        self._fetch()
        means = {
            f"loss_{name}": float(total / count)
            for name, total, count in zip(self.names, self._sums, self._targets, strict=True)
            if count
        }
        self._sums, self._targets = np.zeros_like(self._sums), np.zeros_like(self._targets)
        return means

    @property
    def state(self) -> dict[str, Any]:
        """State for a checkpoint, under `sources`; empty without sources. Synchronizes with the device."""
        self._fetch()
        state = {"names": self.names, "sums": self._sums.tolist(), "targets": self._targets.tolist()}
        return {"sources": state} if self.names else {}

    def _fetch(self) -> None:
        for sums, targets in self._waiting:
            losses = np.array(sums.tolist())
            if np.isfinite(losses).all():  # one non-finite step would hide all others; the log counts such steps
                self._sums, self._targets = self._sums + losses, self._targets + targets
        self._waiting.clear()


class Meter:
    """Count examples, tokens and seconds of steps; evaluations and checkpoints do not count as time."""

    def __init__(self, state: Mapping[str, Any] | None = None, sources: Iterable[str] = ()) -> None:
        """`state`: the `state` stored in the checkpoint that the run resumes from. `sources`: names of a mixture's
        sources."""
        began = Counts(**state["line"]) if state else Counts()
        self.total = Counts(*(-number for number in astuple(began)))  # exclude steps before this start
        self._line = began
        self._spikes = Spikes(*state["spikes"]) if state else Spikes()
        self._used: list[Tensor | bool] = []  # per step since the last line; may still be on the device
        self._overflowed: list[Tensor] = []  # as _used, for overflow at the fp16 loss scale
        self._of_sources = SourceLosses(list(sources), (state or {}).get("sources"))
        self._since = time.perf_counter()
        self.utilization = 0.0  # MFU of one token per second; 0: not known

    def state(self) -> dict[str, Any]:
        """Counts since the last log line; equal on every rank except for seconds."""
        self._count_skipped()
        return {"line": asdict(self._line), "spikes": self._spikes.state} | self._of_sources.state

    def add(self, batch: StepBatch, result: StepResult, scaling: LossScale | None = None) -> None:
        """Add one step. `scaling`: loss scale after it."""
        counts = (batch.examples, batch.tokens, batch.padded, batch.padded_by_chance)
        self._line += Counts(1, *counts)
        self._used.append(result.used)
        self._of_sources.add(batch, result)
        self._overflowed += [scaling.overflowed] if scaling else []

    def line(
        self, result: StepResult, rate: float, lengths: bool = True, scaling: LossScale | None = None
    ) -> dict[str, float]:
        """Numbers of a log line: this step's, and rates since the last line. `lengths`: whether examples have lengths.
        `scaling`: loss scale. Synchronizes with the device."""
        numbers = {"loss": float(result.loss), "learning_rate": rate, "grad_norm": float(result.grad_norm)}
        self._stop_clock()
        self._count_skipped()
        numbers |= self._of_sources.take()
        line, self.total, self._line = self._line, self.total + self._line, Counts()
        if line.skipped:
            numbers["skipped_steps"] = line.skipped
        if line.overflowed:
            numbers["overflowed_steps"] = line.overflowed
        if scaling is not None:
            numbers["loss_scale"] = float(scaling.value)
        if self._spikes.is_spike(numbers["loss"]):
            numbers["spike"] = 1
        numbers |= {
            "examples_per_s": line.examples / line.seconds,
            "seconds_per_step": line.seconds / line.steps,
        }
        if not lengths:
            return numbers
        if self.utilization:
            numbers["mfu"] = self.utilization * line.tokens / line.seconds
        return numbers | {
            "tokens_per_s": line.tokens / line.seconds,
            "padding": line.padded / line.tokens,
            "padding_by_chance": line.padded_by_chance / line.tokens,
        }

    def restart_clock(self) -> None:
        """Discard the time since the clock was last stopped or started."""
        self._since = time.perf_counter()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context whose time does not count."""
        self._stop_clock()
        yield
        self._since = time.perf_counter()

    def _count_skipped(self) -> None:
        """Count skipped steps. Synchronizes with the device."""
        overflowed = sum(bool(each) for each in self._overflowed)
        skipped = sum(not used for used in self._used) - overflowed
        self._line += Counts(skipped=skipped, overflowed=overflowed)
        self._used.clear()
        self._overflowed.clear()

    def _stop_clock(self) -> None:
        now = time.perf_counter()
        self._line += Counts(seconds=now - self._since)
        self._since = now
