"""`__init__` and `configure_optimizers` of a LightningModule, statement by statement.

In: the class, its method and the loop that reads the script. Out: the model's mode (training or evaluation) when
`fit` begins, and a gap for each statement that may change the model or its optimizer and that no other reader takes.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from lockstep.lab.import_config.bound_names import CHANGING, names_in, root_of, targets
from lockstep.lab.import_config.kinds import casts
from lockstep.lab.import_config.model_defaults import without_dropout
from lockstep.lab.import_config.observing import Observing, names_of_lightning, parts_of, sets_part
from lockstep.lab.import_config.quiet_code import QuietCode
from lockstep.lab.import_config.script import Script, Unknown, code_of
from lockstep.lab.import_config.table import NAMES
from lockstep.lab.import_config.train_mode import TrainMode

_UNKNOWN = "its effect on model, data or optimizer is unknown"
_FREEZES = "model.freeze names the weights that are not trained"
_EPOCH = 'Lightning advances it once an epoch, as its "interval" is not "step"; in lockstep it advances with every step'
EVALUATED = "modules are trained in evaluation mode, or their modes are unknown"
_LEAVES = "Lightning since 2.2 leaves a model in its mode, and from_pretrained gives one in evaluation mode"
RESTORED = ("validation_", "test_", "predict_", "on_validation_epoch", "on_test_epoch")  # Lightning restores modes
_BLOCKS = ast.If | ast.For | ast.While | ast.With | ast.Try
_MODES = ("train", "eval", "freeze", "unfreeze", "requires_grad_")
_MOVES = ("get_peft_model", "compile", "prepare_model_for_kbit_training", "to", "cuda", "train")
_SCHEDULES = ("torch.optim.lr_scheduler.", "lr_scheduler.", "transformers.")
_OPTIMIZERS = ("torch.optim.", "optim.", "transformers.", "bitsandbytes.", "bnb.", "lion_pytorch.")


def statements(script: Script, lines: list[Any], decided: bool = True) -> Iterator[tuple[Any, bool]]:
    """Yield the statements of a body that may run, those of blocks as well, and whether each certainly runs once."""
    for line in lines:
        if isinstance(line, ast.If) and (taken := script.known(line.test, Unknown)) is not Unknown:
            yield from statements(script, line.body if taken else line.orelse, decided)
            continue
        yield line, decided
        if isinstance(line, _BLOCKS):
            once = decided and isinstance(line, ast.With)
            for part in ("body", "orelse", "finalbody"):
                yield from statements(script, getattr(line, part, []), once)
            for handler in getattr(line, "handlers", ()):
                yield from statements(script, handler.body, False)


class _Gaps:
    """Gaps of one method, at most one a line."""

    def __init__(self, draft: Any) -> None:
        self.draft, self.lines = draft, set()  # type: ignore[var-annotated]

    def add(self, node: Any, why: str = _UNKNOWN, *by: str) -> None:
        line = getattr(node, "lineno", 0)
        if line not in self.lines:
            self.lines.add(line)
            self.draft.unclear(f"line {line}: {code_of(node)}", why, *by)


# -- __init__ ----------------------------------------------------------------------------------------------------------


def learned_part(kind: ast.ClassDef) -> str | None:
    """Return the code of the model that a training step computes its loss with: `self.model`."""
    methods = {each.name: each for each in kind.body if isinstance(each, ast.FunctionDef)}
    names = [
        ast.unparse(node.func)
        for name in ("training_step", "forward")
        for node in (ast.walk(methods[name]) if name in methods else ())
        if isinstance(node, ast.Call) and any(word.arg is None for word in node.keywords)
    ]
    names = [each for each in names if each.startswith("self.") and each.count(".") == 1]
    return next((each for each in names if each.partition(".")[2] not in names_of_lightning()), None)


class Start:
    """`__init__` of a module. `transformers`: whether its loss is that of a pretrained model."""

    def __init__(self, kind: ast.ClassDef, method: ast.FunctionDef, loop: Any, transformers: bool) -> None:
        self.kind, self.method, self.script, self.draft = kind, method, loop.script, loop.draft
        self.gaps, self.transformers = _Gaps(loop.draft), transformers
        self.itself = method.args.args[0].arg if method.args.args else "self"
        self.model = learned_part(kind) or f"{self.itself}.model"
        self.trains: bool | None = None  # the mode of the model; None: it is not created yet
        self.by: ast.Call | None = None  # what has set the mode
        self.before: tuple[bool, ast.Call] | None = None  # of a model that has another name first
        self.calls = [each for each in ast.walk(method) if isinstance(each, ast.Call)]
        self.stored = [ast.unparse(each) for each in ast.walk(method) if self._is_stored(each)]

    def check(self) -> None:
        quiet = QuietCode(self.script, self._gap, self._is_read, itself=self.itself)
        for line in self.method.body:
            quiet.statement(line, frozenset())
        for line, once in statements(self.script, self.method.body):
            if isinstance(line, ast.Return) and (line is not self.method.body[-1] or line.value is not None):
                self.gaps.add(line, "the lines after it may not run")
            if not isinstance(line, _BLOCKS):
                self._line(line, once)
            elif self.model in [ast.unparse(each) for target in targets(line) for each in ast.walk(target)]:
                self.gaps.add(line, "which model is trained is known only when the script runs")
        for node in ast.walk(self.method):
            if isinstance(node, ast.Call) and casts(self.script, node):
                self.gaps.add(node, _UNKNOWN, "model.dtype", "precision")
            if self._replaces(node):
                self.gaps.add(node, "it replaces a method of the module or of Lightning, or its class")
        for block in (each for each in ast.walk(self.method) if isinstance(each, _BLOCKS)):
            for head in (getattr(block, "test", None), getattr(block, "iter", None), *getattr(block, "items", ())):
                self._modes(head, False)

    def _is_read(self, call: ast.Call) -> bool:
        return is_read(call, self.itself) or self.script.origin_of(call.func).startswith("torchmetrics.")

    def _is_stored(self, node: ast.AST) -> bool:
        return isinstance(node, ast.Attribute | ast.Name) and not isinstance(node.ctx, ast.Load)

    def _replaces(self, node: ast.AST) -> bool:
        if not isinstance(node, ast.Attribute) or ast.unparse(node.value) != self.itself:
            return isinstance(node, ast.Attribute) and node.attr in ("__class__", "__dict__", "forward")
        if node.attr in ("__dict__", "__class__"):
            return True
        methods = {each.name for each in self.kind.body if isinstance(each, ast.FunctionDef)}
        return not isinstance(node.ctx, ast.Load) and node.attr in methods | names_of_lightning()

    def _line(self, line: Any, once: bool) -> None:
        """Follow the mode through a statement. `once`: whether it certainly runs, and once."""
        self._modes(line, once)
        if not isinstance(line, ast.Assign | ast.AnnAssign | ast.AugAssign):
            return
        own = line.targets if isinstance(line, ast.Assign) else [line.target]
        inner = [each for target in own for each in ast.walk(target)]
        if self.model not in [ast.unparse(each) for each in inner if self._is_stored(each)]:
            return
        value = line.value
        plain = isinstance(line, ast.Assign | ast.AnnAssign) and self.model in map(ast.unparse, own)
        if value is None or not plain or (not once and self.transformers):
            self.gaps.add(line, "which model is trained is known only when the script runs")
        elif self.trains is None or not self.transformers:
            self._created(value)
        elif not (isinstance(value, ast.Call) and self._is_wrapped(value)):
            self.gaps.add(line, "another model takes the place of the one that was loaded")

    def _created(self, value: ast.expr) -> None:
        inner: Any = value
        for _ in range(5):
            inner = self.script.bound(inner, last=True) if isinstance(inner, ast.Name) else inner
        self.trains = TrainMode(self.script, set(), set(), False)._created(inner) if inner is not None else True
        self.by = None
        if self.before is not None and isinstance(value, ast.Name):
            self.trains, self.by = self.before

    def _is_wrapped(self, value: ast.Call) -> bool:
        """Return whether a call wraps or moves the model: `get_peft_model(self.model, config)`."""
        name = self.script.origin_of(value.func).rpartition(".")[2]
        own = isinstance(value.func, ast.Name) and value.func.id in self.script.functions
        holder = [value.func.value] if isinstance(value.func, ast.Attribute) else []
        return not own and name in _MOVES and self.model in map(ast.unparse, (*value.args[:1], *holder))

    def _modes(self, node: Any, once: bool) -> None:
        calls = (each for each in ast.walk(node) if isinstance(each, ast.Call)) if node is not None else ()
        for call in calls:
            if not isinstance(call.func, ast.Attribute) or call.func.attr not in ("train", "eval"):
                continue
            words = [*call.args, *(word.value for word in call.keywords)]
            mode = self.script.known(words[0], Unknown) if words else call.func.attr == "train"
            whose = self._whose(call.func.value)
            if whose == "another":
                continue
            known = whose == "model" and once and isinstance(mode, bool) and not isinstance(node, ast.expr)
            if not self.transformers:
                if mode is not True:
                    self.gaps.add(call, EVALUATED)
            elif not known or self._is_lazy(node, call):
                self.gaps.add(call, EVALUATED)
            elif self.trains is not None:
                self.trains, self.by = mode, call
            else:
                self.before = mode, call

    def _is_lazy(self, node: ast.AST, call: ast.Call) -> bool:
        """Return whether a call may not run with its statement: in a lambda, a branch or a nested function."""
        lazy = ast.IfExp | ast.BoolOp | ast.Lambda | ast.FunctionDef | ast.ListComp | ast.GeneratorExp | ast.ClassDef
        return any(call in ast.walk(each) for each in ast.walk(node) if isinstance(each, lazy))

    def _whose(self, node: ast.expr) -> str:
        """Return whether an expression is the model ("model"), a part of it, or a model that is not trained."""
        text = ast.unparse(node)
        if text in (self.itself, self.model):
            return "model"
        value = node
        if isinstance(node, ast.Name) or (isinstance(node, ast.Attribute) and ast.unparse(node.value) == self.itself):
            lines = [each for each in ast.walk(self.method) if isinstance(each, ast.Assign)]
            values = [each.value for each in lines if text in map(ast.unparse, each.targets)]
            if len(values) != 1 or self.stored.count(text) != 1:
                return "part"
            value = values[0]
            if any(ast.unparse(each.value) == text and self.model in map(ast.unparse, each.targets) for each in lines):
                return "model"
            if ast.unparse(value) == self.model:
                return "model"
            used = [
                each for each in lines if root_of(each.value) == text or text in map(ast.unparse, ast.walk(each.value))
            ]
            if used or (isinstance(node, ast.Attribute) and node.attr in {*parts_of(self.kind)}):
                return "part"
        loaded = isinstance(value, ast.Call) and ast.unparse(value.func).endswith((".from_pretrained", ".from_config"))
        return "another" if loaded else "part"

    def _gap(self, node: ast.AST, why: str, *by: str) -> None:
        self.gaps.add(node, _FREEZES if by == ("model.freeze",) else _UNKNOWN, *by)


def is_read(call: ast.Call, itself: str) -> bool:
    """Return whether a call in a method is read elsewhere, or only logs."""
    text = ast.unparse(call.func)
    own = (f"{itself}.{name}" for name in ("save_hyperparameters", "log", "log_dict"))
    loads = (".from_pretrained", ".from_config", ".gradient_checkpointing_enable", ".enable_input_require_grads")
    return text in ("super", "super().__init__", *own) or text.endswith(loads)


def mode(kind: ast.ClassDef, start: Start | None, loop: Any) -> None:
    """Turn off dropout for a pretrained model that is in evaluation mode when it is trained."""
    others = [line for line in kind.body if isinstance(line, ast.FunctionDef) and not line.name.startswith(RESTORED)]
    calls = (c.node for c in loop.script.calls if c.name == "train" and (start is None or c.node not in start.calls))
    refused = any(call in ast.walk(line) for call in calls for line in others)
    if refused or (start is not None and start.trains) or _trained_outside(kind, loop.script):
        return
    by = start.by if start is not None else None
    where = f"line {kind.lineno}: no model.train() is called"
    where = f"line {by.lineno}: {code_of(by)}" if by is not None else where
    loop.draft.at_end.append(lambda draft: without_dropout(draft, where, _LEAVES))


def only_trains(kind: ast.ClassDef, method: ast.FunctionDef) -> bool:
    """Return whether a method only sets the whole module to training mode before the first step."""
    if method.name != "on_train_start" or method.decorator_list or len(method.args.args) != 1:
        return False
    itself = method.args.args[0].arg
    on = {f"{each}.train()" for each in (itself, learned_part(kind) or f"{itself}.model")}
    return all(isinstance(line, ast.Expr) and ast.unparse(line.value) in on for line in method.body)


def _trained_outside(kind: ast.ClassDef, script: Script) -> bool:
    """Return whether the module is set to training mode before fit() where it is created: `net.train()`."""
    fits = [c for c in script.calls if c.name == "fit" and c.receiver is not None]
    for call in script.calls:
        holder = call.receiver
        if call.name != "train" or call.condition is not None or not isinstance(holder, ast.Name):
            continue
        value, words = script.bound(holder, last=True), [*call.node.args, *(w.value for w in call.node.keywords)]
        on = all(script.known(each, Unknown) is True for each in words)
        of_kind = isinstance(value, ast.Call) and script.origin_of(value.func) == kind.name
        first = fits and script.scopes.get(id(fits[0].node)) is script.scopes.get(id(call.node))
        if on and of_kind and first and script.order[id(call.node)] < script.order[id(fits[0].node)]:
            return True
    return False


def modes_elsewhere(script: Script, methods: set[Any]) -> Iterator[ast.Call]:
    """Yield calls that set a mode in functions outside of the module, but for those of another model that the function
    makes, and in functions that are called only when Lightning validates, or after fit()."""
    fits = [script.order[id(c.node)] for c in script.calls if c.name == "fit" and c.receiver is not None]
    end = max(fits, default=0)
    for call in script.calls:
        function = script.scopes.get(id(call.node))
        while function is not None and script.scopes.get(id(function)) is not None:
            function = script.scopes.get(id(function))
        if call.name not in _MODES or call.receiver is None or not isinstance(function, ast.FunctionDef):
            continue
        root = ast.Name(root_of(call.receiver), ast.Load())
        values = script.bindings.get((id(script.scopes.get(id(call.node))), root.id), [])
        if function in methods or (values and all(isinstance(each, ast.Call) for each in values)):
            continue
        uses = [n for n in ast.walk(script.tree) if isinstance(n, ast.Name) and n.id == function.name]
        scopes = [script.scopes.get(id(each)) for each in uses]
        restored = [isinstance(s, ast.FunctionDef) and s in methods and s.name.startswith(RESTORED) for s in scopes]
        late = [scope is None and script.order[id(each)] > end for each, scope in zip(uses, scopes, strict=True)]
        if not all(one or other for one, other in zip(restored, late, strict=True)):
            yield call.node


def own_step(kind: ast.ClassDef, method: ast.FunctionDef, loop: Any) -> None:
    """Check that a training step with a loss of the script's own sets no mode and changes no weight in place."""
    itself = method.args.args[0].arg if method.args.args else "self"
    observing = Observing(loop.script, kind, itself, method)
    for node in ast.walk(method):
        called = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        last = node.func.attr if called and observing.is_part(node.func.value) else ""  # type: ignore[attr-defined]
        if last in _MODES or (last.endswith("_") and not last.endswith("__")) or sets_part(kind, node, itself):
            why = "it sets a mode or changes the module within a step, beside what the loss learns"
            loop.draft.unclear(f"line {node.lineno}: {code_of(node)}", why)  # type: ignore[attr-defined]


