"""Parameters that get gradients, and that no called model has registered: layers in a list or dictionary of Python.

In: losses before backward. Out: shapes for a step's record. The graphs of a model's first losses are looked at.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

from torch import nn

from . import placement

NODES = 4096  # nodes of a graph to visit
MOST = 64  # parameters kept


class Strays:
    """All parameters of this process that are in graphs of losses and in no called model."""

    def __init__(self) -> None:
        self._refs: dict[int, weakref.ref[Any]] = {}

    def look(self, loss: Any, models: Sequence[nn.Module]) -> None:
        """Find such parameters in the graph of a loss. Models in FSDP have others in their graphs than they hold."""
        if any(placement.is_fsdp(model) for model in models):
            return
        leaves = _leaves(loss)
        registered = {id(p) for model in models for p in model.parameters()} if leaves else set()
        for leaf in leaves:
            if id(leaf) not in registered and len(self._refs) < MOST:
                self._refs[id(leaf)] = weakref.ref(leaf)

    def with_gradients(self, optimized: set[int]) -> list[list[int]]:
        """Return the shapes of those that have a gradient now and are in no optimizer. `optimized`: ids."""
        alive = [p for key, ref in self._refs.items() if key not in optimized and (p := ref()) is not None]
        return [list(p.shape) for p in alive if p.grad is not None]


def _leaves(loss: Any) -> list[nn.Parameter]:
    """Return the parameters in a graph, in order from the loss; plain tensors, as inputs and learned images, are
    none."""
    queue: deque[Any] = deque([getattr(loss, "grad_fn", None)])
    known: set[Any] = set()
    leaves = []
    while queue and len(known) < NODES:
        node = queue.popleft()
        if node is None or node in known:
            continue
        known.add(node)
        variable = getattr(node, "variable", None)
        if type(variable) is nn.Parameter:
            leaves.append(variable)
        queue.extend(before for before, _ in node.next_functions)
    return leaves
