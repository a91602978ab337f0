"""Measure speed and memory of a job, with its own training loop; started by `lockstep bench`.

In: a run, in every rank of the job. Out: `OUTPUT/timing.json`, written by rank 0.
"""

from __future__ import annotations

import itertools
import json
import platform
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers

from lockstep.checkpoint.checkpoint import Checkpoints
from lockstep.config.errors import STOPPED
from lockstep.data.arrow_cache import Prepared
from lockstep.data.job import Job
from lockstep.distributed import system_metrics
from lockstep.distributed.hang_watchdog import Watchdog
from lockstep.distributed.sharded import ShardedState
from lockstep.distributed.world import World
from lockstep.training.loop import train
from lockstep.training.session import Session, Sinks, build_session, join_ranks
from lockstep.training.startup import try_a_step
from lockstep.training.train_state import Counts

FILE = "timing.json"


@dataclass(frozen=True)
class RankMemory:
    """Memory of one rank, in bytes."""

    host: str
    device: str
    peak_resident: int  # peak host memory of this process; 0 if the system does not report it
    peak_device: int  # peak allocated GPU memory; 0 on a CPU
    at_rest: int  # tensors between steps: weights and optimizer state
    at_update: int  # tensors during the optimizer step: also gradients


@dataclass(frozen=True)
class Timing:
    """Measurements of one job."""

    processes: int
    threads: int  # per process
    steps: int
    examples: int
    tokens: int  # without padding
    padded: int  # with padding
    seconds: float
    step_seconds: list[float]  # measured on rank 0
    whole_steps: int  # steps of the whole run, by the run file
    parameters: int
    ranks: list[RankMemory]
    versions: dict[str, str]


class _NoCheckpoints(Checkpoints):
    """Checkpoints that are never written."""

    def save(self, step: int, sharded: ShardedState, scores: Any = None, state: Any = None) -> None:
        """Do nothing."""


class _Moments(Sinks):
    """Record when each step ended; discard log lines."""

    def __init__(self, moments: list[float]) -> None:
        self.moments = moments

    def advance(self, step: int) -> None:
        self.moments.append(time.perf_counter())


def measure(job: Job, world: World, steps: str, skip: str) -> int:
    """Train `skip` warm-up steps and `steps` measured ones, in the regular loop without evaluations and checkpoints,
    then one more to measure memory. Collective. Returns the exit status."""
    run, prepared = job.run, job.data
    join_ranks(job, world)
    session = build_session(job, world)
    strategy, whole = session.strategy, session.feed.total
    watch = Watchdog(world, run.launch.hang_timeout_s).start()
    try:
        try_a_step(session)
        timed = _timed(session, prepared, (int(skip), int(skip) + int(steps)))
        ranks = [] if timed is None else world.all_gather(_memory(session))
    finally:
        watch.stop()
    parameters, threads = strategy.weights.parameter_count, world.threads
    strategy.close()
    if timed is None:
        return STOPPED
    counts, moments = timed
    if world.is_main:
        each = [b - a for a, b in itertools.pairwise(moments)]
        totals = (counts.steps, counts.examples, counts.tokens, counts.padded, counts.seconds)
        timing = Timing(world.size, threads, *totals, each, whole, parameters, ranks, _versions())
        (run.folder / FILE).write_text(json.dumps(asdict(timing), indent=1), encoding="utf-8")
    return 0


def _timed(session: Session, prepared: Prepared, ends: tuple[int, int]) -> tuple[Counts, list[float]] | None:
    """Counts of the steps between `ends`, and the times at which these steps began and ended. None if asked to stop.
    Collective."""
    run, world, feed = session.run, session.world, session.feed
    sections = {"evaluate": {"every": 0}, "checkpoint": {"every": 0, "best": None}, "track": {"every": 10**9}}
    quiet = run.model_copy(update={n: getattr(run, n).model_copy(update=v) for n, v in sections.items()})
    checkpoints = _NoCheckpoints(session.job, world, feed.total)
    step, counts, moments = 0, Counts(), [0.0]
    for end in ends:
        if step == end:
            continue
        feed.total = end
        world.barrier()
        moments = [time.perf_counter()]
        loop = replace(session, job=replace(session.job, run=quiet), checkpoints=checkpoints, sinks=_Moments(moments))
        state = train(loop, loop.new_state(step))
        step, counts = state.step, state.meter.total
        if step < end:
            return None
    return counts, moments


def _memory(session: Session) -> RankMemory:
    """Memory of this rank, from one instrumented step. Collective."""
    world, strategy = session.world, session.strategy
    cuda = world.device.type == "cuda"
    peak_device = torch.cuda.max_memory_allocated(world.device) if cuda else 0
    peak_resident = system_metrics.peak_resident()  # before the measurement, which takes memory itself
    batch = session.feed.make(0).to(world.device)
    with system_metrics.measured(session.bytes_before) as memory:
        strategy.train_step(batch, strategy.run.optim.learning_rate)
    name = torch.cuda.get_device_name(world.device) if cuda else "CPU"
    return RankMemory(world.host, name, peak_resident, peak_device, memory.at_rest, memory.at_update)


def _versions() -> dict[str, str]:
    return {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__}


def read(folder: Path) -> Timing | None:
    """Read a job's measurements; None if it wrote none."""
    path = folder / FILE
    if not path.exists():
        return None
    values = json.loads(path.read_text(encoding="utf-8"))
    return Timing(**{**values, "ranks": [RankMemory(**rank) for rank in values["ranks"]]})
