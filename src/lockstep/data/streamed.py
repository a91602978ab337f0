"""A streamed training split: examples by number, with a few chunks in memory.

In: the index of a `Stream`, and the encoding function. Out: `Columns`, in which `hold` decides which chunks stay in
memory: the current windows and the prefetched part of the next ones. A chunk is compared with the index whenever it is
read.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from lockstep.config.data_sources import is_address
from lockstep.config.lazy import lazy
from lockstep.config.run import RunError
from lockstep.data.arrow_cache import Columns, Make, Shards, table_of

if TYPE_CHECKING:
    from lockstep.data import remote, row_reader, stream
else:  # a split that is not streamed needs none of them
    remote, row_reader, stream = lazy("lockstep.data", "remote", "row_reader", "stream")

_LATER = "When it is available again, the same command resumes"
_MEND = "Restore the file, and the same command resumes; for other data start over, with another output=FOLDER"

Opened = Callable[[], tuple["stream.Stream", Make]]  # -> stream of rows, encoding function


class Unreadable(RunError):
    """A shard is no longer readable, or its rows have changed."""


class _Chunks(Shards):
    """The record batches of the chunks, encoded on first access."""

    def __init__(self, folder: Path, how: Opened) -> None:
        about, table = stream.read_index(folder), table_of(folder / stream.CHUNKS)
        self.folder = folder
        self.files: list[stream.Identity] = [tuple(file) for file in about["files"]]
        self.ends = np.cumsum(about["chunks"])  # cumulative chunks per file
        self.chunks = {name: stream.numbers_of(table, name) for name in table.schema.names}  # memory-mapped
        self.first = np.concatenate([[0], np.cumsum(self.chunks["examples"], dtype=np.int64)])  # 8 bytes per chunk
        self.index, self.names = about, about["names"]
        self._opened, self._lists = {}, {}
        self._how = how
        self._parts: tuple[stream.Stream, Make] | None = None
        self._lock = threading.Lock()  # for the open file: several threads read
        self._open: dict[int, tuple[int, row_reader.RowReader]] = {}  # source -> (file number, reader)

    def column(self, shard: int, name: str) -> pa.Array:
        batch = self._opened.get(shard)  # another thread may evict it
        if batch is None:
            self._opened[shard] = batch = self._read(shard)
        return batch.column(name)

    def hold(self, current: Sequence[int], behind: Sequence[int]) -> None:
        """Keep exactly these chunks in memory. `behind`: next shards, to prefetch if remote."""
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
    def how(self) -> tuple[stream.Stream, Make]:
        """The stream that reads rows, and the function that encodes them."""
        if self._parts is None:
            rows_of, make = self._how()
            self._parts = rows_of.of_index(self.folder), make
        return self._parts

    def _read(self, number: int) -> pa.RecordBatch:
        """Read and encode a chunk. Errors: `Unreadable`."""
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
                    chunk = row_reader.Chunk(row, rows, at, length)
                    batch, _ = part.examples(shard.read(chunk), file, chunk, make)
                    self._open[source] = of, shard
            except RunError as error:
                mend = _LATER if isinstance(error, remote.Unfetched) else _MEND
                message = remote.with_addresses(error.message)
                raise Unreadable(error.code, f"{message}{_since(path, size)}. {mend}") from error
            if batch is None or stream.counted(batch)["hash"] != int(self.chunks["hash"][number]):
                rows_there = f"data.train: {path}, rows {row:,} to {row + rows - 1:,}"
                raise Unreadable(
                    "LS2280",
                    part.with_source(f"{rows_there}: the rows have changed since the shards were indexed")
                    + f"{_since(path, size)}. {_MEND}",
                )
            return batch


def _since(path: str, size: int) -> str:
    """Describe how a shard's size has changed."""
    if is_address(path):
        return ""
    try:
        now = Path(path).stat().st_size
    except OSError:
        return "; the shard is gone"
    return f"; the shard has {now:,} bytes now, and had {size:,}" if now != size else ""


class Streamed(Columns):
    """A training split that is read in chunks; only a few are in memory."""

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
        """Examples of each shard, grouped by source: [sources]."""
        return np.split(self.shard_sizes, np.cumsum((self._shards.index or {})["sources"])[:-1])

    @property
    def elsewhere(self) -> bool:
        """Whether shards are remote."""
        return any(each.copies is not None for each in self._shards.how[0].parts)

    def hold(self, near: Sequence[range], behind: Sequence[int] = ()) -> None:
        """Keep only these examples in memory, in reading order. `behind`: next shards."""
        chunks: dict[int, None] = {}
        for some in near:
            first, last = self._shards.of(np.array([some.start, some.stop - 1]))
            chunks |= {
                c: None for c in range(int(first), int(last) + 1) if self._shards.first[c + 1] > self._shards.first[c]
            }
        self._shards.hold(list(chunks), behind)

    def longest(self, count: int) -> np.ndarray:
        """The longest example, repeated up to `count` times: no example needs more memory, and only one chunk is
        read."""
        chunk = int(self._shards.index["longest"]) if self._shards.index else 0
        rows = np.arange(self._shards.first[chunk], self._shards.first[chunk + 1])
        return np.full(min(count, len(self)), rows[int(np.argmax(self.lengths[rows]))], dtype=np.int64)

    def place(self, example: int) -> str:
        """Describe where an example comes from."""
        chunks, number = self._shards, int(self._shards.of(example))
        path, _, _ = chunks.files[int(np.searchsorted(chunks.ends, number, side="right"))]
        row, rows = int(chunks.chunks["row"][number]), int(chunks.chunks["rows"][number])
        return f"{path}, rows {row:,} to {row + rows - 1:,}"
