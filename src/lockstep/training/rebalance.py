"""`launch.rebalance_every`: move micro-batches from slow ranks to faster ones, without changing the bits.

In: the time of each rank per computed token, every few steps. Out: the micro-batches that each rank runs from the next
step on. Micro-batches belong to the step, not to a rank, and the reduction tree adds them in one order whoever ran them
(`strategies/exact/gradient_sum.py`), so only the time changes. The decision is a pure function of numbers that all
ranks have. Requires a strategy whose ranks hold the whole model.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing

from lockstep.config.run import RunError
from lockstep.data.batch import StepBatch
from lockstep.data.streamed import Unreadable
from lockstep.strategies.exact.gradient_sum import Shares, even
from lockstep.strategies.single import ReplicatedStrategy
from lockstep.training.resolve import WHOLE_COPIES
from lockstep.training.session import Session

PAYS = 0.10  # minimum expected saving, as a fraction of compute time, to change shares
BACK = 0.05  # as PAYS, for a return to equal shares
NEAR = 0.05  # equal shares are preferred if they take at most this much longer than the best shares
# share equally if no rank is slower than the fastest by more than this: short texts cost more per token
ALIKE = 0.10


class LoadBalancer:
    """Yield a session's batches and measure every few steps how fast each rank computes."""

    def __init__(self, session: Session) -> None:
        """Refuse a strategy whose ranks hold parts of the model. Errors: `RunError`."""
        self._session, self._world, self._feed = session, session.world, session.feed
        self._every = session.run.launch.rebalance_every
        self._even: Shares = even(session.run.micro_batches, session.world.size)
        self._shares = self._even
        self._rates: deque[list[float]] = deque(maxlen=2)  # seconds per token of each rank, last two measurements
        self._pending: Callable[[], list[list[float]]] | None = None
        self._tokens, self._seconds = 0, 0.0
        if not isinstance(session.strategy, ReplicatedStrategy):
            raise RunError(
                "LS5100",
                f"launch.rebalance_every: {session.run.strategy.name} shards this model; {WHOLE_COPIES}",
            )

    def steps(self, after: int, ends: Callable[[Unreadable], None]) -> Iterator[StepBatch]:
        """Like `StepLoader.steps`. A step ends when the next batch is requested. Collective."""
        if self._feed.shares is not None:  # left over from an earlier group of ranks
            self._feed.deal(self._even, self._world.rank)
        self._seconds = self._session.strategy.phases.computed()
        with closing(self._feed.steps(after, ends)) as batches:
            for batch in batches:
                yield batch
                self._look(batch)

    def _look(self, batch: StepBatch) -> None:
        """Called after each step: read the measurements requested last time, decide on new shares, and request
        measurements at every `rebalance_every`-th step. Collective; does not wait for ranks still in the step."""
        answer, self._pending = self._pending, None
        if answer is not None:
            self._hear(answer(), batch.step + 1)
        self._tokens += batch.own_tokens
        if (batch.step + 1) % self._every == 0:
            computed = self._session.strategy.phases.computed()
            self._pending = self._world.all_gather_numbers([computed - self._seconds, self._tokens])
            self._seconds, self._tokens = computed, 0

    def _hear(self, reports: Sequence[Sequence[float]], step: int) -> None:
        """Decide on new shares from the seconds and tokens of each rank."""
        rates = [seconds / tokens if tokens > 0 else math.nan for seconds, tokens in reports]
        if not all(0 < rate < math.inf for rate in rates):  # a rank had only padding micro-batches
            return
        self._rates.append(rates)
        if len(self._rates) < 2:
            return
        lasting = [min(both) for both in zip(*self._rates, strict=True)]  # ignore a rank that was slow only once
        shares = decided(self._shares, self._even, lasting)
        if shares != self._shares:
            self._rates.clear()  # measure the new shares twice first
            self._deal(shares, lasting, step)

    def _deal(self, shares: Shares, rates: Sequence[float], step: int) -> None:
        self._shares = shares
        self._feed.deal(shares, self._world.rank)
        fastest = min(rates)
        self._session.journal.event(
            "hand_over",
            step,
            micro_batches=[len(each) for each in shares],
            seconds_a_token=[round(rate / fastest, 3) for rate in rates],
        )
        if self._world.is_main:
            self._session.checkpoints.say(rebalance_message(shares, self._even, rates, self._world.hosts, step))


