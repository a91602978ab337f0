"""A few raw rows of a run, stored with the prepared data, and the examples made from them.

In: the final splits of a data set. Out: a fact of `Prepared`, and `RawRows` from it, so that a reference computation
can start at the text, as the run did. For a task with one example per row, the examples are those of the split, by
number; for a task that joins and splits texts, those that the task creates from these rows alone.
"""

from __future__ import annotations

import base64
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lockstep.config.lazy import lazy
from lockstep.config.run import RunError
from lockstep.data.arrow_cache import Columns, Prepared
from lockstep.data.order import permute

if TYPE_CHECKING:
    from datasets import Dataset

    from lockstep.data import row_reader, value_types
    from lockstep.data.arrow_cache import Make
else:
    row_reader, value_types = lazy("lockstep.data", "row_reader", "value_types")

VERSION = 2  # version of the stored rows; changing it selects rows again
BYTES = "base64"  # key of a mapping that holds bytes
FACT = "raw_rows"  # among the facts of `Prepared`
_FIRST = 24  # rows of the first steps, in the default order
_SPREAD, _LONGEST = 8, 3  # rows selected by position, and by length
_CHARACTERS = 8  # characters stored per token of the maximum length
_BYTES = 256 * 1024  # maximum total size of the rows
_EXAMPLES = 64  # maximum examples stored for tasks that join texts


class Makes(Protocol):
    """The parts of a task's interface that turn rows into examples."""

    row_is_example: ClassVar[bool]
    streams: ClassVar[bool]

    def example_maker(self, folder: str, facts: Mapping[str, Any]) -> Make: ...


@dataclass(frozen=True)
class RawRows:
    """Raw rows and their examples."""

    split: str  # split of the rows
    rows: list[dict[str, Any]]  # column -> value
    examples: Columns | None  # created from these rows alone; None: examples of the split
    at: np.ndarray  # numbers of the examples: int64

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> RawRows | None:
        """Raw rows among the facts of `Prepared`, or None."""
        stored = facts.get(FACT)
        if not stored:
            return None
        if "examples" not in stored:
            return cls(stored["split"], stored["rows"], None, np.array(stored["at"], dtype=np.int64))
        schema = pa.schema([pa.field(name, _TYPES[kind]) for name, kind in stored["types"].items()])
        examples = Columns(pa.record_batch(stored["examples"], schema=schema))
        return cls(stored["split"], stored["rows"], examples, np.arange(len(examples)))


_TYPES = {str(kind): kind for kind in (pa.int32(), pa.int64(), pa.float32(), pa.float64())}
_TYPES |= {f"list<{kind}>": pa.list_(kind) for kind in list(_TYPES.values())}


# -- preparation -----------------------------------------------------------------------------------------------------


def fact(splits: Mapping[str, Dataset], columns: Sequence[str], tokens: int, seed: int) -> dict[str, Any]:
    """Select rows of train (or of another split if train is streamed): evenly spaced ones, those with the longest
    texts, and those of the first step. Texts longer than an example needs are truncated and their rows noted as `cut`.

    `tokens`: of the longest example.
    """
    split = next((name for name in ("train", *splits) if name in splits), None)
    if split is None:
        return {}
    some = splits[split].select_columns(list(dict.fromkeys(c for c in columns if c in splits[split].column_names)))
    places = [*np.linspace(0, len(some) - 1, _SPREAD).astype(np.int64).tolist(), *_longest(some).tolist()]
    if split == "train":
        first = np.arange(min(_FIRST, len(some)), dtype=np.uint64)
        places += permute(first, len(some), seed, 0).tolist()
    sample: dict[str, Any] = {"split": split, "at": [], "rows": [], "cut": []}
    size = 0
    for place in dict.fromkeys(places):
        whole = _as_json(some[place])
        row = _shortened(whole, max(2000, _CHARACTERS * tokens))
        try:
            size += len(json.dumps(row))
        except (TypeError, ValueError):  # such as dates, which are not JSON
            continue
        if size > _BYTES and sample["rows"]:
            break
        sample["at"].append(place)
        sample["rows"].append(row)
        sample["cut"].append(row != whole)
    return {FACT: sample} if sample["rows"] else {}


def _longest(dataset: Dataset) -> np.ndarray:
    """Rows with the longest texts, longest first: int64. Empty if no column holds only texts."""
    lengths = np.zeros(len(dataset), dtype=np.int64)
    texts = [n for n, f in dataset.features.items() if getattr(f, "dtype", "") in ("string", "large_string")]
    for name in texts:
        table = dataset.select_columns([name]).with_format("arrow")
        for start in range(0, len(dataset), 65_536):
            column = table[start : start + 65_536].column(0)
            byte_lengths = pc.fill_null(pc.binary_length(column), 0).combine_chunks()
            lengths[start : start + len(byte_lengths)] += np.from_dlpack(byte_lengths).astype(np.int64)
    return np.argsort(-lengths, kind="stable")[:_LONGEST] if texts else np.empty(0, np.int64)


def _shortened(value: Any, most: int) -> Any:
    """Truncate every text in a value, except encoded bytes."""
    if isinstance(value, str):
        return value[:most]
    if isinstance(value, Mapping) and BYTES not in value:
        return {key: _shortened(each, most) for key, each in value.items()}
    return [_shortened(each, most) for each in value] if isinstance(value, list) else value


def _as_json(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row with bytes converted to JSON mappings."""
    return {k: {BYTES: base64.b64encode(v).decode()} if isinstance(v, bytes) else v for k, v in row.items()}


def with_examples(prepared: Prepared, task: Makes) -> Prepared:
    """Add the examples of the raw rows to the prepared data, if they are not part of the split; remove the raw rows if
    their examples are unknown."""
    stored = prepared.facts.get(FACT)
    if stored is None:
        return prepared
    facts = {key: value for key, value in prepared.facts.items() if key != FACT}
    if task.row_is_example:
        whole = [i for i, cut in enumerate(stored["cut"]) if not cut]
        content = {"split": stored["split"], **{key: [stored[key][i] for i in whole] for key in ("at", "rows")}}
        return replace(prepared, facts=facts | ({FACT: content} if whole else {}))
    if not task.streams:
        return replace(prepared, facts=facts)
    try:
        rows = value_types.dataset_of(row_reader.columns_of(stored["rows"]))  # an absent key is not a null
        batch = task.example_maker(prepared.tokenizer, prepared.facts)(rows).slice(0, _EXAMPLES)
    except RunError:
        return replace(prepared, facts=facts)
    types = {field.name: str(field.type).replace("item: ", "").replace("element: ", "") for field in batch.schema}
    types = {name: kind for name, kind in types.items() if kind in _TYPES}
    examples = {name: batch.column(name).to_pylist() for name in types}
    content = {"split": stored["split"], "rows": stored["rows"], "types": types, "examples": examples}
    return replace(prepared, facts=facts | ({FACT: content} if len(batch) else {}))


# -- selection -------------------------------------------------------------------------------------------------------


def groups(lengths: Sequence[int], most: int) -> dict[str, list[int]]:
    """Group examples by `lengths` for joint computation: the first ones, the longest with the shortest, and ones of
    equal length (one twice if all differ). At most `most` each."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    by_length = itertools.groupby(order, key=lambda i: lengths[i])
    alike = [same for _, some in by_length if len(same := list(some)) > 1]
    equal = min(alike, key=lambda same: lengths[same[0]]) if alike else [order[-1]] * 2
    return {
        "the first examples": list(range(len(lengths)))[:most],
        "the longest example": [order[0], order[-1]][:most],
        "examples of equal length": equal[:most],
    }
