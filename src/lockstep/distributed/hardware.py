"""The GPUs, processor, cores and memory of this machine that a run may use. Does not import torch at the top.

In: the section `launch` of a run; files of the kernel. Out: how many GPUs it may use and whether its processes share
them; the processor's model, which exact results depend on, and the cores that this process may use; bytes of memory
within its cgroups, and processes killed for lack of it (Linux only; unknown elsewhere).
"""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lockstep.config.processor import VARIABLES as PORTABLE
from lockstep.config.sections import LaunchSection

INSTRUCTIONS = "the processor's instruction set"  # a fact, as ranks and checkpoints name it
# Variables by which torch and its libraries choose other instructions, or a lower precision, for the same computation.
# Not those of numpy and its OpenBLAS: numpy computes no weight.
ARITHMETIC = (
    *(name for name in PORTABLE if not name.startswith(("OPENBLAS_", "NPY_"))),
    "MKL_ENABLE_INSTRUCTIONS",
    "DNNL_MAX_CPU_ISA",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "DNNL_DEFAULT_FPMATH_MODE",
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)


def gpus_of(launch: LaunchSection) -> int:
    """Return the number of CUDA devices of this machine that the run may use; 0 without torch."""
    if launch.device == "cpu":
        return 0
    try:
        import torch
    except ImportError:  # a machine that only submits jobs
        return 0
    return torch.cuda.device_count()


def share_gpus(launch: LaunchSection) -> bool:
    """Whether several processes of the run share a GPU; `launch.processes_per_gpu` has no effect on a CPU."""
    several = launch.processes_per_gpu > 1 and launch.processes != 1
    return several and (launch.device == "cuda" or gpus_of(launch) > 0)


def available_cores() -> int:
    """Return the number of cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor() -> str:
    """Return the model name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = (line for line in lines if line.startswith(("model name", "Hardware", "cpu model")))
    return next(named, "").partition(":")[2].strip() or platform.processor() or platform.machine()


# -- memory ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sources:
    """Paths of the kernel's memory information."""

    proc: Path = Path("/proc")
    cgroups: Path = Path("/sys/fs/cgroup")
    log: Path = Path("/dev/kmsg")


KERNEL = Sources()
_FIRST_SPACE = "pid:[4026531836]"  # the machine's root pid namespace
KILLED = re.compile(r"[Kk]illed process (\d+) .*?anon-rss:(\d+)kB, file-rss:(\d+)kB(?:, shmem-rss:(\d+)kB)?")


def kills(sources: Sources = KERNEL) -> tuple[int, int]:
    """Return how many processes the kernel killed for lack of memory: in this cgroup, and on this machine."""
    inside = 0
    for folder in folders(sources):
        for name in ("memory.events", "memory.oom_control"):
            inside += numbers(folder / name).get("oom_kill", 0)
    return inside, numbers(sources.proc / "vmstat").get("oom_kill", 0)


def cgroup(sources: Sources = KERNEL) -> str:
    """Return the memory cgroups of this process, joined as one text; "" if there are none."""
    return ":".join(map(str, folders(sources)))


def killed_since(pid: int, began: float, sources: Sources = KERNEL) -> bool:
    """Whether the kernel's log, if readable, reports that it killed a process for lack of memory after `began` (seconds
    since 1970)."""
    with suppress(OSError):
        if os.readlink(sources.proc / "self/ns/pid") != _FIRST_SPACE:
            return False  # in a container, pids differ from those in the kernel's log
    boot = time.time() - time.clock_gettime(time.CLOCK_MONOTONIC)
    for _, microseconds, text in records(sources):
        match = KILLED.search(text)
        if match is not None and int(match[1]) == pid and boot + microseconds / 1e6 > began - 1:
            return True
    return False


def records(sources: Sources = KERNEL) -> Iterator[tuple[int, int, str]]:
    """Yield sequence number, microseconds since boot, and text of each record of the kernel's log; nothing if it cannot
    be read."""
    try:
        descriptor = os.open(sources.log, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return
    try:
        while True:
            with suppress(BrokenPipeError):  # the record was overwritten: continue with the next
                head, _, text = os.read(descriptor, 8192).decode(errors="replace").partition(";")
                if not head:
                    return
                fields = head.split(",")
                yield int(fields[1]), int(fields[2]), text
    except (OSError, ValueError, IndexError):  # no more records
        return
    finally:
        os.close(descriptor)


def memory_limit(sources: Sources = KERNEL) -> int:
    """Return the bytes that all processes of this cgroup may use, or the machine's memory if less. 0: unknown."""
    sizes = [numbers(sources.proc / "meminfo").get("MemTotal", 0)]
    return min([*sizes, *(most for most, _ in _limits(sources))])


def available_memory(sources: Sources = KERNEL) -> int:
    """Return the bytes that this process can still allocate, limited by the machine and by each enclosing cgroup.
    Cached files count as free. 0: unknown."""
    sizes = [numbers(sources.proc / "meminfo").get("MemAvailable", 0)]
    return max(0, min([*sizes, *(most - used for most, used in _limits(sources))]))


def _limits(sources: Sources) -> Iterator[tuple[int, int]]:
    """Yield (limit, usage) in bytes of each enclosing cgroup that has a limit."""
    for folder in folders(sources, above=True):
        files = numbers(folder / "memory.stat")
        cached = files.get("total_inactive_file", files.get("inactive_file", 0))
        for most, now in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            if (limited := _number(folder / most)) is not None:
                yield limited, max(0, (_number(folder / now) or 0) - cached)


def _number(path: Path) -> int | None:
    """Return the number in a file; None if it has none (such as "max" for no limit) or does not exist."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def folders(sources: Sources, above: bool = False) -> Iterator[Path]:
    """Yield the folders of this process's memory cgroups; with `above`, also those of their ancestors."""
    with suppress(OSError):
        for line in (sources.proc / "self/cgroup").read_text().splitlines():
            _, kinds, path = line.split(":", 2)
            if kinds and "memory" not in kinds.split(","):
                continue
            root = sources.cgroups / ("memory" if kinds else "")
            here = root / path.lstrip("/")
            if not here.is_dir():  # a container whose cgroup appears as the root
                here = root
            yield here
            while above and here != root:
                here = here.parent
                yield here


def numbers(path: Path) -> dict[str, int]:
    """Parse a file with a name and a number per line; kB become bytes."""
    by_name = {}
    with suppress(OSError):
        for line in path.read_text(errors="replace").splitlines():
            words = line.replace(":", " ").split()
            if len(words) > 1 and words[1].isdigit():
                by_name[words[0]] = int(words[1]) * (1024 if words[2:] == ["kB"] else 1)
    return by_name


def instructions() -> str:
    """Return the instruction set that torch's kernels use on this processor; with another one bits differ."""
    import torch

    return str(torch.backends.cpu.get_cpu_capability())


def set_by_user(portable: bool) -> list[str]:
    """Return the variables of `ARITHMETIC` in this process's environment, as `NAME=value`, but for those of a portable
    run. With them the same run may have other bits."""
    pinned = PORTABLE if portable else {}
    values = {name: os.environ[name] for name in ARITHMETIC if os.environ.get(name)}
    return [f"{name}={value}" for name, value in values.items() if pinned.get(name) != value]
