"""A function that concatenates tokens of texts and cuts them into blocks, as run_clm.py of transformers does.

In: a function passed to `map`. Out: the length of its blocks; None for a function that does anything else, such as
keeping the remainder, or making overlapping blocks.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import Any

from lockstep.lab.import_config.script import Scope, Script

Role = tuple[str, Any]  # ("rows", None), ("joined", None), ("total", None), ("whole", length), ("blocks", length)
_COPIES = ("copy", "deepcopy", "list")


def block_length(script: Script, function: Scope) -> int | None:
    """Return the number of tokens per block."""
    spec = function.args
    if isinstance(function, ast.Lambda | ast.AsyncFunctionDef) or len(spec.args) != 1:
        return None
    reader = _Reader(_Lengths(script), {spec.args[0].arg: ("rows", None)})
    for line in function.body:
        if isinstance(line, ast.Return) and line is function.body[-1]:
            role = reader.role(line.value)
            return role[1] if role is not None and role[0] == "blocks" else None
        if not reader.statement(line):
            return None
    return None


@dataclass(frozen=True)
class _Lengths:
    """A script in which `min(N, tokenizer.model_max_length)` is N, which the caller compares with the tokenizer."""

    script: Script

    def origin_of(self, node: ast.expr) -> str:
        return self.script.origin_of(node)

    def known(self, node: ast.expr | None) -> Any:
        value = self.script.bound(node) if isinstance(node, ast.Name) else node
        if isinstance(value, ast.Call) and ast.unparse(value.func) == "min" and len(value.args) == 2:
            rest = [each for each in value.args if not ast.unparse(each).endswith(".model_max_length")]
            value = rest[0] if len(rest) == 1 else value
        return self.script.known(value)


def limited_length(script: Script, node: ast.expr | None) -> int | None:
    """Return N of `min(N, tokenizer.model_max_length)`, which the caller compares with the tokenizer; else None."""
    length = _Lengths(script).known(node)
    return length if isinstance(length, int) and script.known(node) is None else None


def is_limited(script: Script, function: Scope) -> bool:
    """Return whether a block is no longer than the tokenizer's own length."""
    names = [script.bound(each) for each in ast.walk(function) if isinstance(each, ast.Name)]
    return any(value is not None and ".model_max_length" in ast.unparse(value) for value in names)


