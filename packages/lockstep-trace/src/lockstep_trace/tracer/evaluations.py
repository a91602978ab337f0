"""Collects the forward passes without gradients between two training steps: an evaluation.

In: calls of an outermost module without gradients. Out: the values of one record per evaluation.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from .inputs import CallInputs
from .records import hexed

HASHES = 200_000  # most hashes recorded per evaluation


@dataclass(frozen=True)
class Setting:
    """Properties that stay the same during an evaluation. `trained`: an optimizer holds the model's parameters.
    `between`: between a forward pass and its backward."""

    model: str
    loader: str | None
    training: bool
    trained: bool
    between: bool


@dataclass
class Evaluation:
    """One evaluation. `active`: modules whose output is currently random. `optimizers`: numbers of those that hold the
    model's parameters."""

    setting: Setting
    active: list[str]
    mode: dict[str, Any]
    optimizers: list[int]
    hashes: list[Tensor] = field(default_factory=list)
    known: list[Tensor] = field(default_factory=list)  # without labels
    count: int = 0
    ranges: list[Tensor] = field(default_factory=list)  # `input_ranges.ranges` of first calls
    looks: int = 0
    drawn: list[int] = field(default_factory=list)  # state of the generator at the first call
    unused_norms: Tensor | None = None  # `UnusedNorms.look`

    def add(self, batch: CallInputs) -> None:
        """Count a batch, and store its hashes."""
        self.count += len(batch.hashes)
        if self.count <= HASHES:
            self.hashes.append(batch.hashes)
            self.known.append(batch.hashes if batch.unlabelled is None else batch.unlabelled)

    def record(self) -> dict[str, Any]:
        """Return the values of the record. Reads device data."""
        return {
            "model": self.setting.model,
            "loader": self.setting.loader,
            "training": self.setting.training,
            "active": self.active,
            "trained": self.setting.trained,
            "between": self.setting.between,
            "mode": self.mode,
            "optimizers": self.optimizers,
            "drawn": self.drawn,
            "known": hexed(self.known),
            "unused_norms": [] if self.unused_norms is None else self.unused_norms.tolist(),
            "ranges": [r.tolist() for r in self.ranges],
            "count": self.count,
            "examples": hexed(self.hashes),
        }
