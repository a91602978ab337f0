"""FSDP's reduce-scatter in tree order.

In: a block's gradients of one micro-batch a rank. Out: each rank's slice of the sum of all leaves, once the last turn
is over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.config.run import RunError
from lockstep.strategies.engines.fsdp import OTHER_LAYERS, ReduceScatter
from lockstep.strategies.exact.reduce_schedule import links
from lockstep.strategies.exact.reduction import Exchange, ReductionTree, Scatter, share

if TYPE_CHECKING:
    from lockstep.config.run import Run
    from lockstep.distributed.world import World


class ShardedRanks(Protocol):
    """The interface of a strategy that cuts its weights into shards: its ranks, and where it is in a step."""

    run: Run
    world: World
    mesh: Any  # the DeviceMesh
    replica: int  # of this rank
    replicas: int
    shard: int  # of this rank, within its replica
    shards: int
    turn: int  # of the step: each rank runs one micro-batch a turn
    last: bool  # whether this turn is the step's last one

    def axis(self, name: str) -> str:
        """The dimension of the mesh that is called so."""


class TreeScatter(ReduceScatter):
    """FSDP's reduce-scatter of one block, in tree order: every rank receives its slice of each rank's leaf and adds
    them up where the tree says. What FSDP gets back is zero, until the last turn's: the sum of all leaves."""

    def __init__(self, strategy: ShardedRanks) -> None:
        self.strategy = strategy

    def start(self, leaves: int) -> None:
        self.tree, self.calls = ReductionTree(leaves), 0

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        ours = self.strategy
        self.calls += 1
        block = share(self.tree.leaves, ours.replica, ours.replicas)
        first = block.start + ours.turn * ours.shards
        turn = range(first, min(first + ours.shards, block.stop))
        layout = (*(((0, leaf),) for leaf in turn), *((),) * (ours.shards - len(turn)))
        how = links(ours.run, ours.world, group)
        scatter = Scatter(self.tree.leaves, ours.shard, ours.shards, group, how, layout)
        slots = input_tensor.view(ours.shards, -1)  # [W, N]
        scatter.submit(dict.fromkeys(layout[ours.shard], slots), slots)
        for node, part in scatter.finish()[0].items():
            self.tree.place(node, [part])
        output_tensor.zero_()
        if not ours.last:
            return
        if self.calls != ours.turn + 1:  # a micro-batch did not run this block
            raise RunError(OTHER_LAYERS)
        if ours.replicas > 1:
            copies = ours.mesh.get_group(ours.axis("replicate"))
            how = links(ours.run, ours.world, copies)
            exchange = Exchange(self.tree.leaves, ours.replica, ours.replicas, copies, how)
            exchange.submit(self.tree.nodes)
            root = exchange.finish()[0][0]
        else:
            root = self.tree.root[0]
        if ours.replica == 0:  # FSDP adds the replicas up: the others give zero
            output_tensor.copy_(root)
        self.tree.nodes = {}
