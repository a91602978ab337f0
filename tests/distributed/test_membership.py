"""The roster of a job's ranks, and a launcher's reaction to processes that end, without starting a process."""

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from torch.distributed import TCPStore

from lockstep.distributed import membership
from lockstep.distributed.membership import Generation, MemberAddress, Membership, Roster
from lockstep.launchers.processes.surviving_ranks import Ranks
from lockstep.training.recovery.recovery import membership_message
from support.members import Ended

there: list[Membership] = []


@pytest.fixture
def store() -> Iterator[Any]:
    yield TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for each in there:
        each.stop()
    there.clear()


def member(store: Any, me: str, joining: bool = False) -> Membership:
    there.append(found := Membership(MemberAddress("127.0.0.1", store.port, "room", me, joining)))
    found.connect(20)
    return found


def test_after_a_loss_all_survivors_join_the_next_generation(store: Any) -> None:
    roll = Roster(store, "room", "", ["a", "b", "c"])
    a, b = member(store, "a"), member(store, "b")
    assert a.generation == Generation(0, ("a", "b", "c"), False)
    assert a.awaited(0.1) is None
    assert not roll.ready(["a", "b"])
    a.ready()
    b.ready()
    assert roll.ready(["a", "b"])
    assert not roll.ready(["a", "b", "c"])
    roll.post(["b", "a"], lost=True)
    found = a.awaited(10)
    assert found == b.awaited(10) == Generation(1, ("b", "a"), True)
    assert not a.all_come(found, 0.2)  # b has not joined
    assert b.all_come(found, 10)
    assert a.all_come(found, 10)
    a.take(found)
    assert not roll.settled()
    a.trains()
    b.take(found)
    b.trains()
    assert roll.settled()


