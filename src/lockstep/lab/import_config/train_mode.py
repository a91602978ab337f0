"""Find the mode (training or evaluation) of a loop's model when it computes batches.

In: a `Script`, the names of its model, and the calls of the model that are learned from. Out: the modes in which these
calls may run, each with the call that set it, over all branches, epochs and functions of the script that are called.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from lockstep.lab.import_config.bound_names import names_in, root_of
from lockstep.lab.import_config.kinds import TOKENIZERS
from lockstep.lab.import_config.script import Script, Unknown

PART = "part"  # some modules of the model are in another mode than the rest
_WRAPPED = ("module", "model", "_orig_mod")  # attributes under which a wrapper has the model itself
_DEPTH = 20  # of calls of the script's functions in one another


@dataclass(frozen=True)
class Mode:
    """A mode of the model, and the call that set it, or None for the mode in which the model was created."""

    training: bool | str
    by: ast.Call | None = field(default=None, compare=False)


Modes = frozenset[Mode]


@dataclass
class TrainMode:
    """An abstract execution of a script. `learned`: ids of the calls of the model whose outputs the loss is made of.
    `pretrained`: whether the model is made by `from_pretrained`, which leaves it in evaluation mode."""

    script: Script
    models: set[str]
    learned: set[int]
    pretrained: bool
    modes_of_batches: set[Mode] = field(default_factory=set)  # those in which a call that is learned from may run
    saved: dict[str, Modes] = field(default_factory=dict)  # name -> modes, of `was = model.training`
    calls: list[ast.Call] = field(default_factory=list)  # that set a mode of the model
    returned: list[Modes] = field(default_factory=list)  # one for each function that is being called
    left: list[Modes] = field(default_factory=list)  # of `break` and `continue`, one for each loop
    # calls of a function that were followed: body, modes before, saved modes, depth -> modes and saved modes after
    followed: dict[tuple[Any, ...], tuple[Modes, dict[str, Modes]]] = field(default_factory=dict)

    def run(self, functions: list[Any]) -> set[Mode]:
        """The modes of all batches. `functions`: where the loop is, if no call of them is found."""
        start = frozenset({Mode(not self.pretrained)})
        bodies = [self.script.tree.body, *(each.body for each in functions)]
        for body in bodies:
            if not self.modes_of_batches:
                self._function(body, start)
        return self.modes_of_batches

    # -- statements ----------------------------------------------------------------------------------------------------

    def _function(self, body: list[Any], modes: Modes) -> Modes:
        self.returned.append(frozenset())
        left, self.left = self.left, [frozenset()]
        modes = self._block(body, modes)
        self.left = left
        return modes | self.returned.pop()

    def _block(self, body: list[Any], modes: Modes) -> Modes:
        for node in body:
            modes = self._statement(node, modes)
        return modes

    def _statement(self, node: Any, modes: Modes) -> Modes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            return modes
        if isinstance(node, ast.If):
            return self._branches(node, modes, self._block)
        if isinstance(node, ast.For | ast.While):
            return self._loop(node, modes)
        if isinstance(node, ast.With):
            for item in node.items:
                modes = self._expression(item.context_expr, modes)
            return self._block(node.body, modes)
        if isinstance(node, ast.Try):
            whole = self._block(node.body, modes)
            ends = [self._block(each.body, modes | whole) for each in node.handlers]
            return self._block(node.finalbody, self._block(node.orelse, whole).union(*ends))
        if isinstance(node, ast.Break | ast.Continue):
            self.left[-1] |= modes
            return frozenset()
        modes = self._expression(node, modes)
        if isinstance(node, ast.Return):
            self.returned[-1] |= modes
            return frozenset()
        return self._assigned(node, modes) if isinstance(node, ast.Assign) else modes

    def _branches(self, node: Any, modes: Modes, within: Callable[[Any, Modes], Modes]) -> Modes:
        """Follow the branch that is taken, or both if the condition is unknown."""
        modes = self._expression(node.test, modes)
        taken = self.script.known(node.test, Unknown)
        if taken is not Unknown:
            return within(node.body if taken else node.orelse, modes)
        return within(node.body, modes) | within(node.orelse, modes)

    def _loop(self, node: Any, modes: Modes) -> Modes:
        """Follow a loop that runs at least once. Its second iteration starts in the modes in which the first one
        ends."""
        modes = self._expression(node.iter if isinstance(node, ast.For) else node.test, modes)
        self.left.append(frozenset())
        once = self._block(node.body, modes) | self.left[-1]
        again = self._block(node.body, once) | self.left[-1]
        again |= self._block(node.body, again) | self.left.pop()
        return self._block(node.orelse, once | again)

    def _assigned(self, node: ast.Assign, modes: Modes) -> Modes:
        names = {each.id for each in node.targets if isinstance(each, ast.Name)}
        if isinstance(node.value, ast.Attribute) and node.value.attr == "training":
            self.saved.update(dict.fromkeys(names, modes))
        if not (names & self.models and isinstance(node.value, ast.Call)):
            return modes
        if names_in(node.value) & self.models:  # moved or wrapped
            return modes
        return frozenset({Mode(self._created(node.value))})

    def _created(self, node: Any, depth: int = 0) -> bool:
        """Return whether a model is in training mode when created. One of `X.from_pretrained(name).to(device)` is not,
        also if a function of the script returns it or a wrapper gets it."""
        if isinstance(node, ast.Name) and depth < _DEPTH:
            return self._created(self.script.bound(node, last=True), depth + 1)
        if not isinstance(node, ast.Call) or depth >= _DEPTH:
            return True
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        if name in ("train", "eval"):
            return name == "train" and all(self.script.known(each, Unknown) is True for each in node.args)
        if name == "from_pretrained":
            return self.script.origin_of(node.func).rpartition(".")[0].endswith(("Config", *TOKENIZERS))
        if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Call):
            return self._created(node.func.value, depth + 1)
        function = self.script.functions.get(ast.unparse(node.func))
        returned = [each.value for each in ast.walk(function) if isinstance(each, ast.Return)] if function else []
        return all(self._created(each, depth + 1) for each in (*returned, *node.args))

    # -- expressions ---------------------------------------------------------------------------------------------------

    def _expression(self, node: Any, modes: Modes) -> Modes:
        if isinstance(node, ast.Lambda):  # whether and on what it is called is not followed
            inside = [each for each in ast.walk(node.body) if _is_mode(each)]
            self.calls += inside
            return frozenset(Mode(PART, each) for each in inside) or modes
        if isinstance(node, ast.IfExp):
            return self._branches(node, modes, self._expression)
        if isinstance(node, ast.BoolOp):
            for number, each in enumerate(node.values):
                modes = self._expression(each, modes) | (modes if number else frozenset())
            return modes
        for child in ast.iter_child_nodes(node):
            modes = self._expression(child, modes)
        return self._called(node, modes) if isinstance(node, ast.Call) else modes

    def _called(self, call: ast.Call, modes: Modes) -> Modes:
        if id(call) in self.learned:
            self.modes_of_batches |= modes
        if isinstance(call.func, ast.Name) and (function := self.script.functions.get(call.func.id)) is not None:
            body = getattr(function, "body", None)
            return self._of_call(body, modes) if isinstance(body, list) and len(self.returned) < _DEPTH else modes
        if not _is_mode(call):
            return modes
        of = self._whose(call.func.value)  # type: ignore[attr-defined]
        if of is None:
            return modes
        self.calls.append(call)
        target = self._target_modes(call)
        if of == "model":
            return target
        values = {each.training for each in target}
        return frozenset(each if {each.training} == values else Mode(PART, call) for each in modes)

    def _of_call(self, body: list[Any], modes: Modes) -> Modes:
        """Follow a function. The same call is followed once: what it adds to `calls` and to the modes of batches is
        the same each time."""
        key = (id(body), modes, frozenset(self.saved.items()), len(self.returned))
        if key not in self.followed:
            self.followed[key] = self._function(body, modes), dict(self.saved)
        after, saved = self.followed[key]
        self.saved = dict(saved)
        return after

    def _target_modes(self, call: ast.Call) -> Modes:
        """The modes that a call of `train` or `eval` may set."""
        if call.func.attr == "eval":  # type: ignore[attr-defined]
            return frozenset({Mode(False, call)})
        mode = call.args[0] if call.args else next((w.value for w in call.keywords if w.arg == "mode"), None)
        if isinstance(mode, ast.Name) and mode.id in self.saved:
            return self.saved[mode.id]
        value = True if mode is None else self.script.known(mode, Unknown)
        return frozenset(Mode(each, call) for each in ((True, False) if value is Unknown else (bool(value),)))

    def _whose(self, node: ast.expr) -> str | None:
        """Return whether an expression is the whole model or a part of it; None for other modules, such as a
        teacher."""
        if isinstance(node, ast.Attribute):
            above = self._whose(node.value)
            whole = node.attr in _WRAPPED or node.attr in self.models
            return above if whole or above is None else PART
        if isinstance(node, ast.Subscript):  # of a list or mapping that may hold the model
            return PART
        if not isinstance(node, ast.Name):  # accelerator.unwrap_model(model)
            return "model" if names_in(node) & self.models else None
        if node.id in self.models or root_of(node) == "self":
            return "model"
        value = self.script.bound(node, last=True)
        if isinstance(value, ast.Call):
            return "model" if names_in(value) & self.models else None
        if isinstance(value, ast.Attribute | ast.Name) and root_of(value) != node.id:  # inner = model.bert
            return self._whose(value)
        scope: Any = self.script.scopes.get(id(node))
        arguments = {each.arg for each in ast.walk(scope.args) if isinstance(each, ast.arg)} if scope else set()
        return "model" if node.id in arguments else PART


def _is_mode(node: ast.AST) -> TypeGuard[ast.Call]:
    """Return whether a call sets a mode: `model.eval()`."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("train", "eval")
