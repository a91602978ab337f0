"""A mixture of streamed sources: a pure function of the step, for all formats and places; the same for any number of
ranks; invalid sources are named."""

import itertools
import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.config.run import Run, RunError, load
from lockstep.data import arrow_cache as shard_index
from lockstep.data import object_store, row_reader
from lockstep.data import order as orders
from lockstep.data.order import MixedShards
from lockstep.data.streamed import Streamed, Unreadable
from support.harness import TINY, run_on
from support.messages import raises
from support.stream_runs import (
    LM,
    batches,
    changed,
    content,
    examples_of,
    feed_of,
    refusal,
    rows_of,
    task_of,
    trained,
    write,
)
from support.web_server import Served, web

__all__ = ["web"]  # fixtures

pytestmark = pytest.mark.slow

SIZES = st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=4).filter(any), min_size=1, max_size=4)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_reader, "ROWS", 6)
    monkeypatch.setattr(shard_index, "available_cores", lambda: 1)


# -- the order -------------------------------------------------------------------------------------------------------


def order_of(sizes: list[list[int]], schedules: Any, batch: int, seed: int, window: int) -> MixedShards:
    return MixedShards([np.array(each) for each in sizes], schedules or [[]] * len(sizes), batch, seed, window)


@settings(max_examples=40)
@given(SIZES, st.integers(1, 40), st.integers(1, 30), st.integers(1, 64), st.integers(0, 2**63 - 1))
def test_without_weights_an_epoch_uses_every_example_once(
    sizes: list[list[int]], batch: int, window: int, period: int, seed: int
) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(orders, "PERIOD", period)
        order, count = order_of(sizes, None, batch, seed, window), sum(map(sum, sizes))
        steps = [order.step(t) for t in range(2 * order.steps_per_epoch)]
        for epoch in (steps[: order.steps_per_epoch], steps[order.steps_per_epoch :]):
            assert sorted(np.concatenate(epoch)) == list(range(count))
        for t in np.random.default_rng(seed).permutation(len(steps))[:8].tolist():
            anew = order_of(sizes, None, batch, seed, window)
            assert (anew.step(t) == steps[t]).all()
            assert set(steps[t].tolist()) <= set(itertools.chain.from_iterable(anew.resident_ranges(t)))
            before = np.concatenate([np.empty(0, np.int64), *(order.sources_of_step(s)[0] for s in range(t))])
            drawn = np.bincount(before, minlength=len(sizes))
            assert (anew.consumed(t) == drawn).all()


@settings(max_examples=30)
@given(SIZES, st.integers(1, 40), st.integers(1, 30), st.integers(0, 2**63 - 1))
def test_with_weights_the_window_has_the_step_and_stays_bounded(
    sizes: list[list[int]], batch: int, window: int, seed: int
) -> None:
    schedules = [[(0, 1.0 + k), (7, 3.0)] for k in range(len(sizes))]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(orders, "PERIOD", 256)
        order = order_of(sizes, schedules, batch, seed, window)
        seen: list[list[int]] = [[] for _ in sizes]
        for t in range(20):
            rows, near = order.step(t), set(itertools.chain.from_iterable(order.resident_ranges(t)))
            assert set(rows.tolist()) <= near
            assert len(near) <= sum(min(sum(each), 2 * window + 2 * batch) for each in sizes)
            for source, row in zip(order.sources_of_step(t)[0].tolist(), rows.tolist(), strict=True):
                seen[source].append(row)
        for source, rows_of_it in enumerate(seen):  # full epochs, one after the other
            size = sum(sizes[source])
            whole = [rows_of_it[start : start + size] for start in range(0, len(rows_of_it) - size + 1, size)]
            first = int(order.first[source])
            assert all(sorted(each) == list(range(first, first + size)) for each in whole)


