"""Splitting a step: every example once, with costs as equal as contiguous micro-batches allow."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lockstep.data.order import by_chance, cut_micro_batches, padded_cost

lengths = st.lists(st.integers(1, 120), min_size=1, max_size=60).map(np.array)


@given(lengths, st.integers(1, 12))
def test_every_example_is_in_one_micro_batch(lengths: np.ndarray, micro_batches: int) -> None:
    groups = cut_micro_batches(lengths, micro_batches)
    assert len(groups) == micro_batches
    assert sorted(np.concatenate(groups)) == list(range(len(lengths)))
    assert sum(len(g) == 0 for g in groups) == max(0, micro_batches - len(lengths))


@given(st.lists(st.integers(1, 30), min_size=1, max_size=9).map(np.array), st.integers(1, 4))
def test_the_largest_micro_batch_is_as_small_as_possible(lengths: np.ndarray, micro_batches: int) -> None:
    dearest = max(len(g) * lengths[g].max() for g in cut_micro_batches(lengths, micro_batches) if len(g))
    ordered = np.sort(lengths)[::-1]
    best = None
    for bounds in itertools.combinations_with_replacement(range(len(ordered) + 1), micro_batches - 1):
        parts = [ordered[a:b] for a, b in itertools.pairwise([0, *bounds, len(ordered)])]
        cost = max(len(p) * p.max() for p in parts if len(p))
        best = cost if best is None else min(best, cost)
    assert dearest == best


def test_sorted_micro_batches_pad_far_less_than_random_ones() -> None:
    random = np.random.default_rng(0)
    lengths = np.minimum(87, 4 + random.gamma(2.5, 7, size=128).astype(int))
    groups = cut_micro_batches(lengths, 8)
    assert (
        padded_cost(lengths, groups)
        < 1.2 * lengths.sum()
        < 1.6 * lengths.sum()
        < padded_cost(lengths, by_chance(len(lengths), 8))
    )
    costs = [len(g) * lengths[g].max() for g in groups]
    assert max(costs) < 1.1 * np.mean(costs)


def test_the_same_lengths_give_the_same_micro_batches() -> None:
    lengths = np.array([5, 5, 5, 9, 9, 1, 1, 5])
    assert [g.tolist() for g in cut_micro_batches(lengths, 3)] == [
        g.tolist() for g in cut_micro_batches(lengths.copy(), 3)
    ]
