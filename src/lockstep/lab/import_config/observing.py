"""Methods of a LightningModule that Lightning calls beside training, and those that they call.

In: a method and the names that hold its module's parts. Out: the first statement or call that may do more than read,
compute and log. What is allowed is listed; everything else is returned.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from lockstep.lab.import_config.bound_names import names_in, root_of
from lockstep.lab.import_config.script import Script
from lockstep.lab.import_config.table import NAMES

_REFUSED = ast.Delete | ast.Global | ast.Nonlocal | ast.Raise | ast.Yield | ast.YieldFrom | ast.Await | ast.NamedExpr
_CHANGING = ("setattr", "delattr", "exec", "eval", "vars", "exit", "quit")


def first_effect(script: Script, kind: ast.ClassDef, method: Any) -> ast.AST | None:
    """Return the first node of a method that may change what is trained, or None."""
    itself = method.args.args[0].arg if method.args.args else "self"
    return next(Observing(script, kind, itself, method).effects(), None)


def sets_part(kind: ast.ClassDef, node: ast.AST, itself: str) -> bool:
    """Return whether a node replaces a method of the module, or sets an attribute that affects training. `itself`: name
    of the module in its method."""
    if not isinstance(node, ast.Attribute) or ast.unparse(node.value) != itself:
        return False
    if node.attr in ("__dict__", "__class__"):
        return True
    methods = {each.name for each in kind.body if isinstance(each, ast.FunctionDef)}
    return not isinstance(node.ctx, ast.Load) and node.attr in {*parts_of(kind), *methods, *NAMES["lightning_acts"]}


class Observing:
    """A check of one method. `parts`: attributes that hold what is trained; `aliases`: names of a part in it."""

    def __init__(
        self, script: Script, kind: ast.ClassDef, itself: str, method: Any, parts: set[str] | None = None
    ) -> None:
        self.script, self.itself, self.method = script, itself, method
        self.own = {each.name for each in kind.body if isinstance(each, ast.FunctionDef)}
        self.parts = set(parts_of(kind)) if parts is None else parts
        self.aliases: set[str] = set()
        for node in ast.walk(method):
            value, target = getattr(node, "value", None), getattr(node, "targets", [None])[0]
            if isinstance(node, ast.For | ast.comprehension):
                value, target = node.iter, node.target
            if target is not None and value is not None and self.is_part(value) and not self._is_count(value):
                self.aliases |= names_in(target)

    def effects(self) -> Iterator[ast.AST]:
        for node in ast.walk(self.method):
            called = isinstance(node, ast.Call) and not self._is_quiet(node)
            sets = isinstance(node, ast.Attribute | ast.Subscript) and self._changes(node)
            grows = isinstance(node, ast.AugAssign) and self.is_part(node.target)
            if isinstance(node, _REFUSED) or called or sets or grows:
                yield node

    def _changes(self, node: ast.Attribute | ast.Subscript) -> bool:
        """Return whether a node sets an attribute or entry of a part, or reads one that can change the training."""
        if isinstance(node.ctx, ast.Load):
            return isinstance(node, ast.Attribute) and self._reaches(node)
        own = self._is_own(node) and getattr(node, "attr", "") not in self.own | names_of_lightning()
        return self.is_part(node) or not (own or isinstance(node, ast.Subscript))

    def _is_own(self, node: ast.expr) -> bool:
        while isinstance(node, ast.Subscript):
            node = node.value
        return isinstance(node, ast.Attribute) and ast.unparse(node.value) == self.itself

    def _first(self, node: ast.AST) -> str:
        """Return `model` of `self.model.config`."""
        first = ""
        while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
            first = node.attr if isinstance(node, ast.Attribute) else first
            node = node.func if isinstance(node, ast.Call) else node.value
        return first if isinstance(node, ast.Name) and node.id == self.itself else ""

    def is_part(self, node: ast.AST) -> bool:
        """Return whether an expression is the module itself, a part of it that is trained, or of its Trainer."""
        if isinstance(node, ast.Name):
            return node.id == self.itself or node.id in self.aliases
        first, inner = self._first(node), node
        while isinstance(inner, ast.Attribute | ast.Subscript | ast.Call):
            if isinstance(inner, ast.Call) and getattr(inner.func, "attr", "") not in NAMES["lightning_parts"]:
                return False  # what the model has computed
            inner = inner.func if isinstance(inner, ast.Call) else inner.value
        return root_of(node) in self.aliases or first in self.parts or first in NAMES["lightning_parts"]

    def _is_count(self, node: ast.AST) -> bool:
        """Return whether an expression reads a number of the Trainer, such as `self.trainer.world_size`."""
        text = ast.unparse(node)
        return text in (f"{self.itself}.trainer.{each}" for each in NAMES["lightning_counts"])

    def _reaches(self, node: ast.Attribute) -> bool:
        """Return whether an attribute is one of Lightning's through which a method can change the training."""
        if ast.unparse(node.value) == f"{self.itself}.trainer":
            return node.attr not in NAMES["lightning_reads"]
        return ast.unparse(node.value) == self.itself and node.attr in NAMES["lightning_acts"]

    def _is_quiet(self, call: ast.Call) -> bool:
        arguments = [*call.args, *(word.value for word in call.keywords)]
        name = self.script.origin_of(call.func)
        last = name.rpartition(".")[2]
        if name in _CHANGING or last in NAMES["seeds"] or last.endswith("_") or name in ("sys.exit", "os._exit"):
            return False
        if any(isinstance(each, ast.Name) and self.is_part(each) for each in arguments):
            return False
        if self.is_part(call.func):
            plain = isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) == self.itself
            whole = plain and (last in self.parts or last in self.own)
            return whole or ast.unparse(call.func) == self.itself or last in NAMES["observing_of_parts"]
        if isinstance(call.func, ast.Attribute) and root_of(call.func) not in self.script.imports:
            listed = (*NAMES["quiet_methods"], *NAMES["observing"], *NAMES["rows_methods"])
            own = ast.unparse(call.func.value) == self.itself
            return own or last in listed
        return not name.startswith(("torch.nn.init.", "torch.set_", "torch.nn.utils."))


def names_of_lightning() -> set[str]:
    """Return the names of methods and attributes that Lightning itself calls or reads of a module."""
    lists = ("lightning_acts", "lightning_replaces", "lightning_hooks", "lightning_inner", "lightning_methods")
    return {name for each in lists for name in NAMES[each]} - {"example_input_array"}


def parts_of(kind: ast.ClassDef) -> Iterator[str]:
    """Yield the attributes that `training_step`, `configure_optimizers` and `forward` read, but for metrics."""
    for method in (each for each in kind.body if isinstance(each, ast.FunctionDef)):
        if method.name in ("training_step", "configure_optimizers", "forward", "train_dataloader"):
            for node in ast.walk(method):
                if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self":
                    yield node.attr
