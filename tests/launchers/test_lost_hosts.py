"""`launch.on_rank_failure: continue` on several machines, each a network namespace: ranks, hosts and links fail, the
others finish the step, and returning ranks get their state from them, not from a checkpoint. The bits are those of one
process."""

import os
import signal
from pathlib import Path

import pytest

from support import hosts
from support.command import LOCKSTEP, lines, step_of
from support.host_jobs import (
    CONTINUE,
    LOST_S,
    PORT,
    STEPS,
    alone,
    begun,
    bits,
    hold,
    own,
    regrouped,
    release,
    three,
    torchrun,
    two,
    until,
    untouched,
    write,
)
from support.hosts import Hosts

__all__ = ["alone", "three", "two"]  # fixtures


pytestmark = [*hosts.cluster, pytest.mark.timeout(1500)]
BACK = "rank 1 joined with the state of the others"


@pytest.mark.processes
def test_a_rank_and_then_its_host_are_lost_and_rejoin(two: Hosts, tmp_path: Path, alone: str) -> None:
    first, second = begun(two, shared := write(tmp_path / "shared"))
    before = len(regrouped(shared))
    os.kill(two.youngest(1), signal.SIGKILL)  # the rank
    second.says("rank process 0 of host-1 was killed by SIGKILL; the other ranks continue; a replacement is started (3")
    until(lambda: regrouped(shared)[before:] == ["rank 1 was lost", BACK], first)
    hold(step_of(shared) + 1, shared)
    two.kill(1)
    first.says(f"no heartbeat from host-1 for {LOST_S} s; the other machines continue")
    until(lambda: regrouped(shared)[before + 2 :] == ["rank 1 was lost"], first)
    again = torchrun(two, 1, *CONTINUE, folder=shared, machines="1:2")
    again.says("joins the running job")
    until(lambda: regrouped(shared)[before + 3 :] == [BACK], again)
    release(shared)
    assert (first.ended(), again.ended()) == (0, 0), first.err + again.err
    assert bits(shared) == alone
    untouched(shared, first, again)


@pytest.mark.processes
def test_the_side_of_a_cut_link_with_the_store_continues(two: Hosts, tmp_path: Path, alone: str) -> None:
    first, second = begun(two, shared := write(tmp_path / "shared"))
    two.cut(1)
    release(shared)
    first.says(f"no heartbeat from host-1 for {LOST_S} s; the other machines continue")
    second.says(f"host-1 lost contact with the rendezvous of this job at {two.address(0)}:{PORT}")
    assert second.ended() == 1
    assert not two.pids(1)  # no rank goes on alone
    assert first.ended() == 0, first.err
    assert bits(shared) == alone
    untouched(shared, first)
    assert regrouped(shared)[-1] == "rank 1 was lost"


@pytest.mark.processes
@pytest.mark.long
def test_a_link_restored_after_its_side_has_ended(two: Hosts, tmp_path: Path, alone: str) -> None:
    """Running the same command on that host joins the job again."""
    first, second = begun(two, shared := write(tmp_path / "shared"))
    before = len(regrouped(shared))
    two.cut(1)
    hold(10, shared)  # in the middle of a step
    first.says(f"no heartbeat from host-1 for {LOST_S} s; the other machines continue")
    second.says(f"host-1 lost contact with the rendezvous of this job at {two.address(0)}:{PORT}")
    assert second.ended() == 1
    until(lambda: regrouped(shared)[before:] == ["rank 1 was lost"] and step_of(shared) >= 10, first)
    two.heal(1)
    again = torchrun(two, 1, *CONTINUE, folder=shared, machines="1:2")
    again.says("joins the running job")
    until(lambda: regrouped(shared)[before + 1 :] == [BACK], first)
    release(shared)
    assert (first.ended(), again.ended()) == (0, 0), first.err + again.err
    assert bits(shared) == alone
    untouched(shared, first, again)


