"""Fingerprints and sketches: their definition, their parts, their errors, and the same numbers on every device."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.distributed.tensor_hashes import hash_text
from lockstep_trace.tracer import fingerprint, width_of
from lockstep_trace.tracer.fingerprint import Block, measure, whole


def parts(vector: torch.Tensor) -> tuple[int, float, np.ndarray]:
    numbers = vector[1:].view(torch.float64).numpy()
    return int(vector[0]), float(numbers[0]), numbers[1:]


def plain(tensor: torch.Tensor) -> tuple[int, float, np.ndarray]:
    """Compute fingerprint, sum and sketch by their definition, element by element, in Python's integers."""
    p, rows = width_of(tensor.shape), fingerprint.ROWS
    flat, bits = tensor.reshape(-1), tensor.reshape(-1).view(torch.int32)
    total, sketch = 0, np.zeros(p)
    for i in range(flat.numel()):
        chunk, at = divmod(i, rows * p)
        number = fingerprint.mix(at)
        odd, sign = number | 1, (number >> 40 & 1) * 2 - 1
        if chunk:
            odd *= fingerprint.mix((1 << 50) + chunk) | 1
            sign *= (fingerprint.mix((1 << 40) + chunk * 512 + at % p) >> 40 & 1) * 2 - 1
        total += int(bits[i]) * odd
        sketch[at % p] += sign * float(flat[i])
    total &= (1 << 64) - 1
    return total - (1 << 64) if total >> 63 else total, float((flat.double() ** 2).sum()), sketch


@pytest.mark.parametrize("shape", [(3,), (17, 5), (260, 261)])
def test_fingerprints_and_sketches_match_their_definition(shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    found, wanted = parts(measure([tensor], [whole(tensor)])[0]), plain(tensor)
    assert found[0] == wanted[0]
    assert found[1] == pytest.approx(wanted[1], rel=1e-12)
    assert np.allclose(found[2], wanted[2], rtol=0, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.float32])
