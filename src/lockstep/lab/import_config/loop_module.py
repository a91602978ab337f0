"""A loop with a model, dataset or loss of the script's own: `task: {name: module}` with their names.

In: a `Script`, its optimizers and the DataLoader of the training. Out: `task.model`, `task.data` and `task.loss` with
their arguments, as names that other processes can import; FILL-IN and a gap for anything without such a name.
"""

from __future__ import annotations

import ast
from typing import Any

from lockstep.lab.import_config import trained_model
from lockstep.lab.import_config.kinds import casts
from lockstep.lab.import_config.script import Call, Script, code_of
from lockstep.lab.import_config.table import FILL_IN, NAMES, RunDraft

_PAGE = "how-to/own-module on the site"


def name_functions(script: Script, draft: RunDraft, optimizers: list[Call], loader: Call | None) -> None:
    draft.set("task.name", "module", "a custom training loop")
    for key in [key for key in draft.keys if key.startswith("model.")]:
        draft.drop(
            draft.comments.pop(key, key), draft.keys.pop(key), "task.model must create the model as it is trained"
        )
    model, data = _model(script, optimizers), _data(script, loader)
    whys = {"model": "a function that makes the module", "data": "a function that gives the data sets by split"}
    for key, node in (("model", model), ("data", data)):
        constructor = _constructor(script, node)
        if constructor is None:
            code = f" ({code_of(node)})" if node is not None else ""
            _missing(draft, key, f"{whys[key]}{code}")
            continue
        dotted, arguments = constructor
        draft.set(f"task.{key}", dotted, "the script's")
        if arguments:
            draft.set(f"task.{key}_arguments", arguments, "the script's")
        draft.read.append(f"line {getattr(node, 'lineno', 0)}: {code_of(node)} -> task.{key}")  # type: ignore[arg-type]
    if loader is not None:
        _batches(script, draft, loader)
    _changed(script, draft, model)
    trained_model.own_methods(script, draft)
    loss = _loss(script)
    if loss is None:
        _missing(draft, "loss", "a function of (outputs, batch)")
    else:
        draft.set("task.loss", loss, "the script's")
        draft.read.append(f"{loss} -> task.loss")
    if FILL_IN not in (draft.keys.get("task.model"), draft.keys.get("task.data")):
        _importable(script, draft)


def created(script: Script, optimizers: list[Call], loader: Call | None) -> frozenset[int]:
    """Return the ids of the calls that become `task.model` and `task.data`: the run makes them itself."""
    nodes = [_created_by(script, each) for each in (_model(script, optimizers), _data(script, loader))]
    return frozenset(id(each) for each in nodes if each is not None and _constructor(script, each) is not None)


def _created_by(script: Script, node: ast.expr | None, depth: int = 0) -> ast.Call | None:
    """Return the call of a script's function whose result an expression is, also if moved or wrapped:
    `build().to(device)`."""
    if isinstance(node, ast.Name) and depth < 10:
        return _created_by(script, script.bound(node, last=True), depth + 1)
    if not isinstance(node, ast.Call) or (isinstance(node.func, ast.Name) and node.func.id in script.functions):
        return node if isinstance(node, ast.Call) else None
    if isinstance(node.func, ast.Attribute) and node.func.attr in ("to", "cuda", "train"):
        return _created_by(script, node.func.value, depth + 1)
    wraps = script.origin_of(node.func).rpartition(".")[2] in NAMES["wrappers"] and node.args
    return _created_by(script, node.args[0], depth + 1) if wraps else None


def _data(script: Script, loader: Call | None) -> ast.expr | None:
    """Return the data set of the only loader."""
    if loader is None or any(c.name == "DataLoader" and c is not loader for c in script.calls):
        return None
    return script.arguments(loader, ("dataset",)).nodes.get("dataset")


def _batches(script: Script, draft: RunDraft, loader: Call) -> None:
    """Read how the loader makes batches: collate_fn, and a sampler or order of its own."""
    arguments = script.arguments(loader, ("dataset", "batch_size", "shuffle", "sampler"))
    collate, sampler = (
        arguments.nodes.get("collate_fn"),
        arguments.nodes.get("sampler", arguments.nodes.get("batch_sampler")),
    )
    if isinstance(collate, ast.Name) and collate.id in script.functions and script.path.stem.isidentifier():
        draft.set("task.collate", f"{script.path.stem}.{collate.id}", f"collate_fn, line {loader.line}")
    elif collate is not None and not (isinstance(collate, ast.Constant) and collate.value is None):
        draft.unclear(f"line {loader.line}: collate_fn={code_of(collate)}", "task.collate is a name", "task.collate")
    sampler_value = script.bound(sampler, last=True) if isinstance(sampler, ast.Name) else sampler
    inner = sampler_value.body if isinstance(sampler_value, ast.IfExp) else sampler_value
    name = script.origin_of(inner.func).rpartition(".")[2] if isinstance(inner, ast.Call) else None
    if sampler is not None and name not in ("DistributedSampler", "RandomSampler"):
        why = "every example is drawn once per epoch, in an order from the seed"
        draft.lacks(f"line {loader.line}: sampler={code_of(sampler)}", why)


