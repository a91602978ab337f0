"""A function passed to `map` that makes windows of questions and contexts: transformers' recipe, or something else.

In: that function. Out: keys of the task `question_answering` (columns, stride), and a gap for each statement that
deviates from the recipe. The recipe: a window has the question and a part of its context; windows overlap; the labels
are the first and last token of the first answer, or the first token if the window does not contain the answer.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from lockstep.lab.import_config.kinds import kind_of
from lockstep.lab.import_config.script import Scope, Script, Unknown
from lockstep.lab.import_config.table import NAMES

Gap = Callable[..., None]  # (node, reason, keys of a run file that replace it)
_POSITIONS = ("start_positions", "end_positions")
_OTHER = "windows and positions are those of transformers' recipe here"
_STATEMENTS = (
    *(ast.Assign, ast.AugAssign, ast.AnnAssign, ast.For, ast.While, ast.If, ast.Return, ast.Expr, ast.Pass),
    *(ast.Break, ast.Assert),
)


@dataclass
class QaFunction:
    """Checks every statement of `function` in `read`, and calls `gap` for those that differ from the recipe."""

    script: Script
    function: Scope
    gap: Gap

    def read(self) -> None:
        body = getattr(self.function, "body", [])
        for line in body if isinstance(body, list) else []:
            for node in ast.walk(line):
                self._node(node)
                if isinstance(node, ast.Compare | ast.BinOp) and _form(node) not in _FORMS:
                    self.gap(node, _OTHER, "task.answers")

    def texts(self, node: ast.expr | None) -> str | None:
        """Return the column of a tokenizer argument: unchanged, stripped, or `rows[question if pad_on_right else
        context]` for a tokenizer that pads on the right."""
        if isinstance(node, ast.Name):
            return self.texts(self.script.bound(node, last=True))
        if isinstance(node, ast.ListComp) and len(node.generators) == 1 and not node.generators[0].ifs:
            part, element = node.generators[0], node.elt
            if isinstance(element, ast.Call) and isinstance(element.func, ast.Attribute) and not element.args:
                element = element.func.value if element.func.attr in ("strip", "lstrip") else element
            same = isinstance(element, ast.Name) and ast.unparse(element) == ast.unparse(part.target)
            return self.texts(part.iter) if same else None
        if not isinstance(node, ast.Subscript) or not self._is_rows(node.value):
            return None
        key = node.slice.body if isinstance(node.slice, ast.IfExp) and self._pads_right(node.slice.test) else node.slice
        name = self.script.known(key)
        return name if isinstance(name, str) else None

    def answers(self) -> str | None:
        """Return the column whose entries have `answer_start`; None unless there is exactly one."""
        names = set()
        for node in ast.walk(self.function):
            if isinstance(node, ast.Subscript) and self.script.known(node.slice) == "answer_start":
                names.add(self._column(node.value))
        return names.pop() if len(names) == 1 else None

    def truncates(self, node: ast.expr | None) -> bool:
        """Return whether only contexts are truncated: `"only_second"`, or depending on the tokenizer's padding side."""
        if isinstance(node, ast.IfExp) and self._pads_right(node.test):
            node = node.body
        return self.script.known(node) == "only_second"

    def _pads_right(self, test: ast.expr) -> bool:
        value = self.script.bound(test) if isinstance(test, ast.Name) else test
        return value is not None and ast.unparse(value).replace('"', "'").endswith(".padding_side == 'right'")

    def _is_rows(self, node: ast.expr) -> bool:
        arguments = getattr(self.function, "args", None)
        return isinstance(node, ast.Name) and arguments is not None and node.id in {a.arg for a in arguments.args}

    def _column(self, node: ast.expr, depth: int = 0) -> str | None:
        """Return `answers` of `rows["answers"][i]`, also through names."""
        if depth > 10:
            return None
        if isinstance(node, ast.Name):
            value = self.script.bound(node, last=True)
            return None if value is None else self._column(value, depth + 1)
        if not isinstance(node, ast.Subscript):
            return None
        if self._is_rows(node.value):
            name = self.script.known(node.slice)
            return name if isinstance(name, str) else None
        return self._column(node.value, depth + 1)

    def _node(self, node: ast.AST) -> None:
        if isinstance(node, ast.stmt) and not isinstance(node, _STATEMENTS):
            self.gap(node, _OTHER)
        elif isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                self._target(node, target, node.value)
        elif isinstance(node, ast.Call):
            self._call(node)
        elif isinstance(node, ast.Subscript) and isinstance(node.value, ast.Subscript):
            which = self.script.known(node.value.slice)
            index = self.script.known(node.slice, Unknown)
            if which in ("answer_start", "text") and index not in (0, Unknown):
                self.gap(node, "the first answer is learned", "task.answers")
        elif isinstance(node, ast.Compare):
            self._compared(node)
        elif isinstance(node, ast.Dict):
            for key in node.keys:
                if key is not None and isinstance(name := self.script.known(key), str) and name not in _ENTRIES:
                    self.gap(node, _OTHER)

    def _target(self, node: ast.AST, target: ast.expr, value: ast.expr | None) -> None:
        if isinstance(target, ast.Tuple | ast.List):
            for each in target.elts:
                self._target(node, each, None)
            return
        if not isinstance(target, ast.Subscript):
            if not isinstance(target, ast.Name):
                self.gap(node, _OTHER)
            return
        name = self.script.known(target.slice)
        if self._is_rows(target.value):  # run_qa: examples[question] = [q.lstrip() for q in examples[question]]
            if value is None or self.texts(value) != name:
                self.gap(node, "texts are changed before they are tokenised", "data.source", "data.train")
        elif isinstance(name, str) and name not in _ENTRIES:
            self.gap(node, _OTHER)

    def _call(self, node: ast.Call) -> None:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ast.unparse(node.func)
        if kind_of(self.script, node.func) == "tokenizer":
            return
        if name == "append" and len(node.args) == 1 and not self._is_position(node.args[0], ast.unparse(node.func)):
            self.gap(node, "a position is the first or last token of an answer, or 0", "task.answers")
        elif name not in NAMES["qa_calls"]:
            self.gap(node, _OTHER)

    def _compared(self, node: ast.Compare) -> None:
        """Check the test of a whole answer in a window: `offset[i][0] <= start_char`, `offset[i][1] >= end_char`, or
        their opposites."""
        left, right = node.left, node.comparators[0]
        which = self.script.known(left.slice) if isinstance(left, ast.Subscript) else None
        if which not in (0, 1) or not isinstance(left, ast.Subscript) or not isinstance(left.value, ast.Subscript):
            return
        value = self.script.bound(right, last=True) if isinstance(right, ast.Name) else right
        text = "" if value is None else ast.unparse(value)
        ends = isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add) and isinstance(value.right, ast.Call)
        is_end = ends and ast.unparse(value.right.func) == "len"  # type: ignore[union-attr]
        is_start = isinstance(value, ast.Subscript) and "answer_start" in text
        fitting = isinstance(node.ops[0], (ast.LtE | ast.Gt) if which == 0 else (ast.GtE | ast.Lt))
        if len(node.ops) != 1 or not (is_start if which == 0 else is_end) or not fitting:
            self.gap(
                node,
                "lockstep's label of a window without the whole answer is the window's first token",
                "task.answers",
            )

    def _is_position(self, node: ast.expr, to: str) -> bool:
        """Return whether a label is 0, the index of the first token (`cls_index`), or the index before or after a
        counted one. `to`: the list it is appended to."""
        if (value := self.script.known(node, Unknown)) is not Unknown:
            return bool(value == 0) and not isinstance(value, bool)
        if isinstance(node, ast.BinOp) and isinstance(node.left, ast.Name) and self.script.known(node.right) == 1:
            counted = any(_is_of(each, node.left.id) for each in ast.walk(self.function))
            kind = ast.Sub if "start" in to else ast.Add
            return counted and isinstance(node.op, kind)
        if isinstance(node, ast.Name):
            return any("cls_token_id" in ast.unparse(each) for each in self._values(node.id))
        return (
            isinstance(node, ast.Subscript)
            and isinstance(node.value, ast.Subscript)
            and self._is_rows(node.value.value)
        )

    def _values(self, name: str) -> list[ast.expr]:
        return [
            each.value
            for each in ast.walk(self.function)
            if isinstance(each, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in each.targets)
        ]


