"""The gradients of this rank's micro-batches, added up over the tree as backward makes them.

In: the parameters of a whole model, and after each backward what it left in `.grad`. Out: this rank's partial sums, by
node of the tree. A micro-batch is a leaf. The partial sum that its gradient is added to first waits in `.grad`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from lockstep.distributed.world import World
from lockstep.strategies.exact.reduction import Node, ReductionTree, Shares, layout_of
from lockstep.strategies.exact.rows import by_row, exchange_rows


class LeafGradients:
    """The partial sums of one rank's gradients, step by step."""

    def __init__(self, parameters: Sequence[nn.Parameter], rows: Sequence[int]) -> None:
        """`rows`: the positions of those whose gradients are row-sparse."""
        self.parameters, self.rows = parameters, rows
        self.with_gradient: set[int] = set()  # positions that this micro-batch gave a gradient
        self.waiting: dict[int, Tensor] | None = None  # what it is added to by row, where it is added to something
        self.start(0, None)

    def start(self, leaves: int, shares: Shares | None) -> None:
        """A step of so many micro-batches. `shares`: each rank's; None: even ones."""
        self.tree, self.shares = ReductionTree(leaves), shares
        self.node: Node = (0, 0)  # of the micro-batch that runs
        self.uses = [0] * len(self.parameters)  # how many micro-batches gave each parameter a gradient

    def layout(self, ranks: int) -> tuple[tuple[Node, ...], ...]:
        """The nodes that each rank holds once it has run its micro-batches."""
        return layout_of(self.tree.leaves, ranks, self.shares)

    def let_go(self) -> None:
        """Release the partial sums."""
        self.tree = ReductionTree(0)

    def begin(self, leaf: int) -> None:
        """Before a micro-batch: its sibling waits in `.grad`, if it is there. Autograd adds to it parameter by
        parameter, while backward goes on, and no second gradient is ever whole."""
        self.node, sibling = self.tree.take_sibling(leaf)
        self.waiting = None if sibling is None else {i: sibling[i] for i in self.rows}
        self.with_gradient.clear()
        for i, parameter in enumerate(self.parameters):
            parameter.grad = None if sibling is None or i in self.rows else sibling[i]

    def note(self, position: int) -> None:
        """Called in backward when a parameter's gradient of this micro-batch is complete and added to its sibling's."""
        self.uses[position] += 1
        self.with_gradient.add(position)

    def end(self) -> None:
        """After a micro-batch: its gradients go into the tree."""
        self.tree.place(self.node, self.pop())

    def pop(self) -> list[Tensor]:
        """This micro-batch's gradients and what waited for them, by position, zero where it has none; the parameters
        hold none afterwards."""
        gradients = [self.take(i) for i in range(len(self.parameters))]
        self.waiting = None
        return gradients

    def take(self, position: int) -> Tensor:
        """The gradient of one parameter, which holds none afterwards."""
        parameter, addends = self.parameters[position], self.waiting
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            gradient = torch.zeros_like(parameter, dtype=torch.float32)
        elif addends is not None and position not in self.with_gradient:
            gradient += 0.0  # what a micro-batch does not use has the gradient zero: minus zero becomes zero
        if position not in self.rows:
            return gradient
        gradient = by_row(gradient)
        return gradient if addends is None else (addends[position] + gradient).coalesce()

    def with_last_leaf(self, positions: Sequence[int], gradients: list[Tensor]) -> dict[Node, list[Tensor]]:
        """This rank's partial nodes of some parameters, what the last micro-batch made among them."""
        part = ReductionTree(self.tree.leaves)
        for node, tensors in self.tree.nodes.items():
            part.place(node, [tensors[i] for i in positions])
        part.place(self.node, gradients)
        return part.nodes

    def release(self, positions: Sequence[int]) -> None:
        """Partial sums of parameters that have been sent."""
        gone = torch.empty(0)
        for tensors in self.tree.nodes.values():
            for i in positions:
                tensors[i] = gone

    def sum_rows(self, nodes: Mapping[Node, list[Tensor]], world: World) -> dict[int, Tensor]:
        """The row-sparse gradients summed over ranks in tree order, by position; `nodes` holds this rank's partial sums
        in the order of `rows`. Collective."""
        ours = (world.rank, world.size, self.shares)
        return {
            i: exchange_rows({node: tensors[j] for node, tensors in nodes.items()}, self.tree.leaves, *ours)
            for j, i in enumerate(self.rows)
        }
