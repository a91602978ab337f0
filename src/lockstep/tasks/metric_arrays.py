"""What functions of `metrics` in the run file are given of a split, where it is no plain array of numbers.

In: tokens of a batch, texts and lists of examples. Out: rows that are as wide in every batch, so that they can be
gathered; arrays of objects. Nothing here imports torch at the top.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.data.tokens import Columns

NOTHING = -1  # stands where a row has no token


def as_wide(tokens: Tensor, width: int, fill: int = NOTHING) -> Tensor:
    """Rows [B, T] in the width of the split's widest: int32 [B, width]."""
    import torch

    return torch.nn.functional.pad(tokens.int(), (0, width - tokens.shape[1]), value=fill)


def longest(columns: Columns) -> int:
    """Tokens of the longest example of a split: the same for any batch of it, on any rank."""
    return int(columns.lengths[columns.longest(1)][0])


def listed(values: Sequence[Any]) -> np.ndarray:
    """Texts, or lists, one an example: an array of objects [N]."""
    found = np.empty(len(values), dtype=object)
    for place, value in enumerate(values):
        found[place] = value
    return found
