"""Follows scripts without an optimizer, whose statements write to parameters, and results of `torch.autograd.grad`.

In: losses before backward, gradients after it. Out: whether parameters were written to since, which is a step of
`ByHand`, a stand-in for an optimizer; whether a loss has a term made of a gradient that has no graph.
"""

from __future__ import annotations

import ast
import functools
import linecache
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .graph import KINDS, name_of, nodes_of
from .inputs import wrapped
from .lifetimes import _sample
from .placement import is_plain_tensor

LEAVES = 4096  # nodes of a graph to visit
LOOKS = 8  # first losses


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


class ConstantTerms:
    """Sums in a script's files of which a part is computed from `torch.autograd.grad`'s result without a graph."""

    def __init__(self) -> None:
        self._sums: dict[str, list[Any]] = {}
        self._file = ""  # that has called it since the last backward

    def called(self, file: str) -> None:
        self._file = file
        if file not in self._sums:
            text = "".join(linecache.getlines(file)) if "site-packages" not in file else ""
            try:
                self._sums[file] = list(_sums(ast.parse(text)))
            except (SyntaxError, ValueError, RecursionError):
                self._sums[file] = []

    def in_loss(self, loss: Any) -> bool:
        """Return whether a loss is one of these sums, and the part has no graph in it."""
        rows, self._file = self._sums.get(self._file, ()), ""
        node = getattr(loss, "grad_fn", None) if rows else None
        while node is not None and name_of(node) in ("Div", "Mul"):  # by the number of micro-batches, for one
            node = next((n for n, _ in node.next_functions if n is not None), None)
        return node is not None and any(_is_sum(node, tree) for tree in rows)


def _is_sum(node: Any, tree: Any) -> bool:
    if isinstance(tree, bool):
        return not tree or node is None
    sides = [n for n, _ in getattr(node, "next_functions", ())]
    return len(sides) == 2 and name_of(node) in ("Add", "Sub") and all(map(_is_sum, sides, tree))


def _sums(tree: ast.Module) -> Iterator[Any]:
    """Yield sums as pairs of pairs; of each part, whether it is computed from a gradient without a graph."""
    scopes: list[Any] = [tree, *(n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef))]
    sources: set[str] = set()  # functions that return such a part
    names: set[str] = set()

    def is_part(value: ast.AST) -> bool:
        calls = [n for n in ast.walk(value) if isinstance(n, ast.Call)]
        owners = {ast.unparse(c.func).rpartition(".")[2]: c for c in calls}
        graph = "grad" in owners and any(k.arg == "create_graph" for k in owners["grad"].keywords)
        own = {n.id for n in ast.walk(value) if isinstance(n, ast.Name)}
        return ("grad" in owners and not graph) or bool(sources & set(owners) or names & own)

    def parts(value: ast.AST) -> Any:
        if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add | ast.Sub):
            return parts(value.left), parts(value.right)
        return is_part(value)

    for last in (False, False, True):
        for scope in scopes:
            names.clear()
            for n in (n for row in scope.body for n in _in_order(row)):
                value = getattr(n, "value", None)
                if isinstance(n, ast.Assign | ast.AugAssign | ast.Return) and value is not None:
                    pairs = (False, parts(value)) if isinstance(n, ast.AugAssign) else parts(value)
                    if last and "True" in repr(pairs) and not isinstance(pairs, bool):
                        yield pairs
                    if isinstance(n, ast.Return):
                        sources |= {scope.name} if is_part(value) else set()
                    elif is_part(value):
                        targets = n.targets if isinstance(n, ast.Assign) else [n.target]
                        names |= {e.id for t in targets for e in ast.walk(t) if isinstance(e, ast.Name)}


def _in_order(row: ast.AST) -> Iterator[ast.AST]:
    yield row
    if not isinstance(row, ast.FunctionDef):
        for n in ast.iter_child_nodes(row):
            yield from _in_order(n)


def install(hooks: Any) -> None:
    original = torch.autograd.grad

    @functools.wraps(original)
    def grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = hooks.recorder
        if recorder is None or torch.compiler.is_compiling() or hooks.backward_depth:
            return original(outputs, inputs, *args, **kwargs)
        rows = [outputs] if isinstance(outputs, Tensor) else list(outputs)
        loss = rows[0] if len(rows) == 1 else None
        leaves = [inputs] if isinstance(inputs, Tensor) else list(inputs)
        plain = loss is not None and is_plain_tensor(loss) and not any(wrapped(t) for t in (loss, *leaves))
        own = plain and not recorder.optimizers_made and all(t.is_leaf for t in leaves)
        graph = kwargs.get("create_graph", args[2] if len(args) > 2 else False)
        own = bool(own) and not graph and loss is not None and loss.numel() == 1
        if own:
            hooks.guarded(recorder.backward, loss, False, False)
        result = original(outputs, inputs, *args, **kwargs)
        if own:
            hooks.guarded(recorder.by_hand.arrived, result)
        looks = plain and not graph and recorder.loss_looks <= LOOKS and torch.is_grad_enabled()
        if looks and not any(isinstance(t, nn.Parameter) for t in leaves):
            hooks.guarded(recorder.constant_terms.called, sys._getframe(1).f_code.co_filename)
        return result

    torch.autograd.grad = grad
