"""Sharded data parallelism: each rank keeps a part of the optimizer's state, and with FSDP2 of weights and gradients.

In: this rank's micro-batches. Out: the same update; each rank updates its shard. `strategy.name: fsdp2` covers two
classes. `ShardedOptimizer` (`gather: step`) reduces gradients during the last backward, each to the rank that updates
it, and all-gathers the new weights after the update: ZeRO stages 1 and 2, in tree order, without FSDP. `FSDP2`
(`gather: micro_batch`) is PyTorch's FSDP: weights are gathered block by block when forward and backward need them, and
a block's gradients are reduced and scattered at once. In exact runs, the scatter gives every rank its slice of each
leaf, summed in tree order.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from typing_extensions import override

from lockstep.config.run import Run, RunError
from lockstep.config.sections import StrategySection
from lockstep.data.batch import MicroBatch, StepBatch, StepResult
from lockstep.data.job import Job, MemoryEstimate, StrategyFacts
from lockstep.distributed.randomness import seed_everything
from lockstep.distributed.sharded import fill, local, whole
from lockstep.distributed.world import World
from lockstep.strategies.dry_run import DryRun
from lockstep.strategies.engines import blocks, fsdp, layers, tensor_plans
from lockstep.strategies.engines.fsdp import (
    OutputWrapper,
    TreeScatter,
    Uses,
    cuts,
    gate,
    leaves_layers_out,
    reshard,
    roomy,
    sums_in_float32,
)
from lockstep.strategies.engines.side_effects import SideEffects, first_few, refuse_own_tensors
from lockstep.strategies.exact import parameter_groups, training_state
from lockstep.strategies.exact.exchange import Scatter, buckets
from lockstep.strategies.exact.make_model import make_model
from lockstep.strategies.exact.parameter_groups import ParamGroupSpec
from lockstep.strategies.exact.reduce_schedule import Gather, InFlight, LinkSpeeds, links
from lockstep.strategies.exact.reduction_tree import ReductionTree, layout_of, most_held, most_held_in_turns, share
from lockstep.strategies.exact.rows import RowSlots, rows_between
from lockstep.strategies.exact.statistics import Statistics
from lockstep.strategies.exact.stepper import Stepper
from lockstep.strategies.exact.tensor_leaves import LeafRanks
from lockstep.strategies.exact.training_state import TrainedWeights, TrainingState
from lockstep.strategies.exact.update import Gradient, Part
from lockstep.strategies.observer import listening, observing
from lockstep.strategies.recovery import ShardRecovery
from lockstep.strategies.single import ReplicatedMemory, ReplicatedStrategy, first_inputs
from lockstep.strategies.strategy import DataShard, Strategy, WeightFormats, all_reduce_in
from lockstep.tasks.models import inference
from lockstep.tasks.models.inference import Decoding
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
    """Memory with `gather: step`: the optimizer's state is divided."""

    choice = ", weights gathered once a step"

    @override
    def bytes_held(self, job: Job, state: float | None = None) -> dict[str, float]:
        bytes_of = super().bytes_held(job, state)
        shared = {name: bytes_of[name] / job.processes for name in ("optimizer", "average") if name in bytes_of}
        return bytes_of | shared


class EngineShards(MemoryEstimate):
    """Memory with `gather: micro_batch`: everything is divided."""

    @override
    def bytes_held(self, job: Job, state: float | None = None) -> dict[str, float]:
        shards = job.processes // int(job.run.strategy.options.get("replicate", 1))
        bytes_of = super().bytes_held(job, state)
        if job.run.model.trained_in_bfloat16:  # its shards are the masters
            bytes_of |= {"weights": 4.0, "optimizer": bytes_of["optimizer"] - 4.0}
        return {name: each / shards for name, each in bytes_of.items()}

    @override
    def partial_sums(self, job: Job) -> float:
        run = job.run
        replicas, leaves = int(run.strategy.options.get("replicate", 1)), run.micro_batches
        shards = job.processes // (replicas * tensor_ranks(run.strategy))
        if not job.same_bits:
            return 0.0
        if shards == 1:
            return 4.0 * (most_held(leaves, replicas, whole_leaf=True) - 1)
        block = share(leaves, replicas - 1, replicas)  # the largest share
        return 4.0 * (most_held_in_turns(leaves, block, shards) - 1) / shards


