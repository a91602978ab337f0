"""The user's code behind a run: the files of the plug-ins it names, and of the user modules that those import.

In: dotted names of a run file. Out: files by import path, and a hash of each. Reads the files without executing them.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from lockstep.config import plugins
from lockstep.config.plugins import spec_of
from lockstep.config.sections import OptimSection, StrategySection, TaskSection

_INSTALLED = ("site-packages", "dist-packages")
# Not user code, even if checked out next to it: versions are compared, not files.
_LIBRARIES = ("lockstep", "lockstep_clouds", "lockstep_plan", "lockstep_trace", "lockstep_trace_report",
              "torch", "transformers", "datasets", "tokenizers", "numpy", "pyarrow", "pydantic", "accelerate",
              "deepspeed", "peft", "safetensors", "scipy", "sklearn", "pandas")  # fmt: skip


def named(task: TaskSection, optim: OptimSection, strategy: StrategySection | None = None) -> dict[str, str]:
    """Return the keys that affect the computation and name a class or function of the user: key -> name."""
    paths = {
        "task.name": plugins.path_of("tasks", task.name),
        "optim.name": plugins.path_of("optimizers", optim.name),
    }
    if strategy is not None:
        paths["strategy.name"] = plugins.path_of("strategies", strategy.name)
    if not is_own(task.name):
        cls: Any = plugins.find("tasks", task.name)
        paths |= {f"task.{key}": str(task.options.get(key)) for key in cls.functions}
    return {key: name for key, name in paths.items() if is_own(name)}


def is_own(name: str) -> bool:
    """Return whether a name is a dotted path outside lockstep and its libraries."""
    return "." in name and name.partition(".")[0] not in _LIBRARIES


def files_of(names: Iterable[str]) -> dict[str, Path]:
    """Return the files of these classes (`package.module.Class`) and of the user modules and packages that they import,
    directly or indirectly: `package/module.py` -> file. Excludes libraries, and imports by names computed at run
    time."""
    if os.getcwd() not in sys.path:  # as in `plugins`
        sys.path.insert(0, os.getcwd())
    files: dict[str, Path] = {}
    for name in names:
        module = name.rpartition(".")[0]
        _follow(module, module.partition(".")[0], files, set())
    return files


def hashes_of(names: Iterable[str]) -> dict[str, str]:
    """Return name -> hash of each file of these classes, ignoring comments, docstrings and layout."""
    return {name: fingerprint(path) for name, path in sorted(files_of(names).items())}


@lru_cache(maxsize=1)
def hash_of_lockstep() -> str:
    """Return a hash of lockstep's source at the first call, including plug-ins added to its folder."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def fingerprint(path: Path) -> str:
    """Return a hash of a Python file's syntax tree, equal in all Python versions, or of another file's bytes."""
    return _fingerprint(path.read_bytes())


@lru_cache(maxsize=64)
def _fingerprint(content: bytes) -> str:
    with suppress(SyntaxError, ValueError, RecursionError):  # a binary, or an error that the import will raise
        content = json.dumps(_plain(ast.parse(content)), default=repr).encode()
    return hashlib.sha256(content).hexdigest()[:16]


def _plain(node: object) -> object:
    """Convert a syntax tree to lists, without positions, docstrings and empty fields."""
    if isinstance(node, list):
        return [_plain(part) for part in node]
    if not isinstance(node, ast.AST):
        return node
    parts = dict(ast.iter_fields(node))
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(
        node, clean=False
    ):
        parts["body"] = parts["body"][1:]
    return [type(node).__name__, [[k, _plain(v)] for k, v in parts.items() if v not in (None, []) and k != "kind"]]


def _follow(module: str, top: str, files: dict[str, Path], visited: set[str]) -> None:
    """Add a module, its packages and its imports, recursively. Skips installed modules outside the package `top`."""
    if module in visited:
        return
    visited.add(module)
    package, _, _ = module.rpartition(".")
    if package:
        _follow(package, top, files, visited)
    spec = spec_of(module)
    if spec is None or spec.origin is None or not Path(spec.origin).is_file():
        return
    path = Path(spec.origin)
    if module.partition(".")[0] != top and set(_INSTALLED) & set(path.parts):
        return
    inside = package if spec.submodule_search_locations is None else module
    files["/".join([*filter(None, inside.split(".")), path.name])] = path
    for name in _imported(path, inside):
        if name.partition(".")[0] not in (*_LIBRARIES, *sys.stdlib_module_names):
            _follow(name, top, files, visited)


def _imported(path: Path, package: str) -> Iterator[str]:
    """Yield every module that a file may import, also inside functions and as `from package import module`."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            around = package.split(".")
            outer = around[: len(around) - node.level + 1] if node.level else []
            module = ".".join([*outer, *filter(None, [node.module])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("importlib.import_module", "__import__"):
            yield from (a.value for a in node.args[:1] if isinstance(a, ast.Constant) and isinstance(a.value, str))
