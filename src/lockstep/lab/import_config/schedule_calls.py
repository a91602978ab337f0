"""Arguments of calls that make a schedule, by the names and the count of transformers' schedules.

In: a call of torch's CosineAnnealingLR, or of a schedule that Accelerate prepares. Out: its arguments.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from lockstep.lab.import_config.script import Arguments, Call, Script, code_of

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
    """Count the steps of a schedule as updates: one that Accelerate prepares advances once per process in each, which
    scripts make up for by `* accelerator.num_processes`. Returns a warm-up that is no whole number of updates."""
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
