"""Names that share memory with what is trained: weights, gradients, entries of the optimizer, and containers of them.

In: a `Script`, and the kind of an expression. Out: a gap for each statement that changes such an object in place and
looks like arithmetic on values of the script's own: `grads["w"] *= 0.5` after `grads["w"] = p.grad`.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from typing import Any

from lockstep.lab.import_config.script import Script, code_of
from lockstep.lab.import_config.table import NAMES, RunDraft

_WHY = "it may change a weight, a gradient or the optimizer in place, because it shares their memory: clone() it first"
_ADDING = ("append", "add", "extend", "insert", "update", "setdefault", "appendleft")
_CONTAINERS = ast.List | ast.Tuple | ast.Set | ast.Dict | ast.ListComp | ast.SetComp | ast.DictComp
_FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef
Key = tuple[int, str]  # scope and name; 0 and `.attribute` of any object


def refuse(script: Script, draft: RunDraft, kind: Callable[[ast.expr], str | None], later: set[int]) -> None:
    """Add the gaps. `later`: ids of nodes after the training. A line that is refused already is not named again."""
    sharing = _Sharing(script, kind)
    for node in ast.walk(script.tree):
        if id(node) in later or not isinstance(node, ast.AugAssign | ast.Assign) or not sharing.changes(node):
            continue
        line = f"line {node.lineno}:"
        if not any(gap.name.startswith(line) and gap.decides for gap in draft.gaps):
            draft.unclear(f"{line} {code_of(node)}", _WHY)


class _Sharing:
    """The names and attributes of a script that may hold such an object; each pass follows one more assignment."""

    def __init__(self, script: Script, kind: Callable[[ast.expr], str | None]) -> None:
        self.script, self.kind = script, kind
        self.keys: set[Key] = set()
        self.returning: set[str] = set()  # functions and methods of the script that return one
        methods = [line for of in script.classes.values() for line in of.body if isinstance(line, _FUNCTION)]
        self.functions: dict[str, list[Any]] = {name: [*each] for name, each in script.namesakes.items()}
        for each in methods:
            self.functions.setdefault(each.name, []).append(each)
        before = -1
        while before < (before := len(self.keys) + len(self.returning)):
            for node in ast.walk(script.tree):
                self._pass_on(node)

    def changes(self, node: ast.AugAssign | ast.Assign) -> bool:
        """Return whether a statement changes in place an object that may be shared."""
        if isinstance(node, ast.Assign):  # an entry of an entry: weights["w"][0] = 0
            entries = [each.value for each in node.targets if isinstance(each, ast.Subscript)]
            return any(isinstance(each, ast.Subscript) and self.shares(each) for each in entries)
        holds = isinstance(node.target, ast.Name) and self._is_container(node.target)
        target = node.target.value if isinstance(node.target, ast.Subscript) else node.target
        return not holds and self.shares(target)

    def _pass_on(self, node: ast.AST) -> None:
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                self._pair(target, node.value)
        elif isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
            self._bind(node.target, self.shares(node.iter))
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            self._bind(node.optional_vars, self.shares(node.context_expr))
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name | ast.Attribute):
            adds = isinstance(node.value, _CONTAINERS) or self._is_container(node.target)
            self._bind(node.target, adds and self.shares(node.value))
        elif isinstance(node, ast.Return) and node.value is not None and self.shares(node.value):
            self.returning.add(getattr(self.script.scopes.get(id(node)), "name", ""))
        elif isinstance(node, ast.Call):
            self._call(node)

    def _pair(self, target: ast.expr, value: ast.expr | None) -> None:
        targets = target.elts if isinstance(target, ast.Tuple | ast.List) else []
        values = value.elts if isinstance(value, ast.Tuple | ast.List) else []
        if targets and len(targets) == len(values):
            for each, of in zip(targets, values, strict=True):
                self._pair(each, of)
        elif value is not None:
            self._bind(target, self.shares(value))

    def _bind(self, target: ast.expr, shares: bool) -> None:
        for each in ast.walk(target) if shares and isinstance(target, ast.Tuple | ast.List) else [target]:
            holder: ast.AST = each
            while isinstance(holder, ast.Subscript | ast.Starred):
                holder = holder.value
            if shares and isinstance(holder, ast.Name | ast.Attribute):
                self.keys.add(self._key(holder))

    def _call(self, call: ast.Call) -> None:
        function = call.func
        if isinstance(function, ast.Attribute) and function.attr in _ADDING:
            self._bind(function.value, any(map(self.shares, [*call.args, *(word.value for word in call.keywords)])))
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        own = self.script.classes.get(name)
        called = self.functions.get("__init__" if own is not None else name, ())
        for each in called:
            if own is None or each in own.body:
                self._arguments(each, call, own is not None or isinstance(function, ast.Attribute))

    def _arguments(self, function: Any, call: ast.Call, method: bool) -> None:
        names = [each.arg for each in (*function.args.posonlyargs, *function.args.args)]
        pairs = list(zip(names[1:] if method and names[:1] == ["self"] else names, call.args, strict=False))
        pairs += [(word.arg, word.value) for word in call.keywords if word.arg]
        for name, value in pairs:
            if self.shares(value):
                self.keys.add((id(function), name))

    def _key(self, node: ast.Name | ast.Attribute) -> Key:
        if isinstance(node, ast.Attribute):
            return 0, f".{node.attr}"
        if "." in node.id:  # an attribute in inlined code
            return 0, f".{node.id.rpartition('.')[2]}"
        scope = self.script.scopes.get(id(node))
        while scope is not None and (id(scope), node.id) not in self.script.bindings:
            scope = self.script.scopes.get(id(scope))
        return id(scope), node.id

    def _is_container(self, node: ast.expr) -> bool:
        """Return whether a name only holds lists and mappings, which `+=` extends."""
        if not isinstance(node, ast.Name):
            return False
        values = [each for each in self.script.bindings.get(self._key(node), ()) if each is not None]
        makes = ("list", "dict", "set", "defaultdict")
        return bool(values) and all(
            isinstance(each, _CONTAINERS) or (isinstance(each, ast.Call) and ast.unparse(each.func) in makes)
            for each in values
        )

    # -- expressions ---------------------------------------------------------------------------------------------------

    def shares(self, node: ast.expr) -> bool:
        """Return whether an expression may be, or hold, an object of the training or a part of one."""
        if isinstance(node, ast.Name):
            part = isinstance(self.script.bound(node, last=True), ast.Attribute | ast.Subscript)  # bound like any other
            return self._key(node) in self.keys or (not part and self.kind(node) in ("model", "optimizer"))
        if isinstance(node, ast.Attribute):
            if node.attr in NAMES["values_of_weights"]:
                return False
            holder = self.kind(node.value) == "trainer" and node.attr in ("model", "optimizer")
            return holder or (0, f".{node.attr}") in self.keys or self.shares(node.value)
        if isinstance(node, ast.Subscript):
            number = isinstance(node.slice, ast.Constant) and node.slice.value in ("lr", "weight_decay", "momentum")
            return not number and self.shares(node.value)
        if isinstance(node, ast.Call):
            return self._returns(node)
        return any(map(self.shares, _parts(node)))

    def _returns(self, call: ast.Call) -> bool:
        """Return whether the result of a call may be such an object."""
        function = call.func
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        if name in self.functions:
            return name in self.returning
        itself = name == "float" and isinstance(function, ast.Attribute)  # of a tensor in float32
        if (name in NAMES["values_of_weights"] and not itself) or name in self.script.classes:
            return False
        origin = self.script.origin_of(function)
        if isinstance(function, ast.Attribute) and not origin.startswith("torch."):
            if self.shares(function.value):
                return True
            if self.kind(function) in ("model", "optimizer"):
                return False  # the output of a model
        elif isinstance(function, ast.Call) or (isinstance(function, ast.Name) and self.shares(function)):
            return False
        if origin.startswith("torch."):
            return name in NAMES["views_of_weights"] and any(map(self.shares, call.args))
        return any(map(self.shares, [*call.args, *(word.value for word in call.keywords)]))


def _parts(node: ast.expr) -> Iterator[ast.expr]:
    """Yield the expressions whose objects an expression holds or is; arithmetic and comparisons make new ones."""
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        yield from node.elts
    elif isinstance(node, ast.Dict):
        yield from node.values
    elif isinstance(node, ast.ListComp | ast.SetComp | ast.GeneratorExp):
        yield node.elt
    elif isinstance(node, ast.DictComp):
        yield node.value
    elif isinstance(node, ast.IfExp):
        yield from (node.body, node.orelse)
    elif isinstance(node, ast.BoolOp):
        yield from node.values
    elif isinstance(node, ast.NamedExpr | ast.Starred):
        yield node.value
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.BitOr):
        yield from (each for each in (node.left, node.right) if isinstance(each, _CONTAINERS))
