"""The sum of a step's gradients over the reduction tree, which does not depend on the number of ranks.

In: the gradient of each micro-batch (a leaf), computed separately. Out: their sum, bracketed by one fixed binary tree
over the leaves, `((0+1)+(2+3))+((4+5)+(6+7))`, whichever rank ran which leaf. Floating-point addition commutes but does
not associate: a fixed bracketing gives fixed bits. `exchange.py` sends partial sums between ranks.

`LeafGradients` takes `.grad` after each backward and adds it in tree order: before backward, `.grad` holds the partial
sum that the new gradient is added to first.

The gradient of a large embedding is (rows, values): a sum bitwise equal to that of dense gradients, for a tenth of the
memory traffic. Each row's sum uses the same tree, and adding the zeros of an untouched row changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.distributed.torch_internals import rows_of, values_of
from lockstep.distributed.world import World

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


# -- the gradients of one rank -----------------------------------------------------------------------------------------


class LeafGradients:
    """The partial gradient sums of one rank, for one step at a time."""

    def __init__(self, parameters: Sequence[nn.Parameter], rows: Sequence[int]) -> None:
        """`rows`: positions of the parameters with row-sparse gradients."""
        self.parameters, self.rows = parameters, rows
        self.with_gradient: set[int] = set()  # positions with a gradient from this micro-batch
        self.waiting: dict[int, Tensor] | None = None  # row-sparse addends of this micro-batch; None without a sibling
        self.start(0, None)

    def start(self, leaves: int, shares: Shares | None) -> None:
        """Start a step of `leaves` micro-batches. `shares`: each rank's range of them; None: equal shares."""
        self.tree, self.shares = ReductionTree(leaves), shares
        self.node: Node = (0, 0)  # of the current micro-batch
        self.grad_counts = [0] * len(self.parameters)  # number of micro-batches with a gradient, by parameter

    @property
    def dense(self) -> dict[int, nn.Parameter]:
        """Parameters whose gradients are not row-sparse, by position."""
        return {i: p for i, p in enumerate(self.parameters) if i not in self.rows}

    def layout(self, ranks: int) -> tuple[tuple[Node, ...], ...]:
        """Return the nodes that each rank holds after its micro-batches."""
        return layout_of(self.tree.leaves, ranks, self.shares)

    def free(self) -> None:
        """Free the partial sums."""
        self.tree = ReductionTree(0)

    def begin(self, leaf: int) -> None:
        """Prepare a micro-batch: put its sibling's sum, if present, into `.grad`. Autograd adds to it parameter by
        parameter during backward, so no second full gradient is allocated."""
        self.node, sibling = self.tree.take_sibling(leaf)
        self.waiting = None if sibling is None else {i: sibling[i] for i in self.rows}
        self.with_gradient.clear()
        for i, parameter in enumerate(self.parameters):
            parameter.grad = None if sibling is None or i in self.rows else sibling[i]

    def note(self, position: int) -> None:
        """Record that a parameter's gradient of this micro-batch is complete and added to its sibling's."""
        self.grad_counts[position] += 1
        self.with_gradient.add(position)

    def add(self, gradients: Mapping[int, Tensor]) -> None:
        """Add gradients that autograd did not accumulate to `.grad`, by position, as it would. Copies them, in the
        memory layout of their parameters."""
        first = {i: torch.empty_like(self.parameters[i], dtype=torch.float32) for i in gradients if self._lacks(i)}
        sums = [(total, g) for i, g in gradients.items() if (total := self.parameters[i].grad) is not None]
        if first:
            torch._foreach_copy_(list(first.values()), [gradients[i] for i in first])
        if sums:
            torch._foreach_add_([total for total, _ in sums], [g for _, g in sums])
        for i in gradients:
            if i in first:
                self.parameters[i].grad = first[i]
            self.note(i)

    def _lacks(self, position: int) -> bool:
        return self.parameters[position].grad is None

    def end(self) -> None:
        """Move a micro-batch's gradients into the tree."""
        self.tree.place(self.node, self.pop_all())

    def pop_all(self) -> list[Tensor]:
        """Return this micro-batch's gradients plus their sibling's, by position, zero where there is none; clears
        `.grad`."""
        gradients = [self.take(i) for i in range(len(self.parameters))]
        self.waiting = None
        return gradients

    def take(self, position: int) -> Tensor:
        """Return the gradient of one parameter and clear its `.grad`."""
        parameter, addends = self.parameters[position], self.waiting
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            gradient = torch.zeros_like(parameter, dtype=torch.float32)
        elif addends is not None and position not in self.with_gradient:
            gradient += 0.0  # an unused parameter's gradient is zero: minus zero becomes zero
        if position not in self.rows:
            return gradient
        gradient = by_row(gradient)
        return gradient if addends is None else (addends[position] + gradient).coalesce()

    def with_last_leaf(self, positions: Sequence[int], gradients: list[Tensor]) -> dict[Node, list[Tensor]]:
        """Return this rank's partial sums of some parameters by node, including the last micro-batch's gradients."""
        part = ReductionTree(self.tree.leaves)
        for node, tensors in self.tree.nodes.items():
            part.place(node, [tensors[i] for i in positions])
        part.place(self.node, gradients)
        return part.nodes

    def release(self, positions: Sequence[int]) -> None:
        """Free the partial sums of parameters that have been sent."""
        gone = torch.empty(0)
        for tensors in self.tree.nodes.values():
            for i in positions:
                tensors[i] = gone

    def sum_rows(self, nodes: Mapping[Node, list[Tensor]], world: World) -> dict[int, Tensor]:
        """Return the row-sparse gradients summed over ranks in tree order, by position. `nodes`: this rank's partial
        sums in the order of `rows`. Collective."""
        ours = (world.rank, world.size, self.shares)
        return {
            i: exchange_rows({node: tensors[j] for node, tensors in nodes.items()}, self.tree.leaves, *ours)
            for j, i in enumerate(self.rows)
        }


