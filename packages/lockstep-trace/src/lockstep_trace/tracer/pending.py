"""Asynchronous copy of a step's numbers from a device to the host: one copy for all.

In: int64 tensors by name, on any device. Out: the same on the CPU, at the next step. Measuring a step never waits for
the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


class Pending:
    """A pending copy of the numbers of `record`. `on_device`: whether a copy is in progress."""

    def __init__(self, record: dict[str, Any], since: Any, numbers: Mapping[str, Sequence[Tensor]]) -> None:
        self.record, self.since, self.numbers = record, since, numbers
        away = [v.reshape(-1) for each in numbers.values() for v in each if v.device.type != "cpu"]
        self.on_device = bool(away)
        self._wait: Callable[[], None] | None = None
        self._parts: list[Tensor] = []
        if away:
            joined = torch.cat([v.to(away[0].device) for v in away])
            host, self._wait = transfer(joined)
            self._parts = list(host.split([v.numel() for v in away]))

    def host(self) -> dict[str, list[Tensor]]:
        """Return all numbers on the CPU, waiting for the copy, which began one step earlier."""
        if self._wait is not None:
            self._wait()
        parts = iter(self._parts)
        return {
            name: [v if v.device.type == "cpu" else next(parts).view(v.shape) for v in each]
            for name, each in self.numbers.items()
        }


def transfer(joined: Tensor) -> tuple[Tensor, Callable[[], None]]:
    """Copy a device tensor to the CPU; return it with a function that waits for the copy. Called once per step."""
    if joined.device.type != "cuda":
        return joined.cpu(), lambda: None
    host = torch.empty(joined.shape, dtype=joined.dtype, pin_memory=True)
    host.copy_(joined, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return host, event.synchronize


def bits_of(number: Tensor) -> Tensor:
    """Return a scalar as float64 bits, int64 [1], on its device."""
    number = number.detach()
    return (number.real if number.is_complex() else number).double().reshape(1).view(torch.int64)


def number_of(bits: Tensor) -> float:
    """Return the number of CPU bits from `bits_of`."""
    return float(bits.view(torch.float64))
