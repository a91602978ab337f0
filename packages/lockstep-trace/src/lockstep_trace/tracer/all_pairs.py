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
# element-wise operations, and reductions of their results
ALONE = (
    "Abs",
    "Pow",
    "Sqrt",
    "Log",
    "Log1P",
    "Exp",
    "Expm1",
    "Cosh",
    "Tanh",
    "Neg",
    "Softplus",
    "Sigmoid",
    "Square",
    "Clamp",
    "ClampMin",
    "ClampMax",
    "Relu",
    "LeakyRelu",
    "LogSigmoid",
)
TOGETHER = ("Mean", "Sum", "Add", "Sub", "Div", "Mul", "Maximum", "Minimum")


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
    waiting: list[Any] = [getattr(loss, "grad_fn", None)]
    known: list[Any] = []
    pairs = None
    for _ in range(NODES):
        node = waiting.pop() if waiting else None
        if node is None:
            break
        if _is_of_pairs(node) and pairs in (None, node):
            pairs = node
            continue
        name, before = name_of(node), [n for n, _ in node.next_functions if n is not None]
        weighted = name in ("Mul", "Div") and len(before) < 2 and not is_number(node)
        weighted |= name in ("Maximum", "Minimum") and len(before) < 2
        weighted |= any(isinstance(getattr(node, bound, None), Tensor) for bound in ("_saved_min", "_saved_max"))
        if weighted or not before or (name not in ALONE and name not in TOGETHER):
            return None
        known.append(node)
        waiting += [n for n in before if all(n is not k for k in known)]
    if pairs is None:
        return None
    value = next((v for n in known if (v := _multiple(n, pairs)) is not None), None)
    return None if value is None else _matches(value, targets)


def _multiple(node: Any, pairs: Any) -> Tensor | None:
    value, under = getattr(node, "_saved_self", None), node.next_functions[0][0]
    while under is not pairs and under is not None and (name_of(under) == "Neg" or name_of(under) in ("Mul", "Div")):
        under = under.next_functions[0][0] if len(under.next_functions) == 1 or is_number(under) else None
    fits = under is pairs and isinstance(value, Tensor) and list(value.shape) == shape_of(pairs)
    return value.detach() if fits and isinstance(value, Tensor) else None


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