# -- gradients of a few rows of a large embedding ----------------------------------------------------------------------

SMALL = 256  # rows; smaller embeddings stay dense


def row_sparse(model: nn.Module, device: torch.device, uses: Mapping[int, int]) -> set[str]:
    """Enable row-sparse gradients on the embeddings that support them; return the names of their weights. `uses`: id of
    a weight -> how often a forward uses it.

    Excluded: tied weights (their other use has dense gradients), and weights looked up twice (dense gradients add up
    per look-up, row-sparse ones token by token over all look-ups). On CUDA the dense kernels are deterministic and
    cheap.
    """
    if device.type != "cpu":
        return set()
    names: dict[int, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)] = names.get(id(parameter), 0) + 1
    sparse = set()
    for name, module in model.named_modules():
        if type(module) is not nn.Embedding or names[id(module.weight)] > 1 or not module.weight.requires_grad:
            continue
        once = uses.get(id(module.weight)) == 1
        if once and module.max_norm is None and not module.scale_grad_by_freq and module.num_embeddings > SMALL:
            module.sparse = True
            sparse.add(f"{name}.weight")
    return sparse


def by_row(gradient: Tensor) -> Tensor:
    """Coalesce a leaf's gradient to one entry per row.

    Entries of a row are added in token order, as in the dense kernel; torch's `coalesce` uses another order, which
    changes bits.
    """
    if not gradient.is_sparse:  # embedding not used by this micro-batch
        return gradient.to_sparse(1).coalesce()
    rows, place = torch.unique(rows_of(gradient), return_inverse=True)
    values = values_of(gradient)
    summed = values.new_zeros(len(rows), values.shape[1]).index_add_(0, place, values)
    return _sparse(rows, summed, gradient.shape)


def rows_between(gradient: Tensor, first: int, end: int) -> Tensor:
    """Return the rows `first..end-1` of a coalesced gradient, numbered from 0."""
    rows = rows_of(gradient)
    mine = (rows >= first) & (rows < end)
    return _sparse(rows[mine] - first, values_of(gradient)[mine], torch.Size([end - first, *gradient.shape[1:]]))


def exchange_rows(
    nodes: dict[Node, Tensor], leaves: int, rank: int, ranks: int, shares: Shares | None = None
) -> Tensor:
    """Sum the partial nodes of one row-sparse tensor over ranks, in tree order. `shares` of the leaves: equal by
    default. Collective.

    Every rank receives all rows of all ranks: far fewer than the tensor has if a batch is small compared to the
    vocabulary.
    """
    layout = layout_of(leaves, ranks, shares)
    mine = [nodes[node] for node in layout[rank]]
    width = max(len(n) for n in layout)
    counts = torch.zeros(ranks, width, dtype=torch.int64)
    counts[rank, : len(mine)] = torch.tensor([values_of(t).shape[0] for t in mine])
    dist.all_reduce(counts)
    most = int(counts.sum(1).max())
    rows = torch.zeros(most, dtype=torch.int64)
    values = values_of(mine[0]).new_zeros(most, mine[0].shape[1])
    torch.cat([rows_of(t) for t in mine], out=rows[: int(counts[rank].sum())])
    torch.cat([values_of(t) for t in mine], out=values[: int(counts[rank].sum())])
    all_rows = [torch.empty_like(rows) for _ in range(ranks)]
    all_values = [torch.empty_like(values) for _ in range(ranks)]
    dist.all_gather(all_rows, rows)
    dist.all_gather(all_values, values)
    tree = ReductionTree(leaves)
    for i in range(ranks):
        at = 0
        for node, count in zip(layout[i], counts[i].tolist(), strict=False):
            part = slice(at, at + count)
            tree.place(node, [_sparse(all_rows[i][part], all_values[i][part], mine[0].shape)])
            at += count
    return tree.root[0]


def _sparse(rows: Tensor, values: Tensor, shape: torch.Size) -> Tensor:
    return torch.sparse_coo_tensor(rows[None], values, shape, is_coalesced=True, check_invariants=False)
