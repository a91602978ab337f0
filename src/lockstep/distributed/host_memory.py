"""Host memory as the kernel tells it: what there is for this process, and what is free, within its cgroups.

In: files of the kernel. Out: bytes. Linux; elsewhere nothing is known. Nothing here imports torch.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Sources:
    """Where the kernel tells of memory."""

    proc: Path = Path("/proc")
    cgroups: Path = Path("/sys/fs/cgroup")
    log: Path = Path("/dev/kmsg")


KERNEL = Sources()
_FIRST_SPACE = "pid:[4026531836]"  # the machine's own numbers of processes
KILLED = re.compile(r"[Kk]illed process (\d+) .*?anon-rss:(\d+)kB, file-rss:(\d+)kB(?:, shmem-rss:(\d+)kB)?")


def kills(sources: Sources = KERNEL) -> tuple[int, int]:
    """How many processes the kernel has killed because memory ran out: in this cgroup, and on this machine."""
    inside = 0
    for folder in folders(sources):
        for name in ("memory.events", "memory.oom_control"):
            inside += numbers(folder / name).get("oom_kill", 0)
    return inside, numbers(sources.proc / "vmstat").get("oom_kill", 0)


def cgroup(sources: Sources = KERNEL) -> str:
    """The memory cgroups that this process is in, as one text; "" where there are none."""
    return ":".join(map(str, folders(sources)))


def killed_since(pid: int, began: float, sources: Sources = KERNEL) -> bool:
    """Whether the kernel's log, where this user may read it, names a process that it has killed for memory since a time
    in seconds since 1970."""
    with suppress(OSError):
        if os.readlink(sources.proc / "self/ns/pid") != _FIRST_SPACE:
            return False  # in a container a process has another number than the kernel's log gives it
    boot = time.time() - time.clock_gettime(time.CLOCK_MONOTONIC)
    for _, microseconds, text in records(sources):
        match = KILLED.search(text)
        if match is not None and int(match[1]) == pid and boot + microseconds / 1e6 > began - 1:
            return True
    return False


def records(sources: Sources = KERNEL) -> Iterator[tuple[int, int, str]]:
    """Number, microseconds since boot, and text of each record of the kernel's log; none where it cannot be read."""
    try:
        descriptor = os.open(sources.log, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return
    try:
        while True:
            with suppress(BrokenPipeError):  # it was written over meanwhile: the next one is there
                head, _, text = os.read(descriptor, 8192).decode(errors="replace").partition(";")
                if not head:
                    return
                fields = head.split(",")
                yield int(fields[1]), int(fields[2]), text
    except (OSError, ValueError, IndexError):  # the end
        return
    finally:
        os.close(descriptor)


def limit(sources: Sources = KERNEL) -> int:
    """Bytes that all processes of this cgroup may use; of the machine, where that is less. 0: unknown."""
    sizes = [numbers(sources.proc / "meminfo").get("MemTotal", 0)]
    return min([*sizes, *(most for most, _ in _limits(sources))])


def available(sources: Sources = KERNEL) -> int:
    """Bytes that this process can still get: of the machine, and of what each cgroup around it has left. Files that the
    kernel keeps in memory count as free. 0: unknown."""
    sizes = [numbers(sources.proc / "meminfo").get("MemAvailable", 0)]
    return max(0, min([*sizes, *(most - used for most, used in _limits(sources))]))


def _limits(sources: Sources) -> Iterator[tuple[int, int]]:
    """Of each cgroup around this process that has a limit: the bytes that it may use, and those that it uses."""
    for folder in folders(sources, above=True):
        files = numbers(folder / "memory.stat")
        cached = files.get("total_inactive_file", files.get("inactive_file", 0))
        for most, now in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            if (limited := _number(folder / most)) is not None:
                yield limited, max(0, (_number(folder / now) or 0) - cached)


def _number(path: Path) -> int | None:
    """The one number of a file; None where it has none, such as "max" for no limit, or is not there."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def folders(sources: Sources, above: bool = False) -> Iterator[Path]:
    """The folders of the memory cgroups that this process is in; with `above` also those of the cgroups around them."""
    with suppress(OSError):
        for line in (sources.proc / "self/cgroup").read_text().splitlines():
            _, kinds, path = line.split(":", 2)
            if kinds and "memory" not in kinds.split(","):
                continue
            root = sources.cgroups / ("memory" if kinds else "")
            here = root / path.lstrip("/")
            if not here.is_dir():  # a container that sees its own cgroup as the root
                here = root
            yield here
            while above and here != root:
                here = here.parent
                yield here


def numbers(path: Path) -> dict[str, int]:
    """The numbers of a file with a name and a number in each line, in bytes where the file counts in kB."""
    by_name = {}
    with suppress(OSError):
        for line in path.read_text(errors="replace").splitlines():
            words = line.replace(":", " ").split()
            if len(words) > 1 and words[1].isdigit():
                by_name[words[0]] = int(words[1]) * (1024 if words[2:] == ["kB"] else 1)
    return by_name
