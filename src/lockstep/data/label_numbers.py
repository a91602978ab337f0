"""Numbers that are foretold of a text -> what they are called, and those of each text.

In: splits and columns of numbers, or one column of lists of them. Out: names, and what gives each text its numbers, or
a `RunError` that names the row.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from lockstep.config.run import RunError
from lockstep.data import column_scan

if TYPE_CHECKING:
    from datasets import Dataset


class LabelNumbers:
    """Names of numbers, and those of each text."""

    def __init__(self, columns: list[str], names: list[str], lists: bool) -> None:
        self.columns, self.names, self.lists = columns, names, lists
        self.values: list[Any] = []  # nothing is counted of numbers

    def of(self, rows: dict[str, list]) -> list[list[float]]:
        """The numbers of each of some rows."""
        if self.lists:
            return [[float(number) for number in row] for row in rows[self.columns[0]]]
        told = zip(*(rows[column] for column in self.columns), strict=True)
        return [[float(number) for number in row] for row in told]

    def counts(self, dataset: Dataset) -> list[int]:
        """Nothing is counted of numbers."""
        return []


def codes_of(splits: dict[str, Dataset], columns: list[str], wanted: list[str] | None, name: str) -> LabelNumbers:
    """What is foretold, by the first row of train. `wanted`: what the run file calls them. Errors: `RunError`."""
    first = splits["train"][0][columns[0]]
    lists = len(columns) == 1 and isinstance(first, list)
    names = [f"{columns[0]}.{place}" for place in range(len(first))] if lists else list(columns)
    if wanted is not None and len(wanted) != len(names):
        raise RunError(f"task.label_names: {len(wanted)} names for {len(names)} numbers a text")
    for split, dataset in splits.items():
        spread = [False] * len(columns)
        for place, column in enumerate(columns):
            spread[place] = _checked(dataset, column, len(names) if lists else None, split, name)
        if split == "train" and not all(spread):
            column = columns[spread.index(False)]
            raise RunError(
                f"task.label: column {column!r} of {name} holds the same in every row ({str(first)[:40]}); nothing can "
                "be learned"
            )
    return LabelNumbers(columns, list(wanted or names), lists)


def _checked(dataset: Dataset, column: str, length: int | None, split: str, name: str) -> bool:
    """Whether rows differ in a column of numbers, or of lists of `length` of them. Errors: `RunError`."""
    one: Any = None
    spread = False
    for first, part in column_scan.lists(dataset, column):
        for row, value in enumerate(part, first):
            held = value if length is not None else [value]
            if not isinstance(held, list) or len(held) != (length or 1) or not all(map(_is_number, held)):
                wanted = "a number" if length is None else f"a list of {length} numbers, as the first of train,"
                raise RunError(
                    f"task.label: column {column!r} of the {split} split of {name} must hold {wanted} in every row for "
                    f"task.regression, and none that is not finite; row {row} holds {repr(value)[:60]}: mend it, or "
                    "take it out"
                )
            one = value if one is None else one
            spread = spread or value != one
    return spread


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
