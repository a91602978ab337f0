"""A streamed training split, as training sees it: examples by their numbers, those of a few chunks in memory.

In: the index that `Stream` has made, and what encodes rows. Out: `Columns`, in which `hold` decides what stays: the
windows at hand and the part of the next ones that was read beside. What a chunk holds is compared with the index each
time it is read.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from lockstep.config.data_sources import is_address
from lockstep.config.run import RunError
from lockstep.data import stream
from lockstep.data.arrow_cache import Columns, Make, Shards, table_of
from lockstep.data.remote import Unfetched, with_addresses
from lockstep.data.row_reader import Chunk, RowReader
from lockstep.data.stream import Identity, Stream

_LATER = "Once it can be had, the same command goes on"
_MEND = "Put it back as it was, and the same command goes on; with other data begin anew, with another output"

Opened = Callable[[], tuple[Stream, Make]]  # how rows are read, and what makes examples of them


class Unreadable(RunError):
    """A shard that cannot be read any more, or holds other rows than it did."""


class _Chunks(Shards):
    """The record batches of the chunks, made when one of their rows is asked for."""

    def __init__(self, folder: Path, how: Opened) -> None:
        about, table = stream.read_index(folder), table_of(folder / stream.CHUNKS)
        self.folder = folder
        self.files: list[Identity] = [tuple(file) for file in about["files"]]
        self.ends = np.cumsum(about["chunks"])  # chunks of each file and all before
        self.chunks = {name: stream.numbers_of(table, name) for name in table.schema.names}  # memory-mapped
        self.first = np.concatenate([[0], np.cumsum(self.chunks["examples"], dtype=np.int64)])  # 8 bytes a chunk
        self.index, self.names = about, about["names"]
        self._opened, self._lists = {}, {}
        self._how = how
        self._parts: tuple[Stream, Make] | None = None
        self._lock = threading.Lock()  # of the open file; the thread that collates ahead is not the only reader
        self._open: dict[int, tuple[int, RowReader]] = {}  # of each source a file, by its number

    def column(self, shard: int, name: str) -> pa.Array:
        batch = self._opened.get(shard)  # another thread may let it go meanwhile
        if batch is None:
            self._opened[shard] = batch = self._read(shard)
        return batch.column(name)

    def hold(self, current: Sequence[int], behind: Sequence[int]) -> None:
        """These chunks are in memory afterwards, and no others. `behind`: shards that come next, to be fetched where
        they are elsewhere."""
        chunks = self._opened
        rows_of, _ = self.how
        of = np.searchsorted(self.ends, [chunk for chunk in current if chunk not in chunks], side="right")
        coming: dict[int, list[Path]] = {part: [] for part in range(len(rows_of.parts))}
        for file in dict.fromkeys([*of.tolist(), *behind]):
            coming[rows_of.part(file)].append(rows_of.files[file])
        for part, files in coming.items():
            if (copies := rows_of.parts[part].copies) is not None:
                copies.coming(files)
        self._opened = {chunk: chunks[chunk] if chunk in chunks else self._read(chunk) for chunk in current}
        self._lists = {key: lists for key, lists in list(self._lists.items()) if key[0] in self._opened}

    @property
    def how(self) -> tuple[Stream, Make]:
        """How the rows of the files are read, and what makes examples of them."""
        if self._parts is None:
            rows_of, make = self._how()
            self._parts = rows_of.of_index(self.folder), make
        return self._parts

    def _read(self, number: int) -> pa.RecordBatch:
        """Errors: `Unreadable`."""
        with self._lock:
            of = int(np.searchsorted(self.ends, number, side="right"))
            path, size, _ = self.files[of]
            row, rows, at, length = (int(self.chunks[name][number]) for name in ("row", "rows", "at", "size"))
            rows_of, make = self.how
            file, source = rows_of.files[of], rows_of.part(of)
            part, (open_now, shard) = rows_of.parts[source], self._open.pop(source, (-1, None))
            try:
                with part.named():
                    if open_now != of:
                        if shard is not None:
                            shard.close()
                        shard = part.opened(file)
                    assert shard is not None
                    chunk = Chunk(row, rows, at, length)
                    batch, _ = part.examples(shard.read(chunk), file, chunk, make)
                    self._open[source] = of, shard
            except RunError as error:
                mend = _LATER if isinstance(error, Unfetched) else _MEND
                raise Unreadable(error.code, f"{with_addresses(error.message)}{_since(path, size)}. {mend}") from error
            if batch is None or stream.counted(batch)["hash"] != int(self.chunks["hash"][number]):
                rows_there = f"data.train: {path}, rows {row:,} to {row + rows - 1:,}"
                raise Unreadable(
                    "LS2280",
                    part.with_source(f"{rows_there}: they are not what they were when the shards were counted")
                    + f"{_since(path, size)}. {_MEND}",
                )
            return batch


def _since(path: str, size: int) -> str:
    """How a shard differs from before, as its size shows."""
    if is_address(path):
        return ""
    try:
        now = Path(path).stat().st_size
    except OSError:
        return "; the shard is gone"
    return f"; the shard has {now:,} bytes now, and had {size:,}" if now != size else ""


class Streamed(Columns):
    """A training split that is read in chunks; a few of them are in memory."""

    def __init__(self, folder: str | Path, how: Opened) -> None:
        self._shards: _Chunks
        self._shards = _Chunks(Path(folder), how)
        self._cache = {}

    @property
    def shard_sizes(self) -> np.ndarray:
        """Examples of each shard: int64 [shards]."""
        ends = self._shards.first[self._shards.ends]
        return np.diff(np.concatenate([[0], ends]))

    @property
    def sizes_of_sources(self) -> list[np.ndarray]:
        """Examples of each shard by source: [sources]."""
        return np.split(self.shard_sizes, np.cumsum((self._shards.index or {})["sources"])[:-1])

    @property
    def elsewhere(self) -> bool:
        """Whether shards are fetched."""
        return any(each.copies is not None for each in self._shards.how[0].parts)

    def hold(self, near: Sequence[range], behind: Sequence[int] = ()) -> None:
        """Have these examples at hand, in this order of reading, and let all others go. `behind`: the shards that come
        next."""
        chunks: dict[int, None] = {}
        for some in near:
            first, last = self._shards.of(np.array([some.start, some.stop - 1]))
            chunks |= {
                c: None for c in range(int(first), int(last) + 1) if self._shards.first[c + 1] > self._shards.first[c]
            }
        self._shards.hold(list(chunks), behind)

    def longest(self, count: int) -> np.ndarray:
        """The longest example, so many times: no others take more memory, and one chunk is read for it."""
        chunk = int(self._shards.index["longest"]) if self._shards.index else 0
        rows = np.arange(self._shards.first[chunk], self._shards.first[chunk + 1])
        return np.full(min(count, len(self)), rows[int(np.argmax(self.lengths[rows]))], dtype=np.int64)

    def place(self, example: int) -> str:
        """Where an example comes from, for a person."""
        chunks, number = self._shards, int(self._shards.of(example))
        path, _, _ = chunks.files[int(np.searchsorted(chunks.ends, number, side="right"))]
        row, rows = int(chunks.chunks["row"][number]), int(chunks.chunks["rows"][number])
        return f"{path}, rows {row:,} to {row + rows - 1:,}"


def opened(path: str, how: Callable[[], tuple[Stream, Make]]) -> Any:
    """A split, streamed or not."""
    return Streamed(path, how) if path.endswith(stream.ENDING) else Columns(path)
