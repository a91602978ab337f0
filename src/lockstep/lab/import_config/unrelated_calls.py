"""Calls in a script with a Trainer that take no part in its training: libraries that compute, draw, log or read files.

In: a `Script` and a call. Out: whether it can change nothing but objects of such libraries. The closed list of those
libraries is `unrelated_libraries` in `config/foreign_keys/scripts.yaml`.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass, field

from lockstep.lab.import_config.bound_names import root_of
from lockstep.lab.import_config.kinds import COPIES
from lockstep.lab.import_config.script import Script
from lockstep.lab.import_config.table import NAMES

_DEPTH = 20  # of names that are assigned from one another
_VALUES = (
    *(ast.Constant, ast.JoinedStr, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.BinOp, ast.Compare),
    *(ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp),
)
_CHANGES = (*NAMES["numpy_changes"], *NAMES["changing_methods"], "setitem", "insort", "heapify", "update_wrapper")
_OF_LISTS = (*NAMES["changing_methods"], "count", "index", "copy", "insert", "pop", "setdefault", "clear")
_MAKERS = (
    "open",
    "sorted",
    "list",
    "dict",
    "set",
    "tuple",
    "zip",
    "map",
    "filter",
    "enumerate",
    "range",
    "str",
    "iter",
)


@dataclass
class UnrelatedCalls:
    """Finds calls without a part in the training. `takes_part`: whether a node names a model, a tokenizer, settings or
    a Trainer; `touches`: as `takes_part`, and also rows."""

    script: Script
    takes_part: Callable[[ast.AST], bool]
    touches: Callable[[ast.AST], bool]
    wholes: dict[str, ast.expr] = field(init=False)  # name of a part, set by a loop or `a, b = f()` -> the whole

    def __post_init__(self) -> None:
        nodes = list(ast.walk(self.script.tree))
        pairs = [(each.target, each.iter) for each in nodes if isinstance(each, ast.For | ast.comprehension)]
        pairs += [(each.targets[0], each.value) for each in nodes if isinstance(each, ast.Assign)]
        self.wholes = {n.id: whole for target, whole in pairs for n in ast.walk(target) if isinstance(n, ast.Name)}

    def is_unrelated(self, call: ast.Call) -> bool:
        """Return whether a call is of a function of such a library, or of a method of an object created by one."""
        arguments = [*call.args, *(word.value for word in call.keywords)]
        if any(map(self.takes_part, (call.func, *arguments))):
            return False
        name = self.script.origin_of(call.func).rpartition(".")[2]
        if name in _CHANGES and any(map(self.touches, arguments)):
            return False
        if isinstance(call.func, ast.Attribute) and root_of(call.func) not in self.script.imports:
            return self._is_value(call.func.value) or (name in _OF_LISTS and self._is_display(call.func.value))
        return self._is_of_library(call.func)

    def is_value(self, node: ast.expr) -> bool:
        """Return whether a value is new: it holds no part of the training, but may hold copies of rows."""
        return not self.takes_part(node) and self._is_value(node)

    def _is_of_library(self, function: ast.expr) -> bool:
        first = root_of(function)
        again = any(name == first for _, name in self.script.bindings)
        origin = self.script.origin_of(function)
        listed = any(origin == each or origin.startswith(f"{each}.") for each in NAMES["unrelated_libraries"])
        return first in self.script.imports and not again and listed

    def _is_value(self, node: ast.expr | None, depth: int = 0) -> bool:
        if node is None or depth > _DEPTH:
            return False
        if isinstance(node, _VALUES):
            return not self.touches(node)
        if isinstance(node, ast.Name):
            value = self.script.bound(node, last=True)
            return self._is_value(self.wholes.get(node.id) if value is None else value, depth + 1)
        if isinstance(node, ast.Attribute | ast.Subscript | ast.Starred):
            return self._is_value(node.value, depth + 1) or self._is_of_library(node)
        if isinstance(node, ast.IfExp):
            return self._is_value(node.body, depth + 1) and self._is_value(node.orelse, depth + 1)
        if not isinstance(node, ast.Call) or self.takes_part(node):
            return False
        built = (
            isinstance(node.func, ast.Name) and node.func.id in _MAKERS and node.func.id not in self.script.functions
        )
        if built and node.func.id not in ("open", "str", "range"):  # type: ignore[attr-defined]
            return all(not self.touches(each) or self._is_value(each, depth + 1) for each in node.args)
        if isinstance(node.func, ast.Attribute) and (
            node.func.attr in COPIES or self._is_value(node.func.value, depth + 1)
        ):
            return True
        return built or self._is_of_library(node.func)

    def _is_display(self, node: ast.expr) -> bool:
        """Return whether a name is a list or mapping that the script has written out."""
        value = self.script.bound(node, last=True) if isinstance(node, ast.Name) else None
        return isinstance(value, _VALUES) and not self.takes_part(value)
