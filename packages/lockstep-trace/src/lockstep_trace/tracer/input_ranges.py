"""Measures mean, deviation, minimum and maximum of the inputs of the first training calls and evaluations, hashes the
generator's state, and records the input shapes of recurrent layers and attention whose first dimension is time.

In: inputs of a call. Out: float64 [4] on their device; a hash; [class, first dimension, second one].
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .inputs import tensors_of, wrapped
from .placement import is_plain_tensor

TRAINED, EVALUATED = 8, 4  # calls: first ones of training, and of each evaluation
WIDE = 32  # minimum count of numbers per example
RECURRENT = (nn.RNN, nn.LSTM, nn.GRU, nn.MultiheadAttention)
SEQUENCE_LOOKS = 64  # first calls


def ranges(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return the four numbers of the first input that has several examples of many floating-point numbers, or None."""
    for _, tensor in [*tensors_of(args), *tensors_of(kwargs)]:
        if not tensor.is_floating_point() or tensor.dim() < 2 or wrapped(tensor) or tensor.requires_grad:
            continue
        if tensor.layout == torch.strided and tensor.numel() >= WIDE * len(tensor) > WIDE:
            values = tensor.detach().float()
            deviation, mean = torch.std_mean(values)
            return torch.stack([mean, deviation, *values.aminmax()]).double()
    return None


def random_state() -> list[int]:
    """Return a hash of the state of torch's generator; nothing inside of vmap or grad of torch.func, which hide it."""
    try:
        return [zlib.crc32(torch.get_rng_state().numpy().tobytes())]
    except RuntimeError:
        return []


def sequence_shape(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any] | None:
    """Return [class, first dimension, second one] of a module's input; None if the first dimension is the batch."""
    value: Any = args[0] if args else kwargs.get("input", kwargs.get("query"))
    if module.batch_first or not is_plain_tensor(value) or value.dim() != 3:
        return None
    return [type(module).__name__, value.shape[0], value.shape[1]]
