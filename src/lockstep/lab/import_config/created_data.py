"""Checks that a function only computes its result, like a function that creates random data.

In: a `Script` and the name of a function that the run calls itself (`task.data`, `task.model`). Out: whether each name
in it is local, a library's or a constant, so that the call cannot change the script's training.
"""

from __future__ import annotations

import ast
import builtins
from typing import Any

from lockstep.lab.import_config.bound_names import names_in, within
from lockstep.lab.import_config.script import Script, Unknown

BEYOND = ("globals", "vars", "setattr", "delattr", "exec", "eval", "exit", "quit", "input", "__import__")
_DEPTH = 10  # of calls of the script's functions in one another


def computes_alone(script: Script, name: str, depth: int = 0) -> bool:
    """Return whether the function, and the script's functions that it calls, use no object of the training and set no
    switch of a library."""
    functions = script.namesakes.get(name, [])
    if len(functions) != 1 or name in script.ambiguous or depth > _DEPTH:
        return False
    function = functions[0]
    if function.decorator_list or any(isinstance(each, ast.Global | ast.Nonlocal) for each in ast.walk(function)):
        return False
    spec = function.args
    arguments = [*spec.posonlyargs, *spec.args, *spec.kwonlyargs, *filter(None, (spec.vararg, spec.kwarg))]
    own = within(ast.Module(function.body, [])) | {each.arg for each in arguments}
    if any(map(_sets_switch, ast.walk(function))):
        return False
    names = names_in(function) - own
    return all(_is_harmless(script, each, depth) for each in names)


def _sets_switch(node: ast.AST) -> bool:
    """Return whether a call may change a setting of a library: `torch.set_default_dtype`."""
    name = ast.unparse(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""
    return name.startswith(("set_", "use_", "register")) or name in BEYOND


def _is_harmless(script: Script, name: str, depth: int) -> bool:
    if name in script.functions:
        return computes_alone(script, name, depth + 1)
    values = script.bindings.get((id(None), name))
    if values:
        return all(each is not None and _is_plain(script, each) for each in values)
    return name in script.imports or name in script.classes or (hasattr(builtins, name) and name not in BEYOND)


def _is_plain(script: Script, node: Any) -> bool:
    """Return whether a value of the script is a constant or a device."""
    if isinstance(node, ast.IfExp):
        return _is_plain(script, node.body) and _is_plain(script, node.orelse)
    if isinstance(node, ast.Call) and script.origin_of(node.func) == "torch.device":
        return all(_is_plain(script, each) for each in node.args)
    return script.known(node, Unknown) is not Unknown
