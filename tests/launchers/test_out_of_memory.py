"""Out-of-memory kills are detected from the kernel's files (replaced by test files), and the message says so."""

import os
import resource
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.agent.server.api import WorkerSpec

from lockstep.distributed import hardware, job_record, system_metrics
from lockstep.distributed.hardware import Sources
from lockstep.launchers.launcher import LaunchPlan
from lockstep.launchers.processes import elastic_agent, out_of_memory
from lockstep.launchers.processes.elastic_agent import Agent
from lockstep.launchers.processes.elastic_rendezvous import ElasticRendezvous, Limits, Node
from lockstep.launchers.processes.out_of_memory import Memory
from support.command import LOCKSTEP, bits, ended, start_anew, until, write
from support.harness import tiny
from support.marks import long, slow
from support.places import TESTS_PATH

KB, PID = 1024, 4711
V1, V2 = "4:memory:/job/me\n1:cpu:/other\n0::/", "0::/job/me"
LINE = (
    f"3,{{}},100,-;Memory cgroup out of memory: Killed process {PID} (python) total-vm:9kB, anon-rss:3145728kB, "
    "file-rss:1024kB, shmem-rss:0kB, UID:0 pgtables:1kB oom_score_adj:0"
)


class Kernel:
    """The kernel's counters and limits, in files."""

    def __init__(self, folder: Path, cgroup: str = V2, inside: str = "job/me") -> None:
        self.folder, self.v1 = folder, cgroup == V1
        self.group = folder / "cgroup" / ("memory" if self.v1 else "") / inside
        self.sources = Sources(folder, folder / "cgroup", folder / "kmsg")
        self.group.mkdir(parents=True)
        (folder / "self").mkdir()
        (folder / "self/cgroup").write_text(cgroup)
        self.kills(0, 0)
        self.memory(total=8_000_000, left=6_000_000)
        self.process(held=0, now=0)

    def kills(self, inside: int, machine: int) -> None:
        name, more = ("memory.oom_control", "under_oom 0") if self.v1 else ("memory.events", "oom 7")
        (self.group / name).write_text(f"low 0\n{more}\noom_kill {inside}\n")
        (self.folder / "vmstat").write_text(f"pgpgin 5\noom_kill {machine}\n")

    def memory(self, total: int, left: int) -> None:
        (self.folder / "meminfo").write_text(f"MemTotal: {total} kB\nMemFree: 1 kB\nMemAvailable: {left} kB\n")

    def limit(self, text: str, above: bool = False) -> None:
        folder = self.group.parent if above else self.group
        (folder / ("memory.limit_in_bytes" if self.v1 else "memory.max")).write_text(text)

    def process(self, held: int, now: int) -> None:
        (self.folder / str(PID)).mkdir(exist_ok=True)
        (self.folder / str(PID) / "status").write_text(f"Name: python\nVmHWM: {held} kB\nRssAnon: {now} kB\n")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(out_of_memory.time, "monotonic", lambda: now[0])
    return now


@pytest.mark.parametrize(("cgroup", "inside"), [(V1, "job/me"), (V2, "job/me"), (V2, "")])
def test_oom_kills_counted_by_the_cgroup(cgroup: str, inside: str, tmp_path: Path, clock: list[float]) -> None:
    kernel = Kernel(tmp_path, cgroup, inside)
    kernel.limit(str(2 << 30))
    memory = Memory(kernel.sources)
    kernel.process(held=1_572_864, now=1)
    memory.look([PID])
    clock[0] += 1
    assert memory.why(PID, -signal.SIGKILL) == ""
    kernel.kills(1, 1)
    said = memory.why(PID, -signal.SIGKILL)
    assert "the kernel killed it because memory ran out; it held 1.50 GiB of 2.00 GiB" in said
    assert "micro_batches" in said
    assert memory.why(PID, -signal.SIGTERM) == memory.why(PID, 1) == ""
    clock[0] += 60  # a user kills another one long afterwards
    memory.look([PID])
    clock[0] += 60
    memory.look([PID])
    assert memory.why(PID, -signal.SIGKILL) == ""


