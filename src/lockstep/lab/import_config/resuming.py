"""Code of a script that resumes from its own snapshot, and code that keeps the best model.

In: a `Script`. Out: the script without `if os.path.exists(snapshot): load it`, as it runs the first time, and notes: in
lockstep the same command resumes a run.
"""

from __future__ import annotations

import ast
from copy import deepcopy
from typing import Any

from lockstep.lab.import_config.script import Script, Unknown, code_of

_RESTORES = ("load_state_dict", "load", "print", "info", "format")
_ORDERS = ast.Gt | ast.Lt | ast.GtE | ast.LtE


def without_resuming(script: Script) -> tuple[Script, list[str]]:
    """Return the script without branches that resume from its own checkpoints, and a note for each of them."""
    tree = deepcopy(script.tree)
    copy = Script(script.path, script.text, script.options, tree)
    saved = {_text(copy, path) for call in copy.calls if call.name == "save" for path in _saved_to(call.node)}
    notes: list[str] = []
    for node in ast.walk(tree):
        for part in ("body", "orelse", "finalbody"):
            lines: Any = getattr(node, part, None)
            loads = [each for each in lines if _resumes(copy, each, saved)] if isinstance(lines, list) else []
            if not loads:
                continue
            remaining = [each for each in lines if each not in loads]
            setattr(node, part, remaining or [ast.copy_location(ast.Pass(), loads[0])])
            why = "is left out: the same command resumes from the newest checkpoint"
            notes += [f"line {each.lineno}: if {code_of(each.test)}: ... {why}" for each in loads]
    return (Script(script.path, script.text, script.options, tree), notes) if notes else (script, [])


def _saved_to(call: ast.Call) -> list[ast.expr]:
    return [*call.args[1:2], *(word.value for word in call.keywords if word.arg == "f")]


def _text(script: Script, node: ast.expr) -> str:
    """Return a path's value, or its code where that is unknown."""
    value = script.known(node, Unknown)
    return ast.unparse(node) if value is Unknown else repr(value)


def _resumes(script: Script, node: ast.AST, saved: set[str]) -> bool:
    """Return whether a statement loads a file that the script saves, if it is there, and does nothing else."""
    test = node.test if isinstance(node, ast.If) and not node.orelse else None
    if not isinstance(node, ast.If) or not isinstance(test, ast.Call) or len(test.args) != 1:
        return False
    if script.origin_of(test.func) not in ("os.path.exists", "os.path.isfile"):
        return False
    loads = all(map(_restores, node.body)) and "load_state_dict" in ast.unparse(node)
    return loads and _text(script, test.args[0]) in saved


def _restores(line: ast.stmt) -> bool:
    """Return whether a statement loads, prints, or sets names and states to what was loaded."""
    calls = [each for each in ast.walk(line) if isinstance(each, ast.Call)]
    names = [ast.unparse(each.func).rpartition(".")[2] for each in calls]
    if isinstance(line, ast.Assign):
        plain = all(isinstance(each, ast.Name | ast.Tuple) for each in line.targets)
        return plain and all(each in (*_RESTORES, "get", "device") for each in names)
    return isinstance(line, ast.Expr) and bool(calls) and all(each in _RESTORES for each in names)


def best_saved(script: Script) -> list[str]:
    """Return a note for each `if score > best: save`, because the export of a run is its last step."""
    notes = []
    for node in (each for each in ast.walk(script.tree) if isinstance(each, ast.If)):
        compared = isinstance(node.test, ast.Compare) and isinstance(node.test.ops[0], _ORDERS)
        calls = [each for line in node.body for each in ast.walk(line) if isinstance(each, ast.Call)]
        names = {ast.unparse(each.func).rpartition(".")[2] for each in calls}
        about = ast.unparse(node.test).lower()
        if compared and names & {"save", "save_pretrained", "save_model"} and ("best" in about or "min" in about):
            why = "the original keeps its best model; checkpoint.best names the score to choose it by"
            notes.append(f"line {node.lineno}: if {code_of(node.test)}: {why}")
    return notes
