"""Statements in and around a training loop, checked against a closed list; any other statement is a gap.

In: a `Script` with its own training loop. Out: `Statements`: the settings of each step (accumulation, epochs), and a
gap with its line for each statement that is not on the list. No statement is skipped silently.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import Any

from lockstep.lab.import_config import step_order
from lockstep.lab.import_config.batch_counts import BatchCounts
from lockstep.lab.import_config.bound_names import names_in, root_of
from lockstep.lab.import_config.library_names import is_own, is_progress, is_seed
from lockstep.lab.import_config.loader_calls import entry_of
from lockstep.lab.import_config.model_defaults import without_dropout
from lockstep.lab.import_config.model_inputs import ModelInputs, is_cross_entropy, windows_of_ids
from lockstep.lab.import_config.quiet_code import QuietCode
from lockstep.lab.import_config.script import DTYPES, Script, Unknown, code_of
from lockstep.lab.import_config.table import NAMES, RunDraft
from lockstep.lab.import_config.train_mode import PART, TrainMode

_UNKNOWN = "init does not understand this statement in a training loop: move it out of the loop, or write the "
_UNKNOWN += "rest with --partial and see how-to/own-module on the site"
_COMPUTED = (
    "this computation of the loss is not understood: init reads model(**batch), and arguments of the batch by name"
)
_NO_LOADER = "the loop around backward() is not one over the batches of a DataLoader: no line of it is read"
_ELSEWHERE = (
    "it is not inside a loop over the batches of a DataLoader. init follows methods of classes with one instance, "
    "and undecorated functions that return only at their end; move other code into the loop"
)
_HOLDING = ast.Name | ast.Subscript | ast.Dict | ast.List | ast.Tuple | ast.IfExp | ast.BoolOp
Role = tuple[str, Any]  # ("batch", "whole" | "first" | "second" | key), ("out", None), ("loss", divisor)


@dataclass
class Statements:
    """A walk over the functions that train."""

    script: Script
    draft: RunDraft
    transformers: bool  # the loss is computed by a transformers model
    optimizers: list[ast.Call]
    created: frozenset[int] = frozenset()  # ids of the calls that make the model and the data of `task: module`
    accumulated: int | None = None  # micro-batches per step, from a condition around optimizer.step()
    epoch_loop: ast.For | None = None
    batch_loop: ast.For | None = None
    roles: dict[str, Role] = field(default_factory=dict)
    events: list[tuple[str, int, int]] = field(default_factory=list)  # kind, line, nesting of conditions
    counters: dict[str, int] = field(default_factory=dict)  # name of a batch index -> its first value
    loaders: set[str] = field(default_factory=set)  # code of the iterated loaders
    path: set[str] = field(default_factory=set)  # names that the loss depends on
    learned: set[int] = field(default_factory=set)  # ids of the calls of the model that the loss is made of
    inputs: ModelInputs = field(default_factory=ModelInputs)
    contexts: list[tuple[ast.expr, ast.With]] = field(default_factory=list)  # around the processing of a batch
    walked: bool = False  # whether the loop over batches was visited
    trained: bool = False  # whether the statements visited are repeated by the loop over epochs, or follow training
    divisor: Any = None  # of the loss
    every_is_known: bool = True  # whether the condition around a step was understood
    loss_is_known: bool = False  # whether backward() is called on a loss that was understood
    of_logits: bool = False  # whether the loss is the cross entropy of a classifier's logits, as the model's own is
    by_accelerator: bool = False  # whether backward() is Accelerate's, which divides and scales the loss
    holders: dict[str, str] = field(default_factory=dict)  # event -> code of the optimizer that it is of
    scaled: bool = False  # whether a GradScaler scales the loss
    accumulates: bool = False  # whether Accelerate decides which batches make a step
    guard: tuple[str, bool] | None = None  # condition of a step, and whether the last batch of an epoch meets it

    def __post_init__(self) -> None:
        self.parents = {id(child): node for node in ast.walk(self.script.tree) for child in ast.iter_child_nodes(node)}
        self.quiet = QuietCode(self.script, self.report, self._is_read, created=self.created)
        self.drivers: dict[int, Any] = {}
        self.reported: set[int] = set()
        self.accumulates = any(c.name == "accumulate" for c in self.script.calls)

    def report(self, node: ast.AST, why: str = _UNKNOWN, *by: str) -> None:
        if id(node) not in self.reported:
            self.reported.add(id(node))
            self.draft.unclear(f"line {getattr(node, 'lineno', 0)}: {code_of(node)}", why, *by)

    # -- which code trains ---------------------------------------------------------------------------------------------

    def read(self) -> None:
        backward = [c for c in self.script.calls if c.name == "backward"]
        if len(backward) != 1:
            for call in backward[1:]:
                self.report(call.node, "gradients are computed in a second place")
            if not backward:
                self.draft.unclear("the training loop", "no backward() is called in it: no gradient is computed")
                return
        self._drivers(backward[0].node)
        loops = [n for n in self.around(backward[0].node) if isinstance(n, ast.For | ast.While)]
        if not loops or not isinstance(loops[0], ast.For) or not self._is_loader(loops[0].iter):
            if not loops:
                self.report(backward[0].node, _ELSEWHERE)
            else:
                head = loops[0].iter if isinstance(loops[0], ast.For) else loops[0].test
                self.report(head, windows_of_ids(self.script) or _NO_LOADER)
            self._outside(loops)
            return
        self.batch_loop = loops[0]
        self._path(backward[0].node)
        for function in self.drivers.values():
            if (by := self.quiet.replaced(function, "training_decorators")) is not None:
                self.report(by, f"this decorator may replace {function.name}, which trains, by another function")
        top = [self.script.tree] if not self.drivers or None in self.drivers.values() else []
        for scope in (*top, *(f for f in self.drivers.values() if f is not None)):
            self.trained = False
            self._around_loop(scope.body)
        if not top:
            self._around_loop(self.script.tree.body)
        if self.walked:
            step_order.check(self)
            self._check_modes()
        self.draft.at_end.append(self.inputs.check)

    def _outside(self, loops: list[Any]) -> None:
        """Check the statements around a loop that is not understood."""
        self.batch_loop = loops[-1] if loops else None
        bodies = {id(each): each.body for each in (self.script.tree, *filter(None, self.drivers.values()))}
        for line in (line for body in bodies.values() for line in body if not self._trains(line)):
            self.quiet.statement(line, frozenset())
        self.batch_loop = None

    def _drivers(self, backward: ast.AST) -> None:
        """Return the function that contains the loop, and its callers."""
        waiting = [self.script.scopes.get(id(backward))]
        while waiting:
            scope = waiting.pop()
            if id(scope) in self.drivers:
                continue
            self.drivers[id(scope)] = scope
            name = getattr(scope, "name", None)
            calls = [c for c in self.script.calls if isinstance(c.node.func, ast.Name) and c.node.func.id == name]
            for call in calls[1:]:
                self.report(call.node, "a second call of the function that trains")
            waiting += [self.script.scopes.get(id(call.node)) for call in calls]

    def around(self, node: ast.AST) -> list[ast.AST]:
        enclosing = []
        above = self.parents.get(id(node))
        while above is not None and not isinstance(above, ast.FunctionDef | ast.Lambda | ast.ClassDef):
            enclosing.append(above)
            above = self.parents.get(id(above))
        return enclosing

    def _trains(self, node: ast.AST) -> bool:
        """Return whether a statement contains the loop, or calls the function that does."""
        names = {getattr(f, "name", "") for f in self.drivers.values()}
        return any(
            each is self.batch_loop
            or (isinstance(each, ast.Call) and isinstance(each.func, ast.Name) and each.func.id in names)
            for each in ast.walk(node)
        )

    def _is_loader(self, node: ast.expr) -> bool:
        """Return whether an expression is a DataLoader, possibly in enumerate or tqdm, or in a mapping of loaders."""
        node = entry_of(self.script, node) or node
        if isinstance(node, ast.Call):
            name = self.script.origin_of(node.func)
            if is_own(self.script, node.func):
                return False
            if name == "enumerate" or is_progress(self.script, node.func):
                return bool(node.args) and self._is_loader(node.args[0])
            return name.rpartition(".")[2] == "DataLoader"
        if not isinstance(node, ast.Name):
            return False
        value = self.script.bound(node, last=True)
        if value is None:  # for example an argument of a function
            return True
        if isinstance(value, ast.Call) and value.args and self.script.origin_of(value.func).endswith(".prepare"):
            return True
        return self._is_loader(value)

    def _path(self, backward: ast.Call) -> None:
        """Return the names that the loss depends on."""
        self.path = names_in(backward)
        while True:
            before = len(self.path)
            for node in ast.walk(self.batch_loop):  # type: ignore[arg-type]
                value = getattr(node, "value", None)
                targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
                if not isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign) or value is None:
                    continue
                if any(names_in(each) & self.path for each in targets if each is not None):
                    self.path |= names_in(value)
            if len(self.path) == before:
                return

    def _is_read(self, call: ast.Call) -> bool:
        """Return whether a call is read by loops.py, or starts the training."""
        origin = self.script.origin_of(call.func)
        name = origin.rpartition(".")[2]
        if isinstance(call.func, ast.Name) and call.func.id in {getattr(f, "name", "") for f in self.drivers.values()}:
            return True
        if is_own(self.script, call.func) and not is_seed(self.script, call.func):
            return False
        schedules = "lr_scheduler" in origin and name[:1].isupper()  # loops.py reports it
        schedules |= name in ("WeightedRandomSampler", "AveragedModel", "SWALR")
        return schedules or name in NAMES["loop_calls"] or name in NAMES["optimizers"] or call in self.optimizers

    # -- around the loop -----------------------------------------------------------------------------------------------

    def _around_loop(self, body: list[Any]) -> None:
        for node in body:
            if isinstance(node, ast.For) and node is self.batch_loop:
                self._batches(node)
            elif isinstance(node, ast.If) and self._taken(node) is not Unknown:
                self._around_loop(node.body if self._taken(node) else node.orelse)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                self.quiet.decorators(node)
            elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and self._clears(node.value):
                continue  # gradients are clear here: each step clears them, and `ends` looks at what an epoch leaves
            elif not self._trains(node):
                self.quiet.statement(node, self._constant() if self.trained else frozenset())
            elif isinstance(node, ast.For):
                self._epochs(node)
            elif isinstance(node, ast.With):
                for item in node.items:
                    self._context(item, node)
                self._around_loop(node.body)
            elif isinstance(node, ast.Try) and all(map(_is_of_interrupts, node.handlers)):
                self._around_loop([*node.body, *node.orelse, *node.finalbody])
                for line in (line for handler in node.handlers for line in handler.body):
                    self.quiet.statement(line, frozenset())
            elif isinstance(node, ast.Expr | ast.Assign | ast.AugAssign | ast.Return):
                self.quiet.statement(node, frozenset({getattr(f, "name", "") for f in self.drivers.values()}))
                self.trained = True
            else:
                test = getattr(node, "test", node)
                self.report(test, "it decides whether and how long training runs", "steps", "epochs")

    def _constant(self) -> frozenset[str]:
        """Return names that the loss depends on and the loop over batches does not assign: the model, the loss.
        Afterwards the loader is one, too, unless each epoch creates it again."""
        loop: Any = self.batch_loop
        assigned = {n.id for n in ast.walk(loop) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        if not self.walked or self.epoch_loop is None:
            return frozenset(self.path - assigned)
        start = self.script.order[id(loop)]
        stored = (n for n in ast.walk(self.epoch_loop) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
        anew = {n.id for n in stored if self.script.order[id(n)] < start}
        return frozenset(self.path - assigned | names_in(loop.iter) - anew)

    def _taken(self, node: ast.If) -> Any:
        return self.script.known(node.test, Unknown)

    def _epochs(self, node: ast.For) -> None:
        call = node.iter
        while isinstance(call, ast.Call) and is_progress(self.script, call.func) and _of_one(call):
            call = call.args[0]
        is_range = (
            isinstance(call, ast.Call)
            and self.script.origin_of(call.func).rpartition(".")[2] in ("range", "trange")
            and not is_own(self.script, call.func)
        )
        if not is_range or self.epoch_loop is not None or node.orelse:
            self.report(node.iter, "a loop around the epochs, or one that is not over range()", "epochs")
        self.epoch_loop, self.trained = node, True
        before, self.quiet.repeated = self.quiet.repeated, True
        self.quiet.turns = frozenset(names_in(node.target))
        self._around_loop(node.body)
        self.quiet.repeated, self.quiet.turns = before, frozenset()

    def _check_modes(self) -> None:
        """Check that every batch is computed in training mode, or that no batch has dropout, which the model's config
        can show."""
        mode = TrainMode(self.script, self.models(), self.learned, self.transformers)
        modes = mode.run([each for each in self.drivers.values() if each is not None])
        odd = sorted((each for each in modes if each.training is not True), key=lambda each: each.by is None)
        if not odd:
            return
        loop: Any = self.batch_loop
        by = odd[0].by or next((c for c in mode.calls if c.func.attr == "train"), None)  # type: ignore[attr-defined]
        if any(each.training == PART for each in odd):
            self.report(by or loop.iter, "some modules of the model are trained in evaluation mode, without dropout")
        elif len(modes) > 1 and odd[0].by is None:
            why = "the batches before it are trained without dropout: from_pretrained gives a model in evaluation mode"
            self.report(by or loop.iter, why)
        elif len(modes) > 1:
            self.report(odd[0].by, "the next batches are trained in evaluation mode: no model.train() follows")  # type: ignore[arg-type]
        elif not self.transformers:
            why = "the script trains in evaluation mode, without dropout; lockstep trains in training mode"
            self.report(by or loop.iter, why)
        else:
            where = f"line {loop.lineno}: no model.train() is called before it"
            where = where if odd[0].by is None else f"line {odd[0].by.lineno}: {code_of(odd[0].by)}"
            self.draft.at_end.append(lambda draft: without_dropout(draft, where))

    def _context(self, item: ast.withitem, block: ast.With) -> None:
        call = item.context_expr
        if isinstance(call, ast.Name):  # ctx = autocast(...)
            call = self.script.bound(call) or call
        self.contexts.append((call, block))
        name = self.script.origin_of(call.func if isinstance(call, ast.Call) else call).rpartition(".")[2]
        if name not in NAMES["loop_contexts"]:
            self.report(call)
        if name == "set_grad_enabled" and isinstance(call, ast.Call) and self.script.known(call.args[0]) is not True:
            self.report(call)

    # -- the batches ---------------------------------------------------------------------------------------------------

    def _batches(self, node: ast.For) -> None:
        target, source = node.target, node.iter
        self.loaders = self._loaders(source)
        while isinstance(source, ast.Call) and source.args:
            if self.script.origin_of(source.func) == "enumerate" and isinstance(target, ast.Tuple):
                start = source.args[1] if len(source.args) > 1 else None
                start = next((w.value for w in source.keywords if w.arg == "start"), start)
                first = self.script.known(start, 0) if start is not None else 0
                self.counters[ast.unparse(target.elts[0])] = first if isinstance(first, int) else -1
                target = target.elts[1]
            source = source.args[0] if not self.script.origin_of(source.func).endswith("DataLoader") else source.func
        self.walked = True
        self._unpack(target, ("batch", "whole"), node.target)
        if node.orelse:
            self.report(node.orelse[0])
        before, self.quiet.repeated = self.quiet.repeated, True
        turns, self.quiet.turns = self.quiet.turns, frozenset()
        self._body(node.body, 0)
        self.quiet.repeated, self.quiet.turns = before, turns

    def _loaders(self, node: ast.expr | None) -> set[str]:
        """Code of a loop's iterable, without enumerate and tqdm."""
        if isinstance(node, ast.Call) and node.args and not self.script.origin_of(node.func).endswith("DataLoader"):
            return self._loaders(node.args[0])
        value = self.script.bound(node, last=True) if isinstance(node, ast.Name) else None
        own = {ast.unparse(node)} if node is not None else set()
        wrapped = isinstance(value, ast.Call) and value.args and self._is_loader(value.args[0])
        return own | (self._loaders(value) if wrapped else set())

    def _unpack(self, target: ast.expr, role: Role, where: ast.AST) -> None:
        """Record the names that hold a batch or a part of it."""
        if isinstance(target, ast.Name):
            self.roles[target.id] = role
        elif isinstance(target, ast.Tuple | ast.List) and role == ("batch", "whole"):
            parts = ("first", "second") if len(target.elts) == 2 else range(len(target.elts))
            for part, each in zip(parts, target.elts, strict=True):
                self._unpack(each, ("batch", part), where)
        else:
            self.report(where)

    def _body(self, body: list[Any], depth: int) -> None:
        for node in body:
            if isinstance(node, ast.If) and self._taken(node) is not Unknown:
                self._body(node.body if self._taken(node) else node.orelse, depth)
            elif isinstance(node, ast.If) and any(self._event(c) for c in ast.walk(node) if isinstance(c, ast.Call)):
                self._guard(node, depth)
            elif isinstance(node, ast.With):
                for item in node.items:
                    self._context(item, node)
                self._body(node.body, depth)
            elif (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and self._event(node.value)) or (
                isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and self._event(node.value) == "clip"
            ):
                self._update(node.value, depth)
            elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
                self._assigned(node)
            else:
                anew = names_in(self.batch_loop.target) if self.loss_is_known else set()  # type: ignore[union-attr]
                self.quiet.statement(node, frozenset(self.path - anew))

    def _event(self, call: ast.Call) -> str | None:
        return step_order.kind_of_call(self.script, call, is_own(self.script, call.func))

    def _clears(self, call: ast.Call) -> bool:
        """Return whether a call is `zero_grad()` of the optimizer or of the whole model."""
        if not isinstance(call.func, ast.Attribute) or call.func.attr != "zero_grad" or call.args:
            return False
        holder: ast.expr | None = call.func.value
        if not isinstance(holder, ast.Name):
            return False
        if holder.id in self.models():
            return True
        for _ in range(8):  # optimizer = prepared
            value = self.script.bound(holder, last=True) if isinstance(holder, ast.Name) else holder
            if value is None or isinstance(value, ast.Call):
                break
            holder = value
        prepared = isinstance(value, ast.Call) and self.script.origin_of(value.func).endswith(".prepare")
        return value in self.optimizers or prepared or value is None

    def _update(self, call: ast.Call, depth: int) -> None:
        kind = self._event(call)
        if isinstance(call.func, ast.Attribute) and (own := self.quiet.own_method(call.func)) is not None:
            self.report(call, f"it is the script's own method, line {own.lineno}, whose effect is unknown")
        if kind == "zero" and not self._clears(call):
            self.report(call)
        if kind == "backward":
            self._backward(call)
        step_order.check_arguments(self, call, str(kind))
        self.events.append((str(kind), call.lineno, depth))

    def _backward(self, call: ast.Call) -> None:
        node: ast.expr = call.args[0] if call.args else call.func.value  # type: ignore[attr-defined]
        self.by_accelerator = bool(call.args)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "scale":
            self.scaled = ast.unparse(node.func.value) in step_order.scalers(self.script)
            node = node.args[0] if len(node.args) == 1 and not node.keywords else node
        role = self._role(node)
        words = [word for word in call.keywords if word.arg != "retain_graph"]
        if words or role is None or role[0] != "loss":
            self.report(call, "backward() is not called on the loss alone" if not words else _UNKNOWN, "task.loss")
        else:
            self.divisor, self.loss_is_known = role[1], True

    def _guard(self, node: ast.If, depth: int) -> None:
        """Read the condition around a step, `if (i + 1) % 4 == 0:`, or Accelerate's."""
        if node.orelse:
            self.report(node.orelse[0])
        if isinstance(node.test, ast.Attribute) and node.test.attr == "sync_gradients":
            self._body(node.body, depth + self.accumulates)
            return
        if self.accumulates:
            why = "accumulate() decides already which batches make a step"
            self.report(node.test, why, "micro_batches")
        every = BatchCounts(self.script, self).every(node.test)
        if every is None or self.accumulated not in (None, every):
            why = "the batches per step are unknown; init reads `(i + 1) % N == 0` with i counted from 0"
            self.report(node.test, why, "micro_batches")
            self.every_is_known = False
        else:
            self.accumulated = every
            self.guard = f"line {node.lineno}: if {code_of(node.test)}", isinstance(node.test, ast.BoolOp)
            self.draft.read.append(f"line {node.lineno}: if {code_of(node.test)} -> micro_batches")
        self._body(node.body, depth + 1)

    # -- the loss ------------------------------------------------------------------------------------------------------

    def _assigned(self, node: ast.Assign | ast.AnnAssign | ast.AugAssign) -> None:
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        if isinstance(node, ast.AugAssign):
            name = ast.unparse(target)
            if self._is_second(target):
                self.report(node, "it changes what the loss is computed from, under a second name", "task.loss")
                return
            if self.roles.get(name) == ("loss", None) and isinstance(node.op, ast.Div):
                self.roles[name] = ("loss", self.script.known(node.value, Unknown))
                return
            self.quiet.statement(node, frozenset(self.path))
            return
        role = self._role(node.value) if node.value is not None else None
        if role is not None and (isinstance(node, ast.AnnAssign) or len(node.targets) == 1):
            self._unpack(target, role, node)
            return
        calls = [each for each in ast.walk(node.value or target) if isinstance(each, ast.Call)]
        if names_in(target) <= self.path and any(root_of(each.func) in self.models() for each in calls):
            self.report(node, _COMPUTED, "task.loss")
            self.roles |= dict.fromkeys(names_in(target), ("out", None))
            return
        self.quiet.statement(node, frozenset(self.path))
        for name in names_in(target):
            self.roles.pop(name, None)

    def _is_second(self, target: ast.expr) -> bool:
        """Return whether a target is a second name, or an entry of a display, of what the loss is computed from."""
        name = target
        while isinstance(name, ast.Subscript):
            name = name.value
        if not isinstance(name, ast.Name) or name.id in self.path:
            return False
        value = self.script.bound(name, last=True)
        others = names_in(value) if isinstance(value, _HOLDING) else set()
        return name.id in self.roles or bool(others & (self.path | self.roles.keys()))

    def _role(self, node: ast.expr) -> Role | None:
        """Return the role of an expression, or None if it is not on the list."""
        if isinstance(node, ast.Name):
            return self.roles.get(node.id)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) and self._role(node.left) == ("loss", None):
            return "loss", self.script.known(node.right, Unknown)
        if isinstance(node, ast.Tuple | ast.List):
            roles = [self._role(each) for each in node.elts]
            whole = roles == [("batch", "first"), ("batch", "second")] or (
                len(roles) != 2 and roles == [("batch", k) for k in range(len(roles))]
            )
            return ("batch", "whole") if whole and roles else None
        if isinstance(node, ast.Dict):
            keys = [self.script.known(each) if each is not None else None for each in node.keys]
            same = all(self._role(v) == ("batch", k) for k, v in zip(keys, node.values, strict=True))
            return ("batch", "whole") if same and keys else None
        if isinstance(node, ast.DictComp | ast.ListComp | ast.GeneratorExp):
            return self._comprehension(node)
        if isinstance(node, ast.Subscript | ast.Attribute):
            return self._part(node)
        return self._called(node) if isinstance(node, ast.Call) else None

    def _comprehension(self, node: ast.DictComp | ast.ListComp | ast.GeneratorExp) -> Role | None:
        """`{k: v.to(device) for k, v in batch.items()}`, `[t.to(device) for t in batch]`."""
        part, source = node.generators[0], node.generators[0].iter
        if isinstance(source, ast.Call) and isinstance(source.func, ast.Attribute) and source.func.attr == "items":
            source = source.func.value
        if len(node.generators) != 1 or part.ifs or self._role(source) != ("batch", "whole"):
            return None
        if isinstance(node, ast.DictComp):
            value, names = node.value, part.target.elts if isinstance(part.target, ast.Tuple) else []
            if len(names) != 2 or ast.unparse(names[0]) != ast.unparse(node.key):
                return None
            name = ast.unparse(names[1])
        else:
            value, name = node.elt, ast.unparse(part.target)
        inner = self._before_move(value)
        return ("batch", "whole") if isinstance(inner, ast.Name) and inner.id == name else None

    def _part(self, node: ast.Subscript | ast.Attribute) -> Role | None:
        role = self._role(node.value)
        key = node.attr if isinstance(node, ast.Attribute) else self.script.known(node.slice)
        if role == ("batch", "whole") and isinstance(key, str):
            return "batch", key
        if role == ("batch", "whole") and key in (0, 1):
            return "batch", ("first", "second")[key]
        if role == ("out", None) and self.transformers and key in ("loss", 0):
            return None if self.of_logits else ("loss", None)
        if role == ("out", None) and key == "logits" and self.of_logits:
            return "logits", None
        return None

    def _before_move(self, node: ast.expr) -> ast.expr:
        """Return `x` of `x.to(device, non_blocking=True)`."""
        while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and self._moves(node):
            node = node.func.value
        return node

    def _moves(self, call: ast.Call) -> bool:
        if not isinstance(call.func, ast.Attribute) or call.func.attr not in ("to", "cuda"):
            return False
        words = [word.value for word in call.keywords if word.arg not in ("non_blocking", "device")]
        for each in call.args:
            last = self.script.origin_of(each).rpartition(".")[2] if isinstance(each, ast.Attribute) else ""
            value = self.script.known(each)
            if last in (*DTYPES, "float64", "double", "int", "long") or (value in DTYPES.values()):
                return False
            text = ast.unparse(each).lower()
            if not any(part in text for part in ("device", "rank", "gpu", "cuda", "cpu", "mps")) and value is None:
                return False
        return not words

    def _called(self, node: ast.Call) -> Role | None:
        if self._moves(node):
            return self._role(node.func.value)  # type: ignore[attr-defined]
        name = self.script.origin_of(node.func).rpartition(".")[2]
        if name in ("tuple", "list") and len(node.args) == 1 and self._role(node.args[0]) == ("batch", "whole"):
            return "batch", "whole"
        roles = [self._role(each) for each in node.args if not isinstance(each, ast.Starred)]
        if len(roles) != len(node.args):
            return None
        if roles[:1] == [("out", None)] and not self.transformers:
            keyed = len(roles) == 2 and roles[1] in (("batch", "second"), ("batch", "whole"))
            return ("loss", None) if keyed and not node.keywords else None
        if self.of_logits and roles[:1] == [("logits", None)] and not node.keywords:
            learned = [("batch", "labels")], [("batch", "label")]
            return ("loss", None) if roles[1:] in learned and is_cross_entropy(self.script, node.func) else None
        return self._output(node, roles)

    def _output(self, node: ast.Call, roles: list[Role | None]) -> Role | None:
        """Return the role of a model call. The called name must be the one whose weights the optimizer has."""
        if not isinstance(node.func, ast.Name) or node.func.id not in self.models():
            return None
        if not self.transformers:
            usual = roles in ([("batch", "first")], [("batch", "whole")]) and not node.keywords
            self.learned |= {id(node)} if usual else set()
            return ("out", None) if usual else None
        inputs = [("batch", "input_ids"), ("batch", "attention_mask")]
        if roles != inputs[: len(roles)] or not (roles or node.keywords):
            return None
        for word in node.keywords:
            role = self._role(word.value)
            names = [word.arg] if word.arg != "labels" else ["labels", "label"]
            if word.arg == "labels" and role == ("batch", "input_ids"):
                self.inputs.learned = node
            elif role is None or (role != ("batch", "whole") if word.arg is None else role[1] not in names):
                return None
        if not any(word.arg is None for word in node.keywords):
            names = [str(word.arg) for word in node.keywords] + [str(key) for _, key in inputs[: len(roles)]]
            self.inputs.named = node, frozenset(names)
        self.learned.add(id(node))
        return "out", None

    def models(self) -> set[str]:
        names = {"model", "net"}
        for call in self.optimizers:
            node = call.args[0] if call.args else next((w.value for w in call.keywords if w.arg == "params"), None)
            names |= {root_of(node.func)} if isinstance(node, ast.Call) else set()
        while True:  # follow a name to the model it is assigned from, moved to a device or wrapped
            values: dict[str, set[str]] = {}
            for (_, name), nodes in self.script.bindings.items():
                values.setdefault(name, set()).update(map(self._wrapped, nodes))
            more = {name for name, of in values.items() if of - {name} and of - {name} <= names}
            if more <= names:
                return names
            names |= more

    def _wrapped(self, node: ast.expr | None) -> str:
        """Name of the model in an expression that moves or wraps it, or None."""
        if isinstance(node, ast.Call) and self._moves(node):
            return self._wrapped(node.func.value)  # type: ignore[attr-defined]
        if isinstance(node, ast.Call) and node.args:
            name = self.script.origin_of(node.func).rpartition(".")[2]
            return self._wrapped(node.args[0]) if name in NAMES["wrappers"] and name != "prepare" else ""
        return node.id if isinstance(node, ast.Name) else ""


def _is_of_interrupts(handler: ast.ExceptHandler) -> bool:
    """Return whether a handler is of Ctrl-C alone, which ends the training anyway."""
    return handler.type is not None and ast.unparse(handler.type) == "KeyboardInterrupt"


def _of_one(call: ast.Call) -> bool:
    """Return whether a progress bar has what it iterates over as an argument: `trange` counts itself."""
    return bool(call.args) and not ast.unparse(call.func).endswith("trange")
