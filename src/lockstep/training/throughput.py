"""What steps took: examples, tokens and seconds, and the numbers of a line of the log.

In: every step's batch and result. Out: a line's numbers, the totals of a run, and what the next line needs to know of
the steps before a checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass
from typing import Any

from torch import Tensor

from lockstep.data.batch import StepBatch, StepResult
from lockstep.strategies.exact.scaling import LossScale
from lockstep.training.loss_spike import Spikes
from lockstep.training.source_losses import SourceLosses


@dataclass(frozen=True)
class Counts:
    """What a stretch of training took: over the whole job, in seconds of the wall clock."""

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
        """What the next line of the log needs to know of the steps so far; the same on every rank but for seconds."""
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
        if self._spikes.seen(numbers["loss"]):
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
        """What was not measured here, or is over, takes no time."""
        self._since = time.perf_counter()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What happens in here takes no time."""
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
