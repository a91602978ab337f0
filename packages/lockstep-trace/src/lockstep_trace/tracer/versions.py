"""Detects modified tensors by torch's version counters and object identity.

In: parameters and their gradients. Out: references that show later whether a gradient is unchanged.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from . import placement

FIRST = 8  # parameters to check

GradientVersion = tuple[weakref.ref[Any], weakref.ref[Any], int]  # (parameter, its gradient, version)


def gradient_versions(parameters: Iterable[Any]) -> list[GradientVersion]:
    """Return the gradient versions of the first `FIRST` parameters with gradients."""
    references = ((weakref.ref(p), weakref.ref(p.grad), version(p.grad)) for p in parameters if p.grad is not None)
    return list(itertools.islice(references, FIRST))


def untouched(row: GradientVersion) -> Tensor | None:
    """Return the gradient if it is the same, unmodified object, else None."""
    parameter, grad, count = row[0](), row[1](), row[2]
    alike = parameter is not None and grad is not None and parameter.grad is grad and version(grad) == count
    return grad if alike else None


def has_gradient(row: GradientVersion) -> bool:
    """Return whether a parameter still has a gradient."""
    parameter = row[0]()
    return parameter is not None and parameter.grad is not None


def touched(rows: Sequence[GradientVersion]) -> bool:
    """Return whether any of the gradients was modified or replaced."""
    return any(untouched(row) is None for row in rows)


def local_shape(parameter: Any) -> Any:
    """Return the shape of elementwise optimizer state for a parameter."""
    return parameter.tensor.shape if isinstance(parameter, placement.FlatPart) else parameter.shape


def version(tensor: Any) -> int:
    """Return torch's version counter of a tensor. Writes through `tensor.data` are not counted.

    A DTensor counts writes through itself, and its part those of FSDP through the part; `_foreach` writes count in
    neither."""
    counted = (tensor, tensor.to_local()) if placement.is_dtensor(tensor) else (tensor,)
    return sum(int(getattr(tensor, "_version", 0)) for tensor in counted)


def written(parameter: Any) -> tuple[int, int]:
    """Return (version, address) of a parameter, which change when its values are modified or replaced."""
    if isinstance(parameter, placement.FlatPart):
        parameter = parameter.tensor
    plain = isinstance(parameter, Tensor) and not placement.is_dtensor(parameter)
    return version(parameter), parameter.data_ptr() if plain else 0
