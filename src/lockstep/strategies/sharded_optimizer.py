"""Data parallelism with a sharded optimizer: each rank holds the whole model, and updates its rows of each weight.

In: this rank's micro-batches. Out: the same update. Unlike in `ddp.py`, gradients are reduced during the last backward
each to the rank that updates it, and the new weights are all-gathered after the update: ZeRO stages 1 and 2, in tree
order, without FSDP. `strategy.name: fsdp2` with `gather: step`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from typing_extensions import override

from lockstep.config.run import RunError
from lockstep.data.batch import MicroBatch, StepBatch, StepResult
from lockstep.data.job import Job
from lockstep.distributed.world import World
from lockstep.strategies.engines import fsdp
from lockstep.strategies.engines.fsdp import roomy
from lockstep.strategies.engines.side_effects import SideEffects, first_few
from lockstep.strategies.exact.exchange import Scatter, buckets
from lockstep.strategies.exact.gradient_sum import ReductionTree, layout_of, rows_between
from lockstep.strategies.exact.reduce_schedule import Gather, InFlight, LinkSpeeds, links
from lockstep.strategies.exact.training_state import TrainedWeights, make_model
from lockstep.strategies.exact.update import Gradient, Part
from lockstep.strategies.recovery import ShardRecovery
from lockstep.strategies.single import ReplicatedMemory, ReplicatedStrategy
from lockstep.strategies.strategy import DryRun
from lockstep.tasks.task import Task

BUCKET_BYTES = 25 * 2**20

GATHERS = {"gather": ("step", "micro_batch")}  # options that `lockstep bench` tries


class ShardedWeights(TrainedWeights):
    """The weights of a rank that holds all of them and updates its rows of each."""

    def __init__(self, model: nn.Module, masters: bool, world: World, mesh: DeviceMesh, links: LinkSpeeds) -> None:
        self._world, self._mesh, self._links = world, mesh, links
        super().__init__(model, masters)
        cut = {i: p for i, p in enumerate(self.named.values()) if p.dim()}  # every rank updates the scalars
        self._gathered = [[cut[i] for i in b] for b in buckets(cut, BUCKET_BYTES)]

    def rows(self, tensor: Tensor) -> Tensor:
        """Return a view of the rows of a whole tensor that this rank updates, sharded like a DTensor: the last ranks
        have fewer or none."""
        if not tensor.dim():
            return tensor
        each = -(-len(tensor) // self._world.size)
        return tensor[self._world.rank * each : (self._world.rank + 1) * each]

    @override
    def own_parts(self) -> dict[str, nn.Parameter]:
        """Return views of the whole weights: the optimizer writes where forward reads."""
        return {name: nn.Parameter(self.rows(p.detach())) for name, p in self.named.items()}

    @override
    def to_dtensor(self, name: str, tensor: Tensor) -> Tensor:
        whole = self.named[name]
        if not whole.dim():
            return tensor
        return DTensor.from_local(
            tensor, self._mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
        )

    @override
    def gradient(self, gradients: Sequence[Tensor]) -> Gradient:
        parts = [
            Part(n, p, g, 1.0 if p.dim() else 1 / self._world.size, self.to_dtensor)
            for (n, p), g in zip(self.updated.items(), gradients, strict=True)
        ]
        return Gradient(parts, list(self.named), self._world.all_reduce)

    @override
    @torch.no_grad()
    def changed(self) -> None:
        """All-gather the updated rows. Collective."""
        super().changed()
        size = self._world.size
        arriving, gathering = InFlight(), Gather(self._world.rank, size, self._links)
        for parameters in self._gathered:
            slots = RowSlots([p.shape for p in parameters], size)
            own = parameters[0].new_zeros(slots.length)
            torch._foreach_copy_(slots.own(own, self._world.rank), [self.rows(p.detach()) for p in parameters])
            arriving.add(gathering.bucket(own, partial(slots.take, tensors=parameters)))
        arriving.finish()


class OptimizerShards(ReplicatedMemory):
    """The memory with `gather: step`: the optimizer's state is divided by the ranks."""

    choice = ", weights gathered once a step"

    @override
    def bytes_held(self, job: Job, state: float | None = None) -> dict[str, float]:
        bytes_of = super().bytes_held(job, state)
        shared = {name: bytes_of[name] / job.processes for name in ("optimizer", "average") if name in bytes_of}
        return bytes_of | shared


