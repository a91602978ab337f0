"""Measures the distance between a trained model and a copy that no optimizer holds: an average, a target or a teacher.

In: models before a step. Out: [name, distance, update] of each copy: its distance from the trained model, and the
distance that the trained model has moved since the previous step. Measured at a few early steps, without waiting for
the device.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from . import placement

FIRST, LAST = 4, 9  # steps before which distances are measured

Pair = tuple[weakref.ref[Any], weakref.ref[Any]]  # (the copy's, the trained model's)


class Averages:
    """Copies of trained models in this process."""

    def __init__(self) -> None:
        self.called: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # without gradients, in no optimizer
        self._pairs: dict[str, list[Pair]] = {}
        self._before: dict[str, list[Tensor]] = {}

    def measured(self, step: int, roots: Sequence[nn.Module], optimized: set[int]) -> list[tuple[str, Tensor]]:
        """Return (name, float64 [2]: distance, update) of each copy."""
        if step == FIRST - 1:
            self._pairs = _pairs(roots, [m for m in self.called if all(m is not r for r in roots)], optimized)
        rows = []
        for name, pairs in self._pairs.items() if FIRST - 1 <= step <= LAST else ():
            copies, trained = [a() for a, _ in pairs], [b() for _, b in pairs]
            if any(t is None for t in (*copies, *trained)):
                continue
            values = [t.detach() for t in trained if t is not None]
            if step >= FIRST:
                distance = _norm(torch._foreach_sub([t.detach() for t in copies if t is not None], values))
                rows.append((name, torch.stack([distance, _norm(torch._foreach_sub(values, self._before[name]))])))
            self._before[name] = [v.clone() for v in values]
        if step >= LAST:
            self._pairs, self._before = {}, {}
        return rows


def _norm(tensors: Any) -> Tensor:
    return torch.stack(torch._foreach_norm(tensors)).double().norm()


def _pairs(roots: Sequence[nn.Module], others: Iterable[nn.Module], optimized: set[int]) -> dict[str, list[Pair]]:
    named = [(placement.plain_name(n), p) for root in roots for n, p in root.named_parameters()]
    named = [(n, p) for n, p in named if type(p) is nn.Parameter and p.dtype == torch.float32]
    trained = [(n, p) for n, p in named if id(p) in optimized]
    copies: dict[str, list[tuple[str, Any]]] = {}
    for name, parameter in named:
        if id(parameter) not in optimized and not parameter.requires_grad:
            part, _, rest = name.partition(".")
            copies.setdefault(part, []).append((f".{rest}", parameter))
    for other in others:
        rows = [(placement.plain_name(n), p) for n, p in other.named_parameters() if id(p) not in optimized]
        copies[type(placement.unwrapped(other)).__name__] = rows
    pairs: dict[str, list[Pair]] = {}
    for name, rows in copies.items():
        matched = [(p, _matching(n, p, trained)) for n, p in rows]
        if len(rows) > 1 and all(other is not None for _, other in matched):
            pairs[name] = [(weakref.ref(p), weakref.ref(other)) for p, other in matched]
    return pairs


def _matching(name: str, parameter: Any, trained: Sequence[tuple[str, Any]]) -> Any:
    fits = [
        p
        for n, p in trained
        if p.shape == parameter.shape
        and p.device == parameter.device
        and p.dtype == parameter.dtype
        and (f".{n.partition('.')[2]}" if name.startswith(".") else n) == name
    ]
    return fits[0] if len(fits) == 1 else None
