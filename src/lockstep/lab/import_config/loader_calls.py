"""DataLoaders of a script: which of them an expression may be, and how they draw.

In: an expression, such as the iterable of the loop that trains. Out: the calls that may have made it; and whether what
a loader is given are rows of a data set, and not another object around them; and gaps for loaders that do not train.
"""

from __future__ import annotations

import ast

from lockstep.lab.import_config.kinds import kind_of, split_of
from lockstep.lab.import_config.library_names import PROGRESS, is_own
from lockstep.lab.import_config.script import Call, Script
from lockstep.lab.import_config.table import NAMES, RunDraft

_OF_VALUES = ("to_pandas", "keys", "values", "items", "unique", "iter", "column_names", "features", "get", "append")


def entry_of(script: Script, node: ast.expr | None) -> ast.expr | None:
    """Return the value of `loaders["train"]`, of a mapping that is written out and never changed; else the node."""
    if not isinstance(node, ast.Subscript):
        return node
    whole = script.bound(node.value) if isinstance(node.value, ast.Name) else node.value
    key = script.known(node.slice)
    if not isinstance(whole, ast.Dict) or not isinstance(key, str):
        return node
    named = [value for each, value in zip(whole.keys, whole.values, strict=True) if script.known(each) == key]
    return named[0] if len(named) == 1 and None not in whole.keys else node


def loaders_of(script: Script, node: ast.expr | None, depth: int = 0) -> dict[int, ast.Call]:
    """Return all DataLoaders that an expression may be, by any of the values that its names have."""
    node = entry_of(script, node)
    if isinstance(node, ast.Name) and depth < 10:
        values = [each for (_, name), of in script.bindings.items() if name == node.id for each in of]
        values += _given_to(script, node.id)
        return {key: one for each in values for key, one in loaders_of(script, each, depth + 1).items()}
    if not isinstance(node, ast.Call):
        return {}
    name = script.origin_of(node.func).rpartition(".")[2]
    if name == "DataLoader":
        return {id(node): node}
    wraps = name in ("enumerate", "prepare", "prepare_data_loader", *PROGRESS)
    return loaders_of(script, node.args[0], depth + 1) if wraps and len(node.args) in (1, 2) else {}


def _given_to(script: Script, name: str) -> list[ast.expr]:
    """Return further values of a name: the argument of Accelerate's `prepare` that it is a result of, and the entries
    of a list that a `for` loop assigns to it."""
    values: list[ast.expr] = []
    for node in ast.walk(script.tree):
        if isinstance(node, ast.For) and isinstance(node.iter, ast.List | ast.Tuple):
            values += node.iter.elts if ast.unparse(node.target) == name else []
        if not isinstance(node, ast.Assign):
            continue
        for target in node.targets:
            value = script.bound(node.value, last=True) if isinstance(node.value, ast.Name) else node.value
            prepared = isinstance(value, ast.Call) and ast.unparse(value.func).endswith(".prepare")
            if prepared and isinstance(target, ast.Tuple):
                pairs = zip(target.elts, value.args, strict=False)  # type: ignore[union-attr]
                values += [of for each, of in pairs if ast.unparse(each) == name != ast.unparse(of)]
    return values


def without_order(call: ast.Call) -> str:
    """Return the code of a loader without the arguments that decide its order."""
    words = [word for word in call.keywords if word.arg not in ("shuffle", "sampler")]
    return ast.unparse(ast.Call(call.func, call.args[:2], words))


def draws_again(sampler: ast.Call) -> bool:
    """Return whether a RandomSampler may repeat or skip examples."""
    return len(sampler.args) > 1 or any(word.arg not in ("data_source", "generator") for word in sampler.keywords)


def is_around_rows(script: Script, node: ast.expr | None, depth: int = 0) -> bool:
    """Return whether a loader is given another object than rows of a data set: one of the script's class, a list, a
    part of the rows. A value that is not found, such as an argument of a function, is taken for rows."""
    if node is None or depth > 20:
        return False
    if isinstance(node, ast.Name):
        return is_around_rows(script, script.bound(node, last=True), depth + 1)
    if isinstance(node, ast.IfExp):
        return any(is_around_rows(script, each, depth + 1) for each in (node.body, node.orelse))
    if isinstance(node, ast.Subscript):
        holder = script.bound(node.value, last=True) if isinstance(node.value, ast.Name) else node.value
        if isinstance(holder, ast.Dict | ast.List | ast.Tuple):
            parts = holder.values if isinstance(holder, ast.Dict) else holder.elts
            return any(is_around_rows(script, each, depth + 1) for each in parts)
        return isinstance(node.slice, ast.Slice) or is_around_rows(script, node.value, depth + 1)
    if not isinstance(node, ast.Call):
        return not isinstance(node, ast.Attribute)
    if kind_of(script, node) != "rows":
        return True
    method = isinstance(node.func, ast.Attribute) and kind_of(script, node.func.value) == "rows"
    return method and (node.func.attr in _OF_VALUES or node.func.attr not in NAMES["rows_methods"])  # type: ignore[attr-defined]


def draws_all(script: Script, sampler: ast.Call, rows: ast.expr | None) -> bool:
    """Return whether a sampler of torch draws from the rows that its loader has, each once in an epoch."""
    name = script.origin_of(sampler.func).rpartition(".")[2]
    if name not in ("RandomSampler", "DistributedSampler") or is_own(script, sampler.func):
        return False
    if name == "RandomSampler" and draws_again(sampler):
        return False
    words = (word.value for word in sampler.keywords if word.arg in ("data_source", "dataset"))
    source = next(iter(sampler.args), next(words, None))
    drawn, read = split_of(script, source), split_of(script, rows)
    if drawn is not None and read is not None:
        return drawn == read
    pair = source, rows
    if any(isinstance(each, ast.Name) and script.bound(each) is None for each in pair):  # an argument of a function
        return True
    values = [script.bound(each) if isinstance(each, ast.Name) else each for each in pair]
    return len({ast.unparse(each) for each in values if each is not None}) == 1


def note_others(script: Script, draft: RunDraft, trained_on: Call | None) -> None:
    """Name the DataLoaders besides the training's whose rows are not plainly a split of the run's data."""
    for call in script.calls:
        if call.name != "DataLoader" or call is trained_on:
            continue
        arguments = script.arguments(call, ("dataset", "batch_size"))
        if is_around_rows(script, arguments.nodes.get("dataset")):
            why = (
                "rows of the script's own, which are not read: a run evaluates on its validation split, or on "
                "evaluate.limit rows of it"
            )
            draft.unclear(str(call), why, "data.validation", "evaluate.limit", decides=False)
