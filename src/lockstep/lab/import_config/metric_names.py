"""Lockstep's names of the scores that a script computes: its `f1` may be the task's `macro_f1`.

In: a script, and the function that it gives as `compute_metrics`. Out: `checkpoint.best` by lockstep's name, where the
score is computed by a function of scikit-learn.
"""

from __future__ import annotations

import ast

from lockstep.lab.import_config.script import Script
from lockstep.lab.import_config.table import RunDraft


def rename_best(script: Script, function: ast.expr, draft: RunDraft) -> None:
    """Set `checkpoint.best` to lockstep's name of the script's score, if both are known to be alike."""
    best = str(draft.keys.get("checkpoint.best", ""))
    node = script.functions.get(function.id) if isinstance(function, ast.Name) else None
    if node is None or draft.is_given("checkpoint.best") or draft.task != "classification":
        return
    returned = [each.value for each in ast.walk(node) if isinstance(each, ast.Return)]
    entries = [
        value
        for each in returned
        if isinstance(each, ast.Dict)
        for key, value in zip(each.keys, each.values, strict=True)
        if script.known(key) == best.removeprefix("-")
    ]
    name = _name(script, entries[0]) if len(returned) == 1 and len(entries) == 1 else None
    if name is not None and name != best:
        comment = draft.comments.get("checkpoint.best", "")
        draft.set("checkpoint.best", name, f"{comment}: {best} of line {entries[0].lineno} is {name} here")


def _name(script: Script, node: ast.expr | None, depth: int = 0) -> str | None:
    """Return lockstep's name of a score; None if it is unknown."""
    if isinstance(node, ast.Name) and depth < 10:
        return _name(script, script.bound(node, last=True), depth + 1)
    if not isinstance(node, ast.Call):
        return None
    origin = script.origin_of(node.func)
    if origin == "float" and len(node.args) == 1:
        return _name(script, node.args[0], depth + 1)
    words = {word.arg: script.known(word.value) for word in node.keywords}
    if origin == "sklearn.metrics.f1_score" and words == {"average": "macro"}:
        return "macro_f1"
    return "accuracy" if origin == "sklearn.metrics.accuracy_score" and not words else None
