"""Columns within columns, by dotted paths: answers.text.0 of a mapping of lists, conversation.0.content of a list of
mappings.

In: a data set and a path. Out: what stands there in each row, null where a row has nothing there; or a `RunError` that
says what there is instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lockstep.config.run import RunError

if TYPE_CHECKING:
    from datasets import Dataset

_ROWS = 10_000  # looked at together


def added(dataset: Dataset, columns: Mapping[str, str], split: str, name: str) -> Dataset:
    """Add a column for each path that `columns` (by their keys in the run file) names and that leads into a
    column which is there. Errors: `RunError`."""
    import datasets

    for key, path in columns.items():
        found = _parted(dataset, path)
        if found is None:
            continue
        root, parts = found
        told = _Told(key, path, split, name)
        feature = _feature(dataset, root, parts, told)

        def reached(table: pa.Table, told: _Told = told, parts: tuple[str, ...] = parts, kind: Any = feature) -> Any:
            column = _reach(pa.chunked_array(table.column(0).chunks).combine_chunks(), parts, told)
            return pa.table({told.path: column}, schema=datasets.Features({told.path: kind}).arrow_schema)

        inner = dataset.select_columns([root]).with_format("arrow")
        only = inner.map(
            reached,
            batched=True,
            batch_size=_ROWS,
            remove_columns=[root],
            features=datasets.Features({path: feature}),
            load_from_cache_file=False,
        )
        dataset = datasets.concatenate_datasets([dataset, only.with_format(None)], axis=1)
    return dataset


def values(dataset: Dataset, key: str, path: str, split: str, name: str) -> Iterator[pa.Array]:
    """What a column, or a path, holds, some rows at a time. Errors: `RunError`, also where there is no such column."""
    found = (path, ()) if path in dataset.column_names else _parted(dataset, path)
    if found is None:
        raise RunError(
            f"{key}: the {split} split of {name} has no column {path!r}; it has {', '.join(dataset.column_names)}"
        )
    root, parts = found
    column = dataset.select_columns([root]).with_format("arrow")
    for start in range(0, len(dataset), _ROWS):
        yield _reach(column[start : start + _ROWS].column(0).combine_chunks(), parts, _Told(key, path, split, name))


def _parted(dataset: Dataset, path: str) -> tuple[str, tuple[str, ...]] | None:
    """The column that a path begins with, by its longest name, and the parts that lead into it; None where the whole is
    a column, or none is."""
    if path in dataset.column_names:
        return None
    parts = path.split(".")
    for count in range(len(parts) - 1, 0, -1):
        if (root := ".".join(parts[:count])) in dataset.column_names:
            return root, tuple(parts[count:])
    return None


def within(path: str, value: Any) -> str:
    """What of a value that is no text might be meant, for the end of a message."""
    steps = [path]
    while isinstance(value, list | dict) and value:
        steps.append("0" if isinstance(value, list) else str(next(iter(value))))
        value = value[0] if isinstance(value, list) else value[steps[-1]]
    return f"; what is in it is named like {'.'.join(steps)}" if len(steps) > 1 and isinstance(value, str) else ""


class _Told:
    """Where a path was given, for messages."""

    def __init__(self, key: str, path: str, split: str, name: str) -> None:
        self.key, self.path, self.split, self.name = key, path, split, name

    def wrong(self, parts: tuple[str, ...], why: str) -> RunError:
        """`parts`: what of the path is left to go."""
        before = self.path.removesuffix("." + ".".join(parts)) if parts else self.path
        return RunError(f"{self.key}: {self.path}: {before!r} of the {self.split} split of {self.name} {why}")


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _reach(column: pa.Array, parts: tuple[str, ...], told: _Told) -> pa.Array:
    """Follow a path into an Arrow array. Errors: `RunError`."""
    for place, part in enumerate(parts):
        rest, kind = parts[place:], column.type
        if pa.types.is_struct(kind):
            names = [kind.field(i).name for i in range(kind.num_fields)]
            if part not in names:
                raise told.wrong(rest, f"has no {part!r}; it has {', '.join(names)}")
            column = pc.struct_field(column, [names.index(part)])
        elif _is_list(kind):
            if not part.removeprefix("-").isdigit():
                within = ".".join([told.path.removesuffix("." + ".".join(rest)), "0", *rest])
                raise told.wrong(rest, f"holds lists: say which of their items, for example {within} (-1: the last)")
            column = _item(column, int(part))
        elif pa.types.is_null(kind):
            return column
        else:
            what = "values of different kinds" if isinstance(kind, pa.BaseExtensionType) else f"{kind}s"
            raise told.wrong(rest, f"holds {what}, in which there is no {part!r}")
    return column


def _item(lists: pa.Array, place: int) -> pa.Array:
    """The item of each list at a place, from its end where that is negative; null where a list is too short."""
    lengths = pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    starts = np.cumsum(lengths) - lengths  # in what `flatten` gives, which leaves out null lists
    there = lengths >= (place + 1 if place >= 0 else -place)
    at = starts + (place if place >= 0 else lengths + place)
    return pc.list_flatten(lists).take(pa.array(np.where(there, at, 0), mask=~there))


def _feature(dataset: Dataset, root: str, parts: Iterable[str], told: _Told) -> Any:
    """The type of what a path leads to, as `datasets` has it: names of labels are kept."""
    from datasets.features.features import generate_from_arrow_type

    feature: Any = dataset.features[root]
    for part in parts:
        inner = getattr(feature, "feature", None)
        feature = feature.get(part) if isinstance(feature, dict) else inner
    if feature is None or isinstance(feature, dict):
        sample = dataset.select_columns([root]).with_format("arrow")[:1].column(0).combine_chunks()
        return generate_from_arrow_type(_reach(sample, tuple(parts), told).type)
    return feature
