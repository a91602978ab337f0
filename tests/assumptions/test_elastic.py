"""Assumptions about torch elastic's agent and rendezvous, without any process."""

from __future__ import annotations

import dataclasses
import inspect
import os
import pickle
import signal
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch.distributed as dist
from torch.distributed.elastic.agent.server import local_elastic_agent
from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, PContext
from torch.distributed.elastic.multiprocessing.api import RunProcsResult
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo, dynamic_rendezvous
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousBackend,
    RendezvousTimeout,
    _NodeDesc,
    _RendezvousExitOp,
    _RendezvousState,
)

from support.assumed import rests_on_it


class Meeting:
    """A rendezvous with this machine as the only participant."""

    waiting = 0

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(dist.HashStore(), 0, 1, RendezvousStoreInfo("localhost", 1))

    def num_nodes_waiting(self) -> int:
        waiting, self.waiting = self.waiting, 0
        return waiting

    use_agent_store = False

    def get_run_id(self) -> str:
        return "job"

    def get_backend(self) -> str:
        return "none"


@rests_on_it("src/lockstep/launchers/processes/elastic_agent.py")
def test_private_methods_that_an_agent_calls() -> None:
    """LocalElasticAgent.run calls `_rendezvous` and `_start_workers`, makes events by `_construct_event`, and calls
    `_monitor_workers` until it succeeds. A failure uses up one of `_remaining_restarts` and calls `_restart_workers`; a
    waiting machine causes a restart that uses up none, with the group's state HEALTHY. Both call `_stop_workers`. After
    success it calls `_exit_barrier`, and in any case `_shutdown`, which closes `_pcontext` and from torch 2.13 on
    receives `_shutdown_timeout`."""
    results = [WorkerState.HEALTHY, WorkerState.HEALTHY, WorkerState.FAILED, WorkerState.SUCCEEDED]
    calls: list[Any] = []
    events: list[int] = []

    class Agent(LocalElasticAgent):
        def _rendezvous(self, worker_group: Any) -> None:
            calls.append("rendezvous")
            super()._rendezvous(worker_group)  # type: ignore[no-untyped-call]

        def _start_workers(self, worker_group: Any) -> dict[int, Any]:
            calls.append(("start", [worker.global_rank for worker in worker_group.workers]))
            return {0: 4, 1: 5}

        def _monitor_workers(self, worker_group: Any) -> RunResult:
            state = results.pop(0)
            calls.append((state.name, self._remaining_restarts))
            spec.rdzv_handler.waiting = int(len(results) == 2)  # type: ignore[attr-defined]
            return RunResult(state, return_values={0: 0, 1: 0})

        def _stop_workers(self, worker_group: Any) -> None:
            calls.append(("stop", worker_group.state.name))

        def _construct_event(self, *_: Any, **__: Any) -> Any:
            events.append(1)
            return super()._construct_event(*_, **__)

        def _exit_barrier(self) -> None:
            calls.append("barrier")

    spec = WorkerSpec("r", 2, Meeting(), entrypoint=print, max_restarts=3, monitor_interval=0.001)  # type: ignore[arg-type]
    agent: Any = Agent(spec, DefaultLogsSpecs(os.devnull), start_method="forkserver")
    agent._shutdown_timeout = 7
    agent._pcontext = SimpleNamespace(close=lambda number, timeout=None: calls.append(("close", number, timeout)))
    assert agent.run().state == WorkerState.SUCCEEDED
    begun = ["rendezvous", ("start", [0, 1])]
    steps: list[Any] = [*begun, ("HEALTHY", 3), ("HEALTHY", 3), ("stop", "HEALTHY"), *begun, ("FAILED", 3)]
    steps += [("stop", "FAILED"), *begun, ("SUCCEEDED", 2), "barrier"]
    takes_a_limit = "timeout" in inspect.signature(LocalElasticAgent._shutdown).parameters
    assert calls == [*steps, ("close", signal.SIGTERM, 7 if takes_a_limit else None)]
    assert events


