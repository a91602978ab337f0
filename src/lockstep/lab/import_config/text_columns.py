"""The column that an expression of a script reads.

In: an expression of a function passed to `map`. Out: a `Column` if the expression is its texts, unchanged or behind a
prefix; None for anything else.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass

from lockstep.lab.import_config.script import Script


@dataclass(frozen=True)
class Column:
    """A column that a function reads, a prefix of its texts, and a language within it."""

    name: str
    prefix: str = ""
    language: str | None = None


def column_of(script: Script, node: ast.expr | None, depth: int = 0) -> Column | None:
    """Return the column whose texts an expression of a mapped function has, unchanged or behind a prefix."""
    if node is None or depth > 12:
        return None
    if isinstance(node, ast.Name):
        return column_of(script, script.bound(node, last=True), depth + 1)
    if isinstance(node, ast.Subscript):
        name = script.known(node.slice, usual_name(script, node.slice))
        if not isinstance(name, str):
            return None
        outer = column_of(script, node.value, depth + 1) if isinstance(node.value, ast.Subscript) else None
        return Column(outer.name, outer.prefix, name) if outer is not None else Column(name)
    if isinstance(node, ast.ListComp) and len(node.generators) == 1 and not node.generators[0].ifs:
        return _of_comprehension(script, node, depth)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        prefix, column = script.known(node.left), column_of(script, node.right, depth + 1)
        return Column(column.name, prefix + column.prefix) if isinstance(prefix, str) and column is not None else None
    return None


def _of_comprehension(script: Script, node: ast.ListComp, depth: int) -> Column | None:
    """Match `[prefix + text for text in examples["text"]]` and `[row["en"] for row in examples["translation"]]`."""
    generator = node.generators[0]
    if not isinstance(generator.target, ast.Name):
        return None
    whole, prefix, element = column_of(script, generator.iter, depth + 1), "", node.elt
    if whole is None:
        return None
    if isinstance(element, ast.BinOp) and isinstance(element.op, ast.Add):
        before = script.known(element.left)
        if not isinstance(before, str):
            return None
        prefix, element = before, element.right
    if isinstance(element, ast.Name) and element.id == generator.target.id:
        return Column(whole.name, prefix + whole.prefix, whole.language)
    if isinstance(element, ast.Subscript) and isinstance(element.value, ast.Name):
        language = script.known(element.slice)
        if element.value.id == generator.target.id and isinstance(language, str):
            return Column(whole.name, prefix, language)
    return None


def usual_name(script: Script, node: ast.expr) -> str | None:
    """Return NAME of `NAME if NAME in columns else columns[0]`, as run_clm.py of transformers has it."""
    value = script.bound(node) if isinstance(node, ast.Name) else node
    if not isinstance(value, ast.IfExp) or not isinstance(value.test, ast.Compare):
        return None
    name, columns = script.known(value.body), ast.unparse(value.test.comparators[0])
    usual = isinstance(name, str) and ast.unparse(value.test) == f"{name!r} in {columns}"
    return name if usual and ast.unparse(value.orelse) == f"{columns}[0]" else None
