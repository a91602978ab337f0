"""The functions of a script with a loop of its own that `task: module` can be given: model, data set, loss.

In: a `Script`, its optimizer and its loader. Out: `task.model`, `task.data`, `task.loss` with their arguments; what has
no name of its own is a gap, and FILL-IN stands for it.
"""

from __future__ import annotations

import ast
from typing import Any

from lockstep.tools.import_config.script import Call, Script, shown
from lockstep.tools.import_config.table import FILL_IN, Imported

_WRAPPERS = ("DistributedDataParallel", "DDP", "FullyShardedDataParallel", "FSDP", "compile", "prepare", "DataParallel")
_PAGE = "docs/own-module.md"


def name(script: Script, moved: Imported, optimizers: list[Call], loader: Call | None) -> None:
    moved.set("task.name", "module", "a loop of its own")
    for key in [key for key in moved.keys if key.startswith("model.")]:
        moved.drop(moved.told.pop(key, key), moved.keys.pop(key), "task.model makes the model, as it is trained")
    model = _model(script, optimizers)
    data = script.arguments(loader, ("dataset",)).nodes.get("dataset") if loader is not None else None
    more = [c for c in script.calls if c.name == "DataLoader" and c is not loader]
    whys = {"model": "a function that makes the module", "data": "a function that gives the data sets by split"}
    for key, node in (("model", model), ("data", None if more else data)):
        made = _made(script, node)
        if made is None:
            code = f" ({shown(node)})" if node is not None else ""
            _missing(moved, key, f"{whys[key]}{code}")
            continue
        dotted, given = made
        moved.set(f"task.{key}", dotted, "the script's")
        if given:
            moved.set(f"task.{key}_arguments", given, "the script's")
        moved.read.append(f"line {getattr(node, 'lineno', 0)}: {shown(node)} -> task.{key}")  # type: ignore[arg-type]
    if loader is not None:
        _batches(script, moved, loader)
    _changed(script, moved, model)
    loss = _loss(script)
    if loss is None:
        _missing(moved, "loss", "a function of (outputs, batch)")
    else:
        moved.set("task.loss", loss, "the script's")
        moved.read.append(f"{loss} -> task.loss")
    if FILL_IN not in (moved.keys.get("task.model"), moved.keys.get("task.data")):
        _importable(script, moved)


def _batches(script: Script, moved: Imported, loader: Call) -> None:
    """How the loader makes batches: by a function of the script's, in an order of its own."""
    given = script.arguments(loader, ("dataset", "batch_size", "shuffle", "sampler"))
    collate, sampler = given.nodes.get("collate_fn"), given.nodes.get("sampler", given.nodes.get("batch_sampler"))
    if isinstance(collate, ast.Name) and collate.id in script.functions and script.path.stem.isidentifier():
        moved.set("task.collate", f"{script.path.stem}.{collate.id}", f"collate_fn, line {loader.line}")
    elif collate is not None and not (isinstance(collate, ast.Constant) and collate.value is None):
        moved.unclear(
            f"line {loader.line}: collate_fn={shown(collate)}", "task.collate is a name", by=("task.collate",)
        )
    made = script.bound(sampler, last=True) if isinstance(sampler, ast.Name) else sampler
    inner = made.body if isinstance(made, ast.IfExp) else made
    name = script.origin_of(inner.func).rpartition(".")[2] if isinstance(inner, ast.Call) else None
    if sampler is not None and name not in ("DistributedSampler", "RandomSampler"):
        why = "every example is drawn once an epoch, in an order of the seed"
        moved.drop(f"line {loader.line}: sampler={shown(sampler)}", None, why, True)


def _changed(script: Script, moved: Imported, model: ast.expr | None) -> None:
    """What is done to the model after it was made, which `task.model` would have to do."""
    name = ast.unparse(model) if model is not None else "model"
    why = "task.model is to give the model as it is trained"
    for call in script.calls:
        receiver = ast.unparse(call.receiver) if call.receiver is not None else ""
        if call.name in ("load_state_dict", "requires_grad_", "apply", "half") and receiver.partition(".")[0] == name:
            moved.unclear(str(call), why, by=("task.model",))
    for node in ast.walk(script.tree):
        target = node.targets[0] if isinstance(node, ast.Assign) else None
        if isinstance(target, ast.Attribute) and target.attr == "requires_grad":
            moved.unclear(f"line {target.lineno}: {shown(node)}", why, by=("task.model",))


