"""Types of columns: select the columns to read, find the common type of several files, and apply `data.types`.

In: data sets of typed columns. Out: columns of a common or declared type. Integers in tables and lines, whose cells are
all text, become numbers only if all are in canonical form: '01' and '1' are ambiguous.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from lockstep.config.run import RunError
from lockstep.data import usable_rows
from lockstep.data.value_types import LARGEST, Shape, in_memory, is_json

if TYPE_CHECKING:
    from datasets import Dataset

Kind = Literal["text", "label", "number"]  # kind of a column, as a task reads it
_DIGITS = "0|-?[1-9][0-9]{0,17}"  # an integer in canonical form
_WHOLE = re.compile(_DIGITS)
_POINTED = re.compile(rf"({_DIGITS})\.0")  # as written by tables with missing values
_NUMBER = re.compile(r"[+-]?[0-9]+(\.0*)?")


# -- types across files ----------------------------------------------------------------------------------------------


def is_text(rows: Dataset, column: str) -> bool:
    """Return whether a column exists and holds texts."""
    return getattr(rows.features.get(column), "dtype", None) in ("string", "large_string")


def common(features: Sequence[Any]) -> Any:
    """The type that represents all of these, or None. Integers beside floats become float64; casting to it fails for an
    integer that it cannot represent. Mappings of one type beside mappings with different keys become JSON."""
    import datasets

    typed = [feature for feature in features if getattr(feature, "dtype", None) != "null"]
    if not typed or all(feature == typed[0] for feature in typed):
        return typed[0] if typed else features[0]
    if all(isinstance(feature, Mapping) for feature in typed):
        names = dict.fromkeys(name for feature in typed for name in feature)
        inner = {name: common([feature[name] for feature in typed if name in feature]) for name in names}
        return None if None in inner.values() else inner
    if any(map(is_json, typed)) and all(isinstance(feature, Mapping) or is_json(feature) for feature in typed):
        return datasets.Json()
    lists = ("List", "LargeList")
    if all(type(feature).__name__ in lists and getattr(feature, "length", -1) == -1 for feature in typed):
        item = common([feature.feature for feature in typed])
        return None if item is None else datasets.List(item)
    if any(getattr(feature, "names", None) for feature in typed):
        return None
    dtypes = {str(getattr(feature, "dtype", feature)) for feature in typed}
    for alike, to in (
        ("(large_)?string", "large_string"),
        ("u?int[0-9]+", "int64"),
        ("(u?int|float)[0-9]+", "float64"),
    ):
        if all(re.fullmatch(alike, dtype) for dtype in dtypes):
            return datasets.Value(to)
    return None


@dataclass(frozen=True)
class ColumnUse:
    """The columns to read, and their kinds."""

    paths: Sequence[str] | None = None  # columns, or paths into them; None: unknown, so all are read
    kinds: Mapping[str, Kind] = field(default_factory=dict)  # kind of each, as the task reads it
    also: Sequence[str] = ()  # optional columns
    within: Sequence[str] = ()  # struct columns in which missing columns may be nested

    @property
    def maybe_numbers(self) -> dict[str, Kind]:
        """Columns of tables and lines that may be numbers; if the columns are unknown, the label of text;label."""
        kinds: Mapping[str, Kind] = {"label": "label"} if self.paths is None else self.kinds
        return {column: kind for column, kind in kinds.items() if kind != "text"}

    def may_be(self, name: str) -> bool:
        """Return whether a column may be read, regardless of other columns."""
        roots = (path for path in self.paths or () if f"{path}.".startswith(f"{name}."))
        return self.paths is None or name in (*self.also, *self.within) or next(roots, None) is not None

    def of(self, names: Sequence[str]) -> list[str]:
        """The columns among `names` to read, matched by the longest prefix of each path. All of them if the paths are
        unknown, or if one of them matches none."""
        read = set(self.also)
        for path in self.paths or ():
            parts = path.split(".")
            prefixes = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
            root = next((name for name in (*prefixes, *self.within) if name in names), None)
            if root is None:
                return list(names)
            read.add(root)
        return [name for name in names if self.paths is None or name in read]


ALL = ColumnUse()


# -- numbers as texts ------------------------------------------------------------------------------------------------


def whole_numbers(texts: Collection[str], strict: bool = False) -> bool:
    """Whether texts are integers in canonical form, so that distinct texts are distinct numbers: 0, 1 and 10, or all
    with ".0"; not 01, +1 or a mix of 1 and 1.0. `strict`: no white space and no ".0"."""
    there = set(texts) if strict else {text.strip() for text in texts}
    forms = (_WHOLE,) if strict else (_WHOLE, _POINTED)
    return bool(there) and any(all(map(form.fullmatch, there)) for form in forms)


def number_of(text: str) -> int:
    """The integer value of one of `whole_numbers`."""
    return int(text.strip().removesuffix(".0"))


def same_label_hint(column: str, label: Any, known: Collection[Any]) -> str:
    """Return a hint, as a sentence that precedes the remedy, if an unknown label resembles a `known` one: `data.types`
    would make them equal, or they differ only in blanks or capitals. Empty if none resembles it."""
    texts = {str(each): each for each in known}
    if str(label) in texts:  # a number and its text
        return f"With data.types={{{column}: text}}, {label!r} and {texts[str(label)]!r} are the same label. "
    every = [*texts, str(label)]
    if all(map(_is_integer, every)):
        same = [each for text, each in texts.items() if _value(text) == _value(str(label))]
        distinct = len({_value(text) for text in texts}) == len(texts)  # no two known labels become one
        if same and distinct:
            return f"With data.types={{{column}: integer}}, {label!r} and {same[0]!r} are the same label. "
    like = [each for text, each in texts.items() if text.strip().casefold() == str(label).strip().casefold()]
    return f"It differs from {like[0]!r} only in blanks or capitals. " if like else ""


def _value(text: str) -> int:
    return int(text.strip().partition(".")[0])


def _is_integer(text: str) -> bool:
    """Whether `data.types` could make an integer of a text."""
    try:
        return _NUMBER.fullmatch(text.strip()) is not None and abs(_value(text)) < LARGEST
    except ValueError:  # Python reads at most 4,300 digits
        return False


def label_note(column: str, texts: Collection[str]) -> list[str]:
    """A note if all labels are integers but some are not in canonical form."""
    odd = [text for text in sorted(texts) if not _WHOLE.fullmatch(text.strip())]
    if not odd or not all(map(_is_integer, texts)) or whole_numbers(texts):
        return []
    return [
        f"column {column!r} holds whole numbers, some not in the usual form ({odd[0]!r}), so the labels stay "
        f"texts. With data.types={{{column}: integer}} they become numbers, and {odd[0]!r} is {_value(odd[0])}"
    ]


def points_note(column: str, texts: Collection[str]) -> list[str]:
    """A note if `whole_numbers` makes integers of texts that end in ".0"."""
    first = min(texts, default="")
    if not first.strip().endswith(".0") or not whole_numbers(texts):
        return []
    return [
        f"column {column!r} holds whole numbers, all written with '.0', so the labels become numbers: {first!r} is "
        f"{number_of(first)}. With data.types={{{column}: text}} they stay texts"
    ]


def blanks_note(column: str, texts: Collection[str]) -> list[str]:
    """A note if `whole_numbers` makes one label of texts that differ in the blanks around them."""
    blank = [text for text in sorted(texts) if text != text.strip() and text.strip() in texts]
    if not blank or not whole_numbers(texts):
        return []
    return [
        f"column {column!r} holds whole numbers, some with blanks around them: {blank[0]!r} and {blank[0].strip()!r} "
        f"are the same label. With data.types={{{column}: text}} they are two"
    ]


# -- declared types --------------------------------------------------------------------------------------------------


def declared(rows: Dataset, types: Mapping[str, str] | None, split: str, name: str) -> Dataset:
    """Cast columns to the types that `data.types` declares; absent columns are skipped. Errors: `RunError`, which names
    the row of an invalid value."""
    import datasets

    for column, kind in (types or {}).items():
        if column not in rows.column_names:
            continue
        feature, dtypes = rows.features[column], {"text": ("string", "large_string"), "integer": ("int64",)}
        names = getattr(feature, "names", None)
        if names is None and getattr(feature, "dtype", None) in dtypes.get(kind, ("float64",)):
            continue
        converted: list[Any] = []
        for first, part in usable_rows.lists(rows, column):
            for row, value in enumerate(part, first):
                value = names[value] if names and value is not None and value >= 0 else value
                try:
                    converted.append(_as(value, kind))
                except ValueError:
                    raise RunError(
                        "LS2401",
                        f"data.types: {column}: {kind}: row {row:,} of the {split} split of {name} holds "
                        f"{repr(value)[:60]}, which cannot be converted to {kind}; correct it, or declare another type",
                    ) from None
        shape = Shape()
        shape.look(converted)
        plain = {"text": "string", "integer": "int64", "number": "float64"}
        kinds = shape.feature if list in shape.kinds else datasets.Value(plain[kind])
        only = in_memory({column: converted}, datasets.Features({column: kinds}))
        rows = usable_rows.with_column(rows, column, only)
    return rows


def check_names(types: Mapping[str, str] | None, names: Iterable[str], where: str) -> None:
    """Check that every column of `data.types` exists. Errors: `RunError`."""
    there = list(names)
    if absent := [column for column in types or {} if column not in there]:
        raise RunError("LS2402", f"data.types: {where} has no column {absent[0]!r}; it has {', '.join(there)}")


def _as(value: Any, kind: str) -> Any:
    """Convert a value, or the items of a list, to a text, an integer or a number. Errors: `ValueError`."""
    if value is None:
        return None
    if isinstance(value, list):
        return [_as(item, kind) for item in value]
    if kind == "text":
        if isinstance(value, str):
            return value
        if isinstance(value, bool | int | float):
            return json.dumps(value)
    elif isinstance(value, str) and not value.strip():
        return None
    elif isinstance(value, str | int | float) and not isinstance(value, bool):
        if kind == "number" and "_" in str(value):  # Python would ignore it
            raise ValueError
        return _integer(value) if kind == "integer" else _finite(float(value))
    raise ValueError


def _integer(value: str | int | float) -> int:
    if isinstance(value, str) and not _NUMBER.fullmatch(value.strip()):
        raise ValueError
    number = int(value.strip().partition(".")[0]) if isinstance(value, str) else int(_finite(value))
    if abs(number) >= LARGEST or (isinstance(value, float) and number != value):
        raise ValueError
    return number


def _finite(number: float) -> float:
    if not math.isfinite(number):
        raise ValueError
    return number
