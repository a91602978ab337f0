"""A script of Lightning: its Trainer, callbacks and LightningModule.

In: a `Script`, and the loop that reads it. Out: keys of the run file, and a gap for each argument, callback, method
and statement of a training step that is not on a list: Lightning calls methods by their names, so a class can change
any part of a step.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from typing import Any

from lockstep.lab.import_config import call_arguments, lightning_data, lightning_scores
from lockstep.lab.import_config.bound_names import names_in
from lockstep.lab.import_config.kinds import casts, kind_of
from lockstep.lab.import_config.lightning_methods import (
    EVALUATED,
    RESTORED,
    Start,
    is_read,
    mode,
    modes_elsewhere,
    only_trains,
    optimizers,
    own_step,
    step_effect,
)
from lockstep.lab.import_config.lightning_values import BASES, classes_of
from lockstep.lab.import_config.observing import first_effect, sets_part
from lockstep.lab.import_config.quiet_code import QuietCode
from lockstep.lab.import_config.script import Arguments, Call, Script, Unknown, code_of
from lockstep.lab.import_config.table import NAMES, RunDraft, number

_STEP = "it changes what a step learns: the loss is the model's own, of the whole batch"
_CALLBACKS = "which callbacks there are is known only when the script runs"
_FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef
_DECORATORS = ("staticmethod", "classmethod", "property", "no_grad", "inference_mode", "override", "rank_zero_only")
_OF_BATCHES = ("on_before_batch_transfer", "on_after_batch_transfer", "transfer_batch_to_device")
_ROOTS = ("lightning.", "pytorch_lightning.", "lightning_fabric.")


def modules(script: Script) -> list[ast.ClassDef]:
    return classes_of(script, "LightningModule")


# -- the Trainer -------------------------------------------------------------------------------------------------------


def trainer(call: Call, loop: Any) -> None:
    arguments, draft = loop.script.arguments(call), loop.draft
    call_arguments.check(loop.script, draft, call, call_arguments.row_of(call.origin))
    keys: Mapping[str, str] = NAMES["lightning_trainer"]
    for name, usual in NAMES["lightning_deciding"].items():
        if (value := arguments.known.get(name)) is not None and str(value) not in usual:
            why = "lockstep trains on all examples of a step and clips gradients by their norm"
            draft.lacks(f"line {call.line}: {name}={value}", why)
    for name, key in keys.items():
        if arguments.known.get(name) not in (None, -1) and (name != "num_nodes" or arguments.known[name] > 1):
            draft.set(key, arguments.known[name], f"{name}, line {call.line}")
    times = arguments.known.get("accumulate_grad_batches", 1)
    if not isinstance(times, int):
        draft.lacks(f"line {call.line}: accumulate_grad_batches={times}", "every step has batch_size examples")
    loop.accumulated = times if isinstance(times, int) else 1
    loop.every_at = f"line {call.line}: accumulate_grad_batches={loop.accumulated}"
    devices = arguments.known.get("devices")
    devices = len(devices) if isinstance(devices, list) else devices
    devices = int(devices) if isinstance(devices, str) and devices.isdigit() else devices
    if devices in (-1, "-1"):
        draft.unclear(f"line {call.line}: devices={devices}", "their number is unknown", "launch.processes")
    ends = [arguments.known.get(name) for name in ("max_epochs", "max_steps")]
    if all(each not in (None, -1) for each in ends):
        why = "training ends at the first of the two; a run file has only one of them"
        draft.lacks(f"line {call.line}: max_epochs={ends[0]}, max_steps={ends[1]}", why, "steps", "epochs")
    if isinstance(devices, int) and devices > 0:
        loop.processes = loop.processes or devices
        draft.set("launch.processes", devices, f"devices, line {call.line}")
    if (strategy := arguments.known.get("strategy")) is not None:
        if strategy in NAMES["lightning_strategies"]:
            draft.set("strategy.name", NAMES["lightning_strategies"][strategy], f"strategy, line {call.line}")
        else:
            draft.drop(f"line {call.line}: strategy={strategy}", None, "`lockstep list` names strategies")
    if (kind := arguments.known.get("precision")) is not None:
        draft.set("precision", NAMES["precisions"].get(str(kind), kind), f"precision, line {call.line}")
    if type(every := arguments.known.get("val_check_interval")) is int:
        draft.set("evaluate.every", every, f"val_check_interval, line {call.line}")
    _time(call, arguments, draft)
    _others(call, arguments, loop)
    by = {"accumulate_grad_batches": "micro_batches", "devices": "launch.processes", "precision": "precision"}
    loop.unknown_values(call, arguments, {**keys, **by, "max_time": "max_time"})
    loop.read(call, "the settings of the loop")


def _time(call: Call, arguments: Arguments, draft: RunDraft) -> None:
    """Read `max_time="00:03:50:00"`: days, hours, minutes and seconds."""
    value = arguments.known.get("max_time")
    if value is None:
        return
    parts = re.fullmatch(r"(\d+):(\d+):(\d+):(\d+)", str(value))
    if parts is None:
        draft.lacks(f"line {call.line}: max_time={value}", "write max_time as 3h50m", "max_time")
        return
    text = "".join(f"{int(each)}{unit}" for each, unit in zip(parts.groups(), "dhms", strict=True) if int(each))
    draft.set("max_time", text or "0s", f"max_time, line {call.line}")


def _others(call: Call, arguments: Arguments, loop: Any) -> None:
    """Check the arguments that are not on a list, the callbacks, and the interval of evaluations that may stop it."""
    chosen: ast.expr | None = arguments.nodes.get("callbacks")
    value = loop.script.bound(chosen, last=True) if isinstance(chosen, ast.Name) else chosen
    called = ast.unparse(chosen) if isinstance(chosen, ast.Name) else ""
    for each in loop.script.calls:
        grows = called and each.name in ("append", "extend", "insert")
        if grows and each.receiver is not None and ast.unparse(each.receiver) == called:
            loop.draft.unclear(str(each), _CALLBACKS)
    if isinstance(chosen, ast.Name) and loop.script.bound(chosen) is None:
        loop.draft.unclear(f"line {call.line}: callbacks={called}", _CALLBACKS)
    listed = value.elts if isinstance(value, ast.List | ast.Tuple) else [value]
    stops = False
    for one in (each for each in listed if each is not None):
        one = (loop.script.bound(one, last=True) or one) if isinstance(one, ast.Name) else one
        name = loop.script.origin_of(one.func if isinstance(one, ast.Call) else one).rpartition(".")[2]
        stops |= name == "EarlyStopping" or (name == "ModelCheckpoint" and "monitor" in ast.unparse(one))
        if name not in NAMES["lightning_callbacks"] or name in loop.script.classes:
            loop.draft.unclear(f"line {call.line}: the callback {code_of(one)}", "its effect is unknown")
    each_epoch = arguments.known.get("check_val_every_n_epoch", 1) in (None, 1)
    whole = type(arguments.known.get("val_check_interval", 1)) is int or arguments.known["val_check_interval"] == 1.0
    if stops and not (each_epoch and whole):
        why = (
            "EarlyStopping and ModelCheckpoint look at each evaluation, and the script does not evaluate once per epoch"
        )
        loop.draft.lacks(f"line {call.line}: when it evaluates", why, "evaluate.every")
    part = arguments.nodes.get("limit_val_batches")
    if part is not None and str(arguments.known.get("limit_val_batches", "?")) not in ("None", "1.0"):
        why = "evaluate.limit is the number of rows that an evaluation uses"
        loop.draft.drop(f"line {call.line}: limit_val_batches={code_of(part)}", None, why, stops, ("evaluate.limit",))


def callback(call: Call, loop: Any) -> None:
    """Read EarlyStopping and ModelCheckpoint."""
    stops = call.name == "EarlyStopping"
    arguments = loop.script.arguments(call, call_arguments.positions(call.name))
    draft = loop.draft
    monitor = str(arguments.known.get("monitor") or "")
    metric = re.sub(r"^(val|valid|validation|eval)[_/]", "", monitor)
    if not stops:
        metric = "" if _saves_seldom(call, arguments, draft, monitor) else metric
    if metric and (why := lightning_scores.unlogged(loop.script, modules(loop.script)[:1], monitor)) is not None:
        draft.unclear(f"line {call.line}: {call.name}(monitor={monitor})", why, "checkpoint.best")
    elif metric:
        less = arguments.known.get("mode", "min") == "min"
        name = _score(metric, call, loop) if loop.is_transformers() else metric
        best = f"-{name}" if less else name
        if draft.keys.get("checkpoint.best", best) != best:
            why = "it and another callback look at two scores; lockstep's evaluate.patience is for checkpoint.best"
            draft.unclear(f"line {call.line}: {call.name}(monitor={metric})", why, "checkpoint.best")
        draft.set("checkpoint.best", best, f"monitor, line {call.line}")
        draft.keys.setdefault("evaluate.every", "epoch")  # Lightning evaluates once per epoch
    if stops:
        draft.set("evaluate.patience", arguments.known.get("patience", 3), f"patience, line {call.line}")
        if delta := number(arguments.known.get("min_delta")):
            draft.set("evaluate.min_delta", abs(delta), f"min_delta, line {call.line}")
        for name in ("stopping_threshold", "divergence_threshold", "check_on_train_epoch_end"):
            if arguments.known.get(name, name in arguments.unknown or None):
                why = "training ends after evaluate.patience evaluations without an improvement"
                draft.lacks(f"line {call.line}: {name}={code_of(arguments.nodes[name])}", why, "evaluate.patience")
        keys = {"monitor": "checkpoint.best", "mode": "checkpoint.best", "patience": "evaluate.patience"}
        loop.unknown_values(call, arguments, {**keys, "min_delta": "evaluate.min_delta"})
    elif every := arguments.known.get("every_n_train_steps"):
        draft.set("checkpoint.every", every, f"every_n_train_steps, line {call.line}")
    loop.read(call, "checkpoint, evaluate")


def _saves_seldom(call: Call, arguments: Arguments, draft: RunDraft, monitor: str) -> bool:
    """Record that a ModelCheckpoint looks at fewer scores than there are evaluations; return whether at none."""
    more = ("every_n_train_steps",) * bool(monitor)  # without a score, it is checkpoint.every
    for name in ("every_n_epochs", "train_time_interval", *more):
        if name in arguments.nodes and arguments.known.get(name, Unknown) not in (None, 1):
            where = f"line {call.line}: {call.name}({name}={code_of(arguments.nodes[name])})"
            why = "checkpoint.best looks at each evaluation" if monitor else "checkpoint.every is a number of steps"
            draft.drop(where, None, why, bool(monitor), ("checkpoint.best",) if monitor else ())
    if arguments.known.get("save_top_k") != 0:
        return False
    draft.drop(f"line {call.line}: {call.name}(save_top_k=0)", None, "a run saves its state at its end")
    return True


def _score(metric: str, call: Call, loop: Any) -> str:
    """Return lockstep's name of a score that a module logs for a model of transformers."""
    if metric in ("acc", "accuracy"):
        why = "taken as the task's accuracy, over all examples; Lightning's log averages it over batches"
        loop.draft.notes.append(f"line {call.line}: monitor {metric} is {why}")
        return "accuracy"
    if metric != "loss":
        why = "which metric of lockstep it is was not seen"
        loop.draft.unclear(f"line {call.line}: {call.name}(monitor={metric})", why, "checkpoint.best")
    return metric


