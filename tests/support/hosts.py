"""Several machines on one: network namespaces on a bridge, each with its own address, host name and folder.

In: their number. Out: a `Hosts` that runs commands on them, cuts and heals links, slows them down, and ends whole
machines. Needs root, iproute2, nftables and util-linux on Linux.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import pytest

from support.command import Process
from support.forked import Forked, can_fork, words_of
from support.harness import lockstep_environment, server_environment

NEEDED = ("ip", "nft", "tc", "unshare")
SEARCHED = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


def missing() -> str | None:
    """Reason why hosts cannot be created here, or None."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "needs Linux and root"
    lacking = [program for program in NEEDED if shutil.which(program, path=SEARCHED) is None]
    if lacking:
        return f"needs {', '.join(lacking)} (packages iproute2, nftables, util-linux)"
    probe = subprocess.run(["unshare", "--net", "true"], capture_output=True)
    return None if probe.returncode == 0 else "this kernel or container allows no network namespaces"


cluster = [pytest.mark.cluster, pytest.mark.processes, pytest.mark.skipif(missing() is not None, reason=str(missing()))]


def run(*words: str) -> str:
    """Run a system command. Errors: AssertionError with its output."""
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "PATH": SEARCHED})
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr or done.stdout}"
    return done.stdout


class Job:
    """A process on a host, with time stamps of its output."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.lines: list[tuple[float, str, str]] = []  # (time, "out" or "err", line)
        self._readers = [
            threading.Thread(target=self._read, args=(stream, name), daemon=True)
            for name, stream in (("out", process.stdout), ("err", process.stderr))
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, stream: IO[str], name: str) -> None:
        for line in stream:
            self.lines.append((time.monotonic(), name, line.rstrip("\n")))

    def text(self, name: str) -> str:
        return "\n".join(line for _, stream, line in list(self.lines) if stream == name)

    @property
    def out(self) -> str:
        return self.text("out")

    @property
    def err(self) -> str:
        return self.text("err")

    def when(self, words: str, since: float = 0.0) -> float | None:
        """Time at which it first printed the words after `since`, by the monotonic clock."""
        return next((when for when, _, line in list(self.lines) if words in line and when >= since), None)

    def says(self, words: str, seconds: float = 400, since: float = 0.0) -> float:
        """Wait until it prints the words. Returns the time."""
        limit = time.monotonic() + seconds
        while (when := self.when(words, since)) is None:
            assert self.process.poll() is None or self.when(words, since), (
                f"ended without {words!r}:\n{self.out}\n{self.err}"
            )
            assert time.monotonic() < limit, f"waited in vain for {words!r}:\n{self.out}\n{self.err}"
            time.sleep(0.02)
        return when

    def ended(self, seconds: float = 600) -> int:
        """Exit status."""
        status = self.process.wait(seconds)
        for reader in self._readers:
            reader.join(10)
        return status


@dataclass
class Hosts:
    """Host i has the address 10.77.N.1i, the name `host-i` and the folder `folder(i)`."""

    count: int
    root: Path  # host i's files are in `root/host-i`
    cache: Path
    name: str = field(default_factory=lambda: f"ls{os.getpid() % 100000}")
    started: list[Job] = field(default_factory=list)
    scratch: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="ls-")))

    @property
    def net(self) -> str:
        return f"10.77.{os.getpid() % 250}"

    def address(self, host: int) -> str:
        return f"{self.net}.{10 + host}"

    def space(self, host: int) -> str:
        return f"{self.name}-{host}"

    def folder(self, host: int) -> Path:
        """Working directory of a host, used by no other."""
        return self.root / f"host-{host}"

    def temporary(self, host: int) -> Path:
        """Temporary folder of a host, with a short name, because sockets are created in it."""
        return self.scratch / str(host)

    def open(self) -> None:
        run("ip", "netns", "add", f"{self.name}-b")
        run("ip", "-n", f"{self.name}-b", "link", "add", "name", "br0", "type", "bridge")
        run("ip", "-n", f"{self.name}-b", "link", "set", "br0", "up")
        for host in range(self.count):
            self.plug(host)
            self.folder(host).mkdir(parents=True, exist_ok=True)
            self.temporary(host).mkdir()

    def plug(self, host: int) -> None:
        space, bridge = self.space(host), f"{self.name}-b"
        run("ip", "netns", "add", space)
        run("ip", "-n", space, "link", "set", "lo", "up")
        run(
            "ip",
            "-n",
            space,
            "link",
            "add",
            "name",
            "eth0",
            "type",
            "veth",
            "peer",
            "name",
            f"p{host}",
            "netns",
            bridge,
        )
        run("ip", "-n", bridge, "link", "set", f"p{host}", "master", "br0", "up")
        run("ip", "-n", space, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
        run("ip", "-n", space, "link", "set", "eth0", "up")
        run("ip", "-n", space, "route", "add", "default", "dev", "eth0")

    def close(self) -> None:
        for host in range(self.count):
            with contextlib.suppress(AssertionError):
                self.kill(host)
            subprocess.run(["ip", "netns", "del", self.space(host)], capture_output=True)
        subprocess.run(["ip", "netns", "del", f"{self.name}-b"], capture_output=True)
        for job in self.started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                job.ended(5)
        shutil.rmtree(self.scratch, ignore_errors=True)

    def start(self, host: int, command: Sequence[str], folder: Path | None = None, **variables: str) -> Job:
        """Start a command on a host with its own host name and temporary folder, in `folder` (default: its own).
        `lockstep` starts without the seconds of its imports."""
        inside = f'hostname host-{host}; exec "$@"'
        words = ["ip", "netns", "exec", self.space(host), "unshare", "--uts", "sh", "-c", inside, "sh", *command]
        environment = {k: v for k, v in lockstep_environment(self.cache).items() if k != "GLOO_SOCKET_IFNAME"}
        environment |= {"PATH": SEARCHED, "TMPDIR": str(self.temporary(host))} | variables
        process: Process
        told = words_of(command)
        if told is not None and can_fork(told, environment, server_environment()):
            place = self.space(host), f"host-{host}"
            process = Forked(told, folder or self.folder(host), environment, host=place)
            self.started.append(job := Job(process))
            return job
        process = subprocess.Popen(
            words,
            cwd=folder or self.folder(host),
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.started.append(job := Job(process))
        return job

    def pids(self, host: int) -> list[int]:
        return [int(word) for word in run("ip", "netns", "pids", self.space(host)).split()]

    def youngest(self, host: int) -> int:
        """The newest process, usually a rank. (Process numbers may wrap around.)"""
        began = {}
        for pid in self.pids(host):
            with contextlib.suppress(OSError):
                began[pid] = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
        return max(began, key=lambda pid: (began[pid], pid))

    def kill(self, host: int) -> None:
        """Kill all processes of a host at once, like a power loss, except that the kernel closes connections."""
        while pids := self.pids(host):
            for pid in pids:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)

    def cut(self, host: int) -> None:
        """Drop all traffic of a host silently, like an unplugged cable."""
        self.drop(host, ("input", 'iifname != "lo" drop'), ("output", 'oifname != "lo" drop'))

    def lose(self, host: int, percent: int) -> None:
        """Drop a share of the incoming packets."""
        self.drop(host, ("input", f'iifname != "lo" numgen random mod 100 < {percent} drop'))

    def drop(self, host: int, *rules: tuple[str, str]) -> None:
        chains = [f"chain {hook} {{\ntype filter hook {hook} priority 0\n{rule}\n}}\n" for hook, rule in rules]
        with tempfile.NamedTemporaryFile("w", suffix=".nft") as file:
            file.write(f"table inet cut {{\n{''.join(chains)}}}\n")
            file.flush()
            run("ip", "netns", "exec", self.space(host), "nft", "-f", file.name)

    def heal(self, host: int) -> None:
        run("ip", "netns", "exec", self.space(host), "nft", "delete", "table", "inet", "cut")

    def limit(self, host: int, mbit: float) -> None:
        """Limit outgoing traffic, in Mbit/s."""
        words = ["tc", "-n", self.space(host), "qdisc", "replace", "dev", "eth0", "root"]
        run(*words, "tbf", "rate", f"{mbit}mbit", "burst", "32kbit", "latency", "400ms")


@contextlib.contextmanager
def hosts(count: int, root: Path, cache: Path) -> Iterator[Hosts]:
    """Create hosts that are removed with all their processes at the end."""
    made = Hosts(count, root, cache)
    try:
        made.open()
        yield made
    finally:
        made.close()
