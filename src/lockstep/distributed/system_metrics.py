"""System metrics of each rank: processor, memory, GPU.

In: log points, which all ranks come to. Out: the numbers of all ranks, one step later, so that nobody waits for them:
each rank reads its own in some microseconds, and they travel beside the next step's work.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch

from lockstep.distributed.memory import resident
from lockstep.distributed.world import World

# In this order over the wire; NaN where a rank has none.
NAMES = ("cpu_percent", "memory_gb", "gpu_percent", "gpu_memory_gb")


class SystemMetrics:
    """Asks at log points, answers a step later. Both are collective."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._then = time.perf_counter(), time.process_time()
        self._asked: tuple[int, Callable[[], list[list[float]]]] | None = None

    def ask(self, step: int) -> None:
        """Begin to gather what ranks took since this was last called. Collective."""
        self._asked = step, self.world.all_gather_numbers(self._mine())

    def take(self) -> tuple[int, dict[str, float]] | None:
        """The metrics that were asked for last, if any: the step then, and `memory_gb/rank0` and so on. Collective."""
        if self._asked is None:
            return None
        (step, answer), self._asked = self._asked, None
        ranks = answer()
        return step, {
            f"{name}/rank{rank}": numbers[i]
            for i, name in enumerate(NAMES)
            for rank, numbers in enumerate(ranks)
            if not math.isnan(numbers[i])
        }

    def _mine(self) -> list[float]:
        """`cpu_percent`: 100 is one core; `memory_gb`: held now; `gpu_percent`: of the device, by all that use it;
        `gpu_memory_gb`: the most that this rank's tensors ever took of it."""
        now = time.perf_counter(), time.process_time()
        wall, busy = now[0] - self._then[0], now[1] - self._then[1]
        self._then = now
        numbers = [100 * busy / max(wall, 1e-9), resident() / 1e9]
        device = self.world.device
        if device.type != "cuda":
            return [*numbers, math.nan, math.nan]
        return [*numbers, busy_gpu(device), torch.cuda.max_memory_allocated(device) / 1e9]


def busy_gpu(device: torch.device) -> float:
    """Percent of the last second or so in which something ran on the device; NaN without the package nvidia-ml-py."""
    try:
        return float(torch.cuda.utilization(device))
    except (ImportError, RuntimeError, AttributeError):  # no package, or a driver that does not tell
        return math.nan
