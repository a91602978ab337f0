"""Members of a script's own enumerations. A member is known by its value: `Schedule.cosine` is "cosine".

In: a `Script`. Out: `.value` and `.name` of a member, and whether a comparison with a text is one of Python, too.
"""

from __future__ import annotations

import ast
from typing import Any

from lockstep.lab.import_config.value_bounds import Unknown

PARTS = ("value", "name")
_PLAIN = ("Enum", "StrEnum", "IntEnum")
_MIXED = ("str", "int", "float", "StrEnum", "IntEnum")


def part_of(script: Any, node: ast.Attribute) -> Any:
    """Return `.value` or `.name` of a member; `Unknown`, if the script has no enumeration with this value, or one whose
    members are not only assigned."""
    members = _members(script)
    value = script.known(node.value, Unknown) if members else Unknown
    names = {
        name for of in members.values() for name, each in of.items() if each == value and type(each) is type(value)
    }
    if value is Unknown or not names or (node.attr == "name" and len(names) > 1):
        return Unknown
    return value if node.attr == "value" else names.pop()


def refuse_text(script: Any, node: ast.Compare) -> None:
    """Check a comparison. Errors: `Unknown` for one of a member with a text or number that only looks equal: a member
    of a plain `Enum` is unequal to its value."""
    plain = [kind for kind in _kinds(script) if not _bases(kind) & {*_MIXED}]
    sides = [node.left, *node.comparators]
    literal = [isinstance(part, ast.Constant) for side in sides for part in (getattr(side, "elts", None) or [side])]
    if not plain or not any(literal):
        return
    values = {name for kind in plain for name in _values(script, kind).values() if isinstance(name, str | int | float)}
    for side in sides:
        text = not isinstance(side, ast.Constant | ast.List | ast.Tuple | ast.Set)
        if text and not ast.unparse(side).endswith((".value", ".name")) and script.value(side) in values:
            raise Unknown


def is_member(script: Any, name: str, value: Any) -> bool:
    """Return whether a class of the script is an enumeration that has a member of this value."""
    return any(kind.name == name and value in _values(script, kind).values() for kind in _kinds(script))


def _kinds(script: Any) -> list[ast.ClassDef]:
    return [kind for kind in script.classes.values() if _is_enumeration(kind)]


def _members(script: Any) -> dict[str, dict[str, Any]]:
    """Return the members of all enumerations; nothing if a method or the script may make other ones."""
    kinds = _kinds(script)
    if any(not isinstance(line, ast.Assign | ast.Expr | ast.Pass) for kind in kinds for line in kind.body):
        return {}
    if any(each.rpartition(".")[0] in script.classes for each in script.set_later):
        return {}
    return {kind.name: _values(script, kind) for kind in kinds}


def _values(script: Any, kind: ast.ClassDef) -> dict[str, Any]:
    lines = [line for line in kind.body if isinstance(line, ast.Assign)]
    names = ((target.id, line) for line in lines for target in line.targets if isinstance(target, ast.Name))
    return {name: script.known(line.value, Unknown) for name, line in names}


def _bases(kind: ast.ClassDef) -> set[str]:
    return {ast.unparse(each).rpartition(".")[2] for each in kind.bases}


def _is_enumeration(kind: ast.ClassDef) -> bool:
    return bool(_bases(kind) & {*_PLAIN})
