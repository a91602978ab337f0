"""Which part of the data a rank works on.

In: a process group. Out: a rank's place among those that work on different examples, and their sum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class DataParallel:
    """Which part of the data this rank works on. Ranks with the same `rank` work on the same examples together (the
    stages of a pipeline, the parts of a tensor)."""

    rank: int
    size: int
    sum: Callable[[Tensor], Tensor]  # over the ranks that work on different examples, in place; collective


def summing(group: dist.ProcessGroup) -> Any:
    """A sum over the ranks of a group, in place."""

    def add(tensor: Tensor) -> Tensor:
        dist.all_reduce(tensor, group=group)
        return tensor

    return add
