"""Files of the cache that every core makes a part of: a folder of shards, each sealed on its own, so that what is done
stays done when the rest is killed.

In: how many shards, and a function that makes one of them. Out: a folder in the cache with all of them, and an index:
the examples of each, and what a run asks of all of them at its start. What a shard holds depends on its number alone,
not on who makes it.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from lockstep.config.run import RunError
from lockstep.data.cache import cached, damage, folder_of, placed
from lockstep.data.columns import INDEX, index_of, table_of
from lockstep.distributed.activity import ACTIVITY
from lockstep.distributed.processor import available_cores

if TYPE_CHECKING:
    from datasets import Dataset

ROWS = 65_536  # of a data set that make one shard, at most
BYTES = 16 * 2**20  # that they hold, about
MOST = 4096  # shards of a folder: then they become larger
AT_ONCE = 1000  # rows that are encoded together
_POLL_S = 0.5

Make = Callable[[range, Path, Callable[[int], None]], None]  # its rows, where to write it, told how many are done
First = tuple[Callable[[int], None], int]  # called by this process for each part, so many before they are made
Batches = Iterable[tuple[pa.RecordBatch, int]]  # record batches, each with how many rows it took


def cuts(dataset: Dataset) -> list[range]:
    """Which rows each shard is made from: a function of the data alone."""
    size = dataset.data.nbytes / max(1, dataset.data.num_rows)
    return spans(len(dataset), int(min(ROWS, max(1, BYTES // max(1, size)))))


def spans(count: int, each: int) -> list[range]:
    """`range(count)` in parts of `each`, or larger ones where they would be too many; one at least."""
    each = max(each, -(-count // MOST))
    return [range(start, min(start + each, count)) for start in range(0, max(count, 1), each)]


def batches(dataset: Dataset, rows: range) -> Iterator[tuple[int, dict[str, list]]]:
    """The rows of a shard, so many at a time as are encoded together: the first one's number, and their columns."""
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
    """The folder of shards of a split, made if it is not in the cache, or not as it was. `make` gives the batches of
    one of the `parts`. `key` stands for what they hold. `processes`: as of `fill`. The caller holds the lock. Errors:
    `RunError` when it cannot be written, and what `make` raises."""

    def one(rows: range, path: Path, done: Callable[[int], None]) -> None:
        found = []
        for batch, count in make(rows):
            found.append(batch)
            done(count)
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, schema) as stream:
            stream.write_table(pa.Table.from_batches(found, schema).combine_chunks())

    def all_of_them(folder: Path) -> None:
        files = fill(folder, parts, ".arrow", one, doing, of, processes)
        (folder / INDEX).write_text(json.dumps(index_of(folder, files)), encoding="utf-8")

    path = folder_of("tokens") / f"{key}.arrow"
    aside = path.with_name(f"{path.name}.{parts[0].stop}-{parts[-1].stop}.parts")
    return str(cached(path, all_of_them, aside))


def concat(folders: list[str], key: str) -> str:
    """The folder with the shards of several, one after the other. Errors: as those of `written`."""
    held = [
        (Path(folder) / name, rows)
        for folder in folders
        for name, rows in json.loads((Path(folder) / INDEX).read_text(encoding="utf-8"))["rows"].items()
    ]
    some = [(path, rows) for path, rows in held if rows]
    stops = itertools.accumulate(rows for _, rows in some)
    files = {range(stop - rows, stop): path for (path, rows), stop in zip(some, stops, strict=True)}

    def make(rows: range) -> Iterator[tuple[pa.RecordBatch, int]]:
        if rows:
            yield from ((batch, len(batch)) for batch in table_of(files[rows]).to_batches())

    return write_split(key, table_of(held[0][0]).schema, list(files) or [range(0)], make, "copying", processes=1)


