"""The order and place of a loop's calls in a step: backward, unscale, clip, step, update, schedule, zero_grad.

In: `Statements` after its walk over the loop. Out: a gap for each order that makes another step, and a note where every
epoch has the same order of examples.
"""

from __future__ import annotations

import ast
from typing import Any

from lockstep.lab.import_config import call_arguments
from lockstep.lab.import_config.bound_names import names_in, root_of
from lockstep.lab.import_config.script import Call, Script, Unknown, code_of
from lockstep.lab.import_config.table import NAMES
from lockstep_trace.coded import quantity

_AGAIN = "init understands one such call in a step: move it out of the loop, or write the rest with --partial"
_ROWS = {
    "zero": "optimizer.zero_grad",
    "step": "optimizer.step",
    "scaled step": "scaler.step",
    "scheduler": "scheduler.step",
    "update": "scaler.update",
    "unscale": "scaler.unscale_",
}


def scalers(script: Script) -> set[str]:
    """Return the names of the GradScalers of a script that scale, as far as is known."""
    names: set[str] = set()
    for call in (each for each in script.calls if each.name == "GradScaler"):
        arguments = script.arguments(call, call_arguments.positions(call.origin))
        if arguments.known.get("enabled", True) is not False:
            names |= {"scaler", *bound_to(script, call.node)}
    return names


def bound_to(script: Script, node: ast.AST) -> set[str]:
    """Return the code of the targets that a value is assigned to."""
    lines = (each for each in ast.walk(script.tree) if isinstance(each, ast.Assign) and each.value is node)
    return {ast.unparse(target) for each in lines for target in each.targets}


