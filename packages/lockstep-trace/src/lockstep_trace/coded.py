"""Messages with codes: `LS` and four digits, in brackets at the end of a message's first line.

The first digit is the room's (`tests/repo/test_messages.py` has the ranges). The site has a page for each code,
docs/reference/messages.md an entry. Imports nothing of lockstep.
"""

from __future__ import annotations

import os
import re
from typing import Self

ADDRESS = "see reference/messages/{}/ on the site, docs/reference/messages.md#{} in a clone"
VERBOSE = "LOCKSTEP_VERBOSE"  # set: `with_addresses` adds where each code is explained
_CODE = re.compile(r" \[(LS\d{4})\]")


class CodedError(Exception):
    """An error with a message for the user and the message's code; an error of a plug-in may be a message alone."""

    def __init__(self, code: str, message: str | None = None) -> None:
        code, message = ("", code) if message is None else (code, message)
        super().__init__(code, message)
        self.code, self.message = code, message

    @classmethod
    def read(cls, text: str) -> Self:
        """The error of a text that holds its code, such as one from another process."""
        return cls(next(iter(codes(text)), ""), text)

    def __str__(self) -> str:
        return coded(self.code, self.message)


def coded(code: str, message: str) -> str:
    """The message with its code. A message of several lines may hold codes of its own, `code` among them."""
    if not code or code in codes(message):
        return message
    first, newline, rest = uncoded(message).partition("\n")
    return f"{first} [{code}]{newline}{rest}"


def appended(message: str, more: str) -> str:
    """A coded message with more words before its code."""
    return coded(next(iter(codes(message)), ""), uncoded(message) + more)


def codes(text: str) -> list[str]:
    """All codes in a text, in order."""
    return _CODE.findall(text)


def uncoded(text: str) -> str:
    """The text without its codes."""
    return _CODE.sub("", text)


def with_addresses(text: str) -> str:
    """The text, and under it where each of its codes is explained, if `LOCKSTEP_VERBOSE` is set."""
    if not os.environ.get(VERBOSE):
        return text
    unique = dict.fromkeys(codes(text))
    return "\n".join([text, *(f"  {code}: {ADDRESS.format(code, code.lower())}" for code in unique)])
