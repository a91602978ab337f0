"""Values of a Lightning script that are attributes of its classes, written where they are used.

In: the tree of a script. Out: the same tree with the constants that a module or data module is created with
(`self.hparams.lr`, `self.batch_size`, arguments of `__init__` and their defaults), and with a dotted name for each
other attribute of a data module, so that rows and tokenizers are followed through it. Only classes created once.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from lockstep.lab.import_config.script import Script, Unknown
from lockstep.lab.import_config.table import NAMES

BASES = ("LightningModule", "LightningDataModule")
_NOWHERE = Path("values.py")


def classes_of(script: Script, base: str) -> list[ast.ClassDef]:
    """Return the classes of a script that are Lightning's modules, or its data modules."""
    return [c for c in script.classes.values() if any(base in ast.unparse(each) for each in c.bases)]


def with_values(script: Script) -> ast.Module | None:
    """Return the tree with the values, or None if there are none."""
    tree, changed = deepcopy(script.tree), False
    for base in BASES:
        for kind in classes_of(script, base):
            own = next(n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == kind.name)
            changed |= _written(script, tree, own, base == "LightningDataModule")
    return ast.fix_missing_locations(tree) if changed else None


def _written(script: Script, tree: ast.Module, kind: ast.ClassDef, of_data: bool) -> bool:
    """Write the values into one class. Returns whether it is created once, by its name."""
    created = [c for c in script.calls if c.origin == kind.name and isinstance(c.node.func, ast.Name)]
    start = next((m for m in kind.body if isinstance(m, ast.FunctionDef) and m.name == "__init__"), None)
    if len(created) != 1:
        return False
    holders = {name for each in _assigned(tree, kind.name) for name in each}
    stores = Counter([*_stored(kind, {"self"}), *_stored(tree, holders)])
    if start is not None:
        own = _arguments(script, created[0], start)
        _Names(own).visit(start)
        constants = {f"self.hparams.{name}": value for name, value in own.items()} if _saves(start) else {}
        for line in start.body:
            target = line.targets[0] if isinstance(line, ast.Assign) and len(line.targets) == 1 else None
            plain = isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self"
            if not plain or not isinstance(target, ast.Attribute) or stores[target.attr] != 1:
                continue
            line.value = _Attributes(constants).visit(line.value)  # type: ignore[attr-defined]
            if (value := _value(line.value)) is not Unknown:  # type: ignore[attr-defined]
                constants[f"self.{target.attr}"] = value
        outside = {f"{name}.{key.partition('.')[2]}": value for key, value in constants.items() for name in holders}
        _Attributes(constants).visit(kind)
        if not of_data:
            _Parameters(_pretrained(start)).visit(kind)
        _Attributes(outside).visit(tree)
    if of_data:
        attributes = {name for name in stores if name not in {m.name for m in kind.body if hasattr(m, "name")}}
        _Dotted(kind.name, {"self"}, attributes).visit(kind)
        _Dotted(kind.name, holders, attributes).visit(tree)
    return True


def _stored(node: ast.AST, holders: set[str]) -> Iterable[str]:
    """Yield the attributes of objects that are set."""
    for each in ast.walk(node):
        if isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name) and each.value.id in holders:
            yield from () if isinstance(each.ctx, ast.Load) else (each.attr,)


def _assigned(tree: ast.Module, name: str) -> Iterable[set[str]]:
    """Yield the names that an object of a class is assigned to."""
    for line in (each for each in ast.walk(tree) if isinstance(each, ast.Assign)):
        if isinstance(line.value, ast.Call) and ast.unparse(line.value.func) == name:
            yield {target.id for target in line.targets if isinstance(target, ast.Name)}