def _once(call: Call, loop: Any) -> None:
    """Check that `fit` is called once, and under no condition."""
    repeats = (each for each in ast.walk(loop.script.tree) if isinstance(each, ast.For | ast.While))
    if any(call.node in ast.walk(each) for each in repeats):
        loop.draft.unclear(str(call), "it trains several times: keep only one training")
    elif call.condition is not None:
        why = f"it is called only {call.condition}, which is known only when the script runs"
        loop.draft.unclear(str(call), why, "steps", "epochs")


def fit(call: Call, loop: Any) -> None:
    """Read `trainer.fit(module, loader)`: one training, of a module as it is created."""
    arguments = loop.script.arguments(
        call, ("model", "train_dataloaders", "val_dataloaders", "datamodule", "ckpt_path")
    )
    fits = [c for c in loop.script.calls if c.name == "fit" and c.receiver is not None]
    if fits and fits[0].node is not call.node:
        loop.draft.unclear(str(call), "it trains several times: keep only one training")
        return
    node = arguments.nodes.get("model")
    value = loop.script.bound(node, last=True) if isinstance(node, ast.Name) else node
    names = {each.name for each in modules(loop.script)}
    if not (isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id in names):
        loop.draft.unclear(f"line {call.line}: {code_of(node or call.node)}", "the module is not one of the script's")
    if (start := arguments.nodes.get("ckpt_path")) is not None and arguments.known.get("ckpt_path", "") is not None:
        why = "training resumes from a checkpoint of Lightning; in lockstep the same command resumes a run"
        loop.draft.drop(
            f"line {call.line}: ckpt_path={code_of(start)}", None, why, arguments.known.get("ckpt_path") != "last"
        )
    for code in arguments.more:
        loop.draft.unclear(f"line {call.line}: {code}", "its content is unknown")


