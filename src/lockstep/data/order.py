"""Select the examples of a step and split them into micro-batches: pure functions of seed, step and lengths.

In: the number of examples of one source, or of each source of a mixture, a seed and a step; lengths. Out: positions of
the step's examples, and M groups of them of equal padded cost. Nothing is stored, so a resume needs only the step.

`ByLength` also uses the examples' lengths to put examples of similar length into one step. `ByShard` uses the number of
examples per shard to keep a shard's examples close together. A seeded permutation is evaluated at any position by a
Feistel network with cycle walking (Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002), so step
10^9 costs the same as step 0. The gradient of a step does not depend on how its examples are grouped, so grouping by
length within a step does not change sampling, as grouping by length over the whole data would.

In a mixture, the examples of all steps occupy slots 0, 1, 2, ... A period has `sum(counts)` slots, `counts[k]` of them
for source k, shuffled by the seeded permutation. The number of slots of source k before any slot therefore follows from
the number of whole periods and the current one. Its n-th slot holds the n-th example of the source, which is reshuffled
whenever all its examples have been used. No state is kept and nothing is skipped; a weight that changes at a step
starts a new period there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


def cut_micro_batches(lengths: np.ndarray, micro_batches: int) -> list[np.ndarray]:
    """Split positions into `lengths` into `micro_batches` groups whose costs (examples x longest) are as equal as
    contiguous splits allow.

    The examples are sorted by length (stably, longest first) and split so that the largest cost is minimal. A group is
    empty only if there are fewer examples than micro-batches.
    """
    order = np.argsort(-lengths, kind="stable")
    descending = lengths[order]
    count = len(order)
    filled = min(micro_batches, count)
    # Bisect the maximum cost of a micro-batch; micro-batches are filled greedily from the longest example on.
    low, high = int(descending[0]), int(descending[0]) * count
    while low < high:
        middle = (low + high) // 2
        if len(_bounds(descending, middle, filled)) <= filled:
            high = middle
        else:
            low = middle + 1
    ends = _bounds(descending, low, filled)
    starts = [0, *ends[:-1]]
    groups = [order[a:b] for a, b in zip(starts, ends, strict=True)]
    while len(groups) < filled:  # greedy used fewer groups: halve the largest, at no cost
        largest = max(range(len(groups)), key=lambda i: len(groups[i]))
        group = groups[largest]
        groups[largest : largest + 1] = [group[: len(group) // 2], group[len(group) // 2 :]]
    return groups + [order[:0]] * (micro_batches - filled)


def _bounds(descending: np.ndarray, budget: int, micro_batches: int) -> list[int]:
    """Ends of greedily filled micro-batches of at most `budget` padded tokens each; stops once more than
    `micro_batches` are needed."""
    ends: list[int] = []
    at = 0
    while at < len(descending) and len(ends) <= micro_batches:
        at = min(len(descending), at + max(1, budget // int(descending[at])))
        ends.append(at)
    return ends


def equal_micro_batches(lengths: np.ndarray, micro_batches: int) -> list[np.ndarray]:
    """Split positions into `lengths` into `micro_batches` groups of equal size, up to one, each of similar lengths.

    Long and short groups take turns, so that ranks, which run consecutive micro-batches, have equal work. The last
    groups are empty only if there are fewer examples than micro-batches."""
    filled = min(micro_batches, len(lengths))
    parts = np.array_split(np.argsort(-lengths, kind="stable"), filled)
    turns = [parts[i // 2 if i % 2 == 0 else filled - 1 - i // 2] for i in range(filled)]
    return turns + [parts[0][:0]] * (micro_batches - filled)


def padded_cost(lengths: np.ndarray, groups: list[np.ndarray]) -> int:
    """Tokens including padding if each group is padded to its longest example."""
    return int(sum(len(g) * lengths[g].max() for g in groups if len(g)))


def by_chance(examples: int, micro_batches: int) -> list[np.ndarray]:
    """Groups of equal size in the original order: a split that ignores length."""
    return np.array_split(np.arange(examples), micro_batches)


_ROUNDS = 6
_OF_WINDOWS = 0x5DEECE66D  # seed offset of orders within windows
_OF_SHARDS = 0x2127599BF4325C37  # seed offset of the order of shards


@dataclass
class Order:
    """Order of a job's examples; every epoch is a new permutation that uses each example exactly once."""

    examples: int
    batch_size: int
    seed: int

    @property
    def steps_per_epoch(self) -> int:
        """Steps per epoch. The last may be smaller; nothing is dropped or repeated."""
        return -(-self.examples // self.batch_size)

    def step(self, step: int) -> np.ndarray:
        """Positions of the examples of one step: int64 [batch_size], fewer in an epoch's last step."""
        epoch, within = divmod(step, self.steps_per_epoch)
        start = within * self.batch_size
        positions = np.arange(start, min(start + self.batch_size, self.examples), dtype=np.uint64)
        return permute(positions, self.examples, self.seed, epoch)


def total_steps(epochs: float | None, steps: int | None, steps_per_epoch: int) -> int:
    """Optimizer steps of a whole run, whose length is given in epochs or steps."""
    return steps or max(1, round(float(epochs or 0) * steps_per_epoch))


class ByLength(Order):
    """Wraps another order: the examples of a window of steps are sorted by length and then split into steps of similar
    lengths.

    The steps of a window are shuffled; an epoch's short step stays last. Properties of a step's examples, such as a
    mixture's shares, then hold per window."""

    def __init__(self, order: Order, lengths: np.ndarray, window: int) -> None:
        super().__init__(order.examples, order.batch_size, order.seed)
        self.order, self.lengths, self.window = order, lengths, window
        self._sorted: tuple[int, np.ndarray] = (-1, lengths[:0])  # last sorted window and its examples

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
    """Order that keeps the examples of a shard close together: an epoch visits shards in a seeded order and shuffles
    the resulting sequence window by window. Examples are numbered shard by shard."""

    def __init__(self, sizes: np.ndarray, batch_size: int, seed: int, window: int) -> None:
        """`sizes`: examples of each shard, int64 [shards]. The first use of an epoch costs O(shards)."""
        super().__init__(int(sizes.sum()), batch_size, seed)
        self.sizes, self.first, self.window = sizes, np.cumsum(sizes) - sizes, window
        self._epochs: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # at most two epochs: their shards and ends

    def step(self, step: int) -> np.ndarray:
        epoch, start, stop = self._places(step)
        return self.at(epoch, np.arange(start, stop))

    def at(self, epoch: int, places: np.ndarray) -> np.ndarray:
        """Examples at these positions of an epoch: int64, same shape."""
        places, numbers = places.copy(), places // self.window
        for number in np.unique(numbers):
            now, first = numbers == number, int(number) * self.window
            size = min(self.window, self.examples - first)
            name = epoch * -(-self.examples // self.window) + int(number)
            places[now] = first + permute(places[now] - first, size, self.seed ^ _OF_WINDOWS, name)
        shards, ends = self._epoch(epoch)
        at = np.searchsorted(ends, places, side="right")
        return self.first[shards[at]] + places - (ends - self.sizes[shards])[at]

    def resident_ranges(self, step: int) -> list[range]:
        """Examples to keep in memory for a step, in epoch order: its windows, and of the next window as many as the
        steps have used, so that it is read gradually."""
        return self.ranges_around(*self._places(step))

    def ranges_around(self, epoch: int, start: int, stop: int) -> list[range]:
        """Examples to keep in memory for positions `start` to `stop` of an epoch."""
        at, stop = start - start % self.window, min(stop + self.window, self.examples)
        shards, ends = self._epoch(epoch)
        ranges = []
        for place in range(int(np.searchsorted(ends, at, side="right")), len(ends)):
            end = int(ends[place])
            begin = end - int(self.sizes[shards[place]])
            if begin >= stop:
                break
            first = int(self.first[shards[place]]) - begin
            if some := range(first + max(at, begin), first + min(stop, end)):
                ranges.append(some)
        return ranges

    def next_shards(self, step: int, count: int) -> list[int]:
        """Next shards after those of `resident_ranges`: at most `count`, from this epoch and the next."""
        epoch, _, stop = self._places(step)
        return self.shards_after(epoch, stop, count)

    def shards_after(self, epoch: int, stop: int, count: int) -> list[int]:
        """Next shards for a step that ends at `stop` in an epoch."""
        numbers: list[int] = []
        for each in (epoch, epoch + 1):
            shards, ends = self._epoch(each)
            last = min(stop + self.window, self.examples) if each == epoch else 0
            first = int(np.searchsorted(ends, last, side="left")) + 1 if last else 0
            while len(numbers) < count and first < len(shards):
                numbers += [int(shards[first])] if self.sizes[shards[first]] else []
                first += 1
        return numbers

    def _places(self, step: int) -> tuple[int, int, int]:
        """Epoch of a step, and start and end of its examples in the epoch."""
        epoch, within = divmod(step, self.steps_per_epoch)
        start = within * self.batch_size
        return epoch, start, min(start + self.batch_size, self.examples)

    def _epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        if epoch not in self._epochs:
            shards = permute(np.arange(len(self.sizes)), len(self.sizes), self.seed ^ _OF_SHARDS, epoch)
            before = {each: order for each, order in self._epochs.items() if abs(each - epoch) == 1}
            self._epochs = dict([*before.items()][-1:]) | {epoch: (shards, np.cumsum(self.sizes[shards]))}
        return self._epochs[epoch]


def permute(positions: np.ndarray, size: int, seed: int, epoch: int) -> np.ndarray:
    """Image of each position under a seeded permutation of `range(size)`: int64, same shape."""
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


PERIOD = 2**16  # places of a weighted period: resolution of the shares
_OF_PLACES = 0x2545F4914F6CDD1D  # seed offset of the order of sources
_OF_SOURCES = 0x9E3779B97F4A7C15  # seed offset of each source's order

Schedule = Sequence[tuple[int, float]]  # (step, weight), each from that step on


@dataclass(frozen=True)
class _Phase:
    """Steps from `step` on with constant weights."""

    step: int
    place: int  # of its first example
    counts: np.ndarray  # int64 [sources]: places of each in a period
    used: np.ndarray  # int64 [sources]: examples used before


class MixedOrder(Order):
    """Order of a job's examples from several sources. An epoch has as many examples as all sources together; without
    weights it uses each exactly once."""

    def __init__(self, sizes: Sequence[int], schedules: Sequence[Schedule], batch_size: int, seed: int) -> None:
        super().__init__(sum(sizes), batch_size, seed)
        self.sizes = np.asarray(sizes, dtype=np.int64)
        self.first = np.cumsum(self.sizes) - self.sizes  # of each source, in the split
        self.weighted = any(schedules)
        self._last_period: tuple[tuple[int, int], np.ndarray, np.ndarray] = ((-1, -1), self.first, self.first)
        self._phases = [_Phase(0, 0, _counts(self.sizes, schedules, 0), np.zeros_like(self.sizes))]
        for step in sorted({step for schedule in schedules for step, _ in schedule} - {0}):
            last, place = self._phases[-1], self._place(step)
            used = last.used + self._of_each(last, place - last.place)
            self._phases.append(_Phase(step, place, _counts(self.sizes, schedules, step), used))

    def step(self, step: int) -> np.ndarray:
        source, number = self.sources_of_step(step)
        rows = np.empty(len(source), dtype=np.int64)
        for k in np.unique(source):
            mine = source == k
            epochs, within = np.divmod(number[mine], self.sizes[k])
            examples = np.empty(len(within), dtype=np.int64)
            for epoch in np.unique(epochs):
                now = epochs == epoch
                examples[now] = self._of_source(int(k), int(epoch), within[now])
            rows[mine] = self.first[k] + examples
        return rows

    def _of_source(self, source: int, epoch: int, places: np.ndarray) -> np.ndarray:
        """Examples at these positions of a source's epoch: int64, same shape."""
        return permute(places.astype(np.uint64), int(self.sizes[source]), self._seed_of(source), epoch)

    def _seed_of(self, source: int) -> int:
        return (self.seed + (source + 1) * _OF_SOURCES) % 2**64

    def sources_of_step(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Source of each example of a step, and the number of that source's examples before it: int64 [examples]
        each."""
        phase = next(phase for phase in reversed(self._phases) if phase.step <= step)
        places = np.arange(self._place(step), self._place(step + 1)) - phase.place
        return self._drawn(phase, places)

    def consumed(self, step: int) -> np.ndarray:
        """Number of examples of each source used before a step: int64 [sources]."""
        phase = next(phase for phase in reversed(self._phases) if phase.step <= step)
        return phase.used + self._of_each(phase, self._place(step) - phase.place)

    def summary(self, names: Sequence[str], steps: int) -> str:
        """Describe the sources' shares over `steps` steps. Costs at most one period."""
        used = self.consumed(steps) if self.weighted else self.sizes * (self._place(steps) / self.examples)
        return "; ".join(
            f"{name} {part:.1%} ({size:,} examples, {part * used.sum() / size:.3g} epochs of them)"
            for name, part, size in zip(names, used / max(1, used.sum()), self.sizes.tolist(), strict=True)
        )

    def _place(self, step: int) -> int:
        epoch, within = divmod(step, self.steps_per_epoch)
        return epoch * self.examples + within * self.batch_size

    def _drawn(self, phase: _Phase, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return `sources_of_step` for sorted `places`, counted from the first of the phase."""
        periods, within = np.divmod(places, int(phase.counts.sum()))
        source, number = np.empty(len(places), dtype=np.int64), np.empty(len(places), dtype=np.int64)
        for period in np.unique(periods):
            now = periods == period
            if self.weighted:
                sources, before = self._period(phase, int(period))
                source[now], rank = sources[within[now]], before[within[now]]
            else:  # a period is an epoch: its examples may be in any order
                source[now], rank = self._slots(phase, int(period), within[now])
            number[now] = phase.used[source[now]] + period * phase.counts[source[now]] + rank
        return source, number

    def _slots(self, phase: _Phase, period: int, within: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return, for each position `within` a period, its source and the index within that source: int64."""
        ends = np.cumsum(phase.counts)
        seed = (self.seed ^ _OF_PLACES) + phase.step * _OF_SOURCES  # orders differ between phases
        slots = permute(within.astype(np.uint64), int(ends[-1]), seed, period)
        source = np.searchsorted(ends, slots, side="right")
        return source, slots - (ends - phase.counts)[source]

    def _period(self, phase: _Phase, period: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the source of every position in a period, and how many earlier positions have that source."""
        if self._last_period[0] != (phase.step, period):
            source, _ = self._slots(phase, period, np.arange(int(phase.counts.sum())))
            before = np.empty_like(source)
            before[np.argsort(source, kind="stable")] = np.concatenate([np.arange(count) for count in phase.counts])
            self._last_period = (phase.step, period), source, before
        return self._last_period[1], self._last_period[2]

    def _of_each(self, phase: _Phase, places: int) -> np.ndarray:
        """Number of examples of each source among the first `places` of a phase: int64 [sources]. Costs at most one
        period."""
        size = int(phase.counts.sum())
        whole = places // size
        source = self._drawn(phase, np.arange(whole * size, places))[0]
        return whole * phase.counts + np.bincount(source, minlength=len(self.sizes))


class MixedShards(MixedOrder):
    """Order of several streamed sources: `MixedOrder` decides how many examples of each a step uses, `ByShard` which.

    Consecutive examples of a source must be close together, so even without weights an epoch's places are shuffled one
    stretch at a time. The number of each source's examples before a stretch is a rounded share of the place, computed
    source by source: it grows with the place and equals the source's size at the end of the epoch."""

    def __init__(
        self, sizes: Sequence[np.ndarray], schedules: Sequence[Schedule], batch_size: int, seed: int, window: int
    ) -> None:
        """`sizes`: examples of each shard, int64 [shards], per source. `window`: of each source."""
        first = np.cumsum([0, *(len(each) for each in sizes)])
        self._first_shard: list[int] = first[:-1].tolist()  # of each source, among those of all
        super().__init__([int(each.sum()) for each in sizes], schedules, batch_size, seed)
        self._orders = [ByShard(each, batch_size, self._seed_of(k), window) for k, each in enumerate(sizes)]
        self._counted: dict[int, np.ndarray] = {}  # `consumed` of the latest steps

    def resident_ranges(self, step: int) -> list[range]:
        """Examples to keep in memory, source by source, in reading order."""
        ranges: list[range] = []
        for source, start, stop in self._taken(step):
            size, first, order = int(self.sizes[source]), int(self.first[source]), self._orders[source]
            last = max(start, stop - 1) // size
            for epoch in range(start // size, last + 1):
                begin, end = max(start - epoch * size, 0), min(stop - epoch * size, size)
                some = order.ranges_around(epoch, begin, max(begin, end))
                ranges += [range(first + each.start, first + each.stop) for each in some]
        return list(dict.fromkeys(ranges))

    def next_shards(self, step: int, count: int) -> list[int]:
        """Next shards after those of `resident_ranges`, at most `count` per source."""
        numbers = []
        for source, start, stop in self._taken(step):
            epoch, within = divmod(max(start, stop - 1), int(self.sizes[source]))
            some = self._orders[source].shards_after(epoch, within + 1, count)
            numbers += [self._first_shard[source] + each for each in some]
        return list(dict.fromkeys(numbers))

    def consumed(self, step: int) -> np.ndarray:
        if self.weighted:
            return super().consumed(step)
        epoch, within = divmod(self._place(step), self.examples)
        start = within - within % PERIOD
        sources, _ = self._stretch(epoch, start // PERIOD)
        return (
            epoch * self.sizes + self._before(start) + np.bincount(sources[: within - start], minlength=len(self.sizes))
        )

    def _taken(self, step: int) -> list[tuple[int, int, int]]:
        """Source, start and end of the examples that a step uses, counted over all epochs."""
        self._counted = {t: self._counted[t] if t in self._counted else self.consumed(t) for t in (step, step + 1)}
        both = zip(self._counted[step].tolist(), self._counted[step + 1].tolist(), strict=True)
        return [(source, start, stop) for source, (start, stop) in enumerate(both)]

    def _of_source(self, source: int, epoch: int, places: np.ndarray) -> np.ndarray:
        return self._orders[source].at(epoch, places)

    def _drawn(self, phase: _Phase, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if self.weighted:
            return super()._drawn(phase, places)
        epochs, within = np.divmod(places, self.examples)
        source, number = np.empty(len(places), dtype=np.int64), np.empty(len(places), dtype=np.int64)
        names = np.stack([epochs, within // PERIOD], axis=1)
        for epoch, stretch in np.unique(names, axis=0).tolist():
            now = (names == [epoch, stretch]).all(axis=1)
            sources, before = self._stretch(epoch, stretch)
            at = within[now] - stretch * PERIOD
            source[now] = sources[at]
            number[now] = (epoch * self.sizes + self._before(stretch * PERIOD))[sources[at]] + before[at]
        return source, number

    def _stretch(self, epoch: int, stretch: int) -> tuple[np.ndarray, np.ndarray]:
        """Sources and places of an epoch's examples from `stretch * PERIOD` on."""
        start = stretch * PERIOD
        counts = self._before(min(start + PERIOD, self.examples)) - self._before(start)
        number = epoch * -(-self.examples // PERIOD) + stretch
        return self._period(_Phase(0, 0, counts, self.sizes), number)

    def _before(self, place: int) -> np.ndarray:
        """Number of examples of each source among the first `place` places of an epoch: int64 [sources]."""
        counts = np.zeros_like(self.sizes)
        ends = np.cumsum(self.sizes).tolist()
        for source in range(len(ends) - 1, 0, -1):
            rest = place * ends[source - 1] // ends[source]  # examples of the sources before this one
            counts[source], place = place - rest, rest
        counts[0] = place
        return counts


def _counts(sizes: np.ndarray, schedules: Sequence[Schedule], step: int) -> np.ndarray:
    """Places of each source in a period: its size without weights, else its share of `PERIOD`, at least one, rounded by
    largest remainders."""
    if not any(schedules):
        return sizes
    weights = np.array([[w for s, w in schedule if s <= step][-1] for schedule in schedules], dtype=np.float64)
    shares = weights / weights.sum() * (PERIOD - len(sizes))
    counts = np.floor(shares).astype(np.int64)
    order = np.argsort(-(shares - counts), kind="stable")
    counts[order[: PERIOD - len(sizes) - int(counts.sum())]] += 1
    return counts + 1