def _missing(moved: Imported, key: str, what: str) -> None:
    why = f"this is a loop of its own, and task.{key} is {what}: write one, see {_PAGE}"
    moved.unclear(f"task.{key}", why, by=(f"task.{key}",))
    if f"task.{key}" not in moved.by_hand:
        moved.set(f"task.{key}", FILL_IN, f"(to be filled in: {what})")


def _model(script: Script, optimizers: list[Call]) -> ast.expr | None:
    """What the optimizer's weights are of: `model` of `model.parameters()`."""
    for call in optimizers:
        node = script.arguments(call, ("params",)).nodes.get("params")
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            return node.func.value
    return None


def _made(script: Script, node: ast.expr | None, depth: int = 0) -> tuple[str, dict[str, Any]] | None:
    """The script's own class or function whose call makes something, and its arguments, all of them known."""
    if node is None or depth > 10:
        return None
    if isinstance(node, ast.Name):
        return _made(script, script.bound(node, last=True), depth + 1)
    if not isinstance(node, ast.Call):
        return None
    last = script.origin_of(node.func).rpartition(".")[2]
    if last in _WRAPPERS and node.args:
        return _made(script, node.args[0], depth + 1)
    if isinstance(node.func, ast.Attribute) and last in ("to", "cuda", "train", "module"):
        return _made(script, node.func.value, depth + 1)
    if not isinstance(node.func, ast.Name) or not script.path.stem.isidentifier():
        return None
    own = script.functions.get(node.func.id), script.classes.get(node.func.id)
    top = {id(each) for each in script.tree.body}
    if not any(each is not None and id(each) in top for each in own):
        return None
    given = script.arguments(Call(node, last, last), _names(own[0] or _init(own[1])))
    if given.unknown or given.more or len(given.known) < len(node.args) + len(node.keywords):
        return None
    return f"{script.path.stem}.{node.func.id}", given.known


def _init(kind: ast.ClassDef | None) -> Any:
    return next(
        (f for f in (kind.body if kind else ()) if isinstance(f, ast.FunctionDef) and f.name == "__init__"), None
    )


def _names(function: Any) -> tuple[str, ...]:
    names = tuple(each.arg for each in function.args.args) if function is not None else ()
    return names[1:] if names[:1] == ("self",) else names


def _loss(script: Script) -> str | None:
    """The function of (outputs, targets) whose value goes backward, by its dotted name."""
    backward = [c for c in script.calls if c.name == "backward"]
    nodes = {ast.unparse(c.receiver if not c.node.args else c.node.args[0]) for c in backward if c.receiver is not None}
    if len(nodes) != 1 or not backward:
        return None
    node: Any = backward[0].node.args[0] if backward[0].node.args else backward[0].receiver
    value = script.bound(node, last=True) if isinstance(node, ast.Name) else node
    if not isinstance(value, ast.Call) or len(value.args) != 2 or value.keywords:
        return None
    outputs = script.bound(value.args[0], last=True) if isinstance(value.args[0], ast.Name) else value.args[0]
    if not isinstance(outputs, ast.Call) or not isinstance(value.args[1], ast.Name):
        return None
    return _function(script, value.func)


def _function(script: Script, node: ast.expr) -> str | None:
    origin = script.origin_of(node)
    if origin.startswith("torch.nn.functional."):
        return origin
    if isinstance(node, ast.Name) and node.id in script.functions:
        return f"{script.path.stem}.{node.id}" if script.path.stem.isidentifier() else None
    made = script.bound(node, last=True) if isinstance(node, ast.Name) else node
    if isinstance(made, ast.Call) and isinstance(made.func, ast.Attribute) and made.func.attr in ("to", "cuda"):
        made = made.func.value
    if isinstance(made, ast.Call) and not made.args and not made.keywords:
        kind = script.origin_of(made.func)
        return kind if kind.startswith("torch.nn.") and kind.endswith("Loss") else None
    return None


def _importable(script: Script, moved: Imported) -> None:
    """Every process imports the file: what stands at its top, outside functions, would run there."""
    quiet = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    for node in script.tree.body:
        guard = isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)
        plain = isinstance(node, ast.Assign | ast.AnnAssign) and script.known(node.value, Call) is not Call
        text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if not (isinstance(node, quiet) or guard or plain or text):
            why = "every process imports the file, and would run this: put the loop below if __name__ == '__main__'"
            moved.drop(f"line {node.lineno}: {shown(node)}", None, why, True)
            return
