"""Preparation in shards: the same tokens for any number of processes, and finished shards survive a kill."""

import errno
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest

from lockstep.config.run import RunError
from lockstep.data import arrow_cache, cache, labels, lm_documents, usable_rows
from lockstep.data.arrow_cache import Columns, Prepared
from support.caches import own_cache, prepared, token_rows
from support.harness import tiny
from support.messages import raises
from support.task_runs import TASKS, make

__all__ = ["own_cache"]  # fixtures

KINDS = [*sorted(TASKS), "classification"]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Few rows per shard, and a number of processes."""

    def cut(rows: int, processes: int) -> None:
        monkeypatch.setattr(arrow_cache, "ROWS", rows)
        monkeypatch.setattr(arrow_cache, "AT_ONCE", max(1, rows // 2))
        monkeypatch.setattr(lm_documents, "_SHARD", 10 * rows)
        monkeypatch.setattr(lm_documents, "_TOKENS", 8 * rows)
        monkeypatch.setattr(arrow_cache, "available_cores", lambda: processes)

    return cut


def of_kind(folder: Path, kind: str) -> Any:
    return tiny() if kind == "classification" else make(folder, kind)


def in_python(columns: Columns, name: str) -> list[Any]:
    shards_of = columns._shards
    return [value for i in range(len(shards_of.first) - 1) for value in shards_of.column(i, name).to_pylist()]


def everything(found: Prepared) -> dict[str, Any]:
    """Return all columns of all splits as Python lists."""
    splits = {}
    for split, path in found.splits.items():
        columns = Columns(path)
        splits[split] = {name: in_python(columns, name) for name in columns.names}
    return splits


@pytest.mark.processes
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_and_keys_do_not_depend_on_shards_or_processes(
    kind: str, tmp_path: Path, small: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, found = of_kind(tmp_path, kind), {}
    for rows, processes in ((65_536, 1), (7, 1), (13, 3)):
        monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / f"{rows}-{processes}"))
        small(rows, processes)
        found[rows] = prepared(run)
        folder = Path(found[rows].splits["train"])
        assert (len(list(folder.glob("*.arrow"))) > 3) == (rows < 100)
        assert [p.name for p in folder.parent.iterdir() if ".parts" in p.name] == []
    assert everything(found[65_536]) == everything(found[7]) == everything(found[13])
    assert len({each.key for each in found.values()}) == 1
    assert found[65_536].facts == found[13].facts
    columns = Columns(found[13].splits["train"])
    lengths = np.asarray(columns.lengths)
    assert (columns.longest(9) == np.argsort(-lengths, kind="stable")[:9]).all()
    assert columns.mean_length == pytest.approx(lengths.mean())


@pytest.mark.processes
@pytest.mark.parametrize(("processes", "who"), [(1, os.getpid), (2, os.getpid), (2, os.getppid)])
def test_a_killed_preparation_resumes_with_existing_shards(
    processes: int, who: Callable[[], int], own_cache: Path, small: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    small(10, processes)
    whole = arrow_cache.placed

    def placed(path: Path, do: Callable[[Path], None]) -> None:
        if path.name == "00004.arrow":
            os.kill(who(), signal.SIGKILL)
            time.sleep(60)
        whole(path, do)

    if (child := os.fork()) == 0:  # prepares, in this process or in two more
        monkeypatch.setattr(arrow_cache, "placed", placed)
        try:
            prepared(tiny())
        except RunError as error:
            os._exit(7 if "data was killed, perhaps because memory ran out" in str(error) else 1)
        os._exit(0)
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert ended == (7 if processes == 2 and who is os.getpid else -signal.SIGKILL)
    [folder] = (own_cache / "tokens").rglob("*.parts")
    there = {path.name: path.stat().st_ino for path in folder.glob("*.arrow")}
    assert len(there) >= 3
    found = prepared(tiny())
    kept = {path.name: path.stat().st_ino for path in Path(found.splits["train"]).glob("*.arrow")}
    assert len(kept) == 10
    assert there.items() <= kept.items()


def test_a_partial_shard_is_recomputed(own_cache: Path, small: Callable) -> None:
    small(10, 1)
    wanted = token_rows(first := prepared(tiny()))
    folder = Path(first.splits["train"])
    parts = folder.with_name(f"{folder.name}.10-100.parts")
    folder.rename(parts)  # as a kill before the end leaves it
    folder.with_name(f"{folder.name}.seal").unlink()
    (parts / "00003.arrow").write_bytes((parts / "00003.arrow").read_bytes()[:-100])
    (parts / "00005.arrow.seal").unlink()
    made: list[str] = []
    whole = arrow_cache.placed
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrow_cache, "placed", lambda path, do: made.append(path.name) or whole(path, do))
        assert token_rows(prepared(tiny())) == wanted
    assert made == ["00003.arrow", "00005.arrow"]


@pytest.mark.processes
def test_an_error_in_a_worker_process_is_reported_unchanged(own_cache: Path, small: Callable, tmp_path: Path) -> None:
    run = make(tmp_path, "messages", "task.chat_template='{{ raise_exception(1) }}'")
    for processes in (1, 2):
        small(7, processes)
        with raises("LS2042", "task.messages: ", "row 0: 1"):
            prepared(run)


def test_columns_are_never_read_as_a_whole(tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither as a list nor by iterating over rows: `datasets` returns at most a part's rows at once."""
    import datasets

    asked: list[int] = []
    given = datasets.Dataset.__getitem__

    def spied(self: Any, key: Any) -> Any:
        found = given(self, key)
        asked.append(len(range(*key.indices(len(self)))) if isinstance(key, slice) else 1)
        assert not isinstance(key, str), f"the column {key}"
        return found

    monkeypatch.setattr(usable_rows, "ROWS", 20)
    monkeypatch.setattr(arrow_cache, "AT_ONCE", 20)
    monkeypatch.setattr(datasets.Dataset, "__getitem__", spied)
    monkeypatch.setattr(datasets.Dataset, "__iter__", lambda self: pytest.fail("a loop over all rows"))
    rows = [{"text": f"word {i} of {i % 3}", "label": ["a", "b", "c"][i % 3] if i % 9 else None} for i in range(200)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"source": str(tmp_path / "train.jsonl"), "max_length": 32}
    prepared(tiny("data.drop_missing=true", data=source))
    data = datasets.Dataset.from_list(rows)
    assert usable_rows.lacking(data, "label").sum() == 23
    whole = data.filter(lambda row: row["label"] is not None)
    assert labels.codes_of({"train": whole}, "label", None, "x").of_all(whole)[:4].tolist() == [1, 2, 0, 1]
    assert max(asked) <= 1000  # texts per call when a tokenizer is trained


