"""Measure this machine's rates at a run's own sizes: the work of each rank in `lockstep bench --calibrate`.

In: a run, in every rank. Out: `OUTPUT/rates.json`, written by rank 0: matrix products of the model's sizes, memory
traffic by size, the fixed cost of an operation; phases of a step of one process; the same step on all ranks at once;
messages between all ranks; with two ranks a step of every strategy (`STRATEGIES`), and the computing time of those with
their own code per layer, bucket or stage (`ENGINES`).

With one thread per process, computing is measured as that thread's CPU time, which excludes other programs. Concurrent
ranks are measured in wall-clock time. Memory freed by a step is kept for the next one, as in training.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from lockstep.config.run import Run, RunError
from lockstep.data.job import Job
from lockstep.distributed.randomness import seed_libraries
from lockstep.distributed.step_timer import NAMES, StepTimer
from lockstep.distributed.system_metrics import keep_freed_memory
from lockstep.distributed.world import World
from lockstep.strategies.engines import fsdp
from lockstep.strategies.strategy import Strategy, make_strategy
from lockstep.tasks.task import Task, make_task
from lockstep.training.data_loader import StepLoader
from lockstep.training.session import join_ranks
from lockstep_plan.fake_world import middle
from lockstep_plan.simulated import Product, Products

FILE = "rates.json"
PRODUCTS = 16  # matrix products measured at most: one per half octave of FLOP, those with the most work
SIZES = (2**12, 2**15, 2**18, 2**20, 2**22, 2**24, 2**26)  # bytes read and written by an operation
MESSAGES = (2**10, 2**14, 2**18, 2**20, 2**22, 2**24)  # bytes exchanged or gathered by all ranks
LEAST_S = 0.02  # shortest duration of a sample
ENGINES: Mapping[str, dict[str, Any]] = {
    "fsdp2": {"name": "fsdp2", "options": {"gather": fsdp.MICRO_BATCH}},
    **{
        name: {"name": name, "options": {}}
        for name in ("pipeline", "zero1", "zero2", "zero3", "hf_accelerate", "hf_trainer")
    },
}
STRATEGIES: Mapping[str, dict[str, Any]] = {
    "allreduce": {"name": "allreduce", "options": {}},
    "ddp": {"name": "ddp", "options": {}},
    "fsdp2_step": {"name": "fsdp2", "options": {"gather": fsdp.STEP}},
    **ENGINES,
}
STRATEGIES_ON = 2  # processes
NOT_THE_ENGINES = ("reduction", "optimizer")  # phases

Point = tuple[float, float]  # size, rate per second


@dataclass
class Rates:
    """Measurements of one job."""

    processes: int
    threads: int
    precision: str
    memory_bytes: int  # of the machine
    products: list[Point] = field(default_factory=list)  # FLOP of one product -> FLOP/s; one process alone
    memory: list[Point] = field(default_factory=list)  # bytes of one operation -> bytes/s; one process alone
    operation_s: float = 0.0
    view_s: float = 0.0
    micro_batches: int = 0  # in a step of one process
    phases: dict[str, float] = field(default_factory=dict)  # its seconds of CPU time
    at_once_s: float = 0.0  # wall-clock seconds of the same step on all ranks at once, slowest rank
    latency_s: float = 0.0  # of one message
    messages: list[Point] = field(default_factory=list)  # bytes of one message -> bytes/s
    engines: dict[str, float] = field(default_factory=dict)  # each of `ENGINES` -> its `busy_s`
    busy_s: float = 0.0  # CPU seconds of `single` on all ranks at once, without reduction and update
    # each of `STRATEGIES` -> wall-clock seconds of the slowest rank
    steps: dict[str, float] = field(default_factory=dict)


class Alone(World):
    """A world that contains only this rank, even in a job of several ranks."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.rank, self.size, self.hosts, self.members = 0, 1, [self.host], None


