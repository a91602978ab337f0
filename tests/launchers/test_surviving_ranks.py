"""A job's machines report their ranks, and the first live one decides how to continue; no process is started."""

import json
from typing import Any

import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousStateError

from lockstep.distributed.membership import MemberAddress, Roster
from lockstep.launchers.processes import surviving_ranks
from lockstep.launchers.processes.surviving_ranks import Machines, RanksAmongMachines, Word, lives
from support.members import Ended

LOST_S = 10.0


class Clock:
    """A clock that all machines share."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(surviving_ranks, "time", made)
    return made


@pytest.fixture
def store() -> Any:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


class Unstarted(RanksAmongMachines):
    """Ranks of a machine with one process, which is never started."""

    def _start(self, local: int, joining: bool) -> None:
        self.processes[local] = Ended(None)

    def look(self) -> dict[int, Any]:
        return {local: p for local, p in self.processes.items() if p.exitcode not in (None, 0)}

    def pids(self) -> dict[int, int]:
        return {}

    def close(self, death_sig: Any = None, timeout: int = 30) -> None:
        self.processes = {}
        super().close(death_sig, timeout)

    def train(self) -> None:
        """Report what the machine's rank reports when it trains."""
        name = self.names[0]
        self.roll.store.set(f"ready/{name}", "1")
        if name in self.roll.newest.members:
            self.roll.store.set(f"trains/{self.roll.newest.number}/{name}", "1")


class Job:
    """Machines with one rank each. `heard`: messages to the user."""

    def __init__(self, store: Any, count: int, fewest: int = 1, most: int = 9) -> None:
        self.store, self.count, self.fewest, self.most = store, count, fewest, most
        self.heard: list[str] = []
        self.machines = [self.machine(place, str(place)) for place in range(count)]
        for _ in range(2):
            for each in self.machines:
                each.wait()
        for each in self.machines:
            each.train()

    def machine(self, place: int | None, host: str, spare: bool = True) -> Unstarted:
        members = list(map(str, range(self.count))) if place == 0 else None
        roll = Roster(self.store, "room", "", members)
        machines = Machines(roll.store, f"host-{host}", place, self.count, LOST_S)

        def at(name: str, joining: bool) -> MemberAddress:
            return MemberAddress("", 0, "", name, joining)

        def lost(local: int, pid: int, code: int) -> None:
            self.heard.append(f"rank of host-{host}: {code}")

        name = str(place) if place is not None else f"{machines.place}-0"
        arguments = print, (), {0: {}}, roll, at, lost, lambda: spare, {0: name}, place is None
        limits = {"fewest": self.fewest, "most": self.most}
        return Unstarted(*arguments, machines=machines, missed=lambda hosts: self.heard.extend(hosts), **limits)

    def pass_by(self, clock: Clock, seconds: float, *those: int) -> None:
        """Let these machines poll for some seconds."""
        for _ in range(round(2 * seconds)):
            clock.now += 0.5
            for number in those:
                self.machines[number].wait()


def test_a_rank_killed_on_another_machine_is_replaced(store: Any, clock: Clock) -> None:
    job = Job(store, 3)
    first, second, third = job.machines
    second.processes[0].exitcode = -9
    job.pass_by(clock, 1, 1, 0, 2, 1)
    assert first.roll.newest.members == ("0", "2")
    assert first.roll.newest.lost
    assert job.heard == ["rank of host-1: -9"]
    assert second.wait() is None  # it has no rank, and waits
    assert second.idle
    first.train()
    third.train()
    job.pass_by(clock, 1, 1, 0)
    assert second.names == {0: "1.1"}
    assert first.roll.newest.members == ("0", "2")  # the joining one is not ready
    second.train()
    job.pass_by(clock, 1, 1, 0, 1)
    assert first.roll.newest.members == ("0", "2", "1.1")
    assert not first.roll.newest.lost
    assert second.idle  # the joining one has not met the others
    second.train()
    assert second.wait() is None
    assert not second.idle


def test_a_silent_machine_is_lost_and_the_next_one_decides(store: Any, clock: Clock) -> None:
    job = Job(store, 3)
    first, second, _ = job.machines
    job.pass_by(clock, LOST_S - 1, 1, 2)
    assert second.roll.newest.number == 0
    job.pass_by(clock, 3, 1, 2)
    assert second.roll.newest.members == ("1", "2")
    assert job.heard == ["host-0"]
    found = first.wait()  # it was stopped, and wakes up
    assert found is not None
    assert first.why == "the others continue without this machine"
    assert first.roll.given_up is None


def test_too_few_machines_restart_the_job(store: Any, clock: Clock) -> None:
    job = Job(store, 2, fewest=2)
    job.pass_by(clock, LOST_S + 2, 0)
    assert job.machines[0].why == "no heartbeat from host-1, and 1 machine is too few"
    assert job.machines[0].roll.newest.number == 0
    assert job.machines[1].wait() is not None  # whatever it was doing


