"""Which evaluation was the best, and how many came since: pure functions of the scores, so that every rank, every
strategy that gives bits and every resumed run comes to the same.

In: the scores of evaluations, one after another. Out: whether training is over early, and which checkpoint is exported.
Nothing here imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lockstep.config.run import Run


@dataclass(frozen=True)
class Progress:
    """The progress of evaluations so far; it travels in manifests."""

    metric: str = ""  # `checkpoint.best`, by which these were counted
    best: float | None = None  # its highest score; more is better
    step: int = 0  # where that was
    since: int = 0  # evaluations after it

    @classmethod
    def of(cls, run: Run, saved: Mapping[str, Any]) -> Progress:
        """The progress in a manifest; none, where it was counted by another metric."""
        progress = cls(**saved)
        return progress if progress.metric == (run.checkpoint.best or "") else cls(run.checkpoint.best or "")

    def after(self, step: int, score: float | None, delta: float = 0.0) -> Progress:
        """With one evaluation more, which is better only by more than `delta`. One whose score is not finite is no
        better than any."""
        if score is not None and (self.best is None or score > self.best + delta):
            return Progress(self.metric, score, step)
        return Progress(self.metric, self.best, self.step, self.since + 1)

    def over(self, run: Run) -> bool:
        """Whether training ends, since no evaluation was better for as long as `evaluate.patience` says."""
        return run.evaluate.patience is not None and self.since >= run.evaluate.patience

    def dump(self) -> dict[str, Any]:
        """As a JSON object; empty before the first evaluation."""
        return asdict(self) if self.best is not None or self.since else {}


@dataclass(frozen=True)
class Candidate:
    """A checkpoint that was evaluated."""

    score: float  # more is better
    step: int


def score_of(run: Run, scores: Mapping[str, float]) -> float | None:
    """More is better; None where there is no such score, or none that is finite."""
    wanted = run.checkpoint.best or ""
    score = scores.get(wanted.removeprefix("-"))
    if score is None or not math.isfinite(score):
        return None
    return -score if wanted.startswith("-") else score


def best_first(run: Run, evaluated: Mapping[int, Mapping[str, float]]) -> list[Candidate]:
    """Steps with their scores, the best first; of equal ones the earliest."""
    candidates = [
        Candidate(score, step) for step, scores in evaluated.items() if (score := score_of(run, scores)) is not None
    ]
    return sorted(candidates, key=lambda each: (-each.score, each.step))
