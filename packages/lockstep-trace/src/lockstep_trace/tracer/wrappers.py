"""Optimizers inside other optimizers, as in ZeroRedundancyOptimizer, Accelerate, Lightning, DeepSpeed and Lookahead.

In: an optimizer, or a wrapper of one. Out: the optimizers that it holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

DEPTH = 6  # most nested wrappers


def nested(optimizer: Any) -> list[Any]:
    """Return an optimizer and those that it holds in its attributes, outermost first."""
    rows = [] if optimizer is None else [optimizer]
    for _ in range(DEPTH):
        known = {id(row) for row in rows}
        new = {id(o): o for row in rows for o in _attributes(row) if id(o) not in known and is_optimizer(o)}
        if not new:
            break
        rows += new.values()
    return rows


def inside(optimizer: Any) -> set[int]:
    """Return the ids of an optimizer and of those that it holds."""
    return {id(row) for row in nested(optimizer)}


def is_optimizer(value: Any) -> bool:
    """Return whether a value is a torch optimizer, or has parameter groups and a `step` like one."""
    if isinstance(value, torch.optim.Optimizer):
        return True
    if isinstance(value, torch.nn.Module) or not callable(getattr(type(value), "step", None)):
        return False
    return isinstance(getattr(value, "param_groups", None), list)


def stepping(optimizer: Any) -> Any:
    """Return the outermost optimizer whose step torch's hooks see, or the innermost one if they see none."""
    rows = nested(optimizer)
    hooked = (row for row in rows if getattr(getattr(type(row), "step", None), "hooked", False))
    return next(hooked, rows[-1])


def parameters_of(optimizer: Any) -> set[int]:
    """Return the ids of an optimizer's parameters."""
    return {id(p) for group in getattr(optimizer, "param_groups", ()) for p in group["params"]}


def _attributes(value: Any) -> Iterator[Any]:
    for attribute in list(getattr(value, "__dict__", {}).values()):
        yield attribute
        if isinstance(attribute, list | tuple) and len(attribute) < 64:
            yield from attribute
        elif isinstance(attribute, Mapping) and type(attribute) is dict and len(attribute) < 64:
            yield from attribute.values()
