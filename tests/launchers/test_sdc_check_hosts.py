"""`sdc_check.on_difference: evict` between machines: the one that computes wrongly leaves, the others go on, and it is
not admitted again. Three network namespaces share the output folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lockstep.cli import main
from lockstep.config.errors import EXCLUDED
from lockstep.track.history import lines_of
from support import hosts
from support.host_jobs import QUICK, STEPS, alone, bits, three, torchrun, write
from support.hosts import Hosts, Job
from support.marks import long

__all__ = ["alone", "three"]  # fixtures


pytestmark = [*hosts.cluster, pytest.mark.timeout(1500)]
EXCLUDE = ("sdc_check.every=1", "sdc_check.on_difference=evict")


def started(three: Hosts, host: int, strategy: str, folder: Path) -> Job:
    words = [*QUICK, "launch.last_call_timeout_s=300", *EXCLUDE, f"strategy.name=support.faulty_host.{strategy}"]
    return torchrun(three, host, *words, folder=folder, machines="2:3")


@pytest.mark.processes
@pytest.mark.parametrize("strategy", ["WrongGradient", long("WrongOnFirstHost"), long("WrongWeight")])
def test_a_faulty_machine_is_evicted(
    strategy: str, three: Hosts, alone: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The bits are those of a job without that machine, even if it holds the rendezvous. The others do not wait for
    `last_call_timeout_s`: every machine that may come has joined."""
    shared = write(tmp_path / "shared")
    wrong = 0 if strategy == "WrongOnFirstHost" else 1
    jobs = [started(three, host, strategy, shared) for host in range(3)]
    for host, job in enumerate(jobs):
        assert job.ended() == (EXCLUDED if host == wrong else 0), job.out + job.err
    said = f"host-{wrong} computed wrong values (sdc_check) and is evicted; the other machines continue without it"
    assert said in jobs[wrong].err
    for job in jobs:  # each machine reports it
        told = " ".join(job.err.split())
        assert f"host-{wrong} is evicted, and the job continues without it" in told
    left = [host for host in range(3) if host != wrong]
    met = f"machines   2 at {three.address(0)}:29400: host-{left[0]} (rank 0), host-{left[1]} (rank 1)"
    assert met in jobs[left[0]].out
    found = [line for line in lines_of(shared / "out/events.jsonl", ("event",)) if line["event"] == "guard"]
    assert [line["out"] for line in found] == [[f"host-{wrong}"]]
    assert 7 <= found[0]["step"] < STEPS
    assert bits(shared) == alone

    again = started(three, wrong, strategy, shared)
    assert again.ended() == 2
    said = f"host-{wrong} was evicted from this run, because it computed wrong values (sdc_check)"
    assert said in " ".join(again.err.split())
    assert json.loads((shared / f"out/excluded-host-{wrong}.json").read_text())["host"] == f"host-{wrong}"
    assert main(["status", str(shared / "out")]) == 0
    assert f"taken out  host-{wrong}, which computed wrong values in step" in capsys.readouterr().out
    assert f"host-{wrong} computed wrongly and was evicted" in (shared / "out/report.html").read_text()
