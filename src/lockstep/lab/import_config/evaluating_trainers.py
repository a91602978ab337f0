"""Subclasses of Trainer whose evaluation may give another score than Trainer's, by which a checkpoint is chosen.

In: a class of a `Script` and the score's name. Out: a gap for what may set the score, in a run that chooses by one.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import Any

from lockstep.lab.import_config.bound_names import root_of
from lockstep.lab.import_config.script import Script, code_of
from lockstep.lab.import_config.table import RunDraft

_EVALUATES = ("evaluate", "evaluation_loop")
_CHANGING = ("update", "pop", "setdefault", "clear", "popitem")


def refuse(script: Script, kind: ast.ClassDef, draft: RunDraft, arguments: Mapping[str, Any]) -> None:
    """Add a gap for each method that may change the score. `arguments`: those of TrainingArguments."""
    if not {"checkpoint.best", "evaluate.patience"} & draft.keys.keys():
        return
    score = str(arguments.get("metric_for_best_model") or "loss")
    whole = f"eval_{score.removeprefix('eval_')}"
    for method in (line for line in kind.body if isinstance(line, ast.FunctionDef)):
        if method.name in (*_EVALUATES, "log"):
            for node in list(_changes(script, method, whole))[:1]:
                line = getattr(node, "lineno", method.lineno)
                why = f"it may change {whole}, by which the checkpoint is chosen; lockstep computes its own"
                draft.unclear(f"line {line}: {kind.name}.{method.name}: {code_of(node)}", why, "checkpoint.best")
    for base in (each.id for each in kind.bases if isinstance(each, ast.Name) and each.id != kind.name):
        if base in script.classes:
            refuse(script, script.classes[base], draft, arguments)


def _changes(script: Script, method: ast.FunctionDef, score: str) -> Iterator[ast.AST]:
    own = {each.arg for each in ast.walk(method.args) if isinstance(each, ast.arg)}
    text = f"super().{method.name}"
    calls = [each for each in ast.walk(method) if isinstance(each, ast.Call) and ast.unparse(each.func) == text]
    lines = [each for each in ast.walk(method) if isinstance(each, ast.Assign | ast.AnnAssign | ast.AugAssign)]
    results = {name for line in lines if line.value in calls for name in _names(line)}
    metrics = results | (own & {"logs", "metrics", "output"})
    evaluates = method.name in _EVALUATES
    for node in ast.walk(method):
        changes = isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load)
        changes = changes and _may_be(script, node.slice, score)  # type: ignore[attr-defined]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            of_metrics = node.func.attr in _CHANGING and root_of(node.func) in metrics
            changes = of_metrics and _may_set(script, node, score)
            changes |= evaluates and node in calls and not _passes_on(node, own)
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            changes = bool(_names(node) & metrics) and node.value not in calls
        elif isinstance(node, ast.Return) and evaluates:
            same = isinstance(node.value, ast.Name) and node.value.id in results
            changes = node.value not in calls and not same
        if changes:
            yield node


def _names(line: Any) -> set[str]:
    targets = line.targets if isinstance(line, ast.Assign) else [line.target]
    names = (each for target in targets for each in ast.walk(target) if isinstance(each, ast.Name))
    return {each.id for each in names if isinstance(each.ctx, ast.Store)}


def _passes_on(call: ast.Call, own: set[str]) -> bool:
    """Return whether a call of Trainer's own evaluation has the arguments that the method was given."""
    values = [
        each.value if isinstance(each, ast.Starred | ast.keyword) else each for each in (*call.args, *call.keywords)
    ]
    return all(isinstance(each, ast.Name) and each.id in own for each in values)


def _may_set(script: Script, call: ast.Call, score: str) -> bool:
    """Return whether `metrics.update(...)` may set the score; other methods may remove it."""
    whole = call.args[0] if call.args else ast.Dict([], [])
    if not isinstance(call.func, ast.Attribute) or call.func.attr != "update" or not isinstance(whole, ast.Dict):
        return True
    words = [ast.Constant(word.arg) if word.arg is not None else None for word in call.keywords]
    return any(key is None or _may_be(script, key, score) for key in (*whole.keys, *words))


def _may_be(script: Script, key: ast.expr, score: str) -> bool:
    """Return whether an entry's key may be the score's name, which Trainer also takes without `eval_`."""
    value = key.value if isinstance(key, ast.Constant) else script.known(key)
    if value is not None:
        return isinstance(value, str) and f"eval_{value.removeprefix('eval_')}" == score
    last = key.values[-1] if isinstance(key, ast.JoinedStr) and key.values else None
    return not isinstance(last, ast.Constant) or score.endswith(str(last.value))
