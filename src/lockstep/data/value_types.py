"""Types of values: find the common type of a column's values, and create columns of that type.

In: values as read from a file. Out: columns of a type that holds every value unchanged; if there is none, because texts
are mixed with numbers or mappings have different keys, a JSON column, in which texts stay texts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from lockstep.config.run import RunError

if TYPE_CHECKING:
    from datasets import Dataset, Features

IN_MEMORY = "in-memory"  # fingerprint of uncached data: `datasets` would pickle all rows to compute one
_EXACT = 2**53  # integers up to this are exact in float64
LARGEST = 2**63  # integers from this on have more than 64 bits


@dataclass
class Shape:
    """Common type information of the values seen so far."""

    kinds: set[type] = field(default_factory=set)  # of Python: str, int, float, bool, dict, list and others
    widest: int = 0  # largest absolute value of integers
    keys: frozenset[str] | None = None  # of the first mapping
    ragged: bool = False  # whether mappings differ in their keys, or have none
    fields: dict[str, Shape] = field(default_factory=dict)
    items: Shape | None = None  # of lists

    def look(self, values: Iterable[Any]) -> None:
        """Take more values into account."""
        values = [value for value in values if value is not None]
        kinds = set(map(type, values))
        self.kinds |= kinds
        if int in kinds:
            self.widest = max(self.widest, max(abs(value) for value in values if type(value) is int))
        if list in kinds:
            self.items = self.items or Shape()
            self.items.look(item for value in values if type(value) is list for item in value)
        if dict not in kinds:
            return
        columns: dict[str, list[Any]] = {}
        for value in values if kinds == {dict} else [value for value in values if type(value) is dict]:
            self.keys = frozenset(value) if self.keys is None else self.keys
            self.ragged = self.ragged or not value or value.keys() != self.keys
            for name, inner in value.items():
                columns.setdefault(name, []).append(inner)
        for name, inner in columns.items():
            self.fields.setdefault(name, Shape()).look(inner)

    @property
    def feature(self) -> Any:
        """The `datasets` type; `Json` if no type holds all values unchanged. Mappings with different keys are JSON: an
        absent key is not a null."""
        import datasets

        names = {bool: "bool", int: "int64", float: "float64", str: "string", bytes: "binary"}
        if not self.kinds:
            return datasets.Value("null")
        if self.kinds == {list} and self.items is not None:
            return datasets.List(self.items.feature)
        if self.kinds == {dict} and not self.ragged:
            return {name: inner.feature for name, inner in self.fields.items()}
        if self.kinds == {int, float} and self.widest <= _EXACT:
            return datasets.Value("float64")
        if len(self.kinds) == 1 and (kind := next(iter(self.kinds))) in names and self.widest < LARGEST:
            return datasets.Value(names[kind])
        return datasets.Json()


def table_of(columns: Mapping[str, list[Any]], features: Features) -> pa.Table:
    """Convert values to a table of these types. Errors: `RunError` for values that Arrow cannot hold, such as a lone
    surrogate."""
    from datasets.table import table_cast

    arrays = {}
    for name, values in columns.items():
        json_inside = has_json(features[name])
        try:
            written = [_written(value, features[name]) for value in values] if json_inside else values
            arrays[name] = pa.array(written, _stored(features[name]))
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise RunError(
                "LS2409", f"column {name!r} holds a value that cannot be read: {' '.join(str(error).split())}"
            ) from None
    return table_cast(pa.table(arrays), features.arrow_schema)


def dataset_of(columns: Mapping[str, list[Any]]) -> Dataset:
    """Create an in-memory data set with all values unchanged. Errors: as in `table_of`."""
    import datasets

    shapes = {name: Shape() for name in columns}
    for name, values in columns.items():
        shapes[name].look(values)
    features = datasets.Features({name: shape.feature for name, shape in shapes.items()})
    return in_memory(columns, features)


def in_memory(columns: Mapping[str, list[Any]], features: Features) -> Dataset:
    """Create an in-memory data set of these types. Errors: as in `table_of`."""
    import datasets

    keep_json_exact()
    table = datasets.table.InMemoryTable(table_of(columns, features))
    return datasets.Dataset(table, info=datasets.DatasetInfo(features=features), fingerprint=IN_MEMORY)


def keep_json_exact() -> None:
    """Make `datasets` read and write its JSON columns with all digits: its own functions read about 15 of them and NaN
    as None, and write 10 (`tests/assumptions/test_rows.py`)."""
    from datasets import arrow_writer
    from datasets.features import features
    from datasets.utils import json as functions

    own: Any = functions.ujson_dumps
    if functions.ujson_loads is json.loads:
        return

    def dumps(value: Any) -> str:
        try:
            return json.dumps(value, ensure_ascii=False)
        except TypeError:  # a date
            return str(own(value))

    for module in (functions, features, arrow_writer):
        for name, function in {"ujson_loads": json.loads, "ujson_dumps": dumps}.items():
            if hasattr(module, name):
                setattr(module, name, function)


def is_json(feature: Any) -> bool:
    """Return whether a column holds values of several types, as JSON."""
    return type(feature).__name__ == "Json"


def has_json(feature: Any) -> bool:
    """Return whether a type is JSON, or holds JSON."""
    if isinstance(feature, Mapping):
        return any(map(has_json, feature.values()))
    return is_json(feature) or ((inner := getattr(feature, "feature", None)) is not None and has_json(inner))


def _written(value: Any, feature: Any) -> Any:
    """Serialize JSON parts of a value to text, including texts, so that "01" is not read as a number."""
    if value is None:
        return None
    if is_json(feature):
        if isinstance(value, int) and abs(value) >= LARGEST:
            raise ValueError(f"the whole number {str(value)[:40]} has more than 64 bits; write it as a text")
        return json.dumps(value, ensure_ascii=False)
    if isinstance(feature, Mapping):
        return {name: _written(value.get(name), inner) for name, inner in feature.items()}
    inner = getattr(feature, "feature", None)
    return value if inner is None else [_written(item, inner) for item in value]


def _stored(feature: Any) -> pa.DataType:
    """The Arrow storage type, with JSON as text."""
    if isinstance(feature, Mapping):
        return pa.struct({name: _stored(inner) for name, inner in feature.items()})
    if is_json(feature):
        return pa.string()
    inner = getattr(feature, "feature", None)
    return feature() if inner is None else pa.list_(_stored(inner))