# -- configure_optimizers ----------------------------------------------------------------------------------------------


def optimizers(kind: ast.ClassDef, method: ast.FunctionDef, loop: Any) -> None:
    """Check that the method only makes an optimizer of the module's weights and its schedule, and returns them."""
    gaps = _Gaps(loop.draft)
    itself = method.args.args[0].arg if method.args.args else "self"
    own = {each.name for each in kind.body if isinstance(each, ast.FunctionDef)}
    script: Script = loop.script

    def is_read(call: ast.Call) -> bool:
        text, origin = ast.unparse(call.func), script.origin_of(call.func)
        name, root = origin.rpartition(".")[2], root_of(call.func)
        if text.endswith(".train_dataloader") or text in (f"{itself}.{each}" for each in own):
            return True  # read where it stands
        of_library = root in script.imports and root not in script.functions and root not in script.classes
        makes = origin.startswith(_OPTIMIZERS) and (name in NAMES["optimizers"] or name[:1].isupper())
        schedules = origin.startswith(_SCHEDULES) and ("schedule" in name or name[:1].isupper())
        return of_library and (makes or schedules)

    quiet = QuietCode(script, gaps.add, is_read, itself=itself)
    for line in method.body:
        if not _is_entry(script, line):
            quiet.statement(line, frozenset())
    for node in Observing(script, kind, itself, method, _parts(kind, method, itself)).effects():
        if not (isinstance(node, ast.Call) and is_read(node)):
            gaps.add(node, "its effect on the model is unknown")
    for call in (each for each in ast.walk(method) if isinstance(each, ast.Call)):
        if isinstance(call.func, ast.Attribute) and call.func.attr in ("train", "eval"):
            gaps.add(call, EVALUATED)
    _returned(method, loop, gaps)
    _schedule(kind, method, loop)


