"""The training rows of one source of a stream: its shards, and which of their rows are used.

In: a `data` section, and the columns that a task reads. Out: rows of a shard a chunk at a time, called as the task
calls them, without those that are left out; or a `RunError` that names the source, the file and its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from lockstep.config.data_sources import OneSource, is_address
from lockstep.config.run import RunError
from lockstep.config.sections import DataSection
from lockstep.data import filtering, missing_values, mixed, nested_columns, remote, shard_files, source
from lockstep.data.eval_hashes import EvalHashes
from lockstep.data.shard_cache import ShardCache, Unfetched, named, unpinned
from lockstep.data.shard_files import Chunk, Found, Shard
from lockstep.data.tokens import Make

if TYPE_CHECKING:
    from datasets import Dataset

Identity = tuple[str, int, int | str]
Whole = Callable[["Dataset", str], "Dataset"]  # of rows of a file of this name those that lack nothing


@dataclass(frozen=True)
class Used:
    """The rows of a chunk that are used."""

    rows: Dataset
    filtered: int  # others, which `data.filter` leaves out
    dropped: int  # and those that stand in validation or test
    standing: np.ndarray  # numbers of the examples of these that it has, int64, each once


@dataclass(frozen=True)
class StreamingSource:
    """The rows of one source."""

    data: DataSection
    columns: Mapping[str, str]  # that the task reads, by their keys in the run file
    whole: Whole
    plain: str | None = None  # as `shard_files.shard` has it
    within: str | None = None  # the column that those may be in which are not there
    entry: OneSource | None = None  # of a mixture
    among: int = 1  # sources of it
    held_out: EvalHashes | None = None
    files: list[Path] = field(default_factory=list)
    copies: ShardCache | None = None  # of files that are elsewhere: then `files` are where their copies lie

    def found(self) -> StreamingSource:
        """With its files. Errors: `RunError` where there are none, or one that cannot be streamed."""
        with self.named():
            mixed.theirs(self.entry, self.columns)
            found = remote.shards(self.data, source.local_splits, self.among) if remote.given(self.data) else None
            copies = found if isinstance(found, ShardCache) else None
            here = found if isinstance(found, list) else []
            files = copies.paths if copies else here or (source.local_splits(self.data) or {}).get("train") or []
            if not files:
                raise RunError("data.train: there is no file to stream; name them in data.train or data.source")
            for file in files:
                self.opened(file)
            if copies:
                copies.check()
        return replace(self, files=files, copies=copies)

    def known(self, facts: Sequence[Identity]) -> StreamingSource:
        """With the files of an index."""
        if not any(is_address(name) for name, _, _ in facts):
            return replace(self, files=[Path(name) for name, _, _ in facts])
        told = [(name, size, str(tag)) for name, size, tag in facts]
        copies = ShardCache(told, self.data.stream_cache_gb, self.among)
        return replace(self, files=copies.paths, copies=copies)

    @contextmanager
    def named(self) -> Iterator[None]:
        """Errors that are raised in here name the source, where there are several."""
        try:
            yield
        except Unfetched as error:
            raise Unfetched(self.told(str(error))) from error
        except RunError as error:
            if self.entry is None:
                raise
            raise RunError(self.told(str(error))) from error

    def told(self, text: str) -> str:
        """A message that names the source, where there are several."""
        begins = "data.sources: "
        return text if self.entry is None or text.startswith(begins) else f"{begins}{self.entry.name}: {text}"

    def called(self, file: Path) -> str:
        """A shard, for a person."""
        return named(str(file)) if self.copies else str(file)

    def opened(self, file: Path) -> Shard:
        """A shard. Errors: `RunError` where it is none that can be streamed."""
        how = self.copies.opened if self.copies else shard_files.opened
        return shard_files.shard(file, self.plain, self.wanted, how)

    @property
    def wanted(self) -> list[str]:
        """All columns, or paths, that are looked at, as they are called in the files."""
        return list(dict.fromkeys([*mixed.theirs(self.entry, self.columns).values(), *self.data.filter]))

    def used(self, found: Found, file: Path) -> Used:
        """Errors: `RunError`."""
        rows = _dataset(found, self.wanted, file, self.data.drop_missing, self.within)
        _, holds = filtering.holding(rows, self.data, "train", file.name, None)
        some = rows if holds.all() else rows.select(np.flatnonzero(holds))
        if len(some):
            if self.entry is None:
                some = nested_columns.added(some, self.columns, "train", file.name)
            else:
                some = mixed.with_names(mixed.called(some, self.entry, self.columns, "train", file.name))
            try:
                some = self.whole(some, file.name)
            except missing_values.NothingLeft:
                some = some.select([])
        standing = self.held_out.standing(some) if self.held_out and len(some) else np.full(len(some), -1)
        numbers, dropped = np.unique(standing[standing >= 0]), 0
        if self.held_out and self.held_out.drop and len(numbers):
            dropped = int((standing >= 0).sum())
            some = some.select(np.flatnonzero(standing < 0))
        return Used(some, int(len(holds) - holds.sum()), dropped, numbers)

    def made(self, found: Found, file: Path, chunk: Chunk, make: Make) -> tuple[pa.RecordBatch | None, Used]:
        """The examples of a chunk, and the rows that they are made of. Errors: `RunError`."""
        with self.counting(file, chunk):
            used = self.used(found, file)
            return make(used.rows) if len(used.rows) else None, used

    def of(self, file: Path) -> Iterator[Dataset]:
        """The rows that are used of a shard, a chunk at a time. Errors: `RunError`."""
        with self.named():
            for chunk, found in self.opened(file).walk():
                with self.counting(file, chunk):
                    used = self.used(found, file)
                yield used.rows

    @contextmanager
    def counting(self, file: Path, chunk: Chunk) -> Iterator[None]:
        """Errors that are raised in here name the file, and from which of its rows on they count."""
        try:
            yield
        except RunError as error:
            raise RunError(f"{error} (rows are counted from row {chunk.row:,} of {file})") from None

    @property
    def facts(self) -> list[Identity]:
        """Path, size and time of each file, or address, size and tag."""
        if self.copies is not None:
            return [*self.copies.facts]
        return [(str(f.resolve()), f.stat().st_size, f.stat().st_mtime_ns) for f in self.files]

    @property
    def identities(self) -> list[Identity]:
        """Path, size and time of each file, whatever revision of the Hub's an address names."""
        return [(unpinned(name), size, tag) for name, size, tag in self.facts]