class ChoosesShards(EngineShards):
    """Chooses `gather` if the run leaves it open."""

    @override
    def needs_choice(self, job: Job) -> bool:
        return fsdp.gather_option(job.run.strategy, job.run.launch) is None

    @override
    def choose(self, job: Job, parameters: int, trained: int, memory: int) -> Run:
        """Choose `gather: step` if its state, without activations, takes at most half of the memory."""
        run, by_step = job.run, ShardedOptimizer.memory
        bytes_of = by_step.bytes_held(job)
        rest = sum(bytes_of.values()) - bytes_of["weights"] + by_step.partial_sums(job)
        fits = 2 * (parameters * bytes_of["weights"] + trained * rest) <= memory
        options = {**run.strategy.options, "gather": fsdp.STEP if fits else fsdp.MICRO_BATCH}
        return run.model_copy(update={"strategy": run.strategy.model_copy(update={"options": options})})


class InPlaceWrites(DryRun):
    """The trial step of `ShardedOptimizer`, whose update needs weights that stay where they are in memory."""

    @override
    def check(self, effects: SideEffects) -> SideEffects:
        agreed = super().check(effects)
        if agreed.new_memory and not self.strategy.alone:
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
        ReplicatedStrategy.facts, bench_options=GATHERS, waits_inside=("reduction", "overlapped", "optimizer")
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


class GatheredForward(DryRun):
    """The trial step of `FSDP2`, which gathers weights for a forward and replaces them by shards."""

    @override
    def forwards(self, batch: StepBatch) -> list[Callable[[], None]]:
        strategy = self.strategy

        def call() -> None:  # the same examples on every rank; no backward frees the gathered weights
            with torch.no_grad(), strategy.precision.autocast():
                strategy.model(**first_inputs(strategy.task, strategy.world.device))
            reshard(strategy.model)

        return [call]

    @override
    def check(self, effects: SideEffects) -> SideEffects:
        strategy = self.strategy
        agreed = effects.together(strategy.world.all_gather)
        written = (agreed.written | agreed.evaluated) & strategy.state.parts.keys()
        names = sorted(agreed.new_memory | agreed.hooked | written)
        if names and (strategy.world.size == 1 or not strategy.weights.named.keys().isdisjoint(names)):
            raise RunError(
                "LS4191",
                "strategy.options.gather: FSDP replaces weights by other tensors, and would lose what the "
                f"model's forward does to {first_few(names)}. Use {fsdp.INSTEAD}",
            )
        return super().check(agreed)


class ShardedTensors(TrainingState):
    """The shards of a rank."""

    def __init__(self, strategy: FSDP2, stepper: Stepper) -> None:
        super().__init__(strategy.weights, stepper, strategy.precision.loss_scale, strategy.world)
        self.model, self.narrow = strategy.model, strategy.run.model.trained_in_bfloat16
        self.parts = dict(strategy.model.named_parameters())  # the shards; a gathered block shows whole ones
        self.count = strategy.shards * strategy.tensor

    @override
    @property
    def part(self) -> tuple[int, int]:
        return self.world.rank % self.count, self.count

    @override
    def own(self) -> dict[str, Tensor]:
        tensors = {name: p.detach() for name, p in self.parts.items()} | dict(self.model.named_buffers())
        return training_state.tensors_to_save(tensors, self.stepper, self.scaling)

    @override
    def export(self) -> dict[str, Tensor] | None:
        weights: dict[str, Tensor] = {}
        for name, tensor in self.model.state_dict().items():  # one whole tensor at a time, to rank 0's host memory
            gathered = whole(tensor.detach())
            if self.world.is_main:
                weights[name] = gathered.cpu()
        if not self.world.is_main:
            return None
        low = {n for n, _ in self.model.named_parameters(remove_duplicate=False)} if self.narrow else set()
        return {name: tensor.bfloat16() if name in low else tensor for name, tensor in weights.items()}


class MeshRecovery(ShardRecovery):
    """The mesh of `FSDP2`, for fewer ranks."""

    @override
    @classmethod
    def fit_options(cls, section: StrategySection, processes: int) -> dict[str, Any]:
        """Return the options with the tensor ranks and replicas of the run file, or the largest numbers that divide the
        processes: leaves are bitwise equal on fewer ranks."""
        options, tensor = dict(section.options), tensor_ranks(section)
        if section.exact and tensor > 1:
            shared = math.gcd(processes, section.tensor_leaves)
            tensor = options["tensor_parallel"] = max(n for n in range(1, tensor + 1) if not shared % n)
        able = [n for n in range(1, int(options.get("replicate", 1)) + 1) if not processes % (n * tensor)]
        if "replicate" in options:
            options["replicate"] = max((n for n in able if n == 1 or n * tensor < processes), default=1)
        if "reshard_after_forward" in options:  # a number would create meshes equal to earlier ones
            options["reshard_after_forward"] = bool(options["reshard_after_forward"])
        return options


