"""Records input shapes of recurrent layers and attention, with the batch size.

In: calls of inner modules. Out: [class, first dimension, second one, rows of the call, loader pass] of those whose
first dimension is time.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from .placement import is_plain_tensor

KINDS = (nn.RNN, nn.LSTM, nn.GRU, nn.MultiheadAttention)
LOOKS = 64  # first calls


def look(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any] | None:
    """Return [class, first dimension, second one] of a module's input; None if the first dimension is the batch."""
    value: Any = args[0] if args else kwargs.get("input", kwargs.get("query"))
    if module.batch_first or not is_plain_tensor(value) or value.dim() != 3:
        return None
    return [type(module).__name__, value.shape[0], value.shape[1]]
