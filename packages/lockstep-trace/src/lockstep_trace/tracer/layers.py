"""How a model's layers are made: one object several times in a list, layers made inside of a forward, layers whose
units are all equal.

In: models, losses before backward. Out: facts for a model's or a step's record. Units are compared once.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from . import placement

UNITS_AT = 4  # step before which units are compared
BORN = 256  # most parameters made in forwards that are remembered
WITH_UNITS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def repeated(root: nn.Module) -> list[tuple[str, str, int]]:
    """Return (name, class, count) of lists of modules all of whose entries are one layer with parameters."""
    rows = []
    for name, module in root.named_modules():
        entries = list(module) if isinstance(module, nn.ModuleList) else []
        first = entries[0] if len(entries) > 1 else None
        if first is not None and all(e is first for e in entries) and next(first.parameters(), None) is not None:
            rows.append((placement.plain_name(name), type(first).__name__, len(entries)))
    return rows


class Born:
    """Parameters that were registered inside of an outermost module's forward, until the next backward."""

    def __init__(self) -> None:
        self._refs: dict[int, tuple[weakref.ref[Any], str]] = {}

    def add(self, module: nn.Module, parameter: Any) -> None:
        if len(self._refs) < BORN:
            self._refs[id(parameter)] = weakref.ref(parameter), type(module).__name__

    def in_graph(self, leaves: Sequence[Any], models: Iterable[nn.Module]) -> list[str]:
        """Return the classes of layers made in the last forwards that a loss depends on, and that no model has
        registered; forget all."""
        refs, self._refs = self._refs, {}
        if not refs:
            return []
        registered = {id(p) for model in models for p in model.parameters()}
        rows = [refs[id(p)] for p in leaves if id(p) in refs and id(p) not in registered]
        return sorted({kind for (ref, kind) in rows if ref() is not None})


def units_alike(models: Iterable[nn.Module]) -> dict[str, Tensor]:
    """Return name -> whether all rows of a layer's weight are equal, int64 [1] on its device."""
    rows: dict[str, Tensor] = {}
    for model in models:
        for name, module in model.named_modules():
            weight = getattr(module, "weight", None) if isinstance(module, WITH_UNITS) else None
            if type(weight) is nn.Parameter and weight.requires_grad and len(weight) > 1:
                values = weight.detach()
                plain = placement.plain_name(f"{name}.weight" if name else "weight")
                rows[plain] = torch.eq(values, values[:1]).all().reshape(1).long()
    return rows
