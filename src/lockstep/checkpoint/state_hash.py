"""A short hash of weights and optimizer state that does not depend on how ranks hold them.

In: this rank's part of the state, as checkpoints take it. Out: one hash for the weights and one for the optimizer, the
same on every rank, at every number of them, and under every strategy that gives the same bits.

A tensor's sum is over its elements: their bits as an integer times a number that depends on the place in the whole
tensor, modulo 2^64 (multilinear hashing: Lemire and Kaser, arXiv:1202.4961). Such sums can be added up over ranks in
any order. What is hashed at the end are names, types, shapes and sums. It finds what chance does to bits; it is no
protection against somebody who chooses them, which the SHA-256 of checkpoints and exports is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.planner import WriteItem

from lockstep.checkpoint.storage import share_out
from lockstep.distributed import splitmix
from lockstep.distributed.sharded import local
from lockstep.distributed.world import World

_ROW = 2**16  # elements that share a factor
_AT_ONCE = 2**20  # elements whose products are in memory
_IN_CACHE = 2**18  # the same on a CPU: products that stay in its cache take 0.4 of the time
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # a view of so many bytes


class StateHash:
    """Hashes of one strategy's state, again and again; who hashes what is settled once."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._items: list[WriteItem] | None = None
        self._names: list[str] = []

    def of(self, parts: Mapping[str, Tensor]) -> dict[str, str]:
        """`weights` and `optimizer`, each of 16 hexadecimal digits. The parts have the same names and shapes at every
        call. Collective; on a GPU the host waits here."""
        if self._items is None:
            self._items = share_out(parts, self._world, True)
            held = self._world.all_gather({n: (str(t.dtype), tuple(t.shape)) for n, t in parts.items()})
            self._told = {name: layout for each in held for name, layout in each.items()}
            self._names = sorted(self._told)
        places = {name: place for place, name in enumerate(self._names)}
        sums = torch.zeros(len(self._names), dtype=torch.int64, device=self._world.device)
        with torch.no_grad():
            for item in self._items:
                assert item.tensor_data is not None
                name, chunk = item.index.fqn, item.tensor_data.chunk
                part = local(parts[name]).detach()
                sums[places[name]] += summed(part, tuple(parts[name].shape), tuple(chunk.offsets))
        if self._world.size > 1:
            self._world.sum(sums)
        return self._hashed(sums.tolist())

    def _hashed(self, sums: list[int]) -> dict[str, str]:
        return hashed(self._told, dict(zip(self._names, sums, strict=True)))


def hashed(layouts: Mapping[str, tuple[str, tuple[int, ...]]], sums: Mapping[str, int]) -> dict[str, str]:
    """The hash of tensors of these types and shapes, by name, whose elements come to these sums."""
    digests = {"weights": hashlib.blake2b(digest_size=8), "optimizer": hashlib.blake2b(digest_size=8)}
    for name, value in sorted(sums.items()):
        kind = "weights" if name.startswith("model.") else "optimizer"
        digests[kind].update(f"{name} {layouts[name]} {value}\n".encode())
    return {kind: each.hexdigest() for kind, each in digests.items()}


def summed(part: Tensor, whole: tuple[int, ...] | None = None, offsets: tuple[int, ...] | None = None) -> Tensor:
    """The sum of a tensor, or of a part that begins at `offsets` of a tensor of the shape `whole`: int64 scalar, on the
    same device."""
    sizes = tuple(part.shape)
    whole, offsets = whole or sizes, offsets or (0,) * len(sizes)
    flat = part.contiguous().reshape(-1).view(_BITS[part.element_size()])
    # rows of elements that follow each other in the whole tensor, and where each begins
    inner = len(whole)
    while inner > 0 and (inner == len(whole) or sizes[inner] == whole[inner]):
        inner -= 1
    run = int(np.prod(sizes[inner:], dtype=np.int64)) if sizes else 1
    strides = [int(np.prod(whole[d + 1 :], dtype=np.int64)) for d in range(len(whole))]
    first = sum(o * s for o, s in zip(offsets, strides, strict=True))
    starts = np.zeros(1, dtype=np.int64)
    for size, stride in zip(sizes[:inner], strides[:inner], strict=True):
        starts = (starts[:, None] + np.arange(size, dtype=np.int64) * stride).reshape(-1)
    total = torch.zeros((), dtype=torch.int64, device=part.device)
    for place, start in enumerate(starts.tolist()):
        total += _of_run(flat[place * run : (place + 1) * run], first + start)
    return total


def _of_run(bits: Tensor, first: int) -> Tensor:
    """Of elements that follow each other, of which the first has this place in its tensor."""
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    within = _within(bits.device)
    head = min(-first % _ROW, len(bits))
    if head:
        inside = first % _ROW
        total += (bits[:head].long() * within[inside : inside + head]).sum() * _factors(first, 1, bits.device)[0]
    rows = (len(bits) - head) // _ROW
    each = (_IN_CACHE if bits.device.type == "cpu" else _AT_ONCE) // _ROW
    for row in range(0, rows, each):
        count = min(each, rows - row)
        begin = head + row * _ROW
        block = bits[begin : begin + count * _ROW].long().view(count, _ROW)
        total += ((block * within).sum(1) * _factors(first + begin, count, bits.device)).sum()
    if tail := len(bits) - head - rows * _ROW:
        begin = head + rows * _ROW
        total += (bits[begin:].long() * within[:tail]).sum() * _factors(first + begin, 1, bits.device)[0]
    return total


@lru_cache
def _within(device: torch.device) -> Tensor:
    """The number of each place in a row: int64 [_ROW]."""
    return torch.from_numpy(_odd(0, _ROW)).to(device)


def _factors(place: int, count: int, device: torch.device) -> Tensor:
    """Of the rows from the one that a place is in: int64 [count]."""
    return torch.from_numpy(_odd(2**40 + place // _ROW, count)).to(device)


def _odd(first: int, count: int) -> np.ndarray:
    """Odd numbers of 64 bits, one for each integer from `first` on: int64 [count]."""
    return (splitmix.sequence(first + 1, count) | np.uint64(1)).view(np.int64)
