"""ZeRO on DeepSpeed: data parallelism with sharded optimizer state, gradients and weights.

In: this rank's micro-batches. Out: the same update on every rank. DeepSpeed shards state and weights, places them as
configured, and gathers weights. `zero_steps.py` has the two ways of a step: in tree order, bitwise equal to `single`;
or, without `strategy.exact` and with bf16 weights, by DeepSpeed itself, equal within rounding. `zero1.py` to `zero3.py`
describe what each stage shards, `zero_config.py` creates DeepSpeed's config.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lockstep.config.plugins import require
from lockstep.config.sections import StrategySection
from lockstep.data.batch import MicroBatch, StepBatch, StepResult
from lockstep.data.job import Job, MemoryEstimate, StrategyFacts
from lockstep.distributed.randomness import seed_everything
from lockstep.distributed.world import World
from lockstep.strategies.engines import blocks, layers, zero_config
from lockstep.strategies.engines.side_effects import refuse_writes
from lockstep.strategies.engines.zero_agreement import keeps_bf16_weights
from lockstep.strategies.engines.zero_partition import join_group, own_activations, partition
from lockstep.strategies.engines.zero_state import EngineState
from lockstep.strategies.engines.zero_steps import EngineSteps, TreeSteps, gathering_in_time
from lockstep.strategies.engines.zero_sums import TurnSums
from lockstep.strategies.exact import stepper
from lockstep.strategies.exact.gradient_sum import most_held, most_held_in_turns
from lockstep.strategies.exact.step_totals import Statistics
from lockstep.strategies.exact.training_state import make_model
from lockstep.strategies.observer import observing
from lockstep.strategies.recovery import ShardRecovery
from lockstep.strategies.strategy import DryRun, Recomputation, Strategy
from lockstep.tasks.task import Task


class StageShards(MemoryEstimate):
    """The memory of a ZeRO stage: what the stage shards is divided by the number of ranks."""

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
        strategy, steps = self.strategy, self.strategy.steps
        assert isinstance(steps, TreeSteps), "`supports` refuses others"
        with steps.sums.aside(), strategy.totals.preserved():
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

    strategy: DeepSpeedStrategy

    @override
    def forwards(self, batch: StepBatch) -> list[Callable[[], None]]:
        return [] if self.strategy.stage == 3 or self.strategy.low_precision else super().forwards(batch)

    @override
    def __call__(self, batch: StepBatch, then: Callable[[], None] = lambda: None) -> None:
        with gathering_in_time(self.strategy):  # includes a trial evaluation
            super().__call__(batch, then)
        if not self.strategy.in_tree_order:
            self.strategy.weights.unlink()


class EngineRecovery(ShardRecovery):
    """Recovery of a DeepSpeed strategy: builds another engine for the surviving ranks."""

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
        chooses_links=False,
        accelerate_type="deepspeed",
        flat_parts=True,
        waits_inside=("forward", "backward", "reduction", "optimizer"),
    )
    stage: int  # of ZeRO
    engine: Any  # DeepSpeed's
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
        self.steps: TreeSteps | EngineSteps = TreeSteps(self) if self.in_tree_order else EngineSteps(self)
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
                names = layers.call_order(self.model, partial(layers.call_on_cpu, self.model, task))
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
        self.steps.build(stepper.build(self.run.optim, self.model))
        assert self.engine.zero_optimization_stage() == self.stage, self.engine.zero_optimization_stage()
        assert dist.get_world_size() == self.world.size
        self.statistics = Statistics(self.model)
        if self.stage == 3 and order and task.own_model:
            layers.hold_to(self.model, order)
        self.engine.train()

    def hold(self, optimizer: stepper.Stepper) -> None:
        """Use the started engine's weights and this optimizer of them."""
        self.weights = EngineState(self.engine, self.model, self.named, self.shapes, self.world, optimizer)
        self.weights.low_precision = self.low_precision
        self.set_optimizer(optimizer, self.weights)  # its engine keeps weights and state together

    # -- one update --------------------------------------------------------------------------------------------------

    @override
    def own_micro_batches(self) -> Iterable[int]:
        if self.in_tree_order and self.stage > 1:
            return TurnSums.own_leaves(self.run.micro_batches, self.world)
        return super().own_micro_batches()

    @override
    def train_step(self, batch: StepBatch, learning_rate: float) -> StepResult:
        with gathering_in_time(self):
            return self.steps.train(batch, learning_rate)

    def run_micro_batch(self, micro: MicroBatch, targets: float) -> Tensor:
        with self.phases("forward"), self.precision.autocast(not self.low_precision), self.saving:
            loss = self.totals.loss_sum(self.task, self._run(micro.inputs), micro, self.observer)
        with self.phases("backward"):
            self.steps.backward(loss, targets)
        return loss.detach()

    def _run(self, inputs: Mapping[str, Tensor]) -> Any:
        with torch.autocast(self.world.device.type, enabled=False):  # the model has its own autocast, see `build`
            return self.engine(**inputs)

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
