"""`launch.rebalance_every`: a rank that is slow for a while hands micro-batches over to others; the bits stay.

In: how long each rank took for the tokens that it computed, every few steps. Out: which micro-batches each rank runs
from the next step on. Micro-batches belong to the step and not to the rank, and the tree adds them up in one order
whoever ran them (`strategies/exact/reduction.py`), so this is a matter of time and of nothing else. What is decided is
a pure function of numbers that all ranks have been sent. It takes strategies that hold a whole copy of the model.
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
from lockstep.strategies.exact.reduction import Shares, even
from lockstep.strategies.native import Native
from lockstep.training.resolve import WHOLE_COPIES
from lockstep.training.session import Session

PAYS = 0.10  # of the time of computing: what other shares must be expected to save
BACK = 0.05  # the same, where they are the even ones
NEAR = 0.05  # how much longer than with the best shares even ones may take, and be preferred
# how much longer than the quickest rank all may take, and share evenly again: short texts cost more a token
ALIKE = 0.10


class LoadBalancer:
    """Hands out a session's batches, and looks every few steps at who computes how fast."""

    def __init__(self, session: Session) -> None:
        """Errors: `RunError` for a strategy whose ranks hold parts of the model."""
        self._session, self._world, self._feed = session, session.world, session.feed
        self._every = session.run.launch.rebalance_every
        self._even: Shares = even(session.run.micro_batches, session.world.size)
        self._shares = self._even
        self._rates: deque[list[float]] = deque(maxlen=2)  # seconds a token of each rank, of the last two looks
        self._pending: Callable[[], list[list[float]]] | None = None
        self._tokens, self._seconds = 0, 0.0
        if not isinstance(session.strategy, Native):
            raise RunError(
                "LS5100",
                f"launch.rebalance_every: {session.run.strategy.name} shards this model; {WHOLE_COPIES}",
            )

    def steps(self, after: int, ends: Callable[[Unreadable], None]) -> Iterator[StepBatch]:
        """`StepLoader.steps`. A step is over when the next batch is asked for. Collective."""
        if self._feed.shares is not None:  # those of ranks that trained before
            self._feed.deal(self._even, self._world.rank)
        self._seconds = self._session.strategy.phases.computed()
        with closing(self._feed.steps(after, ends)) as batches:
            for batch in batches:
                yield batch
                self._look(batch)

    def _look(self, batch: StepBatch) -> None:
        """Called after each step: read the numbers that were requested after the last look, decide on new shares, and
        request numbers again at every `rebalance_every`-th step. Collective; does not wait for ranks that are still in
        the step."""
        answer, self._pending = self._pending, None
        if answer is not None:
            self._hear(answer(), batch.step + 1)
        self._tokens += batch.own_tokens
        if (batch.step + 1) % self._every == 0:
            computed = self._session.strategy.phases.computed()
            self._pending = self._world.all_gather_numbers([computed - self._seconds, self._tokens])
            self._seconds, self._tokens = computed, 0

    def _hear(self, reports: Sequence[Sequence[float]], step: int) -> None:
        """Seconds and tokens of each rank."""
        rates = [seconds / tokens if tokens > 0 else math.nan for seconds, tokens in reports]
        if not all(0 < rate < math.inf for rate in rates):  # a rank had blank micro-batches only
            return
        self._rates.append(rates)
        if len(self._rates) < 2:
            return
        lasting = [min(both) for both in zip(*self._rates, strict=True)]  # slow once is not slow for a while
        shares = decided(self._shares, self._even, lasting)
        if shares != self._shares:
            self._rates.clear()  # two looks at the new shares come first
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
    """The shares of the steps that come: those of now, unless others are expected to save time. `equal`: the even ones;
    `rates`: seconds a token, by rank. A pure function."""
    if max(rates) <= (1 + ALIKE) * min(rates):
        return equal
    best = quickest(rates, now[-1].stop)
    if expected(equal, rates) <= (1 + NEAR) * expected(best, rates):
        best = equal
    saved = 1 - expected(best, rates) / expected(now, rates)
    return best if saved >= (BACK if best == equal else PAYS) else now


def expected(shares: Shares, rates: Sequence[float]) -> float:
    """Seconds of the slowest rank, with one token a micro-batch: they cost about the same."""
    return max(len(each) * rate for each, rate in zip(shares, rates, strict=True))


def quickest(rates: Sequence[float], leaves: int) -> tuple[range, ...]:
    """Shares of one leaf or more a rank with which the slowest is through as early as can be; among them those that
    leave fewest partial sums to send."""
    most = _most(rates, leaves)
    after = [sum(most[rank + 1 :]) for rank in range(len(most))]  # leaves that later ranks can take
    best: dict[int, tuple[int, tuple[range, ...]]] = {0: (0, ())}  # first leaf that is left -> sums to send, shares
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
    """The number of leaves that each rank can take, where all are through as early as can be and each takes one or
    more."""

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
    """The number of partial sums that the leaves `first..end-1` leave: the length of `reduction.partial_nodes`, at
    once."""
    room = 1 << (leaves - 1).bit_length() if end == leaves else end  # beside the tree's last nodes there is nothing
    count = 0
    while first < end:
        size = first & -first or 1 << room.bit_length()
        while first + size > room:
            size >>= 1
        first, count = first + size, count + 1
    return count


def rebalance_message(shares: Shares, equal: Shares, rates: Sequence[float], hosts: Sequence[str], step: int) -> str:
    """The note for a person."""
    if shares == equal:
        return f"hand over: from step {step + 1} on ranks share micro-batches equally again; they compute alike"
    usual = statistics.median_low(rates)
    fewer = [
        f"rank {rank} on {hosts[rank]} runs {len(share)} of {equal[-1].stop} micro-batches, not {len(equal[rank])}: it "
        f"takes {rates[rank] / usual:.1f} times as long for a token as others do"
        for rank, share in enumerate(shares)
        if len(share) < len(equal[rank])
    ]
    return f"hand over: from step {step + 1} on {'; '.join(fewer)}"
