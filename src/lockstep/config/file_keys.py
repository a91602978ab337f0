"""The keys of `data` that say how local files are written: their layout, and of tables a separator and quotes.

In: a separator, or its name. Out: the character, or a `ValueError`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator

_NAMES = {"tab": "\t", "\\t": "\t", "comma": ",", "semicolon": ";", "bar": "|", "pipe": "|", "space": " "}
LAYOUT = (
    "of local files; class_folders: each text or image a file, in a folder called by its label; parallel: lines "
    "of train.en and train.de (or .gz, ...) with the same number are one example; conll: lines of a word and its "
    "tags, blank lines between sentences; squad: SQuAD's own JSON; columns: JSON that maps each column to the "
    "list of its values; records: a JSON document that holds one list of rows"
)
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
Layout = Literal["rows", "class_folders", "parallel", "conll", "squad", "columns", "records"]
Quote = Literal["double", "single", "none"]
