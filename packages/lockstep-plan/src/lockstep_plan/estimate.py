"""Time, communication, waiting and cost of a step, from simulated ranks.

In: `Simulated` ranks, and a `Device`. Out: an `Estimate`. The model is deliberately simple: an operation takes the
longer of its arithmetic and its memory traffic (a roofline) plus a fixed part; a message takes a latency plus its bytes
over the bandwidth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lockstep.config.run import Run
from lockstep.data.job import Job
from lockstep.strategies.exact.gradient_sum import share
from lockstep.strategies.fsdp2 import FSDP2
from lockstep.strategies.sharded_optimizer import ShardedOptimizer
from lockstep.training.data_loader import StepLoader
from lockstep_plan.devices import Device
from lockstep_plan.fake_world import Simulated

HIDDEN = ("forward", "backward", "overlapped", "forward+backward")  # phases that messages may overlap
LOOKED_AT = 16  # evenly spaced steps from which waiting is estimated
RESERVED = 0.06  # fraction of a device's memory for driver, libraries and fragmentation


@dataclass(frozen=True)
class Wire:
    """Traffic of one rank in a step: one kind of collective over one level of links."""

    collective: str
    inside: bool  # within a machine; else between machines
    messages: float
    bytes: float
    seconds: float


@dataclass(frozen=True)
class Estimate:
    """Estimate of a step of the whole job."""

    seconds: dict[str, float]  # by phase; `messages`: communication not hidden; `waiting`: for slower ranks
    wire: list[Wire]
    peak: int  # bytes, of the rank that uses the most memory
    fits: bool
    at: Simulated  # the rank that uses the most memory

    @property
    def step_s(self) -> float:
        return sum(self.seconds.values())

    @property
    def waiting(self) -> float:
        """Share of a step in which a rank does not compute."""
        return (self.seconds["waiting"] + self.seconds["messages"]) / self.step_s if self.step_s else 0.0


def estimate(job: Job, simulated: Sequence[Simulated], device: Device, feed: StepLoader) -> Estimate:
    """Estimate one step of the job: the time of the slowest simulated rank, and the memory of the largest one."""
    largest = max(simulated, key=lambda each: each.peak)
    run, ranks = job.run, job.processes
    computing = [computed(job, each, device) for each in simulated]
    slowest = max(range(len(simulated)), key=lambda i: sum(computing[i].values()))
    wire, added = travelling(simulated[slowest], computing[slowest], device, ranks)
    seconds = dict(computing[slowest])
    level, stands_for = levels(job, feed)
    bubble = bubbles(job) * sum(seconds.values())
    if device.take_turns(ranks) and device.cores:  # a waiting rank frees its core, so only idle cores count
        alone = sum(seconds.values()) * device.slower(device.cores) / device.slower(ranks)
        bubble = max(0.0, alone * (1 + bubbles(job)) - sum(seconds.values()))
    if job.strategy.stages_of(run.strategy, ranks) == 1:
        own = stands_for[simulated[slowest].rank]
        seconds = {phase: s * (1 / own if phase in HIDDEN and own else 1.0) for phase, s in seconds.items()}
    whole = sum(s for phase, s in seconds.items() if phase in HIDDEN)
    seconds = {phase: s * (level if phase in HIDDEN else 1.0) for phase, s in seconds.items()}
    waiting = 0.0 if device.take_turns(ranks) else whole * (1 - level)
    seconds |= {"messages": added, "waiting": waiting + bubble + on_the_way(job, wire)}
    seconds["waiting"] += device.wait_s.get(strategy_key(job), 0.0) * max(each.messages for each in simulated)
    return Estimate(seconds, wire, largest.peak, largest.peak <= device.memory_bytes * (1 - RESERVED), largest)


def computed(job: Job, of: Simulated, device: Device) -> dict[str, float]:
    """Seconds of computing by phase."""
    run, ranks = job.run, job.processes
    precision = precision_of(run)
    slower = device.slower(ranks)
    besides = device.micro_batch_s + device.engine_s.get(strategy_key(job), 0.0)
    mixed = any(phase == "forward+backward" for phase, *_ in of.ops)  # then the overlapped phase mixes both, too
    seconds = {"other": of.micro_batches * slower * besides} if besides else {}
    for phase, flops, size, count in of.ops:
        like = "forward+backward" if mixed and phase == "overlapped" else phase
        each = slower * device.scale(like) * device.seconds(precision, flops, size)
        seconds[phase] = seconds.get(phase, 0.0) + count * each
    return seconds


def precision_of(run: Run) -> str:
    """The precision of a run's matrix products."""
    return "bf16" if run.precision == "fp32" and run.model.trained_in_bfloat16 else run.precision


