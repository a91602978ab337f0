"""Many ranks in one process: a thread each, one running at a time, on torch's threaded process groups.

In: a run, and the number of ranks. Out: the weights of every rank after some steps, by the strategies' own code from
`train_step` down to torch.distributed; and the traffic. A rank runs until it waits for another, and takes its random
state with it, so a thousand ranks share one generator and draw as each would alone.
"""

from __future__ import annotations

import os
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed import multi_threaded_pg as threaded

from lockstep.config.run import Run
from lockstep.config.schedules import learning_rate
from lockstep.data.batch import StepBatch
from lockstep.data.job import Job
from lockstep.distributed.world import World
from lockstep.strategies.strategy import make_strategy
from lockstep.tasks.task import make_task
from lockstep.training.data_loader import StepLoader

WAIT_S = 7200.0  # for other ranks, which run one after another, maybe on a busy machine


class Turn:
    """The right to run: held by one rank at a time. No other draws random numbers or computes meanwhile."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.failed: BaseException | None = None
        self.conditions: list[threading.Condition] = []

    def condition(self) -> threading.Condition:
        return threading.Condition(self.lock)

    def wait(self, condition: threading.Condition, ready: Callable[[], bool]) -> None:
        """Let others run until a condition holds."""
        if ready():
            return
        drawn = torch.get_rng_state()
        self.conditions.append(condition)
        there = condition.wait_for(lambda: ready() or self.failed is not None, WAIT_S)
        self.conditions.remove(condition)
        torch.set_rng_state(drawn)
        if self.failed is not None:
            raise SystemExit  # the rank that failed first reports why
        assert there, "other ranks did not come"

    def fail(self, error: BaseException) -> None:
        if not isinstance(error, SystemExit):
            self.failed = self.failed or error
        for condition in self.conditions:
            condition.notify_all()


@dataclass
class Traffic:
    """Messages and bytes sent between ranks."""

    messages: Counter[tuple[int, int]] = field(default_factory=Counter)
    bytes: Counter[tuple[int, int]] = field(default_factory=Counter)
    collectives: Counter[str] = field(default_factory=Counter)  # calls over all ranks


class Meeting:
    """A simulated collective of a group; torch's would block outside of a rank's turn."""

    turn: Turn
    traffic: Traffic

    def __init__(self, size: int, collective: Any, group: Any) -> None:
        self.size, self.collective, self.data = size, collective, [None] * size
        self.came, self.done, self.condition = 0, False, self.turn.condition()

    def join(self, rank: int, data: Any) -> Any:
        self.traffic.collectives[type(self.collective).__name__] += 1
        self.data[rank], self.came = data, self.came + 1
        if self.came == self.size:
            self.collective.work(self.data)
            self.done = True
            self.condition.notify_all()
        self.turn.wait(self.condition, lambda: self.done)
        return threaded.ret_work(data)


class Together:
    """All-gather into one tensor: one copy per rank, instead of one per pair."""

    def work(self, data: list[tuple[Tensor, Tensor]]) -> None:
        every = torch.cat([own.detach().reshape(-1) for _, own in data])
        for into, _ in data:
            into.detach().view(-1).copy_(every)


class Arriving(dist.Work):
    """A message that is waited for."""

    def __init__(self, box: _Box, number: int, into: Tensor) -> None:
        super().__init__()
        self.box, self.number, self.into = box, number, into

    def wait(self, timeout: Any = None) -> bool:
        if self.into is not None:
            self.box.turn.wait(self.box.condition, lambda: self.number in self.box.there)
            self.into.copy_(self.box.there.pop(self.number))
            self.into = None
        return True


class _Box:
    """Messages from one rank to another, in order."""

    def __init__(self, turn: Turn) -> None:
        self.turn, self.condition, self.there = turn, turn.condition(), dict[int, Tensor]()
        self.sent = self.asked = 0


class Group(threaded.ProcessLocalGroup):
    """torch's threaded group, with point-to-point messages."""

    turn: Turn
    traffic: Traffic
    boxes: defaultdict[tuple[str, int, int], _Box]

    def _get_backend(self, device: Any) -> None:
        """There is none; torch 2.14 asks for it before it sends in batches."""

    def all_gather_single(self, into: Tensor, own: Tensor, opts: Any = None) -> Any:
        meeting = self._start_coll(Together(), self)
        work = meeting.join(self._rank, (into, own))
        self._end_coll(meeting, self)
        return work

    _allgather_base = all_gather_single  # its name before torch 2.13

    def send(self, tensors: list[Tensor], rank: int, tag: int = 0) -> Any:
        box, way = self.boxes[self.pg_name, self._rank, rank], (self._rank, rank)
        box.there[box.sent] = tensors[0].detach().clone()
        box.sent += 1
        self.traffic.messages[way] += 1
        self.traffic.bytes[way] += tensors[0].numel() * tensors[0].element_size()
        box.condition.notify_all()
        return threaded.ret_work(tensors)

    def recv(self, tensors: list[Tensor], rank: int, tag: int = 0) -> Any:
        box = self.boxes[self.pg_name, rank, self._rank]
        box.asked += 1
        return Arriving(box, box.asked - 1, tensors[0])