def test_late_steps_cost_no_more_than_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    permute = orders.permute

    def counted(positions: np.ndarray, *rest: Any) -> np.ndarray:
        asked.append(len(positions))
        return permute(positions, *rest)

    monkeypatch.setattr(orders, "permute", counted)
    sizes = [np.full(1000, 10**6), np.full(10, 10**6)]
    weighted: list[list[tuple[int, float]]] = [[(0, 1.0)], [(0, 2.0)]]
    unweighted: list[list[tuple[int, float]]] = [[], []]
    for schedules in (weighted, unweighted):
        costs = []
        for step in (0, 10**6, 10**9):
            order = MixedShards(sizes, schedules, 256, 1, 8192)
            asked.clear()
            assert len(order.step(step)) == 256
            assert sum(map(len, order.resident_ranges(step))) <= 2 * (2 * 8192 + 512)
            costs.append(sum(asked))
        assert max(costs) <= 3 * orders.PERIOD + 4 * 1010 + 512


# -- the data --------------------------------------------------------------------------------------------------------


def mixed(folder: Path, *overrides: str, weights: tuple[Any, ...] = (None, None, None), **values: Any) -> Run:
    """Write three sources with different formats, columns and label types; one has a validation split."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, size in enumerate((30, 25)):
        write(folder / f"web-{number}.jsonl.gz", rows_of(size, number))
    moods = datasets.ClassLabel(names=["joy", "fear"])
    book = [
        {"said": {"text": row["text"]}, "mood": row["label"], "kind": "ab"[i % 2]}
        for i, row in enumerate(rows_of(40, 7))
    ]
    kinds = {"said": {"text": datasets.Value("string")}, "mood": moods, "kind": datasets.Value("string")}
    datasets.Dataset.from_list(book, datasets.Features(kinds)).to_parquet(folder / "book.parquet")
    (folder / "chat.txt").write_text("".join(f"{row['text']};{row['label']}\n" for row in rows_of(15, 9)))
    write(folder / "held.jsonl", rows_of(12, 99))
    sources: list[dict[str, Any]] = [
        {"name": "web", "train": str(folder / "web-*.jsonl.gz"), "validation": str(folder / "held.jsonl")},
        {
            "source": str(folder / "book.parquet"),
            "rename": {"text": "said.text"} if "task" in values else {"text": "said.text", "label": "mood"},
            "filter": {"kind": "a"},
        },
        {"name": "chat", "train": str(folder / "chat.txt")},
    ]
    for source, weight in zip(sources, weights, strict=True):
        source |= {} if weight is None else {"weight": weight}
    data = {"sources": sources, "stream": True, "stream_window": 10, "max_length": 32} | values.pop("data", {})
    return load(None, ["batch_size=10", "micro_batches=4", *overrides], TINY | {"data": data} | values)


def test_a_mixture_has_the_examples_of_every_source(tmp_path: Path) -> None:
    run = mixed(tmp_path)
    task = task_of(run)
    columns = task.splits["train"]
    assert isinstance(columns, Streamed)
    assert {name: len(rows) for name, rows in task.sources(columns).items()} == {"web": 55, "book": 20, "chat": 15}
    assert task.prepared.facts["labels"] == ["fear", "joy"]
    assert {name: len(rows) for name, rows in task.sources(task.splits["validation"]).items()}["web"] == 12
    found, wanted = examples_of(columns), []
    for names in (("web-0.jsonl.gz", "web-1.jsonl.gz"), ("book.parquet",), ("chat.txt",)):
        own = [entry for entry in run.data.sources or [] if entry.name == names[0].partition("-")[0].partition(".")[0]]
        given = {"validation": str(tmp_path / "held.jsonl"), "train": [str(tmp_path / name) for name in names]}
        rows = own[0].model_dump(include={"filter"}, exclude_unset=True)
        columns_of = {"text": "said.text", "label": "mood"} if own[0].name == "book" else {}
        if own[0].name == "book":  # its label column has another name: the same rows under the task's names
            some = [json.loads(json.dumps(r)) for r in datasets.Dataset.from_parquet(str(tmp_path / names[0]))]
            names_of_it = ["joy", "fear"]
            plain = [{"text": r["said"]["text"], "label": names_of_it[r["mood"]], "kind": r["kind"]} for r in some]
            given["train"] = [str(write(tmp_path / "plain-book.jsonl", plain))]
            given["validation"] = str(
                write(tmp_path / "plain-held.jsonl", [r | {"kind": "a"} for r in rows_of(12, 99)])
            )
            assert columns_of == own[0].rename
        tokenizer = task.prepared.tokenizer
        alone = load(
            None,
            [],
            TINY | {"data": given | rows | {"max_length": 32}, "tokenizer": {"source": tokenizer}},
        )
        wanted += examples_of(task_of(alone).splits["train"])
    assert found == wanted
    feed = feed_of(run)
    assert set(feed.mixture) == {"mixture", "stream"}
    assert "web 61.1% (55 examples" in feed.mixture["mixture"]
    assert "10 examples of each source shuffled together" in feed.mixture["stream"]


@pytest.mark.parametrize(
    ("values", "weights"),
    [({}, (2, 1, [[0, 1], [5, 4]])), ({"task": LM["task"] | {"document": "line"}}, (None, None, None))],
)
def test_any_rank_from_any_step_makes_the_same_batches(
    weights: tuple[Any, ...], values: dict[str, Any], tmp_path: Path
) -> None:
    run = mixed(tmp_path, "steps=16", "epochs=null", weights=weights, **values)
    whole, half = feed_of(run), [feed_of(run, rank, 2) for rank in range(2)]
    wanted = batches(whole)
    assert batches(half[0], 13)[0][0] == wanted[13][0]
    assert batches(feed_of(run), 7) == wanted[7:]
    for step in (11, 3):
        of_one, parts = whole.make(step), [feed.make(step) for feed in half]
        assert of_one.targets_of is not None
        assert of_one.targets_of.sum() == of_one.targets
        for part in parts:
            assert part.targets_of is not None
            assert part.targets_of.tolist() == of_one.targets_of.tolist()
        there = [m.targets.tolist() for m in of_one.micro_batches]
        assert [m.targets.tolist() for part in parts for m in part.micro_batches] == there


def test_a_source_s_file_stays_open_while_others_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening a compressed file unpacks it from the start, so it is opened once per epoch, not at every turn."""
    for name in ("a", "b"):
        write(tmp_path / f"{name}.jsonl.gz", rows_of(200, ord(name)))
    write(tmp_path / "held.jsonl", rows_of(12, 99))
    sources = [{"train": str(tmp_path / f"{n}.jsonl.gz"), "validation": str(tmp_path / "held.jsonl")} for n in "ab"]
    data = {"sources": sources, "stream": True, "stream_window": 10, "max_length": 32}
    feed = feed_of(load(None, ["batch_size=10", "epochs=1", "steps=null"], TINY | {"data": data}))
    begun: list[str] = []
    begin = row_reader._ByteReader._begin

    def counted(self: Any) -> Any:
        begun.append(self.path.name)
        return begin(self)

    monkeypatch.setattr(row_reader._ByteReader, "_begin", counted)
    for step in range(feed.total):
        feed.make(step)
    assert sorted(begun) == ["a.jsonl.gz", "b.jsonl.gz"]