def strategy_key(job: Job) -> str:
    """The strategy's key in device files: a key of `rates.STRATEGIES`, or the name in the run file."""
    return f"{job.run.strategy.name}_step" if job.strategy is ShardedOptimizer else job.run.strategy.name


def travelling(of: Simulated, computing: dict[str, float], device: Device, ranks: int) -> tuple[list[Wire], float]:
    """Return (traffic of a step, largest first; seconds that it adds to the step). If the device overlaps communication
    with computing, only the part that computing does not hide is added."""
    wires: dict[tuple[str, bool], Wire] = {}
    by_phase: dict[str, float] = {}
    for phase, name, group, size, to, count in of.sent:
        for inside, messages, sent in parts(name, group, size, to, of.rank, device.ranks_per_node):
            link = device.inside(ranks) if inside else device.links.between
            seconds = count * link.seconds(messages, sent)
            by_phase[phase] = by_phase.get(phase, 0.0) + seconds
            known = wires.get((name, inside), Wire(name, inside, 0, 0, 0))
            total = (known.messages + count * messages, known.bytes + count * sent, known.seconds + seconds)
            wires[name, inside] = Wire(name, inside, *total)
    added = sum(
        max(0.0, s - computing.get(phase, 0.0)) if device.overlaps and phase in HIDDEN else s
        for phase, s in by_phase.items()
    )
    return sorted(wires.values(), key=lambda wire: -wire.bytes), added


