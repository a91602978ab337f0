"""Decides whether a model is in training mode, by its dropout and batch norm modules, and detects batch norms that a
script puts into evaluation mode and that a later `train()` of the model switches back.

In: outermost modules, calls of `Module.train`, and forward passes. Out: a model's mode, and how many batch norms with
frozen weights update their statistics.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .inputs import hash_of
from .placement import BATCH_NORM, DROPOUT, deciding, is_plain_tensor, unwrapped

_THREAD = threading.local()
ALONE, EFFECTIVE = "alone", "effective"


class FrozenNorms:
    """Batch norms put into evaluation mode by a call on themselves or on a part of the model. `ALONE`: no forward pass
    has run in that mode yet. `EFFECTIVE`: a training forward pass has."""

    def __init__(self) -> None:
        self._states: weakref.WeakKeyDictionary[nn.Module, tuple[str, weakref.ref[nn.Module]]] = (
            weakref.WeakKeyDictionary()
        )

    def switched(self, norm: nn.Module, mode: bool, outermost: nn.Module) -> None:
        """Record a change of mode. `outermost`: the module that the script called `train` or `eval` on."""
        state, origin = self._states.get(norm, (None, None))
        if not mode and state is None:
            self._states[norm] = (ALONE, weakref.ref(outermost))
        elif mode and origin is not None and (outermost is norm or origin() is outermost):
            del self._states[norm]

    def forward(self, root: nn.Module, norms: Iterable[nn.Module], gradients: bool) -> None:
        """Record a forward of a model. A mode that an evaluation used first, or that was set on the whole model, does
        not count as freezing."""
        if not self._states:
            return
        for norm in norms:
            state, origin = self._states.get(norm, (None, None))
            if state == ALONE and origin is not None and not norm.training:
                inside = root.training and any(m is origin() for m in root.modules() if m is not root)
                if gradients and inside:
                    self._states[norm] = (EFFECTIVE, origin)
                else:
                    del self._states[norm]

    def undone(self, root: nn.Module, norms: Iterable[nn.Module]) -> tuple[int, int]:
        """Return how many batch norms with frozen weights update their statistics in this forward pass, and how many of
        these had been put into evaluation mode."""
        frozen = [m for m in norms if m.training and _frozen(m)]
        before = [m for m in frozen if (row := self._states.get(m)) is not None and row[1]() is not root]
        return len(frozen), len(before)


def _frozen(norm: Any) -> bool:
    weights = [p for p in (norm.weight, norm.bias) if p is not None]
    return norm.running_mean is not None and bool(weights) and not any(p.requires_grad for p in weights)


def install(hooks: Any) -> None:
    """Wrap `Module.train`, which `eval` calls, too."""
    original = nn.Module.train

    @functools.wraps(original)
    def train(self: nn.Module, mode: bool = True) -> nn.Module:
        if torch.compiler.is_compiling() or hooks.recorder is None:
            return original(self, mode)
        outermost = getattr(_THREAD, "outermost", None)
        if outermost is not None and outermost[1] != mode:
            outermost = None  # an overridden `train` that leaves a part in another mode
        if isinstance(self, BATCH_NORM):
            hooks.guarded(hooks.recorder.norms.switched, self, mode, self if outermost is None else outermost[0])
        before, _THREAD.outermost = getattr(_THREAD, "outermost", None), outermost or (self, mode)
        try:
            return original(self, mode)
        finally:
            _THREAD.outermost = before

    nn.Module.train = train  # type: ignore[method-assign, assignment]


class UnusedNorms:
    """Copies whose weights change between evaluations, and whose batch norms keep their first statistics."""

    def __init__(self) -> None:
        self._hashes: weakref.WeakKeyDictionary[nn.Module, Tensor] = weakref.WeakKeyDictionary()

    def look(self, module: nn.Module) -> Tensor | None:
        """Return [number of batch norms, whether all have their first statistics, whether the first weight has changed
        since the last look], None for a model in training mode, or without batch norms."""
        norms: list[Any] = [m for m in module.modules() if isinstance(m, BATCH_NORM) and m.running_mean is not None]
        first = next(module.parameters(), None)
        if first is None or not is_plain_tensor(first.detach()) or not norms or any(m.training for m in norms):
            return None
        now = hash_of(first)[0]
        before = self._hashes.get(module, now)
        self._hashes[module] = now
        initial = [(m.running_mean == 0).all() & (m.running_var == 1).all() for m in norms]
        return torch.stack([now.new_tensor(len(norms)), torch.stack(initial).all().long(), (now != before).long()])


class ModelModes:
    """Modes of models. The modules that decide are looked up once per model."""

    def __init__(self) -> None:
        self._deciding: weakref.WeakKeyDictionary[nn.Module, list[weakref.ref[nn.Module]]] = weakref.WeakKeyDictionary()

    def trains(self, module: nn.Module) -> bool:
        """Return whether a model is in training mode."""
        return any(m.training for m in self._decide(module))

    def mode(self, module: nn.Module) -> dict[str, Any]:
        """Return the model's mode, and [in training mode, total] for its dropout and batch norm modules."""
        dropout = [m for m in self._decide(module) if isinstance(m, DROPOUT)]
        norms = [m for m in self._decide(module) if isinstance(m, BATCH_NORM)]
        counts = {k: [sum(m.training for m in ms), len(ms)] for k, ms in (("dropout", dropout), ("norms", norms))}
        return {"root": unwrapped(module).training, **counts}

    def norms(self, module: nn.Module) -> list[nn.Module]:
        """Return a model's batch norms."""
        return [m for m in self._decide(module) if isinstance(m, BATCH_NORM)]

    def _decide(self, module: nn.Module) -> list[nn.Module]:
        if module not in self._deciding:
            self._deciding[module] = [weakref.ref(m) for m in deciding(module)]
        return [m for ref in self._deciding[module] if (m := ref()) is not None]