@pytest.mark.parametrize("shape", [(6,), (300, 300)])  # small tensors, and chunks
def test_an_even_number_of_flipped_signs_changes_the_hash(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """2^63 times two odd numbers is 0 modulo 2^64."""
    tensor = torch.ones(shape).to(dtype)
    other = tensor.clone()
    top = other.view(-1).view(torch.uint8).view(-1, tensor.element_size())[:, -1]
    top[:2] ^= 0x80
    assert hash_text(tensor) != hash_text(other)
    top[:2] ^= 0x80
    assert hash_text(tensor) == hash_text(other)


class Products(TorchDispatchMode):
    """Notes the dtypes of products."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func.overloadpacket in (torch.ops.aten.dot, torch.ops.aten.mv, torch.ops.aten.mm):
            self.dtypes.add(args[0].dtype)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("shape", [(5,), (300, 300)])
def test_no_product_of_integers_is_taken(shape: tuple[int, ...]) -> None:
    """`strategy.exact: portable` refuses them, and hashes the state of every run."""
    with Products() as products:
        hash_text(torch.ones(shape))
    assert products.dtypes <= {torch.float64}
    with Products() as products:  # the control
        torch.dot(torch.ones(2, dtype=torch.int64), torch.ones(2, dtype=torch.int64))
    assert products.dtypes == {torch.int64}


def boxes(shape: tuple[int, ...], dim: int, cuts: list[int]) -> list[Block]:
    ends = [0, *cuts, shape[dim]]
    blocks = []
    for a, b in itertools.pairwise(ends):
        offset, size = [0] * len(shape), list(shape)
        offset[dim], size[dim] = a, b - a
        blocks.append(Block(shape, tuple(offset), tuple(size)))
    return blocks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(("dim", "cuts"), [(0, [1, 7, 7, 333]), (1, [5, 200, 299]), (2, [1, 2])])
def test_fingerprints_of_shards_add_up_to_the_whole(dtype: torch.dtype, dim: int, cuts: list[int]) -> None:
    shape = (400, 300, 3)
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    wanted = parts(measure([tensor], [whole(tensor)])[0])
    blocks = boxes(shape, dim, cuts)
    shards = [tensor[tuple(slice(o, o + s) for o, s in zip(b.offset, b.size, strict=True))] for b in blocks]
    found = [parts(v) for v in measure(shards, blocks)]
    assert sum(f[0] for f in found) & (1 << 64) - 1 == wanted[0] & (1 << 64) - 1
    assert sum(f[1] for f in found) == pytest.approx(wanted[1], rel=1e-12)
    assert np.allclose(sum(f[2] for f in found), wanted[2], rtol=0, atol=1e-9 * math.sqrt(wanted[1]))
    shards[0] = shards[0].clone().fill_(1)  # the control
    other = [parts(v)[0] for v in measure(shards, blocks)]
    assert sum(other) & (1 << 64) - 1 != wanted[0] & (1 << 64) - 1


def test_the_numbers_of_other_devices_equal_those_of_a_cpu() -> None:
    """Which measure all tensors together: the same fingerprints, sums and sketches to rounding, of whole tensors larger
    than a batch, of kinds of numbers, and of shards."""
    draw = torch.Generator().manual_seed(0)
    tensors = [
        *(torch.randn(size, generator=draw) for size in ((300, 384), (384,), (3, 5, 7), (257, 4), (4_200_001,), ())),
        torch.randn(700, 300, generator=draw).t(),
        torch.randn(100, 33, generator=draw).double(),
        torch.randn(600, 384, generator=draw).bfloat16(),
        torch.randint(0, 9, (50,), generator=draw),
        torch.randn(40, generator=draw) > 0,
        torch.zeros(0),
    ]
    blocks = [whole(tensor) for tensor in tensors]
    matrix = torch.randn(1000, 700, generator=draw)
    for a, b, c, d in ((0, 333, 0, 700), (333, 1000, 0, 700), (0, 1000, 350, 700), (100, 200, 30, 60)):
        tensors.append(matrix[a:b, c:d])
        blocks.append(Block((1000, 700), (a, c), (b - a, d - c)))
    tensors.append(torch.randn(500_000, generator=draw))
    blocks.append(Block((3000, 700), (12_345,), (500_000,)))
    for sketch in (True, False):
        ways = (fingerprint._by_chunks(tensors, blocks, sketch), fingerprint._by_units(tensors, blocks, sketch))
        for one, other in zip(*ways, strict=True):
            assert one[0] == other[0]
            numbers, others = one[1:].view(torch.float64), other[1:].view(torch.float64)
            assert torch.allclose(numbers, others, rtol=1e-9, atol=1e-9 * float(numbers.abs().max() + 1))


@pytest.mark.parametrize(("shape", "begin"), [((9000, 384), 0), ((9000, 300), 0), ((9000, 300), 4500)])
def test_rows_of_zeros_are_skipped(shape: tuple[int, int], begin: int) -> None:
    """As in an embedding's gradient: the numbers are those of all elements, also where a row is a single -0.0, in a
    shard, and where chunks begin within a row. The control has no rows of zeros."""
    draw = torch.Generator().manual_seed(0)
    tensor = torch.zeros(shape)
    rows = torch.randint(shape[0], (400,), generator=draw)
    tensor[rows] = torch.randn(400, shape[1], generator=draw)
    tensor[17, 3], tensor[8999] = -0.0, 1e-30
    shard = tensor[begin:]
    block = Block(shape, (begin, 0), tuple(shard.shape))
    used = fingerprint.nonzero_rows(shard, block)
    assert used is not None
    assert {int(n) + begin for n in used} == {n for n in {17, 8999, *rows.tolist()} if n >= begin}
    for sketch in (True, False):
        skipped = fingerprint._by_chunks([shard], [block], sketch)[0]
        every = fingerprint._by_units([shard], [block], sketch)[0]
        assert skipped[0] == every[0]
        numbers, others = skipped[1:].view(torch.float64), every[1:].view(torch.float64)
        assert torch.allclose(numbers, others, rtol=1e-12, atol=1e-9)
    assert fingerprint.nonzero_rows(torch.randn(shape, generator=draw), Block(shape, (0, 0), shape)) is None


def test_a_changed_bit_or_position_changes_the_fingerprint() -> None:
    tensor = torch.randn(1000, generator=torch.Generator().manual_seed(3))

    def of(t: torch.Tensor) -> int:
        return parts(measure([t], [whole(t)], sketch=False)[0] if t.numel() else torch.zeros(2))[0]

    seen = {of(tensor)}
    for i in range(1000):
        other = tensor.clone()
        other.view(torch.int32)[i] ^= 1
        seen.add(of(other))
    seen |= {of(-tensor), of(tensor.flip(0)), of(tensor.roll(1)), of(torch.cat([tensor[500:], tensor[:500]]))}
    assert len(seen) == 1005


def test_the_error_of_a_sketch() -> None:
    """The estimated norm of a difference has a standard deviation of 1 / sqrt(2 P) and no bias, over 200 pairs."""
    errors, generator = [], torch.Generator().manual_seed(4)
    for _ in range(200):
        a = torch.randn(90, 70, generator=generator)
        d = torch.randn(90, 70, generator=generator) * (torch.rand(90, 1, generator=generator) > 0.5)
        one, other = (parts(v)[2] for v in measure([a, a + d], [whole(a)] * 2))
        errors.append(float(np.linalg.norm(other - one)) / float(((a + d) - a).double().norm()) - 1)
    assert abs(np.mean(errors)) < 0.015
    assert 0.03 < np.std(errors) < 0.06  # 0.044 by the formula
    f = parts(measure([a * 0.25], [whole(a)])[0])[2]
    assert float(f @ one) / float(one @ one) == pytest.approx(0.25, rel=0.5)  # other elements than `one` has
    one = parts(measure([a], [whole(a)])[0])[2]
    assert float(f @ one) / float(one @ one) == pytest.approx(0.25, rel=1e-12)


def test_no_width_divides_a_dimension() -> None:
    assert width_of((257, 3)) == 263
    assert width_of((5, 257 * 263)) == 269
    assert all(n % width_of((n, 2)) for n in range(1, 3000))
    assert width_of((768, 3072)) == 257
