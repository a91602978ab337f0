"""Which examples step t uses: a pure function of (seed, t), with nothing to store and nothing to skip.

In: the number of examples, the batch size, the seed and a step. Out: positions in the training split.
A seeded permutation is evaluated at any position by a Feistel network with cycle walking (Black and Rogaway,
"Ciphers with arbitrary finite domains", CT-RSA 2002), so that step 10^9 costs what step 0 costs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_ROUNDS = 6


@dataclass(frozen=True)
class Order:
    """The order of a job's examples; every epoch is a permutation of its own and uses each example exactly once."""

    examples: int
    batch_size: int
    seed: int

    @property
    def steps_per_epoch(self) -> int:
        """The last step of an epoch may be smaller; nothing is dropped and nothing repeated."""
        return -(-self.examples // self.batch_size)

    def step(self, step: int) -> np.ndarray:
        """Positions of the examples of one step: int64 [batch_size], fewer in an epoch's last step."""
        epoch, within = divmod(step, self.steps_per_epoch)
        start = within * self.batch_size
        positions = np.arange(start, min(start + self.batch_size, self.examples), dtype=np.uint64)
        return permute(positions, self.examples, self.seed, epoch)


def permute(positions: np.ndarray, size: int, seed: int, epoch: int) -> np.ndarray:
    """Where a seeded permutation of `range(size)` puts each position: int64, same shape."""
    half = max(1, ((size - 1).bit_length() + 1) // 2)  # the network permutes 2 * half bits: fewer than 4 * size values
    values = _feistel(positions.astype(np.uint64), half, seed, epoch)
    while (outside := values >= size).any():  # walk the cycle until every value is in the domain
        values[outside] = _feistel(values[outside], half, seed, epoch)
    return values.astype(np.int64)


def _feistel(values: np.ndarray, half: int, seed: int, epoch: int) -> np.ndarray:
    mask = np.uint64((1 << half) - 1)
    left, right = values >> np.uint64(half), values & mask
    with np.errstate(over="ignore"):
        for number in range(_ROUNDS):
            key = np.uint64(
                (seed * 0x9E3779B97F4A7C15 + epoch * 0xC2B2AE3D27D4EB4F + number * 0x165667B19E3779F9) % 2**64
            )
            mixed = (right ^ key) * np.uint64(0xBF58476D1CE4E5B9)
            mixed = (mixed ^ (mixed >> np.uint64(29)) ^ key) * np.uint64(0x94D049BB133111EB)
            left, right = right, left ^ ((mixed ^ (mixed >> np.uint64(32))) & mask)
    return (left << np.uint64(half)) | right
