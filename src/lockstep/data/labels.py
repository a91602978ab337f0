"""Labels of rows and their codes: one label, lists of labels, columns of 0 and 1, or numbers.

In: splits and the columns of their labels. Out: names and codes, the same for all splits; or a `RunError` that names
the row.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep.config.run import RunError
from lockstep.data import column_types, usable_rows

if TYPE_CHECKING:
    from datasets import Dataset


NAME_SUFFIXES = ("_name", "_text")  # of columns that name integer labels


def hidden(dataset: Dataset, column: str, train: Dataset | None = None) -> bool:
    """Whether the labels of a test split are hidden or absent. `train`: split in which -1 may occur as a label."""
    if column not in dataset.column_names:
        return True
    if usable_rows.lacking(dataset, column).all():
        return True
    if any(isinstance(value, list) for value in dataset[:1][column]):
        return False
    only = set(map(str, usable_rows.distinct(dataset, column)))
    if only not in ({"-1"}, {"-1.0"}):
        return False
    known = train is not None and column in train.column_names and train[:1][column]
    return not known or not only <= set(map(str, usable_rows.distinct(train, column)))


def readable(dataset: Dataset, column: str) -> Dataset:
    """Convert labels to texts or integers: booleans to texts, and integral floats (as in tables with missing values) to
    integers."""
    import datasets

    kind = str(getattr(dataset.features[column], "dtype", None))
    if kind == "bool":
        return dataset.cast_column(column, datasets.Value("string"))
    if kind.startswith("float") and all(_fits_int64(v) for _, part in usable_rows.lists(dataset, column) for v in part):
        return dataset.cast_column(column, datasets.Value("int64"))
    return dataset


def _fits_int64(value: float) -> bool:
    """Return whether a number is whole and has at most 64 bits."""
    return value.is_integer() and abs(value) < 2**63


class Codes:
    """Labels and their codes, counted from 0."""

    def __init__(self, column: str, names: list[str], values: list) -> None:
        self.column, self.names, self.values = column, names, list(values)
        self.place: dict[Any, int] = {value: code for code, value in enumerate(values)}
        if values and isinstance(values[0], int):  # a stream of lines holds them as texts
            self.place |= {str(value): code for value, code in self.place.items()}

    def reordered(self, names: list[str], values: list) -> Codes:
        """Return these labels in another order, possibly with labels that no row has."""
        return Codes(self.column, names, values)

    def of(self, rows: dict[str, list]) -> np.ndarray:
        """Codes of the labels of some rows: int64, one per row."""
        labels = rows[self.column]
        return np.fromiter((self.place[label] for label in labels), np.int64, len(labels))

    def of_all(self, dataset: Dataset) -> np.ndarray:
        """Codes of the labels of a whole split: int32 [examples]."""
        parts = (
            self.of({self.column: labels}).astype(np.int32) for _, labels in usable_rows.lists(dataset, self.column)
        )
        return np.concatenate([np.empty(0, np.int32), *parts])

    def counts(self, dataset: Dataset) -> list[int]:
        """Number of examples per label in a split."""
        return np.bincount(self.of_all(dataset), minlength=len(self.names)).tolist()


def values_and_names(values: list, label_names: list[str] | None, name: str) -> tuple[list, list[str]]:
    """Label values in order, and their names: those of the run file, else the values as text. Errors: `RunError`."""
    if label_names is None:
        return values, [str(value) for value in values]
    if isinstance(values[0], str):
        raise RunError(
            "LS2100",
            f"task.label_names: the labels of {name} are strings already, such as {values[0]!r}; remove "
            "task.label_names",
        )
    if values[0] >= 0 and values[-1] < len(label_names):  # labels are indices into the list, even if train lacks some
        return list(range(len(label_names))), label_names
    if len(label_names) != len(values):
        raise RunError(
            "LS2101",
            f"task.label_names: {len(label_names)} names given for {len(values)} labels ({values[0]} to {values[-1]}); "
            "give one name for each label, in the order of the labels",
        )
    return values, label_names


def codes_of(splits: dict[str, Dataset], column: str, label_names: list[str] | None, name: str) -> Codes:
    """Names and codes of the labels of all splits. `label_names`: the run file's names for integer labels. Errors:
    `RunError`."""
    feature_names = getattr(splits["train"].features[column], "names", None)
    labels = distinct(splits["train"], column, "train")
    values = list(range(len(feature_names))) if feature_names else labels
    if label_names is None:
        names = feature_names or _named_by_column(splits["train"], column, values) or [str(v) for v in values]
    else:
        values, names = values_and_names(values, label_names, name)
    if len(values) < 2:
        raise RunError(
            "LS2102",
            f"task.label: column {column!r} of {name} has a single label ({values[0]!r}); classification "
            "needs two or more: add rows with other labels, or name another column",
        )
    train_labels = set(values)
    for split, dataset in splits.items():
        if (unknown := set(distinct(dataset, column, split)) - train_labels) != set():
            row, label = _first(dataset, column, lambda label: label in unknown)
            there = f"which is not in the train split; the train split has {', '.join(map(repr, values[:20]))}"
            if feature_names:
                listed = f"{', '.join(feature_names[:20])}{', ...' if len(feature_names) > 20 else ''}"
                there = f"but the labels of its column are numbered 0 to {len(feature_names) - 1} ({listed})"
            mend = "Correct the label"
            if not feature_names:
                mend = f"{column_types.same_label_hint(column, label, values)}{mend}, add rows with it to train"
            raise RunError(
                "LS2103",
                f"task.label: the {split} split of {name} has the label {label!r} (row {row}), {there}. {mend}, or set "
                "data.drop_unusable=true to leave such rows out",
            )
    return Codes(column, list(names), values)


def known_rows(dataset: Dataset, columns: list[str], known: Callable[[Any], bool]) -> Dataset:
    """Rows whose labels are all `known`."""
    good = [
        first + row
        for first, part in usable_rows.lists(dataset, *columns)
        for row, one in enumerate(part)
        if known(one)
    ]
    return dataset.select(good) if len(good) < len(dataset) else dataset


def alike(counts: Mapping[str, int]) -> dict[str, list[list[tuple[str, int]]]]:
    """Return the fact `alike_labels`: groups of (label, count in train) that differ only in surrounding blanks or case;
    empty if there are none."""
    groups: dict[str, list[tuple[str, int]]] = {}
    for name, count in counts.items():
        groups.setdefault(" ".join(name.split()).casefold(), []).append((name, count))
    sorted_groups = [sorted(group, key=lambda each: -each[1]) for group in groups.values() if len(group) > 1]
    return {"alike_labels": sorted_groups} if sorted_groups else {}


def count_labels(rows: Dataset, column: str) -> dict[str, list]:
    """Labels of some rows and their counts, as JSON, for `merge_counts`. Errors: `RunError`."""
    distinct(rows, column, "train")  # refuses invalid labels
    counts = Counter(rows[column])
    return {"labels": sorted(counts.items()), "names": getattr(rows.features[column], "names", None) or []}


def merge_counts(
    counts: list[dict[str, list]], column: str, where: Callable[[type], str]
) -> tuple[Dataset, Counter[Any]]:
    """Merge the results of `count_labels`: a data set with one row per label, and the number of rows per label.
    `where`: describes the location of the first label of a type. Errors: `RunError`."""
    import datasets

    values: Counter[Any] = Counter()
    for part in counts:
        values.update(dict(map(tuple, part["labels"])))
    if len({*map(type, values)}) > 1:
        raise RunError(
            "LS2104",
            f"task.label: column {column!r} of the train split mixes integers ({where(int)}) and strings "
            f"({where(str)}); write all labels as one type, or set data.types={{{column}: text}}",
        )
    names = next((part["names"] for part in counts if part["names"]), [])
    features = datasets.Features({column: datasets.ClassLabel(names=names)}) if names else None
    return datasets.Dataset.from_dict({column: sorted(values)}, features=features), values


def numbered(splits: Mapping[str, Dataset], column: str) -> tuple[dict[str, Dataset], list[str]]:
    """Convert text labels to integers in all splits if all are integers in canonical form. Otherwise return the splits
    unchanged, with a note."""
    loose = {s: rows for s, rows in splits.items() if column_types.is_text(rows, column)}
    texts = set().union(*(usable_rows.distinct(rows, column) for rows in loose.values()))
    if "train" not in loose or not column_types.whole_numbers(texts, strict=True):
        return dict(splits), column_types.label_note(column, texts)

    def numbers(labels: list[str]) -> list[int]:
        return [int(label) for label in labels]

    return {**splits, **{s: usable_rows.replaced(rows, column, numbers, "int64") for s, rows in loose.items()}}, []


def _first(dataset: Dataset, column: str, predicate: Callable[[Any], bool]) -> tuple[int, Any]:
    """First row whose label satisfies `predicate`, and the label."""
    parts = usable_rows.lists(dataset, column)
    return next((first + i, label) for first, part in parts for i, label in enumerate(part) if predicate(label))


def distinct(dataset: Dataset, column: str, split: str) -> list:
    """Sorted distinct labels of a split. Errors: `RunError`."""
    if usable_rows.plain(dataset, column) and (values := usable_rows.distinct(dataset, column)) and None not in values:
        return sorted(values)
    distinct_labels: set[Any] = set()
    for first, labels in usable_rows.lists(dataset, column):
        for row, label in enumerate(labels, first) if not {*map(type, labels)} <= {int, str} else ():
            _check(label, row, column, split, dataset)
        distinct_labels.update(labels)
    if len(set(map(type, distinct_labels))) > 1:
        raise _mixed(dataset, column, split)
    return sorted(distinct_labels)


def _check(label: Any, row: int, column: str, split: str, dataset: Dataset) -> None:
    """Check that a label is an integer or string. Errors: `RunError`."""
    if isinstance(label, int | str) and not isinstance(label, bool):
        return
    if isinstance(label, bool) or (isinstance(label, float) and isinstance(dataset[0][column], str)):
        raise _mixed(dataset, column, split)  # a column of true and false alone was read as texts
    if isinstance(label, float):  # then integers in the column were also read as floats
        row, label = _first(dataset, column, lambda one: isinstance(one, float) and not _fits_int64(one))
    several = isinstance(label, list | dict)
    raise RunError(
        "LS2105",
        f"task.label: column {column!r} of the {split} split must hold integers or strings; row {row} holds "
        f"{str(label)[:60] if several else repr(label)}"
        + (": this task learns one label per example, not several" if several else "")
        + (" (for several labels per text: task.multi_label=true)" if isinstance(label, list) else "")
        + (" (for numbers: task.regression=true)" if isinstance(label, float) else ""),
    )


def _mixed(dataset: Dataset, column: str, split: str) -> RunError:
    """Return the error for a column with labels of several types; it names a row of each of two types."""
    names = {int: "integers", str: "strings", bool: "true and false", float: "numbers with decimals"}
    first = dataset[0][column]
    row, other = _first(dataset, column, lambda label: type(label) is not type(first))
    kinds = [names[kind] for kind in names if kind in (type(first), type(other))]
    return RunError(
        "LS2106",
        f"task.label: column {column!r} of the {split} split mixes {' and '.join(kinds) or 'types'}: row 0 holds "
        f"{_as_json(first)}, row {row} holds {_as_json(other)}; write all labels as one type, or set "
        f"data.types={{{column}: text}}",
    )


def _as_json(label: Any) -> str:
    """A label as a message shows it: true and false as JSON writes them."""
    return str(label).lower() if isinstance(label, bool) else repr(label)[:60]


def _named_by_column(dataset: Dataset, column: str, values: list) -> list[str] | None:
    """Names of integer labels from a column such as `label_name` or `label_text`, if they correspond one to one."""
    for suffix in NAME_SUFFIXES:
        if (other := column + suffix) in dataset.column_names:
            pairs: set[tuple[Any, Any]] = set()
            for _, part in usable_rows.lists(dataset, column, other):
                pairs.update(part)
                if len(pairs) > len(values):
                    break
            names = dict(pairs)
            if len(pairs) == len(values) == len(set(names.values())) and all(
                isinstance(n, str) for n in names.values()
            ):
                return [names[v] for v in values]
    return None


class LabelNumbers:
    """Numbers to predict, and their names."""

    def __init__(self, columns: list[str], names: list[str], lists: bool) -> None:
        self.columns, self.names, self.lists = columns, names, lists
        self.values: list[Any] = []  # numbers are not counted

    def reordered(self, names: list[str], values: list) -> LabelNumbers:
        """Return self: numbers keep the order of their columns."""
        return self

    def of(self, rows: dict[str, list]) -> list[list[float]]:
        """Numbers of each row."""
        if self.lists:
            return [[float(number) for number in row] for row in rows[self.columns[0]]]
        numbers = zip(*(rows[column] for column in self.columns), strict=True)
        return [[float(number) for number in row] for row in numbers]

    def counts(self, dataset: Dataset) -> list[int]:
        """Empty: numbers are not counted."""
        return []


def number_codes_of(
    splits: dict[str, Dataset], columns: list[str], label_names: list[str] | None, name: str
) -> LabelNumbers:
    """The numbers to predict, as found in the first row of train. `label_names`: their names. Errors: `RunError`."""
    first = splits["train"][0][columns[0]]
    lists = len(columns) == 1 and isinstance(first, list)
    names = [f"{columns[0]}.{place}" for place in range(len(first))] if lists else list(columns)
    if label_names is not None and len(label_names) != len(names):
        raise RunError(
            "LS2107",
            f"task.label_names: {len(label_names)} names given for {len(names)} numbers per text; give one name "
            "for each number",
        )
    for split, dataset in splits.items():
        spread = [False] * len(columns)
        for place, column in enumerate(columns):
            spread[place] = _checked(dataset, column, len(names) if lists else None, split, name)
        if split == "train" and not all(spread):
            column = columns[spread.index(False)]
            value = str(dataset[0][column])[:40]
            raise RunError(
                "LS2108",
                f"task.label: column {column!r} of {name} has the same value in every row ({value}), "
                "so nothing can be learned; name another column",
            )
    return LabelNumbers(columns, list(label_names or names), lists)


def _checked(dataset: Dataset, column: str, length: int | None, split: str, name: str) -> bool:
    """Return whether the values of a column of numbers, or of lists of `length` numbers, vary. Errors: `RunError`."""
    one: Any = None
    spread = False
    for first, part in usable_rows.lists(dataset, column):
        for row, value in enumerate(part, first):
            numbers = value if length is not None else [value]
            if not isinstance(numbers, list) or len(numbers) != (length or 1) or not all(map(_is_number, numbers)):
                content = "a number" if length is None else f"a list of {length} numbers, as the first of train,"
                raise RunError(
                    "LS2109",
                    f"task.label: column {column!r} of the {split} split of {name} must hold {content} in every row "
                    f"for task.regression, all of them finite; row {row} holds {repr(value)[:60]}: correct or "
                    "remove it",
                )
            one = value if one is None else one
            spread = spread or value != one
    return spread


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


class LabelLists:
    """Label names, and the labels of each text."""

    def __init__(self, columns: list[str], names: list[str], values: list) -> None:
        self.columns, self.names, self.values = columns, names, list(values)
        self.place = {value: code for code, value in enumerate(values)}

    def reordered(self, names: list[str], values: list) -> LabelLists:
        """Return these labels in another order, possibly with labels that no row has."""
        return LabelLists(self.columns, names, values)

    def of(self, rows: dict[str, list]) -> list[list[int]]:
        """Sorted distinct codes of each row."""
        if len(self.columns) > 1:
            codes = [self.place[column] for column in self.columns]
            indicators = zip(*(rows[column] for column in self.columns), strict=True)
            return [sorted(code for code, value in zip(codes, row, strict=True) if value) for row in indicators]
        return [sorted({self.place[label] for label in row}) for row in rows[self.columns[0]]]

    def counts(self, dataset: Dataset) -> list[int]:
        """Number of examples per label in a split."""
        counts = np.zeros(len(self.names), np.int64)
        for _, part in usable_rows.lists(dataset, *self.columns):
            rows = {self.columns[0]: part}
            if len(self.columns) > 1:
                rows = {column: [row[place] for row in part] for place, column in enumerate(self.columns)}
            for codes in self.of(rows):
                counts[codes] += 1
        return counts.tolist()


def list_codes_of(
    splits: dict[str, Dataset], columns: list[str], label_names: list[str] | None, name: str
) -> LabelLists:
    """Names and codes of the labels of all splits. `label_names`: the run file's names for integers or columns. Errors:
    `RunError`."""
    if len(columns) > 1:
        for split, dataset in splits.items():
            for column in columns:
                _check_marks(dataset, column, split, name)
        if label_names is not None and len(label_names) != len(columns):
            raise RunError(
                "LS2110",
                f"task.label_names: {len(label_names)} names given for {len(columns)} columns; give one name for "
                "each column",
            )
        return LabelLists(columns, list(label_names or columns), columns)
    first_rows = _distinct(splits["train"], columns[0], "train", name)
    if not first_rows:
        raise RunError(
            "LS2111",
            f"task.label: every list of column {columns[0]!r} of {name} is empty, so nothing can be learned; "
            "name another column",
        )
    feature_names = getattr(getattr(splits["train"].features[columns[0]], "feature", None), "names", None)
    values = list(range(len(feature_names))) if feature_names else sorted(first_rows)
    values, names = values_and_names(values, label_names, name)
    names = list(feature_names) if feature_names and label_names is None else names
    train_labels = set(values)
    for split, dataset in splits.items():
        for label, row in _distinct(dataset, columns[0], split, name).items():
            if label not in train_labels:
                raise RunError(
                    "LS2112",
                    f"task.label: the {split} split of {name} has the label {label!r} (row {row}), which is not in "
                    f"the train split; the train split has {', '.join(map(repr, values[:20]))}. "
                    f"{column_types.same_label_hint(columns[0], label, values)}Correct the label, add rows with it to "
                    "train, or set data.drop_unusable=true to leave such rows out",
                )
    return LabelLists(columns, names, values)


def incomplete(dataset: Dataset, column: str) -> np.ndarray:
    """Whether each row of a column of lists lacks its list or a label in it: bool [rows]. An empty list is complete."""
    lacks = [
        any(map(usable_rows.is_nothing, value)) if isinstance(value, list) else usable_rows.is_nothing(value)
        for _, part in usable_rows.lists(dataset, column)
        for value in part
    ]
    return np.array(lacks, bool)


def _distinct(dataset: Dataset, column: str, split: str, name: str) -> dict[Any, int]:
    """Label -> first row with it. Errors: `RunError` for a value that is not a list of labels."""
    first_rows: dict[Any, int] = {}
    kind: type | None = None
    for first, part in usable_rows.lists(dataset, column):
        for row, labels in enumerate(part, first):
            if not isinstance(labels, list):
                raise RunError(
                    "LS2113",
                    f"task.label: column {column!r} of the {split} split of {name} must hold a list of labels in "
                    f"every row; row {row} holds {repr(labels)[:60]}. Write a list in every row, [] for a text "
                    "without labels; or, for one label per text, remove task.multi_label",
                )
            for label in labels:
                kind = kind or type(label)
                if type(label) is not kind or kind not in (int, str) or not str(label).strip():
                    raise RunError(
                        "LS2114",
                        f"task.label: the lists of column {column!r} of the {split} split of {name} must hold all "
                        f"integers or all strings; row {row} holds {repr(labels)[:60]}: correct or remove it",
                    )
                first_rows.setdefault(label, row)
    return first_rows


def _check_marks(dataset: Dataset, column: str, split: str, name: str) -> None:
    """Check that a column contains only 0 and 1. Errors: `RunError`."""
    for first, part in usable_rows.lists(dataset, column):
        for row, value in enumerate(part, first):
            if value not in (0, 1):  # includes booleans and floats
                raise RunError(
                    "LS2115",
                    f"task.label: column {column!r} of the {split} split of {name} must hold 0 or 1 in every row, "
                    f"because each column of task.label is one label; row {row} holds {repr(value)[:60]}",
                )
