"""Encode splits to Arrow shards in the cache, once and on all cores, keyed by content; memory-map them for reading.

In: a `datasets.Dataset` and a function that encodes a batch of its rows. Out: a folder of sealed Arrow files, which
`Columns` maps; and `Prepared`, the files and facts that a run needs.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import itertools
import json
import mmap
import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from lockstep.config.run import RunError
from lockstep.data.cache import cache_folder, cached, damage, folder_of, inside, placed
from lockstep.distributed.hardware import available_cores
from lockstep.track.busy import ACTIVITY

if TYPE_CHECKING:
    from datasets import Dataset, Features


INDEX = "index.json"  # of a folder of shards: examples per shard, total tokens, rows of the longest examples
LONGEST = 16_384  # longest examples listed in the index
SIDES = ("input_ids", "target_ids")  # token columns that are inputs of the model


class Shards:
    """The record batches of a split, in order."""

    def __init__(self, path: str | Path | pa.RecordBatch) -> None:
        self.index: dict[str, Any] | None = None
        self._opened: dict[int, pa.RecordBatch] = {}
        # (shard, column) -> values and offsets, for shards read so far
        self._lists: dict[tuple[int, str], tuple[np.ndarray, np.ndarray]] = {}
        self._files: list[Path] = []
        if isinstance(path, pa.RecordBatch):
            whole = pa.Table.from_batches([path])
            self._opened, sizes = {0: path}, [len(path)]
        elif (path := Path(path)).is_dir():
            self.index = json.loads((path / INDEX).read_text(encoding="utf-8"))
            self._files = [path / name for name in self.index["rows"]]
            sizes = list(self.index["rows"].values())
        else:  # one file, from a task of the user's
            whole = table_of(path)
            self._opened = dict(enumerate(whole.to_batches()))
            sizes = [len(batch) for batch in self._opened.values()]
        self.first = np.cumsum([0, *sizes])  # [shards + 1]
        self.names: list[str] = (table_of(self._files[0]) if self._files else whole).schema.names

    def __len__(self) -> int:
        return int(self.first[-1])

    def of(self, rows: Any) -> Any:
        """Shard index of each row, or of a single row."""
        return np.searchsorted(self.first, rows, side="right") - 1

    def lists(self, shard: int, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Values and offsets of a list column of a shard: views."""
        lists = self._lists.get((shard, name))
        if lists is None:
            column = self.column(shard, name)
            self._lists[shard, name] = lists = _numbers(column.values), _numbers(column.offsets)
        return lists

    def column(self, shard: int, name: str) -> pa.Array:
        """A column of a shard, memory-mapped."""
        if shard not in self._opened:
            (self._opened[shard],) = table_of(self._files[shard]).combine_chunks().to_batches()  # a single chunk
        return self._opened[shard].column(name)


def write_table(table: pa.Table, path: Path) -> None:
    """Write an Arrow file for `table_of`."""
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)


def table_of(path: Path) -> pa.Table:
    """Map an Arrow file into memory."""
    with pa.memory_map(str(path)) as mapped:
        return pa.ipc.open_stream(mapped).read_all()


