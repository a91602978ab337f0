"""Machines that are slow when a job forms again or ends: two in this process, one of which is suspended."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousStateError, dynamic_rendezvous

from lockstep.launchers.processes.elastic_rendezvous import ElasticRendezvous, End, Limits, Node
from support.command import until
from support.messages import raises

LONG = 60.0  # timeout for a lost machine, in tests in which none is lost


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadPoolExecutor]:
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")  # as the launcher does
    with ThreadPoolExecutor(2) as pool:
        yield pool


def machine(host: str, port: int = 0, lost: float = LONG) -> ElasticRendezvous:
    """Return a machine of a job of one to two. `port`: of the other machine, which has the store. A job forms at once
    when the minimum has joined."""
    node = Node(host, "127.0.0.1", 1, holds=not port)
    return ElasticRendezvous("127.0.0.1", port, 1, 2, node, Limits(join=100, more=0.1, lost=lost), key="")


def waiting(lost: float, pool: ThreadPoolExecutor) -> tuple[ElasticRendezvous, ElasticRendezvous, Future[Any], Any]:
    """Return a job of one machine, a machine that waits to join it, with what it will see, and an event that suspends
    it."""
    first = machine("a", lost=lost)
    assert first.next_rendezvous().world_size == 1
    second = machine("b", first.port, lost)
    joined = pool.submit(second.next_rendezvous)
    go = threading.Event()
    until(lambda: first.num_nodes_waiting() == 1, "the other machine to wait")
    backend: Any = second._inner._state_holder._backend
    ask = backend._ask

    def later(*words: str) -> bytes:
        assert go.wait(LONG)
        return bytes(ask(*words))

    backend._ask = later
    return first, second, joined, go


@pytest.mark.slow
def test_a_waiting_machine_is_awaited(threads: ThreadPoolExecutor) -> None:
    """A job that stopped for a waiting machine waits until that machine has joined."""
    first, _, joined, go = waiting(LONG, threads)
    formed = threads.submit(first.next_rendezvous)
    with pytest.raises(TimeoutError):
        formed.result(4)
    go.set()
    assert [formed.result(LONG).world_size, joined.result(LONG).world_size] == [2, 2]


@pytest.mark.slow
def test_a_machine_without_heartbeats_is_not_awaited(threads: ThreadPoolExecutor) -> None:
    first, second, joined, go = waiting(9, threads)
    formed = threads.submit(first.next_rendezvous)
    assert formed.result(LONG).world_size == 1
    first.end(0)
    go.set()
    first.shutdown()
    with pytest.raises(RendezvousClosedError):
        joined.result(LONG)
    assert second.ended() == End(0, "a")


@pytest.mark.slow
def test_waiting_machine_is_told_how_the_job_ended(threads: ThreadPoolExecutor) -> None:
    first, second, joined, go = waiting(LONG, threads)
    first.end(0)
    over = threads.submit(first.shutdown)
    with pytest.raises(TimeoutError):
        over.result(4)
    go.set()
    with pytest.raises(RendezvousClosedError):
        joined.result(LONG)
    assert second.ended() == End(0, "a")
    assert not over.done()
    second.acknowledge_end()
    assert over.result(LONG)


@pytest.mark.slow
def test_a_machine_that_left_is_not_awaited_or_readmitted(threads: ThreadPoolExecutor) -> None:
    """`last_call_timeout_s` is for machines that may still come. A machine that left keeps its store until the job
    ends."""

    def one_of_three(host: str, port: int = 0) -> ElasticRendezvous:
        node = Node(host, "127.0.0.1", 1, holds=not port)
        return ElasticRendezvous("127.0.0.1", port, 2, 3, node, Limits(join=100, more=90, lost=LONG), key="")

    first = one_of_three("a")
    others = [one_of_three(host, first.port) for host in "bc"]
    with ThreadPoolExecutor(3) as pool:
        assert [each.world_size for each in pool.map(ElasticRendezvous.next_rendezvous, [first, *others])] == [3, 3, 3]
        first.leave()
        held = pool.submit(first.hold, lambda: False)
        formed = [pool.submit(each.next_rendezvous) for each in others]
        assert [each.result(45).world_size for each in formed] == [2, 2]
        assert sorted(node.host for node in others[0].nodes) == ["b", "c"]
        with raises("LS7330"):
            one_of_three("a", first.port).admit({})
        assert not held.done()
        others[0].end(0)
        others[0].shutdown()
        held.result(LONG)


@pytest.mark.parametrize("text", ["[1]", "2", "[", '{"a": 1}', None])
def test_forged_values_are_distinguished_from_a_lost_store(text: str | None) -> None:
    first = machine("a")
    kept: Any = first._backend._store
    # the latter is not signed with the job's secret
    kept.set("excluded", text) if text else kept._store.set("excluded", "x")
    with pytest.raises(RendezvousStateError):
        first.next_rendezvous()
    assert not first.gone


def test_no_unused_events_are_created(threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch creates an event at every step of a rendezvous, and searches all imported modules for its name."""
    asked: list[int] = []
    monkeypatch.setattr(dynamic_rendezvous, "get_method_name", lambda depth=2: asked.append(depth) or "")
    first, _, joined, go = waiting(3, threads)  # the waiting machine sends a heartbeat each second
    go.set()
    formed = threads.submit(first.next_rendezvous)
    assert [formed.result(LONG).world_size, joined.result(LONG).world_size] == [2, 2]
    assert not asked


@pytest.mark.slow
def test_last_call_timeout_is_added_to_join_timeout() -> None:
    """One machine of 1:2 is enough, even if `join_timeout_s` is shorter than `last_call_timeout_s`."""
    node = Node("a", "127.0.0.1", 1, holds=True)
    alone = ElasticRendezvous("127.0.0.1", 0, 1, 2, node, Limits(join=1, more=2, lost=60), key="")
    try:
        assert alone.next_rendezvous().world_size == 1
    finally:
        alone.end(0)
        alone.shutdown()
