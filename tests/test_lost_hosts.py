"""`launch.on_loss: continue` on several machines, each a network namespace: ranks, hosts and links are lost, the others
finish the step, and what comes back gets its state from them; nothing is read from a checkpoint, and the bits are those
of one process."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import hosts
import pytest
from command import LOCKSTEP, step_of
from host_jobs import LOST_S, PORT, QUICK, alone, bits, hold, own, release, torchrun, until, write
from hosts import Hosts, Job

__all__ = ["alone"]  # a fixture

pytestmark = [*hosts.cluster, pytest.mark.timeout(1500)]
CONTINUE = [*QUICK, "strategy.name=held_steps.HeldTogether", "launch.on_loss=continue"]
BACK = "rank 1 came in, with the state of the others"


@pytest.fixture
def two(tmp_path: Path, cache: Path) -> Iterator[Hosts]:
    with hosts.hosts(2, tmp_path, cache) as made:
        yield made


@pytest.fixture
def three(tmp_path: Path, cache: Path) -> Iterator[Hosts]:
    with hosts.hosts(3, tmp_path, cache) as made:
        yield made


def begun(made: Hosts, *folders: Path, machines: str = "1:2", at: int = 0) -> list[Job]:
    """A job of two hosts, rank 0 on the first, that has come to step 8 and is held there. Whichever way the second has
    come in: a busy machine may take minutes to start it."""
    hold(1, *folders)  # not the try of a step before the first
    first, second = (
        torchrun(made, host, *CONTINUE, f"launch.node_rank={host}", folder=folders[-host], machines=machines, at=at)
        for host in range(2)
    )
    until(lambda: first.when("machines   2") or regrouped(folders[0]) == [BACK], first)
    hold(8, *folders)
    until(lambda: step_of(folders[0]) >= 8, first)
    return [first, second]


def regrouped(folder: Path) -> list[str]:
    told = folder / "out/events.jsonl"
    lines = told.read_text().splitlines() if told.exists() else []
    return [event["what"] for event in map(json.loads, lines) if event["event"] == "regroup"]


def untouched(folder: Path, *jobs: Job) -> None:
    """No process of a rank that was left has started again, and nothing was read from a checkpoint."""
    events = (folder / "out/events.jsonl").read_text()
    assert events.count('"event": "start"') == 1
    for job in jobs:
        assert "resuming after step" not in job.out
        assert "restarting" not in job.err


@pytest.mark.processes
def test_a_rank_and_then_its_host_are_lost_and_come_back(two: Hosts, tmp_path: Path, alone: str) -> None:
    first, second = begun(two, shared := write(tmp_path / "shared"))
    before = len(regrouped(shared))
    os.kill(max(two.pids(1)), signal.SIGKILL)  # the youngest process is the rank
    second.says("rank process 0 of host-1 was killed by SIGKILL; the others go on; another takes its place (3")
    until(lambda: regrouped(shared)[before:] == ["rank 1 was lost", BACK], first)
    hold(step_of(shared) + 1, shared)
    two.kill(1)
    first.says(f"no sign of life from host-1 for {LOST_S} s; the others go on")
    until(lambda: regrouped(shared)[before + 2 :] == ["rank 1 was lost"], first)
    again = torchrun(two, 1, *CONTINUE, folder=shared, machines="1:2")
    again.says("comes into the job")
    until(lambda: regrouped(shared)[before + 3 :] == [BACK], again)
    release(shared)
    assert (first.ended(), again.ended()) == (0, 0), first.err + again.err
    assert bits(shared) == alone
    untouched(shared, first, again)


@pytest.mark.processes
def test_the_side_of_a_cut_link_that_has_the_store_goes_on(two: Hosts, tmp_path: Path, alone: str) -> None:
    first, second = begun(two, shared := write(tmp_path / "shared"))
    two.cut(1)
    release(shared)
    first.says(f"no sign of life from host-1 for {LOST_S} s; the others go on")
    second.says(f"host-1 lost the machine at {two.address(0)}:{PORT}")
    assert second.ended() == 1
    assert not two.pids(1)  # no rank goes on by itself
    assert first.ended() == 0, first.err
    assert bits(shared) == alone
    untouched(shared, first)
    assert regrouped(shared)[-1] == "rank 1 was lost"


@pytest.mark.processes
@pytest.mark.long
def test_the_host_of_rank_0_is_lost_where_another_one_has_the_store(three: Hosts, alone: str) -> None:
    """Each host has an OUTPUT of its own: the one that goes on begins to write where rank 0 is now."""
    store = three.start(2, [*LOCKSTEP, "rendezvous", f"{three.address(2)}:{PORT}"])
    store.says("holding")
    folders = own(three)[:2]
    jobs = begun(three, *folders, at=2)
    three.kill(0)
    release(*folders)
    jobs[1].says(f"no sign of life from host-0 for {LOST_S} s; the others go on")
    assert jobs[1].ended() == 0, jobs[1].err
    assert bits(folders[1]) == alone
    assert regrouped(folders[1]) == ["rank 0 was lost"]
    assert "resuming after step" not in jobs[1].out


@pytest.mark.processes
@pytest.mark.long
def test_a_machine_that_comes_late_costs_no_restart(two: Hosts, tmp_path: Path, alone: str) -> None:
    """And its rank that is stopped is ended by its own launcher, whoever has noticed."""
    hold(8, shared := write(tmp_path / "shared"))
    words = [*CONTINUE, "launch.hang_s=6"]
    first = torchrun(two, 0, *words, folder=shared, machines="1:2")
    until(lambda: step_of(shared) >= 8, first)
    second = torchrun(two, 1, *words, folder=shared, machines="1:2")
    second.says("comes into the job")
    until(lambda: regrouped(shared) == [BACK], first)
    hold(step := step_of(shared) + 2, shared)
    until(lambda: step_of(shared) >= step, first)
    os.kill(max(two.pids(1)), signal.SIGSTOP)
    second.says("rank process 0 of host-1 was killed by SIGKILL; the others go on")
    until(lambda: regrouped(shared)[1:2] == ["rank 1 was lost"], first)
    release(shared)
    assert (first.ended(), second.ended()) == (0, 0), first.err + second.err
    assert bits(shared) == alone
    untouched(shared, first, second)


@pytest.mark.processes
@pytest.mark.long
def test_with_fewer_machines_than_wanted_the_job_waits(two: Hosts, tmp_path: Path, alone: str) -> None:
    first, _ = begun(two, shared := write(tmp_path / "shared"), machines="2")
    two.kill(1)
    first.says("no sign of life from host-1, and 1 machine is too few; restarting from the last checkpoint")
    release(shared)
    again = torchrun(two, 1, *CONTINUE, folder=shared)
    assert (first.ended(), again.ended()) == (0, 0), first.err + again.err
    assert bits(shared) == alone