@pytest.mark.parametrize("code", [1, 2])
def test_a_failing_rank_ends_the_ranks_of_all_machines(code: int, store: Any, clock: Clock) -> None:
    job = Job(store, 2)
    job.machines[1].processes[0].exitcode = code
    job.machines[1].processes[0].join = lambda limit: None
    found = job.machines[1].wait()
    assert found is not None
    assert found.failures[0].exitcode == code
    assert job.machines[0].wait() is not None
    assert job.machines[0].why.startswith("a rank has ended on ")


def test_a_requested_stop_gives_up_no_rank(store: Any, clock: Clock) -> None:
    job = Job(store, 2)
    first, second = job.machines
    second.processes[0].exitcode = 75
    assert second.wait() is not None
    assert first.wait() is None  # its rank still writes its part of the checkpoint, and no rank is given up
    assert first.roll.newest.number == 0
    first.processes[0].exitcode = 75
    assert first.wait() is not None
    assert first.roll.given_up is None
    told: list[str] = []
    assert second.leave(False, lambda: told.append("over"))
    assert first.leave(True, lambda: told.append("over"))
    assert first.stopped
    assert told == ["over"] * 2


def test_a_rank_without_state_ends_the_job(store: Any, clock: Clock) -> None:
    job = Job(store, 2)
    store.delete_key("room/ready/0")
    job.machines[1].processes[0].exitcode = -9
    job.pass_by(clock, 1, 1, 0, 1)
    assert job.machines[0].why == job.machines[1].why == "a rank failed"


def test_a_new_machine_is_admitted_if_there_is_room(store: Any, clock: Clock) -> None:
    job = Job(store, 2, most=3)
    for host in ("new", "late"):
        job.machines.append(job.machine(None, host))
        job.machines[-1].train()
    assert [each.names[0] for each in job.machines] == ["0", "1", "2-0", "3-0"]
    job.pass_by(clock, 1, 2, 3, 0, 1)
    assert job.machines[0].roll.newest.members == ("0", "1", "2-0")
    for each in job.machines[:3]:
        each.train()
    job.pass_by(clock, 2, 0, 1, 2, 3)
    assert "3-0" not in job.machines[0].roll.newest.members
    job.pass_by(clock, LOST_S + 2, 0, 2, 3)  # host-1 is lost: the waiting one takes its place
    for each in job.machines:
        each.train()
    job.pass_by(clock, 1, 0, 2, 3)
    assert job.machines[0].roll.newest.members == ("0", "2-0", "3-0")


def test_all_machines_leave_together(store: Any, clock: Clock) -> None:
    job, told = Job(store, 2), list[str]()
    first, second = job.machines
    second.processes[0].exitcode = 0
    assert second.wait() is not None
    first.processes[0].exitcode = 0
    assert first.wait() is not None
    assert second.leave(False, lambda: told.append("over"))  # rank 0 has finished on the other machine
    assert first.leave(True, lambda: told.append("over"))
    assert told == ["over"] * 2


def test_a_machine_that_lost_its_rank_at_the_end_waits_for_the_others(store: Any, clock: Clock) -> None:
    job, told = Job(store, 2), list[str]()
    first, second = job.machines
    second.processes[0].exitcode = -9
    job.pass_by(clock, 1, 1, 0, 1)
    assert second.idle
    first.processes[0].exitcode = 0
    assert first.wait() is not None

    def sleep(seconds: float) -> None:
        clock.now += seconds
        if told:  # the other one ends on its own
            second.close()

    clock.sleep = sleep  # type: ignore[method-assign]
    assert first.leave(True, lambda: told.append("over"))
    assert told == ["over"]
    assert clock.now < surviving_ranks.LEAVE_S
    assert not first._machines.live()


def test_leaving_machine_is_told_that_rank_0_has_not_ended(store: Any, clock: Clock) -> None:
    job, told = Job(store, 2), list[str]()
    first, second = job.machines
    second.processes[0].exitcode = 0
    assert second.wait() is not None
    first.processes[0].exitcode = -9
    first.roll.store.set("over", "1")
    assert first.wait() is None  # it gives up
    assert first.wait() is not None
    assert not second.leave(False, lambda: told.append("over"))
    assert not told


def test_a_rendezvous_lives_while_a_member_sends_heartbeats(store: Any, clock: Clock) -> None:
    job = Job(store, 1)
    room = job.machines[0].roll.store
    assert not lives(room, 1, 5.0)

    def sleep(seconds: float) -> None:
        clock.now += seconds
        job.machines[0].wait()

    clock.sleep = sleep  # type: ignore[method-assign]
    assert lives(room, 1, 5.0)


@pytest.mark.parametrize("text", ["", "[]", '{"host": "a"}', '{"host": "a", "ranks": 1}', "null", '{"ranks": {}}'])
def test_invalid_records_of_machines_are_refused(text: str) -> None:
    with pytest.raises(RendezvousStateError, match="unreadable data"):
        Word.of(text.encode())


def test_records_round_trip() -> None:
    word = Word("a", ["1", "1.2"], ["1.2"], ["1"], True, False, 7)
    assert Word.of(json.dumps(word.__dict__).encode()) == word