def _is_entry(script: Script, line: ast.stmt) -> bool:
    """Return whether a line is `scheduler["interval"] = "step"` of a name that holds a dictionary."""
    target = line.targets[0] if isinstance(line, ast.Assign) and len(line.targets) == 1 else None
    if not isinstance(target, ast.Subscript) or not isinstance(target.value, ast.Name):
        return False
    of_entry = script.known(target.slice) in ("interval", "frequency", "monitor", "name", "strict")
    return of_entry and isinstance(script.bound(target.value, last=True), ast.Dict)


def _parts(kind: ast.ClassDef, method: ast.FunctionDef, itself: str) -> set[str]:
    """Return the attributes that other methods train with, and those that this one reads and does not set."""
    inner = ast.ClassDef("", [], [], [line for line in kind.body if line is not method], [])
    own = [each for each in ast.walk(method) if isinstance(each, ast.Attribute) and ast.unparse(each.value) == itself]
    anew = {each.attr for each in own if not isinstance(each.ctx, ast.Load)}
    return {*parts_of(inner), *({each.attr for each in own} - anew)}


def _returned(method: ast.FunctionDef, loop: Any, gaps: _Gaps) -> None:
    """Check that one statement returns, the last one, and that it returns the optimizer."""
    script, scripts = loop.script, {id(node) for node in ast.walk(method)}
    returns = [(line, once) for line, once in statements(script, method.body) if isinstance(line, ast.Return)]
    for line, once in returns:
        if not once or len(returns) > 1:
            gaps.add(line, "which optimizer and schedule it returns is known only when the script runs", "optim.name")
    created = [c for c in loop.optimizers if id(c.node) in scripts]
    for call in created[:1]:
        if not _returns(method, call.node, through=False):
            gaps.add(call.node, "configure_optimizers does not return it", "optim.name")
    empty = not returns or returns[0][0].value is None or ast.unparse(returns[0][0].value) in ("None", "[]", "()")
    if not created and empty:
        gaps.add(returns[0][0] if returns else method, "it returns no optimizer", "optim.name")
    own = {**script.functions, **script.classes}
    holders = {name for call in created for name in _names_of(method, call.node)}
    for call in (each for each in ast.walk(method) if isinstance(each, ast.Call) and created):
        passed = any(isinstance(each, ast.Name) and each.id in holders for each in call.args)
        if passed and isinstance(call.func, ast.Name) and call.func.id in own:
            gaps.add(call, "its effect on the optimizer is unknown", "optim.name")


