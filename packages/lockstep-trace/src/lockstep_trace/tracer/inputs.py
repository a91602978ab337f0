"""Hashes the inputs of an outermost module, one hash per example, without padding, and measures them.

In: positional and named inputs. Out: int64 hashes [B] on the inputs' device, and the number of targets if there are
labels; of first calls also mean, deviation, minimum and maximum (float64 [4] on their device), a hash of the
generator's state, and the input shapes of recurrent layers and attention whose first dimension is time. An example's
hash is independent of its batch: of the order of inputs, and of padding marked by an attention mask, trailing zeros or
-100.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .fingerprint import GOLDEN, INTEGERS, M1, mixed, plain, shifted, signed
from .placement import is_plain_tensor

MASK = "attention_mask"
IGNORED = (MASK, "position_ids", "cache_position", "num_items_in_batch", "past_key_values")
HASHED = 1 << 20  # max. elements of a tensor that `hash_of` reads
OF_LABELS, OF_ENDS = ("labels", "first", "equal", "next"), ("ends", "unlearned", "learned")
TOKENS = ("hash", "count", *OF_LABELS, "holes", "kept", *OF_ENDS, "padded")  # of `_tokens`
LABELS = ("labels", "label", "label_ids", "start_positions")


class CallInputs(NamedTuple):
    """Inputs of one call: hashes [B] of all inputs and of those without labels, and the number of targets (None without
    labels). `restarts`: number of rows without padding in which position_ids restart. `tokens`: int64, the counts that
    `TOKENS` names, of an input of token ids; None if not examined."""

    hashes: Tensor
    unlabelled: Tensor | None
    targets: Tensor | None
    restarts: Tensor | None = None
    tokens: Tensor | None = None


@functools.lru_cache(maxsize=64)
def _odd(count: int, device: torch.device) -> Tensor:
    return (mixed(count, first=1 << 45) | 1).to(device)


def tensors_of(value: Any, name: str = "", depth: int = 0) -> Iterator[tuple[str, Tensor]]:
    if is_plain_tensor(value):
        yield name, value
    elif depth < 3 and isinstance(value, Mapping):
        for key, inner in value.items():
            yield from tensors_of(inner, str(key), depth + 1)
    elif depth < 3 and isinstance(value, list | tuple):
        for inner in value:
            yield from tensors_of(inner, name, depth + 1)


def call_inputs(args: tuple[Any, ...], kwargs: Mapping[str, Any], tokens: bool = False) -> CallInputs | None:
    """Hash the inputs of a call; None if no input has a batch dimension. `tokens`: also count token ids."""
    tensors = [(n, t) for n, t in [*tensors_of(args), *tensors_of(kwargs)] if t.dim() and t.numel()]
    if not tensors or any(wrapped(t) for _, t in tensors):
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
    unlabelled = None if labels is None else total - labels
    return CallInputs(total, unlabelled, targets, _restarts(tensors, mask), _tokens(tensors, mask) if tokens else None)


def wrapped(tensor: Tensor) -> bool:
    """Return whether a tensor is a wrapper of torch.func (inside vmap or grad), which has no values."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def _restarts(tensors: list[tuple[str, Tensor]], mask: Tensor | None) -> Tensor | None:
    positions = next((t for n, t in tensors if n == "position_ids" and t.dim() == 2), None)
    if positions is None or positions.shape[1] < 4:
        return None
    anew = ((positions[:, 3:] == 0) & (positions[:, 2:-1] >= 2)).any(1)
    if mask is not None:
        if mask.device != positions.device or len(mask) not in (1, len(anew)):
            return None
        anew = anew & (mask == 1).all(1)
    return anew.sum()


