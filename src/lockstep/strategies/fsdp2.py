"""Fully sharded data parallelism: each rank holds a part of the weights, the gradients and the optimizer's state.

In: this rank's micro-batches. Out: the same update; each rank updates its shard. PyTorch's FSDP2 gathers weights block
by block when forward and backward need them, and a block's gradients are reduced and scattered at once. In exact runs,
the scatter gives every rank its slice of each leaf, summed in tree order. `strategy.name: fsdp2` also covers
`gather: step` (`sharded_optimizer.py`).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from typing_extensions import override

from lockstep.config.run import Run, RunError
from lockstep.config.sections import LaunchSection, StrategySection
from lockstep.data.batch import MicroBatch, StepBatch, StepResult
from lockstep.data.job import Job, MemoryEstimate, StrategyFacts
from lockstep.distributed.randomness import seed_everything
from lockstep.distributed.rendezvous import join_alone
from lockstep.distributed.sharded import fill, whole
from lockstep.distributed.torch_internals import local
from lockstep.distributed.world import DataShard, World
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
from lockstep.strategies.exact import stepper, training_state
from lockstep.strategies.exact.gradient_sum import ReductionTree, most_held, most_held_in_turns, share
from lockstep.strategies.exact.reduce_schedule import links
from lockstep.strategies.exact.step_totals import Statistics
from lockstep.strategies.exact.stepper import ParamGroupSpec, Stepper
from lockstep.strategies.exact.tensor_leaves import LeafRanks
from lockstep.strategies.exact.training_state import TrainedWeights, TrainingState, make_model
from lockstep.strategies.exact.update import Gradient, Part
from lockstep.strategies.observer import listening, observing
from lockstep.strategies.recovery import ShardRecovery
from lockstep.strategies.sharded_optimizer import GATHERS, ShardedOptimizer
from lockstep.strategies.strategy import DryRun, Strategy, WeightFormats, all_reduce_in
from lockstep.tasks.models import inference
from lockstep.tasks.models.inference import Decoding
from lockstep.tasks.task import Task


class EngineShards(MemoryEstimate):
    """The memory with `gather: micro_batch`: weights, gradients and state are divided by the number of shards."""

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
        return run.with_keys("strategy", options=options)


class GatheredForward(DryRun):
    """The trial step of `FSDP2`, which gathers weights for a forward and replaces them by shards."""

    strategy: FSDP2

    @override
    def forwards(self, batch: StepBatch) -> list[Callable[[], None]]:
        strategy = self.strategy

        def call() -> None:  # the same examples on every rank; no backward frees the gathered weights
            with torch.no_grad(), strategy.precision.autocast():
                strategy.model(**strategy.task.first_inputs(strategy.world.device))
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
    """Recovery of `FSDP2`: builds its mesh for fewer ranks."""

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
        accelerate_type="fsdp",
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
    def resolve_class(cls, section: StrategySection, launch: LaunchSection) -> type[Strategy]:
        return ShardedOptimizer if fsdp.gather_option(section, launch) == fsdp.STEP else cls

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
        self.apply_shards(stepper.assigned(self.run.optim, self.model))
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
            join_alone("gloo")
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
        groups = stepper.groups(self.run.optim, self.model.named_parameters(), treated)
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
