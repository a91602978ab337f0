"""Values of comprehensions over known values: `{i: name for i, name in enumerate(labels)}`.

In: a comprehension of a script. Out: its value, of constants, names of its own loop and known values.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

from lockstep.lab.import_config.value_bounds import Unknown

MOST = 10_000  # entries of a range or a comprehension
OF_MAPPINGS = ("items", "keys", "values")


def entries_of(whole: Any, method: str) -> list[Any]:
    """Return the items, keys or values of a mapping, tuples as lists. Errors: `Unknown`, if it is no mapping."""
    if not isinstance(whole, dict):
        raise Unknown
    return [list(each) if isinstance(each, tuple) else each for each in getattr(whole, method)()]


def _range(*of: int) -> list[int]:
    whole = range(*of)
    if len(whole) > MOST:
        raise Unknown
    return list(whole)


COLLECTING: dict[str, Callable[..., Any]] = {
    "enumerate": lambda of, start=0: [[number, each] for number, each in enumerate(of, start)],
    "zip": lambda *of: [list(each) for each in zip(*of, strict=False)],
    "range": _range,
    "list": list,
    "sorted": sorted,
}


def collected(script: Any, node: ast.DictComp | ast.ListComp) -> Any:
    """Return the value of a comprehension with one loop and no condition. Errors: `Unknown`."""
    part = node.generators[0]
    whole = script.value(part.iter)
    if len(node.generators) != 1 or part.ifs or not isinstance(whole, list) or len(whole) > MOST:
        raise Unknown
    frames = [_frame(part.target, each) for each in whole]
    if isinstance(node, ast.ListComp):
        return [_value(script, node.elt, frame) for frame in frames]
    return {_value(script, node.key, frame): _value(script, node.value, frame) for frame in frames}


def _frame(target: ast.expr, value: Any) -> dict[str, Any]:
    if isinstance(target, ast.Name):
        return {target.id: value}
    if not isinstance(target, ast.Tuple) or not isinstance(value, list) or len(value) != len(target.elts):
        raise Unknown
    return {key: each for part, of in zip(target.elts, value, strict=True) for key, each in _frame(part, of).items()}


def _value(script: Any, node: ast.expr, frame: dict[str, Any]) -> Any:
    if isinstance(node, ast.Name) and node.id in frame:
        return frame[node.id]
    if isinstance(node, ast.Call) and len(node.args) == 1 and not node.keywords:
        name = ast.unparse(node.func)
        if name in ("str", "int") and name not in script.functions:
            return (str if name == "str" else int)(_value(script, node.args[0], frame))
    if any(isinstance(each, ast.Name) and each.id in frame for each in ast.walk(node)):
        raise Unknown
    return script.value(node)
