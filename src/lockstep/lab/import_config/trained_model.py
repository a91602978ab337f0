"""Whether the weights that an optimizer has are those of the model that computes the loss.

In: a `Script` and its optimizers. Out: a gap for each optimizer of a fresh model or of a copy, for a model that is
created again after its optimizer, and for methods of a script's own model that say which weights it has.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

from lockstep.lab.import_config.script import Call, Script, code_of
from lockstep.lab.import_config.table import RunDraft

_OTHER = "the optimizer gets the weights of another model than the one that computes the loss"
_AGAIN = "a second model like it: which one is trained is unknown"
_LATER = "the optimizer above keeps the weights of the model before this line"
_OWN = "a run calls this method where the script does not, and it decides which weights are trained or saved"
_PREPARING = ("prepare", "prepare_model", "prepare_optimizer", "prepare_data_loader", "prepare_scheduler")
_METHODS = (
    *("parameters", "named_parameters", "modules", "named_modules", "children", "named_children", "zero_grad"),
    *("requires_grad_", "eval", "state_dict", "load_state_dict", "buffers", "named_buffers"),
)


def note(script: Script, draft: RunDraft, optimizers: list[Call]) -> None:
    """Add the gaps."""
    makers = {id(node): key for node, key in _creations(script)}
    targets = dict(_targets(script))
    for call in optimizers:
        for argument in call.node.args[:1]:
            _one(script, draft, call, argument, makers, targets)
    owners = {
        n.id for call in optimizers for each in call.node.args[:1] for n in ast.walk(each) if isinstance(n, ast.Name)
    }
    trained = {makers[key] for key, target in targets.items() if key in makers and target in owners}
    for node, key in _creations(script):
        target = targets.get(id(node))
        if key in trained and target not in owners and _is_used(script, target) and not _loads(script, target):
            draft.unclear(f"line {node.lineno}: {code_of(node)}", _AGAIN)


def _is_used(script: Script, target: str | None) -> bool:
    """Return whether a model is called or passed on, and not only put into a mode."""
    holders = {id(each.value) for each in ast.walk(script.tree) if isinstance(each, ast.Attribute)}
    uses = [each for each in ast.walk(script.tree) if isinstance(each, ast.Name) and each.id == target]
    return target is None or any(isinstance(each.ctx, ast.Load) and id(each) not in holders for each in uses)


def _one(
    script: Script,
    draft: RunDraft,
    call: Call,
    argument: ast.expr,
    makers: dict[int, str],
    targets: dict[int, str | None],
) -> None:
    """Look at the weights that one optimizer gets, and at what becomes of their model afterwards."""
    if any(id(each) in makers or _copies(script, each) for each in ast.walk(argument)):
        draft.unclear(str(call), _OTHER)
    for name in (each for each in ast.walk(argument) if isinstance(each, ast.Name)):
        if any(_copies(script, each) for each in ast.walk(script.bound(name, last=True) or ast.Pass())):
            draft.unclear(str(call), _OTHER)
        own = {makers[key] for key, target in targets.items() if target == name.id and key in makers}
        twice = [key for key in own if list(makers.values()).count(key) > 1]
        for node in (each for each in ast.walk(script.tree) if isinstance(each, ast.Call)):
            again = makers.get(id(node)) in twice or _copies(script, node)
            if again and node.lineno > call.line and targets.get(id(node)) == name.id and not _loads(script, name.id):
                draft.unclear(f"line {node.lineno}: {code_of(node)}", _LATER)


def unprepared(loop: Any) -> None:
    """Add a gap for a model that Accelerate does not prepare, for then neither its forward passes are cast nor its
    gradients averaged, and for such an optimizer under fp16."""
    script, draft = loop.script, loop.draft
    if not any(each.name == "Accelerator" for each in script.calls):
        return
    calls = [each.node for each in script.calls if each.name in _PREPARING]
    arguments = [value for node in calls for value in (*node.args, *(word.value for word in node.keywords))]
    makers = {id(node) for node, _ in _creations(script)}
    models = {target for key, target in _targets(script) if key in makers}
    if not calls or not models or any(_may_hold(script, value, models, makers) for value in arguments):
        optimizers = {ast.unparse(t) for each in loop.optimizers for t in _assigned(script, each.node)}
        codes = {ast.unparse(value) for value in arguments}
        known = bool(calls) and not any(isinstance(value, ast.Starred) for value in arguments)
        if known and draft.keys.get("precision") == "fp16" and optimizers and not optimizers & codes:
            why = "it is not passed to prepare(), so it steps by gradients that are still scaled"
            draft.lacks(str(loop.optimizers[0]), why, "precision")
        return
    where, why = f"line {calls[0].lineno}: {code_of(calls[0])}", "the model is not passed to prepare()"
    if draft.keys.get("precision") not in (None, "fp32") and not any(c.name == "autocast" for c in script.calls):
        draft.lacks(where, f"{why}, so it computes without mixed precision", "precision")
    elif loop.processes is None:
        why += ", so several processes do not average gradients; this run file is that of one process"
        draft.notes.append(f"{where}: {why}")
    elif loop.processes > 1:
        draft.lacks(where, f"{why}, so each process trains a model of its own; or give launch.processes=1")


def _may_hold(script: Script, value: ast.expr, models: set[str | None], makers: set[int]) -> bool:
    """Return whether a value that is prepared may be the model: its name, what wraps it, or what is not known."""
    if isinstance(value, ast.Starred) or id(value) in makers or ast.unparse(value) in models:
        return True
    bound = script.bound(value, last=True) if isinstance(value, ast.Name) else value
    if bound is None or not isinstance(bound, ast.Call):
        return True
    holder = bound.func.value if isinstance(bound.func, ast.Attribute) else bound.func
    return any(ast.unparse(each) in models for each in (holder, *bound.args))


def _assigned(script: Script, node: ast.Call) -> list[ast.expr]:
    lines = (each for each in ast.walk(script.tree) if isinstance(each, ast.Assign))
    return [target for line in lines if line.value is node for target in line.targets]


def own_methods(script: Script, draft: RunDraft) -> None:
    """Add a gap for each method of a module of the script that the run uses in other places."""
    for kind in (each for each in script.classes.values() if _is_module(script, each)):
        for method in kind.body:
            if isinstance(method, ast.FunctionDef) and method.name in _METHODS:
                draft.unclear(f"line {method.lineno}: def {method.name}(...)", _OWN, "task.model")


def _is_module(script: Script, kind: ast.ClassDef) -> bool:
    bases = [script.origin_of(each) for each in kind.bases]
    return any(
        each.rpartition(".")[2] in ("Module", "PreTrainedModel")
        or (each in script.classes and each != kind.name and _is_module(script, script.classes[each]))
        for each in bases
    )


def _creations(script: Script) -> Iterator[tuple[ast.Call, str]]:
    """Yield the calls that make a model, with what they make; not those in the model's own class."""
    skipped = {id(n): kind.name for kind in script.classes.values() for n in ast.walk(kind)}
    for node in (each for each in ast.walk(script.tree) if isinstance(each, ast.Call)):
        origin = script.origin_of(node.func)
        kind = script.classes.get(origin)
        if kind is not None and _is_module(script, kind) and id(node) not in skipped:
            yield node, origin
        holder, _, method = origin.rpartition(".")
        if method == "from_pretrained" and re.search(r"Model|For[A-Z]", holder.rpartition(".")[2]) and node.args:
            yield node, f"{holder} {script.known(node.args[0], ast.unparse(node.args[0]))}"


def _targets(script: Script) -> Iterator[tuple[int, str | None]]:
    """Yield the calls in assigned values, with the names that they are assigned to."""
    for line in (each for each in ast.walk(script.tree) if isinstance(each, ast.Assign)):
        for node in ast.walk(line.value):
            if isinstance(node, ast.Call):
                yield id(node), ast.unparse(line.targets[0])


def _copies(script: Script, node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and script.origin_of(node.func) in ("copy.deepcopy", "copy.copy")


def _loads(script: Script, target: str | None) -> bool:
    """Return whether a model gets weights that were saved."""
    return any(
        call.name == "load_state_dict" and call.receiver is not None and ast.unparse(call.receiver) == target
        for call in script.calls
    )
