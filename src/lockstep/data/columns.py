"""An encoded split: ragged token columns and flat ones, as views of memory-mapped Arrow buffers.

In: a folder of shards, or a single file. Out: `Columns`, in which a row is found by its number without anything that
grows with how many there are: a shard is opened when one of its rows is asked for.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

INDEX = "index.json"  # of a folder of shards: examples of each, tokens of all, and the longest of all
LONGEST = 16_384  # examples whose rows it has
_SIDES = ("input_ids", "target_ids")  # columns of tokens that go through the model


class Shards:
    """The record batches of a split, in order."""

    def __init__(self, path: str | Path | pa.RecordBatch) -> None:
        self.index: dict[str, Any] | None = None
        self._opened: dict[int, pa.RecordBatch] = {}
        self._lists: dict[tuple[int, str], tuple[np.ndarray, np.ndarray]] = {}  # of the shards that were used
        self._files: list[Path] = []
        if isinstance(path, pa.RecordBatch):
            whole = pa.Table.from_batches([path])
            self._opened, sizes = {0: path}, [len(path)]
        elif (path := Path(path)).is_dir():
            self.index = json.loads((path / INDEX).read_text(encoding="utf-8"))
            self._files = [path / name for name in self.index["rows"]]
            sizes = list(self.index["rows"].values())
        else:  # as lockstep wrote them before, and tasks of one's own do
            whole = table_of(path)
            self._opened = dict(enumerate(whole.to_batches()))
            sizes = [len(batch) for batch in self._opened.values()]
        self.first = np.cumsum([0, *sizes])  # [shards + 1]
        self.names: list[str] = (table_of(self._files[0]) if self._files else whole).schema.names

    def __len__(self) -> int:
        return int(self.first[-1])

    def of(self, rows: Any) -> Any:
        """The shard that each row is in, or a single one."""
        return np.searchsorted(self.first, rows, side="right") - 1

    def lists(self, shard: int, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Values and offsets of a column of lists of a shard: views."""
        found = self._lists.get((shard, name))
        if found is None:
            column = self.column(shard, name)
            self._lists[shard, name] = found = _numbers(column.values), _numbers(column.offsets)
        return found

    def column(self, shard: int, name: str) -> pa.Array:
        """A column of a shard, memory-mapped."""
        if shard not in self._opened:
            (self._opened[shard],) = table_of(self._files[shard]).combine_chunks().to_batches()  # it is one already
        return self._opened[shard].column(name)


def table_of(path: Path) -> pa.Table:
    """What an Arrow file holds, memory-mapped."""
    with pa.memory_map(str(path)) as mapped:
        return pa.ipc.open_stream(mapped).read_all()


class Numbers(np.lib.mixins.NDArrayOperatorsMixin):
    """One number an example, read for the rows that are asked for. Anything else that arrays do is done to all of them
    at once, in memory."""

    def __init__(self, shards: Shards, numbers: Callable[[int, np.ndarray], np.ndarray]) -> None:
        """`numbers` are those of a shard, at rows that are counted within it."""
        self._shards, self._numbers = shards, numbers

    def __len__(self) -> int:
        return len(self._shards)

    def __getitem__(self, rows: Any) -> Any:
        if isinstance(rows, slice) or np.asarray(rows).dtype.kind == "b":
            return np.asarray(self)[rows]
        asked = np.asarray(rows, dtype=np.int64)
        if asked.size and not -len(self) <= asked.min() <= asked.max() < len(self):
            raise IndexError(f"rows {asked.min()} to {asked.max()} of {len(self)}")
        flat = np.where(asked < 0, asked + len(self), asked).ravel()
        of = self._shards.of(flat)
        order = np.argsort(of, kind="stable")
        parts = np.split(order, np.flatnonzero(np.diff(of[order])) + 1)  # by shard
        found = [self._numbers(int(of[p[0]]), flat[p] - self._shards.first[of[p[0]]]) for p in parts if len(p)]
        out = np.empty(len(flat), dtype=found[0].dtype if found else np.int64)
        out[order] = np.concatenate(found) if found else out
        return out.reshape(asked.shape)[()]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        parts = [part for _, part in self.parts()]
        return np.concatenate([np.empty(0, parts[0].dtype if parts else np.int64), *parts]).astype(dtype or None)

    def parts(self) -> Iterator[tuple[int, np.ndarray]]:
        """The numbers shard by shard, each with the number of its first row."""
        for shard, (first, stop) in enumerate(itertools.pairwise(self._shards.first.tolist())):
            if stop > first:
                yield first, self._numbers(shard, np.arange(stop - first))

    def __array_ufunc__(self, ufunc: Any, method: str, *given: Any, **options: Any) -> Any:
        return getattr(ufunc, method)(*(np.asarray(g) if isinstance(g, Numbers) else g for g in given), **options)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(np.asarray(self), name)


