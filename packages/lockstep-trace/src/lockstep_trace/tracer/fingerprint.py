"""The hash of a tensor, here called fingerprint, and its sketch: both are sums over the elements, so that those of
shards add up to those of the full tensor. lockstep has no other definition of a tensor's hash.

In: local tensors and their blocks of the full tensors. Out: for each tensor a fingerprint (64 bits), its sum of squares
and a sketch (`width_of(shape)` float64 numbers). An element's contribution depends on its value and its index in the
flattened full tensor, never on the rank or the sharding.

**Fingerprint**: the sum of (bits of element i) * k(i) modulo 2^64, k(i) a fixed odd number that mixes i. Tensors
that differ in one element always have different fingerprints. Those that differ in several have equal ones with a
probability of about 2^-(63 - t), where t is the lowest bit in which any element differs: 2^-32 for float32 values that
differ only in sign. Of elements of eight bytes the upper half is mixed into the lower first, so that t is at most 31.

**Sketch**: a count sketch (Charikar, Chen and Farach-Colton, 2002). Element i is added with a fixed sign s(i) to bucket
i mod P, where P is a prime that divides no dimension. The squared norm of a sketch estimates the squared norm of the
tensor without bias, with a relative standard deviation of about sqrt(2 / P): 9 % for P = 257; up to twice that if
parts of a large tensor repeat. A sketch is linear.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from . import width_of

ROWS = 256  # of a chunk, which has ROWS * P elements
BATCH = 1 << 20  # elements of small tensors measured together
UNIT = 32  # rows of a unit; a chunk has ROWS // UNIT units
SPARSE_FROM = 1 << 20  # elements of a matrix whose zero rows are skipped, if SAMPLED rows show that most are zero
SAMPLED = 64
DEVICE_BATCH = 1 << 22  # elements measured together on a device, where each launch costs about 5 us
CPU = torch.device("cpu")
_MASK = (1 << 64) - 1
GOLDEN, M1, M2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Block:
    """Position of a local tensor in the full one: the block of `size` at `offset` in `shape`. If offset and size have
    one number each, a range of the flattened full tensor."""

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]

    @functools.cached_property
    def flat(self) -> tuple[int, int] | None:
        """(start, stop) in the flattened full tensor, or None if the block is not contiguous there."""
        if len(self.offset) == 1:
            return self.offset[0], self.offset[0] + self.size[0]
        start, count, stride, whole = 0, 1, 1, True
        for n, o, s in zip(reversed(self.shape), reversed(self.offset), reversed(self.size), strict=True):
            if not whole and s > 1:
                return None
            start, count = start + o * stride, count * s
            whole, stride = whole and s == n, stride * n
        return start, start + count


def whole(tensor: Tensor) -> Block:
    """Return the block of an unsharded tensor."""
    return _whole(tensor.shape)


@functools.lru_cache(maxsize=4096)
def _whole(shape: torch.Size) -> Block:
    return Block(tuple(shape), (0,) * len(shape), tuple(shape))


def measure(tensors: Sequence[Tensor], blocks: Sequence[Block], sketch: bool = True) -> list[Tensor]:
    """Return one int64 vector per tensor, on its device: fingerprint, sum of squares (float64 bits), and with `sketch`
    the P buckets (float64 bits). Tensors may have any dtype, device and layout. Not collective."""
    here = [i for i, tensor in enumerate(tensors) if tensor.device.type == "cpu"]
    away = [i for i, tensor in enumerate(tensors) if tensor.device.type != "cpu"]
    vectors: dict[int, Tensor] = {}
    with torch.no_grad():
        for places, way in ((here, _by_chunks), (away, _by_units)):
            measured = way([tensors[i] for i in places], [blocks[i] for i in places], sketch)
            vectors.update(zip(places, measured, strict=True))
    return [vectors[i] for i in range(len(tensors))]


def hexed(number: int) -> str:
    """Return the 16 hexadecimal digits of a hash, signed or not."""
    return f"{number & _MASK:016x}"


def _by_chunks(tensors: Sequence[Tensor], blocks: Sequence[Block], sketch: bool) -> list[Tensor]:
    vectors: dict[int, Tensor] = {}
    small: dict[tuple[torch.dtype, int], list[tuple[int, Tensor, int]]] = {}
    for i, (tensor, block) in enumerate(zip(tensors, blocks, strict=True)):
        p = width_of(block.shape)
        place = block.flat
        if place is not None and tensor.numel() and place[0] // (ROWS * p) == (place[1] - 1) // (ROWS * p):
            flat = plain(tensor).reshape(-1)
            small.setdefault((flat.dtype, p), []).append((i, flat, place[0]))
        else:
            vectors[i] = _large(tensor, block, p, sketch)
    for (_, p), items in small.items():
        for batch in _batches(items, BATCH):
            layout = tuple((start, flat.numel()) for _, flat, start in batch)
            measured = _batch([flat for _, flat, _ in batch], layout, p, sketch)
            vectors |= {i: vector for (i, _, _), vector in zip(batch, measured, strict=True)}
    return [vectors[i] for i in range(len(tensors))]


def _by_units(tensors: Sequence[Tensor], blocks: Sequence[Block], sketch: bool) -> list[Tensor]:
    vectors: dict[int, Tensor] = {}
    kinds: dict[tuple[torch.device, torch.dtype, int], list[tuple[int, Tensor, int]]] = {}
    for i, (tensor, block) in enumerate(zip(tensors, blocks, strict=True)):
        p, tensor = width_of(block.shape), plain(tensor)
        pieces = [(i, *piece) for piece in _pieces(tensor, block, p)] or [(i, tensor.reshape(-1), 0)]
        kinds.setdefault((tensor.device, tensor.dtype, p), []).extend(pieces)
    for (_, _, p), items in kinds.items():
        for batch in _batches(items, DEVICE_BATCH):
            for (i, _, _), vector in zip(batch, _of_units([each[1:] for each in batch], p, sketch), strict=True):
                vectors[i] = _added(vectors[i], vector) if i in vectors else vector
    return [vectors[i] for i in range(len(tensors))]


def plain(tensor: Tensor) -> Tensor:
    """Return a dense, real tensor; call it without gradient recording."""
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.to(torch.uint8) if tensor.dtype == torch.bool else tensor


def _bits(flat: Tensor) -> Tensor:
    bits = flat.view(INTEGERS[flat.element_size()]).to(torch.int64)
    return bits ^ shifted(bits, 32) if flat.element_size() == 8 else bits


def _numbers(flat: Tensor) -> Tensor:
    if not flat.is_floating_point():
        return flat.double()
    return flat.float() if flat.element_size() == 1 else flat


# -- vectors of tensors -----------------------------------------------------------------------------------------------


def heads(vectors: list[Tensor]) -> list[Tensor]:
    """Return the vectors without sketches: fingerprint and sum of squares."""
    results: dict[int, Tensor] = {}
    for numbers in _alike(vectors):
        results |= dict(zip(numbers, torch.stack([vectors[i] for i in numbers])[:, :2].unbind(0), strict=True))
    return [results[i] for i in range(len(vectors))]


def _alike(vectors: list[Tensor]) -> list[list[int]]:
    alike: dict[tuple[int, torch.device], list[int]] = {}
    for i, vector in enumerate(vectors):
        alike.setdefault((vector.numel(), vector.device), []).append(i)
    return list(alike.values())


def subtracted(after: list[Tensor], before: list[Tensor]) -> list[Tensor]:
    """Return the vector of each difference: fingerprints modulo 2^64 and sketches subtracted; the sum of squares as
    estimated by the sketch."""
    results: dict[int, Tensor] = {}
    for numbers in _alike(after):
        new, old = (torch.stack([each[i] for i in numbers]) for each in (after, before))
        sketches = new[:, 2:].view(torch.float64) - old[:, 2:].view(torch.float64)
        squares = sketches.square().sum(1, keepdim=True)
        rows = [new[:, :1] - old[:, :1], squares.view(torch.int64), sketches.view(torch.int64)]
        results |= dict(zip(numbers, torch.cat(rows, 1).unbind(0), strict=True))
    return [results[i] for i in range(len(after))]


# -- fixed numbers by index ------------------------------------------------------------------------------------------


def mix(index: int) -> int:
    """Return splitmix64 (Steele, Lea and Flood, 2014) of an index, from 0 to 2^64 - 1."""
    z = (index + 1) * GOLDEN & _MASK
    z = (z ^ z >> 30) * M1 & _MASK
    z = (z ^ z >> 27) * M2 & _MASK
    return z ^ z >> 31


def signed(number: int) -> int:
    """Return a number of 64 bits with its sign."""
    return number - (1 << 64 if number >= 1 << 63 else 0)


def shifted(z: Tensor, by: int) -> Tensor:
    return (z >> by) & ((1 << (64 - by)) - 1)


def mixed(count: int, first: int = 0) -> Tensor:
    """Return `mix` of `count` indices from `first`, int64 [count]."""
    return mixed_of(torch.arange(first, first + count, dtype=torch.int64))


def mixed_of(indices: Tensor) -> Tensor:
    """Return `mix` of each index, int64."""
    z = (indices + 1) * signed(GOLDEN)
    z = (z ^ shifted(z, 30)) * signed(M1)
    z = (z ^ shifted(z, 27)) * signed(M2)
    return z ^ shifted(z, 31)


@functools.lru_cache(maxsize=16)
def _tables(p: int, device: torch.device) -> tuple[Tensor, Tensor]:
    numbers = mixed(ROWS * p)
    signs = (shifted(numbers, 40) & 1) * 2 - 1
    return signs.float().to(device), (numbers | 1).to(device)


@functools.lru_cache(maxsize=4096)
def _chunk_signs(p: int, chunk: int) -> Tensor:
    if chunk == 0:
        return torch.ones(p, dtype=torch.float64)
    numbers = mixed(p, first=(1 << 40) + chunk * 512)
    return ((shifted(numbers, 40) & 1) * 2 - 1).double()


def _chunk_number(chunk: int) -> int:
    return 1 if chunk == 0 else signed(mix((1 << 50) + chunk) | 1)


# -- small tensors, together -----------------------------------------------------------------------------------------


def _batches(items: list[tuple[int, Tensor, int]], most: int) -> Iterator[list[tuple[int, Tensor, int]]]:
    batch: list[tuple[int, Tensor, int]] = []
    total = 0
    for item in items:
        if batch and total + item[1].numel() > most:
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += item[1].numel()
    yield batch


@dataclass(frozen=True)
class _Layout:
    signs: Tensor  # [rows * p]
    odd: Tensor  # [rows * p]
    pads: tuple[tuple[int, int], ...]  # zeros before and after each tensor
    owner: Tensor  # [rows]: index of the row's tensor


@functools.lru_cache(maxsize=32)
def _layout(places: tuple[tuple[int, int], ...], p: int) -> _Layout:
    table_signs, table_odd = _tables(p, CPU)
    signs, odd, pads, owner = [], [], [], []
    for k, (start, count) in enumerate(places):
        chunk, begin = divmod(start, ROWS * p)
        first, lead = divmod(begin, p)
        n = -(-(lead + count) // p)
        part = slice(first * p, (first + n) * p)
        signs.append(table_signs[part].view(n, p) * _chunk_signs(p, chunk).float())
        odd.append(table_odd[part] * _chunk_number(chunk))
        pads.append((lead, n * p - lead - count))
        owner += [k] * n
    return _Layout(
        torch.cat([s.reshape(-1) for s in signs]),
        torch.cat(odd),
        tuple(pads),
        torch.tensor(owner),
    )


def _batch(flats: list[Tensor], places: tuple[tuple[int, int], ...], p: int, sketch: bool) -> list[Tensor]:
    n, layout = len(flats), _layout(places, p)
    zeros = torch.zeros(p, dtype=flats[0].dtype)
    parts = [t for flat, (a, b) in zip(flats, layout.pads, strict=True) for t in (zeros[:a], flat, zeros[:b])]
    buffer = torch.cat(parts)
    products = (_bits(buffer) * layout.odd).view(-1, p).sum(1)
    prints = torch.zeros(n, dtype=torch.int64).index_add_(0, layout.owner, products)
    numbers = _numbers(buffer)
    squares = torch.zeros(n, dtype=torch.float64)
    squares.index_add_(0, layout.owner, numbers.double().square().view(-1, p).sum(1))
    out = torch.empty(n, 2 + p * sketch, dtype=torch.int64)
    out[:, 0] = prints
    out[:, 1] = squares.view(torch.int64)
    if sketch:
        signed = (numbers * layout.signs).view(-1, p)
        buckets = torch.zeros(n, p, dtype=torch.float64)
        out[:, 2:] = buckets.index_add_(0, layout.owner, signed.double()).view(torch.int64)
    return list(out.unbind(0))


# -- on a device, in batches -------------------------------------------------------------------------------------------


def _pieces(tensor: Tensor, block: Block, p: int) -> Iterator[tuple[Tensor, int]]:
    unit = UNIT * p
    for flat, start in _ranges(tensor, block, p):
        at = 0
        if flat.numel() <= DEVICE_BATCH // 2:
            yield flat, start
            continue
        while at < flat.numel():
            count = min(flat.numel() - at, DEVICE_BATCH // unit * unit - (start + at) % unit)
            yield flat[at : at + count], start + at
            at += count


@dataclass(frozen=True)
class _Units:
    """Factors for the sketches of several pieces, cut into K units."""

    inside: Tensor  # int64 [K]: index of the unit in its chunk
    odd: Tensor  # int64 [K]: odd factor of its chunk
    signs: Tensor  # float64 [K, p]: signs of its chunk's buckets
    owner: Tensor  # int64 [K]: index of its piece
    owners: Tensor  # float64 [n, K]: 1 if the piece owns the unit
    pads: tuple[tuple[Tensor, ...], ...]  # zeros before each piece, and after the last one


@functools.lru_cache(maxsize=64)
def _units(places: tuple[tuple[int, int], ...], p: int, device: torch.device, dtype: torch.dtype) -> _Units:
    unit, gaps = UNIT * p, [0]
    every: list[int] = []
    owner: list[int] = []
    for k, (start, count) in enumerate(places):
        first, lead = divmod(start, unit)
        n = max(-(-(lead + count) // unit), 1)
        every += range(first, first + n)
        owner += [k] * n
        gaps[-1] += lead
        gaps.append(n * unit - lead - count)
    zeros = torch.zeros(max(gaps), dtype=dtype, device=device)
    units, owners = (_sent(torch.tensor(numbers), device) for numbers in (every, owner))
    chunk = units // (ROWS // UNIT)
    numbers = mixed_of(chunk[:, None] * 512 + torch.arange(1 << 40, (1 << 40) + p, device=device))
    signs = ((shifted(numbers, 40) & 1) * 2 - 1).double().masked_fill_((chunk == 0)[:, None], 1)
    odd = (mixed_of(chunk + (1 << 50)) | 1).masked_fill_(chunk == 0, 1)
    one = (torch.arange(len(places), device=device)[:, None] == owners).double()
    return _Units(units % (ROWS // UNIT), odd, signs, owners, one, tuple((zeros[:gap],) if gap else () for gap in gaps))


def _sent(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def _of_units(pieces: list[tuple[Tensor, int]], p: int, sketch: bool) -> list[Tensor]:
    device, unit = pieces[0][0].device, UNIT * p
    units = _units(tuple((start, flat.numel()) for flat, start in pieces), p, device, pieces[0][0].dtype)
    signs, odd = _tables(p, device)
    parts = [t for gap, (flat, _) in zip(units.pads, pieces, strict=False) for t in (*gap, flat)]
    buffer = torch.cat([*parts, *units.pads[-1]]).view(-1, unit)
    products = (_bits(buffer) * odd.view(-1, unit)[units.inside]).sum(1) * units.odd
    prints = torch.zeros(len(pieces), dtype=torch.int64, device=device).index_add_(0, units.owner, products)
    numbers = _numbers(buffer)
    sums = numbers.double().square().sum(1, keepdim=True)
    if sketch:
        signed_numbers = (numbers * signs.view(-1, unit)[units.inside]).view(-1, UNIT, p)
        sums = torch.cat([sums, signed_numbers.sum(1, dtype=torch.float64).mul_(units.signs)], 1)
    return list(torch.cat([prints[:, None], (units.owners @ sums).view(torch.int64)], 1).unbind(0))


def _added(one: Tensor, other: Tensor) -> Tensor:
    floats = one[1:].view(torch.float64) + other[1:].view(torch.float64)
    return torch.cat([one[:1] + other[:1], floats.view(torch.int64)])


# -- large tensors, chunk by chunk -----------------------------------------------------------------------------------


def _large(tensor: Tensor, block: Block, p: int, sketch: bool) -> Tensor:
    tensor = plain(tensor)
    if (rows := nonzero_rows(tensor, block)) is not None:
        return _of_rows(tensor[rows], rows, block, p, sketch)
    total = torch.zeros((), dtype=torch.int64)
    square = torch.zeros((), dtype=torch.float64)
    buckets = torch.zeros(p, dtype=torch.float64)
    for flat, start in _ranges(tensor, block, p):
        at = 0
        while at < flat.numel():
            chunk, begin = divmod(start + at, ROWS * p)
            count = min(flat.numel() - at, ROWS * p - begin)
            _add(flat[at : at + count], chunk, begin, p, (total, square, buckets if sketch else None))
            at += count
    head = torch.stack([total, square.view(torch.int64)])
    return torch.cat([head, buckets.view(torch.int64)]) if sketch else head


def nonzero_rows(tensor: Tensor, block: Block) -> Tensor | None:
    """Return the numbers of a matrix's rows that have bits other than zero, if few have: those of an embedding's
    gradient are the tokens of the batch. Else None."""
    place = block.flat
    fits = tensor.dim() == 2 and tensor.is_contiguous() and tensor.element_size() == 4 and place is not None
    if not fits or tensor.numel() < SPARSE_FROM or tensor.shape[0] < 16 * SAMPLED or tensor.shape[1] % 2:
        return None
    if place[0] % 2 or tensor.storage_offset() % 2:  # type: ignore[index]
        return None
    pairs = tensor.view(torch.int64)
    if int(pairs[:: pairs.shape[0] // SAMPLED].ne(0).any(1).sum()) > SAMPLED // 4:
        return None
    count = max(BATCH * 4 // pairs.shape[1], 1)
    used = torch.cat([pairs[a : a + count].ne(0).any(1) for a in range(0, pairs.shape[0], count)])
    rows = used.nonzero().reshape(-1)
    return rows if len(rows) <= tensor.shape[0] // 4 and len(rows) * tensor.shape[1] <= BATCH else None


@functools.lru_cache(maxsize=8)
def _chunk_tables(chunks: int, p: int) -> tuple[Tensor, Tensor]:
    odd = torch.tensor([_chunk_number(chunk) for chunk in range(chunks)])
    return odd, torch.stack([_chunk_signs(p, chunk).float() for chunk in range(chunks)])


def _of_rows(values: Tensor, rows: Tensor, block: Block, p: int, sketch: bool) -> Tensor:
    start, stop = block.flat or (0, 0)
    n, d = values.shape
    index = (start + rows * d)[:, None] + torch.arange(d)  # [n, d]
    chunk, inside = index // (ROWS * p), index % (ROWS * p)
    signs, odd = _tables(p, CPU)
    chunk_odd, chunk_signs = _chunk_tables(stop // (ROWS * p) + 1, p)
    total = (_bits(values.reshape(-1)).view(n, d) * odd[inside] * chunk_odd[chunk]).sum()
    numbers = values.double()
    square = (numbers * numbers).sum()
    head = torch.stack([total, square.view(torch.int64)])
    if not sketch:
        return head
    bucket = index % p
    signed_numbers = numbers * (signs[inside] * chunk_signs[chunk, bucket])
    buckets = torch.zeros(p, dtype=torch.float64).index_add_(0, bucket.reshape(-1), signed_numbers.reshape(-1))
    return torch.cat([head, buckets.view(torch.int64)])


def _ranges(tensor: Tensor, block: Block, p: int) -> Iterator[tuple[Tensor, int]]:
    if tensor.numel() == 0:
        return
    place = block.flat
    if place is not None:
        yield from _flat(tensor, place[0], ROWS * p)
        return
    shape, dim = block.shape, next(d for d, n in enumerate(block.size) if n > 1)  # all earlier dimensions have size 1
    stride = 1
    for n in shape[dim + 1 :]:
        stride *= n
    start = 0
    for d in range(dim + 1):
        step = 1
        for n in shape[d + 1 :]:
            step *= n
        start += block.offset[d] * step
    local = tensor.reshape(block.size[dim:])
    inside = tuple(slice(o, o + s) for o, s in zip(block.offset[dim + 1 :], block.size[dim + 1 :], strict=True))
    slices = max(ROWS * p // stride, 1)  # of the full tensor at a time
    for a in range(0, block.size[dim], slices):
        part = local[a : a + slices]
        room = part.new_zeros((part.shape[0], *shape[dim + 1 :]))
        room[(slice(None), *inside)] = part
        yield room.reshape(-1), start + a * stride


def _flat(tensor: Tensor, start: int, most: int) -> Iterator[tuple[Tensor, int]]:
    if tensor.is_contiguous() or tensor.numel() <= most:
        yield tensor.reshape(-1), start
        return
    row = tensor.numel() // tensor.shape[0]
    rows = max(most // row, 1)
    for a in range(0, tensor.shape[0], rows):
        part = tensor[a] if row > most else tensor[a : a + rows]
        yield from _flat(part, start + a * row, most)


@dataclass(frozen=True)
class _Scratch:
    """Buffers for a chunk. Allocating them each time would cost more than the computation: the allocator returns pages
    of this size to the system."""

    integers: Tensor  # int64 [ROWS * p]
    doubles: Tensor  # float64 [ROWS * p]
    signs: Tensor  # float64 [ROWS * p], of the elements
    ones: Tensor  # float64 [ROWS]


@functools.lru_cache(maxsize=16)
def _scratch(p: int, thread: int) -> _Scratch:
    integers, doubles = (torch.empty(ROWS * p, dtype=kind) for kind in (torch.int64, torch.float64))
    return _Scratch(integers, doubles, _tables(p, CPU)[0].double(), torch.ones(ROWS, dtype=torch.float64))


def _add(flat: Tensor, chunk: int, begin: int, p: int, sums: tuple[Tensor, Tensor, Tensor | None]) -> None:
    total, square, buckets = sums
    n = flat.numel()
    _, odd = _tables(p, CPU)
    scratch = _scratch(p, threading.get_ident())
    bits = scratch.integers[:n].copy_(flat.view(INTEGERS[flat.element_size()]))
    if flat.element_size() == 8:  # as `_bits`
        bits.bitwise_xor_(shifted(bits, 32))
    # torch.dot takes 0.8 of the time, and is refused for integers by `strategy.exact: portable`
    total.add_(bits.mul_(odd[begin : begin + n]).sum() * _chunk_number(chunk))
    lead, tail = begin % p, -(begin + n) % p
    room = scratch.doubles[: lead + n + tail]
    double = room[lead : lead + n].copy_(_numbers(flat))
    square.add_(torch.dot(double, double))
    if buckets is None:
        return
    room[:lead] = 0
    room[lead + n :] = 0
    double.mul_(scratch.signs[begin : begin + n])
    rows = room.view(-1, p)
    sums_of_columns = torch.mv(rows.t(), scratch.ones[: rows.shape[0]])  # by BLAS
    buckets.add_(sums_of_columns.mul_(_chunk_signs(p, chunk)))
