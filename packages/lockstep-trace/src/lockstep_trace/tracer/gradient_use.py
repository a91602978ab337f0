"""Tracks gradients that no optimizer reads: cleared before the next backward, or clipped only after the step.

In: calls around backward, `zero_grad`, clipping and steps. Out: counts in `Since`, and a mark on the clipping's record.
A gradient counts as cleared only if nothing holds the tensor any more, or `zero_grad` wrote zeros into it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .versions import GradientVersion, gradient_versions, has_gradient, untouched


class GradientUse:
    """Tracks which gradients of this process are read by an optimizer."""

    def __init__(self) -> None:
        self.zeroed = False  # `zero_grad` was called since the last backward
        self.zeroed_before = False  # and before it
        self._late: list[tuple[dict[str, Any], list[GradientVersion]]] = []  # clipped before any backward of a step

    def before_backward(self, after: Sequence[GradientVersion]) -> bool:
        """Return whether all gradients of the last backward, `after`, were cleared. Forgets what was clipped."""
        for clip, rows in self._late:
            if "used" not in clip and all(self._cleared(row) for row in rows):
                clip["unused"] = True
        self._late = []
        cleared = bool(after) and all(self._cleared(row) for row in after)
        self.zeroed_before, self.zeroed = self.zeroed, False
        return cleared

    def _cleared(self, row: GradientVersion) -> bool:
        parameter, grad, _ = row[0](), row[1](), row[2]
        if parameter is None:
            return False
        if not has_gradient(row):
            return grad is None  # else the script keeps it
        return self.zeroed and parameter.grad is grad and untouched(row) is None

    def has_clipped(self, clip: dict[str, Any], parameters: Sequence[Any]) -> None:
        """Remember a clipping that follows a step, or that precedes any backward."""
        if not clip["backwards"]:
            clip["all"] = sum(1 for p in parameters if p.requires_grad)
            self._late.append((clip, gradient_versions(parameters)))

    def stepped(self, parameters: Sequence[Any]) -> None:
        """Mark clippings whose gradients a step reads."""
        if self._late:
            own = {id(p) for p in parameters}
            for clip, rows in self._late:
                if any(id(row[0]()) in own and has_gradient(row) for row in rows):
                    clip["used"] = True