class NumberColumn(np.lib.mixins.NDArrayOperatorsMixin):
    """One number per example, read only for the rows that are indexed. Any other array operation loads the whole
    column."""

    def __init__(self, shards: Shards, numbers: Callable[[int, np.ndarray], np.ndarray]) -> None:
        """`numbers`: returns the numbers of a shard at rows counted within it."""
        self._shards, self._numbers = shards, numbers

    def __len__(self) -> int:
        return len(self._shards)

    def __getitem__(self, rows: Any) -> Any:
        if isinstance(rows, slice) or np.asarray(rows).dtype.kind == "b":
            return np.asarray(self)[rows]
        row_numbers = np.asarray(rows, dtype=np.int64)
        if row_numbers.size and not -len(self) <= row_numbers.min() <= row_numbers.max() < len(self):
            raise IndexError(f"rows {row_numbers.min()} to {row_numbers.max()} of {len(self)}")
        flat = np.where(row_numbers < 0, row_numbers + len(self), row_numbers).ravel()
        of = self._shards.of(flat)
        order = np.argsort(of, kind="stable")
        parts = np.split(order, np.flatnonzero(np.diff(of[order])) + 1)  # by shard
        parts_read = [self._numbers(int(of[p[0]]), flat[p] - self._shards.first[of[p[0]]]) for p in parts if len(p)]
        out = np.empty(len(flat), dtype=parts_read[0].dtype if parts_read else np.int64)
        out[order] = np.concatenate(parts_read) if parts_read else out
        return out.reshape(row_numbers.shape)[()]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        parts = [part for _, part in self.parts()]
        whole = np.concatenate([np.empty(0, parts[0].dtype if parts else np.int64), *parts])
        return whole if dtype is None else whole.astype(dtype)  # astype(None) is float64

    def parts(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the numbers shard by shard, each with the index of its first row."""
        for shard, (first, stop) in enumerate(itertools.pairwise(self._shards.first.tolist())):
            if stop > first:
                yield first, self._numbers(shard, np.arange(stop - first))

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        return getattr(ufunc, method)(*(np.asarray(g) if isinstance(g, NumberColumn) else g for g in inputs), **options)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(np.asarray(self), name)


class Columns:
    """An encoded split, with ragged token columns and flat columns."""

    def __init__(self, path: str | Path | pa.RecordBatch) -> None:
        """`path`: a folder of shards or a file; or examples in memory."""
        self._shards = Shards(path)
        self._cache: dict[str, Ragged] = {}

    def __len__(self) -> int:
        return len(self._shards)

    @property
    def names(self) -> list[str]:
        return self._shards.names

    @property
    def sides(self) -> list[Any]:
        """Token counts of each example, one array per column that is padded separately: source, then target."""
        return [self.ragged(name).lengths for name in SIDES if name in self.names] or [self.lengths]

    @cached_property
    def lengths(self) -> Any:
        """Tokens of each example, summed over both sides: int32 [examples]; 1 for examples without tokens.
        Micro-batches are split by these."""
        sides = [self.ragged(name) for name in SIDES if name in self.names]
        if len(sides) == 1:
            return sides[0].lengths
        if not sides:  # no tokens: all examples have equal length
            return NumberColumn(self._shards, lambda shard, rows: np.ones(len(rows), dtype=np.int32))

        def both(shard: int, rows: np.ndarray) -> np.ndarray:
            return np.asarray(sum(side.lengths_in(shard, rows) for side in sides), dtype=np.int32)

        return NumberColumn(self._shards, both)

    @property
    def mean_length(self) -> float:
        """Mean length of all examples, from the index if it has one."""
        if self._shards.index is not None:
            return float(self._shards.index["tokens"]) / len(self)
        return float(self.lengths.mean())

    def longest(self, count: int) -> np.ndarray:
        """Rows of the longest examples, longest first, ties by row: int64 [at most `count`]."""
        index = self._shards.index
        if index is not None and count <= len(index["longest"]):
            return np.asarray(index["longest"][:count], dtype=np.int64)
        return longest_of(self.lengths, count)

    def flat(self, name: str) -> Any:
        """A column with one number per example, as an array that reads only indexed rows."""
        return NumberColumn(self._shards, lambda shard, rows: _numbers(self._shards.column(shard, name))[rows])

    def select(self, rows: np.ndarray) -> Columns:
        """Copy the examples at these rows, in order, to a split in memory."""
        first, of = self._shards.first, self._shards.of(rows)
        parts = [
            pa.record_batch({name: self._shards.column(int(shard), name)[at : at + 1] for name in self.names})
            for shard, at in zip(of, (rows - first[of]).tolist(), strict=True)
        ]
        return Columns(pa.Table.from_batches(parts).combine_chunks().to_batches()[0])

    def texts(self, name: str, rows: np.ndarray) -> list[str]:
        """Values of a text column at some rows."""
        first, of = self._shards.first, self._shards.of(rows)
        return [
            self._shards.column(int(shard), name)[int(row - first[shard])].as_py()
            for shard, row in zip(of, rows, strict=True)
        ]

    def ragged(self, name: str) -> Ragged:
        """A column with a list of numbers per example."""
        if name not in self._cache:
            self._cache[name] = Ragged(self._shards, name)
        return self._cache[name]


def longest_of(lengths: Any, count: int) -> np.ndarray:
    """Find the longest examples by scanning all lengths, a shard at a time (`Columns.longest`)."""
    rows, sizes = np.empty(0, np.int64), np.empty(0, np.int64)
    for first, part in lengths.parts() if isinstance(lengths, NumberColumn) else [(0, np.asarray(lengths))]:
        least = int(sizes[-1]) if len(sizes) == count else -1
        here = np.flatnonzero(part > least)
        rows, sizes = np.concatenate([rows, here + first]), np.concatenate([sizes, part[here]])
        best = np.argsort(-sizes, kind="stable")[:count]
        rows, sizes = rows[best], sizes[best]
    return rows


def index_of(folder: Path, files: list[Path]) -> dict[str, Any]:
    """Build the index of a folder of shards, so that starting a run need not scan them."""
    rows = {file.name: table_of(file).num_rows for file in files}
    (folder / INDEX).write_text(json.dumps({"rows": rows}), encoding="utf-8")
    columns = Columns(folder)
    tokens = sum(int(part.sum(dtype=np.int64)) for _, part in columns.lengths.parts())
    return {"rows": rows, "tokens": tokens, "longest": longest_of(columns.lengths, LONGEST).tolist()}


def examples_in(path: str | Path) -> int:
    """Number of examples of a split."""
    return len(Shards(path))


def _numbers(array: pa.Array) -> np.ndarray:
    """View of numbers without nulls. Arrow's `to_numpy` would import pandas in every rank at every start."""
    return np.from_dlpack(array)


class Ragged:
    """Lists of numbers across shards; tokens are copied only when a batch is collated."""

    def __init__(self, shards: Shards, name: str) -> None:
        self._shards, self._name = shards, name
        self.lengths = NumberColumn(shards, self.lengths_in)  # int32 [examples]

    def lengths_in(self, shard: int, rows: np.ndarray) -> np.ndarray:
        """Lengths of rows counted within a shard: int32, same shape as `rows`."""
        offsets = self._shards.lists(shard, self._name)[1]
        return (offsets[rows + 1] - offsets[rows]).astype(np.int32)

    def row(self, index: int) -> np.ndarray:
        """Numbers of one example: a view."""
        shard = int(self._shards.of(index))
        values, offsets = self._shards.lists(shard, self._name)
        within = index - int(self._shards.first[shard])
        return values[offsets[within] : offsets[within + 1]]

    def values(self) -> Iterator[np.ndarray]:
        """Yield the numbers of all examples, one view per shard."""
        for shard in range(len(self._shards.first) - 1):
            values, offsets = self._shards.lists(shard, self._name)
            yield values[offsets[0] : offsets[-1]]

    def padded(self, rows: np.ndarray, fill: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows padded with `fill` to the longest: int64 [B, T], and the mask of real values."""
        return padded([self.row(int(row)) for row in rows], fill)


def padded(rows: Sequence[np.ndarray], fill: int) -> tuple[np.ndarray, np.ndarray]:
    """Pad rows of numbers on the right to the longest: int64 [B, T], and the mask of real values."""
    shape = len(rows), max(1, *map(len, rows)) if rows else 1
    out, mask = np.full(shape, fill, dtype=np.int64), np.zeros(shape, dtype=np.int64)  # [B, T]
    for place, row in enumerate(rows):
        out[place, : len(row)], mask[place, : len(row)] = row, 1
    return out, mask


ROWS = 65_536  # maximum rows per shard
BYTES = 16 * 2**20  # approximate bytes per shard
MOST = 4096  # maximum shards per folder; beyond it shards grow
AT_ONCE = 1000  # rows per encoding batch
_POLL_S = 0.5

MakeBatches = Callable[[range, Path, Callable[[int], None]], None]  # rows of a shard, its file, progress callback
First = tuple[Callable[[int], None], int]  # called in this process for each part; maximum number of parts ahead
Batches = Iterable[tuple[pa.RecordBatch, int]]  # record batches with the number of rows consumed


def cuts(dataset: Dataset) -> list[range]:
    """Row range of each shard: a function of the data alone."""
    size = dataset.data.nbytes / max(1, dataset.data.num_rows)
    return spans(len(dataset), int(min(ROWS, max(1, BYTES // max(1, size)))))


def spans(count: int, each: int) -> list[range]:
    """Split `range(count)` into parts of `each`, or larger ones if there would be more than `MOST`; at least one
    part."""
    each = max(each, -(-count // MOST))
    return [range(start, min(start + each, count)) for start in range(0, max(count, 1), each)]


def batches(dataset: Dataset, rows: range) -> Iterator[tuple[int, dict[str, list]]]:
    """Yield the rows of a shard in batches for encoding: first row number, and columns."""
    for start in range(rows.start, rows.stop, AT_ONCE):
        yield start, dataset[start : min(start + AT_ONCE, rows.stop)]


def write_split(
    key: str,
    schema: pa.Schema,
    parts: list[range],
    make: Callable[[range], Batches],
    doing: str,
    of: str = "examples",
    processes: int | None = None,
) -> str:
    """Return the folder of a split's shards, writing it if it is missing from the cache or damaged.

    `make`: returns the batches of one of `parts`. `key`: identifies their content. `processes`: as in `fill`. The
    caller holds the lock. Errors: `RunError` if the folder cannot be written, and any error of `make`."""

    def one(rows: range, path: Path, done: Callable[[int], None]) -> None:
        batches = []
        for batch, count in make(rows):
            batches.append(batch)
            done(count)
        write_table(pa.Table.from_batches(batches, schema).combine_chunks(), path)

    def all_of_them(folder: Path) -> None:
        files = fill(folder, parts, ".arrow", one, doing, of, processes)
        (folder / INDEX).write_text(json.dumps(index_of(folder, files)), encoding="utf-8")

    path = folder_of("tokens") / f"{key}.arrow"
    aside = path.with_name(f"{path.name}.{parts[0].stop}-{parts[-1].stop}.parts")
    return str(cached(path, all_of_them, aside))


def concat(folders: list[str], key: str) -> str:
    """Concatenate the shards of several folders. Errors: as in `write_split`."""
    shard_files = [
        (Path(folder) / name, rows)
        for folder in folders
        for name, rows in json.loads((Path(folder) / INDEX).read_text(encoding="utf-8"))["rows"].items()
    ]
    some = [(path, rows) for path, rows in shard_files if rows]
    stops = itertools.accumulate(rows for _, rows in some)
    files = {range(stop - rows, stop): path for (path, rows), stop in zip(some, stops, strict=True)}

    def make(rows: range) -> Iterator[tuple[pa.RecordBatch, int]]:
        if rows:
            yield from ((batch, len(batch)) for batch in table_of(files[rows]).to_batches())

    return write_split(key, table_of(shard_files[0][0]).schema, list(files) or [range(0)], make, "copying", processes=1)


def fill(
    folder: Path,
    parts: list[range],
    ending: str,
    make: MakeBatches,
    doing: str,
    of: str = "examples",
    processes: int | None = None,
    first: First | None = None,
) -> list[Path]:
    """Create the missing files of `parts`, in `processes` processes or one per core, and return all files. `doing` and
    `of`: labels of the progress display. Errors: `RunError`, and any error of `make` and `first`."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    files = [folder / f"{number:05d}{ending}" for number in range(len(parts))]
    missing = [damage(path) is not None for path in files]
    todo = [number for number, away in enumerate(missing) if away]
    workers = min(processes or available_cores(), len(todo))
    done = _counts(0 if away else len(part) for away, part in zip(missing, parts, strict=True))

    def say() -> None:
        ACTIVITY.set(f"{doing}, {sum(done):,} of {parts[-1].stop:,} {of}")

    def one(number: int, tell: Callable[[], None] = lambda: None) -> None:
        done[number] = 0

        def more(rows: int) -> None:
            done[number] += rows
            tell()

        placed(files[number], lambda aside: make(parts[number], aside, more))

    say()
    if workers < 2 or sys.platform != "linux" or not _can_fork():
        for number in todo:
            one(number, say)
    else:
        with _serial_tokenizers():
            _by_processes(one, todo, workers, say, first)
    return files


def map_parts(parts: list[range], work: Callable[[range], None], doing: str) -> None:
    """Run `work` on each part, in one process per core. Results must be written to memory shared by forked processes.
    Errors: any error of `work`."""
    done = _counts(0 for _ in parts)

    def say() -> None:
        ACTIVITY.set(f"{doing}, {sum(done):,} of {parts[-1].stop:,} examples")

    def one(number: int) -> None:
        work(parts[number])
        done[number] = len(parts[number])

    if (workers := min(available_cores(), len(parts))) < 2 or sys.platform != "linux" or not _can_fork():
        for number in range(len(parts)):
            one(number)
    else:
        _by_processes(one, [*range(len(parts))], workers, say, None)


def _counts(begin: Iterable[int]) -> memoryview:
    """One number per part, in memory shared by forked processes. Each has a single writer, so no lock is needed: a
    process killed while holding one would block all others. (Arrays of `multiprocessing` need files in /dev/shm.)"""
    numbers = [*begin]
    counts = memoryview(mmap.mmap(-1, 8 * max(1, len(numbers)))).cast("q")[: len(numbers)]
    for place, number in enumerate(numbers):
        counts[place] = number
    return counts


def _can_fork() -> bool:
    """Return whether forked processes can work together: locks between processes need a writable /dev/shm."""
    try:
        multiprocessing.get_context("fork").Lock()
    except (OSError, ValueError, ImportError):
        return False
    return True


def _by_processes(
    one: Callable[[int], None], todo: list[int], workers: int, say: Callable[[], None], first: First | None
) -> None:
    """Run `one` for each number in forked processes, which share the data set, tokenizer and imports without pickling.
    Raises the first error, by number, once running ones have finished."""
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(workers, context, initializer=_begin, initargs=(one, os.getpid())) as pool:
        try:
            with warnings.catch_warnings():  # fork with running threads: they hold no lock that the fork needs
                warnings.simplefilter("ignore", DeprecationWarning)
                futures: list[Future[None]] = [] if first else [pool.submit(_one, number) for number in todo]
                if first:
                    pool.submit(int).result()  # fork all workers before starting the thread that queries stores
            left = _asking(pool, todo, futures, *first) if first else None
            while (left is not None and left.is_alive()) or not all(each.done() for each in futures):
                if not wait([each for each in futures if not each.done()], _POLL_S, FIRST_EXCEPTION).done:
                    time.sleep(_POLL_S / 10)  # nothing submitted, or all submitted parts are done
                say()
                if any(each.done() and each.exception() for each in [*futures]):
                    pool.shutdown(wait=True, cancel_futures=True)
                    break
            for each in futures:  # parts start in order, so the first error is deterministic
                if not each.cancelled():
                    each.result()
        except BrokenProcessPool:
            raise RunError(
                "LS2020",
                "a process that prepares the data was killed, perhaps because memory ran out. Finished work is "
                "kept: run the same command again, with fewer cores (taskset) if memory is short",
            ) from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # `with` then waits for running shards


def _asking(
    pool: ProcessPoolExecutor, todo: list[int], futures: list[Future[None]], first: Callable[[int], None], most: int
) -> threading.Thread:
    """Start a thread that runs `first` for each number and then submits its future, with at most `most` unfinished
    numbers."""
    room = threading.Semaphore(most)

    def ask() -> None:
        for number in todo:
            room.acquire()
            failed: Future[None] = Future()
            try:
                first(number)
                future = pool.submit(_one, number)
            except BaseException as error:  # a store's error, or the pool was shut down
                failed.set_exception(error)
                futures.append(failed)
                return
            future.add_done_callback(lambda _: room.release())
            futures.append(future)

    thread = threading.Thread(target=ask, name="lockstep-asking", daemon=True)
    thread.start()
    return thread


_WORK = "lockstep_work"  # attribute of a forked process: its work function


def _begin(one: Callable[[int], None], parent: int) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: die with the parent
    if os.getppid() != parent:
        os._exit(1)
    gc.freeze()  # garbage collection would copy shared pages
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # terminal signals: the parent process decides
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    setattr(multiprocessing.current_process(), _WORK, one)


def _one(number: int) -> None:
    getattr(multiprocessing.current_process(), _WORK)(number)


@contextmanager
def _serial_tokenizers() -> Iterator[None]:
    """Disable the tokenizers library's own threads: they compete with the worker processes and do not survive a
    fork."""
    before = os.environ.get(name := "TOKENIZERS_PARALLELISM")
    os.environ[name] = "false"
    try:
        yield
    finally:
        os.environ.pop(name) if before is None else os.environ.__setitem__(name, before)


Make = Callable[["Dataset"], pa.RecordBatch]  # examples of rows

_HASHED = 10_000  # rows per hashing batch
_AHEAD_BYTES = 64 * 2**20  # maximum bytes queued for hashing
VERSION = 2  # version of the cache format; changing it invalidates old entries


@dataclass(frozen=True)
class Prepared:
    """Result of preparing data, for all ranks: files and facts, no live objects."""

    key: str  # hash of the tokens' content; stored in checkpoints, so that a resume detects other data
    splits: dict[str, str]  # split -> folder of Arrow files, or one file
    tokenizer: str  # folder that transformers loads it from; "": there is none
    facts: dict[str, Any]  # of the task: label names, best possible accuracy, where the data came from

    def write(self, path: Path) -> None:
        """Write this object with a hash of its content, atomically and synced. Files in the cache are named relative to
        it, so that a copied or moved cache names its own."""
        values = asdict(self._with_places(_relative))
        aside = path.with_suffix(f".{os.getpid()}.tmp")
        with open(aside, "w", encoding="utf-8") as file:
            json.dump(values | {"sha256": _hash(values)}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)

    @staticmethod
    def read(path: Path) -> Prepared | None:
        """Read the object at `path`; None if there is no valid one. `damages` checks the files that it names."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            digest = values.pop("sha256", None)
            return Prepared(**values)._with_places(_absolute) if digest == _hash(values) else None
        except (OSError, ValueError, TypeError, AttributeError):
            return None

    def _with_places(self, rename: Callable[[str], str]) -> Prepared:
        """Return a copy with `rename` applied to the names of its files."""
        return replace(self, splits={s: rename(p) for s, p in self.splits.items()}, tokenizer=rename(self.tokenizer))

    @property
    def places(self) -> list[Path]:
        """The files of the splits and the folder of the tokenizer."""
        return [Path(file) for file in [*self.splits.values(), self.tokenizer] if file]

    def damages(self) -> dict[Path, str]:
        """Damaged files among those it names: path -> reason."""

        def reason(path: Path) -> str | None:
            if inside(path):
                return damage(path)
            return None if path.exists() else "is gone"

        reasons = {path: reason(path) for path in self.places}
        return {path: wrong for path, wrong in reasons.items() if wrong is not None}


def _relative(place: str) -> str:
    """Return the name of a file relative to the cache; unchanged for a file outside of it."""
    return (
        str(Path(place).absolute().relative_to(cache_folder().absolute())) if place and inside(Path(place)) else place
    )


def _absolute(place: str) -> str:
    """The reverse of `_relative`."""
    return str(cache_folder() / place) if place else place


def _hash(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def digest(*values: Any) -> str:
    """A short hash of JSON-able values."""
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:24]


def content(dataset: Dataset, columns: list[str]) -> str:
    """Hash of some columns of a data set, independent of files and loading order. One core hashes all bytes in order
    while others read and serialize them."""
    digest = hashlib.sha256()
    table = dataset.select_columns(columns).with_format("arrow")

    def written(start: int) -> pa.Buffer:
        part = table[start : start + _HASHED].replace_schema_metadata(None)
        # copied, since of a slice Arrow also writes some of what follows it in its buffers
        batch = pa.concat_tables([part[:1], part[1:]]).combine_chunks()
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema) as stream:
            stream.write_table(batch)
        return sink.getvalue()

    size = dataset.data.nbytes / max(1, dataset.data.num_rows) * _HASHED
    ahead = int(min(2 * available_cores(), max(1, _AHEAD_BYTES // max(1, size))))
    with ThreadPoolExecutor(ahead, "lockstep-hash") as pool:
        pending: deque[Future[pa.Buffer]] = deque()
        for start in range(0, len(dataset), _HASHED):  # fixed: the hash must not depend on the file's own chunks
            pending.append(pool.submit(written, start))
            if len(pending) > ahead:
                digest.update(pending.popleft().result())
        for each in pending:
            digest.update(each.result())
    return digest.hexdigest()[:24]


def encoded(
    batch: dict[str, list], encoder: Callable[[dict[str, list]], dict[str, Any]], schema: pa.Schema
) -> pa.RecordBatch:
    """Encode some rows. Errors: `RunError` if the numbers of examples and rows differ, or for decimals in a column of
    integers, which Arrow would cut off."""
    examples, count = encoder(batch), len(next(iter(batch.values()), []))
    columns = [pa.array(examples[field.name], field.type) for field in schema]
    fault = None
    if any(len(column) != count for column in columns):
        sizes = ", ".join(f"{len(c)} of {n}" for c, n in zip(columns, schema.names, strict=True))
        fault = f"{sizes} examples for {count}"
    elif cut_off := [field.name for field in schema if _has_decimals(examples[field.name], field.type)]:
        fault = f"decimals as {cut_off[0]}, a column of integers"
    if fault is not None:
        raise RunError("LS2021", f"internal error: the encoder of this task returned {fault}")
    return pa.record_batch(columns, schema=schema)


def _has_decimals(values: Any, kind: pa.DataType) -> bool:
    """Return whether values for a column of integers, or of lists of integers, have a fraction."""
    if pa.types.is_list(kind):
        return any(_has_decimals(row, kind.value_type) for row in values if row is not None)
    if not pa.types.is_integer(kind) or (isinstance(values, np.ndarray) and values.dtype.kind in "iub"):
        return False
    if not any(issubclass(each, _DECIMAL) for each in {*map(type, values)}):  # many times faster than one by one
        return False
    return any(isinstance(value, _DECIMAL) and not float(value).is_integer() for value in values)


_DECIMAL = float | np.floating


def encode(dataset: Dataset, encoder: Callable[[dict[str, list]], dict[str, Any]], features: Features, key: str) -> str:
    """Return the shards of `dataset` mapped by `encoder` (batch of columns -> batch of columns), encoding them if they
    are not cached or damaged. The encoder runs in several processes on batches of rows.

    The caller holds the lock. `key` identifies the content of both. Errors: `RunError` if the shards cannot be written.
    """
    schema = pa.schema(list(features.arrow_schema))

    def make(rows: range) -> Iterator[tuple[pa.RecordBatch, int]]:
        for _, batch in batches(dataset, rows):
            examples = encoded(batch, encoder, schema)
            yield examples, len(examples)

    return write_split(key, schema, cuts(dataset), make, "tokenising")
