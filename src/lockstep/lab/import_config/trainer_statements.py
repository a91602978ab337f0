"""Statements of a script with a Trainer that may change the training, besides the calls that are read.

In: a `Script`. Out: a gap for each statement that touches a model, rows, settings or a Trainer and is not quiet code
(`quiet_code.py`), for classes of the script that take part, and for training several times.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from lockstep.lab.import_config import bound_names
from lockstep.lab.import_config.bound_names import root_of
from lockstep.lab.import_config.created_data import BEYOND
from lockstep.lab.import_config.kinds import Kind, is_trainer, kind_of, split_of
from lockstep.lab.import_config.library_names import is_own
from lockstep.lab.import_config.quiet_code import QuietCode
from lockstep.lab.import_config.script import Call, Script, Unknown, code_of
from lockstep.lab.import_config.table import NAMES, RunDraft
from lockstep.lab.import_config.unrelated_calls import UnrelatedCalls

_SEVERAL = "it trains several times: keep only one training"
_LIBRARIES = (*NAMES["libraries"], "torch")
_REPEATS = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
_RESULTS = ("generate", "decode", "batch_decode", "encode", "tokenize", "num_parameters", "get_memory_footprint")
_PYTHON = ("sys.modules", "builtins.", "__builtins__")  # what they hold is used by all modules


@dataclass
class TrainerStatements:
    """Checks the statements of a script. `is_read`: whether another reader handles or reports a call."""

    script: Script
    draft: RunDraft
    is_read: Callable[[ast.Call], bool]
    touched: set[str] = field(default_factory=set)  # names of a model, rows, settings, a Trainer or their parts
    parts: set[str] = field(default_factory=set)  # those of them that are more than rows
    looked_at: set[str] = field(default_factory=set)  # functions of the script that were checked
    unrelated: UnrelatedCalls = field(init=False)

    def __post_init__(self) -> None:
        self.unrelated = UnrelatedCalls(self.script, self._takes_part_in, self._holds)

    def read(self) -> None:
        self._body(self.script.tree.body)
        started = [c for c in self._calls("train") if kind_of(self.script, c.receiver) == "trainer"]
        for call in started[1:]:
            if not self._either(started[0], call):
                self.draft.unclear(str(call), _SEVERAL)
        self._trained_again()

    def _either(self, first: Call, second: Call) -> bool:
        """Return whether an `if` starts one of two trainings, each alone in its branch: `if last: trainer.train(last)
        else: trainer.train()`. Where they resume from is checked for each."""
        for node in (each for each in ast.walk(self.script.tree) if isinstance(each, ast.If)):
            branches = (node.body, node.orelse)
            alone = all(len(lines) == 1 and isinstance(lines[0], ast.Expr | ast.Assign) for lines in branches)
            if alone and [getattr(lines[0], "value", None) for lines in branches] == [first.node, second.node]:
                return ast.unparse(first.node.func) == ast.unparse(second.node.func)
        return False

    def _trained_again(self) -> None:
        """Add a gap for training in a comprehension or lambda, and for a second call of a function that trains."""
        for node in ast.walk(self.script.tree):
            inside = ast.walk(node) if isinstance(node, _REPEATS) else ()
            if any(isinstance(each, ast.Call) and self._trains(each) for each in inside):
                self._unclear(node, _SEVERAL)
        sites: dict[str, int] = {}
        for call in self.script.calls:
            if isinstance(call.node.func, ast.Name) and self._starts(call.node):
                sites[call.name] = sites.get(call.name, 0) + 1
                if sites[call.name] > 1:
                    self.draft.unclear(str(call), _SEVERAL)

    def _starts(self, call: ast.Call, depth: int = 0) -> bool:
        """Return whether a call starts a training, also in a function of the script."""
        if isinstance(call.func, ast.Attribute):
            return call.func.attr == "train" and kind_of(self.script, call.func.value) == "trainer"
        function = self.script.functions.get(ast.unparse(call.func)) if depth < 10 else None
        inside = ast.walk(function) if function is not None else ()
        return any(isinstance(each, ast.Call) and self._starts(each, depth + 1) for each in inside)

    def _calls(self, name: str) -> list[Call]:
        return [call for call in self.script.calls if call.name == name and call.receiver is not None]

    def _body(self, lines: Iterable[ast.stmt]) -> None:
        for line in lines:
            self._head(line)
            if isinstance(line, ast.If):
                taken = self.script.known(line.test, Unknown)
                self._body(line.body if taken is Unknown or taken else [])
                self._body(line.orelse if taken is Unknown or not taken else [])
            elif isinstance(line, ast.For | ast.While):
                self._loop(line)
            elif isinstance(line, ast.Match):
                self._matched(line)
            elif isinstance(line, ast.With | ast.Try):
                self._contexts(line)
                handlers = [each for handler in getattr(line, "handlers", ()) for each in handler.body]
                more = [*getattr(line, "orelse", ()), *getattr(line, "finalbody", ())]
                self._body([*line.body, *handlers, *more])
            elif isinstance(line, ast.ClassDef):
                self._definition(line)
            elif not isinstance(line, ast.FunctionDef | ast.AsyncFunctionDef):
                self._leaf(line)
                self._taint(line)

    def _definition(self, line: ast.ClassDef) -> None:
        """Check what a class computes where it is defined: its lines, decorators and metaclass."""
        body = [each for each in line.body if not isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
        self.touched |= {line.name} if any(map(self._holds, body)) else set()
        self._body(body if not is_trainer(self.script, line.name) else [])
        for word in line.keywords:
            if self.script.origin_of(word.value).rpartition(".")[2] != "ABCMeta":
                self._unclear(line, f"the effect of {word.arg}={code_of(word.value)} is unknown")
        if (by := self._quiet().replaced(line)) is not None:
            self._unclear(by, "the effect of this decorator is unknown")

    def _quiet(self) -> QuietCode:
        return QuietCode(self.script, lambda node, why, *by: self._unclear(node, why, *by), self._is_quiet)

    def _matched(self, line: ast.Match) -> None:
        self._leaf(ast.copy_location(ast.Expr(line.subject), line))
        for case in line.cases:
            if self._holds(line.subject):
                self.touched |= bound_names.within(case.pattern)
            self._body(case.body)

    def _head(self, line: ast.stmt) -> None:
        """Check what the head of a block computes and sets, and a decorator that registers a function."""
        heads = [getattr(line, "test", None), getattr(line, "iter", None)]
        for each in heads:
            if each is not None:
                self._leaf(ast.copy_location(ast.Expr(each), line))
        names = {n.target.id for e in heads if e is not None for n in ast.walk(e) if isinstance(n, ast.NamedExpr)}
        names = names.union(*map(bound_names.of_node, getattr(line, "handlers", ())))
        sets = [each for each in bound_names.targets(line) if not isinstance(each, ast.Name | ast.Tuple)]
        if any(map(self._touches, (*sets, *(ast.copy_location(ast.Name(each, ast.Load()), line) for each in names)))):
            self._unclear(line, "it sets the model, rows or settings anew")
        self._quiet().decorators(line)

    def _contexts(self, line: ast.With | ast.Try) -> None:
        """Check the contexts around a statement that trains or creates a part of the training, such as
        `with torch.autocast("cuda"):`."""
        calls = [each for each in ast.walk(line) if isinstance(each, ast.Call) and self._takes_part(each)]
        for item in getattr(line, "items", ()):
            node = item.context_expr
            function = node.func if isinstance(node, ast.Call) else node
            name = self.script.origin_of(function).rpartition(".")[2]
            own = name in {**self.script.functions, **self.script.classes}
            if name in NAMES["trainer_contexts"] and not own:
                continue
            if calls and not own:
                self._unclear(line, f"the effect of {code_of(node)} on the statements in it is unknown")
            self._leaf(ast.copy_location(ast.Expr(node), line))
        for item in getattr(line, "items", ()):
            if item.optional_vars is not None:
                self._bind(item.optional_vars, item.context_expr)
        self.touched |= {each.name for each in getattr(line, "handlers", ()) if each.name}

    def _loop(self, node: ast.For | ast.While) -> None:
        for each in ast.walk(node):
            if isinstance(each, ast.Call) and (self._trains(each) or self._starts(each)):
                self.draft.unclear(f"line {each.lineno}: {code_of(each)}", _SEVERAL)
                break
        if isinstance(node, ast.For):
            self._bind(node.target, node.iter)
        self._body([*node.body, *node.orelse])

    def _trains(self, call: ast.Call) -> bool:
        name = self.script.origin_of(call.func).rpartition(".")[2]
        if is_trainer(self.script, name):
            return True
        holder = call.func.value if isinstance(call.func, ast.Attribute) else None
        return name == "train" and kind_of(self.script, holder) == "trainer"

    def _leaf(self, line: ast.stmt) -> None:
        self._called(line)
        if isinstance(line, ast.Assign) and all(self._replaces_rows(t, line.value) for t in line.targets):
            return
        patched = [
            ast.Attribute(each.args[0], "any", ast.Store())
            for each in ast.walk(line)
            if isinstance(each, ast.Call) and ast.unparse(each.func) in ("setattr", "delattr") and each.args
        ]
        if any(map(self._is_of_a_library, patched)) or (
            isinstance(line, ast.Assign) and any(self._is_of_a_library(target) for target in line.targets)
        ):
            self._unclear(line, "its effect on the library is unknown")
            return
        one: Any = getattr(line, "target", None)
        targets = line.targets if isinstance(line, ast.Assign | ast.Delete) else [one] * (one is not None)
        named = isinstance(line, ast.Delete) and all(isinstance(each, ast.Name) for each in targets)
        if isinstance(line, ast.AugAssign) and isinstance(line.target, ast.Name) and self._touches(line.target):
            self._unclear(line, "it sets the model, rows or settings anew")
        if targets and not named and not any(map(self._is_read_later, targets)):
            value = getattr(line, "value", None)
            line = ast.copy_location(ast.Expr(value) if value is not None else ast.Pass(), line)
        self._quiet().statement(line, frozenset())

    def _is_read_later(self, target: ast.expr) -> bool:
        """Return whether what is set may be a part of the training: by its name, or by what a call returns."""
        calls = any(isinstance(each, ast.Call) for each in ast.walk(target))
        return self._touches(target) or (calls and not self.unrelated.is_value(target))

    def _taint(self, line: ast.AST) -> None:
        """Record names assigned from something touched, except numbers and results of a Trainer."""
        for each in ast.walk(line):
            if isinstance(each, ast.NamedExpr | ast.AnnAssign) and each.value is not None:
                self._bind(each.target, each.value)
            elif isinstance(each, ast.Assign):
                for target in each.targets:
                    self._bind(target, each.value)

    def _bind(self, target: ast.expr, value: ast.expr) -> None:
        names = {each.id for each in ast.walk(target) if isinstance(each, ast.Name)}
        if self._holds(value) and not self.unrelated.is_value(value):
            self.touched |= names
            if self._takes_part_in(value):
                self.parts |= names

    def _holds(self, node: ast.AST) -> bool:
        """Return whether a value holds a part of the training; numbers and results of a Trainer do not."""
        return any(self._is_touched(each) for each in self._names(node))

    def _takes_part_in(self, node: ast.AST) -> bool:
        """Return whether a value holds more than rows: a model, a tokenizer, settings, a Trainer."""
        return any(
            each.id in self.parts or kind_of(self.script, each) not in ("rows", None) for each in self._names(node)
        )

    def _names(self, node: ast.AST) -> list[ast.Name]:
        if isinstance(node, ast.expr) and self._is_result(node):
            return []
        if isinstance(node, ast.Name):
            return [node]
        return [name for each in ast.iter_child_nodes(node) for name in self._names(each)]

    def _is_touched(self, name: ast.Name) -> bool:
        return name.id in self.touched or kind_of(self.script, name) is not None

    def _called(self, line: ast.stmt) -> None:
        """Check the statements of each called function that uses a part of the training."""
        for call in ast.walk(line):
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
                continue
            function = self.script.functions.get(call.func.id)
            if not isinstance(function, ast.FunctionDef) or function.name in self.looked_at:
                continue
            spec = function.args
            own = {each.arg for each in (*spec.posonlyargs, *spec.args, *spec.kwonlyargs)}
            if any(self._touches(each) for each in (*spec.defaults, *filter(None, spec.kw_defaults))):
                self.touched |= own  # def change(t=trainer)
            if any(map(self._acts, ast.walk(function))):
                self.looked_at.add(function.name)
                self._passed(function.name, own)
                if (by := self._quiet().replaced(function, "training_decorators")) is not None:
                    self._unclear(by, f"this decorator may replace {function.name} by another function")
                self._body(function.body)

    def _passed(self, name: str, own: set[str]) -> None:
        """Record the arguments of a function that holds a part of the training in any of its calls."""
        for call in (each for each in self.script.calls if each.name == name):
            arguments = [*call.node.args, *(word.value for word in call.node.keywords)]
            if any(map(self._holds, arguments)):
                self.touched |= own
            if any(map(self._takes_part_in, arguments)):
                self.parts |= own

    def _acts(self, node: ast.AST) -> bool:
        """Return whether a node of a function calls a part of the training, or sets an attribute or entry of one."""
        if isinstance(node, ast.Attribute | ast.Subscript):
            return not isinstance(node.ctx, ast.Load) and self._touches(node)
        return isinstance(node, ast.Call) and self._takes_part(node)

    def _takes_part(self, call: ast.Call) -> bool:
        return self._trains(call) or kind_of(self.script, call) in ("model", "rows", "arguments", "trainer")

    def _is_quiet(self, call: ast.Call) -> bool:
        if self.is_read(call) or self._takes_part(call):
            return True
        if isinstance(call.func, ast.Name) and call.func.id in self.looked_at:
            return True
        origin = self.script.origin_of(call.func)
        name = origin.rpartition(".")[2]
        if isinstance(call.func, ast.Attribute) and kind_of(self.script, call.func.value) == "trainer":
            return name in NAMES["trainer_methods"]
        if isinstance(call.func, ast.Attribute) and kind_of(self.script, call.func.value) == "arguments":
            return name in NAMES["arguments_methods"]
        if origin in ("torch.manual_seed", "torch.random.manual_seed"):
            return True  # a Trainer sets its own seed when it is created
        return (name in NAMES["parsers"] and not is_own(self.script, call.func)) or self.unrelated.is_unrelated(call)

    def _replaces_rows(self, target: ast.expr, value: ast.expr) -> bool:
        """Return whether a split is replaced by its own rows: `data["train"] = data["train"].shuffle()`."""
        if not isinstance(target, ast.Subscript) or kind_of(self.script, target.value) != "rows":
            return False
        split = split_of(self.script, value)
        return kind_of(self.script, value) == "rows" and split in (None, self.script.known(target.slice))

    def _is_of_a_library(self, target: ast.expr) -> bool:
        """Return whether a target is an attribute of a class or module of a training library."""
        if not isinstance(target, ast.Attribute | ast.Subscript):
            return False
        origin = self.script.origin_of(target)
        first = root_of(target)
        if is_trainer(self.script, first) or origin.startswith(_PYTHON):
            return True
        imported = first in self.script.imports and first not in self.touched
        quiet = origin.startswith(("torch.backends.", "transformers.logging", "datasets.logging"))
        imported = imported and isinstance(target, ast.Attribute)
        return imported and origin.partition(".")[0] in _LIBRARIES and not quiet

    def _touches(self, node: ast.AST) -> bool:
        return any(isinstance(each, ast.Name) and self._is_touched(each) for each in ast.walk(node))

    def _is_result(self, node: ast.expr) -> bool:
        if isinstance(node, ast.IfExp):
            return all(self._is_result(each) or not self._touches(each) for each in (node.body, node.orelse))
        if isinstance(node, ast.Attribute) and node.attr == "log_history":  # of trainer.state: numbers by step
            return ast.unparse(node.value).endswith(".state")
        while isinstance(node, ast.Attribute):  # trainer.train().metrics
            node = node.value
        if not isinstance(node, ast.Call):
            return False
        if isinstance(node.func, ast.Attribute):
            kind = kind_of(self.script, node.func.value)
            return kind == "trainer" or (kind in ("tokenizer", "model") and node.func.attr in _RESULTS)
        if isinstance(node.func, ast.Name) and kind_of(self.script, node.func) in ("tokenizer", "model"):
            return True  # tokens, or outputs
        return ast.unparse(node.func) in ("len", "int", "float", "str", "sum", "round", "min", "max", "isinstance")

    def _unclear(self, node: ast.AST, why: str, *by: str) -> None:
        line = getattr(node, "lineno", 0)
        if not any(gap.name.startswith(f"line {line}:") for gap in self.draft.gaps):
            self.draft.unclear(f"line {line}: {code_of(node)}", why, *by)


def subclass_of_trainer(script: Script, kind: ast.ClassDef, draft: RunDraft) -> None:
    """Check a subclass of Trainer and its other bases: any method that is not on a list affects training, and so may
    the statements of those that are."""
    for base in kind.bases:
        origin = script.origin_of(base)
        if origin in script.classes and not is_trainer(script, origin):
            subclass_of_trainer(script, script.classes[origin], draft)
        elif not is_trainer(script, origin) and not origin.startswith(("typing.", "abc.")) and origin != "object":
            draft.unclear(f"line {kind.lineno}: {kind.name}({code_of(base)})", "the methods of this base are not read")
    for word in kind.keywords:
        draft.unclear(f"line {kind.lineno}: {kind.name}({word.arg}={code_of(word.value)})", "its effect is unknown")
    for line in kind.body:
        if isinstance(line, ast.FunctionDef | ast.AsyncFunctionDef):
            where = f"line {line.lineno}: {kind.name}.{line.name}"
            if line.name in NAMES["trainer_overrides"]:
                why = "it replaces the loss or the step; task.name=module takes a loss of your own"
                draft.lacks(where, why, "task.loss")
            elif line.name == "__init__" and _is_plain_init(line):
                continue
            elif line.name not in NAMES["trainer_quiet_overrides"]:
                draft.unclear(where, "the effect of this method on training is unknown")
            elif (inside := _effect(script, line)) is not None:
                why = f"the effect of line {inside.lineno}, {code_of(inside)}, on training is unknown"  # type: ignore[attr-defined]
                draft.unclear(where, why)
        elif isinstance(line, ast.Assign) and not isinstance(line.value, ast.Constant):
            draft.unclear(f"line {line.lineno}: {code_of(line)}", "its effect on the Trainer is unknown")


def _effect(script: Script, method: Any) -> ast.AST | None:
    """Return the first statement that may change training, in a method that Trainer calls for another purpose."""
    itself = method.args.args[0].arg if method.args.args else ""
    changes: list[ast.AST] = []

    def is_read(call: ast.Call) -> bool:
        text = ast.unparse(call.func)
        own = text.startswith((f"{itself}.", "super()."))
        return text == "super" or (own and text.rpartition(".")[2] in NAMES["trainer_evaluates"])

    quiet = QuietCode(script, lambda node, *_: changes.append(node), is_read, itself=itself)
    quiet.repeated, quiet.called = True, method.name
    logged = [each.arg for each in method.args.args if each.arg in ("logs", "metrics", "output")]
    results = [each for each in ast.walk(method) if isinstance(each, ast.Assign) and isinstance(each.value, ast.Call)]
    own = [each for each in results if ast.unparse(each.value).startswith("super().")]
    logged += [ast.unparse(target) for each in own for target in each.targets]
    for line in method.body:
        targets = [each for each in ast.walk(line) if isinstance(getattr(each, "ctx", None), ast.Store | ast.Del)]
        if all(isinstance(each, ast.Subscript) and root_of(each) in logged for each in targets) and targets:
            continue
        changes += [each for each in targets if isinstance(each, ast.Attribute) and each.attr in _OF_TRAINER]
        quiet.statement(line, frozenset())
    return changes[0] if changes else None


def changes_outside(script: Script, function: Any, depth: int = 0) -> ast.AST | None:
    """Return the first part of a function of evaluation that changes more than its own names: a global name, an
    attribute or an entry of another object, a part of the training; also in functions of the script that it calls."""
    spec = function.args
    arguments = [*spec.posonlyargs, *spec.args, *spec.kwonlyargs, *filter(None, (spec.vararg, spec.kwarg))]
    body = ast.Module(function.body if isinstance(function.body, list) else [ast.Expr(function.body)], [])
    bound = bound_names.within(body) | {each.arg for each in arguments}
    own = bound - _of_training(script, body, bound)
    for node in ast.walk(body):
        if isinstance(node, ast.Global | ast.Nonlocal):
            return node
        stored = isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load)
        if stored and root_of(node) not in own:
            return node
        if isinstance(node, ast.Call) and _acts_outside(script, node, bound, own, depth):
            return node
    return None


def _of_training(script: Script, body: ast.AST, bound: set[str]) -> set[str]:
    """Return the names that a function takes from a part of the training: `for group in trainer.optimizer...`."""
    names: set[str] = set()
    pairs = [(e.target, e.iter) for e in ast.walk(body) if isinstance(e, ast.For | ast.comprehension)]
    pairs += [(e.target, e.value) for e in ast.walk(body) if isinstance(e, ast.NamedExpr)]
    pairs += [(t, e.value) for e in ast.walk(body) if isinstance(e, ast.Assign) for t in e.targets]
    for _ in pairs:
        for target, value in pairs:
            inner = [each for each in ast.walk(value) if isinstance(each, ast.Name)]
            outer = [each for each in inner if each.id not in bound and _kind_of_any(script, each) in _ACTS]
            if outer or any(each.id in names for each in inner):
                names |= {each.id for each in ast.walk(target) if isinstance(each, ast.Name)}
    return names


def _kind_of_any(script: Script, node: ast.expr) -> Kind | None:
    """Return the kind of a value in a function, whose names may be assigned below it."""
    value = script.bound(node) if isinstance(node, ast.Name) else None
    return kind_of(script, node) or kind_of(script, value)


def _acts_outside(script: Script, call: ast.Call, bound: set[str], own: set[str], depth: int) -> bool:
    """Return whether a call in a function of evaluation may change a part of the training, or set a seed."""
    if script.origin_of(call.func).rpartition(".")[2] in NAMES["seeds"]:
        return True
    if not isinstance(call.func, ast.Attribute):
        name = ast.unparse(call.func)
        function = script.functions.get(name) if name not in bound and depth < 10 else None
        return name in BEYOND or (function is not None and changes_outside(script, function, depth + 1) is not None)
    root = root_of(call.func)
    if root in own or call.func.attr in NAMES["trainer_evaluates"]:
        return False
    first = next((each for each in ast.walk(call.func) if isinstance(each, ast.Name) and each.id == root), None)
    outer = first is not None and root not in bound and _kind_of_any(script, first) in _ACTS  # trainer.model.x.data
    return (
        outer
        or _kind_of_any(script, call.func.value) in _ACTS
        or (root in bound and call.func.attr not in NAMES["quiet_methods"])
    )


def _is_plain_init(function: Any) -> bool:
    """Return whether an `__init__` only passes its arguments on, and stores values that are not part of a Trainer."""
    for line in function.body:
        plain = isinstance(line, ast.Expr) and (isinstance(line.value, ast.Constant) or _passes_on(line.value))
        assigned = isinstance(line, ast.Assign) and isinstance(line.value, ast.Name | ast.Constant)
        own = assigned and all(
            isinstance(t, ast.Attribute) and isinstance(t.value, ast.Name) and t.attr not in _OF_TRAINER
            for t in line.targets
        )
        if not plain and not own:
            return False
    return True


def _passes_on(node: ast.expr) -> bool:
    """Return whether a call is `super().__init__(...)` of arguments under their own names."""
    if not isinstance(node, ast.Call) or not ast.unparse(node.func).startswith("super("):
        return False
    plain = all(isinstance(getattr(each, "value", each), ast.Name) for each in node.args)
    words = [word for word in node.keywords if word.arg is not None]
    return plain and all(isinstance(each.value, ast.Name) and each.value.id == each.arg for each in words)


_ACTS = ("model", "trainer", "arguments")
_OF_TRAINER: tuple[str, ...] = (
    *("model", "args", "data_collator", "train_dataset", "optimizer", "lr_scheduler", "compute_loss_func"),
    *("model_wrapped", "label_smoother", "model_accepts_loss_kwargs", "accelerator", "callback_handler", "control"),
    *("state", "processing_class", "tokenizer", "place_model_on_device", "_train_batch_size"),
    *NAMES["trainer_overrides"],
)
