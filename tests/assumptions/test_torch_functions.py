"""Assumptions about single functions of torch, torch's checkpoints and glibc."""

from __future__ import annotations

import ctypes
import math
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from support.assumed import rests_on_it


@rests_on_it("src/lockstep/distributed/portable.py")
def test_accuracy_of_float64_functions() -> None:
    """expm1 and log1p of float64 keep their digits near 0, are within 4 units in the last place of Python's math, and
    have the mathematical results for NaN, infinities and -1. frexp's mantissa is in [0.5, 1). exp2 of a complex number
    with real part 0 is cos + i sin."""
    numbers = torch.cat([torch.linspace(-0.9, 40, 101), torch.tensor([1e-12, -1e-12, 0.0])]).double()
    for function, exact in ((torch.expm1, math.expm1), (torch.log1p, math.log1p)):
        for number, result in zip(numbers.tolist(), function(numbers).tolist(), strict=True):
            assert abs(result - exact(number)) <= 4 * math.ulp(exact(number)), (function, number)
    assert torch.expm1(torch.tensor([-math.inf, math.inf])).tolist() == [-1.0, math.inf]
    assert torch.log1p(torch.tensor([-1.0, math.inf])).tolist() == [-math.inf, math.inf]
    assert torch.log1p(torch.tensor([-2.0, math.nan])).isnan().all()
    mantissa, exponent = torch.frexp(torch.tensor([0.75, 4.0, 0.3], dtype=torch.float64))
    assert (mantissa.tolist(), exponent.tolist()) == ([0.75, 0.5, 0.6], [0, 3, -1])
    angles = torch.linspace(-3, 3, 7, dtype=torch.float64)
    turned = torch.exp2(torch.complex(torch.zeros_like(angles), angles / math.log(2)))
    assert torch.allclose(turned.real, angles.cos(), rtol=0, atol=1e-15)
    assert torch.allclose(turned.imag, angles.sin(), rtol=0, atol=1e-15)


@rests_on_it("src/lockstep/distributed/portable.py")
def test_accuracy_of_rsqrt_and_reciprocal() -> None:
    """rsqrt and reciprocal of float32 are within one unit in the last place of the exact values, also for tensors whose
    length is no multiple of the vector width, and infinity for 0. The bits do not depend on an element's position in
    the tensor."""
    numbers = torch.linspace(0.01, 50, 1003)
    for function, exact in ((torch.rsqrt, lambda x: x**-0.5), (torch.reciprocal, lambda x: 1 / x)):
        rounded = exact(numbers.double()).float()
        assert ((function(numbers) - rounded).abs() <= torch.from_numpy(np.spacing(rounded.numpy()))).all()
        assert torch.equal(torch.cat([function(numbers[:1]), function(numbers[1:])]), function(numbers))
        assert function(torch.zeros(1)).item() == math.inf


@rests_on_it("packages/lockstep-trace/src/lockstep_trace/tracer/fingerprint.py")
def test_a_product_with_ones_sums_columns_in_float64() -> None:
    """torch.mv of a transposed view and a slice of ones sums columns in float64, exactly for integers below 2**53."""
    rows = torch.arange(35, dtype=torch.float64).view(5, 7) + 2**40
    ones = torch.ones(9, dtype=torch.float64)
    sums = torch.mv(rows.t(), ones[:5])
    assert sums.dtype == torch.float64
    assert torch.equal(sums, rows.sum(0))


@rests_on_it("packages/lockstep-trace/src/lockstep_trace/tracer/evidence.py")
def test_corrcoef_of_rows() -> None:
    """torch.corrcoef takes variables in rows: [0, 1] is the correlation of the first two, at most 1 in absolute value.
    With a constant row it is NaN, for which no comparison is true."""
    a = torch.tensor([1.0, 2.0, 3.0, 4.0])
    table = torch.corrcoef(torch.stack([a, -2 * a + 1]))
    assert table.shape == (2, 2)
    assert table[0, 1].item() == pytest.approx(-1)
    exact = np.corrcoef([[1, 2, 3, 4], [2, 1, 4, 3]])[0, 1]
    assert torch.corrcoef(torch.stack([a, a[[1, 0, 3, 2]]]))[0, 1].item() == pytest.approx(exact)
    constant = torch.corrcoef(torch.stack([a, torch.ones(4)]))[0, 1]
    assert constant.isnan()
    assert not constant > 0.7
    assert not constant < 4


