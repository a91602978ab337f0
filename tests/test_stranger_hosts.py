"""A stranger on the network of a job: from a host of its own it writes into every store that it reaches. Nothing that
it writes runs, and the job ends with the right bits, or with one message on each machine."""

import sys
from collections.abc import Iterator
from pathlib import Path

import hosts
import pytest
from command import LOCKSTEP
from host_jobs import HELD, HERE, PORT, alone, bits, hold, own, release, torchrun, until, until_step, write
from hosts import Hosts, Job

__all__ = ["alone"]  # a fixture

pytestmark = [*hosts.cluster, pytest.mark.timeout(900)]
KEY = "0123456789abcdef0123456789abcdef"
WITH = {"LOCKSTEP_SECRET": KEY}


@pytest.fixture
def three(tmp_path: Path, cache: Path) -> Iterator[Hosts]:
    with hosts.hosts(3, tmp_path, cache) as made:
        yield made


def listening(made: Hosts, host: int) -> dict[int, str]:
    """Ports of a host -> the IPv4 address on which something listens there; for IPv6 the kernel's own word."""
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
    """What it did on host 0 from host 2."""
    script = str(Path(HERE) / "stranger.py")
    job = made.start(2, [sys.executable, script, made.address(0), str(port), how, str(marker)])
    assert job.ended() == 0, job.err
    assert int(job.out.split()[0]) >= 3
    return job.out


def store_of_rank_0(made: Hosts) -> int:
    """Its port, of all that host 0 has open for others."""
    code = "import sys; sys.path.insert(0, sys.argv[1]); import stranger; "
    code += "print(*(p for p in sys.argv[3:] if stranger.speaks(sys.argv[2], int(p))))"
    ports = [str(port) for port in listening(made, 0) if port != PORT]
    job = made.start(2, [sys.executable, "-c", code, HERE, made.address(0), *ports])
    assert job.ended() == 0, job.err
    (port,) = job.out.split()
    return int(port)


def one_message(job: Job, words: str) -> None:
    """It ended with a message, once, and nothing that only a programmer can read."""
    assert job.ended() == 1, job.out + job.err
    assert job.err.count(words) == 1, job.err
    for noise in ("Traceback", "AttributeError", "Exception in thread", "Error:"):
        assert noise not in job.err


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("how", ["pickle", "malformed", "forged", "strange"])
def test_what_is_written_where_machines_meet(three: Hosts, how: str, given: bool, tmp_path: Path) -> None:
    """While the first machine waits for the second one."""
    write(three.folder(0))
    words = [*LOCKSTEP, "train", "run.yaml", "launch.name=torchrun", "launch.machines=2", "launch.join_s=20"]
    words += [f"launch.rendezvous={three.address(0)}:{PORT}"]
    job = three.start(0, words, PYTHONPATH=HERE, **(WITH if given else {}))
    until(lambda: PORT in listening(three, 0), job)
    assert listening(three, 0)[PORT] == three.address(0)
    job.says("meeting at")
    stranger(three, PORT, how, marker := tmp_path / "ran")
    if how == "forged" and not given:  # a machine that is there already: no other comes, and this one waits for a place
        one_message(job, "not enough machines came")
    else:
        one_message(job, "the machines cannot meet at")
    assert not marker.exists()


def test_pickles_where_torch_would_load_them_change_no_bit(three: Hosts, alone: str, tmp_path: Path) -> None:
    folders = own(three)[:2]
    hold(8, *folders)
    jobs = [started(three, host, WITH) for host in range(2)]
    until_step(folders[0], 8, jobs[0])
    marker = tmp_path / "ran"
    for port in (PORT, store_of_rank_0(three)):
        stranger(three, port, "elsewhere", marker)
    release(*folders)
    assert [job.ended() for job in jobs] == [0, 0], jobs[0].err + jobs[1].err
    assert bits(folders[0]) == alone
    assert not marker.exists()


@pytest.mark.parametrize(
    ("how", "given"), [("pickle", True), ("forged", True), ("malformed", False), ("forged", False)]
)
def test_a_forged_sign_of_life(three: Hosts, how: str, given: bool, tmp_path: Path) -> None:
    """With a secret it is told from a true one; without, it ends the job and no process but the job's."""
    folders = own(three)[:2]
    hold(8, *folders)
    jobs = [started(three, host, WITH if given else {}) for host in range(2)]
    until_step(folders[0], 8, jobs[0])
    bystander = three.start(0, ["sleep", "600"])
    marker = tmp_path / "mark"
    if how == "forged":
        marker.write_text(str(bystander.process.pid))
    stranger(three, store_of_rank_0(three), how, marker)
    ends = [job.ended() for job in jobs]
    assert ends == [1, 1], jobs[0].err + jobs[1].err
    said = jobs[0].err + jobs[1].err
    for noise in ("Traceback", "AttributeError", "Exception in thread", "KeyError"):
        assert noise not in said
    assert ("cannot read what the others say" in said) == (given or how == "malformed"), said
    assert how == "forged" or not marker.exists()
    assert bystander.process.poll() is None


def started(made: Hosts, host: int, variables: dict[str, str]) -> Job:
    options = ["launch.name=torchrun", "launch.machines=2", f"launch.rendezvous={made.address(0)}:{PORT}"]
    words = [*LOCKSTEP, "train", "run.yaml", *options, HELD, "launch.hang_s=8"]
    return made.start(host, words, PYTHONPATH=HERE, **variables)


def test_a_local_job_is_open_to_nobody_else(three: Hosts) -> None:
    write(three.folder(0))
    hold(4, three.folder(0))
    words = [*LOCKSTEP, "train", "run.yaml", "launch.processes=2", HELD]
    job = three.start(0, words, PYTHONPATH=HERE)
    until_step(three.folder(0), 4, job)
    open_ports = listening(three, 0)
    assert len(open_ports) >= 3  # the launcher's store, rank 0's, and gloo's
    assert set(open_ports.values()) == {"127.0.0.1"}
    release(three.folder(0))
    assert job.ended() == 0, job.err


def test_a_rendezvous_that_says_nothing(three: Hosts) -> None:
    """Something listens where the machines shall meet, and is none of them."""
    code = f"import socket, time; s = socket.create_server(('{three.address(0)}', {PORT})); print('up', flush=True)"
    three.start(0, [sys.executable, "-c", f"{code}; time.sleep(600)"]).says("up")
    write(three.folder(1))
    job = torchrun(three, 1, "launch.join_s=6")
    assert job.ended() == 2
    assert job.err.count("has said nothing for 6 s") == 1
    assert "Traceback" not in job.err
