"""Finds parameters with gradients that no called model has registered: layers in a Python list or dictionary.

In: losses before backward. Out: shapes for a step's record. Only the graphs of a model's first losses are searched.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from . import placement
from .graph import nodes_of

NODES = 4096  # nodes of a graph to visit
MOST = 64  # parameters kept
LARGEST = 1 << 16  # most elements of a parameter whose first value is kept


class Strays:
    """Parameters of this process that are in graphs of losses but in no called model."""

    def __init__(self) -> None:
        self._refs: dict[int, weakref.ref[Any]] = {}
        self._bare: dict[int, tuple[str, Tensor]] = {}  # id -> (place in a model's list, first value)

    def look(self, loss: Any, models: Sequence[nn.Module]) -> list[nn.Parameter]:
        """Record unregistered parameters in the graph of a loss, and return all parameters in it; none with FSDP, whose
        graphs have other parameters than the model."""
        if any(placement.is_fsdp(model) for model in models):
            return []
        leaves = _leaves(loss)
        registered = {id(p) for model in models for p in model.parameters()} if leaves else set()
        for leaf in leaves:
            if id(leaf) not in registered and len(self._refs) < MOST:
                self._refs[id(leaf)] = weakref.ref(leaf)
                where = _place(leaf, models) if leaf.numel() <= LARGEST else ""
                if where:
                    self._bare[id(leaf)] = where, leaf.detach().clone()
        return leaves

    def with_gradients(self, optimized: set[int]) -> list[list[int]]:
        """Return the shapes of recorded parameters that have a gradient and are in no optimizer. `optimized`: ids."""
        alive = [p for key, ref in self._refs.items() if key not in optimized and (p := ref()) is not None]
        return [list(p.shape) for p in alive if p.grad is not None]

    def bare(self, optimized: set[int]) -> list[tuple[str, list[int], Tensor]]:
        """Return (place, shape, whether it has changed) of each parameter in a model's list that has a gradient and is
        in no optimizer."""
        rows = [(ref(), *self._bare[key]) for key, ref in self._refs.items() if key in self._bare]
        return [
            (where, list(p.shape), (p.detach() != first).any().reshape(1).long())
            for p, where, first in rows
            if p is not None and p.grad is not None and id(p) not in optimized and p.shape == first.shape
        ]


def _place(parameter: Any, models: Sequence[nn.Module]) -> str:
    for model in models:
        for module in model.modules():
            for name, value in vars(module).items():
                values = value.values() if isinstance(value, dict) else value
                if isinstance(value, list | tuple | dict) and any(each is parameter for each in values):
                    return f"{type(module).__name__}.{name}"
    return ""


def _leaves(loss: Any) -> list[nn.Parameter]:
    leaves = []
    for node in nodes_of(loss, NODES):
        variable = getattr(node, "variable", None)
        if type(variable) is nn.Parameter:
            leaves.append(variable)
    return leaves
