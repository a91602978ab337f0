"""The reduction tree: sums that do not depend on the number of ranks.

In: the gradient of each micro-batch (a leaf), computed separately. Out: their sum, bracketed by one fixed binary tree
over the leaves, `((0+1)+(2+3))+((4+5)+(6+7))`, whichever rank ran which leaf. Floating-point addition commutes but does
not associate: a fixed bracketing gives fixed bits. `exchange.py` sends partial sums between ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

Node = tuple[int, int]  # (level, index): the sum of the leaves [index * 2^level, (index + 1) * 2^level) that exist
Shares = tuple[range, ...]  # by rank: the leaves that it runs; contiguous, ascending by rank, at least one each


def lift(node: Node, leaves: int) -> Node:
    """Raise a node to the level at which it has a sibling, or to the root: a node whose sibling covers no leaf equals
    its parent."""
    level, index = node
    while (1 << level) < leaves <= (index ^ 1) << level:
        level, index = level + 1, index >> 1
    return level, index


def sibling(node: Node) -> Node:
    """Return the other child of a node's parent."""
    return node[0], node[1] ^ 1


def parent(node: Node) -> Node:
    """Return the parent of a node."""
    return node[0] + 1, node[1] >> 1


def merged(nodes: Iterable[Node], leaves: int) -> tuple[Node, ...]:
    """Merge siblings among partial sums as far as possible, in leaf order."""
    nodes_after: set[Node] = set()
    for node in nodes:
        node = lift(node, leaves)
        while sibling(node) in nodes_after:
            nodes_after.remove(sibling(node))
            node = lift(parent(node), leaves)
        nodes_after.add(node)
    return tuple(sorted(nodes_after, key=lambda node: node[1] << node[0]))


class ReductionTree:
    """Adds leaves in the tree's order. It holds only a few partial sums, because siblings merge as soon as both are
    present."""

    def __init__(self, leaves: int) -> None:
        self.leaves = leaves
        self.nodes: dict[Node, list[Tensor]] = {}

    def add(self, leaf: int, tensors: Sequence[Tensor]) -> None:
        """Add the tensors of one leaf. The tree owns them from now on and may write into them."""
        self.place((0, leaf), tensors)

    def place(self, node: Node, tensors: Sequence[Tensor]) -> None:
        """Add a partial sum from another tree."""
        partial, node = list(tensors), lift(node, self.leaves)
        while (other := self.nodes.pop(sibling(node), None)) is not None:
            partial = _added(partial, other) if node < sibling(node) else _added(other, partial)
            node = lift(parent(node), self.leaves)
        self.nodes[node] = partial

    def take_sibling(self, leaf: int) -> tuple[Node, list[Tensor] | None]:
        """Remove and return the partial sum that a leaf is added to first, with the node of their sum; (the leaf's
        node, None) if that sum is not present."""
        node = lift((0, leaf), self.leaves)
        waiting = self.nodes.pop(sibling(node), None)
        return ((0, leaf), None) if waiting is None else (parent(node), waiting)

    @property
    def root(self) -> list[Tensor]:
        """The sum of all leaves. Errors: `ValueError` if a leaf is missing."""
        if len(self.nodes) != 1 or (1 << next(iter(self.nodes))[0]) < self.leaves:
            raise ValueError(f"leaves are missing: there are partial sums {sorted(self.nodes)} of {self.leaves} leaves")
        return next(iter(self.nodes.values()))


def _added(left: list[Tensor], right: list[Tensor]) -> list[Tensor]:
    """Return `left + right`, written into `left`'s memory if it is dense; row-sparse tensors stay row-sparse."""
    dense = [i for i, tensor in enumerate(left) if not tensor.is_sparse]
    if dense:
        torch._foreach_add_([left[i] for i in dense], [right[i] for i in dense])
    return [(a + b).coalesce() if a.is_sparse else a for a, b in zip(left, right, strict=True)]


def share(leaves: int, rank: int, ranks: int) -> range:
    """Return the contiguous leaves that a rank runs; sizes differ by at most one."""
    return range(rank * leaves // ranks, (rank + 1) * leaves // ranks)


def even(leaves: int, ranks: int) -> Shares:
    """Return equal shares of the leaves for all ranks."""
    return tuple(share(leaves, rank, ranks) for rank in range(ranks))


@lru_cache(maxsize=1024)
def partial_nodes(first: int, end: int, leaves: int) -> tuple[Node, ...]:
    """Return the partial sums that remain after merging the leaves `first..end-1` as far as possible, in leaf order."""
    return merged(((0, leaf) for leaf in range(first, end)), leaves)


@lru_cache(maxsize=64)
def layout_of(leaves: int, ranks: int, shares: Shares | None = None) -> tuple[tuple[Node, ...], ...]:
    """Return each rank's partial sums after it has run its leaves; shares are equal by default."""
    return tuple(partial_nodes(each.start, each.stop, leaves) for each in shares or even(leaves, ranks))


def most_held(leaves: int, ranks: int, whole_leaf: bool = False, uneven: bool = False) -> int:
    """Return the peak number of partial sums on a rank that adds each leaf to its sibling while computing it: max(1,
    log2(k)) for a share that is a whole subtree of k leaves. `whole_leaf`: leaves are complete before they are added: 1
    + log2(k). `uneven`: for any shares; a share that starts at leaf 1 is the worst case."""
    most = 0
    for leaves_of_rank in (range(leaves), range(1, leaves)) if uneven and ranks > 1 else even(leaves, ranks):
        tree = ReductionTree(leaves)
        for leaf in leaves_of_rank:
            node, _ = ((0, leaf), None) if whole_leaf else tree.take_sibling(leaf)
            most = max(most, len(tree.nodes) + 1)
            tree.place(node, [])
    return most


def most_held_in_turns(leaves: int, own: range, ranks: int) -> int:
    """Return the peak number of partial sums of the leaves `own` when `ranks` ranks hold a slice of each, compute one
    leaf each per turn, and merge siblings at once."""
    tree, most = ReductionTree(leaves), 1
    for turn in range(own.start, own.stop, ranks):
        for leaf in range(turn, min(turn + ranks, own.stop)):
            tree.add(leaf, [])
        most = max(most, len(tree.nodes))
    return most
