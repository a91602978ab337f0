"""Files of its own project that a script imports, which `lockstep init --from` does not read.

In: a `Script`. Out: the imports of files beside it, each with its line.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from lockstep.lab.import_config.script import Script
from lockstep.lab.import_config.table import NAMES

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


def stars(script: Script) -> list[str]:
    """Return `line N: from config import *` for each import of all names that may set one anew that the script has
    set before: nanoGPT's way to read settings from a file."""
    body = script.tree.body
    before = next((i for i, line in enumerate(body) if isinstance(line, ast.Assign | ast.AnnAssign)), len(body))
    late = [each for line in body[before:] for each in ast.walk(line) if isinstance(each, ast.ImportFrom)]
    return [
        f"line {each.lineno}: {ast.unparse(each)}"
        for each in late
        if each.names[0].name == "*" and (each.module or "").partition(".")[0] not in _LIBRARIES
    ]


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
