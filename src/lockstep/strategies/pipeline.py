"""Pipeline parallelism with torch.distributed.pipelining: each rank holds some of the layers and sends hidden states.

In: the micro-batches of this rank's pipeline, on each of its stages, so that shapes and masks need no communication.
Out: the same update as `single.py`. Forward and backward of a micro-batch run stage by stage, in the order of torch's
schedule; each stage adds its part of a leaf to its own tree. Several pipelines divide the
micro-batches among them and sum their trees like `allreduce.py`.

`cuts.py` splits the model; `strategies/engines/pipelining.py` runs one stage of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from typing_extensions import override

from lockstep.config.run import RunError
from lockstep.config.sections import StrategySection
from lockstep.data.batch import MicroBatch, StepBatch, StepResult
from lockstep.data.job import Job, MemoryEstimate, StrategyFacts
from lockstep.distributed.hardware import share_gpus
from lockstep.distributed.randomness import seed_everything
from lockstep.distributed.sharded import Saved, gather
from lockstep.distributed.world import DataShard, World, all_reduce
from lockstep.strategies.engines import blocks, cuts, layers, pipelining
from lockstep.strategies.engines.cuts import Cut
from lockstep.strategies.engines.pipelining import (
    Links,
    Stage,
    StageModule,
    StageWeights,
    random_state,
    run_schedule,
    skip_negotiation,
)
from lockstep.strategies.engines.side_effects import refuse_own_tensors, refuse_writes
from lockstep.strategies.exact import stepper, training_state
from lockstep.strategies.exact.exchange import Exchange, all_reduce_flat, buckets
from lockstep.strategies.exact.gradient_sum import most_held, share
from lockstep.strategies.exact.reduce_schedule import links
from lockstep.strategies.exact.training_state import TrainedWeights, TrainingState, make_model
from lockstep.strategies.exact.update import Gradient, Part
from lockstep.strategies.recovery import ShardRecovery
from lockstep.strategies.strategy import Strategy, WithoutForwards, all_reduce_in
from lockstep.tasks.task import Task
from lockstep_trace.coded import quantity

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B}
BUCKET_BYTES = 25 * 2**20  # bucket size between pipelines


class HeldStages(TrainedWeights):
    """The weights of a rank that holds some stages of a model."""

    def __init__(self, cut: Cut, parts: Sequence[cuts.StagePart], stage_weights: Sequence[StageWeights]) -> None:
        self._cut, self._parts, self._stage_weights = cut, parts, stage_weights
        self.model = cut.whole  # without memory: its names and shapes
        self.named = {}  # a weight that several stages use has one tensor in each

    @override
    def changed(self) -> None:
        """Do nothing: forward reads what the optimizer updates."""

    @override
    def updated_parts(self) -> list[tuple[str, Tensor]]:
        return [(name, p.detach()) for weights in self._stage_weights for name, p in weights.parameters.items()]

    @override
    def to_save(self) -> dict[str, Tensor]:
        """Return weights and buffers of which this rank has the first stage."""
        tensors = [(part, name) for part in self._parts for name in part.names]
        return {n: part.tensor(n).detach() for part, n in tensors if part.stage == self._cut.holders[n][0]}


class StageState(TrainingState):
    """The stages of a rank. A tied weight is saved by the first stage that has it, and loaded by all."""

    def __init__(self, strategy: Pipeline, optimizer: stepper.Stepper) -> None:
        super().__init__(strategy.weights, optimizer, strategy.precision.loss_scale, strategy.world)
        self.stages, self.cut = list(zip(strategy.cut_parts, strategy.stage_weights, strict=True)), strategy.cut
        self.place = strategy.stage_rank, strategy.ranks

    @override
    @property
    def part(self) -> tuple[int, int]:
        return self.place

    @override
    def sharded_state_dict(self) -> dict[str, Tensor]:
        owned = {name for _, weights in self.stages for name in weights.owned}
        return training_state.tensors_to_save(self.weights.to_save(), self.stepper, self.scaling, owned)

    @override
    def load_sharded_state_dict(self, saved: Saved) -> None:
        for part, weights in self.stages:
            tensors = {name: part.tensor(name).detach() for name in part.names}
            training_state.load_tensors(saved, tensors, self.stepper, self.scaling, weights.parameters)

    @override
    def export(self) -> dict[str, Tensor] | None:
        weights = gather(self.weights.to_save(), self.world)
        if not self.world.is_main:
            return None
        return {key: weights[self.cut.canonical[key]] for key in self.cut.whole.state_dict()}


class StageMemory(MemoryEstimate):
    """The memory of pipeline stages: everything is divided among them."""

    @override
    def bytes_held(self, job: Job, state: float | None = None) -> dict[str, float]:
        stages = job.strategy.stages_of(job.run.strategy, job.processes)
        return {name: each / stages for name, each in super().bytes_held(job, state).items()}

    @override
    def partial_sums(self, job: Job) -> float:
        if not job.run.strategy.exact:
            return 0.0
        stages = job.strategy.stages_of(job.run.strategy, job.processes)
        return 4.0 * (most_held(job.run.micro_batches, job.processes // stages, whole_leaf=True) - 1) / stages


class StageRecovery(ShardRecovery):
    """Recovery of pipelines: builds them for the surviving ranks."""

    @override
    @classmethod
    def fit_options(cls, section: StrategySection, processes: int) -> Mapping[str, Any]:
        """Return the options with the stages of the run file, or with one pipeline of all processes."""
        stages = section.options.get("stages")
        divides = stages is None or not processes % stages
        return section.options if divides else {**section.options, "stages": processes}


class Pipeline(Strategy):
    """`strategy.options`: `stages` (ranks per pipeline; default: all processes), `schedule` (gpipe, 1f1b, interleaved;
    default 1f1b), `stages_per_rank` (interleaved only; default 2). A rank is numbered stage rank x pipelines +
    pipeline."""

    exact = True
    needs = ("torch>=2.13",)
    memory = StageMemory()
    recovery = StageRecovery
    facts = StrategyFacts(waits_inside=("forward+backward", "reduction", "optimizer"))

    @override
    @classmethod
    def stages_of(cls, section: StrategySection, processes: int) -> int:
        return int(section.options.get("stages", processes))

    @override
    @classmethod
    def check(cls, job: Job) -> None:
        run, processes = job.run, job.processes
        if not pipelining.AVAILABLE:
            raise RunError(
                "LS4431",
                f"strategy.name: pipeline needs torch 2.13 or newer, and {torch.__version__} is installed; install "
                "torch>=2.13, or use strategy.name=fsdp2",
            )
        options = run.strategy.options
        if unknown := set(options) - {"stages", "schedule", "stages_per_rank"}:
            raise RunError(
                "LS4240",
                f"strategy.options: pipeline has no option {', '.join(sorted(map(str, unknown)))}; it has "
                "stages, schedule and stages_per_rank",
            )
        if processes < 2:
            raise RunError(
                "LS4241", "strategy.name: pipeline needs two processes or more; use single, or launch.processes=2"
            )
        if share_gpus(run.launch):
            raise RunError(
                "LS4242",
                "launch.processes_per_gpu: pipeline stages send between GPUs, which gloo does not support; remove "
                "launch.processes_per_gpu, or try the pipeline with launch.device=cpu",
            )
        if run.model.adapter:
            raise RunError(
                "LS4243",
                "strategy.name: pipeline cannot split a model with model.adapter; use strategy.name=ddp or fsdp2",
            )
        ranks, schedule, each = _shape(run.strategy, processes)
        if processes % ranks:
            raise RunError(
                "LS4244",
                f"strategy.options.stages: {ranks} stages do not divide {processes} processes; choose a number "
                "of stages that does",
            )
        layers = cuts.count_sequential_layers(job) if job.task.own_model else cuts.layers_of(job)
        if ranks * each > layers:
            raise _too_many(run.strategy, ranks, each, layers)
        pipelines = processes // ranks
        for each_has in {len(share(run.micro_batches, i, pipelines)) for i in range(pipelines)}:
            fault = _too_few(each_has, ranks, schedule)
            if fault is not None:
                raise RunError(
                    "LS4246",
                    f"micro_batches: {run.micro_batches} on {quantity(pipelines, 'pipeline')} are {each_has} "
                    f"each, but {fault}; "
                    f"change micro_batches, strategy.options.stages or strategy.options.schedule",
                )

    def __init__(self, job: Job, world: World) -> None:
        super().__init__(job, world)
        self.dry_run = WithoutForwards(self)  # each rank calls a part of the model
        # the last stages have the losses, every stage its weights' gradients
        self.totals.sum_over_ranks = world.all_reduce
        if world.joining:  # no process group yet
            return
        self.ranks, self.schedule_name, each = _shape(job.run.strategy, world.size)
        self.pipelines = world.size // self.ranks
        self.stages = self.ranks * each
        self.stage_rank, self.pipeline = divmod(world.rank, self.pipelines)
        self.data_parallel = DataShard(self.pipeline, self.pipelines, self.all_reduce_stage)

    # -- building ----------------------------------------------------------------------------------------------------

    @override
    def build(self, task: Task) -> None:
        self.task = task
        with self.world.forming():
            self.make_groups()
        model = make_model(task, empty=self.build_empty or not self.world.is_main)
        refuse_own_tensors(model, "strategy.name: pipeline", "strategy.name=ddp")
        if not self.build_empty:
            call = partial(layers.call_on_cpu, model, task)
            refuse_writes(model, self.world, call, "strategy.name: pipeline", "strategy.name=ddp")
        self.cut = (cuts.SequentialCut if task.own_model else Cut)(model, self.stages)
        self.cut_parts = [self.cut.part(i) for i in range(self.stage_rank, self.stages, self.ranks)]
        self.receive_weights(model)
        del model
        models_held = [part.model for part in self.cut_parts]
        for each in models_held:
            blocks.prepare(self.run.model, each, self.run.strategy.tensor_leaves)
        self.model = models_held[0] if len(models_held) == 1 else nn.ModuleList(models_held)
        self.model.train()
        self.order = [n for n, p in self.cut.whole.named_parameters() if p.requires_grad]
        busy = {stage for name in self.order for stage in self.cut.holders[name]}
        if idle := sorted(set(range(self.stages)) - busy):
            raise RunError(
                "LS4247",
                f"model.freeze: stage {idle[0]} of {self.stages} of the pipeline has no weight left to train; freeze "
                "fewer, use fewer strategy.options.stages, or strategy.name=ddp or fsdp2",
            )
        self.links = Links(self.cut, self.ranks, self.pipelines, self.pipeline, self.side)
        self.stage_weights = [StageWeights(part, self.order, self.links) for part in self.cut_parts]
        self.weights = HeldStages(self.cut, self.cut_parts, self.stage_weights)
        stepped = {id(p): (n, p) for weights in self.stage_weights for n, p in weights.parameters.items()}  # each once
        treated = stepper.assigned(self.run.optim, self.cut.whole)
        groups = stepper.groups(self.run.optim, stepped.values(), treated)
        optimizer = stepper.Stepper(self.run.optim, groups)
        self.set_optimizer(optimizer, StageState(self, optimizer))
        bytes_of_state = random_state(self.world.device).numel()
        self.engine = [
            Stage(
                StageModule(weights.part, self.loss, self.begin), weights, bytes_of_state, self.world.device, self.pipe
            )
            for weights in self.stage_weights
        ]
        micro_batches = len(share(self.run.micro_batches, self.pipeline, self.pipelines))
        kind: Any = SCHEDULES[self.schedule_name]
        stages = self.engine if self.schedule_name == "interleaved" else self.engine[0]
        self.schedule = kind(stages, micro_batches, loss_fn=lambda loss, target: loss, scale_grads=False)
        skip_negotiation(self.schedule, several=self.schedule_name == "interleaved")

    def make_groups(self) -> None:
        """Create the groups: `pipe` for torch's engine, `side` for lockstep's messages along the pipeline, `across` for
        the same stage of all pipelines."""
        for i in range(self.pipelines):
            members = range(i, self.world.size, self.pipelines)
            pipe, side = (self.world.group(members) for _ in range(2))
            if i == self.pipeline:
                self.pipe, self.side = pipe, side
        for i in range(self.ranks):
            across = self.world.group(range(i * self.pipelines, (i + 1) * self.pipelines))
            if i == self.stage_rank:
                self.across = across

    def receive_weights(self, model: nn.Module) -> None:
        """Broadcast rank 0's weights, one tensor at a time; every rank keeps its own. Collective."""
        source = dict([*model.named_parameters(), *model.named_buffers()])
        for name, shape in [*self.cut.whole.named_parameters(), *self.cut.whole.named_buffers()]:
            if self.world.is_main and not self.build_empty:
                tensor = source[name].detach().to(self.world.device).contiguous()
            else:
                tensor = torch.empty(shape.shape, dtype=shape.dtype, device=self.world.device)
            if not self.build_empty:
                dist.broadcast(tensor, 0)
            for part in self.cut_parts:
                part.place(name, tensor)

    # -- a step ------------------------------------------------------------------------------------------------------

    @override
    def train_step(self, batch: StepBatch, learning_rate: float) -> StepResult:
        self.batch = batch
        self.losses = self.totals.start(batch.count)
        micro_batches = batch.micro_batches
        for stage in self.engine:
            stage.expect(micro_batches, batch.count, bool(self.run.strategy.exact), self.observer)
        with self.phases("forward+backward"), self.precision.autocast():
            run_schedule(self.schedule, micro_batches)
        with self.phases("reduction"):
            gradients = self.reduce()
            own = [sum(weights.grad_counts.get(name, 0) for weights in self.stage_weights) for name in self.order]
            losses, uses = self.totals.all_reduce(self.losses, own)
        return self.optimizer_step(batch, self.whole_gradient(gradients), learning_rate, losses, uses)

    def begin(self, micro: MicroBatch) -> None:
        """Seed the micro-batch's random numbers, as on a single process; later stages continue from the first stage's
        torch generator."""
        seed_everything(self.run.seed, self.batch.step, micro.index)

    def loss(self, outputs: Any, micro: MicroBatch) -> Tensor:
        """Return the scalar on which the last stage calls backward."""
        loss = self.totals.loss_sum(self.task, outputs, micro, self.observer)
        self.losses[micro.index] = loss.detach()
        with self.precision.autocast(False):
            return self.precision.scaled(loss / self.batch.targets)

    def reduce(self) -> list[dict[str, Tensor]]:
        """Return the gradients of this rank's parts, summed over all micro-batches of all pipelines, by name.
        Collective."""
        if not self.run.strategy.exact:
            for weights in reversed(self.stage_weights):  # autograd has summed the micro-batches
                for parameter, gradient in weights.receive_tied():
                    gradient += 0 if parameter.grad is None else parameter.grad
                    parameter.grad = gradient
                weights.collect(0)
        totals = self.across_pipelines()
        gradients = [
            dict(zip(weights.owned, total, strict=True))
            for weights, total in zip(self.stage_weights, totals, strict=True)
        ]
        return self.links.tie(self.stage_weights, gradients)

    def across_pipelines(self) -> list[list[Tensor]]:
        """Return, for each part of this rank, the root of its reduction tree, summed over the micro-batches of all
        pipelines. Collective."""
        if self.pipelines == 1:
            return [weights.tree.root for weights in self.stage_weights]
        groups = [buckets(dict(enumerate(weights.owned.values())), BUCKET_BYTES) for weights in self.stage_weights]
        if self.run.strategy.exact:
            how = links(self.run.strategy, self.world, self.across)
            exchange = Exchange(self.batch.count, self.pipeline, self.pipelines, self.across, how)
            for weights, positions in (
                (w, p) for w, group in zip(self.stage_weights, groups, strict=True) for p in group
            ):
                exchange.submit({node: [tensors[i] for i in positions] for node, tensors in weights.tree.nodes.items()})
            done = iter(exchange.finish())
            return [[tensor for _ in group for tensor in next(done)] for group in groups]
        own = [weights.tree.root for weights in self.stage_weights]
        return [all_reduce_flat(each, group, self.across) for each, group in zip(own, groups, strict=True)]

    def whole_gradient(self, gradients: list[dict[str, Tensor]]) -> Gradient:
        """Return the step's gradient: each stage holds that of its weights; a tied weight counts on its owner."""
        parts = [
            Part(name, parameter, gradients_of[name], float(name in weights.owned))
            for weights, gradients_of in zip(self.stage_weights, gradients, strict=True)
            for name, parameter in weights.parameters.items()
        ]
        return Gradient(parts, self.order, all_reduce_in(self.pipe))

    def all_reduce_stage(self, tensor: Tensor) -> Tensor:
        """Sum over the ranks that run the same stage, in place. Collective."""
        return all_reduce(tensor, self.across) if self.pipelines > 1 else tensor

    # -- the other methods -------------------------------------------------------------------------------------------

    @override
    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        self.model.eval()
        logits = torch.empty(0)
        with torch.no_grad(), self.precision.autocast():
            for part in self.cut_parts:
                received = [torch.empty(shape, device=self.world.device) for shape in part.arriving(inputs)]
                for tensor in received:
                    dist.recv(tensor, self.links.rank_of(part.stage - 1), group=self.side)
                outputs = part(received, inputs)
                if part.last:
                    logits = outputs.logits.contiguous()
                else:
                    for tensor in outputs:
                        dist.send(tensor, self.links.rank_of(part.stage + 1), group=self.side)
        self.model.train()
        last = self.links.rank_of(self.stages - 1)
        facts = [(logits.shape, logits.dtype)]
        dist.broadcast_object_list(facts, last, group=self.side)
        if self.world.rank != last:
            logits = torch.empty(facts[0][0], dtype=facts[0][1], device=self.world.device)
        dist.broadcast(logits, last, group=self.side)
        return logits

    @override
    def close(self) -> None:
        del self.model, self.update, self.state, self.weights
        del self.schedule, self.engine, self.stage_weights, self.cut_parts
        for group in (self.pipe, self.side, self.across):
            dist.destroy_process_group(group)


