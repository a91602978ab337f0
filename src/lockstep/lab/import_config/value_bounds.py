"""Bounds of values that are computed while a script is read: no setting is larger.

In: a value, or the operands of an operator. Out: `Unknown` is raised for what is too large.
"""

from __future__ import annotations

import ast
from typing import Any


class Unknown(Exception):
    """A value that is only known when the script runs."""


FAULTS = (ValueError, TypeError, KeyError, IndexError, ZeroDivisionError, SyntaxError, MemoryError, OverflowError)
_MOST = 10_000  # entries of a list or mapping, including nested ones; characters of a text; bits of a number


def bounded(value: Any) -> Any:
    """Return the value. Errors: `Unknown` if it has more than `_MOST` entries, characters or bits, or is complex."""
    count, waiting = 0, [value]
    while waiting:
        each = waiting.pop()
        count += 1
        if isinstance(each, complex):
            raise Unknown  # no key has such a value
        if isinstance(each, str | bytes):
            count += len(each)
        elif isinstance(each, int):
            count += each.bit_length() // 8
        elif isinstance(each, dict):
            waiting += [*each.keys(), *each.values()]
        elif isinstance(each, list | tuple | set | range):
            count += len(each)
            waiting += list(each)[:_MOST]
        if count + len(waiting) > _MOST:
            raise Unknown
    return value


def affordable(operator_: ast.operator, left: Any, right: Any) -> None:
    """Check the size of a product or power before computing it. Errors: `Unknown` above `_MOST`."""
    whole = isinstance(left, int) and isinstance(right, int)
    if isinstance(operator_, ast.Pow) and whole and abs(right) * left.bit_length() > _MOST:
        raise Unknown
    for one, times in ((left, right), (right, left)):
        repeats = isinstance(operator_, ast.Mult) and isinstance(one, str | list) and isinstance(times, int)
        if repeats and len(one) * times > _MOST:
            raise Unknown
