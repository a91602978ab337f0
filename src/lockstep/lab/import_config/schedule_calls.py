"""Calls of a loop that make a schedule.

In: a call of one of transformers' schedules, or of torch's CosineAnnealingLR, and the loop. Out: keys of the run file,
and a gap for each argument that a run cannot have, and for a schedule that is advanced at another time than a step.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from lockstep.lab.import_config import loading
from lockstep.lab.import_config.epoch_ends import whole_warmup
from lockstep.lab.import_config.script import Arguments, Call, Script, code_of
from lockstep.lab.import_config.table import NAMES, number, schedule_ends

COSINE = "CosineAnnealingLR"


def of_cosine(script: Script, call: Call) -> Arguments:
    """Return the arguments of torch's CosineAnnealingLR by the names of transformers' schedules."""
    arguments = script.arguments(call, ("optimizer", "T_max", "eta_min", "last_epoch"))
    parts: tuple[dict[str, Any], ...] = (arguments.known, arguments.nodes, arguments.unknown)
    for part in parts:
        for theirs, ours in (("T_max", "num_training_steps"), ("eta_min", "lr_end")):
            if theirs in part:
                part[ours] = part.pop(theirs)
    if "num_training_steps" not in arguments.nodes:
        arguments.more.append("without T_max")
    return arguments


def per_process(
    script: Script, arguments: Arguments, nodes: Mapping[str, ast.expr | None], processes: int
) -> int | None:
    """Convert the steps of a prepared schedule to updates. Accelerate advances it by the number of processes in each
    update, so scripts multiply its steps by `accelerator.num_processes`. Returns a warm-up that is no whole number of
    updates, else None."""
    for name, node in nodes.items():
        sides = (node.left, node.right) if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult) else ()
        steps = [each for each in sides if not ast.unparse(each).endswith(".num_processes")]
        if sides and len(steps) == 1:
            arguments.nodes[name] = steps[0]
            value = script.known(steps[0])
            part: dict[str, Any] = arguments.unknown if value is None else arguments.known
            arguments.unknown.pop(name, None)
            part[name] = code_of(steps[0]) if value is None else value
        elif name == "num_warmup_steps" and (known := arguments.known.get(name)) and processes > 1:
            arguments.known[name] = int(known) // processes
            if known % processes:
                return int(known)
    return None


def schedule(loop: Any, call: Call) -> None:
    loop.scheduled = True
    accelerated = bool(loop.every_at) and not loop.lightning
    prepared = accelerated and _prepared(loop, call)
    if accelerated and not prepared and loop.accumulated > 1:
        why = "it is not prepared, so it advances with every batch of every process; in lockstep with every step"
        loop.draft.lacks(str(call), why, "optim.schedule")
        return
    if not loop.lightning and not _stepped(loop, call):
        why = "its step() is never called, so the rate stays at its first value"
        loop.draft.lacks(str(call), why, "optim.schedule")
        return
    names = ("optimizer", "num_warmup_steps", "num_training_steps")
    arguments = loop.script.arguments(call, ("name", *names) if call.name == "get_scheduler" else names)
    name = arguments.known.get("name") or call.name.removeprefix("get_").partition("_schedule")[0]
    if call.name == COSINE:
        name, arguments = "cosine", of_cosine(loop.script, call)
    name = {"polynomial_decay": "polynomial"}.get(name, name)
    if "constant" in call.name and "warmup" in call.name:
        name = "constant_with_warmup"
    if name not in NAMES["schedules"]:
        loop.draft.lacks(str(call), "optim.schedule has no such schedule", "optim.schedule")
        return
    loop.draft.set("optim.schedule", NAMES["schedules"][name], f"line {call.line}")
    if accelerated:
        of_batches = arguments.nodes.get("num_training_steps")
        _of_processes(loop, call, arguments, prepared)
        loop.schedule_advances = prepared, arguments.nodes.get("num_training_steps") is not of_batches
    if name not in ("constant", "constant_with_warmup", "inverse_sqrt"):
        loop.schedule_end = f"line {call.line}: {call.name}", arguments.nodes.get("num_training_steps")
    if (steps := arguments.known.get("num_warmup_steps")) and name != "constant":
        loop.draft.set("optim.warmup_steps", int(steps), f"num_warmup_steps, line {call.line}")
    share = _share(loop, arguments.nodes.get("num_warmup_steps"), arguments.nodes.get("num_training_steps"))
    if name != "constant" and "num_warmup_steps" in arguments.unknown and share is not None:
        loop.draft.set("optim.warmup_fraction", share, f"num_warmup_steps, line {call.line}")
        if (node := _assigned(loop, arguments.nodes["num_warmup_steps"])) and "ceil" not in code_of(node):
            nearest = "round(" in code_of(node)
            loop.draft.at_end.append(lambda draft: whole_warmup(draft, share, nearest, call.line))
    elif name != "constant" and "num_warmup_steps" in arguments.unknown:
        code = f"line {call.line}: {call.name}(num_warmup_steps={arguments.unknown['num_warmup_steps']})"
        loop.draft.unclear(code, loading.RUNS, "optim.warmup_steps", "optim.warmup_fraction")
    if "last_epoch" in arguments.nodes and arguments.known.get("last_epoch") != -1:
        why = "the schedule begins at another step than the first"
        where = f"line {call.line}: last_epoch={code_of(arguments.nodes['last_epoch'])}"
        loop.draft.lacks(where, why, "optim.schedule")
    ends = {k: v for k, v in arguments.known.items() if k not in ("name", *names, "last_epoch")}
    ends |= ends.pop("scheduler_specific_kwargs", None) or {}
    rate = number(loop.draft.keys.get("optim.learning_rate")) or 5e-5
    schedule_ends(loop.draft, name, ends, rate, f"{call.name}, line {call.line}")
    others = dict.fromkeys(arguments.unknown.keys() - {"name", *names, "last_epoch"}, "optim.schedule")
    loop.unknown_values(call, arguments, others)
    loop.read(call, "optim.schedule")


def _of_processes(loop: Any, call: Call, arguments: Arguments, prepared: bool) -> None:
    processes = (loop.processes or 1) if prepared else 1
    nodes = {name: _assigned(loop, arguments.nodes.get(name)) for name in ("num_warmup_steps", "num_training_steps")}
    if rest := per_process(loop.script, arguments, nodes, processes):
        why = f"the schedule advances {processes} times in a step, once for each process"
        loop.draft.lacks(f"line {call.line}: num_warmup_steps={rest}", why, "optim.warmup_steps")


def _share(loop: Any, warmup: ast.expr | None, total: ast.expr | None) -> float | None:
    """Return the share of `int(0.1 * total)`, if `total` is the schedule's length."""
    node = _assigned(loop, warmup)
    while isinstance(node, ast.Call) and ast.unparse(node.func) in ("int", "round", "math.ceil") and node.args:
        node = _assigned(loop, node.args[0])
    if not isinstance(node, ast.BinOp) or total is None:
        return None
    names = {ast.unparse(total), ast.unparse(_assigned(loop, total) or total)}
    for of, by in ((node.left, node.right), (node.right, node.left)):
        same = {ast.unparse(of), ast.unparse(_assigned(loop, of) or of)} & names
        value = number(loop.script.known(by))
        if not same or not value:
            continue
        if isinstance(node.op, ast.Mult):
            share = value
        elif isinstance(node.op, ast.Div | ast.FloorDiv) and of is node.left:
            share = 1 / value
        else:
            return None
        return share if 0 < share < 1 else None
    return None


def _assigned(loop: Any, node: ast.expr | None) -> ast.expr | None:
    return loop.script.bound(node) if isinstance(node, ast.Name) else node


def _prepared(loop: Any, call: Call) -> bool:
    """Return whether Accelerate steps this scheduler."""
    names = {ast.unparse(t) for each in assignments(loop.script) if each.value is call.node for t in each.targets}
    prepared = [c.node for c in loop.script.calls if c.name in ("prepare", "prepare_scheduler")]
    return not names or any(ast.unparse(each) in names for node in prepared for each in node.args)


def _stepped(loop: Any, call: Call) -> bool:
    """Return whether this scheduler is stepped anywhere, by its name or an alias, or passed on."""
    names = {ast.unparse(t) for each in assignments(loop.script) if each.value is call.node for t in each.targets}
    receivers = [
        ast.unparse(node.func.value)
        for node in ast.walk(loop.script.tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "step"
    ]
    return not names or any(each in names or "sched" in each.lower() for each in receivers)


def assignments(script: Script) -> list[ast.Assign]:
    return [node for node in ast.walk(script.tree) if isinstance(node, ast.Assign)]
