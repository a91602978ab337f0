"""How fast a job's own loop is, and how much memory its ranks need: the job that `lockstep bench` starts.

In: a run, in every rank of the job. Out: `OUTPUT/timing.json`, written by rank 0.
"""

from __future__ import annotations

import itertools
import json
import platform
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from lockstep import plugins
from lockstep.checkpoint.checkpoint import Checkpoints
from lockstep.data.feed import Feed
from lockstep.data.prepare import prepare
from lockstep.data.tokens import Prepared
from lockstep.dry_run import rehearse
from lockstep.exit_status import STOPPED
from lockstep.measure import memory
from lockstep.processes.watch import Watch
from lockstep.run import Run
from lockstep.strategies import strategy as strategies
from lockstep.strategies.strategy import Strategy
from lockstep.tasks.task import Task
from lockstep.train import Counts, train
from lockstep.world import World

FILE = "timing.json"


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one rank."""

    host: str
    device: str
    peak_resident: int  # the most of the host's memory this process ever held; 0 where the system does not tell
    peak_device: int  # the most the GPU's allocator handed out; 0 on a CPU
    at_rest: int  # of tensors between steps: weights and optimizer state
    at_update: int  # of tensors when the optimizer steps: the same and the gradients


@dataclass(frozen=True)
class Timing:
    """What one job did in its timed steps."""

    processes: int
    threads: int  # of each process
    steps: int
    examples: int
    tokens: int  # without padding
    padded: int  # with padding
    seconds: float
    step_seconds: list[float]  # as rank 0 saw them
    whole_steps: int  # steps of the whole run, as the run file gives its length
    parameters: int
    ranks: list[RankMemory]
    versions: dict[str, str]


class _NoCheckpoints(Checkpoints):
    """Checkpoints are written beside training; here none is."""

    def save(self, step: int, strategy: Strategy, scores: Any = None) -> None:
        """Nothing."""


def measure(run: Run, world: World, steps: str, skip: str) -> int:
    """Train `skip` steps that are not counted and `steps` that are, in the product's own loop, without evaluations and
    checkpoints; then one more to look at memory. Collective. Returns the exit status."""
    strategy_class = strategies.of(run)
    strategy_class.check(run, world.size)
    strategy = strategy_class(run, world)
    task_class = plugins.find("tasks", run.task.name)
    prepared = prepare(run, task_class)
    world.join()
    task = task_class(run, prepared)
    before = memory.tensor_bytes()
    strategy.build(task)
    feed = Feed(run, task, strategy.leaves(), world.device)
    whole = feed.total
    watch = Watch(world, run.launch.hang_s).start()
    try:
        rehearse(run, world, strategy, feed)
        found = _timed(run, world, task, strategy, feed, prepared, (int(skip), int(skip) + int(steps)))
        ranks = [] if found is None else world.everyone(_memory(world, strategy, feed, before))
    finally:
        watch.stop()
    parameters, threads = strategy.parameter_count, world.threads
    strategy.close()
    if found is None:
        return STOPPED
    counts, moments = found
    if world.is_main:
        each = [b - a for a, b in itertools.pairwise(moments)]
        totals = (counts.steps, counts.examples, counts.tokens, counts.padded, counts.seconds)
        timing = Timing(world.size, threads, *totals, each, whole, parameters, ranks, _versions())
        (run.folder / FILE).write_text(json.dumps(asdict(timing), indent=1), encoding="utf-8")
    return 0


def _timed(
    run: Run, world: World, task: Task, strategy: Strategy, feed: Feed, prepared: Prepared, ends: tuple[int, int]
) -> tuple[Counts, list[float]] | None:
    """What the steps between `ends` took, and the moments at which they ended, after the one at which they began;
    None when it was asked to stop. Collective."""
    sections = {"evaluate": {"every": 0}, "checkpoint": {"every": 0, "best": None}, "track": {"every": 10**9}}
    quiet = run.model_copy(update={n: getattr(run, n).model_copy(update=v) for n, v in sections.items()})
    checkpoints = _NoCheckpoints(run, world, prepared, feed.total)
    step, counts, moments = 0, Counts(), [0.0]
    for end in ends:
        if step == end:
            continue
        feed.total = end
        world.barrier()
        moments = [time.perf_counter()]
        step, counts = train(
            quiet,
            world,
            task,
            strategy,
            feed,
            checkpoints,
            lambda step, split, numbers: None,  # lines of the log are not kept
            lambda step: moments.append(time.perf_counter()),  # noqa: B023 - called in this turn only
            step,
        )
        if step < end:
            return None
    return counts, moments


def _memory(world: World, strategy: Strategy, feed: Feed, before: int) -> RankMemory:
    """This rank's, after a step that is looked at. Collective."""
    cuda = world.device.type == "cuda"
    peak_device = torch.cuda.max_memory_allocated(world.device) if cuda else 0
    peak_resident = memory.peak_resident()  # before the look, which takes memory itself
    batch = feed.make(0).to(world.device)
    with memory.measured(before) as held:
        strategy.train_step(batch, strategy.run.optim.learning_rate)
    name = torch.cuda.get_device_name(world.device) if cuda else "CPU"
    return RankMemory(world.host, name, peak_resident, peak_device, held.at_rest, held.at_update)


def _versions() -> dict[str, str]:
    return {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__}


def read(folder: Path) -> Timing | None:
    """What a job wrote, or None when it wrote nothing."""
    path = folder / FILE
    if not path.exists():
        return None
    values = json.loads(path.read_text(encoding="utf-8"))
    return Timing(**{**values, "ranks": [RankMemory(**rank) for rank in values["ranks"]]})
