"""The loss of a step over micro-batches and ranks, reduced in the ways common in scripts.

In: the losses passed to `backward`. Out: `Losses`: the mean over ranks of the sum over micro-batches (whose gradient
averaged ranks compute), the mean of all, and the mean weighted by targets or examples.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lockstep_trace.ranks import data_ranks
from lockstep_trace.read import Step, Trace


@dataclass(frozen=True)
class Losses:
    """Losses of a step. `counts`: targets, else examples, of each loss; empty if unknown. `reported`: the step's loss
    as the program reports it; if set, only this is compared."""

    each: tuple[tuple[float, ...], ...]  # by rank
    counts: tuple[tuple[int, ...], ...]
    reported: float | None = None

    @property
    def summed(self) -> float:
        """The mean over ranks of the sum over micro-batches."""
        if self.reported is not None:
            return self.reported
        return sum(sum(own) for own in self.each) / len(self.each)

    @property
    def mean(self) -> float:
        flat = [x for own in self.each for x in own]
        return sum(flat) / len(flat)

    @property
    def weighted(self) -> float | None:
        """The mean weighted by `counts`, or None."""
        flat = [
            (x, n) for own, counts in zip(self.each, self.counts, strict=True) for x, n in zip(own, counts, strict=True)
        ]
        total = sum(n for _, n in flat)
        return sum(x * n for x, n in flat) / total if total else None

    @property
    def total(self) -> float:
        return sum(sum(own) for own in self.each)

    @property
    def equal_counts(self) -> bool:
        return len({n for counts in self.counts for n in counts}) < 2

    @property
    def micro_batches(self) -> int:
        return max(len(own) for own in self.each)


def losses_of(trace: Trace, optimizer: int, step: int) -> Losses | None:
    """Return the losses of a step, or None if no rank called `backward` on a scalar."""
    each, counts, reported = [], [], None
    for rank in _with_loss(trace, optimizer, step):
        record = rank.steps[optimizer][step]
        own = tuple(v / (s or 1.0) for v, s in record.losses if v is not None)
        targets = targets_of_micro(record)
        sizes = [t if t is not None else n for t, n in zip(targets, record.micro or [], strict=False)]
        reported = record.raw.get("loss", reported)
        each.append(own)
        counts.append(tuple(sizes) if len(sizes) == len(own) else (0,) * len(own))
    return Losses(tuple(each), tuple(counts), reported) if each else None


def targets_of_micro(record: Step) -> list[int | None]:
    """Return the number of targets of each micro-batch: from labels passed to the model, else from the loss functions
    in the graph, if each loss has one."""
    targets: list[int | None] = list(record.targets or [])
    functions = record.objectives or []
    if (not targets or None in targets) and len(functions) == len(record.losses or ()):
        return [each.get("targets") for each in functions]
    return targets


def _with_loss(trace: Trace, optimizer: int, step: int):  # type: ignore[no-untyped-def]
    def has(rank):  # type: ignore[no-untyped-def]
        return step in rank.steps.get(optimizer, {}) and bool(rank.steps[optimizer][step].losses)

    own = [rank for rank in data_ranks(trace, optimizer) if has(rank)]
    return own or [rank for rank in trace.ranks if has(rank)]  # the last stage of a pipeline


def agreeing(one: Losses, other: Losses, limit: float) -> tuple[str | None, float]:
    """Return the reduction by which both agree ("as summed", or a pair of means; None: none), and the relative
    difference."""
    ways = [("as summed", one.summed, other.summed)]
    for x in (one.summed, one.mean, one.weighted) if one.reported is None or other.reported is None else ():
        for name, y in (
            ("mean", other.mean),
            ("weighted", other.weighted),
            ("total", other.total),
            ("summed", other.summed),
        ):
            if x is not None and y is not None:
                ways.append((name, x, y))
    differences = [
        (name, abs(x - y) / max(abs(x), abs(y), 1e-30) if math.isfinite(x) and math.isfinite(y) else math.nan)
        for name, x, y in ways
    ]
    return next(((n, d) for n, d in differences if d <= limit), (None, differences[0][1]))
