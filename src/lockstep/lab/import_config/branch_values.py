"""Names that have one of several values, by a branch that is known only when the script runs.

In: a `Script` whose decided branches are taken. Out: a line for each such name that is a model, a tokenizer, rows,
settings or a Trainer, or an argument of a call that init reads.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from lockstep.lab.import_config.bound_names import names_in, of_node, root_of
from lockstep.lab.import_config.kinds import kind_of
from lockstep.lab.import_config.script import Script, Unknown, code_of
from lockstep.lab.import_config.table import NAMES

Values = dict[str, tuple[ast.AST, ...]]  # name -> the values that it may have here
_INNER = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_ENDS = ("exit", "quit", "sys.exit", "os._exit")
_PRINTS = ("print", "len", "logger", "logging", "isinstance")
_TAKES = ("fit", "prepare", "map", "filter", "train", "partial")
_UNREAD = ("eval_dataset", "compute_metrics", "preprocess_logits_for_metrics", "val_dataloaders", "report_to")


def undecided(script: Script) -> list[tuple[str, str]]:
    """Return `line N: NAME` and the reason for each name, in the order in which they are read."""
    reader = _Reader(script)
    at_end = reader.body(script.tree.body, {}) or {}
    while reader.later:
        function, outside = reader.later.pop(0)
        spec = function.args
        arguments = {each.arg for each in ast.walk(spec) if isinstance(each, ast.arg)}
        values = {**(at_end if outside is None else outside)}
        reader.body(function.body, {name: of for name, of in values.items() if name not in arguments}, True)
    return list(reader.lines.values())


class _Reader:
    """Follows the statements of one body after another. `lines`: name -> what `undecided` returns."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.lines: dict[str, tuple[str, str]] = {}
        self.later: list[tuple[Any, Values | None]] = []  # functions, and the names around them; None: of the script
        self.left: list[list[tuple[bool, Values]]] = [[]]  # whether it is `break` or `continue`; a list for each loop
        self.options = {*script.settings, *script.dataclasses, *script.holders}

    def body(self, lines: list[Any], here: Values, inner: bool = False) -> Values | None:
        """Return the values after some statements; None if they end the function, the loop or the script."""
        now: Values | None = here
        for line in lines:
            if now is None:
                break
            now = self._statement(line, now, inner)
        return now

    def _statement(self, line: Any, here: Values, inner: bool) -> Values | None:
        if isinstance(line, _INNER):
            if not isinstance(line, ast.ClassDef):
                self.later.append((line, here if inner else None))
            else:
                self.later += [(each, None) for each in line.body if isinstance(each, ast.FunctionDef)]
            return {**here, line.name: (line,)}
        if isinstance(line, ast.If):
            self._reads(line.test, here)
            taken = self.script.known(line.test, Unknown)
            if taken is not Unknown:
                return self.body(line.body if taken else line.orelse, here, inner)
            return _either(self.body(line.body, dict(here), inner), self.body(line.orelse, dict(here), inner))
        if isinstance(line, ast.For | ast.AsyncFor | ast.While):
            return self._loop(line, here, inner)
        if isinstance(line, ast.Try):
            whole = self.body(line.body, dict(here), inner)
            before = _either(here, whole) or here
            ends = [self.body(each.body, dict(before), inner) for each in line.handlers]
            now = None if whole is None else self.body(line.orelse, whole, inner)
            for each in ends:
                now = _either(now, each)
            return None if now is None else self.body(line.finalbody, now, inner)
        if isinstance(line, ast.Match):
            self._reads(line.subject, here)
            now = here
            for case in line.cases:
                other = self.body(case.body, dict(here), inner)
                always = isinstance(case.pattern, ast.MatchAs) and case.pattern.pattern is None and case.guard is None
                now = other if always and now is here else _either(now, other)
            return now
        if isinstance(line, ast.With | ast.AsyncWith):
            for item in line.items:
                self._reads(item.context_expr, here)
                if item.optional_vars is not None:
                    _bind(here, item.optional_vars, item.context_expr)
            return self.body(line.body, here, inner)
        return self._leaf(line, here)

    def _loop(self, line: Any, here: Values, inner: bool) -> Values | None:
        self._reads(line.test if isinstance(line, ast.While) else line.iter, here)
        now: Values | None = here
        ended: Values | None = None  # by `break`, which skips `else`
        for _ in range(2):
            start = dict(now or here)
            if not isinstance(line, ast.While):
                _bind(start, line.target, line.iter)
            self.left.append([])
            now = _either(now, self.body(line.body, start, inner))
            for breaks, each in self.left.pop():
                now, ended = (now, _either(ended, each)) if breaks else (_either(now, each), ended)
        return _either(self.body(line.orelse, now or here, inner), ended)

    def _leaf(self, line: Any, here: Values) -> Values | None:
        self._reads(line, here)
        if isinstance(line, ast.Break | ast.Continue):
            self.left[-1].append((isinstance(line, ast.Break), here))
            return None
        called = ast.unparse(line.value.func) if isinstance(getattr(line, "value", None), ast.Call) else ""
        if isinstance(line, ast.Return | ast.Raise) or (isinstance(line, ast.Expr) and called in _ENDS):
            return None
        for node in ast.walk(line):
            if isinstance(node, ast.NamedExpr):
                _bind(here, node.target, node.value)
        for target in line.targets if isinstance(line, ast.Assign) else [getattr(line, "target", None)]:
            if target is not None and getattr(line, "value", None) is not None and not isinstance(line, ast.AugAssign):
                _bind(here, target, line.value)
        here |= dict.fromkeys(of_node(line), (line,))
        return here

    def _reads(self, node: ast.AST, here: Values, parent: ast.AST | None = None) -> None:
        """Check the names that an expression reads."""
        if isinstance(node, ast.Call) and root_of(node.func) in _PRINTS:
            return
        if isinstance(node, ast.keyword) and node.arg in _UNREAD:
            return
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id not in self.lines:
            values = {self._dump(each): each for each in here.get(node.id, ())}
            if len(values) > 1 and node.id not in self.options and self._takes_part(node, values, parent):
                lines = " or ".join(str(each) for each in sorted({getattr(v, "lineno", 0) for v in values.values()}))
                why = f"it has the value of line {lines}; which one is known only when the script runs"
                self.lines[node.id] = f"line {node.lineno}: {code_of(node)}", why
        inside = node if isinstance(node, ast.Call) else parent
        for child in ast.iter_child_nodes(node):
            self._reads(child, here, inside if isinstance(child, ast.Name | ast.keyword) else None)

    def _dump(self, node: ast.AST) -> str:
        """Return the code of a value; of what is loaded, without arguments that say how."""
        name = self.script.origin_of(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""
        if isinstance(node, ast.Call) and name == "from_pretrained":
            words = [word for word in node.keywords if word.arg not in NAMES["ways_of_loading"]]
            node = ast.Call(node.func, node.args, words)
        return ast.dump(node)

    def _resumes(self, node: ast.AST) -> bool:
        """Return whether a value is a Trainer's own newest checkpoint, or none."""
        newest = isinstance(node, ast.Call) and self.script.origin_of(node.func).endswith("get_last_checkpoint")
        return newest or (isinstance(node, ast.expr) and self.script.known(node, Unknown) is None)

    def _takes_part(self, node: ast.Name, values: Mapping[str, ast.AST], parent: ast.AST | None) -> bool:
        """Return whether one of the values is a part of a training, or a call that init reads takes the name."""
        for each in values.values():
            origin = self.script.origin_of(each.func) if isinstance(each, ast.Call) else ""
            name = origin.rpartition(".")[2]
            if isinstance(each, ast.expr) and kind_of(self.script, each) is not None:
                return True
            if name in NAMES["homes"] or name in NAMES["optimizers"] or (name.startswith("get_") and "sched" in name):
                return True
        name = self.script.origin_of(parent.func).rpartition(".")[2] if isinstance(parent, ast.Call) else ""
        if name == "train" and all(map(self._resumes, values.values())):
            return False
        known = all(isinstance(v, ast.expr) and self.script.known(v, Unknown) is not Unknown for v in values.values())
        return not known and (name in NAMES["homes"] or name in _TAKES)


def is_newest(script: Script, node: ast.expr, depth: int = 0) -> bool:
    """Return whether a checkpoint is the newest of the run itself, or one of an option that was not given."""
    if isinstance(node, ast.Name) and depth < 5:
        values = [v for (_, name), of in script.bindings.items() if name == node.id for v in of]
        return all(each is None or is_newest(script, each, depth + 1) for each in values)
    if isinstance(node, ast.IfExp | ast.BoolOp):
        parts = [node.body, node.orelse] if isinstance(node, ast.IfExp) else node.values
        return all(is_newest(script, each, depth) for each in parts)
    if isinstance(node, ast.Attribute):
        return script.known(node) is None
    if isinstance(node, ast.Call) and node.args:
        own = script.origin_of(node.func) == "transformers.trainer_utils.get_last_checkpoint"
        folder = script.known(node.args[0])
        outputs = {script.known(w.value) for c in script.calls for w in c.node.keywords if w.arg == "output_dir"}
        settings = [c.node for c in script.calls if c.name.endswith("TrainingArguments") and c.node.args]
        outputs |= {script.known(each.args[0]) for each in settings if not isinstance(each.args[0], ast.Starred)}
        named = ast.unparse(node.args[0]).endswith("output_dir")
        return own and (named or folder in outputs)
    return isinstance(node, ast.Constant) and node.value in (None, True, False)


def _either(one: Values | None, other: Values | None) -> Values | None:
    """Return the values after two branches."""
    if one is None or other is None:
        return other if one is None else one
    names = one.keys() | other.keys()
    return {name: tuple(dict.fromkeys((*one.get(name, ()), *other.get(name, ())))) for name in names}


def _bind(here: Values, target: ast.expr, value: ast.expr) -> None:
    """Record a value. A call that is given the name's own value changes it: `data = data.map(f)`."""
    if isinstance(target, ast.Tuple | ast.List):
        parts = value.elts if isinstance(value, ast.Tuple | ast.List) else []
        same = len(parts) == len(target.elts)
        for index, each in enumerate(target.elts):
            _bind(here, each, parts[index] if same else value)
    elif isinstance(target, ast.Starred):
        _bind(here, target.value, value)
    elif isinstance(target, ast.Name):
        grows = isinstance(value, ast.Call) and target.id in names_in(value) and target.id in here
        here[target.id] = here[target.id] if grows else (value,)