class _Nameless(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.Name:
        return ast.copy_location(ast.Name("_", node.ctx), node)


def _form(node: ast.AST) -> str:
    """Return the code of a comparison or sum without its names: `_[_] != 1`."""
    return ast.unparse(_Nameless().visit(deepcopy(node)))


# Comparisons and sums of the recipe, as transformers' course and its examples write them.
_FORMS = (
    *("_ + 1", "_ - 1", "_(_) - 1", "_ + _(_)", "_ + _(_['text'][0])", "_['answer_start'][0] + _(_['text'][0])"),
    *("_ <= _", "_ >= _", "_ < _", "_ < _(_)", "_[_] != 1", "_[_] == 1", "_[_] == _", "_[_] != (1 if _ else 0)"),
    *(
        "_[_] == (1 if _ else 0)",
        "_[_][0] <= _",
        "_[_][0] > _",
        "_[_][1] < _",
        "_[_][1] >= _",
        "_.padding_side == 'right'",
    ),
    *("_(_['answer_start']) == 0", "_(_['text']) == 0", "_(_) == 0", "_(_) > 0", "_ is None", "_ is not None"),
)


def _is_of(node: ast.AST, name: str) -> bool:
    """Return whether a statement increments or decrements a name."""
    target: Any = getattr(node, "target", None)
    return isinstance(node, ast.AugAssign) and isinstance(target, ast.Name) and target.id == name


_ENTRIES = (*_POSITIONS, "example_id", "offset_mapping")
