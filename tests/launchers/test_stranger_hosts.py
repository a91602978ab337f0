"""A foreign host on a job's network writes into every store that it reaches. Nothing that it writes is executed, and
the job ends with one message; a local job has no open port."""

import os
import sys
from pathlib import Path

import pytest

from support import hosts
from support.command import LOCKSTEP, step_of
from support.host_jobs import HELD, PORT, hold, release, three, until, until_step, write
from support.hosts import Hosts, Job
from support.marks import long
from support.places import TESTS_PATH

__all__ = ["three"]  # fixtures

pytestmark = [*hosts.cluster, pytest.mark.timeout(900)]
PATH = os.pathsep.join([TESTS_PATH, *filter(None, [os.environ.get("PYTHONPATH")])])
KEY = "0123456789abcdef0123456789abcdef"
WITH = {"LOCKSTEP_SECRET": KEY}
SEES = {"PYTHONPATH": PATH}


def listening(made: Hosts, host: int) -> dict[int, str]:
    """Return open port of a host -> IPv4 address, or IPv6 address in the kernel's notation."""
    found = {}
    for version in ("", "6"):
        text = hosts.run("ip", "netns", "exec", made.space(host), "cat", f"/proc/net/tcp{version}")
        for line in text.splitlines()[1:]:
            _, place, _, state, *_ = line.split()
            address, _, port = place.partition(":")
            if state == "0A":
                short = ".".join(str(byte) for byte in bytes.fromhex(address)[::-1])
                found[int(port, 16)] = address if version else short
    return found


def stranger(made: Hosts, port: int, how: str, marker: Path) -> str:
    """Attack host 0 from host 2; return what succeeded."""
    words = [made.address(0), str(port), how, str(marker)]
    job = made.start(
        2,
        [
            sys.executable,
            "-c",
            "import sys; from support import store_intruder; store_intruder.main(*sys.argv[1:])",
            *words,
        ],
        **SEES,
    )
    assert job.ended() == 0, job.err
    assert int(job.out.split()[0]) >= 2
    return job.out


def one_message(job: Job, words: str, status: int = 1) -> None:
    """Check that the job ended with the message, once, and without a traceback."""
    clean(job, status)
    assert job.err.count(words) == 1, job.err


def clean(job: Job, status: int) -> None:
    """Check that the job ended with that status, and without a traceback."""
    assert job.ended() == status, job.out + job.err
    for noise in ("Traceback", "AttributeError", "Exception in thread", "Error:"):
        assert noise not in job.err


@pytest.mark.parametrize(
    ("how", "given"),
    [("pickle", True), long("pickle", False), long("malformed", True), ("malformed", False), ("forged", True)],
)
def test_foreign_writes_to_the_rendezvous(three: Hosts, how: str, given: bool, tmp_path: Path) -> None:
    """The attack comes while the first machine waits for the second."""
    write(three.folder(0))
    words = [*LOCKSTEP, "train", "run.yaml", "launch.name=torchrun", "launch.machines=2", "launch.join_timeout_s=20"]
    words += [f"launch.rendezvous={three.address(0)}:{PORT}"]
    job = three.start(0, words, **SEES, **(WITH if given else {}))
    until(lambda: PORT in listening(three, 0), job)
    assert listening(three, 0)[PORT] == three.address(0)
    job.says("rendezvous at")
    stranger(three, PORT, how, marker := tmp_path / "ran")
    one_message(job, "the rendezvous at")
    assert not marker.exists()


def test_a_local_job_listens_only_on_the_loopback(three: Hosts) -> None:
    write(three.folder(0))
    hold(4, three.folder(0))
    words = [*LOCKSTEP, "train", "run.yaml", "launch.processes=2", HELD]
    job = three.start(0, words, **SEES)
    until_step(three.folder(0), 4, job)
    open_ports = listening(three, 0)
    assert len(open_ports) >= 3  # the launcher's store, rank 0's, and gloo's
    assert set(open_ports.values()) == {"127.0.0.1"}
    release(three.folder(0))
    assert job.ended() == 0, job.err


@pytest.mark.parametrize("how", ["pickle", long("beats")])
def test_foreign_writes_to_the_heartbeat_port(three: Hosts, how: str, tmp_path: Path) -> None:
    """The attack is on rank 0's own store, while both machines train."""
    folders = [write(three.folder(host)) for host in (0, 1)]
    hold(4, *folders)
    words = ["launch.hang_timeout_s=600", "launch.max_restarts=0", "strategy.name=support.waiting_at_steps.Told"]
    jobs = [start(three, host, words) for host in (0, 1)]
    port_of = folders[0] / "port"  # the file exists before it has content
    until(lambda: port_of.exists() and port_of.read_text() != "" and step_of(folders[0]) >= 4, jobs[0])
    port = int(port_of.read_text())
    assert listening(three, 0)[port] == three.address(0)
    keys = stranger(three, port, how, marker := tmp_path / "ran")
    assert "lockstep-watch/0" in keys
    for job in jobs:
        clean(job, 1)
    said = [job.err.count("invalid heartbeat from another rank") for job in jobs]
    assert sum(said) >= 1, [job.err for job in jobs]  # whichever reads it first; the other's launcher may end it
    assert max(said) == 1
    assert not marker.exists()


def test_a_silent_listener_at_the_rendezvous(three: Hosts) -> None:
    """A foreign program has the port: the second machine does not wait forever."""
    write(three.folder(1))
    silent = "import socket, sys, time; s = socket.create_server((sys.argv[1], int(sys.argv[2]))); time.sleep(600)"
    mute = three.start(0, [sys.executable, "-c", silent, three.address(0), str(PORT)])
    until(lambda: PORT in listening(three, 0), mute)
    one_message(start(three, 1, ["launch.join_timeout_s=5"]), f"{three.address(0)}:{PORT} did not answer within 5 s", 2)


def start(made: Hosts, host: int, words: list[str]) -> Job:
    """Start `torchrun` with the job's secret."""
    words = [*LOCKSTEP, "train", "run.yaml", "launch.name=torchrun", "launch.machines=2", *words]
    return made.start(host, [*words, f"launch.rendezvous={made.address(0)}:{PORT}"], **SEES, **WITH)
