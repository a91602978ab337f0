"""Constants that a script imports from a file of its own beside it: `from config import LR`, `import config`.

In: the tree of a script. Out: the tree with the values of such a file written out. A file is read if it only assigns
names once, to literals and arithmetic on them; any other one stays an import, which is refused.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

_LITERAL = (ast.Constant, ast.UnaryOp, ast.USub, ast.UAdd, ast.Not, ast.BinOp, ast.operator)
_WHOLE = (*_LITERAL, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.Load)


def write_out(tree: ast.Module, path: Path) -> list[str]:
    """Replace imports of constants at the top of a script by assignments. Returns `line N: CODE` for each import."""
    read, body = [], list[ast.stmt]()
    for line in tree.body:
        code = f"line {line.lineno}: {ast.unparse(line)}"
        if isinstance(line, ast.ImportFrom) and (values := _of_module(path, line)) is not None:
            body += [_assigned(line, name, value) for name, value in values.items()]
            read.append(code)
        elif isinstance(line, ast.Import) and len(line.names) == 1 and _name_module(tree, path, line):
            read.append(code)
        else:
            body.append(line)
    tree.body[:] = body
    return read


def _of_module(path: Path, line: ast.ImportFrom) -> dict[str, ast.expr] | None:
    """Return the constants that `from FILE import names` binds, by their names in the script."""
    known = constants(_file_of(path, line.module or "", line.level))
    if known is None or not known:
        return None
    if any(each.name not in known for each in line.names):
        return None
    return {each.asname or each.name: known[each.name] for each in line.names}


def _name_module(tree: ast.Module, path: Path, line: ast.Import) -> bool:
    """Write out `config.LR` for each use of a module, if all its uses are of constants that cannot change."""
    of = line.names[0]
    name = of.asname or of.name
    known = constants(_file_of(path, of.name, 0))
    uses = [each for each in ast.walk(tree) if isinstance(each, ast.Name) and each.id == name]
    bound: list[ast.AST] = [each for each in ast.walk(tree) if isinstance(each, ast.arg) and each.arg == name]
    bound += [each for each in ast.walk(tree) if isinstance(each, ast.alias) and (each.asname or each.name) == name][1:]
    parts = [each for each in ast.walk(tree) if isinstance(each, ast.Attribute) and each.value in uses]
    if not known or bound or not uses or len(parts) != len(uses) or "." in name:
        return False
    if any(isinstance(each, ast.Global | ast.Nonlocal) and name in each.names for each in ast.walk(tree)):
        return False
    for each in parts:
        fixed = each.attr in known and all(isinstance(inner, _LITERAL) for inner in ast.walk(known[each.attr]))
        if not fixed or not isinstance(each.ctx, ast.Load):
            return False
    _Written(name, known).visit(tree)
    return True


class _Written(ast.NodeTransformer):
    def __init__(self, name: str, known: Mapping[str, ast.expr]) -> None:
        self.name, self.known = name, known

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        if isinstance(node.value, ast.Name) and node.value.id == self.name:
            return _placed(deepcopy(self.known[node.attr]), node)
        return self.generic_visit(node)


def constants(file: Path | None) -> dict[str, ast.expr] | None:
    """Return the constants of a file that holds nothing else; None for any other one."""
    try:
        tree = ast.parse(file.read_text(encoding="utf-8")) if file is not None else None
    except (OSError, UnicodeDecodeError, ValueError, SyntaxError, RecursionError):
        return None
    values: dict[str, ast.expr] = {}
    for line in tree.body if tree is not None else []:
        if isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant):
            continue  # a docstring
        if isinstance(line, ast.Import | ast.ImportFrom):
            modules = [each.name for each in line.names] if isinstance(line, ast.Import) else [line.module or "."]
            if all(each.partition(".")[0] in sys.stdlib_module_names for each in modules):
                continue
            return None
        target = line.targets[0] if isinstance(line, ast.Assign) and len(line.targets) == 1 else None
        target = line.target if isinstance(line, ast.AnnAssign) and line.value is not None else target
        if not isinstance(target, ast.Name) or target.id in values or target.id == "__all__":
            return None
        value = _Earlier(values).visit(deepcopy(line.value))  # type: ignore[attr-defined]
        if not all(isinstance(each, (*_WHOLE, ast.expr_context)) for each in ast.walk(value)):
            return None
        values[target.id] = value
    return values if tree is not None else None


class _Earlier(ast.NodeTransformer):
    """Writes out names of constants that stand above."""

    def __init__(self, values: Mapping[str, ast.expr]) -> None:
        self.values = values

    def visit_Name(self, node: ast.Name) -> Any:
        return deepcopy(self.values.get(node.id, node))


def _file_of(path: Path, module: str, level: int) -> Path | None:
    """Return the file of a module beside a script; None for a module from elsewhere, or one of a package."""
    folder = path.parent.joinpath(*[".."] * max(level - 1, 0))
    file = folder.joinpath(*module.split(".")).with_suffix(".py") if module else folder
    packages = [*file.parents][: module.count(".")]
    plain = all(not (each / "__init__.py").is_file() or not _text(each / "__init__.py") for each in packages)
    known = level == 0 and module.partition(".")[0] in sys.stdlib_module_names
    return file if module and file.is_file() and plain and not known and file.resolve() != path.resolve() else None


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return "unreadable"


def _assigned(line: ast.stmt, name: str, value: ast.expr) -> ast.stmt:
    whole = ast.Assign([ast.Name(name, ast.Store())], deepcopy(value))
    return _placed(whole, line)


def _placed(node: Any, at: ast.AST) -> Any:
    """Give a node and its parts the place of another one."""
    for each in ast.walk(node):
        if isinstance(each, ast.expr | ast.stmt):
            ast.copy_location(each, at)
    return node
