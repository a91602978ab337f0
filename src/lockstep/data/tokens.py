"""Tokenise once, cached by content.

In: a `datasets.Dataset` and a function that encodes a batch of its rows. Out: a folder of Arrow files in the cache,
which `Columns` maps; and `Prepared`, what a run needs to know of it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from lockstep.config.run import RunError
from lockstep.data import arrow_cache
from lockstep.data.cache import damage, inside
from lockstep.data.columns import Columns as Columns
from lockstep.data.columns import examples_in as examples_in
from lockstep.distributed.hardware import available_cores

if TYPE_CHECKING:
    from datasets import Dataset, Features

Make = Callable[["Dataset"], pa.RecordBatch]  # examples of rows

_HASHED = 10_000  # rows whose bytes are hashed together
_AHEAD_BYTES = 64 * 2**20  # of them, at most, that wait to be hashed
VERSION = 1  # of what the cache holds; a new number makes old entries unused


@dataclass(frozen=True)
class Prepared:
    """What preparation leaves for the workers: files and facts, no live objects."""

    key: str  # hash of the tokens' content; kept in checkpoints, so that a resume notices other data
    splits: dict[str, str]  # split -> folder of Arrow files, or one file
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
    """A hash of what some columns of a data set hold, whatever file or order of loading they came from. It is one hash
    of all bytes in order, which one core makes; what it is made of is read and written out by others meanwhile."""
    seen = hashlib.sha256()
    table = dataset.select_columns(columns).with_format("arrow")

    def written(start: int) -> pa.Buffer:
        batch = table[start : start + _HASHED].combine_chunks().replace_schema_metadata(None)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema) as stream:
            stream.write_table(batch)
        return sink.getvalue()

    size = dataset.data.nbytes / max(1, dataset.data.num_rows) * _HASHED
    ahead = int(min(2 * available_cores(), max(1, _AHEAD_BYTES // max(1, size))))
    with ThreadPoolExecutor(ahead, "lockstep-hash") as pool:
        asked: deque[Future[pa.Buffer]] = deque()
        for start in range(0, len(dataset), _HASHED):  # fixed: the hash must not depend on the file's own chunks
            asked.append(pool.submit(written, start))
            if len(asked) > ahead:
                seen.update(asked.popleft().result())
        for each in asked:
            seen.update(each.result())
    return seen.hexdigest()[:24]


def encoded(
    batch: dict[str, list], encoder: Callable[[dict[str, list]], dict[str, Any]], schema: pa.Schema
) -> pa.RecordBatch:
    """What `encoder` makes of some rows. Errors: `RunError` where it is not as many examples."""
    found, count = encoder(batch), len(next(iter(batch.values()), []))
    columns = [pa.array(found[field.name], field.type) for field in schema]
    if any(len(column) != count for column in columns):
        sizes = ", ".join(f"{len(c)} of {n}" for c, n in zip(columns, schema.names, strict=True))
        raise RunError(f"the encoder of this task made {sizes} of {count} examples")
    return pa.record_batch(columns, schema=schema)


def encode(dataset: Dataset, encoder: Callable[[dict[str, list]], dict[str, Any]], features: Features, key: str) -> str:
    """The shards of `dataset` mapped by `encoder` (batches of columns to batches of columns), made if not yet cached,
    or not as they were. The encoder runs in several processes, and sees some rows at a time.

    The caller holds the lock. `key` stands for the content of both. Errors: `RunError` when it cannot be written.
    """
    schema = pa.schema(list(features.arrow_schema))

    def make(rows: range) -> Iterator[tuple[pa.RecordBatch, int]]:
        for _, batch in arrow_cache.batches(dataset, rows):
            found = encoded(batch, encoder, schema)
            yield found, len(found)

    return arrow_cache.write_split(key, schema, arrow_cache.cuts(dataset), make, "tokenising")