def _names_of(method: ast.FunctionDef, node: ast.AST) -> set[str]:
    lines = (each for each in ast.walk(method) if isinstance(each, ast.Assign) and each.value is node)
    return {name for line in lines for target in line.targets for name in names_in(target)}


def _schedule(kind: ast.ClassDef, method: ast.FunctionDef, loop: Any) -> None:
    """Check when Lightning advances the schedule."""
    script, scripts = loop.script, {id(node) for node in ast.walk(method)}
    inside = {id(node): line for line in kind.body if isinstance(line, ast.FunctionDef) for node in ast.walk(line)}
    created = [
        c for c in script.calls if id(c.node) in inside and "schedule" in c.name.lower() and c.name != "lr_schedulers"
    ]
    if not created:
        return
    first = created[0].node
    if id(first) not in scripts:  # another method makes it
        maker = inside[id(first)].name
        calls = (each for each in ast.walk(method) if isinstance(each, ast.Call))
        first = next((each for each in calls if ast.unparse(each.func).rpartition(".")[2] == maker), first)
    entries: dict[Any, list[Any]] = {}
    for node in (each for each in ast.walk(method) if isinstance(each, ast.Dict)):
        for key, value in zip(node.keys, node.values, strict=True):
            entries.setdefault(script.known(key), []).append(script.known(value))
    for line in (each for each in ast.walk(method) if isinstance(each, ast.Assign)):
        for target in (each for each in line.targets if isinstance(each, ast.Subscript)):
            entries.setdefault(script.known(target.slice), []).append(script.known(line.value))
    if any(each not in (None, False) for each in entries.get("reduce_on_plateau", [])):
        loop.draft.lacks(str(created[0]), "it follows a score", "optim.schedule")
    elif not _returns(method, first):
        loop.draft.lacks(str(created[0]), "configure_optimizers does not return it", "optim.schedule")
    elif set(entries.get("interval", [None])) != {"step"} or set(entries.get("frequency", [1])) != {1}:
        loop.draft.lacks(str(created[0]), _EPOCH, "optim.schedule")