class InPlaceWrites(DryRun):
    """The trial step of `ShardedOptimizer`, whose update needs weights that stay where they are in memory."""

    @override
    def check(self, effects: SideEffects) -> SideEffects:
        agreed = super().check(effects)
        if agreed.new_memory and self.strategy.world.size > 1:
            names = first_few(sorted(agreed.new_memory))
            raise RunError(
                "LS4190",
                f"strategy.name: the model's forward gives {names} new memory (by `.data =`, or a new "
                "parameter), but fsdp2 updates the old memory. Write into the weight in place "
                "(`weight.copy_(...)` under torch.no_grad()), or use strategy.name=ddp",
            )
        return agreed


class ShardedOptimizer(ReplicatedStrategy):
    """`strategy.options`: `gather: step`, and no FSDP options."""

    plugin = "strategies"  # a base: it has no name in a run file
    facts = replace(
        ReplicatedStrategy.facts,
        accelerate_type="fsdp",
        bench_options=GATHERS,
        waits_inside=("reduction", "overlapped", "optimizer"),
    )
    memory = OptimizerShards()
    recovery = ShardRecovery

    @override
    @classmethod
    def check(cls, job: Job) -> None:
        fsdp.check_options(job)

    def __init__(self, job: Job, world: World) -> None:
        super().__init__(job, world)
        self.dry_run = InPlaceWrites(self)

    # -- building ----------------------------------------------------------------------------------------------------

    @override
    def build(self, task: Task) -> None:
        self.alone, self.links = self.world.size == 1, links(self.run.strategy, self.world)
        if not self.alone:
            size = (self.world.size,)
            with self.world.forming():
                self.mesh = init_device_mesh(
                    self.world.device.type, size, mesh_dim_names=(self.world.mesh_axis("rank"),)
                )
        super().build(task)
        self.buckets = buckets(dict(reversed(self.leaves.dense.items())), BUCKET_BYTES)  # in backward's order
        shapes = [[self.parameters[i].shape for i in b] for b in self.buckets]
        self.slots = [RowSlots(each, self.world.size) for each in shapes]

    @override
    def make_model(self) -> nn.Module:
        return roomy(make_model(self.task, empty=True)) if self.build_empty else make_model(self.task)

    @override
    def make_weights(self, masters: bool) -> TrainedWeights:
        if self.alone:
            return super().make_weights(masters)
        self.sharded = ShardedWeights(self.model, masters, self.world, self.mesh, self.links)
        return self.sharded

    # -- one step ----------------------------------------------------------------------------------------------------

    @override
    def train_step(self, batch: StepBatch, learning_rate: float) -> StepResult:
        leaves = batch.count if self.run.strategy.exact else self.world.size
        layout = layout_of(leaves, self.world.size, batch.shares)
        self.scatter = Scatter(leaves, self.world.rank, self.world.size, links=self.links, layout=layout)
        self.sent = 0  # buckets
        return super().train_step(batch, learning_rate)

    @override
    def backward(self, micro: MicroBatch, targets: float, last: bool) -> Tensor:
        self.travelling = last and self.run.strategy.exact and not self.alone
        if not self.travelling:
            return super().backward(micro, targets, last)
        self.leaves.begin(micro.index)
        return self.run_micro_batch(micro, targets)

    @override
    def on_grad_ready(self, position: int, parameter: Tensor) -> None:
        super().on_grad_ready(position, parameter)
        while (
            self.travelling
            and self.sent < len(self.buckets)
            and self.leaves.with_gradient >= set(self.buckets[self.sent])
        ):
            with self.phases("reduction"):  # waits for the previous bucket, and so for other ranks
                self.send()

    def send(self) -> None:
        """Send the next bucket: for each rank, its rows of this rank's partial nodes, which are then freed."""
        positions = self.buckets[self.sent]
        nodes = self.leaves.with_last_leaf(positions, [self.leaves.take(i) for i in positions])
        self.scatter.submit({node: self.slots[self.sent].laid(tensors) for node, tensors in nodes.items()})
        self.leaves.release(positions)
        self.sent += 1

    @override
    def reduce(self) -> list[Tensor]:
        """Return this rank's rows of the sums, in the order of `self.parameters`."""
        if self.alone:
            return self.leaves.tree.root if self.run.strategy.exact else self.leaves.pop_all()
        if not self.run.strategy.exact:  # one leaf per rank: the sum by autograd
            self.leaves.tree, self.leaves.node = ReductionTree(self.world.size), (0, self.world.rank)
        self.travelling = False
        while self.sent < len(self.buckets):
            self.send()
        rows = self.leaves.sum_rows(
            self.leaves.with_last_leaf(self.rows, [self.leaves.take(i) for i in self.rows]), self.world
        )
        gradients = {i: self.own_rows(summed) for i, summed in rows.items()}
        for positions, slots, sums in zip(self.buckets, self.slots, self.scatter.finish(), strict=True):
            (slot,) = sums.values()
            gradients |= zip(positions, slots.own(slot, self.world.rank), strict=True)
        return [gradients[i] for i in range(len(self.parameters))]

    def own_rows(self, gradient: Tensor) -> Tensor:
        """Return this rank's rows of a row-sparse gradient."""
        mine = self.sharded.rows(torch.arange(len(gradient)))
        first = int(mine[0]) if len(mine) else 0
        return rows_between(gradient, first, first + len(mine))


