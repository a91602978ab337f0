"""A tokenizing function passed to `map`: its effects on rows besides tokens.

In: the function. Out: a gap for each statement that is not on a closed list: texts changed before tokenizing, tokens
changed afterwards, computed labels.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lockstep.lab.import_config import kinds, text_columns
from lockstep.lab.import_config.script import Scope, Script, Unknown

_WHOLE = "save the final rows (to_json), and give that file: --data FILE"
_TEXTS = ("data.source", "data.train")
_INPUTS = ("input_ids", "attention_mask", "token_type_ids", "position_ids", "decoder_input_ids")
_UNREAD = ("word_ids", "special_tokens_mask", "length")  # columns that collators or samplers may read, and no model
_LABELS = ("label", "labels")
_COPIES = (
    *("list", "tuple", "int", "float", "copy.copy", "copy.deepcopy"),
    *("torch.tensor", "torch.LongTensor", "numpy.array", "numpy.asarray"),
)
_BY_WORDS = ("token_classification", "question_answering")  # tasks whose labels belong to tokens

Gap = Callable[..., None]  # (node, reason, keys of a run file that replace it)


@dataclass
class MappedFunction:
    """Checks every statement of `function` in `read`, and calls `gap` for those that are not understood."""

    script: Script
    function: Scope
    task: str
    gap: Gap
    results: set[str] = field(default_factory=set)  # names that hold the tokenizer's output
    drops_blank: bool = False  # whether blank texts are left out, as data.drop_missing does

    def read(self) -> None:
        if isinstance(self.function, ast.Lambda):
            self._returned(self.function.body)
            return
        if self.task not in _BY_WORDS:  # these functions are tried on rows (tried_on_rows.py)
            for line in self.function.body:
                self._statement(line)

    def _statement(self, node: ast.stmt) -> None:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                self._assigned(node, target, node.value)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            self._assigned(node, node.target, node.value)
        elif isinstance(node, ast.Return):
            self._returned(node.value)
        elif isinstance(node, ast.With):  # as_target_tokenizer
            for line in node.body:
                self._statement(line)
        elif isinstance(node, ast.If) and (self._only_masks(node) or self._only_labels(node) or self._is_more(node)):
            return
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            pass
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            name = self.script.origin_of(node.value.func)
            if name not in ("print", "len"):
                self.gap(node, f"it changes the rows: {_WHOLE}", *_TEXTS)
        elif not isinstance(node, ast.Pass | ast.Assert):
            self.gap(node, f"it changes the rows: {_WHOLE}", *_TEXTS)

    def _assigned(self, node: ast.stmt, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Name):
            if self._is_tokens(value):
                self.results.add(target.id)
            elif not self._is_plain(value) and not self._are_columns(value) and self._is_used(target.id, node):
                self.gap(node, f"it changes the rows: {_WHOLE}", *_TEXTS)
            return
        if isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name):
            name = self.script.known(target.slice)
            if target.value.id in self.results:
                self._entry(node, name, value)
                return
            if self.task == "masked_language_modeling" and self._without_blank(target, value):
                self.drops_blank = True
                return
        self.gap(node, f"it changes the rows before they are tokenised: {_WHOLE}", *_TEXTS)

    def _without_blank(self, target: ast.Subscript, node: ast.expr) -> bool:
        """Return whether a column keeps all but its blank texts: `[x for x in column if x and not x.isspace()]`."""
        if not isinstance(node, ast.ListComp) or len(node.generators) != 1:
            return False
        part = node.generators[0]
        x = ast.unparse(part.target)
        texts = [ast.unparse(each) for test in part.ifs for each in _conditions(test)]
        empty = {x, f"len({x}) > 0", f"{x} != ''", f"len({x}) != 0"}
        blank = {f"{x}.strip()", f"len({x}.strip()) > 0", f"{x}.strip() != ''"}
        spaces = f"not {x}.isspace()" in texts and bool(empty & set(texts))  # "" is no space
        unchanged = ast.unparse(node.elt) == x and ast.unparse(part.iter) == ast.unparse(target)
        return (
            unchanged and set(texts) <= {*empty, *blank, f"not {x}.isspace()"} and (spaces or bool(blank & set(texts)))
        )

    def _is_used(self, name: str, node: ast.stmt) -> bool:
        """Return whether a name is read anywhere besides its definition."""
        inside = {id(each) for each in ast.walk(node)}
        return any(
            isinstance(each, ast.Name) and each.id == name and id(each) not in inside
            for each in ast.walk(self.function)
        )

    def _entry(self, node: ast.stmt, name: Any, value: ast.expr) -> None:
        """Check an assignment to an entry of the tokenizer's output."""
        if name in _LABELS:
            if not self._is_labels(value):
                self.gap(node, f"the script computes labels; lockstep reads them from a column: {_WHOLE}", "task.label")
        elif (name in _INPUTS or not isinstance(name, str)) and not self._masks_padding(value):
            self.gap(node, "tokens are changed after tokenizing", "tokenizer.source")

    def _returned(self, value: ast.expr | None) -> None:
        if isinstance(value, ast.Dict):
            for key, each in zip(value.keys, value.values, strict=True):
                if key is None:
                    self._returned(each)
                elif not self._is_tokens(each):
                    self._entry(ast.copy_location(ast.Expr(each), each), self.script.known(key), each)
        elif value is not None and not self._is_tokens(value):
            self.gap(value, f"it changes the rows: {_WHOLE}", *_TEXTS)

    def _is_tokens(self, node: ast.expr) -> bool:
        """Return whether an expression is the tokenizer's output, or an entry of it."""
        if isinstance(node, ast.Name):
            return node.id in self.results
        if isinstance(node, ast.Subscript | ast.Attribute):
            return self._is_tokens(node.value)
        if isinstance(node, ast.Call):
            if kinds.kind_of(self.script, node.func) == "tokenizer":
                return True
            return (
                isinstance(node.func, ast.Attribute) and node.func.attr == "copy" and self._is_tokens(node.func.value)
            )
        return False

    def _is_plain(self, node: ast.expr) -> bool:
        """Return whether a value is an unchanged column, a column behind a prefix, or a known value."""
        if self.script.known(node, Unknown) is not Unknown:
            return True
        return text_columns.column_of(self.script, node) is not None or self._is_labels(node)

    def _is_labels(self, node: ast.expr) -> bool:
        """Return whether a value is a column of labels, unchanged or through a one-to-one mapping, or the tokens."""
        if self._is_tokens(node) or self._masks_padding(node):
            return True
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
            return isinstance(self.script.known(node.slice), str) or self._keeps_apart(node.value)
        if isinstance(node, ast.Name):
            value = self.script.bound(node, last=True)
            return value is not None and self._is_labels(value)
        if isinstance(node, ast.Call) and self.script.origin_of(node.func) in _COPIES and len(node.args) == 1:
            return self._is_labels(node.args[0])
        if isinstance(node, ast.ListComp) and len(node.generators) == 1 and not node.generators[0].ifs:
            generator = node.generators[0]
            return self._is_labels(generator.iter) and self._is_element(node.elt, generator.target)
        return False

    def _is_element(self, node: ast.expr, target: ast.expr) -> bool:
        """Return whether an element is `x`, `int(x)` or `label2id[x]` of a comprehension over `x`."""
        if isinstance(node, ast.Call) and self.script.origin_of(node.func) in _COPIES and len(node.args) == 1:
            return self._is_element(node.args[0], target)
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
            return self._keeps_apart(node.value) and self._is_element(node.slice, target)
        return isinstance(node, ast.Name) and isinstance(target, ast.Name) and node.id == target.id

    def _keeps_apart(self, name: ast.Name) -> bool:
        """Return whether a label mapping is one-to-one."""
        values = self.script.known(name, Unknown)
        if isinstance(values, dict):
            return len({repr(each) for each in values.values()}) == len(values)
        bound = self.script.bound(name)
        if isinstance(bound, ast.DictComp) and isinstance(whole := bound.generators[0].iter, ast.Call):
            names, pair = _names(bound.generators[0].target), _names(ast.Tuple([bound.key, bound.value], ast.Load()))
            plain = len(bound.generators) == 1 and not bound.generators[0].ifs and None not in (*names, *pair)
            places = {"enumerate": set(names) == set(pair) and len(names) == 2, "range": set(names) == set(pair)}
            return plain and places.get(self.script.origin_of(whole.func), False)
        return False

    def learns_padding(self, tokens: ast.Call) -> bool:
        """Return whether labels have the padding of `tokens`: nothing in the function replaces it by -100."""
        masked = any(isinstance(each, ast.ListComp) and self._masks_padding(each) for each in ast.walk(self.function))
        if masked or not _pads(self.script, tokens):
            return False
        if self.task in ("translation", "summarization"):
            return True
        copied = [
            value
            for each in ast.walk(self.function)
            for key, value in _entries(each)
            if key is not None and self.script.known(key) in _LABELS
        ]
        return self.task == "language_modeling" and any("input_ids" in ast.unparse(each) for each in copied)

    def _only_masks(self, node: ast.If) -> bool:
        """Return whether a branch only replaces the padding of labels, as run_summarization does if it pads."""
        return not node.orelse and all(
            isinstance(line, ast.Assign) and self._masks_padding(line.value) and not isinstance(line.value, ast.Name)
            for line in node.body
        )

    def _only_labels(self, node: ast.stmt) -> bool:
        """Return whether every branch only sets labels, each of them those of a column."""
        if isinstance(node, ast.If):
            return all(map(self._only_labels, [*node.body, *node.orelse]))
        if not isinstance(node, ast.Assign) or len(node.targets) != 1:
            return False
        target = node.targets[0]
        if not isinstance(target, ast.Subscript) or not isinstance(target.value, ast.Name):
            return False
        labels = target.value.id in self.results and self.script.known(target.slice) in _LABELS
        return labels and self._is_labels(node.value)

    def _is_more(self, node: ast.stmt) -> bool:
        """Return whether statements only add a column that no model takes: `out["word_ids"] = ...`."""
        if isinstance(node, ast.If):
            return not node.orelse and all(map(self._is_more, node.body))
        target = node.targets[0] if isinstance(node, ast.Assign) and len(node.targets) == 1 else None
        if not isinstance(target, ast.Subscript) or not isinstance(target.value, ast.Name):
            return False
        return target.value.id in self.results and self.script.known(target.slice) in _UNREAD

    def _are_columns(self, node: ast.expr) -> bool:
        """Return whether a value is a tuple of columns, whichever branch makes it."""
        if isinstance(node, ast.IfExp):
            return self._are_columns(node.body) and self._are_columns(node.orelse)
        own = self.function.args.args[0].arg if self.function.args.args else ""
        return isinstance(node, ast.Tuple) and all(
            isinstance(each, ast.Subscript) and ast.unparse(each.value) == own for each in node.elts
        )

    def _masks_padding(self, node: ast.expr) -> bool:
        """Return whether an expression replaces padding by `-100`, as recipes of encoder-decoder models do."""
        tests = [each.test for each in ast.walk(node) if isinstance(each, ast.IfExp)]
        return (
            bool(tests) and all("pad_token_id" in ast.unparse(test) for test in tests) and "-100" in ast.unparse(node)
        )

    def is_mapping(self, node: ast.expr) -> bool:
        """Return whether an expression is a one-to-one mapping of labels: a dictionary, or that of a model's config."""
        if isinstance(node, ast.Name):
            return self._keeps_apart(node)
        return isinstance(node, ast.Attribute) and ast.unparse(node).endswith("config.label2id")


def _names(node: ast.expr) -> list[str | None]:
    """Return the names in a target or a pair; None for a part that is not a name."""
    return [each.id if isinstance(each, ast.Name) else None for each in getattr(node, "elts", [node])]


def _conditions(test: ast.expr) -> list[ast.expr]:
    """Return the parts that all have to hold."""
    return test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) else [test]


def _pads(script_: Script, call: ast.Call) -> bool:
    """Return whether a tokenizer pads, or may pad."""
    node = next((word.value for word in call.keywords if word.arg == "padding"), None)
    return node is not None and script_.known(node, Unknown) not in (False, None, "do_not_pad")


def _entries(node: ast.AST) -> list[tuple[ast.expr | None, ast.expr]]:
    """Return the entries that a statement assigns or a dictionary has, as (key, value)."""
    if isinstance(node, ast.Dict):
        return list(zip(node.keys, node.values, strict=True))
    targets = node.targets if isinstance(node, ast.Assign) else []
    return [(each.slice, node.value) for each in targets if isinstance(each, ast.Subscript)]  # type: ignore[attr-defined]
