"""All-gather by hand: every rank sends its partial sums to every other, and all of them finish the same tree.

In: this rank's partial nodes. Out: their sum in tree order. More bytes travel than in `allreduce.py`, for fewer lines.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep import RunError
from lockstep.data.job import Job
from lockstep.strategies.exact.gradient_sum import ReductionTree, partial_nodes, share
from lockstep.strategies.single import ReplicatedStrategy


class Gossip(ReplicatedStrategy):
    """The reduction is a broadcast of every partial node, then one tree on every rank."""

    @classmethod
    def check(cls, job: Job) -> None:
        if options := job.run.strategy.options:
            raise RunError(f"strategy.options: gossip has none, {', '.join(options)} cannot be used")

    def reduce(self) -> list[Tensor]:
        if not self.run.strategy.exact:
            gradients = self.leaves.pop_all()
            for gradient in gradients:
                self.world.all_reduce(gradient)
            return gradients
        if self.world.size == 1:
            return self.leaves.tree.root
        tree = self.leaves.tree
        dense = [i for i in range(len(self.parameters)) if i not in self.rows]
        whole = ReductionTree(tree.leaves)
        for rank in range(self.world.size):
            leaves = share(tree.leaves, rank, self.world.size)
            for node in partial_nodes(leaves.start, leaves.stop, tree.leaves):
                if rank == self.world.rank:
                    part = [tree.nodes[node][i] for i in dense]
                else:
                    part = [torch.empty_like(self.parameters[i]) for i in dense]
                for tensor in part:
                    dist.broadcast(tensor, src=rank)
                whole.place(node, part)
        rows = {node: [tensors[i] for i in self.rows] for node, tensors in tree.nodes.items()}
        summed = self.leaves.sum_rows(rows, self.world) | dict(
            zip(dense, whole.root, strict=True)
        )  # large embeddings travel by row
        return [summed[i] for i in range(len(self.parameters))]