@pytest.mark.processes
def test_the_same_bits_on_one_process_and_two(tmp_path: Path) -> None:
    run = mixed(tmp_path, "strategy.name=ddp", "steps=12", weights=(1, 1, [[0, 1], [4, 3]]))
    (alone,) = run_on(1, trained, run)
    assert run_on(2, trained, run)[0] == alone
    (control,) = run_on(1, trained, run.model_copy(update={"seed": 1}), run=run)
    assert control["weights"] != alone["weights"]


# -- remote sources --------------------------------------------------------------------------------------------------


def test_local_and_remote_sources_are_mixed(web: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store.time, "sleep", lambda seconds: None)
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    run = mixed(tmp_path / "data", "steps=12", "epochs=null")
    assert run.data.sources is not None
    wanted = batches(feed_of(run))
    web.files = {name: data for name, data in content(tmp_path / "data").items() if name.startswith(("web", "chat"))}
    here, chat = [f"{web.address}/web-{n}.jsonl.gz" for n in range(2)], f"{web.address}/chat.txt"
    updates: list[dict[str, Any]] = [{"train": here}, {}, {"train": chat}]
    sources = [entry.model_copy(update=u) for entry, u in zip(run.data.sources, updates, strict=True)]
    elsewhere = run.model_copy(update={"data": run.data.model_copy(update={"sources": sources})})
    assert batches(feed_of(elsewhere)) == wanted
    room = 3 * max(map(len, web.files.values())) / 1e9
    with raises("LS2171", "3 sources"):
        task_of(elsewhere.model_copy(update={"data": elsewhere.data.model_copy(update={"stream_cache_gb": room})}))


