"""The words of the code: rules of CONTRIBUTING.md that a program can count.

Each limit is what there is today. A change may lower it and never raise it; at 0 the rule holds everywhere.
"""

import ast
import functools
import re
from collections import Counter
from pathlib import Path

import pytest

import lockstep
from support.sources import Nodes, nodes

ROOT = Path(lockstep.__file__).parent
PACKAGES = ROOT.parents[1] / "packages"
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
RIDDLES = re.compile(r"(The same\b|As above\b|As `|What becomes of\b)")
# Participles that name nothing by themselves. Left are keys of files: `held` and `seen` in proof/recording.py, and
# `held` in lockstep_trace/read.py.
WORDS = {
    "found": 0,
    "told": 0,
    "given": 0,
    "made": 0,
    "kept": 0,
    "said": 0,
    "asked": 0,
    "shown": 0,
    "held": 2,
    "seen": 1,
}
WORDS |= {"apart": 0, "beside": 0, "standing": 0, "leaving": 0, "waited": 0, "moved": 0, "wanted": 0}
LIMITS = WORDS | {"riddles": 0, "classes": 0}


def names(nodes: Nodes) -> Counter[str]:
    """Count the bindings of each name as a variable, parameter, attribute, function or class, in lower case, without
    leading underscores."""
    counted: Counter[str] = Counter()
    bound = ast.Name, ast.Attribute, ast.arg, ast.FunctionDef, ast.ClassDef, ast.ExceptHandler
    for node in nodes.of(*bound):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()) | ast.arg(arg=name):
                counted[name.lstrip("_").lower()] += 1
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.ExceptHandler(name=str(name)):
                counted[name.lstrip("_").lower()] += 1
    return counted


def riddles(nodes: Nodes) -> int:
    """Return the docstrings that cannot be understood on their own."""
    texts = (ast.get_docstring(n) for n in nodes.of(*DOCUMENTED))
    return sum(bool(text and RIDDLES.match(text)) for text in texts)


@functools.cache
def counts() -> dict[str, int]:
    paths = [*ROOT.rglob("*.py"), *PACKAGES.glob("*/src/**/*.py")]
    files = [nodes(path) for path in paths]
    classes = Counter(
        n.name for file in files for n in file.tree.body if isinstance(n, ast.ClassDef) and not n.name.startswith("_")
    )
    bound = sum(map(names, files), Counter[str]())
    return {word: bound[word] for word in WORDS} | {
        "riddles": sum(map(riddles, files)),
        "classes": sum(count - 1 for count in classes.values()),
    }


@pytest.mark.parametrize("rule", LIMITS)
def test_counts_of_discouraged_words_do_not_grow(rule: str) -> None:
    assert counts()[rule] <= LIMITS[rule]


def test_counted_names_are_detected() -> None:
    file = Nodes(
        "def _told(found):\n    'The same, of others.'\n    x.found = 1\n    for found in (found := x): pass\n"
    )
    assert (names(file)["found"], names(file)["told"], riddles(file)) == (4, 1, 1)


if __name__ == "__main__":
    print(counts())
