"""A record of a few steps of a job: loss, gradient norm, every parameter's gradient and the weights after.

In: a run, in every rank of the job. Out: a folder with `recording.json` and a file of tensors a step, which
`verify.py` compares with another job's.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from lockstep.data.batch import StepBatch
from lockstep.distributed.randomness import own_generators
from lockstep.distributed.system_metrics import measured
from lockstep.distributed.world import World
from lockstep.strategies.exact import optim
from lockstep.strategies.observer import GradientRecorder
from lockstep.strategies.strategy import Strategy
from lockstep.tasks.task import Task
from lockstep.training import plain_sides
from lockstep.training.beginning import try_a_step
from lockstep.training.evaluation import evaluate
from lockstep.training.resolve import Job
from lockstep.training.session import Session, build_session, join_ranks


@dataclass(frozen=True)
class RecordedStep:
    """One recorded step; its gradients and the weights after it are in a file beside."""

    number: int  # of the run's steps, from 0
    loss: float
    norm: float  # of the gradient before clipping
    seen: float  # targets that went through the model, over all ranks
    targets: float  # that the step has


@dataclass(frozen=True)
class Recording:
    """The record of one job."""

    strategy: str
    processes: int
    bits: bool  # whether the strategy promises the bits of a single process
    rounding: float  # the relative difference it may have otherwise
    probe: dict[str, float]  # the untrained model's scores on the first step's examples, without dropout
    steps: list[RecordedStep]
    dtypes: dict[str, list[str]]  # of weights, gradients and optimizer state
    seconds_per_step: float | None  # median of the steps that were timed
    examples_per_s: float | None
    held: list[dict[str, int]]  # bytes of tensors on each rank: at_rest, at_update
    uncovered: list[str] = field(default_factory=list)  # generators of random numbers that no step seeds
    doubts: list[str] = field(default_factory=list)  # of the user's own code, see `Task.warnings`


def numbers_of(total: int, per_epoch: int, steps: int) -> list[int]:
    """The steps that are looked at: the first ones, and the first epoch's last, which may be a short one."""
    first = list(range(min(steps, total)))
    last = min(per_epoch, total) - 1
    return first if last in first or len(first) < 2 else [*first[:-1], last]


def record(job: Job, world: World, steps: str, timed: str = "0", plain: str = "0") -> int:
    """Run a few steps and write down what they did in OUTPUT; then `plain` steps without dropout, for a comparison with
    the plain reference; then `timed` more for their speed and memory. Collective."""
    run = job.run
    join_ranks(job, world)
    session = build_session(job, world)
    task, strategy, feed = session.task, session.strategy, session.feed
    uncovered = own_generators(task, strategy.model)
    try_a_step(session)
    numbers = numbers_of(feed.total, feed.order.steps_per_epoch, int(steps))
    probe = evaluate(run, world, task, strategy, feed.columns, feed.make(numbers[0]).ids, texts=False)
    writer = _Writer(run.folder, world, task, strategy)
    for place, number in enumerate(numbers):
        batch = feed.make(number).to(world.device)
        result = strategy.train_step(batch, optim.learning_rate(run.optim, number, feed.total))
        writer.step(place, number, batch, float(result.loss), float(result.grad_norm))
    strategy.observer = None
    dtypes = writer.dtypes()
    writer.recorder.gradients.clear()
    if int(plain):
        plain_sides.record_session(session, int(plain))
    seconds, held = _cost(session, int(timed))
    rate = run.batch_size / seconds if seconds else None
    bits, rounding = strategy.gives_bits(run), strategy.rounding(run)
    recording = Recording(
        run.strategy.name,
        world.size,
        bits,
        rounding,
        probe,
        writer.steps,
        dtypes,
        seconds,
        rate,
        held,
        uncovered,
        task.warnings,
    )
    strategy.close()
    if world.is_main:
        (run.folder / "recording.json").write_text(json.dumps(asdict(recording), indent=1))
    return 0


class _Writer:
    """Writes gradients, and weights after each step, on rank 0."""

    def __init__(self, folder: Path, world: World, task: Task, strategy: Strategy) -> None:
        self.folder, self.world, self.task, self.strategy = folder, world, task, strategy
        self.steps: list[RecordedStep] = []
        strategy.observer = self.recorder = GradientRecorder(world)
        self.save("start", self.weights())

    def weights(self) -> dict[str, Tensor]:
        """Whole, on rank 0's host. Collective."""
        state = {k: v for k, v in self.strategy.state_dict().items() if k.startswith("model.")}
        return {f"weight.{k.removeprefix('model.')}": v.detach().cpu().clone() for k, v in state.items()}

    def step(self, place: int, number: int, batch: StepBatch, loss: float, norm: float) -> None:
        seen = sum(float(self.task.targets_in_batch(m.targets)) for m in batch.micro_batches)
        total = float(self.strategy.data_parallel.sum(torch.tensor(seen, dtype=torch.float64)))
        self.steps.append(RecordedStep(number, loss, norm, total, batch.targets))
        gradients = {f"gradient.{name}": tensor for name, tensor in self.recorder.gradients.items()}
        self.save(f"step-{place}", gradients | self.weights())

    def save(self, name: str, tensors: dict[str, Tensor]) -> None:
        if self.world.is_main:
            self.folder.mkdir(parents=True, exist_ok=True)
            save_file({k: v.contiguous() for k, v in tensors.items()}, self.folder / f"{name}.safetensors")

    def dtypes(self) -> dict[str, list[str]]:
        """The dtypes of weights, gradients and optimizer state: tests assert them, users read them."""
        state = self.strategy.state_dict()
        moments = {str(v.dtype) for k, v in state.items() if k.startswith("optimizer.") and v.dim()}
        return {
            "weights": sorted({str(p.dtype) for p in self.strategy.model.parameters()}),
            "gradients": sorted({str(g.dtype) for g in self.recorder.gradients.values()}),
            "optimizer": sorted(moments),
        }


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
    with measured(session.bytes_before) as held:
        strategy.train_step(batch, run.optim.learning_rate)
    return sorted(seconds)[len(seconds) // 2], [asdict(each) for each in world.all_gather(held)]


def read(folder: Path) -> Recording:
    """A recording's own words."""
    values = json.loads((folder / "recording.json").read_text())
    return Recording(**{**values, "steps": [RecordedStep(**s) for s in values["steps"]]})
