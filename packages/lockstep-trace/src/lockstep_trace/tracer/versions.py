"""Detects modified tensors by torch's version counters and object identity.

In: parameters and their gradients. Out: references that show later whether a gradient is unchanged.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
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

    A DTensor counts its own writes, and its local tensor those of FSDP. Neither counts writes of `_foreach` functions,
    which `watch_foreach` counts."""
    if not placement.is_dtensor(tensor):
        return int(getattr(tensor, "_version", 0))
    ref, writes = _WRITES.get(id(tensor), (None, 0))
    counted = sum(int(getattr(part, "_version", 0)) for part in (tensor, tensor.to_local()))
    return counted + (writes if ref is not None and ref() is tensor else 0)


_WRITES: dict[int, tuple[weakref.ref[Any], int]] = {}  # writes of `_foreach` functions to DTensors, by id


def watch_foreach() -> None:
    """Count writes of torch's `_foreach` functions to DTensors from now on."""
    for name in dir(torch):
        original = getattr(torch, name) if name.startswith("_foreach_") and name.endswith("_") else None
        if original is not None and not hasattr(original, "lockstep_wrapped"):
            setattr(torch, name, _counting(original))


def _counting(original: Any) -> Any:
    @functools.wraps(original)
    def write(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(tensors, *args, **kwargs)
        if not torch.compiler.is_compiling():
            for tensor in tensors:
                if placement.is_dtensor(tensor):
                    _wrote(tensor)
        return result

    write.lockstep_wrapped = True  # type: ignore[attr-defined]
    return write


def _wrote(tensor: Any) -> None:
    key = id(tensor)
    ref, writes = _WRITES.get(key, (None, 0))
    if ref is None or ref() is not tensor:
        ref, writes = weakref.ref(tensor, lambda old: _forget(key, old)), 0
    _WRITES[key] = ref, writes + 1


def _forget(key: int, ref: Any) -> None:
    if key in _WRITES and _WRITES[key][0] is ref:
        del _WRITES[key]


def written(parameter: Any) -> tuple[int, int]:
    """Return (version, address) of a parameter, which change when its values are modified or replaced."""
    if isinstance(parameter, placement.FlatPart):
        parameter = parameter.tensor
    plain = isinstance(parameter, Tensor) and not placement.is_dtensor(parameter)
    return version(parameter), parameter.data_ptr() if plain else 0
