"""The training loss of each source of a mixture, over the steps since the last line of the log.

In: what steps report, and how many targets each source had in them. Out: a mean over targets for each source that had
any. A source may have few examples in one step, so that a step's own losses would say little.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from lockstep.data.batch import StepBatch, StepResult


class SourceLosses:
    """Sums of losses and of targets, step after step: the same on every rank and at every number of processes."""

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
        found = {
            f"loss_{name}": float(total / count)
            for name, total, count in zip(self.names, self._sums, self._targets, strict=True)
            if count
        }
        self._sums, self._targets = np.zeros_like(self._sums), np.zeros_like(self._targets)
        return found

    @property
    def state(self) -> dict[str, Any]:
        """For a checkpoint, under `sources`; nothing where there are none. The host waits for the device."""
        self._fetch()
        held = {"names": self.names, "sums": self._sums.tolist(), "targets": self._targets.tolist()}
        return {"sources": held} if self.names else {}

    def _fetch(self) -> None:
        for sums, targets in self._waiting:
            told = np.array(sums.tolist())
            if np.isfinite(told).all():  # else such steps would hide all others; the log counts them
                self._sums, self._targets = self._sums + told, self._targets + targets
        self._waiting.clear()
