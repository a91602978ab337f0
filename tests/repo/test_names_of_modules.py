"""Names that tests, benchmarks, examples and packages import from lockstep exist, which mypy checks only for the
sources. The tests parse the files and import nothing."""

import ast
import functools
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from support.places import ROOT
from support.sources import Nodes, nodes

SOURCES = [ROOT / "src", *sorted((ROOT / "packages").glob("*/src")), ROOT / "tests"]
OURS = ("lockstep", "lockstep_trace", "lockstep_trace_report", "lockstep_plan", "lockstep_clouds", "support")


@functools.cache
def _file(module: str) -> Path | None:
    """Return the file of a module or package of `OURS`."""
    parts = Path(*module.split("."))
    places = [source / file for source in SOURCES for file in (parts.with_suffix(".py"), parts / "__init__.py", parts)]
    return next((place for place in places if place.exists()), None)


@functools.cache
def _names(module: str) -> set[str]:
    """Return the names that a module binds outside of functions and classes, and those of `__all__`."""
    file = _file(module)
    if file is None or file.is_dir():
        return set()
    names, outside = set(), list(nodes(file).tree.body)
    for node in outside:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names.add(node.name)
            case ast.Import() | ast.ImportFrom():
                names |= {(each.asname or each.name).split(".")[0] for each in node.names}
            case ast.Name(ctx=ast.Store()):
                names.add(node.id)
            case _:
                outside += ast.iter_child_nodes(node)
    return names


def _there(dotted: str) -> bool:
    """Return whether a dotted name is a module, or a module followed by one of its names."""
    module = dotted
    while _file(module) is None:
        module = module.rpartition(".")[0]
    rest = dotted[len(module) + 1 :].split(".")[0]
    return rest in {"", "__file__"} | _names(module)


def _missing(file: Nodes) -> Iterator[tuple[int, str]]:
    """Yield line and name of each import, attribute of an imported module, and dotted name in a text that does not
    exist."""
    modules: dict[str, list[str]] = defaultdict(list)  # one name may stand for two modules, in two functions
    others: set[str] = set()  # variables, which hide a module of their name
    attributes: list[ast.Attribute] = []
    for node in file.of(ast.ImportFrom, ast.Name, ast.arg, ast.Attribute, ast.Constant):
        match node:
            case ast.ImportFrom(level=0, module=str(module)) if module.split(".")[0] in OURS:
                for each in node.names:
                    modules[each.asname or each.name].append(f"{module}.{each.name}")
                    if not _there(f"{module}.{each.name}"):
                        yield node.lineno, f"{module}.{each.name}"
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                others.add(name)
            case ast.Attribute(value=ast.Name()):
                attributes.append(node)
            case ast.Constant(value=str(text)) if re.fullmatch(r"lockstep(\.\w+){2,}", text) and not _there(text):
                yield node.lineno, text
    for node in attributes:
        assert isinstance(node.value, ast.Name)
        places = [] if node.value.id in others else [each for each in modules[node.value.id] if _file(each)]
        if places and not any(_there(f"{place}.{node.attr}") for place in places):
            yield node.lineno, f"{places[0]}.{node.attr}"


def test_names_that_are_imported_from_lockstep_are_there() -> None:
    files = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    gone = [
        f"{file}:{line} uses {name}"
        for file in files.stdout.split()
        if (ROOT / file).is_file() and "lockstep" in (ROOT / file).read_text(encoding="utf-8")
        for line, name in _missing(nodes(ROOT / file))
    ]
    assert gone == []


def test_references_to_missing_names_are_detected() -> None:
    source = """
from lockstep.config import run
from lockstep.config.run import Run, Gone
run.load, run.gone, "lockstep.config.run.Run", "lockstep.config.gone.Run"
"""
    names = [name.removeprefix("lockstep.config.") for _, name in _missing(Nodes(source))]
    assert names == ["run.Gone", "gone.Run", "run.gone"]