def _tokens(tensors: list[tuple[str, Tensor]], mask: Tensor | None) -> Tensor | None:
    """Return counts of the token ids [B, T] of a call, or None if it has none.

    Of the ids: an order-dependent hash and their number. Of labels [B, T]: the number not ignored, and of these, the
    numbers that are first in a row, equal the token at their position, and equal the next one. Of a mask [B, T]: zeros
    between the ones of a row, and ones at padding (runs, at the ends of rows, of a value that occurs nowhere else in
    the row). Of labels and mask: `_ends`, and labels that equal the token at masked positions after masked ones."""
    named = dict(tensors)
    integers = [t for n, t in tensors if t.dim() == 2 and t.dtype in (torch.int32, torch.int64) and n not in IGNORED]
    ids = named.get("input_ids", integers[0] if integers else None)
    if ids is None or ids.dim() != 2 or ids.shape[1] < 2 or ids.is_floating_point() or ids.numel() > HASHED:
        return None
    zero = torch.zeros((), dtype=torch.int64, device=ids.device)
    numbers = [hash_of(ids)[0], zero + ids.numel()] + [zero] * (len(TOKENS) - 2)
    labels = named.get("labels")
    if labels is not None and labels.shape == ids.shape and not labels.is_floating_point():
        valid = labels != -100
        equal, following = valid & (labels == ids), valid[:, :-1] & (labels[:, :-1] == ids[:, 1:])
        numbers[2:6] = [valid.sum(), valid[:, 0].sum(), equal.sum(), following.sum()]
    if mask is not None and mask.shape == ids.shape:
        keep = mask.bool()
        before, after = keep.long().cumsum(1) > 0, keep.flip(1).long().cumsum(1).flip(1) > 0
        last = ids[:, -1:]
        run = trailing(ids == last)
        padding = run & ((ids == last) == run).all(1, keepdim=True) & (run.sum(1, keepdim=True) > 1)
        numbers[6:8] = [(~keep & before & after).sum(), (keep & padding).sum()]
        if labels is not None and labels.shape == ids.shape and not labels.is_floating_point():
            numbers[8:11] = _ends(ids, labels, keep)
            inside = ~keep[:, 1:] & ~keep[:, :-1]  # the first padded position may end a text
            numbers[11] = (inside & (labels == ids)[:, 1:] & (labels != -100)[:, 1:]).sum()
    return torch.stack([n.reshape(()) for n in numbers])


def _ends(ids: Tensor, labels: Tensor, keep: Tensor) -> list[Tensor]:
    least, most = (ids.masked_fill(keep, fill).reshape(-1) for fill in (1 << 30, -1))
    value = most.max()
    last = (keep * torch.arange(1, ids.shape[1] + 1, device=ids.device)).max(1, keepdim=True).values - 1
    at, before = last.clamp(min=0), (last - 1).clamp(min=0)
    ends = (least.min() == value) & (ids.gather(1, at) == value) & (last > 0)
    unlearned = ends & (labels.gather(1, at) == -100) & (labels.gather(1, before) == ids.gather(1, before))
    return [ends.sum(), unlearned.sum(), (labels == value).sum()]


def trailing(same: Tensor) -> Tensor:
    """Return the run of True at the end of each row, bool [B, T]."""
    return same.flip(1).long().cumprod(1).flip(1).bool()


def token_numbers(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the token ids [B, T] of a call, preferring an input named `input_ids`."""
    rows = [
        (n, t) for n, t in [*tensors_of(args), *tensors_of(kwargs)] if n not in (*IGNORED, *LABELS) and t.dim() == 2
    ]
    rows = [(n, t) for n, t in rows if t.dtype in (torch.int32, torch.int64) and t.shape[1] > 1 and not wrapped(t)]
    return [t.detach() for n, t in sorted(rows, key=lambda row: row[0] != "input_ids")]


def hash_of(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return two hashes of a tensor: one that depends on the order of elements, and one that does not."""
    flat = plain(tensor.detach()).reshape(1, -1)[:, :HASHED]
    bits = flat.view(INTEGERS[flat.element_size()]).long() if flat.is_floating_point() else flat.long()
    return (bits * _odd(bits.shape[1], bits.device)).sum(), _scrambled(bits).sum()


def hash_of_each(numbers: Tensor) -> Tensor:
    """Return a hash of 31 bits of each of some integers."""
    return _scrambled(numbers.detach().long() + 1) & 0x7FFFFFFF


def _rows(tensor: Tensor, mask: Tensor | None) -> Tensor:
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
    z = (numbers ^ shifted(numbers, 29)) * signed(GOLDEN)
    z = (z ^ shifted(z, 32)) * signed(M1)
    return z ^ shifted(z, 31)


def hashes_of_inputs(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return a hash of each input of a call with a row for each example, int64 [inputs]; 0 if its rows are equal, or
    are numbers in ascending or descending order. Of a process that has others."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return []
    tensors = [t.detach() for n, t in [*tensors_of(args), *tensors_of(kwargs)] if n not in IGNORED]
    tensors = [t for t in tensors if t.layout == torch.strided and not t.is_complex() and not wrapped(t)]
    tensors = [t for t in tensors if t.dim() and t.numel() > 3]
    if len(tensors) < 2 or len({(len(t), t.device) for t in tensors}) > 1:
        return []
    return [torch.stack([hash_of(t)[0] * _irregular(t) for t in tensors])]


def _irregular(tensor: Tensor) -> Tensor:
    differ = (tensor != tensor[:1]).any()
    if tensor.numel() > len(tensor):
        return differ
    one, other = tensor.flatten()[:-1], tensor.flatten()[1:]
    return differ & (one > other).any() & (one < other).any()


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
