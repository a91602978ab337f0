"""Shared code of tests of the `lockstep` command: a small job in its own processes, observed from outside."""

import hashlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import yaml

from support.checkpoints import digest
from support.forked import Forked, can_fork, words_of
from support.harness import TINY, lockstep_environment, server_environment

STEPS = 40
RUN = TINY | {
    "steps": STEPS,
    "micro_batches": 4,  # a quarter less work than with 8
    "launch": {"device": "cpu", "threads": 1, "processes": 2},
    "checkpoint": {"every": 10, "keep": 2},
    "evaluate": {"every": 20},
    "track": {"every": 1},
    # the same small model hundreds of times: only `untouched` is compared with transformers
    "verify": {"plain": False},
}
LOCKSTEP = [sys.executable, "-m", "lockstep"]
Process = subprocess.Popen[str] | Forked
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "lockstep"]


def write(folder: Path, **values: object) -> Path:
    """Write a run file to `folder`, with results in `folder/out`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(RUN | {"output": "out"} | values))
    return path


def start(command: list[str], folder: Path, cache: Path, **variables: str) -> Process:
    """Start a command in a new session; `lockstep` and torchrun start without the seconds of their imports."""
    environment = environment_of(cache, **variables)
    words = words_of(command)
    if sys.platform == "linux" and words is not None and can_fork(words, environment, server_environment()):
        return Forked(words, folder, environment)
    return start_anew(command, folder, cache, **variables)


def environment_of(cache: Path, **variables: str) -> dict[str, str]:
    return lockstep_environment(cache) | {"GLOO_SOCKET_IFNAME": "lo"} | variables


def start_anew(command: list[str], folder: Path, cache: Path, **variables: str) -> subprocess.Popen[str]:
    """Start a command in a new interpreter, for tests of its startup and of what it inherits."""
    return subprocess.Popen(
        command,
        cwd=folder,
        env=environment_of(cache, **variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def ended(process: Process, seconds: float = 200) -> tuple[int, str, str]:
    """Exit status, standard output and standard error. `launch.timeout_s` is three times the usual limit."""
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return process.returncode, out, err


def train(folder: Path, cache: Path, *overrides: str, **variables: str) -> tuple[int, str, str]:
    return ended(start([*LOCKSTEP, "train", "run.yaml", *overrides], folder, cache, **variables))


def finish(folder: Path, cache: Path, *overrides: str) -> str:
    """Run to the end. Returns standard output."""
    status, out, err = train(folder, cache, *overrides)
    assert status == 0, err
    return out


def until(true: Callable[[], bool], what: str, process: Process | None = None, seconds: float = 120) -> None:
    """Wait until something is true. The limit only makes failures end."""
    limit = time.monotonic() + seconds
    while not true():
        if process is not None and process.poll() is not None:
            raise AssertionError(f"ended while waiting for {what}: {process.communicate()}")
        assert time.monotonic() < limit, f"waited in vain for {what}"
        time.sleep(0.02)


def lines(folder: Path) -> list[dict]:
    """Lines of metrics.jsonl, without an incomplete last line after a kill."""
    path = folder / "out" / "metrics.jsonl"
    found = []
    for line in path.read_bytes().split(b"\n") if path.exists() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def step_of(folder: Path) -> int:
    return max((line["step"] for line in lines(folder)), default=0)


def saved(folder: Path) -> int:
    """Step of the newest checkpoint."""
    return max((int(p.name[5:]) for p in (folder / "out" / "checkpoints").glob("step-??????")), default=0)


def bits(folder: Path, steps: int = STEPS) -> dict[str, str]:
    """SHA-256 of the exported weights, and of weights and optimizer state in the last checkpoint, independent of the
    number of processes."""
    exported = hashlib.sha256((folder / "out/export/model.safetensors").read_bytes()).hexdigest()
    return {"checkpoint": digest(folder / f"out/checkpoints/step-{steps:06d}"), "export": exported}


def kill(*pids: int) -> None:
    """Kill processes that still exist, one after another: a rank ends with its launcher."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def processes_in(folder: Path) -> dict[int, int]:
    """pid -> parent's pid of all live processes whose working directory is `folder`."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and (entry / "cwd").readlink() == folder:
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                if state != "Z":
                    found[int(entry.name)] = int(parent)
        except OSError:
            continue
    return found


def ranks_of(process: Process, folder: Path) -> list[int]:
    """pids of the ranks: children of the launcher's fork server."""
    parents = processes_in(folder)
    return sorted(pid for pid, parent in parents.items() if parents.get(parent) == process.pid)


@dataclass(frozen=True)
class CommandJob:
    """A job started by the command in its own folder: `run.yaml`, with results in `out`."""

    folder: Path
    cache: Path

    def write(self, **values: object) -> Path:
        return write(self.folder, **values)

    def start(self, *overrides: str, **variables: str) -> Process:
        return start([*LOCKSTEP, "train", "run.yaml", *overrides], self.folder, self.cache, **variables)

    def train(self, *overrides: str, **variables: str) -> tuple[int, str, str]:
        return train(self.folder, self.cache, *overrides, **variables)

    def finish(self, *overrides: str) -> str:
        return finish(self.folder, self.cache, *overrides)

    def lines(self) -> list[dict]:
        return lines(self.folder)

    def step(self) -> int:
        return step_of(self.folder)

    def saved(self) -> int:
        return saved(self.folder)

    def bits(self, steps: int = STEPS) -> dict[str, str]:
        return bits(self.folder, steps)

    def ranks(self, process: Process) -> list[int]:
        return ranks_of(process, self.folder)

    def processes(self) -> dict[int, int]:
        return processes_in(self.folder)


def each_step_once(folder: Path, untouched: Path) -> None:
    """Assert that metrics.jsonl of an interrupted job equals that of an undisturbed one, except for speeds."""

    def plain(line: dict) -> dict:
        return {k: v for k, v in line.items() if "per_s" not in k}

    assert [plain(line) for line in lines(folder)] == [plain(line) for line in lines(untouched)]


def free_port() -> int:
    """A free port below those that Linux assigns to clients (from 32768), which could be taken before its use."""
    while True:
        port = random.SystemRandom().randrange(20000, 32000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