class Columns:
    """An encoded split: ragged token columns and flat ones."""

    def __init__(self, path: str | Path | pa.RecordBatch) -> None:
        """`path`: of a folder of shards or a file; or examples in memory."""
        self._shards = Shards(path)
        self._cache: dict[str, Ragged] = {}

    def __len__(self) -> int:
        return len(self._shards)

    @property
    def names(self) -> list[str]:
        return self._shards.names

    @property
    def sides(self) -> list[Any]:
        """Tokens of each example that go through the model, and are padded, on their own: source, then target."""
        return [self.ragged(name).lengths for name in _SIDES if name in self.names] or [self.lengths]

    @cached_property
    def lengths(self) -> Any:
        """Tokens of each example, both sides: int32 [examples]; 1 of examples without tokens. What a step is cut by."""
        sides = [self.ragged(name) for name in _SIDES if name in self.names]
        if len(sides) == 1:
            return sides[0].lengths
        if not sides:  # no tokens: every example counts the same
            return Numbers(self._shards, lambda shard, rows: np.ones(len(rows), dtype=np.int32))

        def both(shard: int, rows: np.ndarray) -> np.ndarray:
            return np.asarray(sum(side.lengths_in(shard, rows) for side in sides), dtype=np.int32)

        return Numbers(self._shards, both)

    @property
    def mean_length(self) -> float:
        """Of all examples; nothing is read for it where the index says it."""
        if self._shards.index is not None:
            return float(self._shards.index["tokens"]) / len(self)
        return float(self.lengths.mean())

    def longest(self, count: int) -> np.ndarray:
        """The rows of the longest examples, the longest first, and of equal ones the first: int64 [count], fewer where
        there are not so many."""
        index = self._shards.index
        if index is not None and count <= len(index["longest"]):
            return np.asarray(index["longest"][:count], dtype=np.int64)
        return longest_of(self.lengths, count)

    def flat(self, name: str) -> Any:
        """A column of one number an example: as an array, of which nothing is read but the rows that are asked for."""
        return Numbers(self._shards, lambda shard, rows: _numbers(self._shards.column(shard, name))[rows])

    def texts(self, name: str, rows: np.ndarray) -> list[str]:
        """A column of texts, at some rows."""
        first, of = self._shards.first, self._shards.of(rows)
        return [
            self._shards.column(int(shard), name)[int(row - first[shard])].as_py()
            for shard, row in zip(of, rows, strict=True)
        ]

    def ragged(self, name: str) -> Ragged:
        """A column of a list of numbers an example."""
        if name not in self._cache:
            self._cache[name] = Ragged(self._shards, name)
        return self._cache[name]


def longest_of(lengths: Any, count: int) -> np.ndarray:
    """Find the longest examples by looking at all lengths, a shard at a time (`Columns.longest`)."""
    rows, found = np.empty(0, np.int64), np.empty(0, np.int64)
    for first, part in lengths.parts() if isinstance(lengths, Numbers) else [(0, np.asarray(lengths))]:
        least = int(found[-1]) if len(found) == count else -1
        here = np.flatnonzero(part > least)
        rows, found = np.concatenate([rows, here + first]), np.concatenate([found, part[here]])
        best = np.argsort(-found, kind="stable")[:count]
        rows, found = rows[best], found[best]
    return rows


def index_of(folder: Path, files: list[Path]) -> dict[str, Any]:
    """What is kept of a folder of shards, so that no start has to look at all of them."""
    rows = {}
    for file in files:
        with pa.memory_map(str(file)) as mapped:
            rows[file.name] = int(pa.ipc.open_stream(mapped).read_all().num_rows)
    (folder / INDEX).write_text(json.dumps({"rows": rows}), encoding="utf-8")
    columns = Columns(folder)
    tokens = sum(int(part.sum(dtype=np.int64)) for _, part in columns.lengths.parts())
    return {"rows": rows, "tokens": tokens, "longest": longest_of(columns.lengths, LONGEST).tolist()}


def examples_in(path: str | Path) -> int:
    """How many examples a split holds."""
    return len(Shards(path))


def _numbers(array: pa.Array) -> np.ndarray:
    """A view of numbers without nulls. Arrow's own `to_numpy` would import pandas, in every rank, at every start."""
    return np.from_dlpack(array)


class Ragged:
    """Lists of numbers over their shards; no token is copied until a batch is made."""

    def __init__(self, shards: Shards, name: str) -> None:
        self._shards, self._name = shards, name
        self.lengths = Numbers(shards, self.lengths_in)  # int32 [examples]

    def lengths_in(self, shard: int, rows: np.ndarray) -> np.ndarray:
        """Of rows that are counted within a shard: int32, same shape."""
        offsets = self._shards.lists(shard, self._name)[1]
        return (offsets[rows + 1] - offsets[rows]).astype(np.int32)

    def row(self, index: int) -> np.ndarray:
        """One example's numbers: a view."""
        shard = int(self._shards.of(index))
        values, offsets = self._shards.lists(shard, self._name)
        within = index - int(self._shards.first[shard])
        return values[offsets[within] : offsets[within + 1]]

    def padded(
        self, rows: np.ndarray, fill: int, multiple: int = 1, left: bool = False
    ) -> tuple[np.ndarray, np.ndarray]:
        """Rows padded with `fill` to the longest (rounded up to a `multiple`): int64 [B, T], and the mask of real
        ones."""
        lengths = self.lengths[rows]
        width = max(1, -(-int(lengths.max(initial=1)) // multiple) * multiple)
        out = np.full((len(rows), width), fill, dtype=np.int64)  # [B, T]
        mask = np.zeros((len(rows), width), dtype=np.int64)  # [B, T]
        for i, row in enumerate(rows):
            span = slice(width - lengths[i], None) if left else slice(0, lengths[i])
            out[i, span] = self.row(int(row))
            mask[i, span] = 1
        return out, mask