def test_an_oom_kill_of_another_process_is_possible(tmp_path: Path, clock: list[float]) -> None:
    kernel = Kernel(tmp_path)
    memory = Memory(kernel.sources)
    kernel.kills(0, 1)
    assert "a process of this machine because memory ran out, most likely this one" in memory.why(PID, -signal.SIGKILL)


@pytest.mark.parametrize(("total", "left", "most", "resident", "full"), [
    (8_000_000, 100_000, "max", 5, True),
    (8_000_000, 6_000_000, "max", 5, False),
    (8_000_000, 6_000_000, str(1000 * KB), 990, True),
    (8_000_000, 6_000_000, str(1000 * KB), 900, False),
    (8_000_000, 6_000_000, str(2**63 - 4096), 5, False),  # no limit, as cgroup version 1 writes it
])  # fmt: skip
def test_memory_was_nearly_full(
    total: int, left: int, most: str, resident: int, full: bool, tmp_path: Path, clock: list[float]
) -> None:
    """Nearly full memory is named as the likely cause: a scheduler or earlyoom may have killed the rank."""
    kernel = Kernel(tmp_path)
    kernel.memory(total, left)
    kernel.limit(most, above=True)
    kernel.process(resident, resident)
    memory = Memory(kernel.sources)
    memory.look([PID])
    clock[0] += 1
    assert ("memory was nearly full" in memory.why(PID, -signal.SIGKILL)) is full
    clock[0] += 60
    assert memory.why(PID, -signal.SIGKILL) == ""


@pytest.mark.parametrize(("cgroup", "inside"), [(V1, "job/me"), (V2, "job/me"), (V2, "")])
def test_free_memory_is_the_minimum_over_machine_and_cgroups(cgroup: str, inside: str, tmp_path: Path) -> None:
    """A scheduler may limit a job's cgroup and not that of its step. Memory of tmpfs files does not count as free."""
    kernel = Kernel(tmp_path, cgroup, inside)
    assert hardware.available_memory(kernel.sources) == 6_000_000 * KB
    limited = kernel.group.parent if inside else kernel.group
    used, cached = ("memory.usage_in_bytes", "total_") if kernel.v1 else ("memory.current", "")
    kernel.limit(str(3000 * KB), above=bool(inside))
    (limited / used).write_text(str(2000 * KB))
    assert hardware.available_memory(kernel.sources) == 1000 * KB
    (limited / "memory.stat").write_text(f"anon 7\n{cached}inactive_file {500 * KB}\n")
    assert hardware.available_memory(kernel.sources) == 1500 * KB
    assert hardware.memory_limit(kernel.sources) == 3000 * KB
    kernel.memory(8_000_000, 900)
    assert hardware.available_memory(kernel.sources) == 900 * KB
    (limited / used).write_text(str(9000 * KB))
    assert hardware.available_memory(kernel.sources) == 0
    assert hardware.available_memory(Sources(tmp_path / "none", tmp_path / "none")) == 0


