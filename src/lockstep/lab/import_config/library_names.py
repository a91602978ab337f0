"""Names that a script has from a library, told apart from its own of the same spelling.

In: a `Script` and the function of a call. Out: whether the script itself, or a file of its project, defines the name:
`def tqdm(x): return x[:5]`, `from utils import get_cosine_schedule_with_warmup`.
"""

from __future__ import annotations

import ast
import builtins
import sys
from typing import Any

from lockstep.lab.import_config.bound_names import root_of
from lockstep.lab.import_config.table import NAMES

PROGRESS = ("tqdm", "track", "trange")


def is_own(script: Any, function: ast.expr) -> bool:
    """Return whether a name is defined in the script, or imported from a module that is no known library."""
    first = root_of(function)
    if isinstance(function, ast.Name) and (first in script.functions or first in script.classes):
        return True
    named = isinstance(function, ast.Name) or first in script.imports
    if named and any(_replaces(script, first, each) for each in _values(script, first)):
        return True
    if first in script.imports and first in script.classes:
        return True
    module = script.imports.get(first, "")
    if module and not is_library(module):
        return True
    known = hasattr(builtins, first) or (id(None), first) in script.bindings
    return isinstance(function, ast.Name) and not known and _may_be_starred(script, first)


def _values(script: Any, name: str) -> list[ast.expr]:
    values = (each for (_, bound), of in script.bindings.items() if bound == name for each in of)
    return [each for each in values if each is not None]


def _replaces(script: Any, name: str, value: ast.expr) -> bool:
    """Return whether a name is assigned another function or class than a library's: `AdamW = partial(AdamW, ...)`."""
    if isinstance(value, ast.Lambda):
        first = value.args.args[0].arg if value.args.args else ""
        return not (name in PROGRESS and ast.unparse(value.body) == first)  # without the progress bar
    if isinstance(value, ast.Call):
        return script.origin_of(value.func).rpartition(".")[2] == "partial" and name not in PROGRESS
    if not isinstance(value, ast.Name | ast.Attribute):
        return False
    first = root_of(value)
    own = first in script.functions or first in script.classes
    other = name in script.imports and first != name and not is_library(script.imports.get(first, "?"))
    return (own or other) and isinstance(value, ast.Name)


def is_library(module: str) -> bool:
    """Return whether a dotted name is of a module whose names are known."""
    return module.partition(".")[0] in (*NAMES["known_libraries"], *sys.stdlib_module_names)


def whose(script: Any, name: str) -> str:
    """Return where a name is from that `is_own` has found, for a message."""
    module = script.imports.get(name, "")
    if name in script.functions or name in script.classes:
        return "the script's own"
    if _values(script, name):
        return "replaced by the script"
    return "replaced by an import of * after it" if is_library(module) else f"imported from {module}"


def is_progress(script: Any, function: ast.expr) -> bool:
    """Return whether a call is a progress bar around what it iterates over."""
    return script.origin_of(function).rpartition(".")[2] in PROGRESS and not is_own(script, function)


def _may_be_starred(script: Any, name: str) -> bool:
    """Return whether `from mine import *`, of no known library, follows the line that imports a name."""
    last = stars = 0
    for node in script.tree.body:
        if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
            stars = _last_line(node, stars) if not is_library(node.module or "") else stars
        elif isinstance(node, ast.Import | ast.ImportFrom):
            own = [(each.asname or each.name).partition(".")[0] for each in node.names]
            last = _last_line(node, last) if name in own else last
    return stars > last


def _last_line(node: ast.stmt, line: int) -> int:
    return max(node.lineno, line)
