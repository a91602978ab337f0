"""Record a few steps of a job: loss, gradient norm, every parameter's gradient and the weights after each step.

In: a run, in every rank of the job. Out: a folder with `records.jsonl` and, in `trace`, a trace of these steps in the
format of `lockstep trace`, whose sketches distinguish rounding from mistakes; `verify.py` compares it with the trace of
another job.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import torch
from torch import Tensor

from lockstep.config.schedules import learning_rate
from lockstep.config.sections import OptimSection
from lockstep.data.batch import StepBatch
from lockstep.data.job import Job
from lockstep.distributed.randomness import own_generators
from lockstep.distributed.system_metrics import measured
from lockstep.distributed.world import World
from lockstep.proof.step_writer import RankStep, StepWriter, WholeStep
from lockstep.strategies.observer import GradientRecorder
from lockstep.strategies.strategy import Strategy
from lockstep.tasks.task import Task
from lockstep.training import plain_sides
from lockstep.training.evaluation import evaluate
from lockstep.training.session import Session, build_session, join_ranks
from lockstep.training.startup import try_a_step
from lockstep.training.step_record import StepRecord, prints_of, read_records, write_records
from lockstep_trace.tracer.inputs import call_inputs
from lockstep_trace.tracer.placement import has_stochastic
from lockstep_trace.tracer.records import hexed

FILE = "records.jsonl"  # facts of the job, and a record of each step
TRACE = "trace"  # subfolder with gradients, weights, losses and examples of each step


@dataclass(frozen=True)
class Recording:
    """The record of one job."""

    strategy: str
    processes: int
    bits: bool  # whether the strategy promises bitwise equality with a single process
    rounding: float  # allowed relative difference otherwise
    probe: dict[str, float]  # scores of the untrained model on the first step's examples, without dropout
    steps: list[StepRecord]  # at the level `gradients`; `step` counts from 0
    dtypes: dict[str, list[str]]  # dtypes of weights, gradients and optimizer state
    seconds_per_step: float | None  # median of the timed steps
    examples_per_s: float | None
    held: list[dict[str, int]]  # bytes of tensors per rank: at_rest, at_update
    uncovered: list[str] = field(default_factory=list)  # random generators that no step seeds
    doubts: list[str] = field(default_factory=list)  # warnings about user code, see `Task.warnings`


def numbers_of(optimizer: OptimSection, total: int, per_epoch: int, steps: int, begin: int | None = None) -> list[int]:
    """Steps to record: the first ones, and the last of the first epoch, which may be short. If these would all come
    before the weights change (a warmup starts with learning rate 0), they begin later, so that the last but one is the
    first to change the weights."""
    if begin is None:
        still = next((n for n in range(total) if learning_rate(optimizer, n, total)), 0)
        begin = max(0, min(still + 2 - max(steps, 2), total - steps))
    first = list(range(begin, min(begin + steps, total)))
    last = min(per_epoch, total) - 1
    return first if last <= first[-1] or len(first) < 2 else [*first[:-1], last]


def record(job: Job, world: World, steps: str, timed: str = "0", plain: str = "0", begin: str = "") -> int:
    """Run a few steps, from `begin` on, and record them in OUTPUT; then `plain` steps without dropout, for comparison
    with the plain reference; then `timed` steps to measure speed and memory. Collective."""
    run = job.run
    join_ranks(job, world)
    session = build_session(job, world)
    task, strategy, feed = session.task, session.strategy, session.feed
    uncovered = own_generators(task, strategy.model)
    try_a_step(session)
    numbers = numbers_of(run.optim, feed.total, feed.order.steps_per_epoch, int(steps), int(begin) if begin else None)
    probe = evaluate(world, task, strategy, feed.columns, feed.make(numbers[0]).ids, texts=False)
    writer = _Writer(job, world, task, strategy, probe)
    if int(plain):
        plain_sides.save_untrained(session)
    for number in numbers:
        batch = feed.make(number).to(world.device)
        rate = learning_rate(run.optim, number, feed.total)
        result = strategy.train_step(batch, rate)
        writer.step(number, batch, float(result.loss), float(result.grad_norm), rate)
    strategy.observer = None
    dtypes = writer.dtypes()
    writer.close()
    if int(plain):
        plain_sides.record_session(session, int(plain))
    seconds, bytes_held = _cost(session, int(timed))
    per_second = run.batch_size / seconds if seconds else None
    bits, rounding = session.job.same_bits, strategy.rounding(session.job)
    recording = Recording(
        run.strategy.name,
        world.size,
        bits,
        rounding,
        probe,
        writer.steps,
        dtypes,
        seconds,
        per_second,
        bytes_held,
        uncovered,
        task.warnings,
    )
    strategy.close()
    if world.is_main:
        write(run.folder, recording)
    return 0


class _Recorder(GradientRecorder):
    """Gradient recorder that also keeps the losses of this rank's micro-batches."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.losses: dict[int, Tensor] = {}  # micro-batch -> loss

    def loss(self, index: int, loss: Tensor) -> None:
        self.losses[index] = loss.detach()


