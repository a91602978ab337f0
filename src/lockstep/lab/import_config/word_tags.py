"""The loop of a mapped function that gives each token the tag of its word.

In: that loop. Out: a gap unless the first token of a word has the word's tag, and all other tokens have -100, as in the
task `token_classification`. The body of the loop over `word_ids` is followed for the three kinds of tokens.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass, field

from lockstep.lab.import_config.script import Script, Unknown

SPECIAL, FIRST, LATER = "special", "first", "later"  # kinds of tokens: of no word, the first of a word, a later one
_IGNORED = -100


class NotUnderstood(Exception):
    """A statement that decides which tag a token gets, and cannot be followed."""


@dataclass
class WordTags:
    """`is_usual` follows one loop. `one_to_one`: whether a mapping of labels is one-to-one."""

    script: Script
    one_to_one: Callable[[ast.expr], bool]
    rows: set[str] = field(default_factory=set)  # names of lists with a tag for each word
    word_ids: set[str] = field(default_factory=set)
    previous: set[str] = field(default_factory=set)  # names that start as None

    def is_usual(self, loop: ast.For) -> bool:
        try:
            if isinstance(loop.target, ast.Tuple) and len(loop.target.elts) == 2:
                self.rows.add(ast.unparse(loop.target.elts[1]))
            inner = [line for line in loop.body if isinstance(line, ast.For)]
            if len(inner) != 1 or loop.orelse or inner[0].orelse:
                return False
            for line in loop.body:
                if line is not inner[0]:
                    self._around(line, inner[0])
            return self._follows(inner[0])
        except NotUnderstood:
            return False

    def _around(self, line: ast.stmt, inner: ast.For) -> None:
        """Read a statement beside the loop over tokens."""
        if isinstance(line, ast.Assign) and len(line.targets) == 1 and isinstance(line.targets[0], ast.Name):
            name, value = line.targets[0].id, line.value
            if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr == "word_ids":
                self.word_ids.add(name)
                return
            if isinstance(value, ast.Constant) and value.value is None and line.lineno < inner.lineno:
                self.previous.add(name)
                return
            if isinstance(value, ast.List) and not value.elts:
                return
            if isinstance(value, ast.Subscript) and isinstance(value.value, ast.Subscript):  # rows["tags"][i]
                self.rows.add(name)
                return
        elif isinstance(line, ast.Expr) and isinstance(_appended(line), ast.Name) and line.lineno > inner.lineno:
            return
        raise NotUnderstood

    def _follows(self, loop: ast.For) -> bool:
        whole = loop.iter
        known = isinstance(whole, ast.Name) and whole.id in self.word_ids
        if not known and not (isinstance(whole, ast.Call) and ast.unparse(whole.func).endswith(".word_ids")):
            return False
        if not isinstance(loop.target, ast.Name):
            return False
        word = loop.target.id
        for kind in (SPECIAL, FIRST, LATER):
            tags: list[ast.expr] = []
            renewed = self._run(loop.body, kind, word, tags)
            if len(tags) != 1 or (kind == FIRST and not renewed):
                return False
            if self._is_tag(tags[0], word) if kind != FIRST else not self._is_tag(tags[0], word):
                return False
            if kind != FIRST and self.script.known(tags[0]) != _IGNORED:
                return False
        return True

    def _run(self, body: list[ast.stmt], kind: str, word: str, tags: list[ast.expr]) -> bool:
        """Follow statements for one kind of token. Returns whether the previous word was set to this one."""
        renewed = False
        for line in body:
            if isinstance(line, ast.If):
                taken = line.body if self._holds(line.test, kind, word) else line.orelse
                renewed = self._run(taken, kind, word, tags) or renewed
            elif isinstance(line, ast.Expr) and (tag := _appended(line)) is not None:
                while isinstance(tag, ast.IfExp):
                    tag = tag.body if self._holds(tag.test, kind, word) else tag.orelse
                tags.append(tag)
            elif isinstance(line, ast.Assign) and self._renews(line, word):
                renewed = True
            elif not isinstance(line, ast.Pass) and not (isinstance(line, ast.Expr) and _is_text(line.value)):
                raise NotUnderstood
        return renewed

    def _renews(self, line: ast.Assign, word: str) -> bool:
        return (
            len(line.targets) == 1
            and isinstance(line.targets[0], ast.Name)
            and line.targets[0].id in self.previous
            and ast.unparse(line.value) == word
        )

    def _holds(self, test: ast.expr, kind: str, word: str) -> bool:
        if isinstance(test, ast.BoolOp):
            stops = isinstance(test.op, ast.Or)
            return next((stops for each in test.values if self._holds(each, kind, word) is stops), not stops)
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return not self._holds(test.operand, kind, word)
        if isinstance(test, ast.Compare) and len(test.ops) == 1:
            operator, sides = test.ops[0], [ast.unparse(test.left), ast.unparse(test.comparators[0])]
            if isinstance(operator, ast.Is | ast.IsNot | ast.Eq | ast.NotEq) and set(sides) == {word, "None"}:
                return (kind == SPECIAL) is isinstance(operator, ast.Is | ast.Eq)
            same = word in sides and any(name in sides for name in self.previous)
            if isinstance(operator, ast.Eq | ast.NotEq) and same and kind != SPECIAL:
                return (kind == LATER) is isinstance(operator, ast.Eq)
        value = self.script.known(test, Unknown)
        if value is Unknown:
            raise NotUnderstood
        return bool(value)

    def _is_tag(self, node: ast.expr, word: str) -> bool:
        """Return whether this is the word's tag, unchanged or through a mapping: `to_id[tags[word]]`."""
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "int" and len(node.args) == 1:
            return self._is_tag(node.args[0], word)
        if not isinstance(node, ast.Subscript):
            return False
        if ast.unparse(node.slice) == word:
            return ast.unparse(node.value) in self.rows
        return self.one_to_one(node.value) and self._is_tag(node.slice, word)


def _appended(line: ast.Expr) -> ast.expr | None:
    """Return what is appended to a list."""
    call = line.value
    appends = isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "append"
    return call.args[0] if appends and len(call.args) == 1 else None  # type: ignore[attr-defined]


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant)
