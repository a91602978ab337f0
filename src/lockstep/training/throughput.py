"""Throughput: count examples, tokens and seconds of steps, and compute the numbers of a log line.

In: every step's batch and result. Out: a line's numbers, a run's totals, and the state that the next line needs from
steps before a checkpoint.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass
from typing import Any

import numpy as np
from torch import Tensor

from lockstep.data.batch import StepBatch, StepResult
from lockstep.strategies.exact.precision import LossScale


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