def _changed(script: Script, draft: RunDraft, model: ast.expr | None) -> None:
    """Add a gap for each change to the model after its creation; `task.model` would have to make them."""
    name = ast.unparse(model) if model is not None else "model"
    why = "task.model must return the model as it is trained"
    for call in script.calls:
        receiver = ast.unparse(call.receiver) if call.receiver is not None else ""
        changes = call.name in ("load_state_dict", "requires_grad_", "apply", "half") or casts(script, call.node)
        if changes and receiver.partition(".")[0] == name:
            draft.unclear(str(call), why, "task.model")
    for node in ast.walk(script.tree):
        target = node.targets[0] if isinstance(node, ast.Assign) else None
        if isinstance(target, ast.Attribute) and target.attr == "requires_grad":
            draft.unclear(f"line {target.lineno}: {code_of(node)}", why, "task.model")


def _missing(draft: RunDraft, key: str, what: str) -> None:
    why = f"the script has a custom loop; task.{key} must be {what}: see {_PAGE}"
    draft.unclear(f"task.{key}", why, f"task.{key}")
    if f"task.{key}" not in draft.by_hand:
        draft.set(f"task.{key}", FILL_IN, f"(to be filled in: {what})")


def _model(script: Script, optimizers: list[Call]) -> ast.expr | None:
    """Return the model whose weights the optimizer has: `model` of `model.parameters()`."""
    for call in optimizers:
        node = script.arguments(call, ("params",)).nodes.get("params")
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            return node.func.value
    return None


def _constructor(script: Script, node: ast.expr | None, depth: int = 0) -> tuple[str, dict[str, Any]] | None:
    """Return the script's class or function that creates an object, and its arguments; all must be known."""
    if node is None or depth > 10:
        return None
    if isinstance(node, ast.Name):
        return _constructor(script, script.bound(node, last=True), depth + 1)
    if not isinstance(node, ast.Call):
        return None
    last = script.origin_of(node.func).rpartition(".")[2]
    if last in NAMES["wrappers"] and node.args:
        return _constructor(script, node.args[0], depth + 1)
    if isinstance(node.func, ast.Attribute) and last in ("to", "cuda", "train", "module") and not casts(script, node):
        return _constructor(script, node.func.value, depth + 1)
    if not isinstance(node.func, ast.Name) or not script.path.stem.isidentifier():
        return None
    defined = script.functions.get(node.func.id), script.classes.get(node.func.id)
    top = {id(each) for each in script.tree.body}
    if not any(each is not None and id(each) in top for each in defined):
        return None
    arguments = script.arguments(Call(node, last, last), _names(defined[0] or _init(defined[1])))
    if arguments.unknown or arguments.more or len(arguments.known) < len(node.args) + len(node.keywords):
        return None
    return f"{script.path.stem}.{node.func.id}", arguments.known


def _init(kind: ast.ClassDef | None) -> Any:
    return next(
        (f for f in (kind.body if kind else ()) if isinstance(f, ast.FunctionDef) and f.name == "__init__"), None
    )


def _names(function: Any) -> tuple[str, ...]:
    names = tuple(each.arg for each in function.args.args) if function is not None else ()
    return names[1:] if names[:1] == ("self",) else names


def _loss(script: Script) -> str | None:
    """Return the dotted name of the function of (outputs, targets) that computes the loss."""
    backward = [c for c in script.calls if c.name == "backward"]
    nodes = {ast.unparse(c.receiver if not c.node.args else c.node.args[0]) for c in backward if c.receiver is not None}
    if len(nodes) != 1 or not backward:
        return None
    node: Any = backward[0].node.args[0] if backward[0].node.args else backward[0].receiver
    value = _undivided(script, node)
    if not isinstance(value, ast.Call) or len(value.args) != 2 or value.keywords:
        return None
    outputs = script.bound(value.args[0], last=True) if isinstance(value.args[0], ast.Name) else value.args[0]
    if not isinstance(outputs, ast.Call) or not isinstance(value.args[1], ast.Name):
        return None
    return _function(script, value.func)


def _undivided(script: Script, node: ast.expr | None, depth: int = 0) -> ast.expr | None:
    """Return the loss without the division for gradient accumulation and without fp16's scale."""
    if depth > 10 or node is None:
        return node
    if isinstance(node, ast.Name):
        return _undivided(script, script.bound(node, last=True), depth + 1)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        return _undivided(script, node.left, depth + 1)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "scale" and node.args:
        return _undivided(script, node.args[0], depth + 1)
    return node


def _function(script: Script, node: ast.expr) -> str | None:
    origin = script.origin_of(node)
    if origin.startswith("torch.nn.functional."):
        return origin
    if isinstance(node, ast.Name) and node.id in script.functions:
        return f"{script.path.stem}.{node.id}" if script.path.stem.isidentifier() else None
    value = script.bound(node, last=True) if isinstance(node, ast.Name) else node
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in ("to", "cuda"):
        value = value.func.value
    if isinstance(value, ast.Call) and not value.args and not value.keywords:
        kind = script.origin_of(value.func)
        return kind if kind.startswith("torch.nn.") and kind.endswith("Loss") else None
    return None


def _importable(script: Script, draft: RunDraft) -> None:
    """Add a gap for statements at the top level of the script, which would run in every process that imports it."""
    quiet = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    for node in script.tree.body:
        guard = isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)
        plain = isinstance(node, ast.Assign | ast.AnnAssign) and script.known(node.value, Call) is not Call
        text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if not (isinstance(node, quiet) or guard or plain or text):
            why = "every process imports the file and would run this: put the loop under if __name__ == '__main__'"
            draft.lacks(f"line {node.lineno}: {code_of(node)}", why)
            return
