"""`fsdp2` with `gather: step`: weights are gathered once a step, gradients scattered once a step, the optimizer shared.

In: this rank's micro-batches. Out: the same update, of which each rank makes its part. The difference from `ddp.py`:
what travels during the last backward ends at the rank that updates it, and after the update the new weights travel. So
a rank holds the optimizer state of its part only. It is what ZeRO's stages 1 and 2 do, over the tree: FSDP itself has
no part in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from lockstep.config.run import Run, RunError
from lockstep.data.batch import MicroBatch, StepBatch, StepResult
from lockstep.strategies.abilities import ChoosesByMemory, ShardedRecovery
from lockstep.strategies.engines import fsdp_config
from lockstep.strategies.engines.fsdp import roomy
from lockstep.strategies.engines.side_effects import SideEffects, first_few
from lockstep.strategies.exact.async_comm import Gather, InFlight
from lockstep.strategies.exact.gradient import Gradient, Part
from lockstep.strategies.exact.param_groups import make_model
from lockstep.strategies.exact.reduce_schedule import links
from lockstep.strategies.exact.reduction import ReductionTree, Scatter, buckets, layout_of
from lockstep.strategies.exact.row_sharding import RowSlots
from lockstep.strategies.exact.sparse_rows import rows_between
from lockstep.strategies.native import Native
from lockstep.tasks.task import Task

BUCKET_BYTES = 25 * 2**20


class FSDP2Step(ChoosesByMemory, ShardedRecovery, Native):
    """`strategy.options`: `gather: step`, and none of FSDP's own."""

    plugin = "strategies"  # a base: it has no name in a run file

    waits_inside = ("reduction", "overlapped", "optimizer")
    summary_suffix = ", weights gathered once a step"

    @classmethod
    def check(cls, run: Run, processes: int) -> None:
        fsdp_config.check(run, processes)

    @classmethod
    def bytes_held(cls, run: Run, processes: int, state: float | None = None) -> dict[str, float]:
        held = super().bytes_held(run, processes, state)
        return held | {name: held[name] / processes for name in ("optimizer", "average") if name in held}

    # -- who holds what ----------------------------------------------------------------------------------------------

    def build(self, task: Task) -> None:
        self.alone = self.world.size == 1
        if not self.alone:
            with self.world.forming():
                self.mesh = init_device_mesh(
                    self.world.device.type, (self.world.size,), mesh_dim_names=(self.axis("rank"),)
                )
        super().build(task)
        dense = [i for i in reversed(range(len(self.parameters))) if i not in self.rows]  # as backward meets them
        self.buckets = [[dense[j] for j in b] for b in buckets([self.parameters[i] for i in dense], BUCKET_BYTES)]
        cut = [p for p in self.parameters if p.dim()]  # a single number is updated by every rank
        self.gathered = [[cut[j] for j in b] for b in buckets(cut, BUCKET_BYTES)]
        self.links = links(self.run, self.world)
        self.slots = [self.slots_of([self.parameters[i] for i in b]) for b in self.buckets]

    def make(self, task: Task) -> nn.Module:
        return roomy(make_model(task, empty=True)) if self.build_empty else make_model(task)

    def slots_of(self, parameters: Sequence[Tensor]) -> RowSlots:
        return RowSlots([p.shape for p in parameters], self.world.size)

    def own(self, tensor: Tensor, rank: int) -> Tensor:
        """The rows of a whole tensor that a rank updates, as DTensor cuts them: a view, the last ones fewer or none."""
        if not tensor.dim():
            return tensor
        each = -(-len(tensor) // self.world.size)
        return tensor[rank * each : (rank + 1) * each]

    def parts_to_step(self) -> dict[str, nn.Parameter]:
        """Views of the whole weights: the update writes where forward reads."""
        if self.alone:
            return self.named
        return {name: nn.Parameter(self.own(p.detach(), self.world.rank)) for name, p in self.named.items()}

    def spread(self, name: str, tensor: Tensor) -> Tensor:
        whole = self.named[name]
        if self.alone or not whole.dim():
            return tensor
        return DTensor.from_local(
            tensor, self.mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
        )

    # -- one step ----------------------------------------------------------------------------------------------------

    def take_effects(self, effects: SideEffects) -> SideEffects:
        agreed = super().take_effects(effects)
        if agreed.moved and not self.alone:
            names = first_few(sorted(agreed.moved))
            raise RunError(
                f"strategy.name: the model's forward gives {names} other memory (by `.data =`, or a new parameter), "
                "and fsdp2 updates the memory that it had. Write into the weight in place "
                "(`weight.copy_(...)` under torch.no_grad()), or use strategy.name=ddp"
            )
        return agreed

    def train_step(self, batch: StepBatch, learning_rate: float) -> StepResult:
        leaves = batch.count if self.run.strategy.exact else self.world.size
        layout = layout_of(leaves, self.world.size, batch.shares)
        self.scatter = Scatter(leaves, self.world.rank, self.world.size, links=self.links, layout=layout)
        self.sent = 0  # buckets
        return super().train_step(batch, learning_rate)

    def backward(self, micro: MicroBatch, targets: float, last: bool) -> Tensor:
        self.travelling = last and self.run.strategy.exact and not self.alone
        if not self.travelling:
            return super().backward(micro, targets, last)
        self.leaves.begin(micro.index)
        return self.run_micro_batch(micro, targets)

    def on_gradient(self, position: int, parameter: Tensor) -> None:
        super().on_gradient(position, parameter)
        while self.travelling and self.sent < len(self.buckets) and self.leaves.given >= set(self.buckets[self.sent]):
            with self.phases("reduction"):  # it waits for the one before it, and so for other ranks
                self.send()

    def send(self) -> None:
        """The next bucket: of this rank's partial nodes each rank's rows. They are let go of."""
        positions = self.buckets[self.sent]
        nodes = self.leaves.with_last_leaf(positions, [self.leaves.take(i) for i in positions])
        self.scatter.submit({node: self.slots[self.sent].laid(tensors) for node, tensors in nodes.items()})
        self.leaves.release(positions)
        self.sent += 1

    def reduce(self) -> list[Tensor]:
        """This rank's rows of the sums, in the order of `self.parameters`."""
        if self.alone:
            return self.leaves.tree.root if self.run.strategy.exact else self.leaves.pop()
        if not self.run.strategy.exact:  # a leaf a rank: what autograd has added up
            self.leaves.tree, self.leaves.node = ReductionTree(self.world.size), (0, self.world.rank)
        self.travelling = False
        while self.sent < len(self.buckets):
            self.send()
        rows = self.sum_rows(self.leaves.with_last_leaf(list(self.rows), [self.leaves.take(i) for i in self.rows]))
        gradients = {i: self.own_rows(summed) for i, summed in rows.items()}
        for positions, slots, sums in zip(self.buckets, self.slots, self.scatter.finish(), strict=True):
            (slot,) = sums.values()
            gradients |= zip(positions, slots.own(slot, self.world.rank), strict=True)
        return [gradients[i] for i in range(len(self.parameters))]

    def own_rows(self, gradient: Tensor) -> Tensor:
        """This rank's rows of a row-sparse gradient."""
        mine = self.own(torch.arange(len(gradient)), self.world.rank)
        first = int(mine[0]) if len(mine) else 0
        return rows_between(gradient, first, first + len(mine))

    def whole_gradient(self, gradients: list[Tensor]) -> Gradient:
        """Each rank holds its rows."""
        if self.alone:
            return super().whole_gradient(gradients)
        parts = [
            Part(n, p, g, 1.0 if p.dim() else 1 / self.world.size, self.rows.get(i), self.spread)
            for i, ((n, p), g) in enumerate(zip(self.stepped.items(), gradients, strict=True))
        ]
        return Gradient(parts, list(self.named), self.world.sum)

    def weights_changed(self) -> None:
        super().weights_changed()
        if not self.alone:
            self.gather()

    @torch.no_grad()
    def gather(self) -> None:
        """Every rank's new rows, to every rank. Collective."""
        arriving, gathering = InFlight(), Gather(self.world.rank, self.world.size, links=self.links)
        for parameters in self.gathered:
            slots = self.slots_of(parameters)
            own = parameters[0].new_zeros(slots.length)
            places = slots.own(own, self.world.rank)
            torch._foreach_copy_(places, [self.own(p.detach(), self.world.rank) for p in parameters])
            arriving.add(gathering.bucket(own, partial(slots.take, tensors=parameters)))
        arriving.finish()
