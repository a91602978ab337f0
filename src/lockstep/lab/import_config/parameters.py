"""Values of the parameters of a script's functions that are called in one way only.

In: a `Script`. Out: bindings of parameters to an argument of the only call, or to their default: `main(lr=5e-4)`,
`data.map(tokens, fn_kwargs={"length": 30})`, `def build(name="acme/encoder")`. A parameter that two calls give two
values, or one of a function that is passed on, has none.
"""

from __future__ import annotations

import ast
from typing import Any

_NESTED = 5  # maximum length of a chain of functions that pass on a value


def bind(script: Any) -> None:
    """Add a binding for each parameter whose value is known. Run before values are evaluated."""
    uses: dict[str, list[ast.Name]] = {}
    calls: dict[str, list[ast.Call]] = {}
    for node in ast.walk(script.tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in script.functions:
            uses.setdefault(node.id, []).append(node)
        if isinstance(node, ast.Call) and (name := _called(node)) in script.functions:
            calls.setdefault(name, []).append(node)
    for _ in range(_NESTED):
        before = script.bindings.copy()
        for name, own in calls.items():
            plain = len(script.namesakes.get(name, ())) == 1 and name not in script.ambiguous
            if plain and len(uses.get(name, ())) == len(own):
                _function(script, script.namesakes[name][0], own)
        if script.bindings == before:
            return
        script._values.clear()  # a value that was unknown may depend on a parameter


def _called(call: ast.Call) -> str:
    """Return the name of a function that a call calls, itself or as `map` does."""
    if isinstance(call.func, ast.Name):
        return call.func.id
    maps = isinstance(call.func, ast.Attribute) and call.func.attr == "map" and call.args
    return call.args[0].id if maps and isinstance(call.args[0], ast.Name) else ""


def _function(script: Any, function: Any, calls: list[ast.Call]) -> None:
    spec = function.args
    if function.decorator_list or spec.vararg or spec.kwarg or spec.posonlyargs:
        return
    values = [_values(function, call) for call in calls]
    for name in (each.arg for each in (*spec.args, *spec.kwonlyargs)):
        nodes = [each.get(name) for each in values]
        first = nodes[0]
        same = first is not None and all(each is not None and ast.dump(each) == ast.dump(first) for each in nodes)
        settings = len(nodes) == 1 and _is_settings(script, first)
        valued = same and script.known(first) is not None and (len(nodes) == 1 or isinstance(first, ast.Constant))
        known = valued or settings
        if known and script.bindings.get((id(function), name)) == [None]:
            script.bindings[id(function), name] = [first]


def _is_settings(script: Any, node: ast.expr | None) -> bool:
    """Return whether an argument is `Config()`, of a dataclass of the script, or the only name of one."""
    value = script.bound(node) if isinstance(node, ast.Name) else node
    name = ast.unparse(value.func) if isinstance(value, ast.Call) else ""
    marks = script.classes[name].decorator_list if name in script.classes else []
    return bool(marks) and all(ast.unparse(each).partition("(")[0].endswith("dataclass") for each in marks)


def _values(function: Any, call: ast.Call) -> dict[str, ast.expr]:
    """Map a function's parameters to the arguments of a call, or to their defaults. Empty if this is unknown."""
    spec, words = function.args, {each.arg: each.value for each in call.keywords}
    names = [each.arg for each in spec.args]
    defaults = dict(zip(names[len(names) - len(spec.defaults) :], spec.defaults, strict=True))
    pairs = zip(spec.kwonlyargs, spec.kw_defaults, strict=True)
    defaults |= {each.arg: default for each, default in pairs if default is not None}
    if isinstance(call.func, ast.Attribute):
        more = words.get("fn_kwargs", ast.Dict([], []))
        keys = [each.value if isinstance(each, ast.Constant) else None for each in getattr(more, "keys", [None])]
        if None in keys or None in words or not isinstance(more, ast.Dict):
            return {}
        return defaults | dict(zip(map(str, keys), more.values, strict=True))
    if None in words or any(isinstance(each, ast.Starred) for each in call.args):
        return {}
    return defaults | dict(zip(names, call.args, strict=False)) | {str(name): node for name, node in words.items()}