class FSDP2(Strategy):
    """`strategy.options`: `gather` (`step`: `ShardedOptimizer`; `micro_batch`: this class; default: depends on memory),
    `replicate` (replicas of the sharded model: hybrid sharding), `tensor_parallel` (ranks per matrix product, for
    models with a plan), `reshard_after_forward` (true, false, or a number of ranks), `cpu_offload`, FSDP's mixed
    precision `param_dtype` and `reduce_dtype` (fp32 or bf16), and `blocks` (names of the modules to gather one at a
    time, `*` for any part of a name; default: the layers)."""

    exact = True
    facts = StrategyFacts(
        weight_formats=WeightFormats.BFLOAT16,
        bench_options=GATHERS,
        waits_inside=("forward", "backward", "reduction", "optimizer"),
    )
    memory: ClassVar[MemoryEstimate] = ChoosesShards()
    recovery: ClassVar[type[ShardRecovery]] = MeshRecovery
    statistics: Statistics
    state: ShardedTensors

    @override
    @classmethod
    def check(cls, job: Job) -> None:
        fsdp.check_options(job)
        if not cls.memory.needs_choice(job):
            layers.check_writes(job, "strategy.options.gather", "FSDP", fsdp.INSTEAD)
            layers.check_scalars(job, "strategy.options.gather", "FSDP", fsdp.INSTEAD)

    @override
    @classmethod
    def resolve_class(cls, run: Run) -> type[Strategy]:
        return ShardedOptimizer if fsdp.gather_option(run.strategy, run.launch) == fsdp.STEP else cls

    @override
    @classmethod
    def inexact_options(cls, section: StrategySection) -> list[str]:
        return fsdp.low_dtypes(section)

    @override
    @classmethod
    def rounding(cls, job: Job) -> float:
        run = job.run
        return (
            0.1
            if fsdp.low_dtypes(run.strategy) or (run.precision != "fp32" and tensor_ranks(run.strategy) > 1)
            else 1e-4
        )

    def __init__(self, job: Job, world: World) -> None:
        super().__init__(job, world)
        self.dry_run = GatheredForward(self)
        self.in_tree_order = job.same_bits
        self.tensor = tensor_ranks(job.run.strategy)
        if world.joining:  # no process group yet
            return
        self.replicas = int(job.run.strategy.options.get("replicate", 1))
        self.shards = world.size // (self.replicas * self.tensor)
        self.replica, within = divmod(world.rank, self.shards * self.tensor)
        self.shard = within // self.tensor

    @override
    def own_micro_batches(self) -> Iterable[int]:
        """Return this rank's micro-batches: a replica's leaves are contiguous; its shards take turns, so that each
        reduction is over neighbouring leaves."""
        block = share(self.run.micro_batches, self.replica, self.replicas)
        return range(block.start + self.shard, block.stop, self.shards)

    # -- building ----------------------------------------------------------------------------------------------------

    @override
    def build(self, task: Task) -> None:
        self.task = task
        self.mesh = self.make_mesh()
        # the only whole copy of the model, freed when build ends
        source = make_model(task) if self.world.is_main and not self.build_empty else None
        self.model = make_model(task, empty=True)
        refuse_own_tensors(self.model, "strategy.options.gather: FSDP", fsdp.INSTEAD)
        if self.run.model.trained_in_bfloat16:  # shards are the masters; gathered weights are bfloat16
            for parameter in self.model.parameters():
                parameter.data = parameter.data.float()
        self.model = roomy(self.model)
        # Ranks gather a block together, so a block that some ranks may skip cannot be gathered separately.
        skips = layers.leaves_out_layers(getattr(self.model, "config", None))
        self.blocks = layers.blocks(self.model) if skips is None else []
        if (named := self.run.strategy.options.get("blocks")) is not None:
            self.blocks = layers.named_blocks(self.model, named)
        output_wrappers = [OutputWrapper(module) for module in [*self.blocks, self.model]]
        blocks.prepare(self.run.model, self.model, self.run.strategy.tensor_leaves, self.leaf_ranks())
        self.apply_shards(parameter_groups.assigned(self.run.optim, self.model))
        if hasattr(self.model, "config"):  # of transformers: unlike a user's loss, none here writes into outputs
            warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view", category=UserWarning)
        if skips is not None:
            leaves_layers_out(self.model)
        for outputs in output_wrappers:
            outputs.hide()
        if self.run.model.trained_in_bfloat16:
            sums_in_float32(self.model)
        for block in self.blocks if self.in_tree_order else ():
            gate(block)
        self.scatters: list[TreeScatter] = []
        for part in self.model.modules():
            if isinstance(part, FSDPModule):
                part.set_gradient_divide_factor(1.0)  # no averaging: the loss is already divided by all targets
                part.set_force_sum_reduction_for_comms(True)
                if self.in_tree_order and self.shards > 1:
                    self.scatters.append(TreeScatter(self))
                    part.set_custom_reduce_scatter(self.scatters[-1])
        self.uses = Uses(self.model, self.parameters)
        if not self.build_empty:
            self.receive(source)
        self.statistics = Statistics(self.model)
        self.model.train()

    def make_mesh(self) -> DeviceMesh:
        if not dist.is_initialized():  # FSDP requires a group, even for one process
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        sizes = {"replicate": self.replicas, "shard": self.shards, "tensor": self.tensor}
        sizes = {self.world.mesh_axis(name): size for name, size in sizes.items() if size > 1 or name == "shard"}
        with self.world.forming():
            mesh = init_device_mesh(self.world.device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
            if self.tensor > 1:
                size, rank = self.world.size, self.world.rank
                groups = [self.world.group(range(first, size, self.tensor)) for first in range(self.tensor)]
                add = all_reduce_in(groups[rank % self.tensor])
                self.data_parallel = DataShard(rank // self.tensor, size // self.tensor, add)
        return mesh

    def leaf_ranks(self) -> LeafRanks | None:
        """Return the ranks that divide the leaves of each product among them; None without exact tensor parallelism."""
        if self.tensor == 1 or not self.in_tree_order:
            return None
        axis = self.world.mesh_axis("tensor")
        group, how = self.mesh.get_group(axis), links(self.run.strategy, self.world, self.mesh.get_group(axis))
        return LeafRanks(self.run.strategy.tensor_leaves, self.mesh.get_local_rank(axis), self.tensor, group, how)

    def apply_shards(self, treated: Mapping[str, ParamGroupSpec]) -> None:
        """Apply `fully_shard` to every block (those that transformers does not split), then to the rest; then create
        the optimizer."""
        options = self.run.strategy.options
        if self.tensor > 1 and self.in_tree_order:
            leaves = self.run.strategy.tensor_leaves
            tensor_plans.share_out(self.run.model, leaves, self.model, self.mesh[self.world.mesh_axis("tensor")])
        elif self.tensor > 1:
            from torch.distributed.tensor.parallel import parallelize_module

            prefix = f"{self.model.base_model_prefix}."
            parallelize_module(
                self.model,
                self.mesh[self.world.mesh_axis("tensor")],
                layers.tensor_plan(self.run.model, self.tensor, prefix),
            )
        names = tuple(
            n for n in map(self.world.mesh_axis, ("replicate", "shard")) if n in (self.mesh.mesh_dim_names or ())
        )
        arguments: dict[str, Any] = {
            "mesh": self.mesh[names],
            "reshard_after_forward": options.get("reshard_after_forward", True),
            "offload_policy": CPUOffloadPolicy(pin_memory=self.world.device.type == "cuda")
            if options.get("cpu_offload")
            else OffloadPolicy(),
        }
        of_block, of_root = fsdp.policies(self.run.strategy, self.run.model)
        for block in self.blocks:
            fully_shard(block, mp_policy=of_block, **arguments)
        fully_shard(self.model, mp_policy=of_root, **arguments)
        self.hold(self.make_stepper(treated))

    def hold(self, optimizer: Stepper) -> None:
        """Use the shards that were applied, and an optimizer of them."""
        self.weights = TrainedWeights(self.model)
        self.set_optimizer(optimizer, ShardedTensors(self, optimizer))

    def make_stepper(self, treated: Mapping[str, ParamGroupSpec]) -> Stepper:
        groups = parameter_groups.groups(self.run.optim, self.model.named_parameters(), treated)
        return Stepper(self.run.optim, groups)

    def receive(self, source: nn.Module | None) -> None:
        """Receive weights and buffers from rank 0's model, one at a time; each rank keeps its shard. Collective."""
        whole_of: dict[str, Tensor] = {}  # all names of tied weights, because the canonical one may differ
        if source is not None:
            whole_of |= dict(source.named_parameters(remove_duplicate=False))
            whole_of |= dict(source.named_buffers(remove_duplicate=False))
        with torch.no_grad():
            for name, own in [*self.model.named_parameters(), *self.model.named_buffers()]:
                whole = (
                    whole_of[name].detach().to(self.world.device, own.dtype)
                    if whole_of
                    else torch.empty(own.shape, dtype=own.dtype, device=self.world.device)
                )
                if self.world.size > 1:
                    dist.broadcast(whole := whole.contiguous(), src=0)
                fill(own, whole)

    # -- one step ----------------------------------------------------------------------------------------------------

    @override
    def train_step(self, batch: StepBatch, learning_rate: float) -> StepResult:
        losses = self.totals.start(batch.count)
        rounds = max(-(-len(share(batch.count, r, self.replicas)) // self.shards) for r in range(self.replicas))
        blanks = [batch.micro_batches[0].blank()] * (rounds - len(batch.micro_batches))  # all ranks run equally many
        self.tree = ReductionTree(batch.count)
        self.uses.clear()
        for scatter in self.scatters:
            scatter.start(batch.count)
        self.statistics.start(batch.count)
        for turn, micro in enumerate([*batch.micro_batches, *blanks]):
            self.turn, self.last, self.uses.counting = turn, turn == rounds - 1, turn < len(batch.micro_batches)
            self.root.set_requires_all_reduce(self.last)
            seed_everything(self.run.seed, batch.step, micro.index)
            own = turn < len(batch.micro_batches)
            with observing(self.observer, micro.index, self.model) if own else listening(self, None):
                loss = self.run_micro_batch(micro, batch.targets)
            if own:
                losses[micro.index] = loss
                self.statistics.take(micro)
            else:
                self.statistics.reset()
        with self.phases("reduction"):
            losses, counts = self.totals.all_reduce(losses, self.uses.counts, self.uses.signature())
            self.uses.compare_orders(counts[-2:], self.data_parallel.size)
        return self.optimizer_step(batch, self.whole_gradient(), learning_rate, losses, counts[:-2])

    def run_micro_batch(self, micro: MicroBatch, divisor: float) -> Tensor:
        """Run forward and backward with the gradient of loss sum / divisor. Returns the loss sum, detached."""
        with self.phases("forward"), self.precision.autocast():  # not around backward: autocast caches its casts
            loss = self.totals.loss_sum(self.task, self.model(**micro.inputs), micro, self.observer)
        self.totals.switched += self.uses.switched()  # now, because FSDP restores requires_grad before backward
        with self.phases("backward"):
            self.precision.scaled(loss / divisor).backward()
            self.uses.check_reduced()
            self.collect(micro.index)
        return loss.detach()

    @property
    def root(self) -> FSDPModule:
        assert isinstance(self.model, FSDPModule)
        return self.model

    def collect(self, leaf: int) -> None:
        """After each backward of an exact run, move leaves from `.grad` into the tree."""
        if not self.in_tree_order:
            return
        if self.shards == 1:
            self.tree.add(leaf, [local(p.grad if p.grad is not None else torch.zeros_like(p)) for p in self.parameters])
        if not self.last:
            for parameter in self.parameters:
                parameter.grad = None
        elif self.shards == 1:
            for parameter, gradient in zip(self.parameters, self.tree.root, strict=True):
                if parameter.grad is None:  # block not run by the last micro-batch
                    parameter.grad = torch.zeros_like(parameter)
                local(parameter.grad).copy_(gradient)
            self.tree = ReductionTree(0)  # frees its sums

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.weights.named.values())

    def whole_gradient(self) -> Gradient:
        """Return the step's gradient; each rank holds its shards, each shard replicated on the ranks it is not divided
        over."""
        gradients = {n: p.grad if p.grad is not None else torch.zeros_like(p) for n, p in self.weights.named.items()}
        parts = [Part(n, p, gradients[n], cuts(gradients[n]) / self.world.size) for n, p in self.weights.named.items()]
        return Gradient(parts, list(self.weights.named), self.world.all_reduce)

    @override
    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        self.model.eval()
        with torch.no_grad(), self.precision.autocast():
            logits = self.model(**inputs).logits
        reshard(self.model)
        self.model.train()
        return logits

    @override
    def generate(self, inputs: Mapping[str, Tensor], how: Decoding) -> Tensor:
        self.model.eval()
        self.root.unshard()  # an encoder is called directly, not through the root
        with torch.no_grad(), self.precision.autocast():  # every forward gathers weights, so all ranks run equally many
            tokens = inference.by_transformers(self.model, inputs, how, synced=self.world.size > 1)
        reshard(self.model)
        self.model.train()
        return tokens

    # -- state -------------------------------------------------------------------------------------------------------

    @override
    def close(self) -> None:
        self.scatters.clear()
        del self.model, self.update, self.state, self.weights


# -- parts of tensors ------------------------------------------------------------------------------------------------


def tensor_ranks(strategy: StrategySection) -> int:
    return int(strategy.options.get("tensor_parallel", 1))
