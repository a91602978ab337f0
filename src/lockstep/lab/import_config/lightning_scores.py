"""Scores that a LightningModule logs, of which a callback chooses a checkpoint or ends the training by one.

In: a `Script`, its module and the name of a score. Out: why the score is not known to be one of the validation rows.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from typing import Any

from lockstep.lab.import_config.script import Script

_OF_VALIDATION = ("validation_", "on_validation_")
_OF_TRAINING = ("training_", "on_train_", "on_before_", "on_after_")


def unlogged(script: Script, kinds: Sequence[ast.ClassDef], score: str) -> str | None:
    """Return why a score is not one that the module logs of its validation rows, or None if it is."""
    methods = {each.name: each for kind in kinds for each in kind.body if isinstance(each, ast.FunctionDef)}
    evaluated = [name for each in _reached(methods, _OF_VALIDATION) for name in _names(script, each)]
    learned = [name for each in _reached(methods, _OF_TRAINING) for name in _names(script, each)]
    if any(_is(each, score) for each in learned if not _open(each)):
        return "the module logs it of the rows that it trains on; lockstep evaluates on the validation split"
    if any(_is(each, score) for each in evaluated if not _open(each)):
        return None
    by_name = re.match(r"(val|valid|validation|eval|dev)[_/]", score) is not None
    if by_name and any(_is(each, score) for each in evaluated):
        return None
    return "no method of the module logs it of the validation rows"


def _is(logged: str, score: str) -> bool:
    return any(re.fullmatch(logged, each) for each in (score, re.sub("_(epoch|step)$", "", score)))


def _open(logged: str) -> bool:
    return ".*" in logged


def _reached(methods: dict[str, Any], starts: tuple[str, ...]) -> Iterator[Any]:
    """Yield the methods whose names begin so, and those that they call."""
    waiting, reached = [name for name in methods if name.startswith(starts)], set()
    while waiting:
        name = waiting.pop()
        if name not in methods or name in reached:
            continue
        reached.add(name)
        yield methods[name]
        calls = (each.func for each in ast.walk(methods[name]) if isinstance(each, ast.Call))
        waiting += [each.attr for each in calls if isinstance(each, ast.Attribute) and _is_self(each.value)]


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _names(script: Script, method: Any) -> Iterator[str]:
    """Yield the names that a method logs, as patterns: `.*` for a part that is known only when the script runs."""
    for call in (each for each in ast.walk(method) if isinstance(each, ast.Call)):
        name = ast.unparse(call.func)
        words = [*call.args[:1], *(word.value for word in call.keywords if word.arg in ("name", "dictionary"))]
        if name == "self.log":
            yield from (_pattern(script, each) for each in words[:1])
        elif name == "self.log_dict":
            for each in words[:1]:
                whole = script.bound(each, last=True) if isinstance(each, ast.Name) else each
                keys = whole.keys if isinstance(whole, ast.Dict) else [None]
                yield from (_pattern(script, key) for key in keys)


def _pattern(script: Script, node: ast.expr | None) -> str:
    if node is not None and isinstance(value := script.known(node), str):
        return re.escape(value)
    parts = node.values if isinstance(node, ast.JoinedStr) else [ast.Name("any", ast.Load())]
    return "".join(re.escape(str(each.value)) if isinstance(each, ast.Constant) else ".*" for each in parts)
