"""A loss that jumps, told from one that wanders.

In: losses, one after another. Out: which of them are far above those before.
"""

from __future__ import annotations

import math


class Spikes:
    """Tells a loss that jumps from one that wanders: running mean and variance, in which a jump does not count."""

    def __init__(self, count: int = 0, mean: float = 0.0, variance: float = 0.0) -> None:
        self._count, self._mean, self._variance = count, mean, variance

    @property
    def state(self) -> tuple[int, float, float]:
        return self._count, self._mean, self._variance

    def seen(self, loss: float) -> bool:
        """Whether this one is more than six standard deviations above those before it."""
        apart = loss - self._mean
        if not math.isfinite(loss) or (self._count >= 20 and apart > 6 * self._variance**0.5):
            return True
        self._count += 1
        weight = max(0.02, 1 / self._count)
        self._mean += weight * apart
        self._variance = (1 - weight) * (self._variance + weight * apart**2)
        return False