def kind_of_call(script: Script, call: ast.Call, own: bool) -> str | None:
    """Return the role of a call in the step. `own`: whether the script itself defines the function."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else ast.unparse(call.func)
    kinds = {"backward": "backward", "zero_grad": "zero", "unscale_": "unscale", "clip_grad_norm_": "clip"}
    kinds |= {"clip_grad_norm": "clip", "clip_grad_value_": "clip", "update": "update"}
    holder = ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""
    of_scaler = "scaler" in holder.lower() or holder in scalers(script)
    if (name == "update" and not of_scaler) or own:
        return None
    if name == "step" and holder:
        if of_scaler:
            return "scaled step"
        return "scheduler" if "sched" in holder.lower() or _is_schedule(script, call.func) else "step"
    return kinds.get(name)


def _is_schedule(script: Script, function: Any) -> bool:
    """Return whether a method is one of a schedule, whatever its name is."""
    holder = function.value
    value = script.bound(holder, last=True) if isinstance(holder, ast.Name) else None
    name = script.origin_of(value.func) if isinstance(value, ast.Call) else ""
    return "lr_scheduler" in name or ("schedule" in name and "get_" in name)


def check_arguments(at: Any, call: ast.Call, kind: str) -> None:
    """Check the arguments of a call of the step."""
    if kind in ("step", "zero") and isinstance(call.func, ast.Attribute):
        at.holders[kind] = ast.unparse(call.func.value)
    elif kind in ("scaled step", "unscale") and len(call.args) == 1:
        at.holders[kind] = ast.unparse(call.args[0])
    if kind in _ROWS:
        origin = at.script.origin_of(call.func)
        of_step = Call(call, origin.rpartition(".")[2], origin)
        call_arguments.check(at.script, at.draft, of_step, call_arguments.LOOPS[_ROWS[kind]])


def check(at: Any) -> None:
    """Check the order of the events that a walk has found."""
    if any(c.origin == "deepspeed.initialize" for c in at.script.calls):
        return  # refused by its line: its engine clips, clears and counts as its configuration says
    events = [("step" if kind == "scaled step" else kind, line, depth) for kind, line, depth in at.events]
    kinds = [kind for kind, _, _ in events]
    accelerate = any(c.name == "accumulate" for c in at.script.calls)
    for kind in ("backward", "step", "scheduler", "zero", "clip", "unscale", "update"):
        if kinds.count(kind) > 1:
            line = [line for each, line, _ in events if each == kind][1]
            at.draft.unclear(f"line {line}: a second {kind} in the loop", _AGAIN)
    if "step" not in kinds or "backward" not in kinds:
        why = "no optimizer.step() after backward() is seen in this loop"
        at.report(at.batch_loop.iter, why, "micro_batches")
        return
    depth = {kind: level for kind, _, level in events}
    if "zero" not in kinds:
        at.report(at.batch_loop.iter, "no zero_grad() is in this loop: gradients accumulate over all steps")
        return
    lines = {kind: line for kind, line, _ in events}
    back, step, zero = (kinds.index(kind) for kind in ("backward", "step", "zero"))
    where = f"line {lines['step']}: step()"
    if not (back < step and not back < zero < step):
        at.draft.unclear(where, "by the order of calls, its gradients are not those of this batch")
    if "clip" in kinds:
        _check_clip(at, kinds, lines, depth, accelerate)
    if depth["zero"] != depth["step"] and not accelerate:
        at.draft.unclear(f"line {lines['zero']}: zero_grad()", "gradients are not cleared once per step")
    if "scheduler" in kinds and kinds.index("scheduler") < step:
        why = "the schedule advances before the optimizer's step: each update has the rate of the next one"
        at.draft.unclear(f"line {lines['scheduler']}: step() of the schedule", why, "optim.schedule")
    elif "scheduler" in kinds and depth["scheduler"] != depth["step"] and not accelerate:
        at.draft.unclear(where, "the schedule advances at another time", "optim.schedule")
    _check_scaler(at, kinds, lines, depth)
    _check_holders(at, lines)
    if at.loss_is_known and at.every_is_known:
        _check_divisor(at, lines["step"])


def _check_holders(at: Any, lines: dict[str, int]) -> None:
    """Check that all calls of a step are of one optimizer, and that Accelerate runs backward() if it divides or scales
    the loss."""
    models = {name for name in at.holders.values() if name in at.models()}
    if len({*at.holders.values()} - models) > 1:
        names = " and ".join(sorted({*at.holders.values()} - models))
        at.draft.unclear(f"line {lines['step']}: step()", f"the calls of one step belong to {names}")
    accelerator = next((c for c in at.script.calls if c.name == "Accelerator"), None)
    if accelerator is None or at.by_accelerator:
        return
    precise = at.script.arguments(accelerator).known.get("mixed_precision", "no") in ("no", "bf16", None)
    if at.accumulates or not precise:
        why = "only accelerator.backward(loss) divides the loss by the batches of a step, and scales it in fp16"
        at.draft.unclear(f"line {lines['backward']}: backward()", why, "micro_batches")


def _check_clip(at: Any, kinds: list[str], lines: dict[str, int], depth: dict[str, int], accelerate: bool) -> None:
    """Check that gradients are clipped once per step, after the last backward() and before the optimizer's step."""
    if not kinds.index("backward") < kinds.index("clip") < kinds.index("step"):
        why = "gradients are not clipped directly before it"
        at.draft.unclear(f"line {lines['step']}: step()", why, "optim.max_grad_norm")
    where = f"line {lines['clip']}: clipping"
    if accelerate and depth["clip"] == 0 and at.accumulates:
        why = "without `if accelerator.sync_gradients:` each batch's part of the gradients is clipped"
        at.draft.unclear(where, f"{why}; lockstep clips their sum", "optim.max_grad_norm")
    elif not accelerate and depth["clip"] != depth["step"]:
        why = "it has another condition than step(), so parts of the gradients are clipped, not their sum"
        at.draft.unclear(where, why, "optim.max_grad_norm")