class Clock(StepTimer):
    """Step timer that adds up seconds by phase, measured by the function `now`."""

    def __init__(self, now: Callable[[], float]) -> None:
        super().__init__(torch.device("cpu"))
        self.now, self.seconds, self._last = now, dict.fromkeys(NAMES, 0.0), now()

    def change(self, place: int) -> int:
        before = super().change(place)
        now = self.now()
        self.seconds[NAMES[before]] += now - self._last
        self._last = now
        return before


def clock(threads: int) -> Callable[[], float]:
    """Return the clock for computing: CPU time for one thread, wall-clock time for several."""
    return time.thread_time if threads == 1 else time.perf_counter


def seconds_of(work: Callable[[], Any], now: Callable[[], float], samples: int = 5) -> float:
    """Seconds of one call: the median of samples of a minimum duration."""
    work()
    began = now()
    work()
    times = max(1, int(LEAST_S / max(now() - began, 1e-7)))
    durations = []
    for _ in range(samples):
        began = now()
        for _ in range(times):
            work()
        durations.append((now() - began) / times)
    return median(durations)


def measure(job: Job, world: World, steps: str) -> int:
    """Measure in every rank; rank 0 writes `OUTPUT/rates.json`. `steps`: steps per measurement. Collective. Returns the
    exit status."""
    run = job.run
    join_ranks(job, world)
    rates = Rates(world.size, world.threads, run.precision, memory_bytes())
    now = clock(world.threads)
    task = make_task(job)
    alone = job.having(run.as_one_process())
    own = alone.run
    strategy = make_strategy(alone, Alone(own))
    seed_libraries(run.seed)
    strategy.build(task)
    feed = StepLoader(task, strategy.own_micro_batches(), world.device)
    batch = feed.make(middle(feed))
    keep_freed_memory()
    for _ in range(2):  # warm up: optimizer state, and the allocator's memory
        strategy.train_step(batch, 1e-6)
    if world.size == 1:
        operations(rates, strategy, batch, now)
        rates.micro_batches = len(batch.micro_batches)
        rates.phases = phases_of(strategy, batch, int(steps), now)
    rates.at_once_s = at_once(world, lambda: strategy.train_step(batch, 1e-6), int(steps))
    if world.size == STRATEGIES_ON:
        rates.busy_s = computing(world, strategy, batch, int(steps), now)
    strategy.close()
    if world.size > 1:
        rates.latency_s, rates.messages = between_ranks(world, int(steps))
    for name, way in STRATEGIES.items() if world.size == STRATEGIES_ON else ():
        measure_strategy(name, job.having(run.with_keys("strategy", **way)), task, world, int(steps), rates)
    if world.is_main:
        (run.folder / FILE).write_text(json.dumps(asdict(rates), indent=1), encoding="utf-8")
    world.barrier()
    return 0


def measure_strategy(name: str, job: Job, task: Task, world: World, steps: int, rates: Rates) -> None:
    """Record wall-clock seconds of a step, and for `ENGINES` the computing seconds per rank; nothing if the model or
    the run does not allow the strategy. Collective."""
    try:
        job.strategy.check(job)
    except RunError:
        return
    strategy = make_strategy(job, world)
    seed_libraries(job.run.seed)
    strategy.build(task)
    feed = StepLoader(task, strategy.own_micro_batches(), world.device)
    batch = feed.make(middle(feed))
    for _ in range(2):
        strategy.train_step(batch, 1e-6)
    rates.steps[name] = at_once(world, lambda: strategy.train_step(batch, 1e-6), steps)
    if name in ENGINES:
        rates.engines[name] = computing(world, strategy, batch, steps, clock(world.threads))
    strategy.close()


def computing(world: World, strategy: Strategy, batch: Any, steps: int, now: Callable[[], float]) -> float:
    """Computing seconds of a step without reduction and update: mean over ranks that start together. Collective."""
    world.barrier()
    phases = phases_of(strategy, batch, steps, now)
    mine = sum(seconds for name, seconds in phases.items() if name not in NOT_THE_ENGINES)
    return sum(world.all_gather(mine)) / world.size


