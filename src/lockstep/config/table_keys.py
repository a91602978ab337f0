"""The keys of `data` that say how .csv and .tsv files are written: a separator and quotes.

In: a character, or its name. Out: the character, or a `ValueError`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator

_NAMES = {"tab": "\t", "\\t": "\t", "comma": ",", "semicolon": ";", "bar": "|", "pipe": "|", "space": " "}
SEPARATOR = (
    "what separates the cells of .csv and .tsv files: one character, or tab, comma, semicolon, bar, space; default: a "
    "comma in .csv, a tab in .tsv"
)
QUOTE = (
    "quotes around cells of .csv and .tsv files that hold a separator or an end of line; none: quotes are letters; "
    "default: double, unless the file is plainly not quoted"
)


def _character(value: Any) -> Any:
    return _NAMES.get(value, value) if isinstance(value, str) else value


def _one(value: str) -> str:
    """Errors: `ValueError`."""
    if len(value) != 1 or value in "\r\n\"'" or value.isalnum():
        raise ValueError(
            f"wanted is one character that is no letter, digit or quote, or a name such as tab, not {value!r}"
        )
    return value


Separator = Annotated[str, BeforeValidator(_character), AfterValidator(_one)]
Quote = Literal["double", "single", "none"]