class RowSlots:
    """Slots of equal length, one row of a matrix [W, N] per rank, filled and emptied with a few copies per tensor at
    any number of ranks. They hold rank r's rows [r * E, (r + 1) * E) of each tensor, where E = ceil(rows / ranks), as
    DTensor shards them: the last ranks have fewer or none. Every rank has all scalars."""

    def __init__(self, shapes: Sequence[torch.Size], ranks: int) -> None:
        self.ranks, self._shapes = ranks, list(shapes)
        self._each = [-(-shape[0] // ranks) if shape else 1 for shape in shapes]  # rows per rank
        self._widths = [shape[1:].numel() for shape in shapes]
        self._starts: list[int] = []  # offset of each tensor's rows in a slot
        self.length = 0  # elements per slot
        for each, width in zip(self._each, self._widths, strict=True):
            self._starts.append(self.length)
            self.length += each * width

    def laid(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return whole tensors as slots [W, N], zero-padded."""
        slots = tensors[0].new_zeros(self.ranks, self.length)
        for tensor, column in zip(tensors, self._columns(slots), strict=True):
            if not tensor.dim():
                column.fill_(tensor)
            else:
                for rows, place in self._runs(tensor, column):
                    place.copy_(rows)
        return slots

    def own(self, slot: Tensor, rank: int) -> list[Tensor]:
        """Return one rank's rows of each tensor: views of its slot [N]."""
        parts = []
        for shape, each, width, start in zip(self._shapes, self._each, self._widths, self._starts, strict=True):
            rows = max(0, min(each, shape[0] - rank * each)) if shape else 1
            parts.append(slot[start : start + rows * width].view(rows, *shape[1:]) if shape else slot[start])
        return parts

    def take(self, slots: Tensor, tensors: Sequence[Tensor]) -> None:
        """Copy the slots of all ranks [W, N] into whole tensors that have dimensions."""
        for tensor, column in zip(tensors, self._columns(slots), strict=True):
            for rows, place in self._runs(tensor, column):
                rows.copy_(place)

    def _columns(self, slots: Tensor) -> list[Tensor]:
        widths = [each * width for each, width in zip(self._each, self._widths, strict=True)]
        return list(slots.split(widths, dim=1))

    def _runs(self, tensor: Tensor, column: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return pairs of (rows of a tensor, their position in the slots): ranks with all their rows, then the one with
        fewer."""
        flat, count = tensor.reshape(len(tensor), -1), column.shape[1] // max(1, tensor[:1].numel())
        if not tensor.numel():
            return []
        full, rest = divmod(len(tensor), count)
        runs = [(flat[: full * count].view(full, -1), column[:full])]
        if rest:
            last = flat[full * count :].reshape(-1)
            runs.append((last, column[full, : len(last)]))
        return runs