@dataclass
class _Reader:
    script: _Lengths
    roles: dict[str, Role] = field(default_factory=dict)

    def statement(self, line: ast.stmt) -> bool:
        """Return whether a statement belongs to the recipe."""
        if isinstance(line, ast.Expr):
            return isinstance(line.value, ast.Constant)
        if isinstance(line, ast.If):
            return not line.orelse and self._is_enough(line.test) and all(map(self._whole, line.body))
        if not isinstance(line, ast.Assign) or len(line.targets) != 1:
            return False
        target = line.targets[0]
        if isinstance(target, ast.Name):
            role = self.role(line.value)
            self.roles[target.id] = role or ("", None)
            return role is not None
        return isinstance(target, ast.Subscript) and self._are_labels(target, line.value)

    def _is_enough(self, test: ast.expr) -> bool:
        """Return whether a test is `total >= N`, which affects only a short remainder of a few rows."""
        if not isinstance(test, ast.Compare) or not isinstance(test.ops[0], ast.GtE) or len(test.ops) != 1:
            return False
        return self.role(test.left) == ("total", None) and isinstance(self.script.known(test.comparators[0]), int)

    def _whole(self, line: ast.stmt) -> bool:
        role = self.role(line.value) if isinstance(line, ast.Assign) else None
        return role is not None and role[0] == "whole" and self.statement(line)

    def _are_labels(self, target: ast.Subscript, value: ast.expr) -> bool:
        """Return whether labels are the tokens: `blocks["labels"] = blocks["input_ids"].copy()`."""
        copied = value
        if isinstance(value, ast.Call) and self.script.origin_of(value.func).rpartition(".")[2] in _COPIES:
            if isinstance(value.func, ast.Attribute) and not value.args:
                copied = value.func.value
            elif len(value.args) == 1:
                copied = value.args[0]
        role = self.role(target.value)
        return (
            isinstance(copied, ast.Subscript)
            and role is not None
            and role[0] == "blocks"
            and self.role(copied.value) == role
            and self.script.known(target.slice) == "labels"
            and self.script.known(copied.slice) == "input_ids"
        )

    def role(self, node: ast.expr | None) -> Role | None:
        """Return the role of an expression; None if it is not part of the recipe."""
        if isinstance(node, ast.Name):
            return self.roles.get(node.id)
        if isinstance(node, ast.DictComp) and len(node.generators) == 1 and not node.generators[0].ifs:
            return self._by_column(node, node.generators[0])
        if isinstance(node, ast.BinOp):
            return self._rounded(node)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "len" and len(node.args) == 1:
            of = node.args[0]
            joined = isinstance(of, ast.Subscript) and self.role(of.value) == ("joined", None)
            return ("total", None) if joined else None
        return None

    def _rounded(self, node: ast.BinOp) -> Role | None:
        """Return whether an expression is `total // N * N`."""
        for part, times in ((node.left, node.right), (node.right, node.left)):
            if not isinstance(node.op, ast.Mult) or not isinstance(part, ast.BinOp):
                continue
            length = self.script.known(times)
            divided = isinstance(part.op, ast.FloorDiv) and self.script.known(part.right) == length
            if divided and isinstance(length, int) and length > 0 and self.role(part.left) == ("total", None):
                return "whole", length
        return None

    def _by_column(self, node: ast.DictComp, part: ast.comprehension) -> Role | None:
        source, method = part.iter, ""
        if isinstance(source, ast.Call) and isinstance(source.func, ast.Attribute) and not source.args:
            method, source = source.func.attr, source.func.value
        names = [each.id for each in ast.walk(part.target) if isinstance(each, ast.Name)]
        role = self.role(source)
        if role is None or method not in ("", "keys", "items") or len(names) != 1 + (method == "items"):
            return None
        if ast.unparse(node.key) != names[0]:
            return None
        column = names[1] if method == "items" else f"{ast.unparse(source)}[{names[0]}]"
        if role[0] == "rows":
            return ("joined", None) if self._is_joined(node.value, column) else None
        return self._cut(node.value, column) if role[0] == "joined" else None

    def _is_joined(self, node: ast.expr, column: str) -> bool:
        """Match `sum(column, [])`, `list(chain(*column))` and `list(chain.from_iterable(column))`."""
        if not isinstance(node, ast.Call) or node.keywords:
            return False
        name, parts = self.script.origin_of(node.func), [ast.unparse(each) for each in node.args]
        if name == "list" and len(node.args) == 1 and isinstance(node.args[0], ast.Call):
            inner = node.args[0]
            name, parts = self.script.origin_of(inner.func), [ast.unparse(each) for each in inner.args]
        plain = {"sum": [column, "[]"], "itertools.chain": [f"*{column}"]}
        return parts == (plain | {"itertools.chain.from_iterable": [column]}).get(name)

    def _cut(self, node: ast.expr, column: str) -> Role | None:
        """Match `[column[i : i + N] for i in range(0, whole, N)]`."""
        if not isinstance(node, ast.ListComp) or len(node.generators) != 1 or node.generators[0].ifs:
            return None
        steps, each = node.generators[0].iter, ast.unparse(node.generators[0].target)
        if not isinstance(steps, ast.Call) or ast.unparse(steps.func) != "range" or len(steps.args) != 3:
            return None
        whole, length = self.role(steps.args[1]), self.script.known(steps.args[2])
        if self.script.known(steps.args[0]) != 0 or whole != ("whole", length):
            return None
        part = node.elt
        if not isinstance(part, ast.Subscript) or not isinstance(part.slice, ast.Slice) or part.slice.step is not None:
            return None
        first, last = part.slice.lower, part.slice.upper
        if not (isinstance(last, ast.BinOp) and isinstance(last.op, ast.Add) and first is not None):
            return None
        ends = {ast.unparse(last.left): last.right, ast.unparse(last.right): last.left}.get(each)
        same = ast.unparse(part.value) == column and ast.unparse(first) == each and ends is not None
        return ("blocks", length) if same and self.script.known(ends) == length else None
