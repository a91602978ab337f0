"""Simulate one rank of a job of any size: its memory, work and messages in a step.

In: a run, the number of ranks and this rank. Out: a `Simulated`. The strategy and its engine run their real code on
tensors without data (`simulated.py`), so `lockstep plan` starts each simulation in its own process.
"""

from __future__ import annotations

import gc
import json
import os
import warnings
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.config.run import Run, load
from lockstep.data.job import Job
from lockstep.distributed.step_timer import NAMES, StepTimer
from lockstep.distributed.torch_internals import local
from lockstep.distributed.world import World
from lockstep.strategies import single
from lockstep.strategies.engines import pipelining
from lockstep.strategies.exact.training_state import freeze
from lockstep.strategies.strategy import Strategy, make_strategy
from lockstep.tasks.models.storage_dtype import counts
from lockstep.tasks.task import Task, make_task
from lockstep.training.data_loader import StepLoader
from lockstep_plan import simulated
from lockstep_plan.simulated import ENGINE, GRADIENTS, Ledger, Peak

MOST = 8  # micro-batches simulated per rank at most; a formula adds the memory of further ones
MOST_OF_LARGE = 2  # at most for a model of more than LARGE parameters, which is slow to simulate
LARGE = 1_000_000_000
PARTIAL = "partial sums"


@dataclass(frozen=True)
class Simulated:
    """Resources of one rank in a step, in bytes unless noted."""

    rank: int
    at_rest: dict[str, int]  # between steps, by kind
    peak: int  # in a step with the longest examples
    kinds: dict[str, int]  # of the peak
    where: str
    ops: list[tuple[str, int, int, float]]  # (phase, FLOP, bytes, count) of a typical step
    sent: list[tuple[str, str, tuple[int, ...], int, int | None, float]]  # (phase, name, ranks, bytes, to, count)
    micro_batches: int  # of this rank
    tokens: float  # in these micro-batches, including computed padding
    parameters: int
    trained: int

    @property
    def messages(self) -> float:
        """Number of collectives and sends in a step."""
        return sum(count for *_, count in self.sent)


class FakeWorld(World):
    """A rank without peers: a collective returns this rank's own values."""

    def on_machines(self, each: int) -> World:
        """Assign `each` ranks to a machine, join the fake process group, and return this world. Strategies then reduce
        sums within a machine first."""
        self.hosts = [f"machine-{rank // each}" for rank in range(self.size)]
        if self.size > 1:
            simulated.join(self.rank, self.size)
        return self

    def broadcast(self, value: Any) -> Any:
        return value

    def all_gather(self, value: Any) -> list[Any]:
        return [value] * self.size

    def barrier(self) -> None:
        pass


class Watched(StepTimer):
    """Step timer that passes each change of phase to the ledger, with the gradients that exist at that time."""

    def __init__(self, ledger: Ledger, strategy: Strategy) -> None:
        super().__init__(torch.device("cpu"))
        self._ledger, self._strategy = ledger, strategy

    def change(self, place: int) -> int:
        for tensor in simulated.summed_by(self._strategy):
            self._ledger.count(tensor, GRADIENTS)
        before = super().change(place)
        self._ledger.phase = NAMES[place]
        self._ledger.micro_batch += NAMES[place] == "forward"
        return before


def simulate(run: Run, ranks: int, rank: int, on_gpus: bool, per_node: int | None = None) -> Simulated:
    """Simulate one rank: build its strategy and run three steps. Needs its own process, because engines cache facts
    about the other ranks. `on_gpus`: leave out work that only CPUs do. `per_node`: ranks per machine; default:
    all."""
    job = Job.of(run, ranks).with_data()
    every, trained = counts(freeze(run.model, make_task(job).model(empty=True)))
    less = fewer(job, MOST if every <= LARGE else MOST_OF_LARGE)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")  # required by engines, never used
    simulated_job = job.having(less)
    task = make_task(simulated_job)
    if on_gpus:
        single.row_sparse = lambda *_: set()
    pipelining.set_random_state = lambda *_: None  # there is no data to travel between stages
    world = FakeWorld(less).on_machines(per_node or ranks)
    strategy = make_strategy(simulated_job, world)
    feed = StepLoader(task, strategy.own_micro_batches(), world.device)
    share = len(feed.indices)
    _without_numbers(strategy, task, run, max(1, share))
    ledger = Ledger()
    with warnings.catch_warnings(), simulated.without_numbers(ledger, strategy.needs):
        warnings.simplefilter("ignore")
        built(strategy, task, ledger)
        at_rest = stepped(strategy, feed, ledger)
        peak = ledger.peak
    more = len([*own(run, strategy, ranks)]) / max(1, share)
    tokens = sum(_tokens(feed, i) for i in (middle(feed),)) * more
    kinds = divided(peak, strategy)
    overlapped = any(op.phase == "overlapped" for op in ledger.ops)

    def scale(phase: str) -> float:
        """Return micro-batches of the run per simulated one, for a phase. If messages overlap the last backward of a
        step, that backward is the phase `overlapped` and counts once."""
        if phase == "backward" and overlapped and share > 1:
            return (share * more - 1) / (share - 1)
        return more if phase in ("forward", "backward", "forward+backward", "other") else 1.0

    partial_sums = simulated_job.strategy.memory.partial_sums
    whole, part = (replace(simulated_job, run=each, processes=ranks) for each in (run, less))
    beyond = int((partial_sums(whole) - partial_sums(part)) * trained)
    kinds[PARTIAL] = kinds.get(PARTIAL, 0) + beyond
    return Simulated(
        rank,
        at_rest,
        peak.bytes + beyond,
        {kind: size for kind, size in kinds.items() if size},
        f"{peak.phase}{f' of micro-batch {peak.micro_batch}' if peak.micro_batch else ''} ({peak.op})",
        [(op.phase, op.flops, op.bytes, n * scale(op.phase)) for op, n in ledger.ops.items()],
        [(s.phase, s.name, s.group, s.bytes, s.to, n * scale(s.phase)) for s, n in ledger.sent.items()],
        round(share * more),
        tokens,
        every,
        trained,
    )


