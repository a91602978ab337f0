"""The order of examples: one permutation per epoch, the same from any starting point."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.data.order import ByLength, Order, permute


@given(st.integers(1, 3000), st.integers(0, 2**63 - 1), st.integers(0, 10))
def test_permute_is_a_permutation(size: int, seed: int, epoch: int) -> None:
    values = permute(np.arange(size, dtype=np.uint64), size, seed, epoch)
    assert sorted(values) == list(range(size))


@given(st.integers(1, 200), st.integers(1, 40), st.integers(0, 1000))
def test_an_epoch_uses_every_example_once_and_its_last_step_is_short(examples: int, batch: int, seed: int) -> None:
    order = Order(examples, batch, seed)
    steps = [order.step(t) for t in range(order.steps_per_epoch)]
    assert sorted(np.concatenate(steps)) == list(range(examples))
    assert [len(s) for s in steps[:-1]] == [batch] * (len(steps) - 1)
    assert len(steps[-1]) == examples - batch * (len(steps) - 1)


@given(st.integers(1, 150), st.integers(1, 20), st.integers(2, 9), st.integers(0, 1000))
def test_sorting_by_length_uses_every_example_once_from_any_step(
    examples: int, batch: int, window: int, seed: int
) -> None:
    lengths = np.random.default_rng(seed).integers(1, 50, examples)
    order = ByLength(Order(examples, batch, seed), lengths, window)
    count = order.steps_per_epoch
    steps = [order.step(t) for t in range(2 * count)]
    for epoch in (steps[:count], steps[count:]):
        assert sorted(np.concatenate(epoch)) == list(range(examples))
        assert [len(s) for s in epoch] == [len(Order(examples, batch, seed).step(t)) for t in range(count)]
    for t in np.random.default_rng(seed).permutation(2 * count)[:5]:  # in another order, each by a new object
        assert (order.step(int(t)) == steps[t]).all()
        assert (ByLength(Order(examples, batch, seed), lengths, window).step(int(t)) == steps[t]).all()


def test_sorting_by_length_keeps_windows_and_groups_similar_lengths() -> None:
    lengths = np.random.default_rng(0).integers(1, 100, 1000)
    plain = Order(1000, 10, 3)
    order = ByLength(plain, lengths, 20)
    for first in range(0, 100, 20):
        window = [order.step(t) for t in range(first, first + 20)]
        assert sorted(np.concatenate(window)) == sorted(np.concatenate([plain.step(first + i) for i in range(20)]))
        assert max(np.ptp(lengths[rows]) for rows in window) < 20
        means = [lengths[rows].mean() for rows in window]
        assert means not in (sorted(means), sorted(means, reverse=True))  # not sorted by length


def test_epochs_and_seeds_differ() -> None:
    orders = [
        tuple(permute(np.arange(1000, dtype=np.uint64), 1000, seed, epoch)) for seed in range(3) for epoch in range(3)
    ]
    assert len(set(orders)) == 9
    # neighbors must not stay neighbors: the mean distance in a random permutation of n is n / 3
    for order in orders:
        assert 250 < np.abs(np.diff(order)).mean() < 420


def test_each_epoch_has_its_own_order() -> None:
    order = Order(40, 8, 3)
    epochs = [np.concatenate([order.step(epoch * 5 + step) for step in range(5)]) for epoch in range(3)]
    assert len({tuple(rows.tolist()) for rows in epochs}) == 3
    together = [{frozenset(order.step(epoch * 5 + step).tolist()) for step in range(5)} for epoch in range(3)]
    assert not together[0] & together[1]  # nor does a pair meet again
    assert not together[1] & together[2]


def test_late_steps_cost_no_more_than_the_first() -> None:
    order = Order(10**10, 256, 7)
    rows = order.step(10**12)
    assert len(rows) == 256 == len(set(rows.tolist()))
    assert rows.min() >= 0
    assert rows.max() < 10**10


@pytest.mark.parametrize("size", [1, 2, 3, 64, 65])
def test_positions_are_independent_of_each_other(size: int) -> None:
    together = permute(np.arange(size, dtype=np.uint64), size, 3, 1)
    alone = [int(permute(np.array([i], dtype=np.uint64), size, 3, 1)[0]) for i in range(size)]
    assert together.tolist() == alone