def _arguments(script: Script, call: Any, start: ast.FunctionDef) -> dict[str, Any]:
    """Return the known arguments of `__init__`, those that it does not set anew."""
    spec = start.args
    names = tuple(each.arg for each in (*spec.posonlyargs, *spec.args)[1:])
    defaults = dict(zip(names[::-1], spec.defaults[::-1], strict=False))
    defaults |= {a.arg: d for a, d in zip(spec.kwonlyargs, spec.kw_defaults, strict=True) if d}
    arguments = script.arguments(call, names)
    values = (
        {} if arguments.more else {n: script.known(d, Unknown) for n, d in defaults.items() if n not in arguments.nodes}
    )
    values |= arguments.known
    anew = {n.id for n in ast.walk(start) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}
    return {n: v for n, v in values.items() if isinstance(v, str | int | float | None) and n not in anew}


def _saves(start: ast.FunctionDef) -> bool:
    return any(ast.unparse(line) == "self.save_hyperparameters()" for line in start.body)


def _value(node: ast.expr) -> Any:
    """Return the value of an expression of constants."""
    allowed = ast.Constant | ast.BinOp | ast.UnaryOp | ast.operator | ast.unaryop
    if not all(isinstance(each, allowed) for each in ast.walk(node)) or len(list(ast.walk(node))) > 20:
        return Unknown
    value = Script(_NOWHERE, "").known(node, Unknown)
    return value if isinstance(value, str | int | float | None) else Unknown


def _constant(value: Any, node: ast.expr) -> ast.AST:
    new = ast.copy_location(ast.Constant(value), node)
    vars(new)["written"] = ast.unparse(node)
    return new


class _Names(ast.NodeTransformer):
    """Replaces a function's arguments by their known values."""

    def __init__(self, known: Mapping[str, Any]) -> None:
        self.known = known

    def visit_Name(self, node: ast.Name) -> ast.AST:
        known = isinstance(node.ctx, ast.Load) and node.id in self.known
        return _constant(self.known[node.id], node) if known else node


class _Attributes(ast.NodeTransformer):
    """Replaces attributes, and entries of `self.hparams`, by their known values."""

    def __init__(self, known: Mapping[str, Any]) -> None:
        self.known = known

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        text = ast.unparse(node)
        if isinstance(node.ctx, ast.Load) and text in self.known:
            return _constant(self.known[text], node)
        return self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        key = node.slice.value if isinstance(node.slice, ast.Constant) else None
        text = f"{ast.unparse(node.value)}.{key}" if isinstance(key, str) else ""  # self.hparams["lr"]
        if isinstance(node.ctx, ast.Load) and text.startswith("self.hparams.") and text in self.known:
            return _constant(self.known[text], node)
        return self.generic_visit(node)


def _pretrained(start: ast.FunctionDef) -> set[str]:
    """Return the code of the attributes that hold a model of transformers with a loss of its own."""
    lines = [each for each in start.body if isinstance(each, ast.Assign) and isinstance(each.value, ast.Call)]
    endings = tuple(f"{each}.from_pretrained" for each in NAMES["model_tasks"])
    return {ast.unparse(each.targets[0]) for each in lines if ast.unparse(each.value.func).endswith(endings)}  # type: ignore[attr-defined]


class _Parameters(ast.NodeTransformer):
    """Replaces `self.model.parameters()` by `self.parameters()`: weights outside of that model, whose loss is learned,
    get no gradient."""

    def __init__(self, models: set[str]) -> None:
        self.models = models

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        function = node.func
        named = isinstance(function, ast.Attribute) and function.attr in ("parameters", "named_parameters")
        if named and isinstance(function, ast.Attribute) and ast.unparse(function.value) in self.models:
            function.value = ast.copy_location(ast.Name("self", ast.Load()), function.value)
        return node


class _Dotted(ast.NodeTransformer):
    """Replaces `self.rows` and `data.rows` by one name, `Data.rows`."""

    def __init__(self, kind: str, holders: set[str], attributes: set[str]) -> None:
        self.kind, self.holders, self.attributes = kind, holders, attributes

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        holder = node.value.id if isinstance(node.value, ast.Name) else ""
        if holder not in self.holders or node.attr not in self.attributes:
            return self.generic_visit(node)
        new = ast.copy_location(ast.Name(f"{self.kind}.{node.attr}", node.ctx), node)
        vars(new)["written"] = f"{holder}.{node.attr}"
        return new
