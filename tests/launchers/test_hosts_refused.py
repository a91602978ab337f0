"""Machines that cannot train together, or cannot reach each other: each prints why."""

import json

import pytest

from support import hosts
from support.command import LOCKSTEP
from support.host_jobs import (
    HELD,
    PORT,
    QUICK,
    alone,
    bits,
    hold,
    own,
    release,
    torchrun,
    two,
    until_step,
    write,
)
from support.hosts import Hosts

__all__ = ["alone", "two"]  # fixtures

pytestmark = [*hosts.cluster, pytest.mark.timeout(1500)]


@pytest.mark.parametrize("launcher", ["torchrun", "tcp"])
def test_machines_that_disagree_are_refused(two: Hosts, launcher: str) -> None:
    jobs = []
    for host in range(2):
        write(two.folder(host), optim={"learning_rate": 1e-3 * (host + 1)}, batch_size=22 + host)
        if launcher == "torchrun":
            jobs.append(torchrun(two, host))
        else:
            options = ["launch.name=tcp", f"launch.init_method=tcp://{two.address(0)}:{PORT}", "launch.world_size=2"]
            jobs.append(two.start(host, [*LOCKSTEP, "train", "run.yaml", *options, f"launch.rank={host}"]))
    assert [job.ended() for job in jobs] == [2, 2], jobs[0].err + jobs[1].err
    for job in jobs:
        assert "the machines of this job differ" in job.err
        assert "batch_size: 22 on host-0" in job.err
        assert "optim.learning_rate: 0.001 on host-0" in job.err
        assert "0.002 on host-1" in job.err
    assert not (two.folder(0) / "out/metrics.jsonl").exists()


@pytest.mark.long
def test_different_data_under_the_same_name_is_refused(two: Hosts) -> None:
    for host in range(2):
        folder = write(two.folder(host), data={"source": "texts", "max_length": 32})
        (folder / "texts").mkdir()
        for split in ("train", "validation"):
            rows = [{"text": f"a text {i} of {split}", "label": i % 2} for i in range(40 + host)]
            (folder / "texts" / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    jobs = [torchrun(two, host) for host in range(2)]
    assert [job.ended() for job in jobs] == [2, 2], jobs[0].err + jobs[1].err
    for job in jobs:
        assert "the data: " in job.err
        assert "host-1" in job.err


@pytest.mark.processes
def test_a_newcomer_with_another_run_file_does_not_disturb(two: Hosts, alone: str) -> None:
    hold(8, *(folders := own(two)))
    write(folders[1], seed=1)
    first = torchrun(two, 0, *QUICK, HELD, machines="1:2")
    until_step(folders[0], 8, first)
    second = torchrun(two, 1, *QUICK, HELD, machines="1:2")
    assert second.ended() == 2
    assert "seed: 0 on host-0, 1 on host-1" in second.err
    release(*folders)
    assert first.ended() == 0, first.err
    assert "another machine" not in first.out
    assert bits(folders[0]) == alone


def test_the_wrong_interface_is_named(two: Hosts) -> None:
    write(two.folder(0))
    job = torchrun(two, 0, "launch.interface=eth7")
    assert job.ended() == 2
    assert "launch.interface: host-0 has no interface 'eth7'" in job.err
    assert f"eth0 ({two.address(0)})" in job.err


def test_too_few_machines(two: Hosts) -> None:
    write(two.folder(0))
    job = torchrun(two, 0, "launch.join_timeout_s=8")
    assert job.ended() == 1
    assert (
        f"too few machines joined at {two.address(0)}:{PORT} within 8 s: expected 2, got 1 ({two.address(0)})"
        in job.err
    )


def test_an_address_without_an_answer(two: Hosts) -> None:
    write(two.folder(1))
    nobody = f"{two.net}.99:{PORT}"
    job = torchrun(two, 1, "launch.join_timeout_s=4", f"launch.rendezvous={nobody}")
    by_hand = ["launch.world_size=2", "launch.rank=1", "launch.timeout_s=4"]
    other = two.start(
        1,
        [*LOCKSTEP, "train", "run.yaml", "launch.name=tcp", f"launch.init_method=tcp://{nobody}", *by_hand],
    )
    assert job.ended() == 2
    assert f"launch.rendezvous: {nobody} is not reachable from host-1 ({two.address(1)}) within 4 s" in job.err
    assert other.ended() == 1
    assert f"rank 1 of 2 on host-1 did not reach the other ranks at {nobody} within 4 s" in other.err
    assert f"through eth0 ({two.address(1)})" in other.err
