"""DataLoaders of a script: which of them an expression may be, and how they draw.

In: an expression, such as the iterable of the loop that trains. Out: the calls that may have made it.
"""

from __future__ import annotations

import ast

from lockstep.lab.import_config.library_names import PROGRESS
from lockstep.lab.import_config.script import Script


def loaders_of(script: Script, node: ast.expr | None, depth: int = 0) -> dict[int, ast.Call]:
    """Return all DataLoaders that an expression may be, by any of the values that its names have."""
    if isinstance(node, ast.Name) and depth < 10:
        values = [each for (_, name), of in script.bindings.items() if name == node.id for each in of]
        return {key: one for each in values for key, one in loaders_of(script, each, depth + 1).items()}
    if not isinstance(node, ast.Call):
        return {}
    name = script.origin_of(node.func).rpartition(".")[2]
    if name == "DataLoader":
        return {id(node): node}
    wraps = name in ("enumerate", "prepare", "prepare_data_loader", *PROGRESS)
    return loaders_of(script, node.args[0], depth + 1) if wraps and len(node.args) in (1, 2) else {}


def without_order(call: ast.Call) -> str:
    """Return the code of a loader without what says in which order it draws."""
    words = [word for word in call.keywords if word.arg not in ("shuffle", "sampler")]
    return ast.unparse(ast.Call(call.func, call.args[:2], words))


def draws_again(sampler: ast.Call) -> bool:
    """Return whether a RandomSampler may repeat or skip examples."""
    return len(sampler.args) > 1 or any(word.arg not in ("data_source", "generator") for word in sampler.keywords)