# -- the LightningModule -----------------------------------------------------------------------------------------------


def module(loop: Any, transformers: bool) -> None:
    """Check the methods of the LightningModule. `transformers`: whether the loss is that of a transformers model; else
    its step is the script's own (`task.loss`)."""
    classes, start = modules(loop.script), None
    for kind in classes[1:]:
        loop.draft.unclear(f"line {kind.lineno}: class {kind.name}", "a second LightningModule")
    for kind in classes[:1]:
        methods = {each.name: each for each in kind.body if isinstance(each, ast.FunctionDef)}
        _lines(kind, loop.draft)
        _bases(kind, loop)
        for name, method in methods.items():
            if only_trains(kind, method):
                continue
            if (inside := _changes(loop.script, kind, method, transformers)) is not None:
                loop.draft.unclear(f"line {method.lineno}: {kind.name}.{name}", inside)
                continue
            if name == "training_step" and transformers:
                _step(kind, method, methods.get("forward"), loop)
            elif name == "training_step":
                own_step(kind, method, loop)
            elif name == "configure_optimizers":
                optimizers(kind, method, loop)
            elif name == "__init__":
                start = Start(kind, method, loop, transformers)
                start.check()
            elif name not in NAMES["lightning_methods"] and (not name.startswith("_") or name.startswith("__")):
                _hook(kind, method, loop)
        for node in (each for each in ast.walk(kind) if isinstance(each, ast.Assign)):
            if "self.automatic_optimization" in map(ast.unparse, node.targets):
                loop.draft.unclear(
                    f"line {node.lineno}: {code_of(node)}",
                    "the module steps its optimizer itself (manual optimization)",
                )
    of_classes = (line for each in loop.script.classes.values() for line in each.body if isinstance(line, _FUNCTION))
    for line in (each for each in of_classes if each.name in _OF_BATCHES):
        loop.draft.unclear(f"line {line.lineno}: {line.name}", "it changes the batches")
    lightning_data.check(loop)
    lightning_data.check_evaluated(loop)
    _outside(classes, loop, transformers)
    if transformers and classes:
        mode(classes[0], start, loop)


