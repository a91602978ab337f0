"""Names that a script has from a library, told apart from its own of the same spelling.

In: a `Script` and the function of a call. Out: whether the script itself, or a file of its project, defines the name:
`def tqdm(x): return x[:5]`, `from utils import get_cosine_schedule_with_warmup`. Of a whole script: a line for each
name that init would read and that no line imports, or one imports from a library other than its own.
"""

from __future__ import annotations

import ast
import builtins
import symtable
import sys
from collections.abc import Iterator
from typing import Any

from lockstep.lab.import_config.bound_names import root_of
from lockstep.lab.import_config.table import NAMES

PROGRESS = ("tqdm", "track", "trange")
_OF_MODULES = ("__file__", "__doc__", "__spec__", "__package__", "__class__", "display", "get_ipython")


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


def is_seed(script: Any, function: ast.expr) -> bool:
    """Return whether a function is torch's own, or `set_seed` or `seed_everything` of the script or of a library that
    seeds torch: TensorFlow's does not."""
    origin = script.origin_of(function)
    if origin in ("torch.manual_seed", "torch.random.manual_seed"):
        return True
    if origin.rpartition(".")[2] not in ("set_seed", "seed_everything"):
        return False
    root = origin.partition(".")[0]
    return root in _SEEDING or not (is_library(root) or root in NAMES["imported_libraries"])


def is_library(module: str) -> bool:
    """Return whether a dotted name is of a module whose names are known."""
    return module.partition(".")[0] in (*NAMES["known_libraries"], *sys.stdlib_module_names)


def whose(script: Any, name: str) -> str:
    """Describe, for a message, where a name comes from that is not the library's (`is_own`)."""
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


def unknown(script: Any) -> list[tuple[str, str]]:
    """Return `line N: NAME` and the reason for each name that is called and that is not known to be a library's."""
    return [*_unbound(script), *_from_elsewhere(script)]


def _unbound(script: Any) -> Iterator[tuple[str, str]]:
    """Yield `line N: NAME` and the reason for each name that no line imports, defines or assigns where it is read, or
    that one of several `import *` may bind."""
    stars = [each for each in ast.walk(script.tree) if isinstance(each, ast.ImportFrom) and each.names[0].name == "*"]
    libraries = [each for each in stars if is_library(each.module or "") and not each.level]
    undefined = _undefined(script)
    lines = {each.id: each.lineno for each in ast.walk(script.tree) if isinstance(each, ast.Name) and not stars}
    for name, line in (_called(script.tree) if stars else lines).items():
        if name not in undefined:
            continue
        roots = {(each.module or "").partition(".")[0] for each in libraries}
        if len(stars) == len(libraries) == 1 and roots <= set(NAMES["homes"].get(name, roots)):
            continue
        if stars:
            numbers = ", ".join(str(each.lineno) for each in stars)
            why = f"the import of * in line {numbers} may define it: import it by its name"
        else:
            why = "nothing in the script imports, defines or assigns it there: import it from its library, or define it"
        yield f"line {line}: {name}", why


def _undefined(script: Any) -> set[str]:
    """Return the names that are read where Python finds no value for them: none of their function, of a function
    around it, of the script or of Python itself."""
    known, names = {*dir(builtins), *_OF_MODULES}, set()
    waiting = [symtable.symtable(script.text, str(script.path), "exec")]
    known |= {each.get_name() for each in waiting[0].get_symbols() if each.is_assigned() or each.is_imported()}
    while waiting:
        table = waiting.pop()
        waiting += table.get_children()
        for each in table.get_symbols():
            is_global = each.is_global() or table.get_type() == "module"
            if is_global and each.is_assigned():  # `global name` in a function
                known.add(each.get_name())
            names |= {each.get_name()} if is_global and each.is_referenced() else set()
    return names - known


def _called(tree: ast.AST) -> dict[str, int]:
    """Return the first names of calls and bases that init would read as a library's, each with its first
    line."""
    names: dict[str, int] = {}
    for node in ast.walk(tree):
        parts = [node.func] if isinstance(node, ast.Call) else []
        for each in (*parts, *(node.bases if isinstance(node, ast.ClassDef) else ())):
            first, last = root_of(each), ast.unparse(each).rpartition(".")[2]
            scheduled = last.startswith("get_") and "schedule" in last
            if first and (scheduled or last in _READ or first in NAMES["known_libraries"] or last.endswith(_TRAINS)):
                names.setdefault(first, each.lineno)
    return names


def _from_elsewhere(script: Any) -> Iterator[tuple[str, str]]:
    """Yield `line N: CODE` and the reason for each called name and base that has the name of a class or function which
    init reads, and is imported from another library."""
    for node in ast.walk(script.tree):
        parts = [node.func] if isinstance(node, ast.Call) else []
        for each in (*parts, *(node.bases if isinstance(node, ast.ClassDef) else ())):
            first, origin = root_of(each), script.origin_of(each)
            root, _, name = origin.partition(".")
            name = name.rpartition(".")[2]
            homes = NAMES["homes"].get(name, NAMES["homes"]["Trainer"] if name.endswith(_TRAINS) else ())
            listed = not name.endswith(_TRAINS) or name in NAMES["homes"]
            if first not in script.imports or not homes or not isinstance(each, ast.Name | ast.Attribute):
                continue
            if root not in homes:
                yield f"line {each.lineno}: {origin}", f"it is imported from {root}; init reads that of {homes[0]}"
            elif not listed and root not in _LOOPS:
                yield f"line {each.lineno}: {origin}", "init does not read this class"


_TRAINS = ("Trainer", "TrainingArguments")
_SEEDING = ("transformers", "accelerate", "lightning", "pytorch_lightning", "lightning_fabric", "trl")
_READ = {*NAMES["homes"], *NAMES["optimizers"], "from_pretrained", "from_config", "set_seed", "seed_everything"}
_LOOPS = ("lightning", "pytorch_lightning", "composer", "ignite", "fastai")