def phases_of(strategy: Strategy, batch: Any, steps: int, now: Callable[[], float]) -> dict[str, float]:
    """Seconds by phase, medians over several steps."""
    seconds_by_phase: dict[str, list[float]] = {}
    for _ in range(steps):
        strategy.phases = clock = Clock(now)
        with clock("other"):
            strategy.train_step(batch, 1e-6)
        for name, seconds in clock.seconds.items():
            seconds_by_phase.setdefault(name, []).append(seconds)
    strategy.phases = StepTimer(strategy.world.device)
    return {name: median(each) for name, each in seconds_by_phase.items() if any(each)}


def operations(rates: Rates, strategy: Strategy, batch: Any, now: Callable[[], float]) -> None:
    """Measure the model's matrix products, additions by size, and an operation without work."""
    with Products() as products:
        strategy.train_step(batch, 1e-6)
    with torch.no_grad():
        every = [
            (float(each.flops), each.flops / seconds_of(each.again(), now))
            for each in spread(products.products.values())
        ]
    rates.products = sorted(every)
    with torch.no_grad():
        little, room = torch.ones(4), torch.ones(4)
        rates.operation_s = seconds_of(lambda: torch.add(little, little, out=room), now)
        rates.view_s = seconds_of(lambda: little.view(2, 2), now)
        for size in SIZES:
            a, b, c = (torch.ones(size // 12) for _ in range(3))
            took = seconds_of(partial(torch.add, a, b, out=c), now)
            rates.memory.append((float(size), size / max(took - rates.operation_s, 0.05 * took)))


def spread(products: Iterable[Product]) -> list[Product]:
    """Select one product per half octave of FLOP, the one with most work, and of those the `PRODUCTS` with most
    work."""
    most: dict[int, Product] = {}
    for each in products:
        place = round(2 * math.log2(max(1, each.flops)))
        if each.work and (place not in most or each.work > most[place].work):
            most[place] = each
    return sorted(most.values(), key=lambda each: -each.work)[:PRODUCTS]


def at_once(world: World, step: Callable[[], Any], steps: int) -> float:
    """Wall-clock seconds of a step that all ranks start together, on the slowest rank: median of `steps`.
    Collective."""
    durations = []
    for _ in range(steps):
        world.barrier()
        began = time.perf_counter()
        step()
        durations.append(max(world.all_gather(time.perf_counter() - began)))
    return median(durations)


def between_ranks(world: World, repeats: int) -> tuple[float, list[Point]]:
    """Measure all-to-all and all-gather over all ranks, by the wall-clock time of the slowest rank. Returns (seconds of
    latency per message, (bytes, bytes per second) by size). Collective."""
    ranks, durations = world.size, []
    for size in MESSAGES:
        count = size // 4 // ranks
        whole, part, other = torch.ones(ranks * count), torch.ones(count), torch.ones(ranks * count)
        each = [
            at_once(world, partial(dist.all_to_all_single, other, whole), repeats),
            at_once(world, partial(dist.all_gather_into_tensor, whole, part), repeats),
        ]
        durations.append((4 * count, (each[0] * each[1]) ** 0.5 / (ranks - 1)))
    latency = durations[0][1]
    return latency, [(float(size), size / max(s - latency, 0.05 * s)) for size, s in durations[1:]]


def memory_bytes() -> int:
    """Memory of this machine or of its container; 0 if unknown."""
    limits = []
    for path, unit in (("/proc/meminfo", 1024), ("/sys/fs/cgroup/memory.max", 1)):
        try:
            words = Path(path).read_text(encoding="utf-8").split()
        except OSError:
            continue
        limits += [int(word) * unit for word in words[:2] if word.isdigit()]
    return min(limits, default=0)


def read(folder: Path) -> Rates | None:
    """Read a job's result, or None if there is none."""
    path = folder / FILE
    if not path.exists():
        return None
    fields = json.loads(path.read_text(encoding="utf-8"))
    for name in ("products", "memory", "messages"):
        fields[name] = [(size, rate) for size, rate in fields[name]]
    return Rates(**fields)
