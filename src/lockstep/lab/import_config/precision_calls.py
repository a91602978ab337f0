"""Calls of a loop that set its precision and its accumulation: autocast, GradScaler, Accelerator.

In: such a call and the loop. Out: `precision` and the micro-batches, and a gap where the call does not hold for what
the loop does to a batch.
"""

from __future__ import annotations

import ast
from typing import Any

from lockstep.lab.import_config.bound_names import root_of
from lockstep.lab.import_config.schedule_calls import assignments
from lockstep.lab.import_config.script import Call, code_of
from lockstep.lab.import_config.table import NAMES, trackers


def precision(loop: Any, call: Call) -> None:
    if call.name == "autocast" and call.receiver is not None and root_of(call.receiver) not in loop.script.imports:
        return  # Accelerate's, of the precision that its Accelerator has
    arguments = loop.script.arguments(call, ("device_type", "dtype") if call.name == "autocast" else ())
    kind = arguments.known.get("mixed_precision", arguments.known.get("dtype"))
    if call.name == "GradScaler" and any("dtype" in loop.script.arguments(c).nodes for c in _autocasts(loop)):
        return  # it scales the loss by a power of two, and sets no type
    if call.name == "autocast" and arguments.known.get("enabled", True) is False:
        kind = "no"
    elif call.name == "GradScaler" or (call.name == "autocast" and "dtype" not in arguments.nodes):
        kind = "fp16" if arguments.known.get("enabled", True) else "no"
        if "enabled" in arguments.unknown:
            kind = None
    if kind is not None:
        loop.setting(call, "precision", NAMES["precisions"].get(str(kind), kind))
    loop.unknown_values(call, arguments, dict.fromkeys(("mixed_precision", "dtype", "enabled"), "precision"))
    if call.name == "Accelerator":
        loop.accumulated = int(arguments.known.get("gradient_accumulation_steps", 1))
        loop.every_at = f"line {call.line}: {call.name}(gradient_accumulation_steps={loop.accumulated})"
        loop.unknown_values(call, arguments, {"gradient_accumulation_steps": "micro_batches"})
        for name in ("split_batches", "gradient_accumulation_plugin", "dataloader_config"):
            if name in arguments.nodes and arguments.known.get(name, True):
                where = f"line {call.line}: {name}={code_of(arguments.nodes[name])}"
                why = "batch_size is a whole step's, micro_batches the number of its parts"
                loop.draft.lacks(where, why, "batch_size", "micro_batches")
        for name, node in arguments.nodes.items():
            turned_off = name in ("step_scheduler_with_optimizer", "even_batches") and not arguments.known.get(name)
            if turned_off or name not in NAMES["accelerator_arguments"]:
                loop.draft.lacks(f"line {call.line}: {name}={code_of(node)}", "lockstep has no such setting")
        if arguments.known.get("log_with"):
            trackers(loop.draft, "log_with", arguments.known["log_with"])


def _autocasts(loop: Any) -> list[Call]:
    return [call for call in loop.script.calls if call.name == "autocast"]


def contexts(loop: Any, statements: Any) -> None:
    """Check that each mixed-precision context is around the step, and that Accelerate accumulates."""
    _accumulates(loop)
    around = {id(each) for each in statements.contexts}
    autocasts = _autocasts(loop)
    if statements.walked and autocasts and not any(id(call.node) in around for call in autocasts):
        why = "it is not a context around what the loop does to a batch, so its scope is unknown"
        loop.draft.unclear(str(autocasts[0]), why, "precision")


def _accumulates(loop: Any) -> None:
    """Check that `accumulate()` is there, and that the optimizer is prepared: else each batch makes a step."""
    if not loop.every_at or loop.accumulated == 1:
        return
    by = ("micro_batches", "batch_size")
    if not any(call.name == "accumulate" for call in loop.script.calls):
        loop.draft.lacks(loop.every_at, "without accumulate() it only divides the loss", *by)
    prepared = [c.node for c in loop.script.calls if c.name.startswith("prepare")]
    codes = {ast.unparse(each) for node in prepared for each in node.args}
    for call in loop.optimizers[:1]:
        names = {ast.unparse(t) for n in assignments(loop.script) if n.value is call.node for t in n.targets}
        if names and not names & codes and not any(code.startswith("*") for code in codes):
            loop.draft.lacks(str(call), "prepare() does not have it: each batch makes a step", *by)