@rests_on_it("src/lockstep/launchers/processes/elastic_agent.py")
def test_no_signal_handlers_without_signal_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """PContext.start installs torch elastic's handlers for the signals in TORCHELASTIC_SIGNALS_TO_HANDLE, and none if
    the variable is empty."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    context: Any = MagicMock()
    try:
        monkeypatch.setenv("TORCHELASTIC_SIGNALS_TO_HANDLE", "")
        PContext.start(context)
        assert {number: signal.getsignal(number) for number in before} == before
        monkeypatch.setenv("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGHUP")
        PContext.start(context)
        assert signal.getsignal(signal.SIGHUP) != before[signal.SIGHUP]
        assert signal.getsignal(signal.SIGTERM) == before[signal.SIGTERM]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class InMemory(RendezvousBackend):
    """A rendezvous backend in memory; each write returns a new token."""

    def __init__(self) -> None:
        self.held: tuple[bytes, int] | None = None

    @property
    def name(self) -> str:
        return "memory"

    def get_state(self) -> tuple[bytes, int] | None:
        return self.held

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, int, bool]:
        mine = token == (self.held and self.held[1])
        if mine:
            self.held = state, (token or 0) + 1
        assert self.held is not None
        return (*self.held, mine)


@rests_on_it("src/lockstep/launchers/processes/elastic_rendezvous.py")
def test_private_parts_of_a_dynamic_rendezvous(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dynamic rendezvous, its `_op_executor` and its `_state_holder` call their own `_record`, which can be replaced
    on the object. next_rendezvous returns the store of `_get_store`, looked up on the object too. `_state_holder.state`
    is a `_RendezvousState` whose `participants` maps machines (`_NodeDesc`); it contains `_this_node` until
    `_op_executor` runs `_RendezvousExitOp`. `_stop_heartbeats` ends the heartbeats."""
    rounds, recorded = [], []

    def handler(backend: InMemory, record: Callable[..., None]) -> Any:
        made: Any = DynamicRendezvousHandler.from_backend(
            "job", dist.HashStore(), backend, 1, 1, "127.0.0.1", RendezvousTimeout(*[timedelta(seconds=9)] * 4)
        )
        for part in (made, made._op_executor, made._state_holder):
            assert callable(part._record)
            part._record = record
        return made

    backend = InMemory()
    one = handler(backend, lambda *_, **named: recorded.append(named))
    own = dist.HashStore()
    wrapped = one._wrap_store(own)
    one._get_store = lambda: rounds.append(one._state_holder.state.round) or wrapped
    info = one.next_rendezvous()
    assert (info.rank, info.world_size, rounds) == (0, 1, [0])
    assert info.store is wrapped
    assert recorded
    state = one._state_holder.state
    assert isinstance(state, _RendezvousState)
    assert list(state.participants) == [one._this_node]
    assert isinstance(one._this_node, _NodeDesc)
    assert (one._this_node.addr, one._this_node.pid) == ("127.0.0.1", os.getpid())
    assert isinstance(one._this_node.local_id, int)  # counted in each process
    one._stop_heartbeats()
    assert not one._keep_alive_timer._thread.is_alive()
    one._op_executor.run(_RendezvousExitOp(), one._get_deadline(timedelta(seconds=9)))
    assert not one._state_holder.state.participants


@rests_on_it("src/lockstep/launchers/processes/elastic_agent.py", "src/lockstep/launchers/launcher.py")
def test_environment_and_arguments_of_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent starts workers by `start_processes` of its module, with each worker's environment in `envs`: these
    variables, ranks and world size as in Worker(local, global, role, size, size of role). In a string argument, but not
    in a string within a tuple, `$$` becomes `$` and `${local_rank}` the rank. wait() of the returned object gives a
    RunProcsResult, whose is_failed is true if it has failures."""
    started: dict[str, Any] = {}

    def start(**named: Any) -> Any:
        started.update(named)
        return SimpleNamespace(pids=lambda: {0: 4, 1: 5}, wait=lambda _: RunProcsResult(return_values={0: 7, 1: 0}))

    monkeypatch.setattr(local_elastic_agent, "start_processes", start)
    arguments = ("$$x ${local_rank}", ("$$x",))
    spec = WorkerSpec("r", 2, Meeting(), entrypoint=print, args=arguments, max_restarts=3)  # type: ignore[arg-type]
    agent: Any = LocalElasticAgent(spec, DefaultLogsSpecs(os.devnull), start_method="forkserver")
    agent._remaining_restarts = 2
    group = agent._worker_group
    group.workers = [Worker(local, local + 4, local, 8, 2) for local in range(2)]
    group.store, group.group_rank, group.group_world_size = dist.HashStore(), 2, 4
    group.master_addr, group.master_port = "10.0.0.1", 29
    assert agent._start_workers(group) == {0: 4, 1: 5}
    assert started["args"][1] == ("$x 1", ("$$x",))
    names = {
        "RANK": "5",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "8",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "2",
        "GROUP_WORLD_SIZE": "4",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29",
        "TORCHELASTIC_RUN_ID": "job",
        "TORCHELASTIC_RESTART_COUNT": "1",
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }
    assert started["envs"][1].items() >= names.items()
    others = {"ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "OMP_NUM_THREADS"}
    assert started["envs"][1].keys() - names.keys() <= others
    for worker in group.workers:
        worker.id = started["args"].keys() and {0: 4, 1: 5}[worker.local_rank]
    finished = agent._monitor_workers(group)
    assert (finished.state, finished.return_values) == (WorkerState.SUCCEEDED, {4: 7, 5: 0})
    failure = ProcessFailure(0, 4, 9, os.devnull)
    assert [RunProcsResult(failures=each).is_failed() for each in ({}, {0: failure})] == [False, True]
    assert [RunResult(state).is_failed() for state in (WorkerState.SUCCEEDED, WorkerState.FAILED)] == [False, True]


@rests_on_it("src/lockstep/launchers/processes/elastic_agent.py")
def test_exceptions_of_a_rendezvous_in_an_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the rendezvous raises RendezvousGracefulExitError, run() returns None. RendezvousClosedError,
    RendezvousTimeoutError and SignalException propagate out of run(). All but SignalException are RendezvousErrors."""
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.rendezvous import api

    class Ending(Meeting):
        def next_rendezvous(self) -> RendezvousInfo:
            raise error

    for error in (
        api.RendezvousGracefulExitError("over"),
        api.RendezvousClosedError("closed"),
        api.RendezvousTimeoutError("late"),
        SignalException("asked", sigval=signal.SIGTERM),
    ):
        spec = WorkerSpec("r", 1, Ending(), entrypoint=print)  # type: ignore[arg-type]
        agent: Any = LocalElasticAgent(spec, DefaultLogsSpecs(os.devnull), start_method="forkserver")
        assert isinstance(error, api.RendezvousError) is not isinstance(error, SignalException)
        if isinstance(error, api.RendezvousGracefulExitError):
            assert agent.run() is None
            continue
        with pytest.raises(type(error)) as caught:
            agent.run()
        assert caught.value is error


