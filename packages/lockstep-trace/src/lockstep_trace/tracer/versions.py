"""Whether anybody wrote to a tensor: counts of writes that torch keeps, and identities.

In: parameters and their gradients. Out: references that tell later whether the gradient is still the one it was.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from . import placement

FIRST = 8  # parameters that are looked at

GradientVersion = tuple[weakref.ref[Any], weakref.ref[Any], int]  # of a parameter, of its gradient, count of writes


def gradient_versions(parameters: Iterable[Any]) -> list[GradientVersion]:
    """Of the first few parameters with gradients, what tells whether the gradient is written to."""
    references = ((weakref.ref(p), weakref.ref(p.grad), version(p.grad)) for p in parameters if p.grad is not None)
    return list(itertools.islice(references, FIRST))


def untouched(row: GradientVersion) -> Tensor | None:
    """The gradient, if it is the same object and nobody has written to it since; None otherwise."""
    parameter, grad, count = row[0](), row[1](), row[2]
    alike = parameter is not None and grad is not None and parameter.grad is grad and version(grad) == count
    return grad if alike else None


def has_gradient(row: GradientVersion) -> bool:
    """Whether a parameter still has a gradient."""
    parameter = row[0]()
    return parameter is not None and parameter.grad is not None


def touched(rows: Sequence[GradientVersion]) -> bool:
    """Whether any of the gradients was written to or replaced."""
    return any(untouched(row) is None for row in rows)


def local_shape(parameter: Any) -> Any:
    """What a state of its optimizer has as its shape where it holds a number for each element."""
    return parameter.tensor.shape if isinstance(parameter, placement.FlatPart) else parameter.shape


def version(tensor: Any) -> int:
    """The count of writes that torch keeps; `tensor.data` has one of its own, so writes through it do not count."""
    if placement.is_dtensor(tensor):
        tensor = tensor.to_local()
    return int(getattr(tensor, "_version", 0))


def written(parameter: Any) -> tuple[int, int]:
    """What changes where a parameter's values do: its count of writes, and its address."""
    if isinstance(parameter, placement.FlatPart):
        parameter = parameter.tensor
    plain = isinstance(parameter, Tensor) and not placement.is_dtensor(parameter)
    return version(parameter), parameter.data_ptr() if plain else 0