# -- locks -----------------------------------------------------------------------------------------------------------


def lease(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({"machine": "another", "host": "b", "pid": 1, "id": "x"} | values))


def test_a_stale_lease_of_another_machine_is_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "SILENCE_S", 1.0)
    path = tmp_path / "a.lease"
    lease(path)
    alive = threading.Event()

    def beat() -> None:
        while not alive.wait(0.1):
            os.utime(path)

    thread = threading.Thread(target=beat)
    thread.start()
    got = threading.Event()

    def take() -> None:
        with cache.file_lock(tmp_path / "a.lock"):
            got.set()

    taker = threading.Thread(target=take)
    taker.start()
    assert not got.wait(2.0)  # twice the timeout of a silent lock holder
    alive.set()
    thread.join()
    assert got.wait(30)
    taker.join()
    assert [p.name for p in tmp_path.iterdir()] == ["a.lock"]


def test_a_lease_of_a_dead_local_process_is_taken_at_once(tmp_path: Path) -> None:
    lease(tmp_path / "a.lease", machine=cache.machine())
    with cache.file_lock(tmp_path / "a.lock"):
        assert json.loads((tmp_path / "a.lease").read_text())["pid"] == os.getpid()
    assert not (tmp_path / "a.lease").exists()


def test_two_machines_whose_locks_do_not_reach_each_other_take_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads with a separate lock file each, as two machines see it, and one shared lease."""
    inside, most = [0], [0]
    monkeypatch.setattr(cache, "machine", lambda: threading.current_thread().name)
    monkeypatch.setattr(Path, "with_suffix", lambda self, ending: tmp_path / "shared.lease")

    def work() -> None:
        for _ in range(5):
            path = tmp_path / f"{threading.current_thread().name}.lock"
            with cache.file_lock(path):
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                time.sleep(0.01)
                inside[0] -= 1

    threads = [threading.Thread(target=work) for _ in range(3)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert most[0] == 1


def test_a_folder_made_by_another_machine_meanwhile_is_used(own_cache: Path) -> None:
    path = own_cache / "tokens" / "a"

    def make_late(aside: Path) -> None:
        aside.mkdir()
        (aside / "file").write_text("the same")
        path.mkdir()
        (path / "file").write_text("the same")
        cache.seal(path)

    assert cache.cached(path, make_late) == path
    assert cache.damage(path) is None
    assert [p.name for p in path.parent.iterdir() if "tmp" in p.name] == []


def test_each_machine_reads_all_data_once(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "BLOCK", 1000)
    path = cache.cached(own_cache / "tokens" / "a", lambda aside: aside.write_bytes(bytes(10_500)) and None)
    read: list[int] = []
    hashes = cache._hashes
    monkeypatch.setattr(cache, "_hashes", lambda file, blocks: read.append(len(blocks)) or hashes(file, blocks))
    for machine in ("one", "two", "one", "two"):
        monkeypatch.setattr(cache, "_boot", lambda machine=machine: machine)
        assert cache.damage(path) is None
    assert read[:2] == [11, 11]
    assert max(read[2:]) <= cache.SAMPLED  # drawn rows may include the first and last, which are checked anyway


def test_without_shared_memory_shards_are_built_sequentially(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read-only /dev/shm has no room for locks or arrays."""

    def none(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("multiprocessing.synchronize.SemLock.__init__", none)
    monkeypatch.setattr("multiprocessing.heap.Arena.__init__", none)
    done: list[range] = []
    arrow_cache.map_parts([range(5), range(5, 9)], done.append, "counting")
    assert done == [range(5), range(5, 9)]


def test_numbers_keep_their_dtype_and_every_digit() -> None:
    """Slices, masks, operators and np.asarray of a column returned float64, which loses digits beyond 2**53."""
    column = Columns(pa.record_batch({"x": pa.array([2**60 + 1, 5])})).flat("x")
    for numbers in (np.asarray(column), column[:], column[np.array([True, True])], column + 0, column[[0, 1]]):
        assert (numbers.tolist(), numbers.dtype) == ([2**60 + 1, 5], np.int64)
    assert np.asarray(column, np.float32).dtype == np.float32


def test_the_hash_of_rows_does_not_depend_on_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """One file of more than 10,000 texts had another hash than two files of the same texts."""
    monkeypatch.setattr(arrow_cache, "_HASHED", 3)
    texts, tags = ["x" * n if n != 4 else None for n in range(8)], [[str(n)] * (n % 3) for n in range(8)]
    rows: dict[str, Any] = {"text": texts, "tags": tags}
    parts = [datasets.Dataset.from_dict({k: v[a:b] for k, v in rows.items()}) for a, b in ((0, 1), (1, 5), (5, 8))]
    whole = datasets.Dataset.from_dict(rows)
    longer = datasets.Dataset.from_dict({k: [v[-1], *v, v[0]] for k, v in rows.items()})
    same = [whole, datasets.concatenate_datasets(parts), longer.select(range(1, 9)), whole.select([*range(8)])]
    hashes = [arrow_cache.content(each, ["text", "tags"]) for each in (*same, longer.select(range(8)))]
    assert len({*hashes[:-1]}) == 1
    assert hashes[-1] != hashes[0]


@pytest.mark.parametrize("value", [[0.5], [[1.0, 1.5]], [[1, 1.5]], [np.array([1.5], np.float32)]])
def test_decimals_among_integers_are_refused(value: list[Any]) -> None:
    """Arrow cuts off the fraction of Python's floats without a word."""
    schema = pa.schema([("x", pa.list_(pa.int32()) if isinstance(value[0], list | np.ndarray) else pa.int64())])
    with raises("LS2021", "returned decimals as x, a column of integers"):
        arrow_cache.encoded({"text": ["a"]}, lambda rows: {"x": value}, schema)
    whole = [[2.0]] if isinstance(value[0], list | np.ndarray) else [2.0]
    assert arrow_cache.encoded({"text": ["a"]}, lambda rows: {"x": whole}, schema).to_pydict() == {"x": whole}
