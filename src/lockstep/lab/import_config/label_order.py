"""Detects scripts that do not number their labels in sorted order, as lockstep does.

In: a function of the script that maps labels to numbers. Out: a note with the line of the mapping.
"""

from __future__ import annotations

import ast

from lockstep.lab.import_config.script import Scope, Script, Unknown, code_of
from lockstep.lab.import_config.table import RunDraft

_CHANGES = ("sort", "reverse", "append", "insert", "extend", "remove", "pop", "shuffle")


def note(script: Script, function: Scope, draft: RunDraft) -> None:
    """Add a note for each mapping of labels whose order is not, or may not be, the sorted one."""
    names = {
        each.value.id: each.value
        for each in ast.walk(function)
        if isinstance(each, ast.Subscript) and isinstance(each.value, ast.Name) and not isinstance(each.ctx, ast.Store)
    }
    for name, node in names.items():
        bound = script.bound(node)
        if bound is not None and isinstance(bound, ast.Dict | ast.DictComp) and not _is_sorted(script, node, bound):
            draft.notes.append(
                f"line {bound.lineno}: {name} numbers the labels; lockstep numbers them in sorted order, so the "
                "model's outputs may be in another order; id2label of the export names them"
            )


def _is_sorted(script: Script, node: ast.Name, bound: ast.Dict | ast.DictComp) -> bool:
    values = script.known(node, Unknown)
    if isinstance(values, dict):
        texts = all(isinstance(each, str) for each in values)
        return values == {
            label: place for place, label in enumerate(sorted(values) if texts else sorted(values, key=float))
        }
    whole = bound.generators[0].iter if isinstance(bound, ast.DictComp) else None
    over = whole.args[0] if isinstance(whole, ast.Call) and len(whole.args) == 1 and not whole.keywords else None
    return over is not None and isinstance(bound, ast.DictComp) and _are_in_order(script, over)


def _are_in_order(script: Script, node: ast.expr) -> bool:
    """Return whether a list of labels is sorted, that of a ClassLabel, or not known to be a list."""
    if isinstance(known := script.known(node, Unknown), list):
        return known == sorted(known, key=str)
    if not isinstance(node, ast.Name):
        return isinstance(node, ast.Attribute) or _sorts(node)
    changes = [
        each
        for each in ast.walk(script.tree)
        if isinstance(each, ast.Call)
        and isinstance(each.func, ast.Attribute)
        and each.func.attr in _CHANGES
        and (code_of(each.func.value) == node.id or node.id in map(code_of, each.args))
    ]
    if changes:
        last = changes[-1]
        return code_of(last) == f"{node.id}.sort()"
    value = script.bound(node, last=True)
    return value is not None and (isinstance(value, ast.Attribute) or _sorts(value))


def _sorts(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "sorted" and not node.keywords