def fill(
    folder: Path,
    parts: list[range],
    ending: str,
    make: Make,
    doing: str,
    of: str = "examples",
    processes: int | None = None,
    first: First | None = None,
) -> list[Path]:
    """The files of all `parts`, of which those that are not there yet are made, by so many processes, or as many as
    there are cores. `doing` and `of` are for whoever waits. Errors: `RunError`, and what `make` and `first` raise."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    files = [folder / f"{number:05d}{ending}" for number in range(len(parts))]
    missing = [damage(path) is not None for path in files]
    todo = [number for number, away in enumerate(missing) if away]
    workers = min(processes or available_cores(), len(todo))
    done = _counts(0 if away else len(part) for away, part in zip(missing, parts, strict=True))

    def say() -> None:
        ACTIVITY.at(f"{doing}, {sum(done):,} of {parts[-1].stop:,} {of}")

    def one(number: int, tell: Callable[[], None] = lambda: None) -> None:
        done[number] = 0

        def more(rows: int) -> None:
            done[number] += rows
            tell()

        placed(files[number], lambda aside: make(parts[number], aside, more))

    say()
    if workers < 2 or sys.platform != "linux":
        for number in todo:
            one(number, say)
    else:
        with _serial_tokenizers():
            _by_processes(one, todo, workers, say, first)
    return files


def together_over(parts: list[range], work: Callable[[range], None], doing: str) -> None:
    """`work` on each part, by as many processes as there are cores. What it leaves behind must be in memory that forked
    processes share. Errors: what `work` raises."""
    done = _counts(0 for _ in parts)

    def say() -> None:
        ACTIVITY.at(f"{doing}, {sum(done):,} of {parts[-1].stop:,} examples")

    def one(number: int) -> None:
        work(parts[number])
        done[number] = len(parts[number])

    if (workers := min(available_cores(), len(parts))) < 2 or sys.platform != "linux":
        for number in range(len(parts)):
            one(number)
    else:
        _by_processes(one, [*range(len(parts))], workers, say, None)


def _counts(begin: Iterable[int]) -> Any:
    """A number a part, in memory that forked processes share. Each is written by one process, so it needs no lock: a
    process that is killed while it holds one would leave the others, and whoever reads, to wait for ever."""
    return multiprocessing.get_context().RawArray("q", [*begin])


def _by_processes(
    one: Callable[[int], None], todo: list[int], workers: int, say: Callable[[], None], first: First | None
) -> None:
    """`one` of each number, in processes forked from this one: they share the data set, the tokenizer and what is
    imported, and nothing has to be sent. Of its errors the first, by number, is raised
    once those at work have ended."""
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(workers, context, initializer=_begin, initargs=(one, os.getpid())) as pool:
        try:
            with warnings.catch_warnings():  # of a fork beside threads: those of this process hold nothing it needs
                warnings.simplefilter("ignore", DeprecationWarning)
                asked: list[Future[None]] = [] if first else [pool.submit(_one, number) for number in todo]
                if first:
                    pool.submit(int).result()  # forks all, before there is a thread that asks stores
            left = _asking(pool, todo, asked, *first) if first else None
            while (left is not None and left.is_alive()) or not all(each.done() for each in asked):
                if not wait([each for each in asked if not each.done()], _POLL_S, FIRST_EXCEPTION).done:
                    time.sleep(_POLL_S / 10)  # none is asked for yet, or all that were are made
                say()
                if any(each.done() and each.exception() for each in [*asked]):
                    pool.shutdown(wait=True, cancel_futures=True)
                    break
            for each in asked:  # all before one that failed were begun before it: the first is the same every time
                if not each.cancelled():
                    each.result()
        except BrokenProcessPool:
            raise RunError(
                "a process that prepares the data was killed, perhaps for want of memory; what is done is kept: start "
                "again, with fewer cores (taskset) where memory is short"
            ) from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # then `with` waits for shards that are being made


def _asking(
    pool: ProcessPoolExecutor, todo: list[int], asked: list[Future[None]], first: Callable[[int], None], most: int
) -> threading.Thread:
    """A thread that has `first` done of each number and then `asked` for it, while fewer than `most` are not made."""
    room = threading.Semaphore(most)

    def ask() -> None:
        for number in todo:
            room.acquire()
            failed: Future[None] = Future()
            try:
                first(number)
                made = pool.submit(_one, number)
            except BaseException as error:  # of a store; or the pool is shut down, for another number's sake
                failed.set_exception(error)
                asked.append(failed)
                return
            made.add_done_callback(lambda _: room.release())
            asked.append(made)

    thread = threading.Thread(target=ask, name="lockstep-asking", daemon=True)
    thread.start()
    return thread


_WORK = "lockstep_work"  # an attribute of a forked process: what it was forked for


def _begin(one: Callable[[int], None], parent: int) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: not to be left alone
    if os.getppid() != parent:
        os._exit(1)
    gc.freeze()  # to look for garbage in what is shared would copy it
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: whoever forked this one decides
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    setattr(multiprocessing.current_process(), _WORK, one)


def _one(number: int) -> None:
    getattr(multiprocessing.current_process(), _WORK)(number)


@contextmanager
def _serial_tokenizers() -> Iterator[None]:
    """A tokenizer's own threads would take the cores that the processes have, and do not survive a fork."""
    before = os.environ.get(name := "TOKENIZERS_PARALLELISM")
    os.environ[name] = "false"
    try:
        yield
    finally:
        os.environ.pop(name) if before is None else os.environ.__setitem__(name, before)