@rests_on_it("src/lockstep/launchers/processes/elastic_rendezvous.py")
def test_fields_of_a_rendezvous_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """A _RendezvousState has exactly these eight fields, a _NodeDesc three, in this order. set_state receives it
    pickled; its deadline has a time zone. A round without the maximum number of machines waits until the deadline, and
    is complete once the deadline has passed."""
    monkeypatch.setattr(dynamic_rendezvous, "_delay", lambda seconds: None)  # it would be a second
    backend = InMemory()
    timeouts = RendezvousTimeout(*(timedelta(seconds=each) for each in (9, 0.05, 10, 5)))
    assert (timeouts.join, timeouts.last_call, timeouts.close, timeouts.heartbeat) == (
        *(timedelta(seconds=each) for each in (9, 0.05, 10, 5)),
    )
    empty = {"round": 0, "complete": False, "deadline": None, "closed": False}
    lists = {"participants": {}, "wait_list": set(), "redundancy_list": set(), "last_heartbeats": {}}
    assert vars(_RendezvousState()) == empty | lists
    assert [field.name for field in dataclasses.fields(_NodeDesc)] == ["addr", "pid", "local_id"]
    states: list[Any] = []
    plain = backend.set_state
    backend.set_state = lambda state, token=None: states.append(pickle.loads(state)) or plain(state, token)  # type: ignore[method-assign, func-returns-value]
    made = DynamicRendezvousHandler.from_backend(
        *("job", dist.HashStore(), backend, 1, 2, "127.0.0.1", timeouts),
        keep_alive_interval=1,
        keep_alive_max_attempt=3,
    )
    info = made.next_rendezvous()
    made._stop_heartbeats()
    assert (info.rank, info.world_size) == (0, 1)
    deadlines = [state.deadline for state in states if state.deadline is not None]
    assert deadlines
    assert all(each.tzinfo is not None for each in deadlines)
    (heartbeat,) = states[-1].last_heartbeats.values()
    assert heartbeat.tzinfo is not None
    assert made.num_nodes_waiting() == 0
    assert not made.is_closed()


@rests_on_it("src/lockstep/launchers/processes/elastic_rendezvous.py")
def test_rank_0_publishes_its_address_and_port() -> None:
    """RendezvousStoreInfo.build(rank, store, address) on rank 0 writes its address and a free port into the store;
    other ranks read them. The store needs only set and get."""
    written: dict[str, bytes] = {}
    store: Any = SimpleNamespace(set=written.__setitem__, get=written.__getitem__)
    first = RendezvousStoreInfo.build(0, store, "10.0.0.7")
    assert (first.master_addr, first.master_port > 0) == ("10.0.0.7", True)
    assert RendezvousStoreInfo.build(1, store, "10.0.0.8") == first
    info = RendezvousInfo(store, 1, 2, first)
    assert (info.store, info.rank, info.world_size, info.bootstrap_store_info) == (store, 1, 2, first)
