"""Hashes of tensors, of their blocks, and of several tensors, from the fingerprints of `lockstep_trace`.

In: tensors on any device, whole or blocks. Out: numbers of 64 bits that add up over blocks, and hexadecimal digits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lockstep_trace.tracer.fingerprint import Block, hexed, measure, whole


def hash_sum(part: Tensor, shape: Sequence[int] | None = None, offset: Sequence[int] | None = None) -> Tensor:
    """Return the hash of a tensor, or of a block at `offset` of a tensor of this `shape`: int64 scalar, on its device.
    Those of all blocks add up, modulo 2^64, to that of the tensor. Dtype and shape are not hashed: see `combined`."""
    size = tuple(part.shape)
    block = whole(part) if shape is None else Block(tuple(shape), tuple(offset or (0,) * len(size)), size)
    return measure([part.detach()], [block], sketch=False)[0][0]


def combined(tensors: Iterable[tuple[str, torch.dtype | str, Sequence[int], int]]) -> str:
    """Return one hash of several tensors, 16 hexadecimal digits. `tensors`: (name, dtype, shape, hash) of each."""
    digest = hashlib.blake2b(digest_size=8)
    for name, dtype, shape, number in tensors:
        digest.update(f"{name} {str(dtype).removeprefix('torch.')} {tuple(shape)} {hexed(number)}\n".encode())
    return digest.hexdigest()


def measure_all(tensors: Sequence[Tensor]) -> list[tuple[int, float]]:
    """Return hash and sum of squares of each tensor. Synchronizes with the device."""
    dense = [t.detach().to_dense() if t.layout != torch.strided else t.detach() for t in tensors]
    vectors = measure(dense, [whole(tensor) for tensor in dense], sketch=False)
    if len({vector.device for vector in vectors}) == 1:
        vectors = list(torch.stack(vectors).cpu().unbind(0))  # one transfer
    return [(int(vector[0]), float(vector[1:].cpu().view(torch.float64))) for vector in vectors]


def hash_text(*tensors: Tensor) -> str:
    """Return one hash of tensors with their dtypes and shapes. Synchronizes with the device."""
    rows = zip(tensors, measure_all(tensors), strict=True)
    return combined(("", tensor.dtype, tensor.shape, number) for tensor, (number, _) in rows)
