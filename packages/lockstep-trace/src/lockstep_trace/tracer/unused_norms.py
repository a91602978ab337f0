"""Copies of a model whose weights change between evaluations, and whose batch norms keep their first statistics.

In: models in evaluation mode that no optimizer trains. Out: numbers on their device.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from .inputs import hash_of
from .placement import BATCH_NORM, is_plain_tensor


class UnusedNorms:
    """Hashes of the first weights of the models looked at."""

    def __init__(self) -> None:
        self._hashes: weakref.WeakKeyDictionary[nn.Module, Tensor] = weakref.WeakKeyDictionary()

    def look(self, module: nn.Module) -> Tensor | None:
        """Return [number of batch norms, whether all have their first statistics, whether the first weight has changed
        since the last look], None for a model in training mode, or without batch norms."""
        norms: list[Any] = [m for m in module.modules() if isinstance(m, BATCH_NORM) and m.running_mean is not None]
        first = next(module.parameters(), None)
        if first is None or not is_plain_tensor(first.detach()) or not norms or any(m.training for m in norms):
            return None
        now = hash_of(first)[0]
        before = self._hashes.get(module, now)
        self._hashes[module] = now
        initial = [(m.running_mean == 0).all() & (m.running_var == 1).all() for m in norms]
        return torch.stack([now.new_tensor(len(norms)), torch.stack(initial).all().long(), (now != before).long()])