def decided(now: Shares, equal: Shares, rates: Sequence[float]) -> Shares:
    """Shares of the next steps: the present ones (`now`), unless others are expected to save time. `equal`: equal
    shares; `rates`: seconds per token, by rank. A pure function."""
    if max(rates) <= (1 + ALIKE) * min(rates):
        return equal
    best = quickest(rates, now[-1].stop)
    if expected(equal, rates) <= (1 + NEAR) * expected(best, rates):
        best = equal
    saved = 1 - expected(best, rates) / expected(now, rates)
    least = BACK if best == equal else PAYS
    return best if saved >= least else now


def expected(shares: Shares, rates: Sequence[float]) -> float:
    """Expected seconds of the slowest rank, at one token per micro-batch: micro-batches cost about the same."""
    return max(len(each) * rate for each, rate in zip(shares, rates, strict=True))


def quickest(rates: Sequence[float], leaves: int) -> tuple[range, ...]:
    """Shares, at least one leaf per rank, that minimize the time of the slowest rank; among those, the ones with the
    fewest partial sums to send."""
    most = _most(rates, leaves)
    after = [sum(most[rank + 1 :]) for rank in range(len(most))]  # leaves that the later ranks can take
    best: dict[int, tuple[int, tuple[range, ...]]] = {0: (0, ())}  # first remaining leaf -> (sums to send, shares)
    for rank, can in enumerate(most):
        later = len(most) - rank - 1
        longer: dict[int, tuple[int, tuple[range, ...]]] = {}
        for start, (sums, shares) in best.items():
            for end in range(max(start + 1, leaves - after[rank]), min(start + can, leaves - later) + 1):
                sent = sums + partial_sums(start, end, leaves)
                if end not in longer or sent < longer[end][0]:
                    longer[end] = (sent, (*shares, range(start, end)))
        best = longer
    return best[leaves][1]


def _most(rates: Sequence[float], leaves: int) -> list[int]:
    """Maximum number of leaves for each rank, at the shortest possible time of the slowest rank with at least one leaf
    each."""

    def can(limit: float) -> list[int]:
        return [int(limit * (1 + 1e-9) / rate) for rate in rates]

    limits = sorted({count * rate for rate in rates for count in range(1, leaves + 1)})
    low, high = 0, len(limits) - 1
    while low < high:
        middle = (low + high) // 2
        counts = can(limits[middle])
        low, high = (low, middle) if min(counts) >= 1 and sum(counts) >= leaves else (middle + 1, high)
    return can(limits[low])


def partial_sums(first: int, end: int, leaves: int) -> int:
    """Number of partial sums of the leaves `first..end-1`: the length of `reduction.partial_nodes`, without building
    it."""
    room = 1 << (leaves - 1).bit_length() if end == leaves else end  # the tree's last nodes have no right neighbour
    count = 0
    while first < end:
        size = first & -first or 1 << room.bit_length()
        while first + size > room:
            size >>= 1
        first, count = first + size, count + 1
    return count


def rebalance_message(shares: Shares, equal: Shares, rates: Sequence[float], hosts: Sequence[str], step: int) -> str:
    """Message about new shares."""
    if shares == equal:
        return (
            f"rebalanced: from step {step + 1} on ranks share micro-batches equally again, because their speeds "
            "are about equal"
        )
    usual = statistics.median_low(rates)
    fewer = [
        f"rank {rank} on {hosts[rank]} runs {len(share)} of {equal[-1].stop} micro-batches, not {len(equal[rank])}: "
        f"its time per token is {rates[rank] / usual:.1f} times that of the others"
        for rank, share in enumerate(shares)
        if len(share) < len(equal[rank])
    ]
    return f"rebalanced: from step {step + 1} on {'; '.join(fewer)}"
