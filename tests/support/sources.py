"""Python files of the repository, parsed once per process for all tests that read them.

In: a path. Out: its nodes by their class. Python collects garbage several times while it parses many files, which takes
three quarters of the time: here it does not, and later collections do not scan the trees.
"""

from __future__ import annotations

import ast
import functools
import gc
from collections import defaultdict
from pathlib import Path
from typing import Any


class Nodes:
    """A syntax tree with all of its nodes, in the order of `ast.walk` within each class."""

    def __init__(self, text: str) -> None:
        self.tree = ast.parse(text)
        self._by_class: dict[type[ast.AST], list[Any]] = defaultdict(list)
        for node in ast.walk(self.tree):
            self._by_class[type(node)].append(node)

    def of(self, *classes: type[ast.AST]) -> list[Any]:
        return [node for each in classes for node in self._by_class.get(each, ())]


@functools.cache
def nodes(path: Path) -> Nodes:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return Nodes(path.read_text(encoding="utf-8"))
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