def _outside(classes: list[ast.ClassDef], loop: Any, transformers: bool) -> None:
    """Check the statements and functions outside of the module."""
    for node in modes_elsewhere(loop.script, {line for each in classes for line in each.body}):
        loop.draft.unclear(f"line {node.lineno}: {code_of(node)}", EVALUATED)
    Around(loop).body(loop.script.tree.body)
    for call in (c for c in loop.script.calls if c.name == "fit" and c.receiver is not None):
        _once(call, loop)
        if not transformers:
            fit(call, loop)


def _bases(kind: ast.ClassDef, loop: Any) -> None:
    """Check for methods from elsewhere: of another base, in a branch of the class, or set after it."""
    for base in (each for each in kind.bases if "LightningModule" not in ast.unparse(each)):
        loop.draft.unclear(f"line {kind.lineno}: {kind.name}({code_of(base)})", "the methods of this base are not read")
    for line in kind.body:
        if isinstance(line, ast.AsyncFunctionDef | ast.If | ast.For | ast.While | ast.With | ast.Try | ast.ClassDef):
            loop.draft.unclear(f"line {line.lineno}: {code_of(line)}", "its effect on training is unknown")
    for node in ast.walk(loop.script.tree):
        stored = isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load)
        if stored and ast.unparse(node.value) == kind.name:  # type: ignore[attr-defined]
            loop.draft.unclear(f"line {node.lineno}: {code_of(node)}", "it changes the module's class")  # type: ignore[attr-defined]


