"""Detects losses that compare every output with every target, although each example has its own target.

In: a loss before backward, and the columns of the batch. Out: whether a loss compares each output with each target.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .graph import NODES, name_of, shape_of

CLOSE = 1e-6
# element-wise operations of one operand, and reductions of their results
ALONE = ("Abs", "Pow", "Sqrt", "Log", "Log1P", "Exp", "Expm1", "Cosh", "Tanh", "Neg", "Softplus", "Sigmoid", "Square")
TOGETHER = ("Mean", "Sum", "Add", "Sub", "Div", "Mul")


def columns(batch: Any) -> list[Tensor]:
    """Return the columns of a batch that have one number for each example."""
    values = batch.values() if isinstance(batch, Mapping) else batch
    if not isinstance(values, list | tuple | type({}.values())):
        return []
    rows = [v.detach() for v in values if isinstance(v, Tensor) and v.dim() == 1 and len(v) > 2]
    return [row for row in rows if not row.is_complex()][:4]


def compares_all(loss: Any, targets: Sequence[Tensor]) -> Tensor | None:
    """Return whether a loss is a function of the differences [N, N] of outputs [N, 1] and a column [N] of the batch, in
    which no pair counts more than another, int64 [1]; None for another loss."""
    waiting: list[tuple[Any, tuple[Any, ...]]] = [(getattr(loss, "grad_fn", None), ())]
    known: set[Any] = set()
    for _ in range(NODES):
        node, above = waiting.pop() if waiting else (None, ())
        if node is None:
            break
        if _is_of_pairs(node):
            values = [_whole(n) for n in reversed(above)]
            value = next((v for v in values if v is not None and list(v.shape) == shape_of(node)), None)
            return None if value is None else _matches(value, targets)
        name = name_of(node)
        before = [n for n, _ in node.next_functions if n is not None]
        weighted = name in ("Mul", "Div") and len(before) < 2 and not is_number(node)
        if node in known or weighted or (name not in ALONE and name not in TOGETHER) or len({*before}) != 1:
            return None
        known.add(node)
        waiting.append((before[0], (*above, node)))
    return None


def _is_of_pairs(node: Any) -> bool:
    shape, before = shape_of(node), [n for n, _ in node.next_functions]
    if name_of(node) != "Sub" or len(shape) != 2 or shape[0] != shape[1] or before.count(None) != 1 or len(before) != 2:
        return False
    under = before[0] or before[1]
    return shape_of(under) == [shape[0], 1] and name_of(under) in ("Addmm", "Mm")


def is_number(node: Any) -> bool:
    """Return whether a product's other factor is a number, not a tensor of weights."""
    other = [getattr(node, name, None) for name in ("_saved_self", "_saved_other")]
    return all(not isinstance(value, Tensor) or value.dim() == 0 for value in other)


def _whole(node: Any) -> Tensor | None:
    value = getattr(node, "_saved_self", None)
    return value.detach() if isinstance(value, Tensor) else None


def _matches(value: Tensor, targets: Sequence[Tensor]) -> Tensor | None:
    row = (value[0] - value[0, 0]).double()
    rows = []
    for target in targets:
        if len(target) == len(row):
            other = target.to(row.device).double()
            other = other - other[0]
            sizes = row.dot(row) * other.dot(other)
            rows.append((sizes > 0) & (row.dot(other).square() >= (1 - CLOSE) * sizes))
    return torch.stack(rows).any().reshape(1).long() if rows else None
