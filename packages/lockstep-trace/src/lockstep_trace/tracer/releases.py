"""Waits, before a process group is gone, until gloo's threads have released the tensors of the last collectives.

Such a thread takes Python's lock to release a tensor (torch 2.10 and later). A DistributedDataParallel model that is
freed after its group is destroyed joins the threads while it holds that lock: if one is late, the process hangs, traced
or not. In: the arguments of collectives, before they are called.
"""

from __future__ import annotations

import collections
import time
import weakref
from typing import Any

from torch import Tensor, nn

LAST = 64  # tensors
LIMIT_S = 1.0  # a tensor that the script has meanwhile used elsewhere is never released


class Releases:
    """The tensors of the last collectives, each with the number of its owners before the call."""

    def __init__(self) -> None:
        self.last: collections.deque[tuple[weakref.ref[Tensor], int]] = collections.deque(maxlen=LAST)

    def called(self, value: Any) -> None:
        """Note the tensors on the CPU in the arguments of a collective."""
        if type(value) in (Tensor, nn.Parameter):
            if value.device.type == "cpu":
                self.last.append((weakref.ref(value), value._use_count()))
        elif isinstance(value, list | tuple):
            for each in value[-LAST:]:
                self.called(each)

    def wait(self) -> None:
        """Return when each tensor has no more owners than before its collective, or after `LIMIT_S`."""
        until = time.monotonic() + LIMIT_S
        while self.last and time.monotonic() < until:
            ref, count = self.last[0]
            tensor: Any = ref()
            if tensor is None or tensor._use_count() <= count:
                self.last.popleft()
            else:
                time.sleep(0.001)
        self.last.clear()