def _lines(kind: ast.ClassDef, draft: RunDraft) -> None:
    """Check what a class sets besides methods, and decorators, which can replace what they decorate."""
    for line in (kind, *kind.body):
        for each in getattr(line, "decorator_list", ()):
            name = ast.unparse(each.func if isinstance(each, ast.Call) else each).rpartition(".")[2]
            trains = getattr(line, "name", "") in ("training_step", "configure_optimizers", "forward", "__init__")
            if name not in _DECORATORS or (trains and name != "override"):
                draft.unclear(f"line {each.lineno}: @{code_of(each)}", "its effect on training is unknown")
        if isinstance(line, ast.Assign | ast.AnnAssign) and line.value is not None:
            plain = not any(isinstance(n, ast.Lambda | ast.Name | ast.Call) for n in ast.walk(line.value))
            if not plain or "automatic_optimization" in ast.unparse(line):
                draft.unclear(f"line {line.lineno}: {code_of(line)}", "its effect on training is unknown")
        elif isinstance(line, _FUNCTION) and line.name in ("automatic_optimization", "configure_callbacks"):
            draft.unclear(f"line {line.lineno}: {kind.name}.{line.name}", "its effect on training is unknown")


class Around:
    """Checks the statements outside of the classes that use the module or its Trainer, which fit() takes as they
    are."""

    def __init__(self, loop: Any) -> None:
        self.script, self.draft = loop.script, loop.draft
        self.classes = {c.name for base in BASES for c in classes_of(self.script, base)}
        self.names: set[str] = set()  # of the module, its Trainer and their parts
        self.quiet = QuietCode(self.script, self._gap, self._is_read)
        for call in (each for each in ast.walk(self.script.tree) if isinstance(each, ast.Call)):
            if self.script.origin_of(call.func) in self.classes:
                self._add_sources(ast.Tuple([*call.args, *(word.value for word in call.keywords)], ast.Load()))

    def _add_sources(self, node: ast.AST) -> None:
        """Add the names of objects that a value is made of: the network that a module is created with."""
        for name in (each for each in ast.walk(node) if isinstance(each, ast.Name)):
            values = self.script.bindings.get((id(None), name.id), [])
            objects = [each for each in values if each is not None and self.script.known(each, Unknown) is Unknown]
            if objects and name.id not in self.names and kind_of(self.script, objects[0]) != "rows":
                self.names.add(name.id)
                for each in objects:
                    self._add_sources(each)

    def body(self, lines: list[Any]) -> None:
        for line in lines:
            if isinstance(line, ast.ClassDef):
                continue
            heads = [getattr(line, "iter", None), getattr(line, "test", None), *getattr(line, "items", ())]
            inner = [line, *getattr(line, "handlers", ())]
            blocks = [getattr(each, part, []) for each in inner for part in ("body", "orelse", "finalbody")]
            if not any(blocks):
                self._leaf(line)
            for head in (each for each in heads if each is not None):
                self._leaf(ast.copy_location(ast.Expr(getattr(head, "context_expr", head)), line))
            if isinstance(line, ast.For) and self._uses(line.iter):
                self.names |= names_in(line.target)
            for block in blocks:
                self.body(block)

    def _leaf(self, line: Any) -> None:
        if not self._uses(line):
            return
        self.quiet.statement(line, frozenset())
        for call in (each for each in ast.walk(line) if isinstance(each, ast.Call)):
            mode = call.func.attr if isinstance(call.func, ast.Attribute) else ""
            if casts(self.script, call):
                self._gap(call, "it changes the type of the weights", "model.dtype", "precision")
            if mode in ("train", "eval") and not (mode == "train" and isinstance(call.func.value, ast.Name)):  # type: ignore[attr-defined]
                self._gap(call, EVALUATED)
        if isinstance(line, ast.Assign):
            self.names |= {name for target in line.targets for name in names_in(target)}

    def _uses(self, node: ast.AST) -> bool:
        calls = (each for each in ast.walk(node) if isinstance(each, ast.Call))
        dotted = any(name.partition(".")[0] in self.classes and "." in name for name in names_in(node))
        return dotted or bool(names_in(node) & self.names) or any(self._creates(each) for each in calls)

    def _creates(self, call: ast.Call) -> bool:
        origin = self.script.origin_of(call.func)
        return origin in self.classes or (origin.startswith(_ROOTS) and origin.endswith(".Trainer"))

    def _is_read(self, call: ast.Call) -> bool:
        name = ast.unparse(call.func).rpartition(".")[2]
        used = isinstance(call.func, ast.Attribute) and name in (
            "fit",
            "validate",
            "test",
            "predict",
            "save_checkpoint",
            "setup",
            "prepare_data",
            "train_dataloader",
            "val_dataloader",
            "test_dataloader",
        )
        origin = self.script.origin_of(call.func)
        listed = origin.startswith(_ROOTS) and "(" not in origin and name in NAMES["lightning_objects"]
        return used or name in NAMES["loop_calls"] or origin in self.classes or listed

    def _gap(self, node: ast.AST, why: str, *by: str) -> None:
        line = f"line {getattr(node, 'lineno', 0)}:"
        if not any(each.name.startswith(line) for each in self.draft.gaps):
            self.draft.unclear(f"{line} {code_of(node)}", why, *by)