@pytest.mark.parametrize("kind", [resource.RLIMIT_AS, resource.RLIMIT_DATA])
def test_process_with_its_own_memory_limit_gets_no_conclusion(kind: int, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = dict.fromkeys((resource.RLIMIT_AS, resource.RLIMIT_DATA), (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    monkeypatch.setattr(hardware, "available_memory", lambda: 4000)
    monkeypatch.setattr(resource, "getrlimit", lambda asked: limits[asked])
    assert [system_metrics.free_memory(sharing) for sharing in (1, 4)] == [4000, 1000]
    limits[kind] = (1 << 30, resource.RLIM_INFINITY)
    assert system_metrics.free_memory(1) == 0


def test_the_kernel_s_log_names_it(tmp_path: Path, clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """/dev/kmsg returns one record per read, and EAGAIN at the end."""
    kernel = Kernel(tmp_path)
    kernel.sources.log.touch()
    records: list[bytes] = [LINE.format(7).encode()]  # about an earlier process with that pid
    left: list[bytes] = []
    opened, read = os.open, os.read

    def open_log(path: Any, *more: Any) -> int:
        left[:] = records
        return opened(path, *more)

    def read_log(descriptor: int, size: int) -> bytes:
        if not left:
            raise BlockingIOError
        return left.pop(0)

    memory = None
    with monkeypatch.context() as patched:
        patched.setattr(hardware.os, "open", open_log)
        patched.setattr(hardware.os, "read", read_log)
        memory = Memory(kernel.sources)
        assert memory.why(PID, -signal.SIGKILL) == ""
        records.append(LINE.format(8).encode())
        assert "it held 3.00 GiB" in memory.why(PID, -signal.SIGKILL)
        assert memory.why(PID + 1, -signal.SIGKILL) == ""
    assert os.read is read


def test_without_kernel_information(tmp_path: Path) -> None:
    memory = Memory(Sources(tmp_path / "a", tmp_path / "b", tmp_path / "c"))
    memory.look([PID])
    assert hardware.memory_limit(memory.sources) == 0
    assert memory.why(PID, -signal.SIGKILL) == ""


@pytest.mark.parametrize(
    ("step", "place", "words", "said"),
    [
        (None, 0, (), "no checkpoint yet; training starts over (2 restarts left)"),
        (10, 0, (), "restarting from the last checkpoint (2 restarts left)"),
        (None, 1, (), "restarting from the last checkpoint, if there is one (2 restarts left)"),  # on machine 0
        (None, 0, ("remote_dir=s3://bucket/run",), "restarting from the last checkpoint, if there is one"),
    ],
)
def test_the_message_says_whether_the_job_restarts(
    step: int | None, place: int, words: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elastic_agent, "newest_whole", lambda run: step)
    node = Node("a", "127.0.0.1", 1, holds=True)
    rendezvous: Any = ElasticRendezvous("127.0.0.1", 0, 1, 1, node, Limits(20, 1, 60))
    rendezvous.place = place
    spec = WorkerSpec("lockstep", 1, rendezvous, entrypoint=print, max_restarts=2)
    agent = Agent(spec, rendezvous, LaunchPlan(tiny(*words), 1, []), print)
    assert agent.then().startswith(said)
    agent._remaining_restarts = 0
    assert agent.then() == "no restarts left"
    rendezvous.shutdown()


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A cgroup with little memory."""
    root = Path("/sys/fs/cgroup")
    root = root / "memory" if (root / "memory").is_dir() else root
    group = root / f"lockstep-{os.getpid()}"
    try:
        group.mkdir()
        name = "memory.max" if (group / "memory.max").exists() else "memory.limit_in_bytes"
        (group / name).write_text(str(2000 << 20))
    except OSError as error:
        if group.is_dir():
            group.rmdir()
        pytest.skip(f"no cgroup with a limit of memory can be made here: {error}")
    yield group
    until(lambda: not (group / "cgroup.procs").read_text(), "every process of the group to end", seconds=30)
    group.rmdir()


# Every killed rank takes the path of a restart of all (tests/jobs/test_command.py); here the test calls it directly
@pytest.mark.processes
@pytest.mark.parametrize("goes_on", [long(False), slow(True)])
def test_a_rank_that_takes_all_memory(goes_on: bool, small: Path, tmp_path: Path, cache: Path, untouched: Path) -> None:
    write(tmp_path, checkpoint={"every": 10 if goes_on else 40, "keep": 2})
    words = ["launch.max_restarts=1", "strategy.name=support.misbehaving.Hungry"]
    words += ["launch.on_rank_failure=continue"] * goes_on
    command = ["sh", "-c", f'echo $$ > {small}/cgroup.procs; exec "$@"', "sh", *LOCKSTEP, "train", "run.yaml", *words]
    status, _, err = ended(start_anew(command, tmp_path, cache, PYTHONPATH=TESTS_PATH), 400)
    assert status == 0, err
    assert "was killed by SIGKILL (the kernel killed it because memory ran out; it held " in err
    assert " of 1.95 GiB available to all ranks of this machine. Use more micro_batches" in err
    restarts = "no checkpoint yet; training starts over (1 restart"
    then = "the other ranks continue" if goes_on else restarts
    assert f"); {then}" in err
    assert "from the last checkpoint" not in err
    assert (tmp_path / "ate").exists()
    assert bits(tmp_path)["export"] == bits(untouched)["export"]


DEAD = job_record.Process(socket.gethostname(), PID, "")


def gone(kernel: Kernel, monkeypatch: pytest.MonkeyPatch, **values: Any) -> tuple[str, str | None]:
    """Return what `status` prints about a launch that ended, from the kernel's counters now, and what its next start
    prints."""
    for name in ("kills", "cgroup"):
        function = getattr(hardware, name)
        monkeypatch.setattr(hardware, name, lambda f=function: f(kernel.sources))
    monkeypatch.setattr(hardware, "killed_since", lambda *_: False)
    record = job_record.JobRecord("local", 2, time.time() - 60, DEAD, **values)
    return job_record.state_of_process(record).text, job_record.recorded_loss(record)


@pytest.mark.parametrize(("inside", "machine", "same", "said"), [
    (0, 0, True, "it was killed, or the machine was"),
    (2, 2, True, "the kernel killed 2 processes of its cgroup because memory ran out"),
    (2, 2, False, "the kernel killed 2 processes of this machine because memory ran out; if it was one of them"),
    (0, 1, True, "the kernel killed 1 process of this machine because memory ran out; if it was one of them"),
])  # fmt: skip
@pytest.mark.parametrize("cgroup", [V1, V2])
def test_out_of_memory_kill_of_the_launcher_is_reported(
    cgroup: str, inside: int, machine: int, same: bool, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compares the kernel's counters at the start with those now; counters of another cgroup do not count."""
    kernel = Kernel(tmp_path, cgroup)
    kernel.kills(3, 5)
    kills, place = hardware.kills(kernel.sources), hardware.cgroup(kernel.sources)
    assert kills[1] == 5
    kernel.kills(3 + inside, 5 + machine)
    text, told = gone(kernel, monkeypatch, kills=kills, cgroup=place if same else "another")
    assert said in text
    assert ("micro_batches" in text) is bool(inside or machine)
    assert (told is not None and said in told) is bool(inside or machine)


def test_memory_records_of_a_launch_round_trip(tmp_path: Path) -> None:
    job_record.write(tmp_path, record := job_record.here("local", 2))
    assert record.kills == hardware.kills()
    assert job_record.read(tmp_path) == record


@pytest.mark.parametrize("space", ["pid:[4026531836]", "pid:[4026532999]"])
def test_the_kernels_log_may_name_a_process_outside_the_container(
    space: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inside a container, the same pid means another process."""
    kernel = Kernel(tmp_path)
    (tmp_path / "self/ns").mkdir()
    (tmp_path / "self/ns/pid").symlink_to(space)
    now = int(1e6 * time.clock_gettime(time.CLOCK_MONOTONIC))
    record = LINE.partition(";")[2]
    monkeypatch.setattr(hardware, "records", lambda _: iter([(1, 100, record), (2, now, record)]))
    assert hardware.killed_since(PID, time.time() - 5, kernel.sources) is (space == "pid:[4026531836]")
    assert not hardware.killed_since(PID, time.time() + 60, kernel.sources)
    assert not hardware.killed_since(PID + 1, time.time() - 5, kernel.sources)