@pytest.mark.parametrize("lost", [True, False])
def test_late_reports_are_ignored(lost: bool, store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The listener thread ignores a generation that the rank has joined since the thread read about it."""
    roll = Roster(store, "room", "", ["a", "b"])
    before = set(threading.enumerate())
    a = member(store, "a")
    read, taken = threading.Event(), threading.Event()
    shut: list[Membership] = []
    plain = membership._generation

    def held_up(of: Any, number: int) -> Generation:
        found = plain(of, number)
        if threading.current_thread().name == "lockstep-members" and not read.is_set():
            read.set()
            assert taken.wait(60)
        return found

    monkeypatch.setattr(membership, "_generation", held_up)
    monkeypatch.setattr(membership.torch_internals, "groups", lambda: shut.append(a) or [])
    roll.post(["a"], lost=lost)
    (listener,) = set(threading.enumerate()) - before
    assert read.wait(60)
    found = a.awaited(10)
    assert found == Generation(1, ("a",), lost)
    a.take(found)
    taken.set()
    listener.join(60)
    assert not listener.is_alive()
    assert (a.lost, a.offered, shut) == (False, 0, [])


def test_a_joining_member_interrupts_no_group(store: Any) -> None:
    roll = Roster(store, "room", "", ["a"])
    a, b = member(store, "a"), member(store, "b", joining=True)
    assert b.generation.number == -1
    roll.post(["a", "b"])
    until = time.monotonic() + 20
    while not a.offered and time.monotonic() < until:
        time.sleep(0.01)
    assert a.offered == 1
    assert not a.lost
    assert b.awaited(10) == Generation(1, ("a", "b"), False)
    assert not b.all_come(Generation(0, ("b", "nobody")), 10)  # there is a newer generation


def test_a_member_outside_the_newest_generation_is_lost(store: Any) -> None:
    roll = Roster(store, "room", "", ["a", "b"])
    a = member(store, "a")
    roll.post(["b"], lost=True)
    assert a.awaited(0.3) is None
    assert a.newest().members == ("b",)


class Unstarted(Ranks):
    """Ranks that are never started."""

    def _start(self, local: int, joining: bool) -> None:
        self.processes[local] = Ended(None)


@pytest.mark.parametrize(
    ("codes", "ready", "goes_on"),
    [
        ({1: -9}, "02", True),
        ({0: -9, 1: -11}, "2", True),
        ({1: -9}, "0", False),  # one of the others has no state yet
        ({1: 1}, "02", False),  # it failed by itself, and would fail again
        ({1: -9, 2: 1}, "0", False),
        ({1: -9, 2: 0}, "02", False),  # one has finished
        ({0: -9, 1: -9, 2: -9}, "012", False),  # no rank is left
    ],
)
def test_when_survivors_continue(store: Any, codes: dict[int, int], ready: str, goes_on: bool) -> None:
    roll = Roster(store, "room", "", ["0", "1", "2"])
    for each in ready:
        member(store, each).ready()
    heard: list[tuple[int, int]] = []

    def place(name: str, joining: bool) -> MemberAddress:
        return MemberAddress("", 0, "", name, joining)

    def lost(local: int, pid: int, code: int) -> None:
        heard.append((local, code))

    ranks = Unstarted(print, (), {local: {} for local in range(3)}, roll, place, lost, lambda: True)
    for local, code in codes.items():
        ranks.processes[local].exitcode = code
    gone = {local: p for local, p in ranks.processes.items() if p.exitcode not in (None, 0)}
    assert ranks._go_on(gone) is goes_on
    assert heard == (sorted(codes.items()) if goes_on else [])
    left = [str(local) for local in range(3) if local not in codes]
    assert roll.newest.members == tuple(left if goes_on else "012")
    if goes_on:  # replacements have their own names, and are admitted when they are ready
        ranks.let_in()
        assert not ranks.joining  # the others have not met yet
        for name in left:
            found = member(store, name, joining=True)
            found.take(roll.newest)
            found.trains()
        assert ranks.in_vain() == 0
        ranks.let_in()
        assert ranks.joining == set(gone)
        assert ranks.in_vain() == len(gone)  # if all restarted now, these starts would not count
        names = [ranks.names[local] for local in sorted(gone)]
        assert not set(names) & set("012")
        comers = [member(store, each, joining=True) for each in names]
        for each in comers:
            each.ready()
        ranks.let_in()
        assert roll.newest.members == (*left, *names)
        assert not roll.newest.lost
        for each in map(int, left):
            ranks.processes[each].exitcode = 0
        assert ranks.ended()  # they were about to end, and have not met the replacements
        for each in comers:
            each.take(roll.newest)
            each.trains()
        assert ranks.in_vain() == 0
        assert not ranks.ended()


@pytest.mark.parametrize("first", ["it", "launcher"])
def test_an_admitted_member_stays_and_one_that_left_is_not_admitted(first: str, store: Any) -> None:
    roll = Roster(store, "room", "", ["a"])
    b = member(store, "b", joining=True)
    if first == "it":
        assert b.withdraw()
        assert not roll.admit("b")
        assert b.withdraw()
    else:
        assert roll.admit("b")
        assert not b.withdraw()
        assert roll.admit("b")  # the launcher of any machine may decide


@pytest.mark.parametrize(
    ("code", "asked", "told"),
    [
        (75, True, 0),  # it listened
        (-signal.SIGTERM, True, 0),  # it did not listen yet
        (-signal.SIGUSR1, True, 0),
        (-signal.SIGKILL, False, 1),
        (1, False, 0),  # its own message says why
    ],
)
def test_a_stop_signal_received_only_by_a_joining_member(code: int, asked: bool, told: int, store: Any) -> None:
    """A joining process that gets a stop signal asks all ranks to stop, like any rank; it is not replaced."""
    roll = Roster(store, "room", "", ["0", "1"])
    lost: list[int] = []

    def place(name: str, joining: bool) -> MemberAddress:
        return MemberAddress("", 0, "", name, joining)

    def loss(local: int, pid: int, code: int) -> None:
        lost.append(local)

    ranks = Unstarted(print, (), {local: {} for local in range(2)}, roll, place, loss, lambda: True)
    member(store, "0").ready()
    ranks.processes[1].exitcode = -9
    assert ranks._go_on({1: ranks.processes[1]})
    there[0].take(roll.newest)
    there[0].trains()
    ranks.let_in()
    assert ranks.joining == {1}
    lost.clear()
    ranks.processes[1].exitcode = code
    assert ranks._go_on({1: ranks.processes[1]})
    assert ranks.stop_asked is asked
    assert len(lost) == told
    ranks.let_in()
    assert ranks.joining == ({1} if told else set())


@pytest.mark.slow
def test_a_member_stuck_in_an_aborted_group_is_lost(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    killed, done = [], threading.Event()

    def kill(pid: int, number: int) -> None:
        killed.append((pid, number))
        done.set()

    monkeypatch.setattr(membership.os, "kill", kill)
    monkeypatch.setattr(membership, "STUCK_S", 2.0)
    roll = Roster(store, "room", "", ["a", "b"])
    a = member(store, "a")
    roll.post(["a"], lost=True)
    until = time.monotonic() + 3  # meanwhile this thread computes, and is asked whether it sleeps
    while time.monotonic() < until:
        sum(range(1000))
    assert a.lost
    assert not killed
    assert done.wait(60)  # it sleeps
    assert killed == [(os.getpid(), signal.SIGKILL)]


def test_a_member_that_leaves_an_aborted_group_is_not_lost(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[int] = []
    monkeypatch.setattr(membership.os, "kill", lambda pid, number: killed.append(pid))
    monkeypatch.setattr(membership, "STUCK_S", 1.5)
    roll = Roster(store, "room", "", ["a", "b"])
    a = member(store, "a")
    roll.post(["a"], lost=True)
    found = a.awaited(60)
    assert found is not None
    a.take(found)
    time.sleep(2)
    assert not killed


def test_a_loss_after_training_needs_no_recovery(store: Any) -> None:
    roll = Roster(store, "room", "", ["a", "b"])
    a = member(store, "a")
    a.ready()
    assert roll.ready(["a"])
    a.over()
    assert not roll.ready(["a"])


def test_descriptions_of_lost_ranks() -> None:
    assert membership_message(("a", "b", "c"), ("b", "c")) == "rank 0 was lost"
    assert membership_message(("a", "b"), ("a", "b", "d")) == "rank 2 joined with the state of the others"
    assert (
        membership_message(("a", "b", "c"), ("a", "d"))
        == "ranks 1, 2 were lost; rank 1 joined with the state of the others"
    )


def test_a_member_address_round_trips_through_a_variable() -> None:
    place = MemberAddress("127.0.0.1", 1, "room", "2.5", True)
    assert MemberAddress(**json.loads(place.variable()["LOCKSTEP_MEMBER"])) == place
