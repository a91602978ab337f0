"""Messages with codes: `LS` and four digits, in brackets at the end of a message's first line.

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
