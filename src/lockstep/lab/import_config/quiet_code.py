"""Code without effect on training: logging, saving, timing, evaluation.

In: a statement of a script. Out: a gap for each part that is not on a closed list: an assignment to anything but a
plain name, a call of a function that may change its arguments.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lockstep.lab.import_config import bound_names
from lockstep.lab.import_config.bound_names import root_of
from lockstep.lab.import_config.created_data import computes_alone
from lockstep.lab.import_config.kinds import kind_of, narrows
from lockstep.lab.import_config.library_names import is_library
from lockstep.lab.import_config.script import Script, Unknown, code_of
from lockstep.lab.import_config.table import NAMES

_MODEL = "its effect on model, data or optimizer is unknown"
_FREEZES = "model.freeze names the weights that are not trained"
_INPUT = "it changes an input of the loss"
_PARTLY = "the loop skips some of its batches"
_SEEDED = "it sets a seed or the state of a generator while training, so the same order or dropout may come again: "
_SEEDED += "set seeds before the loop"
_EXITS = ("exit", "quit", "sys.exit", "os._exit")


Reason = tuple[str, tuple[str, ...]]  # what a gap says, and the keys that replace it


@dataclass
class QuietCode:
    """Checks statements. `gap`: called for code that is not understood. `is_read`: whether another reader handles a
    call."""

    script: Script
    gap: Callable[..., None]
    is_read: Callable[[ast.Call], bool]
    looked_at: dict[str, Reason | None] = field(default_factory=dict)  # functions -> why they are not quiet
    itself: str | None = None  # in a method of the script: the name of its object, whose attributes may be set
    repeated: bool = False  # whether the statements are in the loop that trains, or called from it
    inner: bool = False  # whether the statements are in a loop that does not train
    called: str | None = None  # the function of the script whose statements these are; None: the one that trains
    created: frozenset[int] = frozenset()  # ids of the calls of functions that the run calls itself: `task.data`
    inside: Reason | None = None  # of the call that was looked at last: the statement of its function
    fixed: frozenset[str] = frozenset()  # names that the statement which is checked must not assign
    turns: frozenset[str] = frozenset()  # names that count the epochs, outside the loop over batches

    def statement(self, node: ast.AST, fixed: frozenset[str]) -> None:
        """Check a statement. `fixed`: names that must not be assigned."""
        self.fixed = fixed
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
            self._assigned(node, fixed)
            return
        if isinstance(node, ast.For | ast.If | ast.With | ast.Try | ast.While):
            self._block(node, fixed)
            return
        if isinstance(node, ast.Match):
            self._match(node, fixed)
            return
        inside = self.repeated and self.called is None
        ends = isinstance(node, ast.Break | ast.Continue) and not self.inner
        if (
            ends
            or (inside and isinstance(node, ast.Return))
            or (self.repeated and isinstance(node, ast.Raise) and _ends_program(node.exc))
        ):
            self.gap(node, _PARTLY, "steps", "epochs")
        elif isinstance(node, ast.Expr | ast.Return | ast.Assert | ast.Raise):
            self._expression(node)
        elif isinstance(node, ast.Delete):
            if not all(isinstance(each, ast.Name) for each in node.targets):
                self.gap(node, _MODEL)
        elif not isinstance(node, _NO_EFFECT):
            self.gap(node, _MODEL)
        else:
            if bound_names.of_node(node) & fixed:
                self.gap(node, _INPUT)
            self.decorators(node)

    def decorators(self, node: ast.AST) -> None:
        """Check for a decorator that registers a function with an object: `@model.register_forward_hook`."""
        for each in getattr(node, "decorator_list", ()):
            function = each.func if isinstance(each, ast.Call) else each
            if isinstance(function, ast.Name):  # hook = model.register_forward_hook
                function = self.script.bound(function, last=True) or function
            if not isinstance(function, ast.Attribute) or root_of(function) in self.script.imports:
                continue
            if function.attr.startswith("register") or kind_of(self.script, function.value) is not None:
                self.gap(
                    each, f"it registers {getattr(node, 'name', 'a function')}, whose effect on training is unknown"
                )

    def replaced(self, function: Any, known: str = "quiet_decorators") -> ast.expr | None:
        """Return a decorator that may replace a function by another one. `known`: the list of those that do not."""
        for each in getattr(function, "decorator_list", ()):
            origin = self.script.origin_of(each.func if isinstance(each, ast.Call) else each)
            parses = origin.partition(".")[0] in NAMES["parsers_of_options"]
            if origin.rpartition(".")[2] not in NAMES[known] and not parses:
                return each
        return None

    def _reseeds(self, call: ast.Call, name: str) -> bool:
        """Return whether a call in the loop sets the state of a generator, so that the same order and dropout may come
        again. One that depends on the epoch's number gives each epoch its own."""
        if not self.repeated or name not in NAMES["seeds"]:
            return False
        return not any(bound_names.names_in(each) & self.turns for each in call.args)

    def _block(self, node: Any, fixed: frozenset[str]) -> None:
        taken = self.script.known(node.test, Unknown) if isinstance(node, ast.If) else Unknown
        for each in (getattr(node, "test", None), getattr(node, "iter", None)):
            if each is not None:
                self._expression(each)
        for item in getattr(node, "items", ()):
            self._expression(item.context_expr)
        for target in bound_names.targets(node):
            self._target(target, target, fixed, False)
        for handler in getattr(node, "handlers", ()):
            if bound_names.of_node(handler) & fixed:
                self.gap(handler, _INPUT)
        body = [*node.body, *getattr(node, "orelse", ()), *getattr(node, "finalbody", ())]
        if taken is not Unknown:
            body = node.body if taken else node.orelse
        body = [*body, *(line for handler in getattr(node, "handlers", ()) for line in handler.body)]
        before = self.inner
        self.inner = self.inner or isinstance(node, ast.For | ast.While)  # their break ends only the inner loop
        for line in body:
            self.statement(line, fixed)
        self.inner = before

    def _match(self, node: ast.Match, fixed: frozenset[str]) -> None:
        self._expression(node.subject)
        for case in node.cases:
            if bound_names.within(case.pattern) & fixed:
                self.gap(node, _INPUT)
            if case.guard is not None:
                self._expression(case.guard)
            for line in case.body:
                self.statement(line, fixed)

    def _assigned(self, node: Any, fixed: frozenset[str]) -> None:
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name) and self._is_weight(node.target):
            self.gap(node, _MODEL)
        elif isinstance(node, ast.AugAssign) and self._is_input(node.target, fixed):
            self.gap(node, _INPUT)
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            if not self._target(node, target, fixed, isinstance(node, ast.Assign)):
                return
        if node.value is not None:
            self._expression(node.value)

    def _is_weight(self, name: ast.Name) -> bool:
        """Return whether a name is a weight of a model, which `weight *= 2` changes in place."""
        value = self.script.bound(name, last=True)
        if isinstance(value, ast.Attribute | ast.Subscript) and kind_of(self.script, value) == "model":
            return True
        loops = (each for each in ast.walk(self.script.tree) if isinstance(each, ast.For) and name in ast.walk(each))
        return any(
            name.id in bound_names.names_in(each.target) and kind_of(self.script, each.iter) == "model"
            for each in loops
        )

    def _is_input(self, target: ast.expr, fixed: frozenset[str]) -> bool:
        """Return whether a target is an input of the loss by another name, changed in place: `v *= 2` in a loop over
        `batch.values()`, `losses[-1] /= 2` after `losses.append(loss)`."""
        nodes = list(ast.walk(self.script.tree))
        if isinstance(target, ast.Name):
            loops = (each for each in nodes if isinstance(each, ast.For) and target in ast.walk(each))
            return any(
                target.id in bound_names.names_in(each.target)
                and isinstance(each.iter, ast.Call)
                and _last(each.iter) in ("items", "values")
                and root_of(each.iter) in fixed
                for each in loops
            )
        calls = (each for each in nodes if isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute))
        return isinstance(target, ast.Subscript) and any(
            call.func.attr in ("append", "add", "insert", "extend")  # type: ignore[attr-defined]
            and ast.unparse(call.func.value) == ast.unparse(target.value)  # type: ignore[attr-defined]
            and any(not isinstance(each, ast.Call | ast.BinOp) and root_of(each) in fixed for each in call.args)
            for call in calls
        )

    def _target(self, node: ast.AST, target: ast.expr, fixed: frozenset[str], plain: bool) -> bool:
        """Check the names that a target sets. `node`: what a gap names."""
        if isinstance(target, ast.Tuple | ast.List):
            return all(self._target(node, each, fixed, plain) for each in target.elts)
        each = target.value if isinstance(target, ast.Starred) else target
        if isinstance(each, ast.Name):
            if each.id in fixed:
                self.gap(node, _INPUT)
            return each.id not in fixed
        own = self._is_own_container(each, plain)
        if not own:
            freezes = isinstance(each, ast.Attribute) and each.attr == "requires_grad"
            self.gap(node, _FREEZES if freezes else _MODEL, *(("model.freeze",) if freezes else ()))
        return own

    def _is_own_container(self, target: ast.expr, plain: bool) -> bool:
        """Return whether a target is a container of the script's own, or a switch that affects no weight."""
        text = self.script.origin_of(target)
        if text.startswith(("os.environ[", "torch.backends.")):
            return True
        if isinstance(target, ast.Attribute) and self.script.is_option(target):
            return True  # where it is read later, its value is unknown
        holder = target.value if isinstance(target, ast.Subscript) else target
        if isinstance(holder, ast.Attribute) and isinstance(holder.value, ast.Name) and holder.value.id == self.itself:
            return self.itself is not None and (holder is target or self._is_new(holder.attr))
        kind = kind_of(self.script, holder.value) if isinstance(holder, ast.Attribute) else None
        if plain and isinstance(target, ast.Attribute) and kind in ("tokenizer", "model", "config", "arguments"):
            return True  # handled or reported by trainer_script
        while isinstance(holder, ast.Subscript):
            holder = holder.value
        if not isinstance(holder, ast.Name):
            return False
        scope = self.script.scopes.get(id(holder))
        values = self.script.bindings.get((id(scope), holder.id), [])
        kinds = [v for v in values if v is not None]
        return bool(kinds) and all(
            isinstance(v, ast.Dict | ast.List) or (isinstance(v, ast.Call) and _last(v) in ("dict", "defaultdict"))
            for v in kinds
        )

    def _is_new(self, attribute: str) -> bool:
        """Return whether an attribute only holds containers that its class makes, so that no rows or settings that the
        class was given change with their entries."""
        values: list[ast.expr | None] = []
        for node in ast.walk(self.script.tree):
            lines = node.body if isinstance(node, ast.ClassDef) else [node]
            for line in (each for each in lines if isinstance(each, ast.Assign | ast.AnnAssign)):
                for target in line.targets if isinstance(line, ast.Assign) else [line.target]:
                    whole = target.attr if isinstance(target, ast.Attribute) else ast.unparse(target)
                    own = isinstance(target, ast.Attribute) or line is not node
                    values += [line.value] if own and whole == attribute else []
        return bool(values) and all(
            isinstance(v, _NEW_CONTAINERS) or (isinstance(v, ast.Call) and _makes(v)) for v in values
        )

    def _expression(self, node: ast.AST) -> None:
        waiting = [node]
        while waiting:
            each = waiting.pop(0)
            if isinstance(each, ast.Yield | ast.YieldFrom | ast.Await):
                if self.called is None or each.value is not None:  # else it is a context's
                    self.gap(node, _MODEL)
            elif isinstance(each, ast.NamedExpr) and not isinstance(each.value, _NEW):
                self.gap(node, _MODEL)
            elif isinstance(each, ast.NamedExpr) and each.target.id in self.fixed:
                self.gap(node, _INPUT)
            elif isinstance(each, ast.Call) and self.repeated and _ends_program(each):
                self.gap(each, _PARTLY, "steps", "epochs")
            elif isinstance(each, ast.Call) and not self.is_quiet(each):
                freezes = _last(each) == "requires_grad_"
                usual: Reason = (_FREEZES, ("model.freeze",)) if freezes else (_MODEL, ())
                why, by = self.inside or usual
                self.gap(each, why, *by)
                if not freezes:
                    continue  # one line says it
            waiting += ast.iter_child_nodes(each)

    def is_quiet(self, call: ast.Call) -> bool:
        """Return whether a call has no effect on training. If not, and it calls a function of the script, `inside` is
        the reason found in that function."""
        self.inside = None
        origin = self.script.origin_of(call.func)
        name = origin.rpartition(".")[2]
        if self._reseeds(call, name):
            self.inside = _SEEDED, ()
            return False
        if self.is_read(call):
            return True
        if isinstance(call.func, ast.Name) and call.func.id in {**self.script.functions, **self.script.classes}:
            return self._of_script(call, call.func.id)
        if origin.startswith("random.") and origin in NAMES["quiet_draws"]:
            return True  # of Python's own generator, from which no step draws
        if origin in ("vars", "functools.partial", "next"):
            return len(call.args) > 0 and self._by_argument(origin, call.args[0])
        if any(word.arg in ("out", "inplace") for word in call.keywords):
            return False
        if origin.startswith("torch.nn.") and not origin.startswith("torch.nn.functional."):
            return name[:1].isupper() and origin.count(".") == 2  # a loss or a layer, not a pruning method
        if origin in NAMES["quiet_calls"] or origin.startswith(tuple(NAMES["quiet_modules"])):
            return not (
                name.endswith("_") or (name.startswith(("set_", "use_")) and origin not in NAMES["quiet_calls"])
            )
        if origin.split(".")[0] in ("transformers", "datasets", "peft", "bitsandbytes"):
            return True  # handled or reported by trainer_script
        return self._is_quiet_method(call, name) if isinstance(call.func, ast.Attribute) else self._is_value(call.func)

    def _is_quiet_method(self, call: ast.Call, name: str) -> bool:
        """Return whether a method has no effect on training. `name`: its last name."""
        assert isinstance(call.func, ast.Attribute)
        kind = kind_of(self.script, call.func.value)
        if kind in ("rows", "tokenizer", "model") and name not in ("train", "eval"):
            return True  # likewise
        if self.itself is not None and name in NAMES["quiet_names"] and self._calls_part(call.func):
            return True
        if methods := self._methods(call.func):
            named = ((f"{each.name}, line {each.lineno}", each) for each in methods)
            return all(self._quiet_body(name, each, each.args.args[:1]) for name, each in named)
        if not is_library(self.script.imports.get(root_of(call.func), "os")):
            return False  # of a module that is not read
        if name in NAMES["changing_methods"]:
            return self._is_of_others(call.func.value)
        return name in NAMES["quiet_methods"] and not (name == "to" and narrows(self.script, call))

    def _by_argument(self, name: str, node: ast.expr) -> bool:
        """Return whether a call is quiet by what it is given: options that are printed, `partial(print, flush=True)`,
        `next(iter(loader))`."""
        if name == "vars":
            return self.script.is_option(ast.copy_location(ast.Attribute(node, "any", ast.Load()), node))
        if name == "next":
            return isinstance(node, ast.Call) and _last(node) == "iter"
        return ast.unparse(node) in NAMES["quiet_calls"]

    def _of_script(self, call: ast.Call, name: str) -> bool:
        """Return whether a call of a function or class of the script is quiet."""
        if name in self.script.functions:
            alone = id(call) in self.created and computes_alone(self.script, name)
            return alone or self._function(name)
        return id(call) in self.created or self._object(call, name)

    def _calls_part(self, function: ast.Attribute) -> bool:
        """Return whether a method calls the model or tokenizer that its object holds: `self.model(**inputs)`."""
        own = isinstance(function.value, ast.Name) and function.value.id == self.itself
        return own and not self._methods(function)

    def _is_of_others(self, holder: ast.expr) -> bool:
        """Return whether an object may be changed: a list, a progress bar, a metric, but not a dataset or optimizer."""
        entry = isinstance(holder, ast.Subscript)
        while isinstance(holder, ast.Subscript):  # history["loss"]
            holder = holder.value
        if not isinstance(holder, ast.Name):
            return False
        value = self.script.bound(holder, last=True)
        if entry:
            return isinstance(value, ast.List | ast.Dict) or (
                isinstance(value, ast.Call) and _last(value) in ("dict", "defaultdict")
            )
        if value is None:
            return holder.id in NAMES["quiet_names"]
        if not isinstance(value, ast.Call):
            return isinstance(value, ast.List | ast.Dict | ast.Set | ast.Tuple)
        return _last(value) not in (*self.script.classes, *self.script.functions, *NAMES["optimizers"])

    def _is_value(self, function: ast.expr) -> bool:
        """Return whether a call is one of a model or loss, or of a value that the script has created. Functions that
        a function of the script returns, or a `partial` holds, are looked at."""
        if not isinstance(function, ast.Name):
            return False
        value = self.script.bound(function, last=True)
        if isinstance(value, ast.Lambda):
            return self._quiet_body(f"{function.id}, line {value.lineno}", value)
        if value is None and _is_error(function.id):
            return True
        if value is None:  # an argument of a function, such as its model
            return function.id in NAMES["quiet_names"]
        if not isinstance(value, ast.Call):
            return False
        maker = value.args[0] if _last(value) == "partial" and value.args else value.func
        name = maker.id if isinstance(maker, ast.Name) else ""
        if maker is not value.func and name not in self.script.functions:
            return name in NAMES["quiet_calls"]
        if maker is not value.func:
            return self._function(name)
        inner = [
            each
            for outer in self.script.namesakes.get(name, ())
            for each in ast.walk(outer)
            if each is not outer and isinstance(each, ast.FunctionDef | ast.Lambda)
        ]
        return all(self._quiet_body(f"{name}, line {each.lineno}", each) for each in inner)

    def _object(self, call: ast.Call, name: str) -> bool:
        """Return whether creating an object of a class of the script has no effect on training, special methods and
        properties included. A module or data set has none, unless it gets another module or an optimizer. If it gets a
        model, all its methods are looked at; `object_flows.py` refuses it before the training."""
        arguments = [*call.args, *(word.value for word in call.keywords)]
        holds = any(kind_of(self.script, each) == "model" or root_of(each) == "model" for each in arguments)
        kinds = self._lineage(self.script.classes[name])
        bases = {ast.unparse(base).rpartition(".")[2] for kind in kinds for base in kind.bases}
        inert = bases & {"Module", "Dataset", "IterableDataset"}
        if inert and not holds and not any(self._holds_module(each) for each in arguments):
            return True
        own = [line for kind in kinds for line in kind.body if isinstance(line, ast.FunctionDef)]
        implicit = [each for each in own if holds or each.name.startswith("__") or _is_property(each)]
        return all(self._quiet_body(f"{name}.{m.name}, line {m.lineno}", m, m.args.args[:1]) for m in implicit)

    def _methods(self, function: ast.Attribute) -> list[ast.FunctionDef]:
        """Return the methods of the script that a call may call. In a method, `self.reset()` is that of its class, or
        of one derived from it."""
        if not (isinstance(function.value, ast.Name) and function.value.id == self.itself):
            return [method] if (method := self.own_method(function)) is not None else []
        caller = self.script.scopes.get(id(function))
        lines = [self._lineage(kind) for kind in self.script.classes.values()]
        of_caller = [line for line in lines if any(caller in kind.body for kind in line)]
        methods = [_method(line, function.attr) for line in of_caller]
        return [each for each in methods if each is not None] if None not in methods else []

    def own_method(self, function: ast.Attribute) -> ast.FunctionDef | None:
        """Return the called method of a class of the script, also one of its bases."""
        holder: ast.expr | None = function.value
        while isinstance(holder, ast.Name):
            holder = self.script.bound(holder, last=True)
        name = holder.func.id if isinstance(holder, ast.Call) and isinstance(holder.func, ast.Name) else ""
        return _method(self._lineage(self.script.classes[name]), function.attr) if name in self.script.classes else None

    def _lineage(self, kind: ast.ClassDef, depth: int = 0) -> list[ast.ClassDef]:
        """Return a class and its bases in the script."""
        names = [base.id for base in kind.bases if isinstance(base, ast.Name)] if depth < 10 else []
        bases = [self.script.classes[each] for each in names if each in self.script.classes]
        return [kind, *(each for base in bases for each in self._lineage(base, depth + 1))]

    def _holds_module(self, node: ast.AST) -> bool:
        """Return whether an argument names an object that is not one of data: a module, an optimizer."""
        names = [each for each in ast.walk(node) if isinstance(each, ast.Name)]
        values = [self.script.bound(each, last=True) for each in names]
        origins = [self.script.origin_of(each.func) for each in values if isinstance(each, ast.Call)]
        own = (*self.script.classes, *self.script.functions)
        return any(
            each in own or each.startswith(("torch.nn.", "torch.optim.")) or each.endswith(".prepare")
            for each in origins
        )

    def _function(self, name: str) -> bool:
        """Return whether all functions of this name in the script are quiet."""
        functions = self.script.namesakes.get(name, [self.script.functions[name]])
        numbered = {(f"{name}, line {each.lineno}" if len(functions) > 1 else name): each for each in functions}
        if name in self.script.ambiguous and len(functions) == 1:
            return False  # it is assigned, too
        return all(self._quiet_body(own, each) for own, each in numbered.items())

    def _quiet_body(self, name: str, function: Any, itself: Sequence[ast.arg] = ()) -> bool:
        """Check the statements of a function. `itself`: the object whose attributes a method may set."""
        name = f"{name}, repeated" if self.repeated else name
        if name not in self.looked_at:
            self.looked_at[name] = None  # for recursive functions
            gaps: list[Reason] = []
            own = itself[0].arg if itself else None
            inner = QuietCode(self.script, lambda *gap: gaps.append(_reason(*gap)), self.is_read, self.looked_at, own)
            inner.repeated, inner.called = self.repeated, name
            if (by := self.replaced(function)) is not None:
                gaps.append(_reason(by, _MODEL))
            body = [ast.Expr(function.body)] if isinstance(function, ast.Lambda) else getattr(function, "body", [])
            for line in body:
                inner.statement(line, frozenset())
            self.looked_at[name] = gaps[0] if gaps else None
        self.inside = self.looked_at[name]
        return self.inside is None


