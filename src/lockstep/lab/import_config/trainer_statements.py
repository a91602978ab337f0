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
from lockstep.lab.import_config.quiet_code import QuietCode
from lockstep.lab.import_config.script import Call, Script, Unknown, code_of, is_trainer, kind_of, split_of
from lockstep.lab.import_config.table import NAMES, RunDraft

_SEVERAL = "it trains several times: keep only one training"
_LIBRARIES = (*NAMES["libraries"], "torch")
_PYTHON = ("sys.modules", "builtins.", "__builtins__")  # what they hold is used by all modules


@dataclass
class TrainerStatements:
    """Checks the statements of a script. `is_read`: whether another reader handles or reports a call."""

    script: Script
    draft: RunDraft
    is_read: Callable[[ast.Call], bool]
    touched: set[str] = field(default_factory=set)  # names of a model, rows, settings, a Trainer or their parts
    looked_at: set[str] = field(default_factory=set)  # functions of the script that were checked

    def read(self) -> None:
        self._body(self.script.tree.body)
        started = [c for c in self._calls("train") if kind_of(self.script, c.receiver) == "trainer"]
        for call in started[1:]:
            self.draft.unclear(str(call), _SEVERAL)

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
            elif isinstance(line, ast.With | ast.Try):
                self._contexts(line)
                handlers = [each for handler in getattr(line, "handlers", ()) for each in handler.body]
                more = [*getattr(line, "orelse", ()), *getattr(line, "finalbody", ())]
                self._body([*line.body, *handlers, *more])
            elif not isinstance(line, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                self._leaf(line)
                self._taint(line)

    def _head(self, line: ast.stmt) -> None:
        """Check what the head of a block sets, and a decorator that registers a function with an object."""
        heads = [getattr(line, "test", None), getattr(line, "iter", None)]
        names = {n.target.id for e in heads if e is not None for n in ast.walk(e) if isinstance(n, ast.NamedExpr)}
        names = names.union(*map(bound_names.of_node, getattr(line, "handlers", ())))
        sets = [each for each in bound_names.targets(line) if not isinstance(each, ast.Name | ast.Tuple)]
        if any(map(self._touches, (*sets, *(ast.copy_location(ast.Name(each, ast.Load()), line) for each in names)))):
            self._unclear(line, "it sets the model, rows or settings anew")
        QuietCode(self.script, lambda node, why, *by: self._unclear(node, why, *by), self._is_quiet).decorators(line)

    def _contexts(self, line: ast.With | ast.Try) -> None:
        """Check the contexts around a statement that trains, or makes what is: `with torch.autocast("cuda"):`."""
        calls = [each for each in ast.walk(line) if isinstance(each, ast.Call) and self._takes_part(each)]
        for item in getattr(line, "items", ()) if calls else ():
            node = item.context_expr
            function = node.func if isinstance(node, ast.Call) else node
            if self.script.origin_of(function).rpartition(".")[2] not in NAMES["trainer_contexts"]:
                self._unclear(line, f"the effect of {code_of(node)} on what is in it is unknown")

    def _loop(self, node: ast.For | ast.While) -> None:
        for each in ast.walk(node):
            if isinstance(each, ast.Call) and self._trains(each):
                self.draft.unclear(f"line {each.lineno}: {code_of(each)}", _SEVERAL)
                break
        if isinstance(node, ast.For) and self._touches(node.iter):
            self.touched |= {each.id for each in ast.walk(node.target) if isinstance(each, ast.Name)}
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
        if isinstance(line, ast.Assign) and not any(map(self._touches, line.targets)):
            line = ast.copy_location(ast.Expr(line.value), line)  # check only the assigned value
        if self._touches(line):
            quiet = QuietCode(self.script, lambda node, why, *by: self._unclear(node, why, *by), self._is_quiet)
            quiet.statement(line, frozenset())

    def _taint(self, line: ast.stmt) -> None:
        """Record names assigned from something touched, except numbers and results of a Trainer."""
        if isinstance(line, ast.Assign) and self._touches(line.value) and not self._is_result(line.value):
            names = (each for target in line.targets for each in ast.walk(target))
            self.touched |= {each.id for each in names if isinstance(each, ast.Name)}

    def _called(self, line: ast.stmt) -> None:
        """Check functions that contain a part of the training, as if their statements stood here."""
        for call in ast.walk(line):
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
                continue
            function = self.script.functions.get(call.func.id)
            if isinstance(function, ast.FunctionDef) and function.name not in self.looked_at:
                self.looked_at.add(function.name)
                defaults = [*function.args.defaults, *filter(None, function.args.kw_defaults)]
                if any(map(self._touches, defaults)):  # def change(t=trainer)
                    self.touched |= {each.arg for each in (*function.args.args, *function.args.kwonlyargs)}
                if any(map(self._acts, ast.walk(function))):
                    quiet = QuietCode(self.script, lambda *_: None, self._is_quiet)
                    if (by := quiet.replaced(function, "training_decorators")) is not None:
                        self._unclear(by, f"this decorator may replace {function.name} by another function")
                    self._body(function.body)

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
        if origin.startswith("numpy."):
            return name not in NAMES["numpy_changes"]
        return origin in NAMES["quiet_draws"]

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
        return any(
            isinstance(each, ast.Name) and (each.id in self.touched or kind_of(self.script, each) is not None)
            for each in ast.walk(node)
        )

    def _is_result(self, node: ast.expr) -> bool:
        if isinstance(node, ast.IfExp):
            return all(self._is_result(each) or not self._touches(each) for each in (node.body, node.orelse))
        while isinstance(node, ast.Attribute):  # trainer.train().metrics
            node = node.value
        if not isinstance(node, ast.Call):
            return False
        if isinstance(node.func, ast.Attribute) and kind_of(self.script, node.func.value) == "trainer":
            return True
        return ast.unparse(node.func) in ("len", "int", "float", "str", "sum", "round", "min", "max")

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
                why = "a loss, or a step, of the script's own: task.name=module takes a loss"
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
    """Return the first statement of a method, one that Trainer calls beside training, that may change the training."""
    itself = method.args.args[0].arg if method.args.args else ""
    changes: list[ast.AST] = []

    def is_read(call: ast.Call) -> bool:
        text = ast.unparse(call.func)
        own = text.startswith((f"{itself}.", "super()."))
        return text == "super" or (own and text.rpartition(".")[2] in NAMES["trainer_evaluates"])

    quiet = QuietCode(script, lambda node, *_: changes.append(node), is_read, itself=itself)
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


def changes_outside(script: Script, function: Any) -> ast.AST | None:
    """Return the first part of a function of evaluation that changes more than its own names: a global name, an
    attribute or an entry of another object, a part of the training."""
    spec = function.args
    arguments = [*spec.posonlyargs, *spec.args, *spec.kwonlyargs, *filter(None, (spec.vararg, spec.kwarg))]
    body = function.body if isinstance(function.body, list) else [function.body]
    own = bound_names.within(ast.Module(body, [])) | {each.arg for each in arguments}
    for node in (each for line in body for each in ast.walk(line)):
        stored = isinstance(getattr(node, "ctx", None), ast.Store | ast.Del) and not isinstance(node, ast.Name)
        holder = node.func.value if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else None
        acts = kind_of(script, holder) in ("model", "trainer", "arguments")
        acts = acts and holder is not None and root_of(holder) not in own
        acts = acts and node.func.attr not in NAMES["trainer_evaluates"]  # type: ignore[attr-defined]
        if isinstance(node, ast.Global | ast.Nonlocal) or acts:
            return node
        if stored and not isinstance(node, ast.Tuple | ast.List | ast.Starred) and root_of(node) not in own:
            return node
    return None


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


_OF_TRAINER: tuple[str, ...] = (
    *("model", "args", "data_collator", "train_dataset", "optimizer", "lr_scheduler", "compute_loss_func"),
    *("model_wrapped", "label_smoother", "model_accepts_loss_kwargs", "accelerator", "callback_handler", "control"),
    *("state", "processing_class", "tokenizer", "place_model_on_device", "_train_batch_size"),
    *NAMES["trainer_overrides"],
)
