"""Plan a job by simulating each distinct rank in its own process.

In: a run, numbers of processes and a device. Out: `Plan`s. Nothing of the run is started.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lockstep.config.run import Run, RunError, write_run_yaml
from lockstep.data.job import Job
from lockstep.lab.subprocess_job import Child
from lockstep.strategies.exact.training_state import freeze
from lockstep.tasks.models.storage_dtype import counts
from lockstep.tasks.task import make_task
from lockstep.track.busy import ACTIVITY
from lockstep.training.data_loader import StepLoader
from lockstep.training.resolve import resolve_strategy
from lockstep.training.utilization import operations_per_token
from lockstep_plan import fake_world as ranks_of
from lockstep_plan.devices import Device, at
from lockstep_plan.estimate import Estimate, estimate, padding, power_of_two, precision_of

AT_ONCE = 2  # parallel simulations
Say = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """Resources of a job, or the reason why it cannot run."""

    run: Run
    processes: int
    estimate: Estimate | None
    refused: str | None = None
    padding: float = 1.0
    steps: int = 0
    tokens: float = 0.0  # per step, without padding; 0 for a task without tokens
    operations: float = 0.0  # FLOP per token, forward and backward; 0 if unknown

    def mfu(self, device: Device) -> float:
        """Model FLOPs utilization, from 0 to 1, of the device's stated rate; 0 if unknown, and on CPUs."""
        if self.estimate is None or device.kind == "cpu":
            return 0.0
        rate = at(device.flops[precision_of(self.run)], math.inf) * self.processes  # type: ignore[index]
        return self.operations * self.tokens / self.estimate.step_s / rate

    @property
    def device_hours(self) -> float:
        return 0.0 if self.estimate is None else self.estimate.step_s * self.steps * self.processes / 3600

    @property
    def fits(self) -> bool:
        return self.estimate is not None and self.estimate.fits


def plan(run: Run, processes: int, device: Device, say: Say = lambda text: None) -> Plan:
    """Simulate a job. Errors: `RunError` if it cannot run; the message says how many micro_batches it needs."""
    if processes > run.micro_batches:
        least = power_of_two(processes)
        raise RunError(
            "LS8330",
            f"--processes: {processes:,} processes cannot share {run.micro_batches:,} micro-batches; set "
            f"micro_batches={least} or more, or {2 * least} to allow for twice as many processes (batch_size "
            f"is {run.batch_size:,} examples, and every micro-batch needs one)",
        )
    job = Job.of(run, processes).with_data()
    run, task = job.run, make_task(job)
    model = freeze(run.model, task.model(empty=True))
    sizes = counts(model)
    if job.strategy.memory.needs_choice(job):
        run = job.strategy.memory.choose(job, *sizes, int(device.memory_bytes))
        job = job.having(run)
    resolve_strategy(run, processes)
    if run.model.quantization is not None or run.model.compiled:
        key = "model.compile" if run.model.compiled else "model.quantization"
        raise RunError(
            "LS8331", f"{key}: cannot be simulated; run plan without --simulate, which estimates memory by a formula"
        )
    feed = StepLoader(task, [], torch.device("cpu"))
    simulated = simulate(job, device, say)
    estimated = estimate(job, simulated, device, feed)
    length = task.splits["train"].mean_length if task.unit == "tokens" else 0.0
    operations = 0.0 if task.own_model else operations_per_token(model, *sizes, length)
    return Plan(run, processes, estimated, None, padding(feed), feed.total, length * run.batch_size, operations)


def feed_of(job: Job) -> StepLoader:
    """All micro-batches of a job whose data are prepared, on the host. Errors: `RunError`."""
    return StepLoader(make_task(job), [], torch.device("cpu"))


