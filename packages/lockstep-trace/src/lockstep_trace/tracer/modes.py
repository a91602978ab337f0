"""Decides whether a model is in training mode, by its dropout and batch norm modules.

In: an outermost module. Out: one truth value, and counts for the record.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

from . import placement


class ModelModes:
    """Modes of models. The modules that decide are looked up once per model."""

    def __init__(self) -> None:
        self._deciding: weakref.WeakKeyDictionary[nn.Module, list[weakref.ref[nn.Module]]] = weakref.WeakKeyDictionary()

    def trains(self, module: nn.Module) -> bool:
        """Return whether a model is in training mode."""
        return any(m.training for m in self._decide(module))

    def mode(self, module: nn.Module) -> dict[str, Any]:
        """Return the model's mode, and [in training mode, total] for its dropout and batch norm modules."""
        dropout = [m for m in self._decide(module) if isinstance(m, placement.DROPOUT)]
        norms = [m for m in self._decide(module) if isinstance(m, placement.BATCH_NORM)]
        counts = {k: [sum(m.training for m in ms), len(ms)] for k, ms in (("dropout", dropout), ("norms", norms))}
        return {"root": placement.unwrapped(module).training, **counts}

    def norms(self, module: nn.Module) -> list[nn.Module]:
        """Return a model's batch norms."""
        return [m for m in self._decide(module) if isinstance(m, placement.BATCH_NORM)]

    def _decide(self, module: nn.Module) -> list[nn.Module]:
        if module not in self._deciding:
            self._deciding[module] = [weakref.ref(m) for m in placement.deciding(module)]
        return [m for ref in self._deciding[module] if (m := ref()) is not None]
