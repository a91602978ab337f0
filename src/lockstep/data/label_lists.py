"""Several labels a text -> their names, and the codes that each text has.

In: splits and a column of lists of labels (integers or strings), or several columns of 0 and 1. Out: the names in the
order of their codes and what gives each text its codes, or a `RunError` that names the row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep.config.run import RunError
from lockstep.data import column_scan
from lockstep.data.labels import called

if TYPE_CHECKING:
    from datasets import Dataset


class LabelLists:
    """Names of labels, and which of them each text has."""

    def __init__(self, columns: list[str], names: list[str], values: list) -> None:
        self.columns, self.names, self.values = columns, names, list(values)
        self.place = {value: code for code, value in enumerate(values)}

    def of(self, rows: dict[str, list]) -> list[list[int]]:
        """The codes of each of some rows, in order, each once."""
        if len(self.columns) > 1:
            told = zip(*(rows[column] for column in self.columns), strict=True)
            return [[code for code, value in enumerate(row) if value] for row in told]
        return [sorted({self.place[label] for label in row}) for row in rows[self.columns[0]]]

    def counts(self, dataset: Dataset) -> list[int]:
        """Examples that have each label, in a split."""
        found = np.zeros(len(self.names), np.int64)
        for _, part in column_scan.lists(dataset, *self.columns):
            rows = {self.columns[0]: part}
            if len(self.columns) > 1:
                rows = {column: [row[place] for row in part] for place, column in enumerate(self.columns)}
            for codes in self.of(rows):
                found[codes] += 1
        return found.tolist()


def codes_of(splits: dict[str, Dataset], columns: list[str], wanted: list[str] | None, name: str) -> LabelLists:
    """Names and codes of the labels of all splits. `wanted`: the names that the run file gives integers, or columns.
    Errors: `RunError`."""
    if len(columns) > 1:
        for split, dataset in splits.items():
            for column in columns:
                _check_marks(dataset, column, split, name)
        if wanted is not None and len(wanted) != len(columns):
            raise RunError(f"task.label_names: {len(wanted)} names for {len(columns)} columns")
        return LabelLists(columns, list(wanted or columns), columns)
    held = _distinct(splits["train"], columns[0], "train", name)
    if not held:
        raise RunError(f"task.label: every list of column {columns[0]!r} of {name} is empty; nothing can be learned")
    given = getattr(getattr(splits["train"].features[columns[0]], "feature", None), "names", None)
    values, names = called(list(range(len(given))) if given else sorted(held), wanted, name)
    names = list(given) if given and wanted is None else names
    known = set(values)
    for split, dataset in splits.items():
        for label, row in _distinct(dataset, columns[0], split, name).items():
            if label not in known:
                raise RunError(
                    f"task.label: the {split} split of {name} has the label {label!r} (row {row}), which the training "
                    f"split has not; known are {', '.join(map(repr, values[:20]))}"
                )
    return LabelLists(columns, names, values)


def _distinct(dataset: Dataset, column: str, split: str, name: str) -> dict[Any, int]:
    """The labels of a split -> the first row that has it. Errors: `RunError` for what is no list of labels."""
    held: dict[Any, int] = {}
    kind: type | None = None
    for first, part in column_scan.lists(dataset, column):
        for row, labels in enumerate(part, first):
            if not isinstance(labels, list):
                raise RunError(
                    f"task.label: column {column!r} of the {split} split of {name} must hold a list of labels in every "
                    f"row; row {row} holds {repr(labels)[:60]}. Write it as a list, [] where a text has none; or, for "
                    "one label a text, leave task.multi_label out"
                )
            for label in labels:
                kind = kind or type(label)
                if type(label) is not kind or kind not in (int, str) or not str(label).strip():
                    raise RunError(
                        f"task.label: the lists of column {column!r} of the {split} split of {name} must hold all "
                        f"integers or all strings; row {row} holds {repr(labels)[:60]}: mend it, or take it out"
                    )
                held.setdefault(label, row)
    return held


def _check_marks(dataset: Dataset, column: str, split: str, name: str) -> None:
    """Errors: `RunError` for a column that holds anything but 0 and 1."""
    for first, part in column_scan.lists(dataset, column):
        for row, value in enumerate(part, first):
            if value not in (0, 1):  # true and false, and 1.0, are these, too
                raise RunError(
                    f"task.label: column {column!r} of the {split} split of {name} must hold 0 or 1 in every row, for "
                    f"it is one of several labels; row {row} holds {repr(value)[:60]}"
                )
