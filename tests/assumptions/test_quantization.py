"""Assumptions about bitsandbytes, on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from support.assumed import rests_on_it

pytestmark = pytest.mark.extras
bitsandbytes: Any = pytest.importorskip("bitsandbytes")
functional: Any = bitsandbytes.functional
SIZE, BLOCK = (6, 128), 64


def weights() -> torch.Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(0))


def state(absmax: torch.Tensor, kind: str) -> Any:
    return functional.QuantState(absmax, torch.Size(SIZE), blocksize=BLOCK, quant_type=kind, dtype=torch.float32)


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@rests_on_it("src/lockstep/tasks/models/quantized.py")
def test_layout_of_4_bit_weights(kind: str) -> None:
    """quantize_4bit packs two values per byte, in the shape [n / 2, 1], with a float32 scale per block, the block's
    greatest absolute value. It is deterministic."""
    packed, made = functional.quantize_4bit(weights(), blocksize=BLOCK, quant_type=kind)
    again, _ = functional.quantize_4bit(weights(), blocksize=BLOCK, quant_type=kind)
    assert (packed.shape, packed.dtype) == ((6 * 128 // 2, 1), torch.uint8)
    assert (made.absmax.shape, made.absmax.dtype) == ((6 * 128 // BLOCK,), torch.float32)
    assert torch.equal(packed, again)
    assert torch.equal(made.absmax, weights().view(-1, BLOCK).abs().amax(1))


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@rests_on_it("src/lockstep/tasks/models/quantized.py")
def test_a_state_rebuilt_from_scales_dequantizes(kind: str) -> None:
    """dequantize_4bit gives the same result for a QuantState rebuilt from scales, shape, kind and dtype."""
    packed, made = functional.quantize_4bit(weights(), blocksize=BLOCK, quant_type=kind)
    unpacked = functional.dequantize_4bit(packed, state(made.absmax, kind))
    assert (unpacked.shape, unpacked.dtype) == (SIZE, torch.float32)
    assert torch.equal(unpacked, functional.dequantize_4bit(packed, made))
    assert (unpacked - weights()).abs().max() < 0.2 * made.absmax.max()


@rests_on_it("src/lockstep/tasks/models/quantized.py")
def test_gradient_of_a_4_bit_matmul() -> None:
    """matmul_4bit and its input gradient equal those of the dequantized weight. The packed weight gets no gradient."""
    packed, made = functional.quantize_4bit(weights(), blocksize=BLOCK, quant_type="nf4")
    whole = functional.dequantize_4bit(packed, made)
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(1)).requires_grad_()
    parameter = torch.nn.Parameter(packed, requires_grad=False)
    y = bitsandbytes.matmul_4bit(x, parameter, state(made.absmax, "nf4"), bias=None)
    assert torch.allclose(y, x @ whole.t(), rtol=1e-3, atol=1e-3)
    slope = torch.randn(y.shape, generator=torch.Generator().manual_seed(2))
    y.backward(slope)
    assert x.grad is not None
    assert torch.allclose(x.grad, slope @ whole, rtol=1e-3, atol=1e-3)
    assert parameter.grad is None


@pytest.mark.parametrize("size", [256, 700])
@pytest.mark.parametrize("signed", [True, False])
@rests_on_it("src/lockstep/strategies/optimizers/adamw_8bit.py")
def test_8_bit_moments(signed: bool, size: int) -> None:
    """create_dynamic_map gives 256 levels up to 1. quantize_blockwise with them is deterministic and has one scale per
    block, a partial block included. Bytes of 0 with scales of 0 dequantize to 0."""
    code = functional.create_dynamic_map(signed=signed)
    assert (len(code), code.max().item(), bool((code < 0).any())) == (256, 1.0, signed)
    numbers = torch.randn(size, generator=torch.Generator().manual_seed(0))
    numbers = numbers if signed else numbers.abs()
    packed, made = functional.quantize_blockwise(numbers, code=code, blocksize=256)
    assert (packed.dtype, packed.shape, len(made.absmax)) == (torch.uint8, (size,), -(-size // 256))
    assert torch.equal(packed, functional.quantize_blockwise(numbers, code=code, blocksize=256)[0])
    unpacked = functional.dequantize_blockwise(packed, absmax=made.absmax, code=code, blocksize=256)
    assert (unpacked - numbers).abs().max() < 0.05 * numbers.abs().max()
    empty = functional.dequantize_blockwise(
        torch.zeros(size, dtype=torch.uint8), absmax=torch.zeros(-(-size // 256)), code=code, blocksize=256
    )
    assert not empty.any()
