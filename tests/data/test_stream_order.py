"""The order of a stream: shard by shard and window by window, a pure function of the step."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.data import order as orders
from lockstep.data.order import ByShard

SIZES = st.lists(st.integers(0, 60), min_size=1, max_size=6).filter(any)


@settings(max_examples=60)
@given(SIZES, st.integers(1, 40), st.integers(1, 50), st.integers(0, 2**63 - 1))
def test_an_epoch_uses_every_example_once_from_any_starting_point(
    sizes: list[int], batch: int, window: int, seed: int
) -> None:
    order = ByShard(np.array(sizes), batch, seed, window)
    count = order.steps_per_epoch
    steps = [order.step(t) for t in range(2 * count)]
    for epoch in (steps[:count], steps[count:]):
        assert sorted(np.concatenate(epoch)) == list(range(sum(sizes)))
        assert [len(rows) for rows in epoch[:-1]] == [batch] * (count - 1)
    for t in np.random.default_rng(seed).permutation(2 * count)[:10]:
        assert (ByShard(np.array(sizes), batch, seed, window).step(int(t)) == steps[t]).all()


@settings(max_examples=60)
@given(SIZES, st.integers(1, 40), st.integers(1, 50), st.integers(0, 1000))
def test_memory_holds_at_most_two_windows_and_two_steps(sizes: list[int], batch: int, window: int, seed: int) -> None:
    order = ByShard(np.array(sizes), batch, seed, window)
    before: set[int] = set()
    for t in range(order.steps_per_epoch):
        near = list(itertools.chain.from_iterable(order.resident_ranges(t)))
        assert len(near) == len(set(near)) <= 2 * window + 2 * batch
        assert set(order.step(t)) <= set(near)
        if t:  # only the first step reads more than it uses
            assert len(set(near) - before) <= batch
        before = set(near)


def test_shards_are_read_in_a_new_order_each_epoch() -> None:
    order = ByShard(np.array([50, 80, 20, 50]), 10, 3, 30)
    seen = [np.concatenate([order.step(e * 20 + t) for t in range(20)]) for e in range(6)]
    firsts = set()
    for rows in seen:
        shard = np.searchsorted(order.first, rows, side="right") - 1
        firsts.add(tuple(dict.fromkeys(shard[::30].tolist())))
        for start in range(0, 200, 30):  # a window's examples are contiguous within two or three shards
            assert len(set(shard[start : start + 30])) <= 3
        assert (np.diff(rows) != 1).mean() > 0.9  # and are shuffled
    assert len(firsts) > 2
    other = ByShard(np.array([50, 80, 20, 50]), 10, 4, 30)
    assert (other.step(3) != order.step(3)).any()


def test_late_steps_cost_no_more_than_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    permute = orders.permute
    monkeypatch.setattr(orders, "permute", lambda p, *rest: (asked.append(len(p)), permute(p, *rest))[1])
    order = ByShard(np.full(1000, 10**6), 256, 1, 8192)  # 10^9 examples
    costs = []
    for step in (0, 10**6, 10**9):
        asked.clear()
        assert len(np.unique(order.step(step))) == 256
        assert sum(map(len, order.resident_ranges(step))) <= 2 * 8192 + 512
        costs.append(sum(asked))
    assert max(costs) <= 1000 + 256  # the shards of an epoch, and the step's examples
