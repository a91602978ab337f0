"""Dropout masks on a CPU, drawn many numbers at a time: torch draws them one by one, and a step spends 7 % on it.

In: a tensor that torch is about to fill with zeros and ones (`bernoulli_`: `nn.Dropout`, dropout within attention, and
whoever else asks). Out: the same, from one number of torch's generator, which starts numpy's SFC64. So a mask is a pure
function of the state of torch's generator, as before.
"""

from __future__ import annotations

import functools
import warnings

import numpy as np
import torch
from torch import Tensor
from torch.library import Library


@functools.cache
def draw_wide() -> Library:
    """From now on, in this process, for every tensor on the CPU. Calling it again does nothing. The library holds as
    long as it lives."""
    library = Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*[Oo]verrid")
        library.impl("bernoulli_.float", bernoulli, "CPU")
    return library


def bernoulli(tensor: Tensor, p: float = 0.5, *, generator: torch.Generator | None = None) -> Tensor:
    """Fill with 1 at the probability `p` (to 2^-32), else 0, in place."""
    if not 0 <= p <= 1:
        raise RuntimeError(f"bernoulli_ expects p to be in [0, 1], but got p={p}")
    limit = round(p * 2**32) - 2**31
    if limit == 2**31:
        return tensor.fill_(1)
    count = tensor.numel()
    seed = int(torch.randint(2**63 - 1, (), generator=generator))
    words = np.random.SFC64(seed).random_raw(-(-count // 2)).view(np.int32)
    torch.lt(torch.from_numpy(words)[:count].view(tensor.shape), limit, out=tensor)
    return tensor
