"""Arguments of the calls that the readers of scripts take: each is read, without effect, printed, or refused.

In: such a call, in a loop or in a script with a Trainer. Out: a line or a gap for each argument that no other reader
takes. The rows of `config/foreign_keys/call_arguments.yaml` have the names; what they do not list is refused.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from typing import Any

from lockstep.config.key_aliases import foreign_keys
from lockstep.lab.import_config.kinds import Kind
from lockstep.lab.import_config.loading import RUNS
from lockstep.lab.import_config.script import Call, Script, Unknown, code_of
from lockstep.lab.import_config.table import RunDraft

Row = Mapping[str, Any]
LOOPS: Mapping[str, Row] = foreign_keys("call_arguments")["loops"]
TRAINERS: Mapping[str, Row] = foreign_keys("call_arguments")["trainers"]
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


def row_of(origin: str) -> Row | None:
    """Return the row of a call in a loop by its whole name, else by its last one."""
    name = origin.rpartition(".")[2]
    return LOOPS.get(origin, LOOPS.get(name)) if "." not in name else None


def row_of_trainer(call: Call, kind: Kind | None) -> Row | None:
    """Return the row of a call in a script with a Trainer. `kind`: kind of the object whose method is called."""
    names = (f"{kind}.{call.name}", call.origin, call.name)
    return next((TRAINERS[name] for name in names if name in TRAINERS), None)


def positions(origin: str) -> tuple[str, ...]:
    """Return the names of a call's positional arguments in a loop."""
    return tuple((row_of(origin) or {}).get("order", ()))


def is_quiet(name: str, argument: str) -> bool:
    """Return whether no weight depends on an argument of a Trainer's call, so that its value need not be known."""
    return argument in TRAINERS.get(name, {}).get("quiet", ())


def check(script: Script, draft: RunDraft, call: Call, row: Row | None) -> None:
    """Add a line for each argument that decides something and is not read. Calls without a row are checked by their
    readers."""
    if row is None:
        return
    plain = [each for each in call.node.args if not isinstance(each, ast.Starred)]
    order = tuple(row.get("order", ()))
    words: list[tuple[str | None, ast.expr]] = [] if row.get("any") else list(zip(order, plain, strict=False))
    words += script.keywords(call.node)
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


def _argument(draft: RunDraft, call: Call, row: Row, name: str, value: Any, code: str) -> None:
    decided = {*row.get("read", ()), *row.get("told", ()), *row.get("usual", ())}
    elsewhere = {*row.get("order", ()), *row.get("code", ())} - decided
    if name in {*row.get("quiet", ()), *elsewhere} or (row.get("open") and name not in decided):
        return
    by = (_BY[name],) if name in _BY else ()
    if name in row.get("read", ()):
        if value is Unknown:
            _say(draft, call, f"{name}={code}", RUNS, *by)
    elif _is_off(value) if name not in row.get("usual", ()) else value in (None, row["usual"][name]):
        return
    elif name in row.get("told", ()):
        if not _is_named(draft, call, name):
            draft.drop(f"line {call.line}: {call.name}({name}={code})", None, _HOW)
    elif not _is_named(draft, call, name):
        draft.lacks(f"line {call.line}: {call.name}({name}={code})", _NONE, *by)


def _say(draft: RunDraft, call: Call, code: str, why: str, *by: str) -> None:
    if not _is_named(draft, call, code.partition("=")[0]):
        draft.unclear(f"line {call.line}: {call.name}({code})", why, *by)


def _is_named(draft: RunDraft, call: Call, name: str) -> bool:
    """Return whether a line of this call names the argument, or refuses the call as a whole."""
    start = f"line {call.line}: "
    for gap in (each.name for each in draft.gaps if each.name.startswith(start)):
        other = re.match(r"[\w.]*?(\w+)\(", gap.removeprefix(start))  # the call that this gap names
        of_call = other is None or other[1] == call.name
        if gap == str(call) or (of_call and re.search(rf"\b{re.escape(name)}\b", gap)):
            return True
    return False


def _is_off(value: Any) -> bool:
    return value is None or value is False or (isinstance(value, list | dict | str) and not value)
