"""Modules that a script imports: files of its own project, and libraries that nobody knows.

In: a `Script`. Out: the imports of files beside it, each with its line; a gap for each import that runs code which may
change the training. No definition in these files is read, but what importing them does is looked at.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lockstep.config.run import RunError
from lockstep.lab.import_config import bound_names
from lockstep.lab.import_config.quiet_code import QuietCode
from lockstep.lab.import_config.script import Script, code_of
from lockstep.lab.import_config.table import NAMES, RunDraft

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


def refuse(script: Script, draft: RunDraft) -> None:
    """Add a gap for each import that may change the training, and a note for libraries that change others."""
    for node in ast.walk(script.tree):
        if (
            isinstance(node, ast.Call)
            and ast.unparse(node.func) == "sys.path.insert"
            and "__file__" not in code_of(node)
        ):
            why = "a module of this folder replaces a library of the same name, which init does not look for"
            draft.notes.append(f"line {node.lineno}: {code_of(node)}: {why}")
    for node, module, place in _imports(script):
        root, where = module.partition(".")[0], f"line {node.lineno}: {code_of(node)}"
        if place is not None and root in _known():
            why = f"{place} is imported in place of the library {root}, because it stands beside the script: rename it"
            draft.unclear(where, why)
        elif place is not None:
            if (effect := _effect(place, {script.path.resolve()})) is not None:
                why = f"importing it runs {effect}, which may change the training: move that line into the script"
                draft.unclear(where, why)
        elif root in NAMES["patching_libraries"]:
            draft.notes.append(
                f"{where}: it changes torch or transformers when it is imported; lockstep does not import it"
            )
        elif root not in _known():
            why = "no file beside the script and no library that init knows has this name, and importing it may change "
            why += "the training: put its file beside the script, or remove the import if it does not"
            draft.unclear(where, why)


def _known() -> set[str]:
    """Return the names of libraries whose import changes nothing of a training."""
    lists = ("known_libraries", "unrelated_libraries", "parsers_of_options", "libraries", "imported_libraries")
    return {name.partition(".")[0] for each in lists for name in NAMES[each]} | sys.stdlib_module_names


def _imports(script: Script) -> Iterator[tuple[ast.Import | ast.ImportFrom, str, Path | None]]:
    """Yield each statement that imports a module, with its name and its file beside the script."""
    for node in ast.walk(script.tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else [node.module or "."]
            files = [_file(script.path.parent, base, name) for base, name in _modules(node)]
            for name, file in zip(names, files, strict=False):
                relative = isinstance(node, ast.ImportFrom) and node.level > 0
                own = file is not None and file.resolve() == script.path.resolve()
                if not own and name != "__future__":
                    yield node, f".{name}" if relative else name, file


def _effect(place: Path, visited: set[Path]) -> str | None:
    """Return `FILE, line N: CODE` of the first statement which does more than define names when a file is imported, or
    when one that it imports is."""
    if place.resolve() in visited:
        return None
    visited.add(place.resolve())
    try:
        module = Script(place, place.read_text(encoding="utf-8"))
    except (RunError, OSError, UnicodeDecodeError):
        return f"{place}, which cannot be read,"
    for node, name, file in _imports(module):
        known = name.partition(".")[0] in _known() and file is None
        inner = None if known or file is None else _effect(file, visited)
        if inner is not None or (file is None and not known):
            return inner or f"{place}, line {node.lineno}: {code_of(node)}"
    effects: list[ast.AST] = []
    quiet = QuietCode(module, lambda node, *_: effects.append(node), lambda _: False)
    for line in module.tree.body:
        if not (isinstance(line, ast.If) and "__name__" in ast.unparse(line.test)):
            effects += _patches(module, line)
            quiet.statement(line, frozenset())
    first = effects[0] if effects else None
    return None if first is None else f"{place}, line {first.lineno}: {code_of(first)}"  # type: ignore[attr-defined]


def _patches(module: Script, line: ast.stmt) -> Iterator[ast.AST]:
    """Yield the parts of a statement, outside functions, that set an attribute of what the file imports, or call a
    library of training without using the result."""
    for node in _now(line):
        stored = isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load)
        own = bound_names.root_of(node) in module.imports and not ast.unparse(node).startswith("os.environ")
        called = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
        origin = module.origin_of(node.value.func) if called else ""  # type: ignore[attr-defined]
        if (stored and own) or (origin.partition(".")[0] in NAMES["libraries"] and "logging" not in origin):
            yield node
        for each in getattr(node, "decorator_list", ()):
            if (
                module.origin_of(each.func if isinstance(each, ast.Call) else each).rpartition(".")[2]
                not in _DECORATORS
            ):
                yield each


def _now(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that run when a statement does: not the bodies of functions."""
    yield node
    if not isinstance(node, _FUNCTION | ast.Lambda):
        for each in ast.iter_child_nodes(node):
            yield from _now(each)


_DECORATORS = (*NAMES["quiet_decorators"], *NAMES["parsers_of_options"])
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
