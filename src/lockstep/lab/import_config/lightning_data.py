"""A script's LightningDataModule, and which loader Lightning trains on.

In: a `Script` whose attributes are written out, and its loop. Out: the DataLoaders that `fit` trains on; a gap for each
statement, method and decorator of a data module that is not on a list, because Lightning calls its methods by their
names.
"""

from __future__ import annotations

import ast
from typing import Any

from lockstep.lab.import_config.call_arguments import positions
from lockstep.lab.import_config.kinds import kind_of, split_of
from lockstep.lab.import_config.lightning_values import classes_of
from lockstep.lab.import_config.quiet_code import QuietCode
from lockstep.lab.import_config.script import Script, code_of
from lockstep.lab.import_config.table import NAMES, RunDraft

_UNKNOWN = "its effect on the rows that are trained on is unknown"
_HOOK = "Lightning calls it by its name, and what it does with the data is not read"
_FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef


def check(loop: Any) -> None:
    """Check all data modules of the script."""
    for kind in classes_of(loop.script, "LightningDataModule"):
        _check(kind, loop)


def _check(kind: ast.ClassDef, loop: Any) -> None:
    draft: RunDraft = loop.draft

    def gap(node: ast.AST, why: str = _UNKNOWN, *by: str) -> None:
        where = f"line {getattr(node, 'lineno', kind.lineno)}:"
        if not any(each.name.startswith(where) for each in draft.gaps):
            draft.unclear(f"{where} {code_of(node)}", why, *by)

    for base in (each for each in kind.bases if "LightningDataModule" not in ast.unparse(each)):
        draft.unclear(f"line {kind.lineno}: {kind.name}({code_of(base)})", "the methods of this base are not read")
    for decorator in kind.decorator_list:
        gap(decorator)
    own = {line.name for line in kind.body if isinstance(line, _FUNCTION)}
    quiet = QuietCode(loop.script, gap, lambda call: _is_read(loop.script, call, own), itself="self")
    for line in kind.body:
        if isinstance(line, ast.FunctionDef):
            _method(kind, line, quiet, gap, draft)
        elif not _is_plain(line):
            gap(line)


def _is_plain(line: ast.stmt) -> bool:
    """Return whether a statement of a class is its text, or sets a constant."""
    value = getattr(line, "value", None)
    if isinstance(line, ast.Assign | ast.AnnAssign):
        inert = value is None or not any(isinstance(n, ast.Lambda | ast.Name | ast.Call) for n in ast.walk(value))
        names = line.targets if isinstance(line, ast.Assign) else [line.target]
        reserved = (*NAMES["lightning_data_methods"], *NAMES["lightning_data_replaces"])
        return inert and all(isinstance(each, ast.Name) and each.id not in reserved for each in names)
    return isinstance(line, ast.Pass) or (isinstance(line, ast.Expr) and isinstance(value, ast.Constant))


def _method(kind: ast.ClassDef, method: ast.FunctionDef, quiet: QuietCode, gap: Any, draft: RunDraft) -> None:
    name = method.name
    if name in NAMES["lightning_data_replaces"] or (name.startswith("__") and name != "__init__"):
        draft.unclear(f"line {method.lineno}: {kind.name}.{name}", _HOOK)
        return
    for each in method.decorator_list:
        if ast.unparse(each) not in ("staticmethod", "property", "classmethod"):
            gap(each)
    own = {line.name for line in kind.body if isinstance(line, _FUNCTION)} | {"trainer", "__dict__", "__class__"}
    for node in (each for each in ast.walk(method) if isinstance(each, ast.Attribute)):
        if ast.unparse(node.value) == "self.trainer" and node.attr not in NAMES["lightning_reads"]:
            gap(node)
        changed = not isinstance(node.ctx, ast.Load) or node.attr.startswith("__")
        if ast.unparse(node.value) == "self" and node.attr in own and changed:
            gap(node)
    for line in method.body:
        _statement(line, quiet, gap)


def _statement(line: Any, quiet: QuietCode, gap: Any) -> None:
    """Check a statement; parts of rows may be set to what is made of the same part: `rows[k] = rows[k].map(...)`."""
    if isinstance(line, ast.If | ast.For | ast.With | ast.Try):
        for head in (getattr(line, "test", None), getattr(line, "iter", None)):
            if head is not None:
                quiet.statement(ast.copy_location(ast.Expr(head), line), frozenset())
        for item in getattr(line, "items", ()):
            quiet.statement(ast.copy_location(ast.Expr(item.context_expr), line), frozenset())
        handlers = (each for handler in getattr(line, "handlers", ()) for each in handler.body)
        for each in (*line.body, *getattr(line, "orelse", ()), *getattr(line, "finalbody", ()), *handlers):
            _statement(each, quiet, gap)
        return
    target = line.targets[0] if isinstance(line, ast.Assign) and len(line.targets) == 1 else None
    if isinstance(target, ast.Subscript) and _first(line.value) == ast.unparse(target):
        quiet.statement(ast.copy_location(ast.Expr(line.value), line), frozenset())
        return
    quiet.statement(line, frozenset())