def _dataset(found: Found, wanted: list[str], file: Path, lenient: bool, within: str | None) -> Dataset:
    """The columns of a chunk that are read, or that the paths among `wanted` lead into. `lenient`: one that is not
    there has nothing in every row. Errors: `RunError`."""
    import datasets
    from datasets.arrow_writer import OptimizedTypedSequence

    names = found.column_names if isinstance(found, pa.Table) else list(found)
    roots: list[str] = []
    lacking: list[str] = []
    for path in wanted:
        parts = path.split(".")
        prefixes = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
        root = next((prefix for prefix in prefixes if prefix in names), None)
        root = within if root is None and within in names else root
        if root is None and not lenient:
            raise RunError(f"data.train: {file.name} has no column {path!r}; it has {', '.join(names)}")
        (lacking if root is None else roots).append(root or path)
    roots = list(dict.fromkeys(roots))
    try:
        if isinstance(found, pa.Table):
            kinds = datasets.Features.from_arrow_schema(found.schema)
            some = found.select(roots).replace_schema_metadata(None)
        else:
            typed = {root: OptimizedTypedSequence(found[root], col=root) for root in roots}
            some = pa.table({root: pa.array(values) for root, values in typed.items()})
            kinds = datasets.Features({root: values.get_inferred_type() for root, values in typed.items()})
        made = datasets.Dataset(
            datasets.table.InMemoryTable(some),
            info=datasets.DatasetInfo(features=datasets.Features({root: kinds[root] for root in roots})),
            fingerprint="a-chunk",  # kept nowhere: `datasets` would pickle all rows, and hash that, to make one
        )
    except (pa.ArrowException, TypeError, OverflowError, ValueError) as error:
        said = _unlike(found, roots) or " ".join(str(error).split())
        raise RunError(f"data.train: columns of {file.name} hold values of several kinds: {said}") from None
    for path in lacking:
        made = made.add_column(path, [None] * len(made))
    return made


def _unlike(found: Found, roots: list[str]) -> str:
    """The first value that is not of the kind of those before it, for a person; nothing where kinds are told by the
    file."""
    for root in roots if isinstance(found, dict) else []:
        kinds: dict[type, Any] = {}
        for row, value in enumerate(found[root]):
            if value is not None:
                kinds.setdefault(type(value), value)
            if len(kinds) > 1:
                before, now = (repr(each)[:40] for each in kinds.values())
                return f"{root!r} holds {before}, and in row {row:,} {now}"
    return ""