def _changes(script: Script, kind: ast.ClassDef, method: Any, transformers: bool) -> str | None:
    """Return why a method of a module changes training, or None. It does if it replaces a part of a step, or if it is
    called for another purpose and does more than observe."""
    name = method.name
    inner = name.startswith("_") and name != "__init__"
    if name in NAMES["lightning_replaces"] or (inner and (name.startswith("__") or name in NAMES["lightning_inner"])):
        return "it replaces a part of each step"
    if name in ("__init__", "configure_optimizers", "training_step") or (name == "forward" and not transformers):
        return None  # read elsewhere
    modes = ast.walk(method) if not name.startswith(RESTORED) else iter(())
    for node in (each for each in modes if isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute)):
        if node.func.attr in ("train", "eval"):  # type: ignore[attr-defined]
            return f"the effect of {code_of(node)} on training is unknown"
    if name in NAMES["lightning_methods"] or inner:
        effect = first_effect(script, kind, method)
        return f"the effect of {code_of(effect)} on training is unknown" if effect is not None else None
    return None


def _hook(kind: ast.ClassDef, method: ast.FunctionDef, loop: Any) -> None:
    """A method that Lightning calls while it trains, or one of the script's own."""
    gaps: list[tuple[ast.AST, tuple[str, ...]]] = []
    itself = method.args.args[0].arg if method.args.args else None

    def reads(call: ast.Call) -> bool:
        return is_read(call, str(itself))

    quiet = QuietCode(loop.script, lambda node, why, *by: gaps.append((node, by)), reads, itself=itself)
    quiet.repeated, quiet.called = True, method.name
    for line in method.body:
        quiet.statement(line, frozenset())
    for node in ast.walk(method):
        if isinstance(node, ast.Call) and casts(loop.script, node):
            gaps.append((node, ("model.dtype", "precision")))
        if sets_part(kind, node, str(itself)):
            gaps.append((node, ()))
    if gaps:
        where = f"line {method.lineno}: {kind.name}.{method.name}"
        loop.draft.unclear(where, f"the effect of {code_of(gaps[0][0])} on training is unknown")


