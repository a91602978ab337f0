"""Labels of texts -> their names and codes; which column is one, and which labels are hidden.

In: splits and their column of labels: integers, strings, or true and false. Out: the names in the order of their codes
and a function from a split to codes, or a `RunError` that names the row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep.config.run import RunError
from lockstep.data import missing

if TYPE_CHECKING:
    from datasets import Dataset


def hidden(dataset: Dataset, column: str) -> bool:
    """Whether the labels of a test split are hidden, or not there at all."""
    if column not in dataset.column_names:
        return True
    return bool(missing.lacking(dataset, column).all()) or set(map(str, dataset[column])) == {"-1"}


def readable(dataset: Dataset, column: str) -> Dataset:
    """The same without missing rows: true and false are texts, and whole numbers with a point (1.0, as tables have them
    where some are missing) are integers."""
    import datasets

    kind = str(getattr(dataset.features[column], "dtype", None))
    if kind == "bool":
        return dataset.cast_column(column, datasets.Value("string"))
    if kind.startswith("float") and all(value.is_integer() for value in dataset[column]):
        return dataset.cast_column(column, datasets.Value("int64"))
    return dataset


def codes_of(
    splits: dict[str, Dataset], column: str, wanted: list[str] | None, name: str
) -> tuple[list[str], Callable[[Dataset, str], np.ndarray]]:
    """Names in the order of their codes, and a function from a split to codes: int64 [examples]. `wanted`: the names
    that the run file gives integers. Errors: `RunError`."""
    feature = splits["train"].features[column]
    given = getattr(feature, "names", None)
    train = splits["train"][column]
    values = list(range(len(given))) if given else _distinct(train, column, "train")
    if wanted is not None:
        if isinstance(values[0], str):
            raise RunError(f"task.label_names: the labels of {name} are strings, which name themselves")
        if len(wanted) < len(values):
            raise RunError(f"task.label_names: {len(wanted)} names for {len(values)} labels")
        if values[0] >= 0 and values[-1] < len(wanted):
            values = list(range(len(wanted)))
        names = wanted
    else:
        names = given or _named_by_column(splits["train"], column, values) or [str(v) for v in values]
    if len(values) < 2:
        raise RunError(
            f"task.label: column {column!r} of {name} holds one label only ({values[0]!r}); nothing can be learned"
        )
    place = {value: code for code, value in enumerate(values)}

    def codes(dataset: Dataset, split: str) -> np.ndarray:
        labels = dataset[column]
        _distinct(labels, column, split)
        for row, label in enumerate(labels):
            if label not in place:
                raise RunError(
                    f"task.label: the {split} split of {name} has the label {label!r} (row {row}), which the "
                    f"training split has "
                    f"not; known are {', '.join(map(repr, values[:20]))}"
                )
        return np.array([place[label] for label in labels], dtype=np.int64)

    for split, dataset in splits.items():
        codes(dataset, split)
    return list(names), codes


def _distinct(labels: Any, column: str, split: str) -> list:
    labels = list(labels)
    for row, label in enumerate(labels):
        if isinstance(label, bool) or not isinstance(label, int | str):
            several = isinstance(label, list | dict)
            raise RunError(
                f"task.label: column {column!r} of the {split} split must hold integers or strings; row {row} holds "
                f"{str(label)[:60] if several else repr(label)}"
                + (": this task learns one label a text, not several" if several else "")
            )
        if type(label) is not type(labels[0]):
            raise RunError(
                f"task.label: column {column!r} of the {split} split mixes integers and strings; row 0 holds "
                f"{labels[0]!r}, row {row} holds {label!r}"
            )
    return sorted(set(labels))


def _named_by_column(dataset: Dataset, column: str, values: list) -> list[str] | None:
    """Names from a column such as `label_name` or `label_text` beside integer labels, where it fits them one to one."""
    for suffix in ("_name", "_text"):
        if (other := column + suffix) in dataset.column_names:
            pairs = set(zip(dataset[column], dataset[other], strict=True))
            names = dict(pairs)
            if len(pairs) == len(values) == len(set(names.values())) and all(
                isinstance(n, str) for n in names.values()
            ):
                return [names[v] for v in values]
    return None