# -- invalid sources -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"layout": "class_folders"}, "sources: x: layout cannot be combined with data.stream"),
        ({"columns": ["text", "label"]}, "sources: x: columns cannot be combined with data.stream"),
        ({"filter": {"text": {"min_tokens": 3}}}, "sources: x: filter: text: the tokens of a stream cannot be counted"),
        ({"weight": 0}, "x: weight: invalid value 0; expected a number > 0"),
    ],
)
def test_source_keys_without_stream_support_are_refused(given: dict[str, Any], told: str) -> None:
    sources = [{"train": "x.jsonl"} | given, {"train": "y.jsonl"} | ({"weight": 1} if "weight" in given else {})]
    with pytest.raises(RunError) as caught:
        load(None, [], TINY | {"data": {"sources": sources, "stream": True}})
    assert told in str(caught.value)


def test_errors_name_the_source(tmp_path: Path) -> None:
    run = mixed(tmp_path)
    (tmp_path / "chat.txt").write_text("")
    assert refusal(run).startswith(
        f"data.sources: chat: data.train: nothing to train on: no example in 1 shard, beginning with {tmp_path}"
    )
    (tmp_path / "chat.txt").write_text("no label here\n")
    assert "data.sources: chat: data.train: " in refusal(run)
    assert "line 1: expected 'text;label'" in refusal(run)
    run = mixed(tmp_path)
    packed = (tmp_path / "web-1.jsonl.gz").read_bytes()
    (tmp_path / "web-1.jsonl.gz").write_bytes(packed[:-30])
    assert refusal(run).startswith(
        f"data.sources: web: data.train: cannot unpack {tmp_path / 'web-1.jsonl.gz'} from row "
    )
    values = {"data": {"sources": [{"train": str(tmp_path / "chat.txt")}], "stream": True}}
    assert refusal(load(None, [], TINY | values)).startswith("data.validation: missing; a share of a stream")
    values["data"]["sources"][0]["rename"] = {"txt": "text"}  # type: ignore[index]
    values["data"]["sources"][0]["validation"] = str(tmp_path / "held.jsonl")  # type: ignore[index]
    assert "data.sources: chat: rename: the task reads no column 'txt'" in refusal(load(None, [], TINY | values))


def test_a_changed_shard_is_reported_with_its_source(tmp_path: Path) -> None:
    feed = feed_of(mixed(tmp_path, "steps=40", "epochs=null"))

    def go() -> None:
        for step in range(40):
            feed.make(step)

    changed(tmp_path / "chat.txt", "other")
    with raises("LS2280", "data.sources: chat: data.train: ", "chat.txt, rows ", error=Unreadable):
        go()
    for path in tmp_path.glob("web-*"):
        path.unlink()
    assert isinstance(feed.columns, Streamed)
    feed.columns.hold([])
    with raises("LS2222", "data.sources: web: data.train: ", error=Unreadable):
        go()
