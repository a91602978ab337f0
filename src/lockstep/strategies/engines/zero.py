"""ZeRO on DeepSpeed: data parallelism with sharded optimizer state, gradients and weights.

In: this rank's micro-batches. Out: the same update on every rank. DeepSpeed shards state and weights, places them as
configured, and gathers weights; gradients are summed over the tree (`zero_sums.py`), and each rank's optimizer updates
its shard, so that the update is bitwise equal to `single`. Without `strategy.exact`, and with bf16 weights, DeepSpeed
itself reduces and clips, in an order that depends on the number of ranks: equal within rounding. `zero1.py` to
`zero3.py` describe what each stage shards, `zero_config.py` creates DeepSpeed's config.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from lockstep.config.plugins import require
from lockstep.config.run import RunError
from lockstep.config.sections import StrategySection
from lockstep.data.batch import MicroBatch, StepBatch, StepResult
from lockstep.data.job import Job, MemoryEstimate, StrategyFacts
from lockstep.distributed.randomness import seed_everything
from lockstep.distributed.world import World
from lockstep.strategies.dry_run import DryRun
from lockstep.strategies.engines import blocks, layers, zero_config, zero_graph
from lockstep.strategies.engines.side_effects import refuse_writes
from lockstep.strategies.engines.zero_agreement import keeps_bf16_weights
from lockstep.strategies.engines.zero_partition import join_group, own_activations, partition
from lockstep.strategies.engines.zero_state import EngineState, flat_weights
from lockstep.strategies.engines.zero_sums import CutGradient, FlatCuts, LocalSums, Owned, OwnedRange, TurnSums
from lockstep.strategies.exact import parameter_groups, stepper
from lockstep.strategies.exact.make_model import ALIGNED, make_model
from lockstep.strategies.exact.reduction_tree import most_held, most_held_in_turns
from lockstep.strategies.exact.statistics import Statistics
from lockstep.strategies.exact.update import Part
from lockstep.strategies.observer import listening, observing
from lockstep.strategies.recovery import ShardRecovery
from lockstep.strategies.single import call_on_cpu
from lockstep.strategies.strategy import Recomputation, Strategy
from lockstep.tasks.task import Task


@dataclass(frozen=True)
class EngineGradient:
    """A gradient reduced by DeepSpeed; `whole` gathers it."""

    gather: Callable[[], dict[str, Tensor]]

    def whole(self, world: World) -> dict[str, Tensor]:
        """Gather the whole gradient by parameter. Collective."""
        return self.gather()


class StageShards(MemoryEstimate):
    """What a stage of ZeRO shards is divided."""

    @override
    def bytes_held(self, job: Job, state: float | None = None) -> dict[str, float]:
        stage, options = zero_of(job)
        return zero_config.shared_out(super().bytes_held(job, state), job.processes, stage, keeps_bf16_weights(options))

    @override
    def partial_sums(self, job: Job) -> float:
        leaves = job.run.micro_batches
        if not job.same_bits:
            return 0.0
        if zero_of(job)[0] == 1:
            return 4.0 * (most_held(leaves, job.processes) - 1)
        return 4.0 * (most_held_in_turns(leaves, range(leaves), job.processes) - 1) / job.processes


class ShardedRecomputation(Recomputation):
    """All ranks compute together, because computing gathers weights."""

    together = True
    strategy: DeepSpeedStrategy

    @override
    @classmethod
    def supports(cls, job: Job) -> bool:
        return job.same_bits

    @override
    def compute(self, step: int, micro: MicroBatch, targets: float) -> None:
        strategy = self.strategy
        with strategy.sums.aside(), strategy.totals.preserved():
            seed_everything(strategy.run.seed, step, micro.index)
            with observing(strategy.observer, micro.index, strategy.model):
                strategy.run_micro_batch(micro, targets)

    @override
    def replicated_weights(self) -> list[Tensor]:
        """Return the weights that DeepSpeed does not shard."""
        return [p.detach() for p in self.strategy.model.parameters() if self.strategy.stage < 3 and p.requires_grad]

    @override
    def replicated_state(self) -> list[Tensor]:
        return [*self.replicated_weights(), *self.strategy.model.buffers()]


class EngineDryRun(DryRun):
    """The trial step of a DeepSpeed engine."""

    @override
    def forwards(self, batch: StepBatch) -> list[Callable[[], None]]:
        return [] if self.strategy.stage == 3 or self.strategy.low_precision else super().forwards(batch)

    @override
    def __call__(self, batch: StepBatch, then: Callable[[], None] = lambda: None) -> None:
        with self.strategy._gathering_in_time():  # includes a trial evaluation
            super().__call__(batch, then)
        if not self.strategy.in_tree_order:
            self.strategy.weights.unlink()


class EngineRecovery(ShardRecovery):
    """Another engine, for the ranks that are left."""

    @override
    @classmethod
    def survives(cls, job: Job) -> bool:
        return True  # each shard is on one rank only


class DeepSpeedStrategy(Strategy):
    """A strategy with a DeepSpeed engine, however it is created. After a rank failure, the surviving ranks create
    another engine from copies of the state in memory."""

    needs = ("deepspeed",)
    exact = True
    facts = StrategyFacts(
        chooses_links=False, flat_parts=True, waits_inside=("forward", "backward", "reduction", "optimizer")
    )
    stage: int  # of ZeRO
    options_key: ClassVar[str] = "strategy.options"
    memory = StageShards()
    recomputation = ShardedRecomputation
    recovery = EngineRecovery
    statistics: Statistics
    weights: EngineState

    @override
    @classmethod
    def rounding(cls, job: Job) -> float:
        run = job.run
        if keeps_bf16_weights(cls.options_of(run.strategy)):
            return 0.1
        return 1e-4 if run.precision == "fp32" else 1e-3

    @override
    @classmethod
    def inexact_options(cls, section: StrategySection) -> list[str]:
        return [f"{cls.options_key}.{name}" for name in zero_config.other_arithmetic(cls.options_of(section))]

    @override
    @classmethod
    def check_prepared(cls, job: Job) -> None:
        if cls.stage_of(job.run.strategy) == 3:
            layers.check_same_weights(job)

    @classmethod
    def stage_of(cls, section: StrategySection) -> int:
        """Return the ZeRO stage."""
        return cls.stage

    @classmethod
    def options_of(cls, section: StrategySection) -> Mapping[str, Any]:
        """Return the user's part of DeepSpeed's config, from `options_key` in the run file."""
        return section.options

    @abstractmethod
    def start_engine(self, optimizer: stepper.Stepper) -> Any:
        """Return a `deepspeed.DeepSpeedEngine` around `self.model` and `optimizer`, configured by
        `self.config`."""

    def __init__(self, job: Job, world: World) -> None:
        super().__init__(job, world)
        self.dry_run = EngineDryRun(self)
        self.saving: AbstractContextManager[Any] = nullcontext()  # around forward
        self.in_tree_order = job.same_bits
        self.stage = self.stage_of(job.run.strategy)
        if self.in_tree_order and world.size == 1:
            self.stage = min(self.stage, 2)  # a single rank gathers nothing

    # -- building ----------------------------------------------------------------------------------------------------

    @override
    def build(self, task: Task) -> None:
        self.task = task
        zero_config.prepare_import(self.world.device.type)
        join_group(self.world)
        receives = self.stage == 3 and not self.world.is_main  # its shards come from rank 0, parameter by parameter
        self.model = make_model(task, empty=receives)
        self.shapes = {n: p.shape for n, p in self.model.named_parameters()}
        options = self.options_of(self.run.strategy)
        self.low_precision = keeps_bf16_weights(options)
        every = sum(shape.numel() for shape in self.shapes.values())
        self.config = zero_config.config(self.run.optim, self.stage, every, options)
        if self.in_tree_order:
            self.config["zero_optimization"]["memory_efficient_linear"] = False  # replaced by `SavedByName`
        if self.stage == 3:
            order: list[str] = []  # call order of modules in a forward on rank 0

            def call() -> None:
                names = layers.call_order(self.model, partial(call_on_cpu, self.model, task))
                if self.model.training:  # it is called in evaluation mode, too, where a model may use other weights
                    order[:] = names

            refuse_writes(self.model, self.world, call, "strategy.name: zero3", "zero2 or ddp")
            order = self.world.broadcast(order)
            if not self.in_tree_order and task.own_model:
                layers.check_read_within(self.model, order)
            own_activations(self.model)
            dtype = torch.bfloat16 if self.low_precision else torch.float32
            partition(self.model, self.world, self.config, dtype)
        else:
            self.model.to(self.world.device)
        blocks.prepare(self.run.model, self.model, self.run.strategy.tensor_leaves)
        if self.run.precision == "bf16" and not self.low_precision:
            # Inside the engine, which disables an autocast around itself. Stage 3 frees the bf16 copy of a weight with
            # the weight; but the gradient of a weight that is used twice differs in its bits if each use has its own
            # copy.
            cached = self.stage < 3 or self.in_tree_order
            cast = torch.autocast(self.world.device.type, torch.bfloat16, cache_enabled=cached)
            self.model.forward = cast(self.model.forward)
        self.named = dict(self.model.named_parameters())
        self.trained = {n: p for n, p in self.named.items() if p.requires_grad}
        self.grad_counts = dict.fromkeys(self.trained, 0)  # number of this rank's micro-batches with a gradient
        optimizer = stepper.build(self.run.optim, self.model)
        if self.in_tree_order:
            self._build_in_tree_order(optimizer)
        else:
            for name, parameter in self.trained.items():
                parameter.register_post_accumulate_grad_hook(lambda _, name=name: self._count(name))
            self.engine = self.start_engine(optimizer)
            self._hold(optimizer)
            if self.stage == 3 and task.own_model:
                zero_graph.wait_where_read(self.model, self.engine.optimizer.parameter_offload.get_param_coordinator())
        assert self.engine.zero_optimization_stage() == self.stage, self.engine.zero_optimization_stage()
        assert dist.get_world_size() == self.world.size
        self.statistics = Statistics(self.model)
        if self.stage == 3 and order and task.own_model:
            layers.hold_to(self.model, order)
        self.engine.train()

    def _hold(self, optimizer: stepper.Stepper) -> None:
        """Use the weights of the engine that was started, and an optimizer of them."""
        self.weights = EngineState(self.engine, self.model, self.named, self.shapes, self.world, optimizer)
        self.weights.low_precision = self.low_precision
        self.set_optimizer(optimizer, self.weights)  # its engine keeps weights and state together

    def _build_in_tree_order(self, optimizer: stepper.Stepper) -> None:
        """Start the engine with `optimizer`, and replace its reduction and update. Collective."""
        for group in optimizer.param_groups:  # parameters that would misalign their successor come last
            group["params"].sort(key=lambda p: p.numel() * p.element_size() % ALIGNED != 0)
        treated = parameter_groups.assigned(self.run.optim, self.model)
        self.engine = self.start_engine(optimizer)
        # As within DeepSpeed's `coalesce_grad_reduction`, so that it does not reduce gradients.
        self.engine.inside_no_sync_ctxt = self.engine.optimizer._coalesce_grad_reduction = True
        self.engine.optimizer.optimizer.state.clear()  # DeepSpeed filled it; the stepper has the state
        trained, followers = self.trained, list[tuple[nn.Parameter, nn.Parameter]]()
        shapes = {name: self.shapes[name] for name in trained}
        self.flat_cuts = FlatCuts(self.world, shapes, flat_weights(self.engine), self._owned(trained))
        if self.stage == 3:
            leaves: Mapping[str, nn.Parameter] = trained
            zero_graph.keep_sums(self.model)
            coordinator = self.engine.optimizer.parameter_offload.get_param_coordinator()
            self.saving = zero_graph.SavedByName(self.model, coordinator)
        else:
            leaves, followers = self._compute_with_own(trained)
        sums = LocalSums if self.stage == 1 else TurnSums
        bucket = 4 * int(self.config["zero_optimization"]["reduce_bucket_size"])
        self.sums = sums(self.world, [*leaves.values()], self.flat_cuts.by_rank, bucket)
        groups = parameter_groups.groups(self.run.optim, self.flat_cuts.parts.items(), treated)
        self._hold(stepper.Stepper(self.run.optim, groups))
        self.weights.flat_cuts, self.weights.followers = self.flat_cuts, followers

    def _owned(self, trained: Mapping[str, Any]) -> list[Owned]:
        """Return, by rank, the range of each parameter that DeepSpeed assigns to the rank, and its position in the flat
        tensors."""
        inner, ranks = self.engine.optimizer, range(self.world.size)
        if self.stage == 3:
            groups, names = inner.fp16_groups, {id(p): name for name, p in trained.items()}
            owned: list[Owned] = [{} for _ in ranks]
            for flat, group in enumerate(groups):
                offset = 0
                for parameter in group:
                    size, whole = parameter.partition_numel(), parameter.ds_numel
                    for rank in ranks if id(parameter) in names else ():
                        start = min(rank * size, whole)
                        part = OwnedRange(start, min(size, whole - start))
                        owned[rank][names[id(parameter)]] = part, flat, offset
                    offset += size
            return [{name: each[name] for name in trained} for each in owned]
        places = {
            id(p): (flat, offset)
            for flat, group in enumerate(inner.round_robin_bit16_groups)
            for p, offset in zip(group, inner.round_robin_bit16_offsets[flat], strict=True)
        }
        owned = [
            {name: _of_flat(p, *places[id(p)], inner.partition_size, rank) for name, p in trained.items()}
            for rank in ranks
        ]
        own = owned[self.world.rank]
        assert all(_fragment(p._hp_mapping) in (own[name], None) for name, p in trained.items()), "other ranges"
        return owned

    def _compute_with_own(
        self, trained: Mapping[str, nn.Parameter]
    ) -> tuple[Mapping[str, nn.Parameter], list[tuple[nn.Parameter, nn.Parameter]]]:
        """Replace the model's parameters by lockstep's, which share memory with DeepSpeed's, or, if those are not
        aligned (`make_model` explains why they must be), are copied after every update."""
        own, followers = {name: nn.Parameter(p.detach()) for name, p in trained.items()}, []
        for name, parameter in own.items():
            if parameter.data_ptr() % ALIGNED:
                parameter.data = parameter.data.clone()
                followers.append((parameter, trained[name]))
        by_identity = {id(p): own[name] for name, p in trained.items()}
        for module in self.model.modules():
            for name, theirs in module._parameters.items():
                if id(theirs) in by_identity:
                    module._parameters[name] = by_identity[id(theirs)]
        return own, followers

    # -- one update --------------------------------------------------------------------------------------------------

    @override
    def own_micro_batches(self) -> Iterable[int]:
        if self.in_tree_order and self.stage > 1:
            return TurnSums.own_leaves(self.run.micro_batches, self.world)
        return super().own_micro_batches()

    @override
    def train_step(self, batch: StepBatch, learning_rate: float) -> StepResult:
        step = self._step_in_tree_order if self.in_tree_order else self._step_of_engine
        with self._gathering_in_time():
            return step(batch, learning_rate)

    def _step_in_tree_order(self, batch: StepBatch, learning_rate: float) -> StepResult:
        losses = self.totals.start(batch.count)
        self.sums.start(batch.count)
        self.statistics.start(batch.count)
        for micro in batch.micro_batches:
            self.sums.begin(micro.index)
            seed_everything(self.run.seed, batch.step, micro.index)
            with observing(self.observer, micro.index, self.model):
                losses[micro.index] = self.run_micro_batch(micro, batch.targets)
            self.sums.end()
            self.statistics.take(micro)
        if len(batch.micro_batches) < -(-batch.count // self.world.size) and self.stage > 1:
            self._level(batch)
        with self.phases("reduction"):
            gradients = self.sums.finish()
            losses, uses = self.totals.all_reduce(losses, self.sums.grad_counts)
        if self.stage == 3:
            self._refuse_unequal_uses(dict(zip(self.flat_cuts.parts, uses, strict=True)), batch.count)
        parts = [Part(n, p, g) for (n, p), g in zip(self.flat_cuts.parts.items(), gradients, strict=True)]
        gradient = CutGradient(parts, list(self.flat_cuts.parts), self.flat_cuts, self.world)
        return self.optimizer_step(batch, gradient, learning_rate, losses, uses)

    def _level(self, batch: StepBatch) -> None:
        """Run a turn in which this rank has no micro-batch but others do: receive what they send. In stage 3, also
        gather the weights with them. Collective."""
        self.sums.begin(None)
        if self.stage == 3:
            with listening(self, None):
                self.run_micro_batch(batch.micro_batches[-1].blank(), batch.targets)
            self.statistics.reset()
        self.sums.end()

    def _step_of_engine(self, batch: StepBatch, learning_rate: float) -> StepResult:
        losses = self.totals.start(batch.count)
        micro_batches = self._levelled(batch)
        self.grad_counts = dict.fromkeys(self.grad_counts, 0)
        self.statistics.start(batch.count)
        for i, micro in enumerate(micro_batches):
            self.counting = i < len(batch.micro_batches)  # padding micro-batches do not count
            seed_everything(self.run.seed, batch.step, micro.index)
            self.engine.set_gradient_accumulation_boundary(i == len(micro_batches) - 1)
            with observing(self.observer, micro.index, self.model) if self.counting else listening(self, None):
                losses[micro.index] += self.run_micro_batch(micro, batch.targets)
            if i < len(batch.micro_batches):
                self.statistics.take(micro)
            else:
                self.statistics.reset()
        with self.phases("reduction"):
            losses, uses = self.totals.all_reduce(losses, list(self.grad_counts.values()))
            self.update.finite.check(batch.step, losses, losses.sum())
        unused = self._unused(uses, batch.count)
        if self.observer is not None:
            self.observer.reduced(EngineGradient(self._whole_gradient))
        stepper.set_rate(self.update.stepper, learning_rate)
        with self.phases("optimizer"):
            frozen = [
                (name, key, self.weights.whole(name, key)) for name in unused for key in (None, *self.weights.moments())
            ]
            self.engine.step()
            for name, key, whole in frozen:  # undo decay and momentum, which DeepSpeed applied with zero gradients
                self.weights.set_whole(name, whole, key)
            if frozen:
                self.weights.refresh()
        norm = torch.as_tensor(self.engine.get_global_grad_norm(), dtype=torch.float32, device=self.world.device)
        self.update.finite.check(batch.step, losses, norm)
        self.statistics.finish(self.data_parallel.all_reduce)
        return StepResult(losses.sum() / batch.targets, norm, loss_sums_of=self.totals.loss_sums_of)

    def run_micro_batch(self, micro: MicroBatch, targets: float) -> Tensor:
        with self.phases("forward"), self.precision.autocast(not self.low_precision), self.saving:
            loss = self.totals.loss_sum(self.task, self._run(micro.inputs), micro, self.observer)
        with self.phases("backward"):
            if self.in_tree_order:
                self.engine.backward(loss / targets, scale_wrt_gas=False)
            else:  # DeepSpeed averages over ranks: multiply back
                self.engine.backward(loss * self.world.size / targets, scale_wrt_gas=False)
        return loss.detach()

    def _count(self, name: str) -> None:
        self.grad_counts[name] += self.counting

    def _unused(self, uses: list[int], micro_batches: int) -> list[str]:
        """Return the parameters without a gradient from any micro-batch. Errors: `RunError`, on every rank, if only
        some micro-batches gave one, because the ranks then reduced different parameters together."""
        counts = dict(zip(self.grad_counts, uses, strict=True))
        self._refuse_unequal_uses(counts, micro_batches)
        return [name for name, count in counts.items() if not count]

    def _refuse_unequal_uses(self, counts: Mapping[str, int], micro_batches: int) -> None:
        """Refuse steps in which only some micro-batches used a weight. Errors: `RunError`, on every rank."""
        name = next((name for name, count in counts.items() if 0 < count < micro_batches), None)
        if name is not None and self.world.size > 1:
            raise RunError(
                "LS4120",
                "strategy.name: DeepSpeed needs every micro-batch of a step to use the same weights, but only "
                f"{counts[name]} of {micro_batches} used {name}; no weight was updated. Use strategy.name=ddp "
                "or fsdp2",
            )

    @contextmanager
    def _gathering_in_time(self) -> Iterator[None]:
        """A context that replaces DeepSpeed's error of thousands of characters, raised if weights are used in another
        order than in the first step, by a `RunError`."""
        try:
            yield
        except RuntimeError as error:
            if not str(error).startswith("tracing error"):
                raise
            raise layers.not_in_time(self.run.model.checkpoint_activations) from error

    def _levelled(self, batch: StepBatch) -> list[MicroBatch]:
        """Return this rank's micro-batches, padded to the largest number on any rank: gradients are reduced after every
        micro-batch."""
        most = -(-batch.count // self.world.size)
        blank = batch.micro_batches[-1].blank()
        return batch.micro_batches + [blank] * (most - len(batch.micro_batches))

    def _run(self, inputs: Mapping[str, Tensor]) -> Any:
        with torch.autocast(self.world.device.type, enabled=False):  # the model has its own autocast, see `build`
            return self.engine(**inputs)

    def _whole_gradient(self) -> dict[str, Tensor]:
        """Return the whole gradient by parameter name on rank 0; empty elsewhere. Collective."""
        from deepspeed.utils import safe_get_full_grad

        gradients = {}
        for name, parameter in self.trained.items():
            gradient = safe_get_full_grad(parameter)
            if self.world.is_main:
                gradients[name] = gradient.float().clone()
        return gradients

    @override
    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        self.engine.eval()
        with torch.no_grad():
            logits = self._run(inputs).logits
        self.engine.train()
        return logits

    @override
    def close(self) -> None:
        self.engine.destroy()
        del self.engine, self.model, self.update, self.state, self.weights, self.named


class Zero(DeepSpeedStrategy):
    """`strategy.options` is a DeepSpeed config, without the settings that the run file has keys for."""

    @override
    @classmethod
    def check(cls, job: Job) -> None:
        run = job.run
        require(cls.needs, f"strategy.name: zero{cls.stage}")
        layers.check_layers(job, "DeepSpeed")
        if cls.stage == 3:
            layers.check_gathered(job)
            layers.check_writes(job, "strategy.name", "ZeRO-3", "strategy.name=zero2 or ddp")
        zero_config.check(job, cls.stage, run.strategy.options)

    @override
    def start_engine(self, optimizer: stepper.Stepper) -> Any:
        import deepspeed

        return deepspeed.initialize(model=self.model, optimizer=optimizer, config=self.config)[0]


def zero_of(job: Job) -> tuple[int, Mapping[str, Any]]:
    """Return the stage of a job's ZeRO, and the user's part of DeepSpeed's config."""
    assert issubclass(job.strategy, DeepSpeedStrategy), job.strategy
    return job.strategy.stage_of(job.run.strategy), job.strategy.options_of(job.run.strategy)


def _of_flat(parameter: Tensor, flat: int, offset: int, sizes: Sequence[int], rank: int) -> tuple[OwnedRange, int, int]:
    """Return the part of a parameter, at an offset of a flat tensor, that lies within a rank's part of that tensor."""
    begin = int(sizes[flat]) * rank
    start = max(offset, begin)
    length = max(0, min(offset + parameter.numel(), begin + int(sizes[flat])) - start)
    return (OwnedRange(start - offset, length), flat, start - begin) if length else (OwnedRange(0, 0), flat, 0)


def _fragment(parameter: Any) -> tuple[OwnedRange, int, int] | None:
    """Return DeepSpeed's own `tensor_fragment` of a parameter, None if this rank has no part of it."""
    if parameter is None:
        return None
    whole, flat = parameter.lp_fragment_address, parameter.hp_fragment_address
    return OwnedRange(whole.start, whole.numel), parameter.param_group_index, flat.start
