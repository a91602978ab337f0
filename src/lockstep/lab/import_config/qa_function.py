"""The function of a `map` that makes windows of questions and contexts: the recipe of transformers, or something else.

In: that function. Out: keys of the task `question_answering` (columns, stride), and a gap for each statement that makes
other windows or other positions of answers than the recipe: a question beside a part of its context, contexts cut into
windows that overlap, the first answer's first and last token, and the first token where a window does not hold it.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lockstep.lab.import_config.script import Scope, Script, Unknown, kind_of
from lockstep.lab.import_config.table import NAMES

Gap = Callable[..., None]  # of a node, why, and the keys of a run file that stand in for it
_POSITIONS = ("start_positions", "end_positions")
_OTHER = "windows and positions are those of transformers' recipe here"
_STATEMENTS = (
    *(ast.Assign, ast.AugAssign, ast.AnnAssign, ast.For, ast.While, ast.If, ast.Return, ast.Expr, ast.Pass),
    *(ast.Break, ast.Assert),
)


@dataclass
class QaFunction:
    """`read` looks at every statement of `function`; `gap` is told of what is not the recipe."""

    script: Script
    function: Scope
    gap: Gap

    def read(self) -> None:
        body = getattr(self.function, "body", [])
        for line in body if isinstance(body, list) else []:
            for node in ast.walk(line):
                self._node(node)

    def texts(self, node: ast.expr | None) -> str | None:
        """The column of an argument of the tokenizer, as it is or without white space around its texts; of
        `rows[question if pad_on_right else context]`, that of a tokenizer that pads on the right."""
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
        """The column whose entries have `answer_start`; None: none, or several."""
        names = set()
        for node in ast.walk(self.function):
            if isinstance(node, ast.Subscript) and self.script.known(node.slice) == "answer_start":
                names.add(self._column(node.value))
        return names.pop() if len(names) == 1 else None

    def truncates(self, node: ast.expr | None) -> bool:
        """Whether contexts alone are cut: `"only_second"`, or by the side on which the tokenizer pads."""
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
        """`answers` of `rows["answers"][i]`, also by names."""
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
        """`offset[i][0] <= start_char`, `offset[i][1] >= end_char`: a window holds an answer as a whole, or not."""
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
                node, "a window that does not hold all of an answer learns to point at its first token", "task.answers"
            )

    def _is_position(self, node: ast.expr, to: str) -> bool:
        """0, the place of the first token (`cls_index`), or the place before or behind that which was counted to.
        `to`: the list that it is put into."""
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


def _is_of(node: ast.AST, name: str) -> bool:
    """Whether a statement counts a name up or down."""
    target: Any = getattr(node, "target", None)
    return isinstance(node, ast.AugAssign) and isinstance(target, ast.Name) and target.id == name


_ENTRIES = (*_POSITIONS, "example_id", "offset_mapping")
