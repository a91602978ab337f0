"""Errors that end the training loop, or hand over to recovery (`Regroup`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lockstep.config.errors import FAILED, CodedError
from lockstep.strategies.strategy import NotFinite
from lockstep.training.data_loader import StepLoader


class TrainingFailed(CodedError):
    """Training cannot continue: one message for the user, and this rank's exit status. `everywhere`: print the message
    on each machine."""

    def __init__(self, code: str, message: str, status: int = FAILED, everywhere: bool = False) -> None:
        super().__init__(code, message)
        self.status, self.everywhere = status, everywhere


class EvaluationInterrupted(Exception):
    """A request to stop interrupted an evaluation. Raised on all ranks."""


class Regroup(Exception):
    """The ranks must form a new group before the next step, because one joins or is evicted. Raised on all ranks at the
    same step."""


class CorruptionDetected(CodedError):
    """Ranks computed different bits; nothing was updated. `sound`: the weights agree on all ranks. `leaves`: ranks to
    evict."""

    def __init__(self, code: str, message: str, sound: bool, leaves: Sequence[int] = ()) -> None:
        super().__init__(code, message)
        self.sound, self.leaves = sound, list(leaves)


def not_finite(caught: NotFinite, feed: StepLoader, rows: np.ndarray, when: str = "") -> TrainingFailed:
    """Create the error for a non-finite loss or gradient. It names the step (or `when`), its micro-batches and their
    examples. `rows`: the step's examples, int64 [B]."""
    groups = feed.task.split_micro_batches(feed.columns, rows)
    lines = []
    for micro_batch in caught.micro_batches:
        ids = ", ".join(map(str, rows[groups[micro_batch]][:20]))
        more = len(groups[micro_batch]) - 20
        lines.append(
            f"  micro-batch {micro_batch}: rows {ids}{f' and {more} more' if more > 0 else ''} of the training split"
        )
    what = "the loss" if caught.micro_batches else f"the gradient (norm {caught.norm}), though no loss,"
    message = (
        f"{when or f'step {caught.step}'}: {what} is not a finite number; nothing was updated. Look at these examples, "
        "or lower optim.learning_rate or optim.max_grad_norm; on_nonfinite=skip leaves such steps out"
    )
    return TrainingFailed("LS5160", "\n".join([message, *lines]))
