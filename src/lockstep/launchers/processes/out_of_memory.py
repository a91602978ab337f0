"""Detects whether a killed rank ran out of memory: SIGKILL alone has no reason.

In: the pids of this machine's ranks, sampled once a second. Out: a sentence with the rank's memory and what to change,
or nothing. Evidence, strongest first: the kernel log, which names the process (if readable); the number of OOM kills in
this cgroup or on this machine; little free memory just before. Linux only. Imports no torch.
"""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from lockstep.distributed import hardware
from lockstep.distributed.hardware import Sources, numbers
from lockstep.track.report.charts import size

LOOK_S = 1.0
RECENT_S = 10.0  # a large process may take seconds to end
FULL = 0.95  # share of all memory


@dataclass
class Memory:
    """The memory of one machine's ranks, and of the cgroup that they run in."""

    sources: Sources = hardware.KERNEL
    _peaks: dict[int, int] = field(default_factory=dict)  # pid -> peak memory in bytes
    _kills: deque[tuple[float, int, int]] = field(default_factory=deque)  # (time, kills in cgroup, on machine)
    _filled: float = 0.0  # time when memory was last nearly full
    _looked: float = 0.0
    _read: int = -1  # last kernel log record before the ranks started

    def __post_init__(self) -> None:
        self._read = max((number for number, *_ in hardware.records(self.sources)), default=-1)
        self._count(time.monotonic())

    def look(self, pids: Iterable[int]) -> None:
        """Sample the memory of processes and the free memory, at most every `LOOK_S`."""
        now = time.monotonic()
        if now - self._looked < LOOK_S:
            return
        self._looked = now
        resident = 0
        for pid in pids:
            status = numbers(self.sources.proc / str(pid) / "status")
            self._peaks[pid] = max(self._peaks.get(pid, 0), status.get("VmHWM", 0))
            resident += status.get("RssAnon", 0)
        whole = numbers(self.sources.proc / "meminfo")
        most, total = hardware.memory_limit(self.sources), whole.get("MemTotal", 0)
        left = whole.get("MemAvailable", total)
        if (most and resident > FULL * most) or left < (1 - FULL) * total:
            self._filled = now
        self._count(now)

    def why(self, pid: int, status: int) -> str:
        """Explain the exit status of a process that was killed for memory; "" otherwise."""
        if status != -signal.SIGKILL:
            return ""
        now = time.monotonic()
        self._count(now)
        named = self._named(pid)
        _, inside, machine = self._kills[0]
        _, inside_now, machine_now = self._kills[-1]
        if named is not None or inside_now > inside:
            who = "the kernel killed it because memory ran out"
        elif machine_now > machine:
            who = "the kernel killed a process of this machine because memory ran out, most likely this one"
        elif self._filled and now - self._filled < RECENT_S:
            who = "memory was nearly full, so it most likely ran out"
        else:
            return ""
        peak_bytes = max(named or 0, self._peaks.get(pid, 0))
        limit = hardware.memory_limit(self.sources)
        peak = f"; it held {size(peak_bytes)}" if peak_bytes else ""
        peak += f" of {size(limit)} available to all ranks of this machine" if peak_bytes and limit else ""
        return (
            f" ({who}{peak}. Use more micro_batches, a smaller batch_size or data.max_length, "
            "model.checkpoint_activations=true, a strategy that shards the model (fsdp2), fewer processes on this "
            "machine, or a machine with more memory)"
        )

    # -- kernel evidence ---------------------------------------------------------------------------------------------

    def _count(self, now: float) -> None:
        """Sample the number of OOM kills. Keeps one sample older than `RECENT_S`."""
        inside, machine = hardware.kills(self.sources)
        self._kills.append((now, inside, machine))
        while len(self._kills) > 1 and now - self._kills[1][0] > RECENT_S:
            self._kills.popleft()

    def _named(self, pid: int) -> int | None:
        """Return the memory in bytes of a process that the kernel log names as OOM-killed, else None."""
        for number, _, text in hardware.records(self.sources):
            match = hardware.KILLED.search(text)
            if number > self._read and match is not None and int(match[1]) == pid:
                return sum(int(part or 0) for part in match.groups()[1:]) * 1024
        return None
