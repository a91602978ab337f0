"""System metrics of each rank: processor, memory, GPU; and the measured memory of tensors.

In: log points of all ranks; the live tensors. Out: the numbers of all ranks, one step later: each rank reads its own in
some microseconds, and they travel during the next step, so no rank waits; tensor bytes between steps and at the update.
"""

from __future__ import annotations

import ctypes
import gc
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lockstep.distributed import hardware
from lockstep.distributed.torch_internals import is_dtensor, values_of
from lockstep.distributed.world import World

LET_GO_S = 0.05  # seconds for a gloo thread, which needs the GIL to free the last bucket that it sent


def tensor_bytes() -> int:
    """Return the bytes of all storages that tensors of this process refer to, each storage once."""
    gc.collect()
    storages: dict[int, int] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some libraries warn on access to their objects
        for thing in gc.get_objects():
            if issubclass(type(thing), Tensor):
                for tensor in (thing, thing.grad if thing.is_leaf else None):
                    _count(tensor, storages)
    return sum(storages.values())


def _count(tensor: Tensor | None, storages: dict[int, int]) -> None:
    if is_dtensor(tensor):
        with torch.no_grad():
            tensor = tensor.to_local()
    if tensor is None or tensor.device.type == "meta":
        return
    if tensor.is_sparse:
        _count(values_of(tensor), storages)
        return
    storage = tensor.untyped_storage()
    if storage.nbytes():
        with suppress(RuntimeError):  # a storage without memory, such as torch.compile keeps
            storages[storage.data_ptr()] = storage.nbytes()


@dataclass
class HeldMemory:
    """Bytes of tensors on this rank."""

    at_rest: int = 0  # between steps: weights, buffers and optimizer state
    at_update: int = 0  # when the optimizer steps: also the gradients


@contextmanager
def measured(before: int) -> Iterator[HeldMemory]:
    """Measure one step that runs inside; `before`: `tensor_bytes()` before the strategy was built."""
    memory = HeldMemory()

    def at_update(*_: Any) -> None:
        memory.at_update = max(memory.at_update, tensor_bytes() - before)

    hook = register_optimizer_step_pre_hook(at_update)
    try:
        yield memory
    finally:
        hook.remove()
    time.sleep(LET_GO_S)
    memory.at_rest = tensor_bytes() - before


def resident() -> int:
    """Return this process's resident memory in bytes; its peak if the operating system does not report it."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return peak_resident()


def peak_resident() -> int:
    """Return this process's peak resident memory in bytes, from the operating system; 0 if unknown."""
    with suppress(OSError, StopIteration, ValueError):  # Linux: getrusage would include the parent's peak
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line.split()[1] for line in lines if line.startswith("VmHWM:"))) * 1024
    try:
        import resource
    except ImportError:  # Windows
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def capacity(device: torch.device, sharing: int) -> int:
    """Return the bytes of a device for one process, within a container's limit. `sharing`: processes of this machine,
    which share host memory, and GPUs if those are fewer."""
    if device.type == "cuda":
        each = -(-sharing // torch.cuda.device_count())
        return torch.cuda.get_device_properties(device).total_memory // each
    return (hardware.memory_limit() or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")) // sharing


def restart_peak() -> int | None:
    """Return free memory to the kernel, and restart the measurement of `peak_resident`. Returns `resident()`; None if
    the kernel or allocator does not support it. Linux and glibc only."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is None:
        return None
    trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return None
    return resident()


def free_memory(sharing: int) -> int:
    """Return the free bytes of host memory for one of `sharing` processes of this machine. 0: unknown, or this process
    has its own limit."""
    try:
        import resource
    except ImportError:  # Windows
        return 0
    kinds = (resource.RLIMIT_AS, resource.RLIMIT_DATA)
    limited = any(resource.getrlimit(kind)[0] != resource.RLIM_INFINITY for kind in kinds)
    return 0 if limited else hardware.available_memory() // sharing


def keep_freed_memory() -> None:
    """Make the allocator keep freed memory for reuse. Each step allocates the same gradients, buckets and activations
    again; memory returned to the kernel would come back zeroed and page by page. glibc only."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD: allocate up to a GiB from the heap, not by mmap
        mallopt(-1, (1 << 31) - 1)  # M_TRIM_THRESHOLD: keep at most 2 GiB free


# The order in messages; NaN if a rank has none.
NAMES = ("cpu_percent", "memory_gb", "gpu_percent", "gpu_memory_gb")


class SystemMetrics:
    """Gathers metrics at log points and returns them a step later. Both calls are collective."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._then = time.perf_counter(), time.process_time()
        self._pending: tuple[int, Callable[[], list[list[float]]]] | None = None

    def ask(self, step: int) -> None:
        """Start to gather the ranks' metrics since the last call. Collective."""
        self._pending = step, self.world.all_gather_numbers(self._mine())

    def take(self) -> tuple[int, dict[str, float]] | None:
        """Return the metrics gathered last, if any: their step, and `memory_gb/rank0` and so on. Collective."""
        if self._pending is None:
            return None
        (step, answer), self._pending = self._pending, None
        ranks = answer()
        return step, {
            f"{name}/rank{rank}": numbers[i]
            for i, name in enumerate(NAMES)
            for rank, numbers in enumerate(ranks)
            if not math.isnan(numbers[i])
        }

    def _mine(self) -> list[float]:
        """Return this rank's metrics. `cpu_percent`: 100 is one core; `memory_gb`: resident now; `gpu_percent`: of the
        device, over all its users; `gpu_memory_gb`: peak of this rank's tensors."""
        now = time.perf_counter(), time.process_time()
        wall, busy = now[0] - self._then[0], now[1] - self._then[1]
        self._then = now
        numbers = [100 * busy / max(wall, 1e-9), resident() / 1e9]
        device = self.world.device
        if device.type != "cuda":
            return [*numbers, math.nan, math.nan]
        return [*numbers, busy_gpu(device), torch.cuda.max_memory_allocated(device) / 1e9]


def busy_gpu(device: torch.device) -> float:
    """Return the percentage of about the last second in which the device was busy; NaN without the package
    nvidia-ml-py."""
    try:
        return float(torch.cuda.utilization(device))
    except (ImportError, RuntimeError, AttributeError):  # no package, or not supported by the driver
        return math.nan
