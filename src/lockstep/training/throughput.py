"""Throughput: examples, tokens and seconds of steps, and the numbers of a line of the log.

In: every step's batch and result. Out: a line's numbers, the totals of a run, and what the next line needs to know of
the steps before a checkpoint.
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
from lockstep.strategies.exact.gradient import LossScale


@dataclass(frozen=True)
class Counts:
    """The cost of a stretch of training: over the whole job, in seconds of the wall clock."""

    steps: int = 0
    examples: int = 0
    tokens: int = 0
    padded: int = 0
    padded_by_chance: int = 0
    seconds: float = 0.0
    skipped: int = 0  # steps whose update was left out: not finite
    overflowed: int = 0  # those left out because fp16 overflowed at their loss scale

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


class Spikes:
    """Tells a loss that jumps from one that wanders: running mean and variance, in which a jump does not count."""

    def __init__(self, count: int = 0, mean: float = 0.0, variance: float = 0.0) -> None:
        self._count, self._mean, self._variance = count, mean, variance

    @property
    def state(self) -> tuple[int, float, float]:
        return self._count, self._mean, self._variance

    def is_spike(self, loss: float) -> bool:
        """Whether this one is more than six standard deviations above those before it."""
        deviation = loss - self._mean
        if not math.isfinite(loss) or (self._count >= 20 and deviation > 6 * self._variance**0.5):
            return True
        self._count += 1
        weight = max(0.02, 1 / self._count)
        self._mean += weight * deviation
        self._variance = (1 - weight) * (self._variance + weight * deviation**2)
        return False


class SourceLosses:
    """The training loss of each source of a mixture, over the steps since the last line of the log: a source may have
    few examples in one step. Sums of losses and of targets, equal on every rank and at every number of processes."""

    def __init__(self, names: Sequence[str], state: Mapping[str, Any] | None = None) -> None:
        """`state`: what `state` gave when the checkpoint was made that the run goes on from."""
        self.names = list(names)
        known = state if state and state["names"] == self.names else None
        self._sums = np.array(known["sums"] if known else [0.0] * len(self.names), dtype=np.float64)
        self._targets = np.array(known["targets"] if known else [0.0] * len(self.names), dtype=np.float64)
        self._waiting: list[tuple[Tensor, np.ndarray]] = []  # may still be on the device

    def add(self, batch: StepBatch, result: StepResult) -> None:
        """One step more."""
        if result.loss_sums_of is not None and batch.targets_of is not None:
            self._waiting.append((result.loss_sums_of, batch.targets_of))

    def take(self) -> dict[str, float]:
        """`loss_NAME` of each source that had targets; what comes is counted anew. The host waits for the device."""
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
        """For a checkpoint, under `sources`; nothing where there are none. The host waits for the device."""
        self._fetch()
        state = {"names": self.names, "sums": self._sums.tolist(), "targets": self._targets.tolist()}
        return {"sources": state} if self.names else {}

    def _fetch(self) -> None:
        for sums, targets in self._waiting:
            losses = np.array(sums.tolist())
            if np.isfinite(losses).all():  # else such steps would hide all others; the log counts them
                self._sums, self._targets = self._sums + losses, self._targets + targets
        self._waiting.clear()


class Meter:
    """Counts examples, tokens and seconds of steps; evaluation and checkpoints do not count as time."""

    def __init__(self, state: Mapping[str, Any] | None = None, sources: Iterable[str] = ()) -> None:
        """`state`: what `state` gave at the checkpoint that the run goes on from. `sources`: names, of a mixture."""
        began = Counts(**state["line"]) if state else Counts()
        self.total = Counts(*(-number for number in astuple(began)))  # what was done before does not count
        self._line = began
        self._spikes = Spikes(*state["spikes"]) if state else Spikes()
        self._used: list[Tensor | bool] = []  # of the steps since the last line; may still be on the device
        self._overflowed: list[Tensor] = []  # the same: by the loss scale of fp16
        self._of_sources = SourceLosses(list(sources), (state or {}).get("sources"))
        self._since = time.perf_counter()

    def state(self) -> dict[str, Any]:
        """The steps so far of the next line of the log; the same on every rank but for seconds."""
        self._count_skipped()
        return {"line": asdict(self._line), "spikes": self._spikes.state} | self._of_sources.state

    def add(self, batch: StepBatch, result: StepResult, scaling: LossScale | None = None) -> None:
        """One step more; `scaling`: of the loss, after it."""
        counts = (batch.examples, batch.tokens, batch.padded, batch.padded_by_chance)
        self._line += Counts(1, *counts)
        self._used.append(result.used)
        self._of_sources.add(batch, result)
        self._overflowed += [scaling.overflowed] if scaling else []

    def line(
        self, result: StepResult, rate: float, lengths: bool = True, scaling: LossScale | None = None
    ) -> dict[str, float]:
        """The numbers of a line of the log: this step's, and rates since the last line. `lengths`: whether examples
        have any. `scaling`: of the loss. The host waits for the device here."""
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
        return numbers | {
            "tokens_per_s": line.tokens / line.seconds,
            "padding": line.padded / line.tokens,
            "padding_by_chance": line.padded_by_chance / line.tokens,
        }

    def restart_clock(self) -> None:
        """Forget the time since the clock was stopped or begun."""
        self._since = time.perf_counter()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time in here does not count."""
        self._stop_clock()
        yield
        self._since = time.perf_counter()

    def _count_skipped(self) -> None:
        """The host waits for the device here."""
        overflowed = sum(bool(each) for each in self._overflowed)
        skipped = sum(not used for used in self._used) - overflowed
        self._line += Counts(skipped=skipped, overflowed=overflowed)
        self._used.clear()
        self._overflowed.clear()

    def _stop_clock(self) -> None:
        now = time.perf_counter()
        self._line += Counts(seconds=now - self._since)
        self._since = now
