"""Plans of a job on so many processes, each of whose ranks that differ is simulated in a process of its own.

In: a run, processes and a device. Out: `Plan`s. Nothing of the run is started.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lockstep.config import plugins
from lockstep.config.run import Run, RunError, keep
from lockstep.data.prepare import prepare
from lockstep.lab.subprocess_job import Child
from lockstep.strategies.abilities import ChoosesByMemory
from lockstep.strategies.strategy import strategy_class
from lockstep.tasks.task import Task
from lockstep.training.data_loader import StepLoader
from lockstep.training.model_stats import counts
from lockstep.training.resolve import resolve_strategy
from lockstep_plan import fake_world as ranks_of
from lockstep_plan.devices import Device
from lockstep_plan.estimate import Estimate, estimate, padding, power_of_two

AT_ONCE = 2  # simulations
Say = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """What a job takes, or why it cannot be."""

    run: Run
    processes: int
    estimate: Estimate | None
    refused: str | None = None
    padding: float = 1.0
    steps: int = 0

    @property
    def device_hours(self) -> float:
        return 0.0 if self.estimate is None else self.estimate.step_s * self.steps * self.processes / 3600

    @property
    def fits(self) -> bool:
        return self.estimate is not None and self.estimate.fits


def plan(run: Run, processes: int, device: Device, say: Say = lambda text: None) -> Plan:
    """Simulate. Errors: `RunError` for what cannot run, with the micro_batches that so many processes need."""
    if processes > run.micro_batches:
        least = power_of_two(processes)
        raise RunError(
            "LS8330",
            f"--processes: {processes:,} processes cannot share {run.micro_batches:,} micro-batches; set "
            f"micro_batches={least} or more, or {2 * least} to allow for twice as many processes (batch_size "
            f"is {run.batch_size:,} examples, and every micro-batch needs one)",
        )
    task = task_of(run)
    kind = strategy_class(run)
    if issubclass(kind, ChoosesByMemory) and kind.needs_memory_to_resolve(run):
        from lockstep.strategies.exact.optim import freeze

        sizes = counts(freeze(run, task.model(empty=True)))
        run = kind.resolve_options(run, processes, *sizes, int(device.memory_bytes))
    resolve_strategy(run, processes)
    if run.model.quantization is not None or run.model.compiled:
        key = "model.compile" if run.model.compiled else "model.quantization"
        raise RunError(
            "LS8331", f"{key}: cannot be simulated; run plan without --simulate, which estimates memory by a formula"
        )
    feed = StepLoader(run, task, [], torch.device("cpu"))
    simulated = simulate(run, processes, device, say)
    estimated = estimate(run, processes, simulated, device, feed)
    return Plan(run, processes, estimated, None, padding(feed), feed.total)


def task_of(run: Run) -> Task:
    """With its data prepared. Errors: `RunError`."""
    task_class: Any = plugins.find("tasks", run.task.name)
    task: Task = task_class(run, prepare(run, task_class))
    return task


def feed_of(run: Run) -> StepLoader:
    """All micro-batches of a run that has been resolved, on the host. Errors: `RunError`."""
    return StepLoader(run, task_of(run), [], torch.device("cpu"))


def looked_at(run: Run, processes: int) -> list[int]:
    """The ranks that differ: of a pipeline those of its first, second and last stage; else the first one, which has
    the longest examples, and where shares are uneven the last."""
    if run.strategy.name == "pipeline":
        stages = int(run.strategy.options.get("stages", processes))
        return [stage * (processes // stages) for stage in sorted({0, 1, stages - 1})]
    return [0] if run.micro_batches % processes == 0 else [0, processes - 1]


def simulate(run: Run, processes: int, device: Device, say: Say) -> list[ranks_of.Simulated]:
    """One child for each rank that is looked at. Errors: `RunError` with what a child said."""
    ranks = looked_at(run, processes)
    simulated: list[ranks_of.Simulated] = []
    with tempfile.TemporaryDirectory(prefix="lockstep-plan-") as folder:
        aside = run.model_copy(update={"output": folder})
        keep(aside)
        for start in range(0, len(ranks), AT_ONCE):
            turn = ranks[start : start + AT_ONCE]
            say(f"simulating rank {' and '.join(map(str, turn))} of {processes:,} under {run.strategy.name}")
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


# -- which one -------------------------------------------------------------------------------------------------------


def candidates(run: Run, processes: int) -> list[Run]:
    """What `--suggest` compares: strategies that give bits, at powers of two of micro-batches, as many as the processes
    need, twice and four times as many, where a step has the examples."""
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
    """All candidates: what fits first, the quickest first; then what does not fit; then what is refused. Errors:
    `RunError` where a step has too few examples for so many processes."""
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
    """Of two that fit and are within 2 % of each other the one with more micro-batches, which leaves room to grow."""
    quick = min((p.estimate.step_s for p in plans if p.estimate is not None and p.fits), default=0.0)

    def order(plan: Plan) -> tuple[bool, bool, float, int]:
        if plan.estimate is None:
            return True, True, 0.0, 0
        seconds = plan.estimate.step_s
        grouped = round(seconds / quick / 0.02) if quick else seconds
        room = plan.run.micro_batches >= 2 * plan.processes
        return False, not plan.fits, grouped, -room * 2**20 + plan.run.micro_batches

    return sorted(plans, key=order)
