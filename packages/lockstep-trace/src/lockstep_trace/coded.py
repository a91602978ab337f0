"""Messages: codes, `LS` and four digits in brackets at the end of a message's first line, and numbers with their nouns.

The first digit identifies the package (ranges: `tests/repo/test_messages.py`). Each code has a page on the site and an
entry in the page that docs/messages.py prints. Imports nothing from lockstep.
"""

from __future__ import annotations

import os
import re
from typing import Self

ADDRESS = "see reference/messages/{}/ on the site; in a clone run: python docs/messages.py {}"
VERBOSE = "LOCKSTEP_VERBOSE"  # if set, `with_addresses` adds the documentation address of each code
_CODE = re.compile(r" \[(LS\d{4})\]")


class CodedError(Exception):
    """An error with a message for the user and its code. Plug-ins may omit the code."""

    def __init__(self, code: str, message: str | None = None) -> None:
        code, message = ("", code) if message is None else (code, message)
        super().__init__(code, message)
        self.code, self.message = code, message

    @classmethod
    def read(cls, text: str) -> Self:
        """Create the error from a text with its code, for example from another process."""
        return cls(next(iter(codes(text)), ""), text)

    def __str__(self) -> str:
        return coded(self.code, self.message)


class TraceError(CodedError, ValueError):
    """Invalid input of the user: what is wrong, what was expected, what to do. The command line exits with status 2."""


def coded(code: str, message: str) -> str:
    """Add a code to a message, unless the message contains it already (one of several lines may)."""
    if not code or code in codes(message):
        return message
    first, newline, rest = uncoded(message).partition("\n")
    return f"{first} [{code}]{newline}{rest}"


def appended(message: str, more: str) -> str:
    """Insert text before the code of a message."""
    return coded(next(iter(codes(message)), ""), uncoded(message) + more)


def codes(text: str) -> list[str]:
    """Return all codes in a text, in order."""
    return _CODE.findall(text)


def uncoded(text: str) -> str:
    """Remove the codes from a text."""
    return _CODE.sub("", text)


def with_addresses(text: str) -> str:
    """Append the documentation address of each code in a text, if `LOCKSTEP_VERBOSE` is set."""
    if not os.environ.get(VERBOSE):
        return text
    unique = dict.fromkeys(codes(text))
    return "\n".join([text, *(f"  {code}: {ADDRESS.format(code, code)}" for code in unique)])


def quantity(count: float | str, noun: str) -> str:
    """Return a whole number with its noun, in the plural unless the number is 1. `count`: or a word, such as auto.
    `noun`: in the singular."""
    number = count if isinstance(count, str) else f"{count:,.0f}"
    return f"{number} {noun if number == '1' else _plural(noun)}"


def _plural(noun: str) -> str:
    if noun.endswith(("s", "x", "ch", "sh")) and noun != "epoch":
        return f"{noun}es"
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return f"{noun[:-1]}ies"
    return f"{noun}s"
