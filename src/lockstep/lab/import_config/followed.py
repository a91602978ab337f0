"""Follows a function that a script passes to `map`, on examples of ours, without running the script's code.

In: the tree of a function, and its arguments. Out: what it returns. Lists, dictionaries, texts and whole numbers are
Python's own; tokenizers and their results are objects with `entry`, `method` and `called`. All else is `NotFollowed`.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any

MOST = 400_000  # steps of one function, together with the entries of all lists that it makes
_OPERATORS: dict[type, Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.Not: operator.not_,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.In: lambda left, right: left in right,
    ast.NotIn: lambda left, right: left not in right,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "len": len,
    "list": list,
    "tuple": tuple,
    "min": min,
    "max": max,
    "int": lambda of: of if isinstance(of, Ours) else int(of),
    "bool": bool,
    "abs": abs,
    "enumerate": lambda *of: list(enumerate(*of)),
    "zip": lambda *of: list(zip(*of, strict=False)),
    "range": range,
    "any": any,
    "all": all,
    "reversed": lambda of: list(reversed(of)),
    "sorted": sorted,
    "sum": sum,
}
_METHODS: dict[type, tuple[str, ...]] = {
    list: ("append", "extend", "index", "copy", "count", "pop", "insert", "reverse"),
    dict: ("get", "pop", "items", "keys", "values", "copy"),
    str: ("strip", "lstrip", "rstrip", "startswith", "endswith", "lower", "upper", "find", "index"),
}


class NotFollowed(Exception):
    """A part of a function whose effect is not known, with its node."""

    def __init__(self, node: ast.AST) -> None:
        super().__init__(type(node).__name__)
        self.node = node


class _Leaves(Exception):
    """`break`, `continue` or `return`, with a value."""

    def __init__(self, kind: type, value: Any = None) -> None:
        super().__init__(kind.__name__)
        self.kind, self.value = kind, value


class FollowedFunction:
    """`call` follows a function. `other`: the value of a name that the function does not set; it raises `KeyError`."""

    def __init__(self, other: Callable[[ast.Name], Any], functions: dict[str, Any]) -> None:
        self.other, self.functions = other, functions
        self.left = MOST
        self.names: list[dict[str, Any]] = []

    def call(self, function: Any, values: list[Any]) -> Any:
        """Follow a function with positional arguments. Errors: `NotFollowed`; those of Python for wrong indices."""
        spec = function.args
        if len(values) > len(spec.args) or len(self.names) > 20 or spec.vararg or spec.kwarg or spec.kwonlyargs:
            raise NotFollowed(function)
        frame = dict(zip((each.arg for each in spec.args), values, strict=False))
        missing = spec.args[len(values) :]
        defaults = spec.defaults[len(spec.defaults) - len(missing) :] if missing else []
        if len(defaults) < len(missing):
            raise NotFollowed(function)
        for each, default in zip(missing, defaults, strict=True):
            frame[each.arg] = self.value(default)
        if isinstance(function, ast.Lambda):
            return self._within(frame, lambda: self.value(function.body))
        try:
            self._within(frame, lambda: self._body(function.body))
        except _Leaves as leaves:
            return leaves.value
        return None

    def elsewhere(self, node: ast.expr) -> Any:
        """Return the value of an expression outside of the function."""
        return self._within({}, lambda: self.value(node))

    def _within(self, frame: dict[str, Any], run: Callable[[], Any]) -> Any:
        self.names.append(frame)
        try:
            return run()
        finally:
            self.names.pop()

    def _step(self, node: ast.AST, count: int = 1) -> None:
        self.left -= count
        if self.left < 0:
            raise NotFollowed(node)

    # -- statements ----------------------------------------------------------------------------------------------------

    def _body(self, lines: list[ast.stmt]) -> None:
        for line in lines:
            self._step(line)
            self._statement(line)

    def _statement(self, line: ast.stmt) -> None:
        if isinstance(line, ast.Assign):
            value = self.value(line.value)
            for target in line.targets:
                self._set(target, value)
        elif isinstance(line, ast.AnnAssign) and line.value is not None:
            self._set(line.target, self.value(line.value))
        elif isinstance(line, ast.AugAssign):
            before = self.value(line.target)
            self._set(line.target, self._of_two(line, before, self.value(line.value)))
        elif isinstance(line, ast.If):
            self._body(line.body if self.value(line.test) else line.orelse)
        elif isinstance(line, ast.For | ast.While):
            self._loop(line)
        elif isinstance(line, ast.Expr):
            self.value(line.value)
        elif isinstance(line, ast.Return):
            raise _Leaves(ast.Return, None if line.value is None else self.value(line.value))
        elif isinstance(line, ast.Break | ast.Continue):
            raise _Leaves(type(line))
        elif not isinstance(line, ast.Pass | ast.Assert):
            raise NotFollowed(line)

    def _loop(self, line: ast.For | ast.While) -> None:
        waiting = list(self.value(line.iter)) if isinstance(line, ast.For) else []
        while waiting or (isinstance(line, ast.While) and self.value(line.test)):
            self._step(line)
            if isinstance(line, ast.For):
                self._set(line.target, waiting.pop(0))
            try:
                self._body(line.body)
            except _Leaves as leaves:
                if leaves.kind is ast.Break:
                    return
                if leaves.kind is ast.Return:
                    raise
        self._body(line.orelse)

    def _set(self, target: ast.expr, value: Any) -> None:
        if isinstance(target, ast.Name):
            self.names[-1][target.id] = value
        elif isinstance(target, ast.Tuple | ast.List):
            parts = list(value)
            if len(parts) != len(target.elts):
                raise ValueError(len(parts))
            for each, part in zip(target.elts, parts, strict=True):
                self._set(each, part)
        elif isinstance(target, ast.Subscript):
            holder = self.value(target.value)
            if isinstance(holder, list | dict):
                holder[self.value(target.slice)] = value
            else:
                self._of_ours(target, holder).entries[self.value(target.slice)] = value
        else:
            raise NotFollowed(target)

    # -- expressions ---------------------------------------------------------------------------------------------------

    def value(self, node: ast.expr) -> Any:
        self._step(node)
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name):
            return self._named(node)
        if isinstance(node, ast.List | ast.Tuple):
            return [self.value(each) for each in node.elts]
        if isinstance(node, ast.Dict):
            return self._mapping(node)
        if isinstance(node, ast.BinOp):
            return self._of_two(node, self.value(node.left), self.value(node.right))
        if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](self.value(node.operand))
        if isinstance(node, ast.BoolOp):
            return self._of_several(node)
        if isinstance(node, ast.Compare):
            return self._compared(node)
        if isinstance(node, ast.IfExp):
            return self.value(node.body if self.value(node.test) else node.orelse)
        if isinstance(node, ast.Subscript):
            return self._part(node)
        if isinstance(node, ast.Slice):
            return slice(*(None if each is None else self.value(each) for each in (node.lower, node.upper, node.step)))
        if isinstance(node, ast.ListComp | ast.GeneratorExp):
            return self._within(dict(self.names[-1]), lambda: self._collected(node.elt, node.generators))
        if isinstance(node, ast.Attribute):
            return self._of_ours(node, self.value(node.value)).attribute(node)
        if isinstance(node, ast.Call):
            return self._called(node)
        raise NotFollowed(node)

    def _mapping(self, node: ast.Dict) -> dict[Any, Any]:
        whole: dict[Any, Any] = {}
        for key, each in zip(node.keys, node.values, strict=True):
            value = self.value(each)
            if key is not None:
                whole[self.value(key)] = value
            else:
                whole |= value if isinstance(value, dict) else self._of_ours(each, value).entries
        return whole

    def _named(self, node: ast.Name) -> Any:
        if self.names and node.id in self.names[-1]:
            return self.names[-1][node.id]
        try:
            return self.other(node)
        except KeyError:
            raise NotFollowed(node) from None

    def _of_two(self, node: Any, left: Any, right: Any) -> Any:
        plain = (bool, int, str, list)
        if type(node.op) not in _OPERATORS or type(left) not in plain or type(right) not in plain:
            raise NotFollowed(node)
        if isinstance(node.op, ast.Mult):
            if not isinstance(left, list) or not isinstance(right, int):
                raise NotFollowed(node)
            self._step(node, len(left) * max(0, right))
        result = _OPERATORS[type(node.op)](left, right)
        self._step(node, len(result) if isinstance(result, list | str) else 1)
        return result

    def _of_several(self, node: ast.BoolOp) -> Any:
        value = None
        for each in node.values:
            value = self.value(each)
            if bool(value) is isinstance(node.op, ast.Or):
                return value
        return value

    def _compared(self, node: ast.Compare) -> bool:
        left = self.value(node.left)
        for kind, each in zip(node.ops, node.comparators, strict=True):
            right = self.value(each)
            objects = isinstance(left, Ours) or isinstance(right, Ours)
            if type(kind) not in _OPERATORS or (objects and not isinstance(kind, ast.Is | ast.IsNot)):
                raise NotFollowed(node)
            if not _OPERATORS[type(kind)](left, right):
                return False
            left = right
        return True

    def _part(self, node: ast.Subscript) -> Any:
        holder, index = self.value(node.value), self.value(node.slice)
        if isinstance(holder, list | dict | str | tuple):
            return holder[index]
        return self._of_ours(node, holder).entry(index)

    def _collected(self, element: ast.expr, generators: list[ast.comprehension]) -> list[Any]:
        if not generators:
            return [self.value(element)]
        first, results = generators[0], []
        for each in list(self.value(first.iter)):
            self._set(first.target, each)
            if all(self.value(test) for test in first.ifs):
                results += self._collected(element, generators[1:])
        return results

    def _called(self, node: ast.Call) -> Any:
        if any(isinstance(each, ast.Starred) for each in node.args) or any(word.arg is None for word in node.keywords):
            raise NotFollowed(node)
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        values = [self.value(each) for each in node.args]
        words = {str(word.arg): self.value(word.value) for word in node.keywords} if self._takes(node) else {}
        if name in self.functions and not words:
            return self.call(self.functions[name], values)
        if name in _FUNCTIONS and not words:
            result = _FUNCTIONS[name](*values)
            if isinstance(result, range | list | tuple):
                self._step(node, len(result))
            return list(result) if isinstance(result, range) else result
        if isinstance(node.func, ast.Attribute):
            holder = self.value(node.func.value)
            if node.func.attr in _METHODS.get(type(holder), ()) and not words:
                self._step(node, len(holder) + sum(len(each) for each in values if isinstance(each, list | str)))
                result = getattr(holder, node.func.attr)(*values)
                return list(result) if node.func.attr in ("items", "keys", "values") else result
            return self._of_ours(node, holder).method(node, values, words)
        return self._of_ours(node, self.value(node.func)).called(node, values)

    def _takes(self, node: ast.Call) -> bool:
        """Return whether keywords are looked at: those of a tokenizer's call are read elsewhere."""
        return isinstance(node.func, ast.Attribute) or self._is_own(node.func)

    def _is_own(self, node: ast.expr) -> bool:
        return isinstance(node, ast.Name) and (node.id in self.functions or node.id in _FUNCTIONS)

    def _of_ours(self, node: ast.AST, value: Any) -> Ours:
        if not isinstance(value, Ours):
            raise NotFollowed(node)
        return value


class Ours:
    """Stand-in for an object in a followed function. Reading an attribute that it lacks raises `NotFollowed`."""

    def __init__(self, **entries: Any) -> None:
        self.entries: dict[Any, Any] = entries

    def __bool__(self) -> bool:
        raise TypeError("whether it counts as true is not followed")

    def entry(self, key: Any) -> Any:
        return self.entries[key]

    def attribute(self, node: ast.Attribute) -> Any:
        if node.attr not in self.entries:
            raise NotFollowed(node)
        return self.entries[node.attr]

    def method(self, node: ast.Call, values: list[Any], words: dict[str, Any]) -> Any:
        name = getattr(node.func, "attr", "")
        if name in _METHODS[dict] and not words:
            result = getattr(self.entries, name)(*values)
            return list(result) if name in ("items", "keys", "values") else result
        raise NotFollowed(node)

    def called(self, node: ast.Call, values: list[Any]) -> Any:
        raise NotFollowed(node)
