"""Finds statements of the user's script that have no effect: a method that is named but not called, a result that
nobody takes, a context manager that is not entered.

In: the files that ran, of the script's folder. Out: [kind, text, place]. Reads source alone, at the end of a run.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

MOST, LARGEST = 24, 1 << 18  # files, bytes of each
# methods that are no property; and those that are a method if their owner has another method, which the script calls
METHODS = ("zero_grad", "backward", "set_epoch", "requires_grad_", "detach_")
OF_OWNERS = {"eval": ("parameters", "state_dict"), "train": ("parameters", "state_dict"), "step": ("zero_grad",)}
CONTEXTS = ("no_grad", "inference_mode", "enable_grad", "autocast", "no_sync")
# methods of tensors that return a new one; with an underscore they would change it
RETURNING = (
    "clamp",
    "clip",
    "mul",
    "div",
    "add",
    "sub",
    "lerp",
    "masked_fill",
    "neg",
    "addcmul",
)


def without_effect() -> list[list[str]]:
    """Return the statements without effect in the script and in modules of its folder."""
    script = Path(sys.argv[0]).absolute() if sys.argv and sys.argv[0].endswith(".py") else None
    if script is None or not script.is_file() or "site-packages" in script.parts:
        return []
    names = [getattr(m, "__file__", None) for m in list(sys.modules.values())]
    inside = [Path(n) for n in names if isinstance(n, str) and n.endswith(".py") and Path(n).parent == script.parent]
    rows = []
    paths = [p for p in dict.fromkeys([script, *inside]) if p.is_file() and p.stat().st_size <= LARGEST][:MOST]
    texts = {p: p.read_text(encoding="utf-8", errors="replace") for p in paths}
    every = "\n".join(texts.values())
    for path, text in texts.items():
        if "# %%" not in text and "# In[" not in text:  # cells of a notebook show values
            try:
                rows += [[kind, ast.unparse(node), f"{path.name}:{node.lineno}"] for kind, node in _of(text, every)]
            except (SyntaxError, ValueError, RecursionError):
                continue
    return rows[:8]


def _of(text: str, every: str) -> Iterator[tuple[str, ast.expr]]:
    tree = ast.parse(text)
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    own = {n.name for n in functions if any("property" in ast.unparse(d) for d in n.decorator_list)}
    unused = [n for n in functions if n in tree.body and len(re.findall(rf"\b{n.name}\b", every)) == 1]
    trials = (ast.Try, ast.With)  # that a name is there may be tried; `no_grad` and others try nothing
    skipped = {id(n) for f in unused for n in ast.walk(f)}
    skipped |= {id(n) for f in ast.walk(tree) if isinstance(f, trials) and _tries(f) for n in f.body}
    for loop in ast.walk(tree):
        parameters, body = _parameters(loop), getattr(loop, "body", None)
        rows = [n for part in (body, getattr(loop, "orelse", None)) if isinstance(part, list) for n in part]
        calls = {ast.unparse(n.value.func) for n in rows if isinstance(n, ast.Expr) and isinstance(n.value, ast.Call)}
        for each in (n for row in rows for n in (ast.walk(row) if parameters else [row])):
            value = each.value if isinstance(each, ast.Expr) and id(each) not in skipped else None
            kind = None if value is None else _kind(value, parameters, text)
            if value is None or kind is None or getattr(value, "attr", "") in own or ast.unparse(value) in calls:
                continue  # calls: it is called beside
            yield kind, value


def _tries(node: ast.Try | ast.With) -> bool:
    if isinstance(node, ast.Try):
        return bool(node.handlers) and len(node.body) == 1
    return any(word in ast.unparse(i.context_expr) for i in node.items for word in ("suppress", "raises"))


def _parameters(loop: ast.AST) -> set[str]:
    return set(_taken(loop.target, loop.iter)) if isinstance(loop, ast.For) else set()


def _taken(target: ast.expr, source: ast.expr) -> Iterator[str]:
    if isinstance(source, ast.Subscript):
        yield from _taken(target, source.value)
    if isinstance(source, ast.ListComp | ast.GeneratorExp) and ast.unparse(source.elt) == ast.unparse(target):
        yield from _taken(target, source.generators[0].iter)
    if not isinstance(source, ast.Call):
        return
    name, parts = ast.unparse(source.func).rpartition(".")[2], getattr(target, "elts", [])
    if name == "zip":
        for part, each in zip(parts, source.args, strict=False):
            yield from _taken(part, each)
    elif name in ("list", "tuple", "reversed", "filter") and source.args:
        yield from _taken(target, source.args[-1])
    elif name == "enumerate" and len(parts) == 2:
        yield from _taken(parts[1], source.args[0])
    elif name == "parameters" and isinstance(target, ast.Name):
        yield target.id
    elif name == "named_parameters" and len(parts) == 2 and isinstance(parts[1], ast.Name):
        yield parts[1].id


def _kind(value: ast.expr, parameters: set[str], text: str) -> str | None:
    if isinstance(value, ast.Attribute):
        calls = [f"{ast.unparse(value.value)}.{other}(" for other in OF_OWNERS.get(value.attr, ())]
        return "method" if value.attr in METHODS or any(call in text for call in calls) else None
    if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Attribute):
        return None
    name, owner = value.func.attr, value.func.value
    if name in CONTEXTS and ast.unparse(owner).split(".")[0] == "torch":
        return "context"
    if isinstance(owner, ast.Attribute) and owner.attr in ("data", "grad"):
        owner = owner.value
    of_layer = isinstance(owner, ast.Attribute) and owner.attr in ("weight", "bias") and owner is not value.func.value
    named = of_layer or (isinstance(owner, ast.Name) and owner.id in parameters)
    out = any(keyword.arg == "out" for keyword in value.keywords)
    return "result" if name in RETURNING and named and not out else None
