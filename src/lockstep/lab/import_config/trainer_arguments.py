"""Arguments of known calls: each is read, on a list of those without effect, or refused by its name.

In: a `Call` and its name in `foreign_keys/trainer_arguments.yaml`. Out: a gap for each argument that is in no list.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from lockstep.config.key_aliases import foreign_keys
from lockstep.lab.import_config.script import Call, Kind, Script, Unknown, code_of
from lockstep.lab.import_config.table import RunDraft

CALLS: Mapping[str, Mapping[str, Any]] = foreign_keys("trainer_arguments")
_UNREAD = "what this argument does is not read"


def name_of(call: Call, kind: Kind | None) -> str:
    """Return the name of a call in the table. `kind`: of what a method is called on."""
    return next((name for name in (f"{kind}.{call.name}", call.origin) if name in CALLS), call.name)


def check(script: Script, call: Call, name: str, draft: RunDraft) -> None:
    """Add a gap for each argument that is neither read nor without effect. Calls that are not in the table are
    checked by their readers."""
    row = CALLS.get(name)
    if row is None:
        return
    order, needed = row.get("order", ()), row.get("needed", ())
    known = {*order, *row.get("read", ()), *row.get("quiet", ())}
    for place, node in enumerate(call.node.args):
        if isinstance(node, ast.Starred) or place >= len(order):
            draft.unclear(f"line {call.line}: {call.name}({code_of(node)})", _UNREAD)
    for word in call.node.keywords:
        value = script.known(word.value, Unknown)
        if word.arg is None and isinstance(value, dict):
            names = {str(key): each for key, each in value.items()}
        elif word.arg is None:
            draft.unclear(f"line {call.line}: {call.name}(**{code_of(word.value)})", "its content is not known")
            continue
        else:
            names = {word.arg: value}
        for each, of in names.items():
            off = of is None or of is False or (isinstance(of, list | dict | str) and not of)
            as_usual = of is True if each in needed else off
            if each not in known and not as_usual and not row.get("open"):
                draft.unclear(f"line {call.line}: {call.name}({each}={code_of(word.value)})", _UNREAD)


def is_quiet(name: str, argument: str) -> bool:
    """Return whether no weight depends on an argument, so that its value need not be known."""
    return argument in CALLS.get(name, {}).get("quiet", ())
