"""The user's own code behind a run: files of the plug-ins it names, and of all of theirs that those import.

In: dotted names of a run file. Out: files, by the name that they are imported under, and a hash of what each says.
Files are found and read, and nothing in them is executed.
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
from lockstep.config.entry_points import spec_of
from lockstep.config.run import Run

_INSTALLED = ("site-packages", "dist-packages")
# Not the user's code, even where they are checked out beside it: their versions are compared, not their files.
_LIBRARIES = ("lockstep", "lockstep_clouds", "lockstep_plan", "lockstep_trace",
              "torch", "transformers", "datasets", "tokenizers", "numpy", "pyarrow", "pydantic", "accelerate",
              "deepspeed", "peft", "safetensors", "scipy", "sklearn", "pandas")  # fmt: skip


def named(run: Run, strategy: bool = True) -> dict[str, str]:
    """Keys of the run file that name a class or a function of the user's, among those that decide what is computed:
    key -> name."""
    kinds = {"task": "tasks", "optim": "optimizers"} | ({"strategy": "strategies"} if strategy else {})
    paths = {f"{part}.name": plugins.path_of(kind, getattr(run, part).name) for part, kind in kinds.items()}
    if not is_own(run.task.name):
        task: Any = plugins.find("tasks", run.task.name)
        paths |= {f"task.{key}": str(run.task.options.get(key)) for key in task.functions}
    return {key: name for key, name in paths.items() if is_own(name)}


def is_own(name: str) -> bool:
    """Whether a name is the dotted path of something outside lockstep and the libraries that it stands on."""
    return "." in name and name.partition(".")[0] not in _LIBRARIES


def files_of(names: Iterable[str]) -> dict[str, Path]:
    """Files of the modules that hold these classes (`package.module.Class`), and of the user's modules that they
    import, packages on the way to them included: `package/module.py` -> file. A library's files are not among them,
    whatever is imported by a name that is made while the program runs is not found."""
    if os.getcwd() not in sys.path:  # as `plugins` does
        sys.path.insert(0, os.getcwd())
    files: dict[str, Path] = {}
    for name in names:
        module = name.rpartition(".")[0]
        _follow(module, module.partition(".")[0], files, set())
    return files


def hashes_of(names: Iterable[str]) -> dict[str, str]:
    """What each of these files says: name -> hash. Comments, docstrings and layout do not count."""
    return {name: fingerprint(path) for name, path in sorted(files_of(names).items())}


@lru_cache(maxsize=1)
def hash_of_lockstep() -> str:
    """A hash of lockstep's own source, including plug-ins that were put into its folder, as it is when this process
    first asks."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def fingerprint(path: Path) -> str:
    """A hash of a Python file's syntax tree, the same in every version of Python; of another file's bytes."""
    return _fingerprint(path.read_bytes())


@lru_cache(maxsize=64)
def _fingerprint(content: bytes) -> str:
    with suppress(SyntaxError, ValueError, RecursionError):  # compiled, or for Python to complain about
        content = json.dumps(_plain(ast.parse(content)), default=repr).encode()
    return hashlib.sha256(content).hexdigest()[:16]


def _plain(node: object) -> object:
    """A syntax tree as lists, without places and whatever is empty."""
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
    """Add a module of the package `top`, or of none that is installed, the packages it is in, and what it imports."""
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
    """Every module that a file may import, also inside of functions. What follows `from x import` may be one, too."""
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