def parts(
    name: str, group: tuple[int, ...], size: int, to: int | None, rank: int, per_node: int
) -> list[tuple[bool, float, float]]:
    """Split one collective of a group into this rank's traffic: (within a machine?, messages, bytes). Gathers, scatters
    and sums use a ring, limited by its slowest link; an all-to-all sends to each rank separately."""
    count, node = len(group), rank // per_node
    if to is not None:
        return [(to // per_node == node, 1, float(size))]
    if name == "alltoall_base":
        near = sum(other // per_node == node for other in group) - 1
        each = size / count
        hops = [(True, float(near), near * each), (False, float(count - 1 - near), (count - 1 - near) * each)]
        return [part for part in hops if part[1]]
    inside = group[0] // per_node == group[-1] // per_node
    rounds = {"allreduce": 2 * (count - 1), "broadcast": 1}.get(name, count - 1)
    share_sent = {"allreduce": 2 * (count - 1) / count, "broadcast": 1.0}.get(name, (count - 1) / count)
    return [(inside, float(rounds), size * share_sent)]


def levels(job: Job, feed: StepLoader) -> tuple[float, dict[int, float]]:
    """Estimate load imbalance from real lengths, over evenly spaced steps. Returns (work of the mean rank, rank -> its
    work), both relative to the slowest rank of each step. 1.0 for pipelines, which wait differently: see `bubbles`."""
    run, ranks = job.run, job.processes
    if job.strategy.stages_of(run.strategy, ranks) > 1 or ranks == 1:
        return 1.0, dict.fromkeys(range(ranks), 1.0)
    steps = np.unique(np.linspace(0, feed.total - 1, min(LOOKED_AT, feed.total)).astype(int))
    dealt = turns(run, ranks) if job.strategy is FSDP2 else None

    def work_of(tokens: np.ndarray) -> float:  # tokens of each example of a micro-batch
        if not len(tokens):
            return 0.0
        return float(len(tokens) * tokens.max() if feed.pads else tokens.sum())

    work_of_ranks = []
    for step in steps:
        rows = feed.order.step(int(step))
        groups = feed.task.split_micro_batches(feed.columns, rows)
        work = [work_of(feed.columns.lengths[rows[group]]) for group in groups]
        work_of_ranks.append(beside_slowest(work, dealt, ranks))
    of_ranks = np.array(work_of_ranks)  # [steps, ranks]
    return float(of_ranks.mean()), dict(enumerate(of_ranks.mean(0).tolist()))


def turns(run: Run, ranks: int) -> list[list[range]]:
    """Return [turn][rank] -> the micro-batch that FSDP assigns, as a range of one number or an empty one. In each turn
    all ranks gather weights together."""
    copies, tensor = (int(run.strategy.options.get(key, 1)) for key in ("replicate", "tensor_parallel"))
    shards = ranks // (copies * tensor)
    blocks = [share(run.micro_batches, copy, copies) for copy in range(copies)]
    return [
        [
            range(at := min(block.start + turn * shards + rank // tensor, block.stop), min(at + 1, block.stop))
            for block in blocks
            for rank in range(shards * tensor)
        ]
        for turn in range(-(-max(map(len, blocks)) // shards))
    ]


def beside_slowest(work: Sequence[float], together: list[list[range]] | None, ranks: int) -> list[float]:
    """Return each rank's work relative to the time of a step. That time is the work of the busiest rank or, with turns
    (`together`), the sum over turns of the busiest rank's work."""
    dealt = together or [[share(len(work), rank, ranks) for rank in range(ranks)]]
    of_turns = np.array([[sum(work[k] for k in own if k < len(work)) for own in turn] for turn in dealt])  # [turns, W]
    shares: list[float] = (of_turns.sum(0) / (of_turns.max(1).sum() or 1.0)).tolist()
    return shares


def bubbles(job: Job) -> float:
    """Idle time of a pipeline stage relative to its busy time (Narayanan et al. 2021, arXiv:2104.04473)."""
    run, ranks, options = job.run, job.processes, job.run.strategy.options
    if (stages := job.strategy.stages_of(run.strategy, ranks)) == 1:
        return 0.0
    each = int(options.get("stages_per_rank", 2)) if options.get("schedule") == "interleaved" else 1
    return (stages - 1) / (max(1, run.micro_batches * stages // ranks) * each)


def on_the_way(job: Job, wire: Sequence[Wire]) -> float:
    """Seconds per step for which a pipeline stage waits for hidden states or gradients; 0 without a pipeline. With S
    stages, S micro-batches are in flight in each direction; with gpipe a stage waits only for the first and the
    last."""
    run, ranks = job.run, job.processes
    if (stages := job.strategy.stages_of(run.strategy, ranks)) == 1:
        return 0.0
    one = max((each.seconds / each.messages for each in wire if each.collective == "send"), default=0.0)
    rounds = 1 if run.strategy.options.get("schedule") == "gpipe" else run.micro_batches * stages // ranks / stages
    return 2 * (stages - 1) * rounds * one


def padding(feed: StepLoader) -> float:
    """Computed tokens per real token, over evenly spaced steps."""
    steps = np.unique(np.linspace(0, feed.total - 1, min(LOOKED_AT, feed.total)).astype(int))
    real = padded = 0.0
    for step in steps:
        rows = feed.order.step(int(step))
        lengths = feed.columns.lengths[rows]
        real += float(lengths.sum())
        groups = feed.task.split_micro_batches(feed.columns, rows)
        padded += feed.task.padded(feed.columns, rows, groups) if feed.pads else float(lengths.sum())
    return padded / real if real else 1.0


def power_of_two(ranks: int) -> int:
    """The smallest power of two that is at least `ranks`."""
    return 1 << max(0, ranks - 1).bit_length()