class _Writer:
    """Write the results of steps, on rank 0."""

    def __init__(self, job: Job, world: World, task: Task, strategy: Strategy, probe: Mapping[str, float]) -> None:
        self.run, self.world, self.task, self.strategy = job.run, world, task, strategy
        self.steps: list[StepRecord] = []
        strategy.observer = self.recorder = _Recorder(world)
        weights = self.weights()
        self.stochastic = has_stochastic(strategy.model)
        about = {"command": ["lockstep", "verify", f"strategy.name={job.run.strategy.name}"], "scores": dict(probe)}
        self.trace = None
        if world.is_main:
            self.trace = StepWriter(job.run.folder / TRACE, weights, job.run.optim.name, about)

    def weights(self) -> dict[str, Tensor]:
        """Whole weights, in rank 0's host memory. Collective."""
        state = {k: v for k, v in self.strategy.state.state_dict().items() if k.startswith("model.")}
        return {k.removeprefix("model."): v.detach().cpu().clone() for k, v in state.items()}

    def step(self, number: int, batch: StepBatch, loss: float, norm: float, rate: float) -> None:
        """Record one step. Collective."""
        own = self.rank_step(batch)
        targets = float(self.strategy.data_parallel.all_reduce(torch.tensor(sum(own.targets), dtype=torch.float64)))
        ranks, weights = self.world.all_gather((self.strategy.data_parallel.rank, own)), self.weights()
        self.recorder.losses.clear()
        if self.trace is None:
            return
        gradients = self.recorder.gradients
        tensors = {"gradients": prints_of(gradients), "after": prints_of(weights)}
        self.steps.append(StepRecord.of_numbers(number, loss, norm, targets=(targets, batch.targets), **tensors))
        self.trace.step(
            WholeStep(
                number,
                loss,
                gradients,
                weights,
                {"lr": self.rate(rate), "weight_decay": self.run.optim.weight_decay},
                (self.run.optim.max_grad_norm, norm),
                _of_data(ranks),
                batch.targets,
                "bfloat16" if self.run.precision == "bf16" else "",
            ),
            self.stochastic,
        )

    def rank_step(self, batch: StepBatch) -> RankStep:
        """This rank's part of a step."""
        counts = [float(self.task.targets_in_batch(m.targets)) for m in batch.micro_batches]
        inputs = [call_inputs((), m.inputs) for m in batch.micro_batches]
        hashes = [each.hashes for each in inputs if each is not None]
        losses = {index: float(loss) for index, loss in sorted(self.recorder.losses.items())}
        return RankStep(losses, counts, [len(h) for h in hashes], hexed(hashes))

    def rate(self, rate: float) -> float:
        """Learning rate that the optimizer received; `rate` if an engine sets it internally."""
        if groups := self.strategy.update.optimizer.param_groups:
            return float(groups[0]["lr"]) / float(groups[0].get("scale", 1.0))
        return rate

    def close(self) -> None:
        self.recorder.gradients.clear()
        if self.trace is not None:
            self.trace.close()

    def dtypes(self) -> dict[str, list[str]]:
        """Dtypes of weights, gradients and optimizer state."""
        state = self.strategy.state.state_dict()
        moments = {str(v.dtype) for k, v in state.items() if k.startswith("optimizer.") and v.dim()}
        return {
            "weights": sorted({str(p.dtype) for p in self.strategy.model.parameters()}),
            "gradients": sorted({str(g.dtype) for g in self.recorder.gradients.values()}),
            "optimizer": sorted(moments),
        }


def _of_data(ranks: list[tuple[int, RankStep]]) -> list[RankStep]:
    """Merge by data-parallel rank: ranks that work on the same examples become one; the last pipeline stage has the
    losses."""
    steps: dict[int, RankStep] = {}
    for number, step in ranks:
        if number not in steps or (step.micro_batches and not steps[number].micro_batches):
            steps[number] = step
    return [steps[number] for number in sorted(steps)]


def _cost(session: Session, timed: int) -> tuple[float | None, list[dict[str, int]]]:
    """Seconds of the median step, and bytes held on each rank. Collective."""
    if not timed:
        return None, []
    run, world, strategy, feed = session.run, session.world, session.strategy, session.feed
    seconds = []
    for number in range(timed):
        batch = feed.make(number % feed.total).to(world.device)
        world.barrier()
        start = time.perf_counter()
        float(strategy.train_step(batch, run.optim.learning_rate).loss)
        seconds.append(time.perf_counter() - start)
    batch = feed.make(0).to(world.device)
    with measured(session.bytes_before) as memory:
        strategy.train_step(batch, run.optim.learning_rate)
    return sorted(seconds)[len(seconds) // 2], [asdict(each) for each in world.all_gather(memory)]


def write(folder: Path, recording: Recording) -> None:
    """Write a recording."""
    facts = {f.name: getattr(recording, f.name) for f in fields(recording) if f.name != "steps"}
    write_records(folder / FILE, facts, recording.steps)


def read(folder: Path) -> Recording:
    """Read a recording."""
    facts, steps = read_records(folder / FILE)
    return Recording(**{k: v for k, v in facts.items() if k != "format"}, steps=steps)