def _first(node: ast.expr) -> str:
    """Return the code of the rows that a chain of calls of methods begins with."""
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        node = node.func.value
    return ast.unparse(node)


def _is_read(script: Script, call: ast.Call, own: set[str]) -> bool:
    text, origin = ast.unparse(call.func), script.origin_of(call.func)
    name = origin.rpartition(".")[2]
    if text in ("super", "super().__init__", "self.save_hyperparameters"):
        return True
    if text.startswith("self.") and text.count(".") == 1 and name in own:
        return True  # its statements are read where they are
    loads = name in ("from_pretrained", "load_dataset", "DataLoader", "len", "print")
    return loads or kind_of(script, call.func) == "tokenizer" or name in NAMES["collators"]


# -- the loader that is trained on -------------------------------------------------------------------------------------


def train_loaders(script: Script) -> tuple[set[int], str | None]:
    """Return the ids of the DataLoaders that `fit` trains on, and the code of a loader that cannot be resolved."""
    return _loaders(script, "train")


def check_evaluated(loop: Any) -> None:
    """Check that the rows of validation are not those of the split that is trained on."""
    ids, _ = _loaders(loop.script, "val")
    trained, evaluated = (
        {_split(loop.script, call) for call in loop.script.calls if id(call.node) in each}
        for each in (loop.trained_on, ids - loop.trained_on)
    )
    same = (trained & evaluated) - {None}
    if same or ids & loop.trained_on:
        where = "the loader of validation"
        name = f"the split {next(iter(same))!r}" if same else "the loader"
        why = f"it has rows of {name}, which is trained on; a run evaluates on its validation split"
        loop.draft.unclear(where, why, "data.validation", decides="checkpoint.best" in loop.draft.keys)


def _split(script: Script, loader: Any) -> str | None:
    return split_of(script, script.arguments(loader, positions("DataLoader")).nodes.get("dataset"))


def _loaders(script: Script, part: str) -> tuple[set[int], str | None]:
    fits = [c for c in script.calls if c.name == "fit" and c.receiver is not None]
    if not fits:
        return set(), None
    nodes = script.arguments(fits[0], positions("fit")).nodes
    loaders = nodes.get(f"{part}_dataloaders")
    if loaders is None:
        loaders = nodes.get("datamodule")
    if loaders is None and part == "val":  # fit(module, data)
        first = nodes.get("train_dataloaders")
        value = script.bound(first, last=True) if isinstance(first, ast.Name) else first
        name = script.origin_of(value.func) if isinstance(value, ast.Call) else ""
        loaders = value if name in script.classes else None
    if loaders is None or (isinstance(loaders, ast.Constant) and loaders.value is None):
        return _of_methods(script, classes_of(script, "LightningModule"), f"{part}_dataloader")
    return _of(script, loaders, 0, f"{part}_dataloader")


def _of(
    script: Script, node: ast.expr | None, depth: int, method: str = "train_dataloader"
) -> tuple[set[int], str | None]:
    if node is None or depth > 10:
        return set(), ""
    if isinstance(node, ast.Name):
        value = script.bound(node, last=True)
        return _of(script, value, depth + 1, method) if value is not None else (set(), code_of(node))
    if isinstance(node, ast.Subscript):
        value = script.bound(node.value, last=True) if isinstance(node.value, ast.Name) else node.value
        key = script.known(node.slice)
        for part, inner in zip(value.keys, value.values, strict=True) if isinstance(value, ast.Dict) else ():
            if key is not None and script.known(part) == key:
                return _of(script, inner, depth + 1, method)
        if (
            isinstance(value, ast.List | ast.Tuple)
            and isinstance(key, int)
            and -len(value.elts) <= key < len(value.elts)
        ):
            return _of(script, value.elts[key], depth + 1, method)
        return set(), code_of(node)
    if not isinstance(node, ast.Call):
        return set(), code_of(node)
    name = script.origin_of(node.func).rpartition(".")[2]
    if name == "DataLoader":
        return {id(node)}, None
    if name in script.classes:
        return _of_methods(script, [script.classes[name]], method)
    if isinstance(node.func, ast.Attribute) and name.endswith("_dataloader"):
        kinds = [*classes_of(script, "LightningDataModule"), *classes_of(script, "LightningModule")]
        return _of_methods(script, kinds, name)
    function = script.functions.get(name) if isinstance(node.func, ast.Name) else None
    return _returned(script, function, depth) if function is not None else (set(), code_of(node))


def _of_methods(script: Script, kinds: list[ast.ClassDef], name: str) -> tuple[set[int], str | None]:
    for method in (m for kind in kinds for m in kind.body if isinstance(m, ast.FunctionDef) and m.name == name):
        return _returned(script, method, 0)
    return set(), None if not kinds else f"{kinds[0].name}.{name}"


def _returned(script: Script, function: Any, depth: int) -> tuple[set[int], str | None]:
    returns = [each for each in ast.walk(function) if isinstance(each, ast.Return)]
    results = [_of(script, each.value, depth + 1) for each in returns]
    ids = {one for each, _ in results for one in each}
    missing = next((code for _, code in results if code is not None), None)
    return ids, missing if returns else function.name
