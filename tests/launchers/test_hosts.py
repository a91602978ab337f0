"""Jobs on two and three machines, each a network namespace with its own address and name, have the bits of one machine,
whatever launched them and whatever failed. With LOCKSTEP_TIMES=FILE, measurements are appended to that file, one JSON
object per line."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from support import hosts
from support.command import LOCKSTEP, saved
from support.host_jobs import (
    HELD,
    LOST_S,
    PORT,
    QUICK,
    STEPS,
    alone,
    bits,
    hold,
    own,
    release,
    three,
    torchrun,
    two,
    until,
    until_step,
    write,
)
from support.hosts import Hosts, Job
from support.places import TESTS_PATH

__all__ = ["alone", "three", "two"]  # fixtures


pytestmark = [*hosts.cluster, pytest.mark.timeout(1500)]


@pytest.fixture
def note(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Record a measurement."""

    def keep(**facts: object) -> None:
        line = {"case": request.node.name, "load": round(os.getloadavg()[0], 1), **facts}
        print(json.dumps(line))
        if path := os.environ.get("LOCKSTEP_TIMES"):
            with open(path, "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    return keep


def together(first: Job, second: Job, *folders: Path) -> None:
    """Wait until both machines joined, in either order, and the job, paused at step 0, passed step 8."""
    until(lambda: second.when("machines   2") or first.when("another machine joined"), second)
    hold(8, *folders)
    second.says("machines   2")
    until_step(folders[0], 8, first)


def of_two_hosts(two: Hosts, first: Job, alone: str) -> None:
    """Check that a job has the bits of one machine, names two machines in its output, and left its results in place."""
    assert "machines   2" in first.out
    assert "ranks      rank 0 on host-0; rank 1 on host-1" in first.out
    assert bits(two.folder(0)) == alone
    manifest = json.loads((two.folder(0) / f"out/checkpoints/step-{STEPS:06d}/manifest.json").read_text())
    assert manifest["hosts"] == ["host-0", "host-1"]
    assert manifest["launch"] == "launcher torchrun"
    assert "host-1" in (two.folder(0) / "out/report.html").read_text()
    assert not (two.folder(1) / "out/export").exists()  # rank 0's machine holds the results


@pytest.mark.processes
@pytest.mark.long
def test_torchrun_on_two_hosts(two: Hosts, alone: str, note: Callable[..., None]) -> None:
    for host in range(2):
        write(two.folder(host))
    first, second = (torchrun(two, host) for host in range(2))
    assert (first.ended(), second.ended()) == (0, 0), first.err + second.err
    of_two_hosts(two, first, alone)
    assert "model      rank 0 on host-0 writes it to out/export" in second.out
    note(launcher="torchrun", same_bits=True)


@pytest.mark.processes
@pytest.mark.long
def test_torchrun_s_own_command_on_two_hosts(two: Hosts, alone: str, note: Callable[..., None]) -> None:
    jobs = []
    for host in range(2):
        write(two.folder(host))
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
        command += ["--rdzv-backend=c10d", f"--rdzv-endpoint={two.address(0)}:{PORT}"]
        command += [f"--local-addr={two.address(host)}", f"--rdzv-conf=is_host={int(host == 0)}"]
        jobs.append(two.start(host, [*command, "-m", "lockstep", "train", "run.yaml"]))
    assert [job.ended() for job in jobs] == [0, 0], jobs[0].err + jobs[1].err
    assert bits(two.folder(0)) == alone
    note(launcher="torchrun's own command", same_bits=True)


@pytest.mark.processes
@pytest.mark.long
def test_tcp_on_two_hosts(two: Hosts, alone: str, note: Callable[..., None]) -> None:
    jobs = []
    for host in range(2):
        write(two.folder(host))
        options = ["launch.name=tcp", f"launch.init_method=tcp://{two.address(0)}:{PORT}", "launch.world_size=2"]
        jobs.append(two.start(host, [*LOCKSTEP, "train", "run.yaml", *options, f"launch.rank={host}"]))
    assert [job.ended() for job in jobs] == [0, 0], jobs[0].err + jobs[1].err
    assert bits(two.folder(0)) == alone
    note(launcher="tcp", same_bits=True)


def accelerated(made: Hosts, host: int, *words: str) -> Job:
    options = ["launch.name=accelerate", "launch.machines=2", f"launch.machine_rank={host}"]
    options.append(f"launch.rendezvous={made.address(0)}:{PORT}")
    return made.start(host, [*LOCKSTEP, "train", "run.yaml", *options, *words], PYTHONPATH=TESTS_PATH)


@pytest.mark.processes
@pytest.mark.long  # starts torchrun; its hosts are tested above
def test_accelerate_on_two_hosts_stops_and_resumes(two: Hosts, alone: str, note: Callable[..., None]) -> None:
    pytest.importorskip("accelerate")
    hold(8, *(folders := own(two)))
    jobs = [accelerated(two, host, HELD) for host in range(2)]
    until_step(folders[0], 8, jobs[0])
    jobs[1].process.send_signal(signal.SIGTERM)
    until((folders[1] / "asked").exists, jobs[1])  # its rank received the signal
    release(*folders)
    assert [job.ended() for job in jobs] == [75, 75], jobs[0].err + jobs[1].err
    jobs = [accelerated(two, host) for host in range(2)]
    assert [job.ended() for job in jobs] == [0, 0], jobs[0].err + jobs[1].err
    assert "ranks      rank 0 on host-0; rank 1 on host-1; launcher accelerate" in jobs[0].out
    assert bits(folders[0]) == alone
    note(launcher="accelerate", stop_and_resume="SIGTERM to one machine: 75 on both", same_bits=True)


@pytest.mark.processes
@pytest.mark.long
def test_a_slow_and_lossy_network_changes_no_bit(two: Hosts, alone: str, note: Callable[..., None]) -> None:
    for host in range(2):
        write(two.folder(host))
        two.limit(host, 20)
        two.lose(host, 2)
    jobs = [torchrun(two, host) for host in range(2)]
    assert [job.ended() for job in jobs] == [0, 0], jobs[0].err + jobs[1].err
    assert bits(two.folder(0)) == alone
    note(fault="20 Mbit/s and 2 % of packets lost", same_bits=True)


@pytest.mark.processes
def test_a_host_is_lost_and_rejoins(two: Hosts, tmp_path: Path, alone: str, note: Callable[..., None]) -> None:
    hold(0, shared := write(tmp_path / "shared"))
    words = [*QUICK, HELD]
    together(*(torchrun(two, host, *words, folder=shared, machines="1:2") for host in range(2)), shared)
    first = two.started[0]
    there = saved(shared)
    killed = time.monotonic()
    two.kill(1)
    hold(12, shared)
    told = first.says("restarting from the last checkpoint", since=killed)
    again = torchrun(two, 1, *words, folder=shared, machines="1:2")
    # it joined before the job restarted or was admitted later: either way the job stopped and formed again for it
    until(lambda: again.when("machines   2"), again)
    release(shared)
    assert (first.ended(), again.ended()) == (0, 0), first.err + again.err
    assert "lost contact with another rank" in first.err or "no heartbeat from host-1" in first.err
    assert there >= 6
    assert first.when(f"resuming after step {there} of 24", since=killed), first.out
    assert bits(shared) == alone
    note(fault="kill -9 of a host, back at once, 1:2, shared folder", told_s=round(told - killed, 1), same_bits=True)


@pytest.mark.processes
@pytest.mark.long
def test_the_host_of_rank_0_is_lost_for_good(two: Hosts, alone: str, note: Callable[..., None]) -> None:
    """Rank 0 is on host 1, as requested; host 0 does not see its folder, and starts from the beginning."""
    hold(8, *(folders := own(two)))
    words = [*QUICK, HELD, "launch.last_call_timeout_s=40"]
    first = torchrun(two, 0, *words, "launch.node_rank=1", machines="1:2")
    second = torchrun(two, 1, *words, "launch.node_rank=0", machines="1:2")
    until_step(folders[1], 8, second)
    assert "rank 0 on host-1; rank 1 on host-0" in second.out
    killed = time.monotonic()
    two.kill(1)
    release(*folders)
    told = first.says("restarting from the last checkpoint", since=killed)
    formed = first.says("machines   1 at", since=killed)
    assert first.ended() == 0, first.err
    assert bits(folders[0]) == alone
    times = {"told_s": round(told - killed, 1), "formed_again_s": round(formed - killed, 1)}
    note(fault="kill -9 of rank 0's host, 1:2, own folders", **times, same_bits=True)


@pytest.mark.processes
@pytest.mark.long
def test_late_machine_joins_a_running_job(two: Hosts, tmp_path: Path, alone: str, note: Callable[..., None]) -> None:
    hold(8, shared := write(tmp_path / "shared"))
    first = torchrun(two, 0, *QUICK, HELD, folder=shared, machines="1:2")
    until_step(shared, 8, first)
    assert "machines   1 at" in first.out
    second = torchrun(two, 1, *QUICK, HELD, folder=shared, machines="1:2")
    came = first.says("another machine joined")
    release(shared)
    formed = first.says("machines   2 at")
    assert (first.ended(), second.ended()) == (0, 0), first.err + second.err
    assert "resuming after step 9 of 24" in first.out  # it saved before it admitted the other machine
    assert "restarting" not in first.err
    assert bits(shared) == alone
    note(change="a second machine comes, 1:2", formed_again_s=round(formed - came, 1), same_bits=True)


@pytest.mark.processes
def test_a_cut_link_is_detected(two: Hosts, tmp_path: Path, alone: str, note: Callable[..., None]) -> None:
    hold(0, shared := write(tmp_path / "shared"))
    first, second = (torchrun(two, host, *QUICK, HELD, folder=shared, machines="1:2") for host in range(2))
    together(first, second, shared)
    cut = time.monotonic()
    two.cut(1)
    release(shared)
    told = first.says(f"no heartbeat from host-1 for {LOST_S} s")
    formed = first.says("machines   1 at", since=cut)
    other = second.says(f"host-1 lost contact with the rendezvous of this job at {two.address(0)}:{PORT}")
    assert second.ended() == 1
    assert not two.pids(1)  # no rank goes on alone
    assert first.ended() == 0, first.err
    assert bits(shared) == alone
    times = {"told_s": round(told - cut, 1), "other_side_told_s": round(other - cut, 1)}
    times["formed_again_s"] = round(formed - cut, 1)
    note(fault="link cut in the middle of a step, keep_alive_timeout_s=12", **times, same_bits=True)


@pytest.mark.processes
@pytest.mark.long
def test_a_briefly_cut_link_is_tolerated(two: Hosts, alone: str, note: Callable[..., None]) -> None:
    hold(4, *(folders := own(two)))
    first, second = (torchrun(two, host, HELD, "launch.keep_alive_timeout_s=20") for host in range(2))
    until_step(folders[0], 4, first)
    two.cut(1)
    release(*folders)
    time.sleep(5)
    two.heal(1)
    assert (first.ended(), second.ended()) == (0, 0), first.err + second.err
    assert "lost" not in first.err + second.err
    assert bits(folders[0]) == alone
    note(fault="link cut for 5 s, keep_alive_timeout_s=20", noticed=False, same_bits=True)


@pytest.mark.processes
@pytest.mark.long
def test_the_host_of_the_rendezvous_is_lost(two: Hosts, alone: str, note: Callable[..., None]) -> None:
    """Rank 0, and the output folder with it, is on the other host."""
    hold(8, *(folders := own(two)))

    def go() -> list[Job]:
        return [torchrun(two, host, *QUICK, HELD, f"launch.node_rank={1 - host}") for host in range(2)]

    _, second = go()
    until_step(folders[1], 8, second)
    assert "rank 0 on host-1; rank 1 on host-0" in second.out
    killed = time.monotonic()
    two.kill(0)
    release(*folders)
    told = second.says(f"host-1 lost contact with the rendezvous of this job at {two.address(0)}:{PORT}")
    assert second.ended() == 1
    assert "start the same command again" in " ".join(second.err.split())
    jobs = go()
    assert [job.ended() for job in jobs] == [0, 0], jobs[0].err + jobs[1].err
    assert "resuming after step 6 of 24" in jobs[1].out
    assert bits(folders[1]) == alone
    note(fault="kill -9 of the rendezvous's host", told_s=round(told - killed, 1), same_bits=True)


@pytest.mark.processes
@pytest.mark.long
def test_a_separate_rendezvous_outlives_every_host(three: Hosts, alone: str, note: Callable[..., None]) -> None:
    store = three.start(2, [*LOCKSTEP, "rendezvous", f"{three.address(2)}:{PORT}"])
    store.says("holding")
    hold(0, *(folders := own(three)))
    first, second = (torchrun(three, host, *QUICK, HELD, machines="1:2", at=2) for host in range(2))
    together(first, second, *folders)
    killed = time.monotonic()
    three.kill(0)
    release(*folders)
    told = second.says("restarting from the last checkpoint", since=killed)
    assert second.ended() == 0, second.err
    assert bits(folders[1]) == alone
    again = torchrun(three, 0, *QUICK, HELD, machines="1:2", at=2)  # the next job at the same store
    assert again.ended() == 0, again.err
    assert bits(folders[0]) == alone
    store.process.send_signal(signal.SIGTERM)
    assert store.ended() == 0
    note(fault="kill -9 of rank 0's host, store on a third", told_s=round(told - killed, 1), same_bits=True)


@pytest.mark.processes
def test_sigterm_to_one_host_stops_all_with_a_checkpoint(two: Hosts, alone: str, note: Callable[..., None]) -> None:
    hold(8, *(folders := own(two)))
    jobs = [torchrun(two, host, HELD) for host in range(2)]
    until_step(folders[0], 8, jobs[0])
    jobs[1].process.send_signal(signal.SIGTERM)
    until((folders[1] / "asked").exists, jobs[1])  # its rank received the signal
    release(*folders)
    assert [job.ended() for job in jobs] == [75, 75], jobs[0].err + jobs[1].err
    assert "stopped on request after step" in jobs[0].out
    first, second = (torchrun(two, host) for host in range(2))
    assert (first.ended(), second.ended()) == (0, 0), first.err + second.err
    of_two_hosts(two, first, alone)
    note(launcher="torchrun", stop_and_resume="SIGTERM to one machine: 75 on both", same_bits=True)


@pytest.mark.processes
@pytest.mark.long
def test_a_killed_rank_restarts_all_hosts(two: Hosts, alone: str, note: Callable[..., None]) -> None:
    hold(8, *(folders := own(two)))
    first, second = (torchrun(two, host, *QUICK, HELD) for host in range(2))
    until_step(folders[0], 8, first)
    os.kill(two.youngest(1), signal.SIGKILL)  # the rank
    second.says("was killed by SIGKILL; restarting from the last checkpoint")
    release(*folders)
    assert (first.ended(), second.ended()) == (0, 0), first.err + second.err
    assert "resuming after step 6 of 24" in first.out
    assert bits(folders[0]) == alone
    note(launcher="torchrun", kill_and_resume="kill -9 of a rank", same_bits=True)
