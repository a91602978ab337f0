"""Pad the head's matrix product for vocabulary sizes that are slow on GPUs, such as GPT-2's 50,257.

In: a model with a linear head. Out: the same model; on CUDA, for 16-bit products, the weight is padded with zero rows
and their logits are cut off. Tensor cores read 16 bytes at once, so rows of logits, and of their gradient, that are not
a multiple of 16 bytes use slower kernels of older GPUs. The function and all shapes outside the product (weights,
logits, checkpoints, exports) are unchanged.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad
from torch.overrides import has_torch_function

from lockstep.distributed.torch_internals import is_dtensor

ALIGNED, MULTIPLE = 8, 64  # 16-bit elements: sizes that are fast already, and the multiple to pad others to
HALVES = (torch.bfloat16, torch.float16)


def install(model: Any) -> None:
    """Pad the product of a model's head. Does nothing if the head is not a plain linear layer, or has its own
    `forward`."""
    head = model.get_output_embeddings()
    if type(head) is nn.Linear and "forward" not in vars(head) and head.out_features % ALIGNED:
        head.forward = MethodType(_forward, head)  # type: ignore[method-assign]


def missing_rows(rows: int, dtype: torch.dtype, device: torch.device) -> int:
    """Number of zero rows to add to a weight of `rows` rows for this dtype and device."""
    if device.type != "cuda" or dtype not in HALVES or rows % ALIGNED == 0:
        return 0
    return -rows % MULTIPLE


def product(states: Tensor, weight: Tensor, bias: Tensor | None, missing: int) -> Tensor:
    """Return the `linear` of states [..., H] and weight [V, H], computed with `missing` zero rows added: [..., V]."""
    padded = pad(weight, (0, 0, 0, missing))
    return linear(states, padded, None if bias is None else pad(bias, (0, missing)))[..., : len(weight)]


def _forward(head: nn.Linear, input: Tensor) -> Tensor:
    weight: Tensor = head.weight
    bias: Tensor | None = head.bias
    kind = input.device.type
    autocast = torch.is_autocast_enabled(kind)
    dtype = torch.get_autocast_dtype(kind) if autocast else input.dtype
    plain = has_torch_function((input,)) or is_dtensor(weight) or is_dtensor(input)
    missing = 0 if plain else missing_rows(len(weight), dtype, input.device)
    if not missing:
        return linear(input, weight, bias)
    if autocast:  # cast the weight before padding copies it
        weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
    return product(input, weight, bias, missing)
