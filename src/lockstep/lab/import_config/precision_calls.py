"""Calls of a loop that set its precision and its accumulation: autocast, GradScaler, Accelerator.

In: such a call and the loop. Out: `precision` and the micro-batches, and a gap where the call does not cover what the
loop does to a batch.
"""

from __future__ import annotations

import ast
from typing import Any

from lockstep.lab.import_config import call_arguments, step_order
from lockstep.lab.import_config.bound_names import root_of
from lockstep.lab.import_config.schedule_calls import assignments
from lockstep.lab.import_config.script import Call, Script, code_of
from lockstep.lab.import_config.table import NAMES, trackers


def precision(loop: Any, call: Call) -> None:
    if call.name == "autocast" and call.receiver is not None and root_of(call.receiver) not in loop.script.imports:
        return  # Accelerate's, of the precision that its Accelerator has
    arguments = loop.script.arguments(call, call_arguments.positions(call.origin))
    loop.unknown_values(call, arguments, dict.fromkeys(("mixed_precision", "dtype", "enabled"), "precision"))
    if call.name == "GradScaler":
        return  # it scales the loss by a power of two, and sets no type
    kind = arguments.known.get("mixed_precision", arguments.known.get("dtype"))
    if call.name == "autocast" and arguments.known.get("enabled", True) is False:
        kind = "no"
    elif call.name == "autocast" and "dtype" not in arguments.nodes and "enabled" not in arguments.unknown:
        kind = "bf16" if arguments.known.get("device_type") == "cpu" else "fp16"
    if kind is not None:
        loop.setting(call, "precision", NAMES["precisions"].get(str(kind), kind))
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
            if turned_off or (name == "kwargs_handlers" and not _are_of_transport(loop.script, node)):
                loop.draft.lacks(f"line {call.line}: {name}={code_of(node)}", "lockstep has no such setting")
        if arguments.known.get("log_with"):
            trackers(loop.draft, "log_with", arguments.known["log_with"])


def contexts(loop: Any, statements: Any) -> None:
    """Check that each mixed-precision context is around the step, and that Accelerate accumulates."""
    _accumulates(loop, statements)
    autocasts = _autocasts(loop)
    around = [block for call, block in statements.contexts if any(call is each.node for each in autocasts)]
    computes = any(id(each) in statements.learned for block in around for each in ast.walk(block))
    if statements.walked and autocasts and not computes and (statements.learned or not around):
        why = "it is not a context around the forward pass of the loop, so its scope is unknown"
        loop.draft.unclear(str(autocasts[0]), why, "precision")
    if loop.draft.keys.get("precision") != "fp16" or not statements.walked:
        return
    accelerator = next((c for c in loop.script.calls if c.name == "Accelerator"), None)
    if accelerator is None and not step_order.scalers(loop.script):
        why = "without an enabled GradScaler small gradients of fp16 become 0; lockstep's fp16 scales the loss"
        loop.draft.unclear(str(autocasts[0]) if autocasts else "fp16", why, "precision")
    for call in (c for c in loop.script.calls if c.name in _CLIPS and accelerator is not None):
        if call.receiver is None or root_of(call.receiver) in loop.script.imports:
            why = "it clips fp16 gradients that are still scaled; accelerator.clip_grad_norm_ unscales them first"
            loop.draft.unclear(str(call), why, "optim.max_grad_norm", "precision")


_CLIPS = ("clip_grad_norm_", "clip_grad_norm", "clip_grad_value_")


def _are_of_transport(script: Script, node: ast.expr) -> bool:
    """Return whether an Accelerator's handlers say only how processes are connected and profiled."""
    value = script.bound(node, last=True) if isinstance(node, ast.Name) else node
    for each in value.elts if isinstance(value, ast.List | ast.Tuple) else [None]:
        one = script.bound(each, last=True) if isinstance(each, ast.Name) else each
        name = script.origin_of(one.func).rpartition(".")[2] if isinstance(one, ast.Call) else ""
        words = {word.arg for word in one.keywords} if isinstance(one, ast.Call) and not one.args else {None}
        quiet = {*call_arguments.LOOPS["DDP"]["quiet"]}
        if name not in ("InitProcessGroupKwargs", "ProfileKwargs") and not (
            name == "DistributedDataParallelKwargs" and words <= quiet
        ):
            return False
    return True


def _in_order(loop: Any) -> None:
    """Check that the results of `prepare` are assigned in the order of its arguments."""
    for node in assignments(loop.script):
        call = node.value
        if not isinstance(call, ast.Call) or loop.script.origin_of(call.func).rpartition(".")[2] != "prepare":
            continue
        names = [ast.unparse(each) for each in call.args]
        for target in (each for each in node.targets if isinstance(each, ast.Tuple)):
            results = [ast.unparse(each) for each in target.elts]
            if any(result != name and result in names for result, name in zip(results, names, strict=False)):
                why = "its results are assigned in another order than that of its arguments, which prepare() keeps"
                loop.draft.unclear(f"line {node.lineno}: {code_of(node)}", why)


def _accumulates(loop: Any, statements: Any) -> None:
    """Check that `accumulate()` is around each batch, and that the optimizer is prepared: else each batch makes a
    step."""
    _in_order(loop)
    if not loop.every_at or loop.accumulated == 1:
        return
    by = ("micro_batches", "batch_size")
    calls = [call for call in loop.script.calls if call.name == "accumulate"]
    if not calls:
        loop.draft.lacks(loop.every_at, "without accumulate() it only divides the loss", *by)
    inside = {id(each) for each in ast.walk(statements.batch_loop)} if statements.walked else set()
    entered = [call for call, block in statements.contexts if id(block) in inside]
    if statements.walked and calls and not (len(calls) == 1 and any(calls[0].node is each for each in entered)):
        loop.draft.lacks(str(calls[-1]), "it is not entered once for each batch", *by)
    prepared = [c.node for c in loop.script.calls if c.name.startswith("prepare")]
    codes = {ast.unparse(each) for node in prepared for each in node.args}
    for call in loop.optimizers[:1]:
        names = {ast.unparse(t) for n in assignments(loop.script) if n.value is call.node for t in n.targets}
        if names and not names & codes and not any(code.startswith("*") for code in codes):
            loop.draft.lacks(str(call), "it is not passed to prepare(), so each batch makes a step", *by)


def _autocasts(loop: Any) -> list[Call]:
    return [call for call in loop.script.calls if call.name == "autocast"]