def fewer(job: Job, most: int = MOST) -> Run:
    """Return the run limited to `most` micro-batches per rank, each with as many examples as before. Pipelines keep as
    many micro-batches as their schedule needs (gpipe: all)."""
    run, ranks = job.run, job.processes
    if (stages := job.strategy.stages_of(run.strategy, ranks)) > 1:
        each = ranks // stages * max(most, 2 * stages * int(run.strategy.options.get("stages_per_rank", 2)))
        if run.strategy.options.get("schedule") == "gpipe":
            return run
    else:
        each = ranks * most
    if run.micro_batches <= each:
        return run
    batch = max(each, round(run.batch_size * each / run.micro_batches))
    return run.model_copy(update={"micro_batches": each, "batch_size": batch})


def own(run: Run, strategy: Strategy, ranks: int) -> Iterable[int]:
    """Return the indices of the micro-batches that this rank computes in the run without the limit of `fewer`."""
    whole = type(strategy)(replace(strategy.job, run=run), strategy.world)
    return list(whole.own_micro_batches())


def _without_numbers(strategy: Any, task: Task, run: Run, share: int) -> None:
    """Replace functions that need data: the one that loads weights, and the one that sums losses over ranks."""
    leaves = strategy.run.micro_batches
    model = task.model

    def make(empty: bool = False) -> nn.Module:
        make_empty = simulated.on_meta if empty else simulated.emptied
        return make_empty(lambda: model(empty=True))

    def sums(losses: Tensor, numbers: Iterable[int]) -> tuple[Tensor, list[int]]:
        return losses, [number * leaves // share for number in numbers]

    for thing, name, value in (
        (task, "model", make),
        (strategy.totals, "_in_one_message", sums),
    ):
        setattr(thing, name, value)


def built(strategy: Strategy, task: Task, ledger: Ledger) -> None:
    """Build the strategy, and mark its weights in the ledger."""
    ledger.kind = ENGINE
    strategy.build(task)
    strategy.update.finite.check = lambda *_, **__: True  # type: ignore[method-assign]
    for kind, tensor in simulated.kept_by(strategy):
        ledger.count(tensor, kind)
    ledger.kind = simulated.ACTIVATIONS
    strategy.phases = Watched(ledger, strategy)
    for parameter in strategy.model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda p: _gradient(p, ledger))


def _gradient(parameter: Tensor, ledger: Ledger) -> None:
    if parameter.grad is not None:
        ledger.count(parameter.grad, GRADIENTS)


def stepped(strategy: Strategy, feed: StepLoader, ledger: Ledger) -> dict[str, int]:
    """Run three steps: a first one that creates the optimizer state, a typical one whose work is recorded, and one with
    the longest examples whose peak stays in the ledger. Returns the bytes held between steps."""
    usual = feed.make(middle(feed))
    strategy.train_step(usual, 1e-3)
    for kind, tensor in simulated.kept_by(strategy):
        ledger.count(tensor, kind)
    ledger.recording = True
    strategy.train_step(usual, 1e-3)
    ledger.recording = False
    gc.collect()
    at_rest = {kind: size for kind, size in ledger.kinds.items() if size}
    ledger.restart()
    strategy.train_step(feed.longest(), 1e-3)
    return at_rest


def middle(feed: StepLoader) -> int:
    """Return the step with the median number of tokens among the first few."""
    steps = range(min(feed.total, 9))
    cost = {step: _tokens(feed, step) for step in steps}
    return sorted(steps, key=lambda step: cost[step])[len(steps) // 2]


def _tokens(feed: StepLoader, step: int) -> float:
    rows = feed.order.step(step)
    groups = feed.task.split_micro_batches(feed.columns, rows)
    mine = [rows[groups[k]] for k in feed.indices if k < len(groups)]
    lengths = [feed.columns.lengths[each] for each in mine if len(each)]
    return float(sum(len(n) * n.max() if feed.pads else n.sum() for n in lengths))


def divided(peak: Peak, strategy: Strategy) -> dict[str, int]:
    """Return bytes by kind at the peak, with gradients beyond one fp32 gradient per parameter counted as partial
    sums."""
    kinds = {kind: size for kind, size in peak.kinds.items() if size}
    one = 4 * sum(local(p).numel() for p in strategy.weights.named.values())
    waiting = kinds.get(GRADIENTS, 0) - one
    return kinds | ({GRADIENTS: one, PARTIAL: waiting} if one and waiting > 0 else {})


def main(words: list[str]) -> int:
    """Child process: `RUN.yaml RANKS RANK cpu|gpu`, ranks per machine, and the output file. Returns the exit status."""
    path, ranks, rank, kind, per_node, answer = words
    run = load(path, [])
    result = simulate(run, int(ranks), int(rank), kind == "gpu", int(per_node))
    Path(answer).write_text(json.dumps(asdict(result)), encoding="utf-8")
    return 0


def read(path: Path) -> Simulated:
    """Read the result that `main` wrote."""
    fields = json.loads(path.read_text(encoding="utf-8"))
    ops = [tuple(op) for op in fields.pop("ops")]
    sent = [(phase, name, tuple(group), size, to, n) for phase, name, group, size, to, n in fields.pop("sent")]
    return replace(Simulated(**fields, ops=[], sent=[]), ops=ops, sent=sent)
