"""Tokenise once, cached by content; then ragged columns as flat arrays over Arrow memory, without copies.

In: a `datasets.Dataset` and a function that encodes a batch of its rows. Out: an Arrow file in the cache, and
`Columns` over it. One process a machine writes the cache (a file lock); every other one maps the same pages.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from lockstep.config.run import RunError
from lockstep.data.cache import cache_folder, damage, folder_of, inside, kept
from lockstep.distributed.place import PLACE

if TYPE_CHECKING:
    from datasets import Dataset, Features

VERSION = 1  # of what the cache holds; a new number makes old entries unused


@dataclass(frozen=True)
class Prepared:
    """What preparation leaves for the workers: files and facts, no live objects."""

    key: str  # hash of the tokens' content; kept in checkpoints, so that a resume notices other data
    splits: dict[str, str]  # split -> Arrow file
    tokenizer: str  # folder that transformers loads it from; "": there is none
    facts: dict[str, Any]  # of the task: label names, best possible accuracy, where the data came from

    def write(self, path: Path) -> None:
        """With a hash of it all, written aside and synced."""
        values = asdict(self)
        aside = path.with_suffix(f".{os.getpid()}.tmp")
        with open(aside, "w", encoding="utf-8") as file:
            json.dump(values | {"sha256": _hash(values)}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)

    @staticmethod
    def read(path: Path) -> Prepared | None:
        """None when there is nothing usable at `path`. Whether the files it names are sound is asked by `damages`."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            told = values.pop("sha256", None)
            return Prepared(**values) if told == _hash(values) else None
        except (OSError, ValueError, TypeError, AttributeError):
            return None

    @property
    def places(self) -> list[Path]:
        """The files and the folder that it names."""
        return [Path(file) for file in [*self.splits.values(), self.tokenizer] if file]

    def damages(self) -> dict[Path, str]:
        """What is wrong with the files it names, by path."""
        found = {p: damage(p) if inside(p) else None if p.exists() else "is gone" for p in self.places}
        return {path: wrong for path, wrong in found.items() if wrong is not None}


def _hash(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def digest(*values: Any) -> str:
    """A short hash of JSON-able values."""
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:24]


def content(dataset: Dataset, columns: list[str]) -> str:
    """A hash of what some columns of a data set hold, whatever file or order of loading they came from."""
    seen = hashlib.sha256()

    class Sink:
        closed = False

        def write(self, data: Any) -> None:
            seen.update(memoryview(data))

        def flush(self) -> None: ...

    table = dataset.select_columns(columns).with_format("arrow")
    sink = pa.PythonFile(Sink(), mode="w")
    for start in range(0, len(dataset), 10_000):  # fixed batches: the hash must not depend on the file's own chunks
        batch = table[start : start + 10_000].combine_chunks().replace_schema_metadata(None)
        with pa.ipc.new_stream(sink, batch.schema) as stream:
            stream.write_table(batch)
    return seen.hexdigest()[:24]


def encode(
    dataset: Dataset, encoder: Callable[[dict[str, list]], dict[str, list]], features: Features, key: str
) -> str:
    """The Arrow file of `dataset` mapped by `encoder` (batches of columns to batches of columns), made if not yet
    cached, or not as it was.

    The caller holds the lock. `key` stands for the content of both. Errors: `RunError` when it cannot be written.
    """

    done = 0

    def counted(batch: dict[str, list]) -> dict[str, list]:
        nonlocal done
        PLACE.at(f"tokenising, {done:,} of {len(dataset):,} examples")
        done += len(next(iter(batch.values()), []))
        return encoder(batch)

    def make(aside: Path) -> None:
        dataset.map(
            counted,
            batched=True,
            remove_columns=dataset.column_names,
            features=features,
            cache_file_name=str(aside),
            load_from_cache_file=False,
            new_fingerprint=key,
            writer_batch_size=10_000,
        )
        if (written := examples_in(aside)) != len(dataset):
            raise RunError(f"the token cache {cache_folder()}: {written} of {len(dataset)} examples were written")

    return str(kept(folder_of("tokens") / f"{key}.arrow", make))


def examples_in(path: str | Path) -> int:
    """How many examples a file holds."""
    with pa.memory_map(str(path)) as mapped:
        return int(pa.ipc.open_stream(mapped).read_all().num_rows)


class Columns:
    """An encoded split: ragged token columns and flat ones, both views of memory-mapped Arrow buffers."""

    def __init__(self, path: str | Path) -> None:
        with pa.memory_map(str(path)) as mapped:
            self._table = pa.ipc.open_stream(mapped).read_all()
        self._cache: dict[str, Ragged] = {}

    def __len__(self) -> int:
        return int(self._table.num_rows)

    @property
    def names(self) -> list[str]:
        return list(self._table.column_names)

    @property
    def sides(self) -> list[np.ndarray]:
        """Tokens of each example that go through the model, and are padded, on their own: source, then target."""
        return [self.ragged(name).lengths for name in ("input_ids", "target_ids") if name in self.names]

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of each example, both sides: int32 [examples]. What a step is cut by."""
        return np.asarray(sum(self.sides), dtype=np.int32)

    def flat(self, name: str) -> np.ndarray:
        """A column of one number an example."""
        parts = [_numbers(chunk) for chunk in self._table.column(name).chunks]
        return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, np.int64), *parts])

    def texts(self, name: str, rows: np.ndarray) -> list[str]:
        """A column of texts, at some rows."""
        return self._table.column(name).take(pa.array(rows)).to_pylist() if len(rows) else []

    def ragged(self, name: str) -> Ragged:
        """A column of a list of numbers an example."""
        if name not in self._cache:
            self._cache[name] = Ragged(self._table.column(name))
        return self._cache[name]


def _numbers(array: pa.Array) -> np.ndarray:
    """A view of numbers without nulls. Arrow's own `to_numpy` would import pandas, in every rank, at every start."""
    return np.from_dlpack(array)


class Ragged:
    """Lists of numbers over their Arrow chunks; no token is copied until a batch is made."""

    def __init__(self, column: pa.ChunkedArray) -> None:
        chunks = [chunk for chunk in column.chunks if len(chunk)]
        self._values = [_numbers(chunk.values) for chunk in chunks]
        self._offsets = [_numbers(chunk.offsets) for chunk in chunks]
        self._first = np.cumsum([0, *(len(chunk) for chunk in chunks)])
        self.lengths = np.concatenate([np.diff(offsets) for offsets in self._offsets]).astype(np.int32)

    def row(self, index: int) -> np.ndarray:
        """One example's numbers: a view."""
        chunk = int(np.searchsorted(self._first, index, side="right")) - 1
        offsets, within = self._offsets[chunk], index - self._first[chunk]
        return self._values[chunk][offsets[within] : offsets[within + 1]]

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
