"""Which examples step t uses: a pure function of (seed, t), with nothing to store and nothing to skip.

In: the number of examples, the batch size, the seed and a step. Out: positions in the training split.
`ByLength` also takes the examples' lengths, and lets examples of like length meet in a step. `ByShard` takes how many
examples each shard has, and uses those of a shard near each other.
A seeded permutation is evaluated at any position by a Feistel network with cycle walking (Black and Rogaway,
"Ciphers with arbitrary finite domains", CT-RSA 2002), so that step 10^9 costs what step 0 costs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_ROUNDS = 6
_OF_WINDOWS = 0x5DEECE66D  # sets the seed of the order within windows apart
_OF_SHARDS = 0x2127599BF4325C37  # and that of the order of shards


@dataclass
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


def total_steps(epochs: float | None, steps: int | None, steps_per_epoch: int) -> int:
    """Optimizer steps of a whole run, which gives its length in epochs or in steps."""
    return steps or max(1, round(float(epochs or 0) * steps_per_epoch))


class ByLength(Order):
    """Another order, where the examples of a window of steps are sorted by length before they are cut into steps: each
    step's examples are alike. The steps of a window come in an order drawn anew; an epoch's short step stays last.
    What holds of the examples of a step, such as the shares of a mixture's sources, then holds of those of a window."""

    def __init__(self, order: Order, lengths: np.ndarray, window: int) -> None:
        super().__init__(order.examples, order.batch_size, order.seed)
        self.order, self.lengths, self.window = order, lengths, window
        self._sorted: tuple[int, np.ndarray] = (-1, lengths[:0])  # the window that was sorted last, and its examples

    def step(self, step: int) -> np.ndarray:
        within = step % self.steps_per_epoch
        place = within % self.window
        name = step - place  # of the window: its first step
        if self._sorted[0] != name:
            steps = min(self.window, self.steps_per_epoch - (within - place))
            rows = np.concatenate([self.order.step(name + number) for number in range(steps)])
            self._sorted = name, rows[np.argsort(-self.lengths[rows], kind="stable")]
        rows = self._sorted[1]
        whole = len(rows) // self.batch_size
        if place < whole:
            place = int(permute(np.array([place]), whole, self.seed ^ _OF_WINDOWS, name)[0])
        return rows[place * self.batch_size : (place + 1) * self.batch_size]


class ByShard(Order):
    """An order in which the examples of a shard come near each other: an epoch goes through the shards in a seeded
    order, and what follows each other in them is shuffled window by window. Examples are numbered shard by shard."""

    def __init__(self, sizes: np.ndarray, batch_size: int, seed: int, window: int) -> None:
        """`sizes`: examples of each shard, int64 [shards]. An epoch costs as much as there are shards, once."""
        super().__init__(int(sizes.sum()), batch_size, seed)
        self.sizes, self.first, self.window = sizes, np.cumsum(sizes) - sizes, window
        self._epochs: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # two at most: their shards, and where these end

    def step(self, step: int) -> np.ndarray:
        epoch, start, stop = self._places(step)
        return self.at(epoch, np.arange(start, stop))

    def at(self, epoch: int, places: np.ndarray) -> np.ndarray:
        """The examples at some places of an epoch: int64, same shape."""
        places, numbers = places.copy(), places // self.window
        for number in np.unique(numbers):
            now, first = numbers == number, int(number) * self.window
            size = min(self.window, self.examples - first)
            name = epoch * -(-self.examples // self.window) + int(number)
            places[now] = first + permute(places[now] - first, size, self.seed ^ _OF_WINDOWS, name)
        shards, ends = self._epoch(epoch)
        at = np.searchsorted(ends, places, side="right")
        return self.first[shards[at]] + places - (ends - self.sizes[shards])[at]

    def near(self, step: int) -> list[range]:
        """Examples to have at hand, in the order of an epoch: those of the windows of a step, and as many behind them
        as steps have used of them, so that the next window is read little by little."""
        return self.around(*self._places(step))

    def around(self, epoch: int, start: int, stop: int) -> list[range]:
        """Examples to have at hand for the places from `start` to `stop` of an epoch."""
        at, stop = start - start % self.window, min(stop + self.window, self.examples)
        shards, ends = self._epoch(epoch)
        found = []
        for place in range(int(np.searchsorted(ends, at, side="right")), len(ends)):
            end = int(ends[place])
            begin = end - int(self.sizes[shards[place]])
            if begin >= stop:
                break
            first = int(self.first[shards[place]]) - begin
            if some := range(first + max(at, begin), first + min(stop, end)):
                found.append(some)
        return found

    def behind(self, step: int, count: int) -> list[int]:
        """Shards that come next after those of `near`, so many, or all of this epoch and the next."""
        epoch, _, stop = self._places(step)
        return self.after(epoch, stop, count)

    def after(self, epoch: int, stop: int, count: int) -> list[int]:
        """Shards that come next where a step ends at `stop` in an epoch."""
        found: list[int] = []
        for each in (epoch, epoch + 1):
            shards, ends = self._epoch(each)
            last = min(stop + self.window, self.examples) if each == epoch else 0
            first = int(np.searchsorted(ends, last, side="left")) + 1 if last else 0
            while len(found) < count and first < len(shards):
                found += [int(shards[first])] if self.sizes[shards[first]] else []
                first += 1
        return found

    def _places(self, step: int) -> tuple[int, int, int]:
        """The epoch of a step, and from where to where its examples are in it."""
        epoch, within = divmod(step, self.steps_per_epoch)
        start = within * self.batch_size
        return epoch, start, min(start + self.batch_size, self.examples)

    def _epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        if epoch not in self._epochs:
            shards = permute(np.arange(len(self.sizes)), len(self.sizes), self.seed ^ _OF_SHARDS, epoch)
            before = {each: found for each, found in self._epochs.items() if abs(each - epoch) == 1}
            self._epochs = dict([*before.items()][-1:]) | {epoch: (shards, np.cumsum(self.sizes[shards]))}
        return self._epochs[epoch]


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
