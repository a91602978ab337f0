"""Whether the processes of a loop share the rows of its loader.

In: a loop and its DataLoader. Out: if each process would train on all rows, or all on one part, a gap for a run on
several processes, and a note if their number is unknown: an epoch of lockstep has each row once.
"""

from __future__ import annotations

import ast
from typing import Any

from lockstep.lab.import_config import call_arguments
from lockstep.lab.import_config.script import code_of

_PREPARING = ("prepare", "prepare_data_loader")
_CONNECTING = (
    "init_process_group",
    "DistributedDataParallel",
    "DDP",
    "FullyShardedDataParallel",
    "FSDP",
    "fully_shard",
)


def check(loop: Any) -> None:
    """Add the gap or the note."""
    names = {each.name for each in loop.script.calls}
    accelerated = "Accelerator" in names
    if loop.lightning or loop.loader is None or loop.processes == 1 or not (accelerated or names & {*_CONNECTING}):
        return
    arguments = loop.script.arguments(loop.loader, call_arguments.positions("DataLoader"))
    samplers = [each for each in loop.script.calls if each.name == "DistributedSampler"]
    drawn = [each for each in ("sampler", "batch_sampler") if not _is_none(arguments.nodes.get(each))]
    if drawn and not (samplers or accelerated):
        return  # another sampler is refused by itself
    if samplers and drawn:
        known = loop.script.arguments(samplers[0], call_arguments.positions("DistributedSampler")).known
        parts = [name for name in ("num_replicas", "rank") if isinstance(known.get(name), int)]
        if not parts:
            return
        where, why = (
            str(samplers[0]),
            f"every process has the same {' and '.join(parts)}, so all train on the same rows",
        )
    elif accelerated:
        if _is_prepared(loop):
            return
        where, why = str(loop.loader), "it is not passed to prepare(), so each process trains on all rows"
    else:
        where, why = str(loop.loader), "it has no DistributedSampler, so each process trains on all rows"
    if loop.processes is None:
        loop.draft.notes.append(f"{where}: {why}; this run file is that of one process")
        return
    why += "; in lockstep they share the rows of each step: set the script right, or give launch.processes=1"
    loop.draft.lacks(where, why)


def _is_none(node: ast.expr | None) -> bool:
    return node is None or (isinstance(node, ast.Constant) and node.value is None)


def _is_prepared(loop: Any) -> bool:
    """Return whether Accelerate prepares a loader of the loop's name, the loader itself, or values by `*`."""
    tree = loop.script.tree
    calls = [each.node for each in loop.script.calls if each.name in _PREPARING]
    arguments_of_calls = [value for node in calls for value in (*node.args, *(word.value for word in node.keywords))]
    if any(isinstance(each, ast.Starred) or each is loop.loader.node for each in arguments_of_calls):
        return True
    codes = {code_of(each) for each in arguments_of_calls}
    names, before = set[str](), -1
    while before < (before := len(names)):  # through tuples, other names and functions that return it
        for node in (each for each in ast.walk(tree) if isinstance(each, ast.Assign | ast.Return)):
            if node.value is None or not _holds(node.value, loop.loader.node, names):
                continue
            targets = node.targets if isinstance(node, ast.Assign) else []
            names |= {code_of(each) for target in targets for each in getattr(target, "elts", [target])}
            if isinstance(node, ast.Return):
                names.add(getattr(loop.script.scopes.get(id(node)), "name", ""))
    return not names or bool(names & codes)


def _holds(value: ast.expr, loader: ast.Call, names: set[str]) -> bool:
    """Return whether a value is the loader, a name of it, a display of such, or made by a function that returns it."""
    parts = list(getattr(value, "elts", [value]))
    if isinstance(value, ast.Dict):
        parts = value.values
    called = [code_of(each.func) for each in parts if isinstance(each, ast.Call)]
    return any(each is loader or code_of(each) in names for each in parts) or bool(names & {*called})