@rests_on_it("src/lockstep/checkpoint/shard_files.py")
def test_a_checkpoint_file_system_without_init(tmp_path: Path) -> None:
    """A subclass of torch.distributed.checkpoint's FileSystem that does not call `__init__` can read. Its `ls`
    determines the files that HuggingFaceStorageReader reads; other files of the folder are ignored."""
    from safetensors.torch import save_file
    from torch.distributed.checkpoint import HuggingFaceStorageReader
    from torch.distributed.checkpoint.filesystem import FileSystem

    class Named(FileSystem):
        def __init__(self) -> None:
            self.names = ["a.safetensors"]

        def ls(self, path: str | os.PathLike[str]) -> list[str]:
            return [os.path.join(path, name) for name in self.names]

    assert "__init__" not in vars(FileSystem)
    for name in "ab":
        save_file({name: torch.ones(2)}, tmp_path / f"{name}.safetensors")
    reader = HuggingFaceStorageReader(str(tmp_path))
    reader.fs = Named()
    assert reader.read_metadata().state_dict_metadata.keys() == {"a"}


@rests_on_it(
    "src/lockstep/strategies/exact/tensor_leaves.py",
    "packages/lockstep-trace/src/lockstep_trace/tracer/replay.py",
    "packages/lockstep-trace/src/lockstep_trace/tracer/observers.py",
)
def test_the_state_of_a_generator_is_a_copy() -> None:
    """get_state of torch's generators and of numpy.random returns a copy: set_state restores it after draws and another
    seed."""
    generator = torch.Generator().manual_seed(5)
    torch.randn(3, generator=generator)
    before = generator.get_state()
    drawn = torch.randn(3, generator=generator)
    generator.manual_seed(7)
    generator.set_state(before)
    assert torch.equal(torch.randn(3, generator=generator), drawn)
    kept = np.random.get_state()
    one = np.random.rand(3)
    np.random.seed(4)
    np.random.set_state(kept)
    assert np.array_equal(np.random.rand(3), one)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
@rests_on_it("src/lockstep/distributed/system_metrics.py")
def test_glibc_has_switches_of_its_allocator() -> None:
    """mallopt and malloc_trim can be called as functions of the process: mallopt with M_MMAP_THRESHOLD (-3) and
    M_TRIM_THRESHOLD (-1) returns 1 on success, malloc_trim 0 or 1. A missing function raises AttributeError."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        pytest.skip("not glibc")
    assert library.mallopt(-1, 128 * 1024) == 1  # the default
    assert library.malloc_trim(0) in (0, 1)
    assert library.mallopt(-3, 1 << 30) in (0, 1)
    assert getattr(library, "no_such_function_of_libc", None) is None


@rests_on_it("src/lockstep/strategies/engines/zero_steps.py")
def test_a_parameter_shares_the_memory_of_its_tensor() -> None:
    """nn.Parameter of a detached tensor, also of a slice, shares its memory: an update of one is visible in the other.
    Assigning the parameter's `data` ends that."""
    flat = torch.zeros(6)
    parameter = torch.nn.Parameter(flat[2:4].detach())
    assert parameter.data_ptr() == flat[2:].data_ptr()
    with torch.no_grad():
        parameter.add_(1)
    assert flat.tolist() == [0, 0, 1, 1, 0, 0]
    parameter.data = parameter.data.clone()
    with torch.no_grad():
        parameter.add_(1)
    assert flat.tolist() == [0, 0, 1, 1, 0, 0]
