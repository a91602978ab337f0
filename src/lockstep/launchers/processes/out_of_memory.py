"""Whether a rank that was killed was killed because memory ran out: SIGKILL alone does not say who sent it, or why.

In: the pids of this machine's ranks, looked at once a second. Out: a sentence with the memory that the rank held and
what to change; nothing where memory did not run out. What tells, the surest first: the kernel's log, which names the
process (where this user may read it); how many processes the kernel has killed for memory in this cgroup, or on this
machine; and how little was left before. Linux only. Nothing here imports torch.
"""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from lockstep.distributed import host_memory
from lockstep.distributed.host_memory import Sources, numbers
from lockstep.track.report.charts import size

LOOK_S = 1.0
RECENT_S = 10.0  # a process with much memory may take seconds to end
FULL = 0.95  # of the memory that there is


@dataclass
class Memory:
    """The memory of one machine's ranks, and of the cgroup that they run in."""

    sources: Sources = host_memory.KERNEL
    _peaks: dict[int, int] = field(default_factory=dict)  # the most that each process was seen to hold, in bytes
    _kills: deque[tuple[float, int, int]] = field(default_factory=deque)  # when; in the cgroup, on the machine
    _filled: float = 0.0  # when memory was last seen to be nearly full
    _looked: float = 0.0
    _read: int = -1  # the last record of the kernel's log that is older than the ranks

    def __post_init__(self) -> None:
        self._read = max((number for number, *_ in host_memory.records(self.sources)), default=-1)
        self._count(time.monotonic())

    def look(self, pids: Iterable[int]) -> None:
        """Remember how much memory these processes hold and how much is left; at most every `LOOK_S`."""
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
        most, total = host_memory.limit(self.sources), whole.get("MemTotal", 0)
        left = whole.get("MemAvailable", total)
        if (most and resident > FULL * most) or left < (1 - FULL) * total:
            self._filled = now
        self._count(now)

    def why(self, pid: int, status: int) -> str:
        """What to say of a process with this exit status: "" where it was not killed for memory."""
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
            who = "memory was nearly full, so that most likely ran out"
        else:
            return ""
        peak_bytes = max(named or 0, self._peaks.get(pid, 0))
        limit = host_memory.limit(self.sources)
        peak = f"; it held {size(peak_bytes)}" if peak_bytes else ""
        peak += f" of {size(limit)} that there are for all ranks of this machine" if peak_bytes and limit else ""
        return (
            f" ({who}{peak}. Use more micro_batches, a smaller batch_size or data.max_length, "
            "model.checkpoint_activations=true, a strategy that shares out the model (fsdp2), fewer processes on this "
            "machine, or one with more memory)"
        )

    # -- what the kernel tells ---------------------------------------------------------------------------------------

    def _count(self, now: float) -> None:
        """Processes that the kernel has killed for memory, now. Keeps what is older than `RECENT_S` once."""
        inside, machine = host_memory.kills(self.sources)
        self._kills.append((now, inside, machine))
        while len(self._kills) > 1 and now - self._kills[1][0] > RECENT_S:
            self._kills.popleft()

    def _named(self, pid: int) -> int | None:
        """Bytes that this process held when the kernel killed it for memory, by the kernel's log."""
        for number, _, text in host_memory.records(self.sources):
            match = host_memory.KILLED.search(text)
            if number > self._read and match is not None and int(match[1]) == pid:
                return sum(int(part or 0) for part in match.groups()[1:]) * 1024
        return None
