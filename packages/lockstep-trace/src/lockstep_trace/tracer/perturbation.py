"""The smallest perturbation of a model: the last bit of half of its weights, to measure the effect of rounding."""

from __future__ import annotations

import torch
from torch import nn

from . import placement
from .fingerprint import mixed, shifted

INTEGERS = {
    torch.float32: torch.int32,
    torch.float64: torch.int64,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
}


def perturb(module: nn.Module) -> None:
    """Flip the last bit of half of the weights, by a fixed pattern: a change of the size of rounding."""
    with torch.no_grad():
        for parameter in module.parameters():
            tensor, _, _ = placement.local(parameter.detach())
            if tensor.dtype in INTEGERS and tensor.is_contiguous() and tensor.numel():
                bits = tensor.view(INTEGERS[tensor.dtype]).view(-1)
                for at in range(0, bits.numel(), 1 << 20):
                    part = bits[at : at + (1 << 20)]
                    flips = shifted(mixed(part.numel(), first=(1 << 46) + at), 41) & 1
                    part.bitwise_xor_((flips * (part != 0).cpu()).to(part.dtype).to(part.device))