def _too_many(strategy: StrategySection, ranks: int, each: int, layers: int) -> RunError:
    """Return the error for more stages than layers, which names the key that sets their number."""
    key, stages, remedy = "strategy.options.stages", f"{ranks} stages are", "lower it"
    if each > 1:
        key, stages = f"{key}_per_rank", f"{ranks} ranks with {each} stages each are {ranks * each} stages,"
    elif strategy.options.get("stages") is None:
        key, stages = "strategy.name", f"pipeline makes one stage of each of {ranks} processes,"
        remedy = f"set strategy.options.stages to {layers} or less" if layers > 1 else "use strategy.name=ddp"
    return RunError("LS4245", f"{key}: {stages} more than the model's {quantity(layers, 'layer')}; {remedy}")


def _shape(strategy: StrategySection, processes: int) -> tuple[int, str, int]:
    """Return ranks per pipeline, name of the schedule, stages per rank. Errors: `RunError`."""
    options = strategy.options
    schedule = options.get("schedule", "1f1b")
    if schedule not in SCHEDULES:
        raise RunError(
            "LS4248", f"strategy.options.schedule: invalid value {schedule!r}; expected one of {', '.join(SCHEDULES)}"
        )
    if schedule != "interleaved" and "stages_per_rank" in options:
        raise RunError(
            "LS4249",
            "strategy.options.stages_per_rank: only strategy.options.schedule=interleaved has several stages "
            "per rank; set that, or remove stages_per_rank",
        )
    numbers = {
        "stages": options.get("stages", processes),
        "stages_per_rank": options.get("stages_per_rank", 2) if schedule == "interleaved" else 2,
    }
    for key, number in numbers.items():
        if not isinstance(number, int) or isinstance(number, bool) or number < 2:
            raise RunError("LS4250", f"strategy.options.{key}: invalid value {number!r}; expected an integer >= 2")
    return numbers["stages"], schedule, numbers["stages_per_rank"] if schedule == "interleaved" else 1


def _too_few(micro_batches: int, ranks: int, schedule: str) -> str | None:
    """Explain why a schedule cannot run this many micro-batches; None if it can."""
    rounds = max(1, micro_batches // ranks)
    if micro_batches < 1:
        return "every pipeline needs one"
    if schedule == "1f1b" and micro_batches < ranks:
        return f"1f1b needs at least as many micro-batches as stages, {ranks}"
    if schedule == "interleaved" and micro_batches % rounds:
        return (
            f"interleaved runs {rounds} rounds of equal size on {ranks} ranks, so their number must be a "
            f"multiple of {rounds}"
        )
    return None
