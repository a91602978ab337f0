"""The reduction tree: sums that do not depend on the number of ranks.

In: the gradient of each micro-batch (a leaf), each computed alone. Out: their sum, bracketed by one fixed binary tree
over the leaves, `((0+1)+(2+3))+((4+5)+(6+7))`, whichever rank ran which leaf. Floating-point addition commutes but does
not associate: fix the bracket and the bits are fixed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13

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


@dataclass
class _InFlight:
    """One bucket on its way: what was sent, what comes back, and where the sums go."""

    shapes: list[torch.Size]
    chunk: int  # elements of one rank's slice
    count: int  # elements without padding
    received: Tensor
    work: dist.Work
    sent: Tensor | None  # kept alive until the exchange is over
    total: Tensor | None = None


class Exchange:
    """Sums partial nodes over ranks in tree order, bucket by bucket, while the caller goes on computing.

    A bucket goes through an all-to-all (each rank gets one slice of everybody's partial nodes), a sum of the slice
    in tree order, and an all-gather of the sums: 2 (W-1)/W of its bytes a rank, as a ring all-reduce (more when shares
    are not whole subtrees). The second half of a bucket is issued after the first half of the next one, in the same
    order on every rank.
    """

    def __init__(self, leaves: int, rank: int, ranks: int, group: dist.ProcessGroup | None = None) -> None:
        self._rank, self._ranks, self._group, self._leaves = rank, ranks, group, leaves
        self._nodes = [partial_nodes(r.start, r.stop, leaves) for r in (share(leaves, i, ranks) for i in range(ranks))]
        self._scattering: deque[_InFlight] = deque()
        self._gathering: list[_InFlight] = []

    def submit(self, nodes: dict[Node, list[Tensor]]) -> None:
        """Start the exchange of a bucket: this rank's partial nodes, each a list of tensors of the same shapes.
        Collective."""
        mine = [nodes[node] for node in self._nodes[self._rank]]
        first = mine[0]
        count = sum(t.numel() for t in first)
        chunk = -(-count // self._ranks)
        send = first[0].new_empty(self._ranks, len(mine), chunk)
        for j, tensors in enumerate(mine):
            _pack(tensors, send, j, chunk)
        sizes = [len(n) * chunk for n in self._nodes]
        received = send.new_empty(sum(sizes))
        work = dist.all_to_all_single(
            received,
            send.view(-1),
            sizes,
            [len(mine) * chunk] * self._ranks,
            group=self._group,
            async_op=True,
        )
        self._scattering.append(_InFlight([t.shape for t in first], chunk, count, received, work, send))
        if len(self._scattering) > 1:
            self._sum_oldest()

    def finish(self) -> list[list[Tensor]]:
        """The summed tensors of every bucket, in the order of `submit`. Collective."""
        while self._scattering:
            self._sum_oldest()
        done = []
        for bucket in self._gathering:
            bucket.work.wait()
            assert bucket.total is not None
            flat = bucket.total[: bucket.count]
            parts = flat.split([shape.numel() for shape in bucket.shapes])
            done.append([part.view(shape) for part, shape in zip(parts, bucket.shapes, strict=True)])
        self._gathering.clear()
        return done

    def _sum_oldest(self) -> None:
        bucket = self._scattering.popleft()
        bucket.work.wait()
        bucket.sent = None
        tree = ReductionTree(self._leaves)
        slices = bucket.received.split(bucket.chunk)
        for node, part in zip((n for nodes in self._nodes for n in nodes), slices, strict=True):
            tree.place(node, [part])
        bucket.total = bucket.received.new_empty(self._ranks * bucket.chunk)
        bucket.work = _all_gather(bucket.total, tree.root[0], group=self._group, async_op=True)
        self._gathering.append(bucket)


def _pack(tensors: Iterable[Tensor], send: Tensor, row: int, chunk: int) -> None:
    """Lay tensors end to end over `send[:, row, :]`, rank after rank."""
    at = 0
    for tensor in tensors:
        flat = tensor.reshape(-1)
        start = 0
        while start < flat.numel():
            rank, offset = divmod(at, chunk)
            length = min(chunk - offset, flat.numel() - start)
            send[rank, row, offset : offset + length].copy_(flat[start : start + length])
            start, at = start + length, at + length
    rank, offset = divmod(at, chunk)
    if rank < send.shape[0]:
        send[rank, row, offset:].zero_()
        send[rank + 1 :, row].zero_()


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
