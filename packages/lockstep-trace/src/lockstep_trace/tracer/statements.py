"""Finds statements of the user's script that have no effect: a method that is named but not called, a result that
nobody takes, a context manager that is not entered.

In: the files that ran, of the script's folder. Out: [kind, text, place]. Reads source alone, at the end of a run.
"""

from __future__ import annotations

import ast
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
    "detach",
    "to",
    "abs",
)


def without_effect() -> list[list[str]]:
    """Return the statements without effect in the script and in modules of its folder."""
    script = Path(sys.argv[0]).absolute() if sys.argv and sys.argv[0].endswith(".py") else None
    if script is None or not script.is_file():
        return []
    names = [getattr(m, "__file__", None) for m in list(sys.modules.values())]
    inside = [Path(n) for n in names if isinstance(n, str) and n.endswith(".py") and Path(n).parent == script.parent]
    rows = []
    for path in list(dict.fromkeys([script, *inside]))[:MOST]:
        if path.is_file() and path.stat().st_size <= LARGEST:
            text = path.read_text(encoding="utf-8", errors="replace")
            if "# %%" not in text:  # cells of a notebook show values
                try:
                    rows += [[kind, ast.unparse(node), f"{path.name}:{node.lineno}"] for kind, node in _of(text)]
                except (SyntaxError, ValueError, RecursionError):
                    continue
    return rows[:8]


def _of(text: str) -> Iterator[tuple[str, ast.expr]]:
    tree = ast.parse(text)
    for loop in ast.walk(tree):
        parameters = _parameters(loop)
        for node in getattr(loop, "body", None) or [] if isinstance(getattr(loop, "body", None), list) else []:
            for each in ast.walk(node) if parameters else [node]:
                value = each.value if isinstance(each, ast.Expr) else None
                kind = None if value is None else _kind(value, parameters, text)
                if value is not None and kind is not None:
                    yield kind, value


def _parameters(loop: ast.AST) -> set[str]:
    names = set()
    if isinstance(loop, ast.For):
        calls = [
            n.func.attr for n in ast.walk(loop.iter) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)
        ]
        if any(c in ("parameters", "named_parameters") for c in calls):
            names = {n.id for n in ast.walk(loop.target) if isinstance(n, ast.Name)}
    return names


def _kind(value: ast.expr, parameters: set[str], text: str) -> str | None:
    if isinstance(value, ast.Attribute):
        calls = [f"{ast.unparse(value.value)}.{other}(" for other in OF_OWNERS.get(value.attr, ())]
        return "method" if value.attr in METHODS or any(call in text for call in calls) else None
    if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Attribute):
        return None
    name, owner = value.func.attr, value.func.value
    if name in CONTEXTS and isinstance(owner, ast.Name | ast.Attribute) and "torch" in ast.unparse(owner):
        return "context"
    if isinstance(owner, ast.Attribute) and owner.attr in ("data", "grad"):
        owner = owner.value
    of_layer = isinstance(owner, ast.Attribute) and owner.attr in ("weight", "bias") and owner is not value.func.value
    named = of_layer or (isinstance(owner, ast.Name) and owner.id in parameters)
    out = any(keyword.arg == "out" for keyword in value.keywords)
    return "result" if name in RETURNING and named and not out else None
