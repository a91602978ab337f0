"""A few numbers between host and device, for which the host does not wait.

In: numbers of the host, or small tensors of the device. Out: the same on the other side. `torch.tensor(..., device=)`,
`.to()` and `.item()` wait until the device has done all that it was given before; what is copied between page-locked
memory and the device need not.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on a device; the copy may still be under way."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def on_device(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Whole numbers: int64 [N]."""
    return to_device(torch.tensor(numbers, dtype=torch.int64), device)


class ToHost:
    """Small tensors on their way to the host, from where the device is now."""

    def __init__(self, *tensors: Tensor) -> None:
        cuda = any(tensor.device.type == "cuda" for tensor in tensors)
        self._found = [tensor.detach().to("cpu", non_blocking=True) for tensor in tensors]  # page-locked
        self._arrived = torch.cuda.Event() if cuda else None
        if self._arrived is not None:
            self._arrived.record()

    def wait(self) -> list[Tensor]:
        """The tensors in host memory. Waits for what the device was given before them, and for nothing that came
        later."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._found
