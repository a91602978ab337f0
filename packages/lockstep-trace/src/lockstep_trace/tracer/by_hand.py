"""Follows scripts without an optimizer, whose statements write to parameters.

In: losses before backward, gradients after it. Out: whether parameters were written to since, which is a step of
`ByHand`, a stand-in for an optimizer.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .graph import KINDS, name_of, nodes_of
from .inputs import wrapped
from .lifetimes import _sample
from .placement import is_plain_tensor

LEAVES = 4096  # nodes of a graph to visit


class ByHand:
    """Parameters that statements of the script update, as a group of an optimizer."""

    kind = "updates by hand"

    def __init__(self) -> None:
        self.param_groups: list[dict[str, Any]] = [{"params": []}]
        self.state: dict[Any, Any] = {}
        self._rows: list[tuple[Any, Tensor, Tensor | None]] = []  # parameter, samples of it and of its gradient
        self._errors = True  # losses are all torch's functions of errors
        self.ascends = False

    def reads(self, loss: Any, models: Sequence[nn.Module]) -> bool:
        """Record the parameters that a loss depends on; return whether others of their shapes were there before."""
        nodes = list(nodes_of(loss, LEAVES))
        self._errors = bool(nodes) and name_of(nodes[0]) in KINDS
        leaves = [v for n in nodes if isinstance(v := getattr(n, "variable", None), Tensor)]
        leaves = [v for v in leaves if is_plain_tensor(v) and v.is_floating_point() and not wrapped(v) and v.numel()]
        own = {id(p) for model in models for p in model.parameters()}
        if models:  # an input may be a leaf, too
            shapes = {p.shape for model in models for p in model.parameters()}
            rows = [v for v in leaves if id(v) in own]
            leaves = rows or [v for v in leaves if v.shape in shapes]
        old = self.param_groups[0]["params"]
        self.param_groups[0]["params"] = leaves
        anew = bool(old) and all(a is not b for a in old for b in leaves)
        return anew and sorted(map(str, (v.shape for v in old))) == sorted(map(str, (v.shape for v in leaves)))

    def arrived(self, gradients: Iterable[Tensor | None] | None = None) -> None:
        """Remember parameters and gradients after backward."""
        params = self.param_groups[0]["params"]
        grads = [p.grad for p in params] if gradients is None else [None] * len(params)
        plain = [g is not None and g.layout == torch.strided for g in grads]
        self._rows = [
            (p, _sample(p), _sample(g) if there else None) for p, g, there in zip(params, grads, plain, strict=True)
        ]

    def wrote(self) -> bool:
        """Return whether parameters have changed since; `ascends`: along their gradients, of a mean of errors."""
        rows = [(_sample(p), before, g) for p, before, g in self._rows]
        changes = [(now - before, g) for now, before, g in rows if not torch.equal(now, before)]
        known = [(d.double(), g.double()) for d, g in changes if g is not None and bool(g.any())]
        along = [bool(d.dot(g) > 0.999 * d.norm() * g.norm()) for d, g in known]
        self.ascends = self._errors and bool(along) and len(known) == len(changes) and all(along)
        self._rows = [] if changes else self._rows
        return bool(changes)


def install(hooks: Any) -> None:
    original = torch.autograd.grad

    @functools.wraps(original)
    def grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = hooks.recorder
        outputs, inputs = (tuple(v) if isinstance(v, Iterator) else v for v in (outputs, inputs))
        rows, leaves = ([v] if isinstance(v, Tensor) else list(v) for v in (outputs, inputs))
        loss: Any = rows[0] if len(rows) == 1 else None
        own = recorder is not None and not (torch.compiler.is_compiling() or hooks.backward_depth)
        own = own and not recorder.optimizers_made and not kwargs.get("create_graph", args[2] if len(args) > 2 else 0)
        own = own and is_plain_tensor(loss) and loss.numel() == 1
        own = own and all(isinstance(t, Tensor) and t.is_leaf for t in leaves)
        own = own and not any(wrapped(t) for t in (loss, *leaves))
        if own:
            hooks.guarded(recorder.backward, loss, False, False)
        result = original(outputs, inputs, *args, **kwargs)
        if own:
            hooks.guarded(recorder.by_hand.arrived, result)
        return result

    torch.autograd.grad = grad