@pytest.mark.processes
@pytest.mark.long
@pytest.mark.parametrize("cut", [0, 1])
def test_a_link_restored_while_its_side_waits(cut: int, three: Hosts, tmp_path: Path, alone: str) -> None:
    """The host that is cut off, of rank 0 or rank 1, has the longer timeout. When the link is back, it finds that the
    job evicted it, stops its rank, and rejoins. A third host has the store."""
    store = three.start(2, [*LOCKSTEP, "rendezvous", f"{three.address(2)}:{PORT}"])
    store.says("holding")
    shared = write(tmp_path / "shared")
    jobs = begun(three, shared, at=2, **{f"host_{cut}": "launch.keep_alive_timeout_s=300"})
    before = len(regrouped(shared))
    three.cut(cut)
    hold(10, shared)
    left, alive = jobs[cut], jobs[1 - cut]
    alive.says(f"no heartbeat from host-{cut} for {LOST_S} s; the other machines continue")
    until(lambda: regrouped(shared)[before:] == [f"rank {cut} was lost"] and step_of(shared) >= 10, alive)
    assert left.process.poll() is None
    three.heal(cut)
    left.says("the others continue without this machine")
    left.says("joins the running job")
    until(lambda: regrouped(shared)[before + 1 :] == [BACK], alive)
    release(shared)
    assert (alive.ended(), left.ended()) == (0, 0), alive.err + left.err
    assert bits(shared) == alone
    trained = [line["step"] for line in lines(shared) if line["split"] == "train"]
    assert trained == list(range(1, STEPS + 1))  # each once
    assert "resuming after step" not in alive.out + left.out
    assert "restarting" not in alive.err


@pytest.mark.processes
@pytest.mark.long
def test_the_host_of_rank_0_is_lost_but_not_the_store(three: Hosts, alone: str) -> None:
    """Each host has its own output folder: the host that takes over rank 0 starts writing to its own."""
    store = three.start(2, [*LOCKSTEP, "rendezvous", f"{three.address(2)}:{PORT}"])
    store.says("holding")
    folders = own(three)[:2]
    jobs = begun(three, *folders, at=2)
    three.kill(0)
    release(*folders)
    jobs[1].says(f"no heartbeat from host-0 for {LOST_S} s; the other machines continue")
    assert jobs[1].ended() == 0, jobs[1].err
    assert bits(folders[1]) == alone
    assert regrouped(folders[1]) == ["rank 0 was lost"]
    assert "resuming after step" not in jobs[1].out


@pytest.mark.processes
@pytest.mark.long
def test_a_stop_on_request_ends_all_with_a_checkpoint(two: Hosts, tmp_path: Path, alone: str) -> None:
    jobs = begun(two, shared := write(tmp_path / "shared"))
    jobs[1].process.send_signal(signal.SIGTERM)
    until((shared / "asked").exists, jobs[1])  # its rank received the signal
    release(shared)
    assert [job.ended() for job in jobs] == [75, 75], jobs[0].err + jobs[1].err
    assert "stopped on request after step" in jobs[0].out
    jobs = [torchrun(two, host, *CONTINUE, folder=shared, machines="1:2") for host in range(2)]
    assert [job.ended() for job in jobs] == [0, 0], jobs[0].err + jobs[1].err
    assert "resuming after step" in jobs[0].out + jobs[1].out
    assert bits(shared) == alone


@pytest.mark.processes
@pytest.mark.long
def test_a_late_machine_causes_no_restart(two: Hosts, tmp_path: Path, alone: str) -> None:
    """Its stopped rank is ended by its own launcher, whichever machine notices first."""
    hold(8, shared := write(tmp_path / "shared"))
    words = [*CONTINUE, "launch.hang_timeout_s=6"]
    first = torchrun(two, 0, *words, folder=shared, machines="1:2")
    until(lambda: step_of(shared) >= 8, first)
    second = torchrun(two, 1, *words, folder=shared, machines="1:2")
    second.says("joins the running job")
    until(lambda: regrouped(shared) == [BACK], first)
    hold(step := step_of(shared) + 2, shared)
    until(lambda: step_of(shared) >= step, first)
    os.kill(two.youngest(1), signal.SIGSTOP)
    second.says("rank process 0 of host-1 was killed by SIGKILL; the other ranks continue")
    until(lambda: regrouped(shared)[1:2] == ["rank 1 was lost"], first)
    release(shared)
    assert (first.ended(), second.ended()) == (0, 0), first.err + second.err
    assert bits(shared) == alone
    untouched(shared, first, second)


@pytest.mark.processes
@pytest.mark.long
def test_with_too_few_machines_the_job_waits(two: Hosts, tmp_path: Path, alone: str) -> None:
    first, _ = begun(two, shared := write(tmp_path / "shared"), machines="2")
    two.kill(1)
    first.says("no heartbeat from host-1, and 1 machine is too few; restarting from the last checkpoint")
    release(shared)
    again = torchrun(two, 1, *CONTINUE, folder=shared)
    assert (first.ended(), again.ended()) == (0, 0), first.err + again.err
    assert bits(shared) == alone