def _step(kind: ast.ClassDef, method: ast.FunctionDef, forward: ast.FunctionDef | None, loop: Any) -> None:
    """Check a training step whose loss is the model's own."""
    draft: RunDraft = loop.draft
    names = [each.arg for each in method.args.args]
    itself, batch = (*names, "", "")[:2]
    role: dict[str, str] = {}
    odd = False  # whether a line is not understood; what is returned follows from it

    def of(node: ast.expr | None) -> str:
        if isinstance(node, ast.Name):
            return role.get(node.id, "")
        if isinstance(node, ast.Attribute | ast.Subscript):
            key = node.attr if isinstance(node, ast.Attribute) else getattr(node.slice, "value", None)
            return "loss" if of(node.value) == "out" and key in ("loss", 0) else ""
        whole = isinstance(node, ast.Call) and not node.args and len(node.keywords) == 1
        if not whole or not isinstance(node, ast.Call) or node.keywords[0].arg is not None:
            return ""
        called = ast.unparse(node.func)
        of_model = called.startswith(f"{itself}.") and called.count(".") == 1 and called != f"{itself}.forward"
        of_model = of_model or (called in (itself, f"{itself}.forward") and forward is not None and _passes_on(forward))
        return "out" if of_model and ast.unparse(node.keywords[0].value) == batch else ""

    for line in method.body:
        value: Any = getattr(line, "value", None)
        effects: list[Any] = []
        if isinstance(line, ast.Assign) and len(line.targets) == 1 and isinstance(line.targets[0], ast.Name):
            if of(value) and line.targets[0].id != batch:
                role[line.targets[0].id] = of(value)
                continue
        elif isinstance(line, ast.Return):
            if isinstance(value, ast.Dict) and None not in value.keys:
                others = [each for each in value.values if of(each) not in ("loss", "out")]
                effects += [step_effect(loop.script, kind, method, each) for each in others]
                words = {getattr(key, "value", None): each for key, each in zip(value.keys, value.values, strict=True)}
                value = words.get("loss")
            if (of(value) == "loss" and not any(effects)) or odd:
                continue
        elif isinstance(line, ast.Expr) and value is not None:
            if isinstance(value, ast.Constant):
                continue
            if _logs(value, itself) and step_effect(loop.script, kind, method, value) is None:
                continue
        odd = True
        draft.unclear(f"line {line.lineno}: {code_of(line)}", _STEP, "task.loss")


def _logs(node: Any, itself: str) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) in (f"{itself}.log", f"{itself}.log_dict", "print")


def _passes_on(forward: ast.FunctionDef) -> bool:
    """Return whether a method is `def forward(self, **inputs): return self.model(**inputs)`."""
    lines = [line for line in forward.body if not isinstance(getattr(line, "value", None), ast.Constant)]
    value = lines[0].value if len(lines) == 1 and isinstance(lines[0], ast.Return) else None
    if not isinstance(value, ast.Call) or forward.args.kwarg is None or len(forward.args.args) != 1:
        return False
    words = [(word.arg, ast.unparse(word.value)) for word in value.keywords]
    return not value.args and words == [(None, forward.args.kwarg.arg)] and ast.unparse(value.func).count(".") == 1