def _reason(node: ast.AST, why: str, *by: str) -> Reason:
    """The message about a call of a function whose statement is a gap."""
    if " of line " in why:  # of a function that it calls
        return why, by
    where = f"line {getattr(node, 'lineno', 0)}, {code_of(node)},"
    if why == _MODEL:
        return f"the effect of {where} on model, data or optimizer is unknown", by
    return f"because of {where} inside: {why}", by


def _method(kinds: Sequence[ast.ClassDef], name: str) -> ast.FunctionDef | None:
    """Return the method that an object of the first class has, also of its bases."""
    lines = (line for kind in kinds for line in kind.body)
    return next((m for m in lines if isinstance(m, ast.FunctionDef) and m.name == name), None)


def _is_property(method: ast.FunctionDef) -> bool:
    return any("property" in ast.unparse(each) or "setter" in ast.unparse(each) for each in method.decorator_list)


def _is_error(name: str) -> bool:
    """Return whether a name is a built-in exception."""
    kind = getattr(builtins, name, None)
    return isinstance(kind, type) and issubclass(kind, BaseException)


_NEW = ast.Call | ast.Compare | ast.BinOp | ast.BoolOp | ast.Constant  # expressions with a new value, not an alias
_NEW_CONTAINERS = ast.Dict | ast.List | ast.Set | ast.DictComp | ast.ListComp | ast.SetComp
_DEFINITIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_NO_EFFECT = (
    _DEFINITIONS | ast.Import | ast.ImportFrom | ast.Pass | ast.Global | ast.Nonlocal | ast.Break | ast.Continue
)


def _ends_program(node: ast.expr | None) -> bool:
    """Return whether code ends the program without an error: `sys.exit()`, `raise SystemExit`, but not `sys.exit(1)`
    of a loss that is not a number."""
    function = node.func if isinstance(node, ast.Call) else node
    name = ast.unparse(function) if function is not None else ""
    if name not in (*_EXITS, "SystemExit", "KeyboardInterrupt", "StopIteration"):
        return False
    status = node.args[0] if isinstance(node, ast.Call) and node.args else ast.Constant(None)
    fails = status.value if isinstance(status, ast.Constant) else isinstance(status, ast.JoinedStr)
    return not fails


def _makes(call: ast.Call) -> bool:
    """Return whether a call makes a container: `defaultdict(list)`, also `field(default_factory=dict)`."""
    factories = [ast.unparse(word.value) for word in call.keywords if word.arg == "default_factory"]
    return {_last(call), *factories} & _CONTAINERS != set()


_CONTAINERS = {
    "dict",
    "list",
    "set",
    "defaultdict",
    "Counter",
    "OrderedDict",
    "deque",
    "zeros",
    "ones",
    "full",
    "empty",
}


def _last(call: ast.Call) -> str:
    return ast.unparse(call.func).rpartition(".")[2]