def _check_scaler(at: Any, kinds: list[str], lines: dict[str, int], depth: dict[str, int]) -> None:
    """Check that a GradScaler scales the loss, unscales the gradients before they are clipped, and makes the step."""
    if not scalers(at.script):
        return
    step = f"line {lines['step']}: step()"
    if not at.scaled:
        where = f"line {lines['backward']}: backward()"
        at.draft.unclear(where, "GradScaler does not scale this loss; use scaler.scale(loss).backward()", "precision")
    if "scaled step" not in [kind for kind, _, _ in at.events]:
        why = "it uses scaled gradients, and skips no step that overflowed; use scaler.step(optimizer)"
        at.draft.unclear(step, why, "precision")
    if "clip" in kinds and "unscale" not in kinds:
        at.draft.unclear(step, "gradients are clipped before they are unscaled")
    if "unscale" in kinds:
        place = kinds.index("unscale")
        after = kinds.index("clip") if "clip" in kinds else kinds.index("step")
        if not kinds.index("backward") < place < after or depth["unscale"] != depth["step"]:
            where = f"line {lines['unscale']}: unscale_()"
            at.draft.unclear(where, "gradients are unscaled once in a step, before they are clipped")
    if "update" not in kinds:
        at.draft.unclear(step, "no update() of its GradScaler follows")
    elif kinds.index("update") < kinds.index("step") or depth["update"] != depth["step"]:
        at.draft.unclear(f"line {lines['update']}: update()", "it is not called once after each step()")


def _check_divisor(at: Any, line: int) -> None:
    every = at.accumulated or 1
    if at.divisor is None and every > 1:
        why = f"the loss is not divided by {every}, so that gradients of {every} batches are added, not averaged"
        at.draft.unclear(f"line {line}: step()", why, "optim.learning_rate")
    elif at.divisor is not None and at.divisor != every:
        name = at.divisor if at.divisor is not Unknown else "an unknown number"
        why = f"the loss is divided by {name}, and a step has {quantity(every, 'batch')}"
        at.draft.unclear(f"line {line}: step()", why, "optim.learning_rate")


def note_seeds(at: Any) -> None:
    """Note the seeds that a script sets from the number of an epoch."""
    for call in (c for c in ast.walk(at.epoch_loop) if isinstance(c, ast.Call)) if at.epoch_loop is not None else ():
        seeds = at.script.origin_of(call.func).rpartition(".")[2] in NAMES["seeds"]
        where = f"line {call.lineno}: {code_of(call)}"
        if seeds and not any(gap.name == where for gap in at.draft.gaps):
            at.draft.notes.append(f"{where}: in lockstep the order and dropout of each epoch follow from seed")


def note_epochs(at: Any, loader: Call | None) -> None:
    """Note a DistributedSampler without `set_epoch(epoch)`: every epoch of the script has the same order."""
    if at.epoch_loop is None or loader is None or not at.walked:
        return
    node = at.script.arguments(loader, call_arguments.positions("DataLoader")).nodes.get("sampler")
    samplers = [c for c in at.script.calls if c.name == "DistributedSampler"]
    if node is None or not samplers:
        return
    value = at.script.bound(node, last=True) if isinstance(node, ast.Name) else node
    counted = names_in(at.epoch_loop.target)
    names = {root_of(node), *(each.partition(".")[0] for each in bound_to(at.script, loader.node))}
    for call in (c for c in ast.walk(at.epoch_loop) if isinstance(c, ast.Call)):
        if not isinstance(call.func, ast.Attribute) or call.func.attr != "set_epoch":
            continue
        argument = next(iter(call.args), next((word.value for word in call.keywords), None))
        root = root_of(call.func.value)
        holder = next(each for each in ast.walk(call.func) if isinstance(each, ast.Name) and each.id == root)
        handed = (id(at.script.scopes.get(id(holder))), root) in at.script.bindings and at.script.bound(holder) is None
        mine = root in names or (handed and not any(part in root for part in ("val", "test", "dev", "eval")))
        if argument is not None and names_in(argument) & counted and mine:
            return
    where = f"line {getattr(value, 'lineno', loader.line)}: {code_of(value or node)}"
    why = "its set_epoch(epoch) is never called, so every epoch has the same order; in lockstep each has its own"
    at.draft.notes.append(f"{where}: {why}")