def _returns(method: ast.FunctionDef, call: ast.AST, through: bool = True) -> bool:
    """Return whether a method returns what a call makes, by any of its names. `through`: or what is made of that."""
    waiting: list[ast.AST] = [each for each in ast.walk(method) if isinstance(each, ast.Return)]
    looked_at: set[str] = set()
    while waiting:
        node = waiting.pop()
        if node is call:
            return True
        if isinstance(node, ast.Name | ast.Attribute) and (name := ast.unparse(node)) not in looked_at:
            looked_at.add(name)
            for line in (each for each in ast.walk(method) if isinstance(each, ast.Assign)):
                inner = [each for target in line.targets for each in ast.walk(target)]
                waiting += [line.value] if name in map(ast.unparse, inner) else []
        if through or not isinstance(node, ast.Call):
            waiting += ast.iter_child_nodes(node)
    return False


# -- training_step -----------------------------------------------------------------------------------------------------


def step_effect(script: Script, kind: ast.ClassDef, method: ast.FunctionDef, node: ast.expr) -> ast.AST | None:
    """Return the first part of an expression of a step, one that is logged, that does more than compute a value."""
    itself = method.args.args[0].arg if method.args.args else "self"
    lines = [each for each in ast.walk(kind) if isinstance(each, ast.Assign) and isinstance(each.value, ast.Call)]
    origins = {ast.unparse(each.targets[0]): script.origin_of(each.value.func) for each in lines}  # type: ignore[attr-defined]
    metrics = {name for name, origin in origins.items() if origin.partition(".")[0] in ("torchmetrics", "evaluate")}
    reads = {*metrics, *(f"{itself}.{each}" for each in ("log", "log_dict", "optimizers", "lr_schedulers"))}
    effects: list[ast.AST] = []
    quiet = QuietCode(
        script, lambda each, *_: effects.append(each), lambda call: ast.unparse(call.func) in reads, itself=itself
    )
    quiet.repeated = True
    quiet.statement(ast.copy_location(ast.Expr(node), node), frozenset())
    inside = {id(each) for each in ast.walk(node)}
    for each in Observing(script, kind, itself, method).effects():
        if id(each) in inside and not (isinstance(each, ast.Call | ast.Attribute) and _reads(each, itself)):
            effects.append(each)
    calls = (each for each in ast.walk(node) if isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute))
    changing = (*CHANGING, "train", "eval")
    effects += [call for call in calls if call.func.attr in changing]  # type: ignore[attr-defined]
    return effects[0] if effects else None


def _reads(node: ast.Call | ast.Attribute, itself: str) -> bool:
    """Return whether a node is `self.lr_schedulers()`, or a method of it that returns the rate."""
    text = ast.unparse(node.func if isinstance(node, ast.Call) else node)
    own = tuple(f"{itself}.{each}" for each in ("lr_schedulers", "optimizers"))
    return text in own or (text.startswith(own) and text.endswith(".get_last_lr"))
