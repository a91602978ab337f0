"""The reduction tree adds in one bracketing, whichever rank holds which leaf."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.distributed.world import World
from lockstep.strategies.exact.exchange import Exchange, buckets
from lockstep.strategies.exact.gradient_sum import (
    ReductionTree,
    Shares,
    even,
    exchange_rows,
    layout_of,
    most_held,
    partial_nodes,
    share,
)
from lockstep.strategies.exact.reduce_schedule import LinkSpeeds
from lockstep.strategies.exact.update import Gradient, Part
from support.brackets import bracket, leaf
from support.harness import run_on, tiny


@given(st.integers(1, 17).flatmap(lambda n: st.tuples(st.just(n), st.permutations(range(n)))))
def test_the_order_of_arrival_does_not_change_the_bits(case: tuple[int, list[int]]) -> None:
    leaves, order = case
    tree = ReductionTree(leaves)
    for k in order:
        tree.add(k, leaf(k))
    for i, tensor in enumerate(tree.root):
        assert torch.equal(tensor, bracket([leaf(k)[i] for k in range(leaves)]))


def test_the_control_another_bracketing_has_other_bits() -> None:
    """Control: adding from left to right gives a different sum."""
    one_by_one = leaf(0)[0]
    for k in range(1, 8):
        one_by_one = one_by_one + leaf(k)[0]
    assert not torch.equal(one_by_one, bracket([leaf(k)[0] for k in range(8)]))


def test_the_tree_holds_few_partial_sums() -> None:
    tree = ReductionTree(64)
    for k in range(64):
        tree.add(k, leaf(k))
        assert len(tree.nodes) <= 7


def test_a_missing_leaf_is_an_error() -> None:
    tree = ReductionTree(4)
    for k in (0, 1, 3):
        tree.add(k, leaf(k))
    with pytest.raises(ValueError, match="missing"):
        _ = tree.root


@given(st.integers(1, 16), st.integers(1, 16))
def test_shares_cover_all_leaves(leaves: int, ranks: int) -> None:
    shares = [share(leaves, r, ranks) for r in range(ranks)]
    assert [k for s in shares for k in s] == list(range(leaves))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    tree = ReductionTree(leaves)
    for s in shares:
        for node in partial_nodes(s.start, s.stop, leaves):
            tree.place(node, [])
    assert tree.root == []


@pytest.mark.parametrize("leaves", [*range(1, 18), 31])
def test_contiguous_shares_hold_at_most_the_documented_number_of_partial_sums(leaves: int) -> None:
    def held(first: int, end: int) -> int:
        tree, most = ReductionTree(leaves), 0
        for k in range(first, end):
            node, _ = tree.take_sibling(k)
            most = max(most, len(tree.nodes) + 1)
            tree.place(node, [])
        return most

    worst = max(held(first, end) for first in range(leaves) for end in range(first + 1, leaves + 1))
    assert most_held(leaves, 2, uneven=True) == worst


def exchange(
    world: World, leaves: int, shares: Shares | None = None, links: LinkSpeeds | None = None
) -> list[torch.Tensor]:
    tree = ReductionTree(leaves)
    for k in (shares or even(leaves, world.size))[world.rank]:
        tree.add(k, leaf(k))
    moving = Exchange(leaves, world.rank, world.size, links=links, layout=layout_of(leaves, world.size, shares))
    for positions in ([0], [1, 2]):
        moving.submit({node: [tensors[i] for i in positions] for node, tensors in tree.nodes.items()})
    return [t.clone() for bucket in moving.finish() for t in bucket]


@pytest.mark.processes
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("leaves", [4, 5, 8])
def test_the_exchange_gives_every_rank_the_bits_of_the_tree(ranks: int, leaves: int) -> None:
    for tensors in run_on(ranks, exchange, leaves, run=tiny()):
        for i, tensor in enumerate(tensors):
            assert torch.equal(tensor, bracket([leaf(k)[i] for k in range(leaves)]))


def exchanged(world: World, cases: list[tuple[int, Shares]]) -> list[list[torch.Tensor]]:
    """Exchange dense gradients at once and in stages, and row-sparse gradients."""
    found = []
    for leaves, shares in cases:
        found.append(
            exchange(world, leaves, shares)
            + exchange(world, leaves, shares, LinkSpeeds("hierarchical", ("a", "a", "b")))
        )
        tree = ReductionTree(leaves)
        for k in shares[world.rank]:
            tree.add(k, [leaf(k)[0].to_sparse(1).coalesce()])
        nodes = {node: tensors[0] for node, tensors in tree.nodes.items()}
        found[-1].append(exchange_rows(nodes, leaves, world.rank, world.size, shares).to_dense())
    return found


def cut_at(leaves: int, *ends: int) -> tuple[int, Shares]:
    return leaves, tuple(range(*each) for each in itertools.pairwise([0, *ends, leaves]))


@pytest.mark.processes
def test_uneven_shares_give_the_bits_of_the_tree() -> None:
    """Includes shares that contain no whole subtree, and a rank with one leaf."""
    cases = [cut_at(8, 1, 2), cut_at(8, 3, 7), cut_at(8, 6, 7), cut_at(5, 1, 4), cut_at(13, 1, 12), cut_at(16, 5, 11)]
    for found in run_on(3, exchanged, cases, run=tiny()):
        for (leaves, _), tensors in zip(cases, found, strict=True):
            wanted = [bracket([leaf(k)[i] for k in range(leaves)]) for i in (0, 1, 2, 0, 1, 2, 0)]
            assert all(torch.equal(*pair) for pair in zip(tensors, wanted, strict=True))


def test_buckets_hold_everything_in_order() -> None:
    tensors = [torch.zeros(n) for n in (10, 500, 3, 900, 1)]
    groups = buckets(dict(enumerate(tensors)), 2000)
    assert [i for g in groups for i in g] == [0, 1, 2, 3, 4]
    assert len(groups) == 3


def test_the_norm_is_summed_in_float64() -> None:
    gradients = [t * 1e-3 for t in leaf(3)]
    parts = [Part(str(i), torch.nn.Parameter(g), g) for i, g in enumerate(gradients)]
    expected = torch.cat([g.double().reshape(-1) for g in gradients]).norm().float()
    assert Gradient(parts, [part.name for part in parts]).norm() == expected
