"""The reduction tree: sums that do not depend on the number of ranks.

In: the gradient of each micro-batch (a leaf), each computed alone. Out: their sum, bracketed by one fixed binary tree
over the leaves, `((0+1)+(2+3))+((4+5)+(6+7))`, whichever rank ran which leaf. Floating-point addition commutes but does
not associate: fix the bracket and the bits are fixed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13

Node = tuple[int, int]  # (level, index): the sum of the leaves [index * 2^level, (index + 1) * 2^level) that exist


class ReductionTree:
    """Adds leaves in the tree's order; holds a few partial sums at most, because siblings merge as soon as both
    are there."""

    def __init__(self, leaves: int) -> None:
        self.leaves = leaves
        self.nodes: dict[Node, list[Tensor]] = {}

    def add(self, leaf: int, tensors: Sequence[Tensor]) -> None:
        """Add the tensors of one leaf. The tree owns them from now on and may write into them."""
        self._place((0, leaf), list(tensors))

    def place(self, node: Node, tensors: Sequence[Tensor]) -> None:
        """The same for a partial sum that another tree made."""
        self._place(node, list(tensors))

    def take_sibling(self, leaf: int) -> tuple[Node, list[Tensor] | None]:
        """The partial sum that a leaf is added to first, which the tree gives up, or None while it is not there; and
        the node that the two make, or else the leaf alone."""
        level, index = 0, leaf
        while (1 << level) < self.leaves:
            sibling = index ^ 1
            if sibling << level < self.leaves:
                found = self.nodes.pop((level, sibling), None)
                return ((0, leaf), None) if found is None else ((level + 1, index >> 1), found)
            level, index = level + 1, index >> 1
        return (0, leaf), None

    def _place(self, node: Node, tensors: list[Tensor]) -> None:
        level, index = node
        while (1 << level) < self.leaves:
            sibling = index ^ 1
            if sibling << level < self.leaves:  # the sibling covers leaves; otherwise this node is its parent already
                other = self.nodes.pop((level, sibling), None)
                if other is None:
                    break
                left, right = (tensors, other) if index < sibling else (other, tensors)
                tensors = _added(left, right)
            level, index = level + 1, index >> 1
        self.nodes[level, index] = tensors

    @property
    def root(self) -> list[Tensor]:
        """The sum of all leaves. Errors: `ValueError` while a leaf is missing."""
        if len(self.nodes) != 1 or (1 << next(iter(self.nodes))[0]) < self.leaves:
            raise ValueError(f"leaves are missing: there are partial sums {sorted(self.nodes)} of {self.leaves} leaves")
        return next(iter(self.nodes.values()))


def _added(left: list[Tensor], right: list[Tensor]) -> list[Tensor]:
    """`left + right`, written into `left`'s memory where it is dense; row-sparse tensors stay so."""
    dense = [i for i, tensor in enumerate(left) if not tensor.is_sparse]
    if dense:
        torch._foreach_add_([left[i] for i in dense], [right[i] for i in dense])
    return [(a + b).coalesce() if a.is_sparse else a for a, b in zip(left, right, strict=True)]


