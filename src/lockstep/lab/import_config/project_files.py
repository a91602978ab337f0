"""Files of its own project that a script imports, which `lockstep init --from` does not read.

In: a `Script`. Out: the imports of files beside it, each with its line.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lockstep.lab.import_config import bound_names
from lockstep.lab.import_config.script import Script, code_of
from lockstep.lab.import_config.table import NAMES

_FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef
_NAMESPACES = ("globals()", "locals()", "vars()")
_LIBRARIES = {*NAMES["libraries"], "torch", "numpy", *sys.stdlib_module_names}  # they set no setting


def imported(script: Script) -> list[str]:
    """Return `FILE (line N)` for each imported file of the project, in order."""
    lines: dict[str, int] = {}
    for node in ast.walk(script.tree):
        for base, name in _modules(node):
            place = _file(script.path.parent, base, name)
            if place is not None and place.resolve() != script.path.resolve():
                lines.setdefault(str(place), node.lineno)  # type: ignore[attr-defined]
    return [f"{place} (line {line})" for place, line in lines.items()]


def rebound(script: Script) -> list[str]:
    """Return `line N: from config import *`, `exec(...)` and `globals()[name] = value`, which may set any name anew
    that the script has set before: nanoGPT's way to read settings from a file and the command line."""
    body = script.tree.body
    before = next((i for i, line in enumerate(body) if isinstance(line, ast.Assign | ast.AnnAssign)), len(body))
    late: dict[int, Any] = {id(each): each for line in body[before:] for each in ast.walk(line)}
    late |= {id(each): each for line in body[:before] if isinstance(line, _FUNCTION) for each in ast.walk(line)}
    return [f"line {each.lineno}: {code_of(each)}" for each in late.values() if _sets_names(each)]


_READ_BY_NAME = (
    "len",
    "range",
    "enumerate",
    "zip",
    "int",
    "float",
    "str",
    "min",
    "max",
    "dict",
    "list",
    "bool",
    "iter",
)


def shadowed(script: Script) -> list[str]:
    """Return `line N: def len(...)` and the like: names of Python itself that a script defines anew."""
    own = [each for each in ast.walk(script.tree) if isinstance(each, _FUNCTION | ast.ClassDef | ast.ImportFrom)]
    methods = {id(line) for kind in script.classes.values() for line in kind.body}
    lines = [each for each in own if id(each) not in methods and bound_names.of_node(each) & set(_READ_BY_NAME)]
    return [f"line {each.lineno}: {', '.join(sorted(bound_names.of_node(each)))}" for each in lines]


def _sets_names(node: Any) -> bool:
    if isinstance(node, ast.ImportFrom):
        return node.names[0].name == "*" and (node.module or "").partition(".")[0] not in _LIBRARIES
    if isinstance(node, ast.Assign | ast.AugAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return any(isinstance(each, ast.Subscript) and ast.unparse(each.value) in _NAMESPACES for each in targets)
    if not isinstance(node, ast.Call):
        return False
    name = ast.unparse(node.func)
    holder, _, method = name.rpartition(".")
    of_module = name == "setattr" and bool(node.args) and "sys.modules" in ast.unparse(node.args[0])
    return name == "exec" or of_module or (holder in _NAMESPACES and method in ("update", "setdefault", "__setitem__"))


def _modules(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield the modules of an import: a relative folder, and a dotted name."""
    if isinstance(node, ast.Import):
        yield from (("", each.name) for each in node.names)
    elif isinstance(node, ast.ImportFrom):
        base, name = "../" * (node.level - 1), node.module or ""
        yield from ((base, ".".join(filter(None, (name, each.name)))) for each in node.names)


def _file(folder: Path, base: str, name: str) -> Path | None:
    """Return the file of a module, or of the package that holds a name; None for a module from elsewhere."""
    parts = name.split(".")
    for some in filter(None, (parts, parts[:-1])):
        place = folder / base / Path(*some)
        for file in (place.parent / f"{place.name}.py", place / "__init__.py"):
            if file.is_file():
                return file
    return None
