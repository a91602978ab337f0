"""Switches of libraries that a script sets for its whole process: `torch.backends.cudnn.allow_tf32 = True`.

In: a `Script`. Out: a line for each switch that the run file does not carry, and a gap for each that decides the
training: another default type, a method of a library's class replaced by one of the script's.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from lockstep.lab.import_config.bound_names import root_of
from lockstep.lab.import_config.script import Script, Unknown, code_of
from lockstep.lab.import_config.table import NAMES, RunDraft

_ROUNDS = "products of float32 are rounded to fewer bits there; lockstep leaves torch's own setting"
_LEFT = "not carried over; lockstep leaves the library's own setting"
_PATCHED = "it changes a library, and its effect on training is unknown"
_OBJECT = "its effect on what the script gives it is unknown"
_TYPED = "it sets the dtype of weights and batches; in a run model.dtype and precision do"
_ENVIRONMENT = "os.environ"
_SETTERS = ("setattr", "delattr", "object.__setattr__")
_ROOTS = (
    *("torch", "transformers", "datasets", "numpy", "random"),
    *("accelerate", "lightning", "pytorch_lightning", "lightning_fabric"),
)


def note(script: Script, draft: RunDraft) -> None:
    """Say which switches are not carried over; a line that is refused already is not named again."""
    for node, origin, value in _set(script):
        where = f"line {node.lineno}: {code_of(node)}"  # type: ignore[attr-defined]
        if any(gap.name.startswith(f"line {node.lineno}:") for gap in draft.gaps):  # type: ignore[attr-defined]
            continue
        name = origin.removesuffix("()").rpartition(".")[2]
        if name in ("set_default_dtype", "set_default_tensor_type"):
            draft.unclear(where, _TYPED, "model.dtype", "precision")
        elif origin.startswith(f"{_ENVIRONMENT}.ACCELERATE_"):
            draft.unclear(
                where, "Accelerate reads a setting of the training from this variable", "precision", "micro_batches"
            )
        elif not _is_switch(origin):
            draft.unclear(where, _PATCHED)
        elif name in ("allow_tf32", "set_float32_matmul_precision", "NVIDIA_TF32_OVERRIDE", "fp32_precision"):
            exact = (False, 0, "0", "highest", "ieee")
            if (script.known(value, Unknown) if value is not None else Unknown) not in exact:
                draft.notes.append(f"{where}: {_ROUNDS}")
        elif _is_quiet(script, origin, value):
            continue
        elif origin.endswith("()") and _acts(script, node):
            draft.unclear(where, _OBJECT)
        else:
            draft.notes.append(f"{where}: {_LEFT}")


def _acts(script: Script, call: ast.AST) -> bool:
    """Return whether a call gets an object of the script, which it may change: no constant, function or library."""
    last = script.origin_of(call.func).rpartition(".")[2] if isinstance(call, ast.Call) else "spawn"
    if not isinstance(call, ast.Call) or last in ("spawn", *NAMES["loop_calls"]):
        return False
    return any(
        script.known(each, Unknown) is Unknown and root_of(each) not in (*script.imports, *script.functions)
        for each in (*call.args, *(word.value for word in call.keywords))
        if not isinstance(each, ast.Lambda)
    )


def _is_switch(origin: str) -> bool:
    """Return whether a name is a setting of a library, and not one of its classes or functions."""
    called = any(part in origin for part in (".backends.", ".config.", ".logging.", "._C."))
    return called or origin.startswith(_ENVIRONMENT) or origin.endswith("()")


def _is_quiet(script: Script, origin: str, value: ast.expr | None) -> bool:
    """Return whether a switch changes no number: progress bars, threads, where files are."""
    if origin.startswith(f"{_ENVIRONMENT}."):
        return origin.removeprefix(f"{_ENVIRONMENT}.").startswith(tuple(NAMES["quiet_environment"]))
    last = origin.removesuffix("()").rpartition(".")[2]
    return ".logging." in origin or last in NAMES["quiet_switches"] or last.startswith(tuple(NAMES["quiet_setters"]))


def _set(script: Script) -> Iterator[tuple[ast.AST, str, ast.expr | None]]:
    """Yield each statement that sets a switch, its dotted name (a call's ends in `()`), and its value, if known."""
    for node in ast.walk(script.tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign | ast.Delete):
            targets = node.targets
        elif isinstance(node, ast.AugAssign | ast.AnnAssign | ast.For):
            targets = [node.target]
        elif isinstance(node, ast.With):
            targets = [each.optional_vars for each in node.items if each.optional_vars is not None]
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        for target in (each for whole in targets for each in _flat(whole)):
            if (origin := _of_library(script, target)) is not None:
                yield node, origin, value
        if isinstance(node, ast.Call):
            yield from _called(script, node)
        calls = [node.value] if isinstance(node, ast.Expr) else []
        calls += [each.context_expr for each in node.items] if isinstance(node, ast.With) else []
        for call in (each for each in calls if isinstance(each, ast.Call)):
            origin = _origin(script, call.func) or ""
            if origin.partition(".")[0] in _ROOTS and not origin.startswith("torch.nn."):
                yield call, f"{origin}()" if "default_" not in origin else origin, next(iter(call.args), None)


def _called(script: Script, call: ast.Call) -> Iterator[tuple[ast.AST, str, ast.expr | None]]:
    """Yield what `setattr(torch.backends.cudnn, name, value)` and `os.environ.update(...)` set."""
    name = _origin(script, call.func) or ast.unparse(call.func)
    if name in _SETTERS and len(call.args) > 1:
        key = script.known(call.args[1], "?")
        target = ast.copy_location(ast.Attribute(call.args[0], str(key), ast.Store()), call)
        if (origin := _of_library(script, target)) is not None:
            yield call, origin, call.args[2] if len(call.args) > 2 else None
    elif name in (f"{_ENVIRONMENT}.setdefault", "os.putenv") and call.args:
        yield call, f"{_ENVIRONMENT}.{script.known(call.args[0], '?')}", call.args[1] if len(call.args) > 1 else None
    elif name == f"{_ENVIRONMENT}.update":
        known = [script.known(each) for each in call.args]
        keys = [str(key) for each in known for key in (each if isinstance(each, dict) else ("?",))]
        for key in (*keys, *(word.arg or "?" for word in call.keywords)):
            yield call, f"{_ENVIRONMENT}.{key}", None


def _flat(target: ast.expr) -> Iterator[ast.expr]:
    if isinstance(target, ast.Tuple | ast.List):
        for each in target.elts:
            yield from _flat(each)
    else:
        yield target


def _of_library(script: Script, target: ast.expr) -> str | None:
    """Return the dotted name of a target that is an attribute of a library, or an entry of `os.environ`."""
    if isinstance(target, ast.Subscript) and _origin(script, target.value) == _ENVIRONMENT:
        return f"{_ENVIRONMENT}.{script.known(target.slice, '?')}"
    holder = target
    while isinstance(holder, ast.Subscript):
        holder = holder.value
    if not isinstance(holder, ast.Attribute):
        return None
    origin = _origin(script, holder)
    return origin if origin is not None and origin.partition(".")[0] in (*_ROOTS, *NAMES["libraries"]) else None


def _origin(script: Script, node: ast.expr) -> str | None:
    """Return the full dotted name of an attribute of an imported module, also through an alias of one of its parts."""
    first = root_of(node)
    if first in script.imports:
        again = any(name == first for _, name in script.bindings)
        return None if again else script.origin_of(node)
    names = [each for each in ast.walk(node) if isinstance(each, ast.Name) and each.id == first]
    value = script.bound(names[0]) if names else None
    if isinstance(value, ast.Attribute) and root_of(value) in script.imports:
        return script.origin_of(value) + ast.unparse(node).removeprefix(first)
    return None
