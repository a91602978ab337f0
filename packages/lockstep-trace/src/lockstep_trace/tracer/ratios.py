"""Detects whether the probability ratios that a loss clips (PPO) are all exactly 1.

In: a loss before backward. Out: one number on its device.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .graph import NODES, name_of, nodes_of

FIRST, MOST = 1, 96  # losses to look at: without such a ratio, and with one


def all_one(loss: Any) -> Tensor | None:
    """Return whether all clipped ratios in the graph of a loss are 1, int64 [1]; None if it has none."""
    for node in nodes_of(loss, NODES):
        before = [n for n, _ in node.next_functions]
        if name_of(node) == "Clamp" and before and before[0] is not None:
            one = _is_one(before[0])
            if one is not None:
                return one.reshape(1).long()
    return None


def _is_one(node: Any) -> Tensor | None:
    """Return whether exp(a - b), or a / b, is 1 everywhere; None for another node."""
    inner = next((n for n, _ in node.next_functions if n is not None), None)
    if name_of(node) == "Exp" and inner is not None and name_of(inner) == "Sub":
        ratio = node._saved_result.detach()
        return (ratio == 1).all()
    if name_of(node) == "Div" and isinstance(getattr(node, "_saved_other", None), Tensor):
        one, other = node._saved_self, node._saved_other
        if isinstance(one, Tensor) and one.shape == other.shape and one.dim():
            return (one.detach() == other.detach()).all()
    return None