def _group(store: Any, rank: int, size: int, timeout: Any) -> Group:
    return Group(rank, size)


class SimulatedWorld(World):
    """One of the ranks."""

    def __init__(self, run: Run, rank: int, hosts: Sequence[str]) -> None:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(len(hosts)), LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
        super().__init__(run)
        self.hosts = list(hosts)

    def join(self) -> World:
        dist.init_process_group("simulated", store=dist.HashStore(), rank=self.rank, world_size=self.size)
        if self.size > 1:
            self._control = dist.group.WORLD
        return self


@contextmanager
def groups(turn: Turn, traffic: Traffic) -> Iterator[None]:
    """Context in which process groups are made of threads."""
    if "simulated" not in dist.Backend.backend_list:
        dist.Backend.register_backend("simulated", _group, devices=["cpu"])
    Meeting.turn = Group.turn = turn
    Meeting.traffic = Group.traffic = traffic
    Group.boxes = defaultdict(lambda: _Box(turn))
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    threaded._install_threaded_pg()
    try:
        with patch.object(threaded, "Collective", Meeting), patch.dict(os.environ):
            yield
    finally:
        threaded.ProcessLocalGroup.reset()
        threaded._uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)


def on_ranks(run: Run, hosts: Sequence[str], work: Callable[[World], Any]) -> tuple[list[Any], Traffic]:
    """Results of `work` on each rank, in rank order, and their traffic. Errors: the first rank's."""
    turn, traffic, found = Turn(), Traffic(), [None] * len(hosts)

    def live(rank: int) -> None:
        with turn.lock:
            try:
                if turn.failed is None:
                    found[rank] = work(SimulatedWorld(run, rank, hosts).join())
            except BaseException as error:
                turn.fail(error)

    with groups(turn, traffic):
        threads = [threading.Thread(target=live, args=(rank,), daemon=True) for rank in range(len(hosts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if turn.failed is not None:
        raise turn.failed
    return found, traffic


@dataclass
class SimulatedJob:
    """A run whose steps are collated once for all ranks."""

    run: Run
    steps: int = 3

    def __post_init__(self) -> None:
        self.task = make_task(Job.of(self.run).with_data())
        feed = StepLoader(self.task, range(self.run.micro_batches), torch.device("cpu"))
        self.batches: list[StepBatch] = [feed.make(step) for step in range(self.steps)]

    def __call__(self, world: World) -> dict[str, Tensor]:
        """Weights, or this rank's shards, after the steps."""
        strategy = make_strategy(Job.of(self.run), world)
        strategy.build(self.task)
        own = set(strategy.own_micro_batches())
        for step, batch in enumerate(self.batches):
            mine = replace(batch, micro_batches=[micro for micro in batch.micro_batches if micro.index in own])
            strategy.train_step(mine, learning_rate(self.run.optim, step, self.steps))
        found = {name: p.detach() for name, p in strategy.model.named_parameters()}
        return {name: (t.to_local() if isinstance(t, DTensor) else t).clone() for name, t in found.items()}


SMALL = """
import torch
from torch import nn
from torch.utils.data import TensorDataset


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(50, 16)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 40, dropout=0.1, batch_first=True, norm_first=True) for _ in range(2)
        )
        self.answer = nn.Linear(16, 7)

    def forward(self, words):
        found = self.words(words)
        for layer in self.layers:
            found = layer(found)
        return self.answer(found.mean(1))


def build():
    return Reader()


def data():
    words = torch.randint(50, (5000, 6))
    return TensorDataset(words, words[:, 0] % 7)


def loss(outputs, answers):
    return nn.functional.cross_entropy(outputs, answers)
"""


def whole(parts: Sequence[dict[str, Tensor]], like: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """Full weights of each rank; for shards, each combined copy."""
    if all(part[name].shape == tensor.shape for part in parts for name, tensor in like.items()):
        return list(parts)
    every = {name: torch.cat([part[name] for part in parts]).view(-1, *like[name].shape) for name in like}
    return [dict(zip(every, copies, strict=True)) for copies in zip(*every.values(), strict=True)]
