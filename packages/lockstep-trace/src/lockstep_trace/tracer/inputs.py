"""What an outermost module is called with, as one hash an example. Padding does not count.

In: positional and named inputs. Out: int64 hashes [B] on the inputs' device, and the number of targets where labels are
among them. The hash of an example does not depend on its batch: neither on the order of inputs nor on padding that an
attention mask, zeros at the end or -100 mark.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .fingerprint import GOLDEN, M1, mixed, plain, shifted, signed
from .placement import is_plain_tensor

MASK = "attention_mask"
IGNORED = (MASK, "position_ids", "cache_position", "num_items_in_batch", "past_key_values")
HASHED = 1 << 20  # elements of a tensor that `hash_of` looks at
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
LABELS = ("labels", "label", "label_ids", "start_positions")


class CallInputs(NamedTuple):
    """What one call was given: hashes [B] of all inputs and of those that are no labels, and the number of targets
    (None: no labels among the inputs). `restarts`: rows in which position_ids begin anew, with no mask beside them."""

    hashes: Tensor
    unlabelled: Tensor | None
    targets: Tensor | None
    restarts: Tensor | None = None


@functools.lru_cache(maxsize=64)
def _odd(count: int, device: torch.device) -> Tensor:
    return (mixed(count, first=1 << 45) | 1).to(device)


def _tensors(value: Any, name: str = "", depth: int = 0) -> Iterator[tuple[str, Tensor]]:
    if is_plain_tensor(value):
        yield name, value
    elif depth < 3 and isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _tensors(inner, str(key), depth + 1)
    elif depth < 3 and isinstance(value, list | tuple):
        for inner in value:
            yield from _tensors(inner, name, depth + 1)


def call_inputs(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> CallInputs | None:
    """None where no input has a batch."""
    tensors = [(n, t) for n, t in [*_tensors(args), *_tensors(kwargs)] if t.dim() and t.numel()]
    if not tensors:
        return None
    first = next((t for n, t in tensors if n == "input_ids"), tensors[0][1])
    size, device = first.shape[0], first.device
    mask = next((t for n, t in tensors if n == MASK and t.dim() == 2), None)
    total = torch.zeros(size, dtype=torch.int64, device=device)
    labels, targets = None, None
    for name, tensor in tensors:
        if name in LABELS and targets is None and not tensor.is_floating_point():
            targets = (tensor != -100).sum()
        if name in IGNORED or tensor.shape[0] != size or tensor.device != device or tensor.requires_grad:
            continue
        part = _scrambled(_rows(tensor, mask))
        total += part
        if name in LABELS:
            labels = part if labels is None else labels + part
    return CallInputs(total, None if labels is None else total - labels, targets, _restarts(tensors, mask))


def _restarts(tensors: list[tuple[str, Tensor]], mask: Tensor | None) -> Tensor | None:
    """The number of rows whose positions begin anew behind a run of more than two, as those of packed rows do. With a
    mask the restart may be that of padding."""
    positions = next((t for n, t in tensors if n == "position_ids" and t.dim() == 2), None)
    if positions is None or mask is not None or positions.shape[1] < 4:
        return None
    anew = (positions[:, 3:] == 0) & (positions[:, 2:-1] >= 2)
    return anew.any(1).sum()


def hash_of(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Hashes of all elements of a tensor, in their order and in any."""
    flat = plain(tensor.detach()).reshape(1, -1)[:, :HASHED]
    bits = flat.view(INTEGERS[flat.element_size()]).long() if flat.is_floating_point() else flat.long()
    return (bits * _odd(bits.shape[1], bits.device)).sum(), _scrambled(bits).sum()


def _rows(tensor: Tensor, mask: Tensor | None) -> Tensor:
    """Of each row a number that is linear in its elements' bits, [B]."""
    tensor = plain(tensor.detach())
    rows = tensor.reshape(tensor.shape[0], -1)
    if rows.is_floating_point():
        bits = rows.view(INTEGERS[rows.element_size()]).long()
        return (bits * _odd(rows.shape[1], rows.device)).sum(1)
    values = rows.long()
    values = values.masked_fill(values == -100, 0)
    if mask is not None and rows.shape == mask.shape:
        keep = mask.bool()
        at = (keep.long().cumsum(1) - 1).clamp_(min=0)
        return (values * _odd(rows.shape[1], rows.device)[at] * keep).sum(1)
    return (values * _odd(rows.shape[1], rows.device)).sum(1)


def _scrambled(numbers: Tensor) -> Tensor:
    """So that inputs can be added up without cancelling each other."""
    z = (numbers ^ shifted(numbers, 29)) * signed(GOLDEN)
    z = (z ^ shifted(z, 32)) * signed(M1)
    return z ^ shifted(z, 31)
