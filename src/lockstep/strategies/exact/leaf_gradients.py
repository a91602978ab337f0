"""Partial gradient sums of one rank's micro-batches, added in tree order during backward.

In: the parameters of a whole model, and `.grad` after each backward. Out: this rank's partial sums, by node of the
tree. A micro-batch is a leaf. Before backward, `.grad` holds the partial sum that the new gradient is added to first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from lockstep.distributed.world import World
from lockstep.strategies.exact.reduction_tree import Node, ReductionTree, Shares, layout_of
from lockstep.strategies.exact.rows import by_row, exchange_rows


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
