"""Arguments of the calls that the reader of a loop takes: each is read, without effect, printed, or refused.

In: such a call. Out: a line or a gap for each argument that no other reader takes. The rows of
`config/foreign_keys/loop_arguments.yaml` have the names; what they do not list is refused.
"""

from __future__ import annotations

import ast
from typing import Any

from lockstep.config.key_aliases import foreign_keys
from lockstep.lab.import_config.loading import RUNS
from lockstep.lab.import_config.script import Call, Script, Unknown, code_of
from lockstep.lab.import_config.table import RunDraft

ROWS: dict[str, dict[str, Any]] = foreign_keys("loop_arguments")
_HOW = "it changes how a step is computed, not what is learned; lockstep has its own way"
_NONE = "lockstep has no such setting"
_BY = {
    "strategy": "strategy.name",
    "precision": "precision",
    "mixed_precision": "precision",
    "mp_policy": "precision",
    "dtype": "precision",
    "enabled": "precision",
    "devices": "launch.processes",
    "num_nodes": "launch.machines",
    "ignored_modules": "strategy.name",
    "max_norm": "optim.max_grad_norm",
    "lr": "optim.learning_rate",
    "weight_decay": "optim.weight_decay",
}


def row_of(origin: str) -> dict[str, Any] | None:
    """Return the row of a call by its whole name, else by its last one."""
    name = origin.rpartition(".")[2]
    return ROWS.get(origin, ROWS.get(name)) if "." not in name else None


def positions(origin: str) -> tuple[str, ...]:
    """Return the names of a call's positional arguments."""
    return tuple((row_of(origin) or {}).get("order", ()))


def check(script: Script, draft: RunDraft, call: Call, name: str = "") -> None:
    """Add a line for each argument that decides something and is not read. `name`: of the row, for a method."""
    row = ROWS.get(name) if name else row_of(call.origin)
    if row is None:
        return
    plain = [each for each in call.node.args if not isinstance(each, ast.Starred)]
    order = tuple(row.get("order", ()))
    words: list[tuple[str | None, ast.expr]] = [] if row.get("any") else list(zip(order, plain, strict=False))
    words += [(each.arg, each.value) for each in call.node.keywords]
    extra = [] if row.get("any") else [*plain[len(order) :], *(each for each in call.node.args if each not in plain)]
    for node in extra:
        _say(draft, call, code_of(node), "its effect on training is unknown")
    for argument, node in words:
        whole = script.known(node, Unknown) if argument is None else Unknown
        if argument is not None:
            _argument(draft, call, row, argument, script.known(node, Unknown), code_of(node))
        elif isinstance(whole, dict):
            for key, value in whole.items():
                _argument(draft, call, row, str(key), value, repr(value))
        else:
            _say(draft, call, f"**{code_of(node)}", "its content is unknown")


def _argument(draft: RunDraft, call: Call, row: dict[str, Any], name: str, value: Any, code: str) -> None:
    if name in (*row.get("quiet", ()), *row.get("code", ())):
        return
    by = (_BY[name],) if name in _BY else ()
    if name in row.get("read", ()):
        if value is Unknown:
            _say(draft, call, f"{name}={code}", RUNS, *by)
    elif value is None or ("usual" in row and name in row["usual"] and value == row["usual"][name]):
        return
    elif name in row.get("told", ()):
        if not _is_named(draft, call, name):
            draft.drop(f"line {call.line}: {call.name}({name}={code})", None, _HOW)
    elif not _is_named(draft, call, name):
        draft.lacks(f"line {call.line}: {name}={code}", _NONE, *by)


def _say(draft: RunDraft, call: Call, code: str, why: str, *by: str) -> None:
    if not _is_named(draft, call, code.partition("=")[0]):
        draft.unclear(f"line {call.line}: {call.name}({code})", why, *by)


def _is_named(draft: RunDraft, call: Call, name: str) -> bool:
    """Return whether a line of this call names the argument, or refuses the call as a whole."""
    lines = [gap.name for gap in draft.gaps if gap.name.startswith(f"line {call.line}:")]
    return any(name in each or each == str(call) for each in lines)