def looked_at(job: Job) -> list[int]:
    """Return the ranks that differ: for a pipeline the first, second and last stage; else the first, which has the
    longest examples, and with uneven shares the last."""
    run, processes = job.run, job.processes
    if (stages := job.strategy.stages_of(run.strategy, processes)) > 1:
        return [stage * (processes // stages) for stage in sorted({0, 1, stages - 1})]
    return [0] if run.micro_batches % processes == 0 else [0, processes - 1]


def simulate(job: Job, device: Device, say: Say) -> list[ranks_of.Simulated]:
    """Simulate each distinct rank in a child process. Errors: `RunError` with a child's message."""
    run, processes, ranks = job.run, job.processes, looked_at(job)
    simulated: list[ranks_of.Simulated] = []
    with tempfile.TemporaryDirectory(prefix="lockstep-plan-") as folder:
        aside = run.model_copy(update={"output": folder})
        write_run_yaml(aside)
        for start in range(0, len(ranks), AT_ONCE):
            turn = ranks[start : start + AT_ONCE]
            about = f"simulating rank {' and '.join(map(str, turn))} of {processes:,} under {run.strategy.name}"
            say(about)
            ACTIVITY.set(about)
            children = {rank: _child(Path(folder), rank, processes, device) for rank in turn}
            try:
                for child in children.values():
                    child.wait()
            except BaseException:
                for child in children.values():
                    child.kill()
                raise
            for rank, child in children.items():
                if child.status != 0:
                    raise RunError(
                        "LS8332", f"--simulate: rank {rank} of {processes:,} cannot be simulated: {child.reason()}"
                    )
                simulated.append(ranks_of.read(Path(folder) / f"{rank}.json"))
    return simulated


def _child(folder: Path, rank: int, processes: int, device: Device) -> Child:
    of = (processes, rank, device.kind, device.ranks_per_node)
    words = [str(folder / "run.yaml"), *map(str, of), str(folder / f"{rank}.json")]
    return Child("lockstep_plan.fake_world.main", words, folder, f"rank-{rank}", {"OMP_NUM_THREADS": "1"})


# -- choosing a plan --------------------------------------------------------------------------------------------------


def candidates(run: Run, processes: int) -> list[Run]:
    """Candidates of `--suggest`: reproducible strategies with as many micro-batches as processes (rounded up to a power
    of two), twice, and four times as many, if a step has enough examples."""
    least = power_of_two(processes)
    sizes = sorted({n for n in (least, 2 * least, 4 * least) if n <= run.batch_size})
    ways: list[dict[str, Any]] = [
        {"name": "single", "options": {}} if processes == 1 else {"name": "ddp", "options": {}},
        {"name": "fsdp2", "options": {"gather": "step"}},
        {"name": "fsdp2", "options": {"gather": "micro_batch"}},
    ]
    if 1 < processes <= 16:
        ways.append({"name": "pipeline", "options": {}})
    strategies = [run.strategy.model_copy(update=way) for way in ways]
    return [run.model_copy(update={"strategy": s, "micro_batches": n}) for s in strategies for n in sizes]


def suggest(run: Run, processes: int, device: Device, say: Say) -> list[Plan]:
    """Plan all candidates: first those that fit, fastest first; then those that do not fit; then refused ones. Errors:
    `RunError` if a step has too few examples."""
    runs = candidates(run, processes)
    if not runs:
        raise RunError(
            "LS8333",
            f"--suggest: {processes:,} processes need {power_of_two(processes)} micro-batches or more, but a "
            f"step has batch_size={run.batch_size} examples only; raise batch_size, or use fewer processes",
        )
    plans = []
    for each in runs:
        try:
            plans.append(plan(each, processes, device, say))
        except RunError as caught:
            plans.append(Plan(each, processes, None, " ".join(str(caught).split())))
    return ranked(plans)


def ranked(plans: Sequence[Plan]) -> list[Plan]:
    """Sort plans, best first. Of fitting plans within 2 % of each other, one that allows for twice as many processes
    comes first."""
    quick = min((p.estimate.step_s for p in plans if p.estimate is not None and p.fits), default=0.0)

    def order(plan: Plan) -> tuple[bool, bool, float, int]:
        if plan.estimate is None:
            return True, True, 0.0, 0
        seconds = plan.estimate.step_s
        grouped = round(seconds / quick / 0.02) if quick else seconds
        room = plan.run.micro_batches >= 2 * plan.processes
        return False, not plan.fits, grouped, -room * 2**20 + plan.run.micro_batches

    return sorted(plans, key=order)