def share(leaves: int, rank: int, ranks: int) -> range:
    """The contiguous leaves that a rank runs; sizes differ by one at most."""
    return range(rank * leaves // ranks, (rank + 1) * leaves // ranks)


@lru_cache(maxsize=1024)
def partial_nodes(first: int, end: int, leaves: int) -> tuple[Node, ...]:
    """The partial sums that remain when the leaves `first..end-1` have merged as far as they can, in leaf order."""
    tree = ReductionTree(leaves)
    for leaf in range(first, end):
        tree.add(leaf, [])
    return tuple(sorted(tree.nodes, key=lambda node: node[1] << node[0]))


def most_held(leaves: int, ranks: int, apart: bool = False) -> int:
    """How many partial sums a rank holds at most while it makes its leaves one after another and adds each, while it is
    made, to the one that waits for it: max(1, log2(k)) for a share that is a whole subtree of k leaves. `apart`: a leaf
    is made whole before it is added: 1 + log2(k)."""
    most = 0
    for rank in range(ranks):
        tree = ReductionTree(leaves)
        for leaf in share(leaves, rank, ranks):
            node, _ = ((0, leaf), None) if apart else tree.take_sibling(leaf)
            most = max(most, len(tree.nodes) + 1)
            tree.place(node, [])
    return most


@dataclass
class _InFlight:
    """One bucket on its way to the ranks that add up its slices."""

    chunk: int  # elements of one rank's slice
    received: Tensor
    work: dist.Work
    sent: Tensor  # kept alive until it has arrived


class Scatter:
    """Gives each rank its slice of the sum of partial nodes over ranks, in tree order, bucket by bucket, while the
    caller goes on computing.

    A bucket goes through an all-to-all (each rank gets its slice of everybody's partial nodes) and a sum of the slice
    in tree order: (W-1)/W of its bytes a rank, as a ring reduce-scatter (more when shares are not whole subtrees).
    `then` is given the slice of each bucket, flat, in the memory of what was received; by default copies are kept.
    """

    def __init__(
        self,
        leaves: int,
        rank: int,
        ranks: int,
        group: dist.ProcessGroup | None = None,
        then: Callable[[Tensor], None] | None = None,
    ) -> None:
        self._rank, self._ranks, self._group, self._leaves = rank, ranks, group, leaves
        self._nodes = [partial_nodes(r.start, r.stop, leaves) for r in (share(leaves, i, ranks) for i in range(ranks))]
        self._travelling: deque[_InFlight] = deque()
        self._sums: list[Tensor] = []
        self._then = then or (lambda total: self._sums.append(total.clone()))

    def submit(self, nodes: Mapping[Node, Sequence[Sequence[Tensor]]]) -> None:
        """Start a bucket. `nodes`: of each of this rank's partial nodes what every rank is to have of it, a list of
        tensors a rank; as many numbers on all ranks. They are copied. Collective."""
        mine = [nodes[node] for node in self._nodes[self._rank]]
        chunk = max(sum(t.numel() for t in slice_) for slice_ in mine[0])
        like = next(t for slice_ in mine[0] for t in slice_)
        sent = like.new_empty(self._ranks, len(mine), chunk)
        for j, slices in enumerate(mine):
            for rank, tensors in enumerate(slices):
                lay(tensors, sent[rank, j])
        received = sent.new_empty(sum(map(len, self._nodes)) * chunk)
        work = dist.all_to_all_single(
            received,
            sent.view(-1),
            [len(nodes) * chunk for nodes in self._nodes],
            [len(mine) * chunk] * self._ranks,
            group=self._group,
            async_op=True,
        )
        self._travelling.append(_InFlight(chunk, received, work, sent))
        if len(self._travelling) > 1:
            self._sum_oldest()

    def finish(self) -> list[Tensor]:
        """This rank's slice of every bucket's sum, flat, in the order of `submit`. Collective."""
        while self._travelling:
            self._sum_oldest()
        sums, self._sums = self._sums, []
        return sums

    def _sum_oldest(self) -> None:
        bucket = self._travelling.popleft()
        bucket.work.wait()
        tree = ReductionTree(self._leaves)
        slices = bucket.received.split(bucket.chunk)
        for node, part in zip((n for nodes in self._nodes for n in nodes), slices, strict=True):
            tree.place(node, [part])
        self._then(tree.root[0])


class Exchange:
    """Sums partial nodes over ranks in tree order and gives every rank the whole sum: a `Scatter` of even slices, and
    an all-gather of their sums, 2 (W-1)/W of the bytes a rank, as a ring all-reduce. The second half of a bucket is
    issued after the first half of the next one, in the same order on every rank."""

    def __init__(self, leaves: int, rank: int, ranks: int, group: dist.ProcessGroup | None = None) -> None:
        self._rank, self._ranks, self._group = rank, ranks, group
        self._scatter = Scatter(leaves, rank, ranks, group, self._gather)
        self._shapes: list[list[torch.Size]] = []
        self._gathering: list[tuple[Tensor, dist.Work]] = []

    def submit(self, nodes: Mapping[Node, list[Tensor]]) -> None:
        """Start the exchange of a bucket: this rank's partial nodes, each a list of tensors of the same shapes.
        Collective."""
        self._shapes.append([t.shape for t in next(iter(nodes.values()))])
        self._scatter.submit({node: _evenly(tensors, self._ranks) for node, tensors in nodes.items()})

    def _gather(self, own: Tensor) -> None:
        total = own.new_empty(self._ranks, own.numel())
        total[self._rank] = own  # sent from there: what was received is not kept
        work = all_gather(total.view(-1), total[self._rank], group=self._group, async_op=True)
        self._gathering.append((total, work))

    def finish(self) -> list[list[Tensor]]:
        """The summed tensors of every bucket, in the order of `submit`. Collective."""
        self._scatter.finish()
        done = []
        for shapes, (total, work) in zip(self._shapes, self._gathering, strict=True):
            work.wait()
            done.append(unlaid(total.view(-1), shapes))
        self._shapes, self._gathering = [], []
        return done


def _evenly(tensors: Sequence[Tensor], ranks: int) -> list[list[Tensor]]:
    """Tensors laid end to end and cut into equal slices, the last ones shorter or empty: flat pieces, by rank."""
    chunk = -(-sum(t.numel() for t in tensors) // ranks)
    slices: list[list[Tensor]] = [[] for _ in range(ranks)]
    at = 0
    for tensor in tensors:
        flat, start = tensor.reshape(-1), 0
        while start < flat.numel():
            rank, offset = divmod(at, chunk)
            length = min(chunk - offset, flat.numel() - start)
            slices[rank].append(flat[start : start + length])
            start, at = start + length, at + length
    return slices


def lay(tensors: Iterable[Tensor], into: Tensor) -> None:
    """Copy tensors end to end into a flat one; what is left of it becomes zero."""
    at = 0
    for tensor in tensors:
        into[at : at + tensor.numel()].copy_(tensor.reshape(-1))
        at += tensor.numel()
    into[at:].zero_()


def unlaid(flat: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Views of what was laid end to end."""
    parts = flat[: sum(shape.numel() for shape in shapes)].split([shape.numel() for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def buckets(tensors: Sequence[Tensor], cap_bytes: int) -> list[list[int]]:
    """Positions of tensors in consecutive groups of about `cap_bytes`."""
    groups: list[list[int]] = [[]]
    size = 0
    for i, tensor in enumerate(tensors):
        size += tensor.numel() * tensor.element_size()
        groups[-1].append(i)
        if size >= cap_bytes:
            groups.append([])
            size = 0
    return [g for g in groups if g]


def clip_(gradients: Sequence[Tensor], norm: Tensor, limit: float | None) -> None:
    """Scale gradients whose whole has the norm `norm` down to the norm `limit` (none: never), in place, with the factor
    of `torch.nn.utils.clip_grad_norm_`."""
    if limit:
        factor = (limit / (norm + 1e-6)).clamp(max=1.0)
        if factor.device.type != "cpu" or factor < 1.0:  # on CUDA the multiplication is cheaper than knowing
            torch._foreach_mul_(list(gradients), factor)
