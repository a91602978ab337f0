"""A streamed training split: the same examples as from the cache, for every format; the same for any number of ranks
and from any step; and little memory."""

import json
import random
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.config.run import Run
from lockstep.data import arrow_cache as shard_index
from lockstep.data import row_reader
from lockstep.data.prepare import warnings
from lockstep.data.streamed import Streamed
from support.expected_batches import rows_in, wanted_rows
from support.stream_runs import FORMATS, LM, examples_of, feed_of, rows_of, shards, streamed, task_of, write
from support.task_runs import TASKS, TEMPLATE
from support.task_runs import rows_of as rows_of_kind

pytestmark = pytest.mark.slow  # together a third of the time of tests without processes


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_reader, "ROWS", 6)
    monkeypatch.setattr(shard_index, "available_cores", lambda: 1)  # no processes for so few rows


def cached(run: Run) -> list[tuple[Any, ...]]:
    """Return the same rows from the cache."""
    data = run.data.model_copy(update={"stream": False, "stream_window": 8192})
    return examples_of(task_of(run.model_copy(update={"data": data})).splits["train"])


@pytest.mark.parametrize("ending", FORMATS)
def test_streamed_examples_equal_cached_ones(ending: str, tmp_path: Path) -> None:
    folder = shards(tmp_path, ending)
    archive = {"task": {"text": "txt", "label": "json.label"}} if ".tar" in ending else {}
    for path in folder.glob("validation*"):
        if archive:
            rows = [json.loads(line) for line in path.read_text().splitlines()]
            write(path, [{"txt": row["text"], "json": {"label": row["label"]}} for row in rows])
    columns = task_of(streamed(folder, **archive)).splits["train"]
    assert isinstance(columns, Streamed)
    assert len(columns.shard_sizes) == (4 if ending == ".parquet" else 5)
    wanted = cached(streamed(shards(tmp_path / "plain")))
    assert examples_of(columns) == wanted
    backwards = [columns.ragged("input_ids").row(i).tolist() for i in reversed(range(100))]  # each chunk is read again
    assert [tuple(ids) for ids in reversed(backwards)] == [row[0] for row in wanted]
    assert columns.mean_length == pytest.approx(np.mean([len(row[0]) for row in wanted]))


@pytest.mark.parametrize("kind", ["documents", "prompts", "messages", "two texts"])
def test_every_kind_of_example_is_streamed(kind: str, tmp_path: Path) -> None:
    draw = random.Random(1)
    asked: dict[str, Any] = {
        "documents": {"name": "language_modeling", "block_size": 12, "packing": False},
        "prompts": {"name": "language_modeling", "prompt": "question", "response": "answer", "block_size": 32},
        "messages": {"name": "language_modeling", "messages": "messages", "chat_template": TEMPLATE, "block_size": 32},
        "two texts": {"name": "classification", "text": "said.0", "text_pair": "said.1", "label": "right"},
    }[kind]
    for name, count in (("train-0", 30), ("train-1", 25), ("validation", 12)):
        rows = [rows_of_kind(kind, draw) for _ in range(count)]
        if kind == "two texts":
            rows = [{"said": [row["text"], "b c"], "right": bool(i % 2)} for i, row in enumerate(rows)]
        write(tmp_path / f"{name}.jsonl", rows)
    run = streamed(tmp_path, task=asked, micro_batches=2, batch_size=8)
    task = task_of(run)
    assert examples_of(task.splits["train"]) == cached(run)
    assert feed_of(run).make(1).targets > 0


KINDS: dict[str, dict[str, Any]] = {
    "translation": {},
    "a translation in two columns": {"task": {"source": "from.0", "target": "to"}},
    "token_classification": {},
    "reward": {},
    "preference": {"task": {"loss": "simpo"}},
    "masked": {"task": {"packing": False}},
    "questions": {},
}


@pytest.mark.parametrize("kind", KINDS)
def test_other_tasks_are_streamed(kind: str, tmp_path: Path) -> None:
    draw = random.Random(2)
    of = "translation" if kind.startswith("a translation") else kind
    for name, count in (("train-0.jsonl.gz", 30), ("train-1.jsonl", 13), ("validation.jsonl", 12)):
        rows = [rows_of_kind(of, draw) for _ in range(count)]
        if kind != of:
            rows = [{"from": [row["translation"]["en"]], "to": row["translation"]["de"]} for row in rows]
        write(tmp_path / name, rows)
    values = {**TASKS[of], "task": TASKS[of]["task"] | KINDS[kind].get("task", {})}
    run = streamed(tmp_path, "micro_batches=2", "batch_size=8", data={"max_length": 48}, **values)
    task = task_of(run)
    found = task.splits["train"]
    assert isinstance(found, Streamed)
    assert examples_of(found) == cached(run)
    assert len(found) >= 43
    feed = feed_of(run)
    assert feed.longest().targets > 0
    batch = feed.make(3)
    assert batch.targets == sum(float(task.targets_in_batch(m.targets)) for m in batch.micro_batches) > 0


@pytest.mark.parametrize("cross", [True, False])
def test_packed_texts_lose_no_token_and_blocks_are_full_but_for_the_last_of_a_chunk(
    cross: bool, tmp_path: Path
) -> None:
    run = streamed(
        shards(tmp_path), "data.stream_window=8", **LM | {"task": LM["task"] | {"attend_across_documents": cross}}
    )
    found, wanted = examples_of(task_of(run).splits["train"]), cached(run)
    scored = [sum(t >= 0 for row in rows for t in row[1]) for rows in (found, wanted)]
    assert 0 <= scored[1] - scored[0] <= 20  # each chunk's first token has no context, if texts are read continuously
    assert cross or scored[0] == scored[1]
    assert sum(len(row[0]) < 24 for row in found) <= 20
    assert max(len(row[0]) for row in found) == 24


@pytest.mark.parametrize("values", [{}, LM])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_share_the_examples_of_a_step(ranks: int, values: dict[str, Any], tmp_path: Path) -> None:
    run = streamed(shards(tmp_path, ".jsonl.gz"), "micro_batches=4", "batch_size=10", **values)
    feeds = [feed_of(run, rank, ranks) for rank in range(ranks)]
    whole = feed_of(run)
    for step in (0, 4, 5, 11, 3):
        parts = [feed.make(step) for feed in feeds]
        rows = whole.order.step(step)
        assert all(part.ids.tolist() == rows.tolist() for part in parts)
        assert len({(p.targets, p.tokens, p.padded, p.examples) for p in parts}) == 1
        assert sum(int((m.targets >= 0).sum()) for p in parts for m in p.micro_batches) == parts[0].targets
        if not values:
            assert sorted(row for part in parts for row in rows_in(part)) == sorted(wanted_rows(whole, rows))


@pytest.mark.slow
def test_a_resume_repeats_batches_and_reads_one_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = streamed(shards(tmp_path, ".jsonl.gz", [60] * 10), "epochs=2", "steps=null", "data.stream_window=40")
    untouched = [batch.ids.tolist() for batch in feed_of(run).steps(0)]
    read: list[int] = []
    parsed = row_reader.LineReader._parsed

    def counted(self: row_reader.LineReader, block: bytes, row: int, line: int | None = None) -> Any:
        read.append(block.count(b"\n"))
        return parsed(self, block, row, line)

    monkeypatch.setattr(row_reader.LineReader, "_parsed", counted)
    assert len(untouched) == 56
    for after in (0, 1, 18, 27, 44):
        feed = feed_of(run)
        read.clear()
        assert feed.make(after).ids.tolist() == untouched[after]
        assert sum(read) <= 2 * 40 + 2 * 22 + 4 * 6  # rows, for any starting step
        # this covers the beginning and the end of the second epoch
        assert [batch.ids.tolist() for batch in islice(feed.steps(after), 12)] == untouched[after:][:12]


@pytest.mark.slow
def test_memory_does_not_grow(tmp_path: Path) -> None:
    most = []
    for count in (6, 24):
        folder = shards(tmp_path / str(count), ".jsonl.zst", [30] * count)
        feed = feed_of(streamed(folder, "epochs=1", "steps=null", "batch_size=10", "data.stream_window=30"))
        chunks, held = feed.columns._shards, []  # type: ignore[attr-defined]
        for step in range(feed.total):
            feed.make(step)
            held.append(sum(len(batch) for batch in chunks._opened.values()))
            assert {key[0] for key in chunks._lists} <= chunks._opened.keys()
        most.append(max(held))
    assert most[1] <= most[0] + 12 <= 2 * 30 + 2 * 10 + 2 * 12 + 12


def test_rows_are_dropped_and_counted(tmp_path: Path) -> None:
    rows = rows_of(60)
    for i in (3, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30):  # they include one chunk
        rows[i]["text"] = ""
    for i, row in enumerate(rows):
        row["stars"] = i % 5
    del rows[59]["text"]
    write(tmp_path / "train-0.jsonl", rows)
    write(tmp_path / "validation.jsonl", [row | {"stars": 1} for row in rows_of(8, 1)])
    run = streamed(tmp_path, data={"filter": {"stars": {"max": 3}}, "drop_missing": True})
    task = task_of(run)
    assert task.prepared.facts["filtered"] == {"train": 12}
    assert task.prepared.facts["left_out"] == {"train": 10}
    assert len(task.splits["train"]) == 60 - 12 - 10
    assert examples_of(task.splits["train"]) == cached(run)


def test_the_longest_example_is_found_in_one_chunk(tmp_path: Path) -> None:
    rows = rows_of(80)
    rows[41]["text"] = "dog " * 25
    write(tmp_path / "train-0.jsonl.gz", rows)
    write(tmp_path / "validation.jsonl", rows_of(8, 1))
    feed = feed_of(streamed(tmp_path))
    batch = feed.longest()
    assert set(batch.ids.tolist()) == {41}
    assert len(batch.ids) == feed.order.batch_size


@pytest.mark.parametrize("lm", [False, True])
def test_rows_in_validation_are_reported_or_dropped(lm: bool, tmp_path: Path) -> None:
    held = rows_of(10, 99)
    held[7]["text"] = held[2]["text"]
    rows = rows_of(40)
    for at, of in ((5, 2), (6, 2), (31, 3)):
        rows[at]["text"] = f"  {held[of]['text']} "
    write(tmp_path / "train-0.jsonl.gz", rows[:20])
    write(tmp_path / "train-1.jsonl", rows[20:])
    write(tmp_path / "validation.jsonl", held)
    values = {"task": LM["task"] | {"packing": False}} if lm else {}
    run = streamed(tmp_path, **values)
    task = task_of(run)
    told = task.prepared.facts["overlap"]
    assert told.keys() == {"validation"}
    assert (told["validation"]["examples"], told["validation"]["of"], told["validation"]["row"]) == (3, 10, 2)
    assert len(task.splits["train"]) == 40
    (line,) = warnings(task.prepared.facts)
    assert f"row 2 of validation, rows 0 to 5 of {tmp_path}/train-0.jsonl.gz: '{held[2]['text']}'" in line
    dropping = run.model_copy(update={"data": run.data.model_copy(update={"decontaminate": True})})
    task = task_of(dropping)
    assert task.prepared.facts["dropped"] == {"train": 3}
    assert "left_out" not in task.prepared.facts
    assert warnings(task.prepared.facts) == []
    found, texts = task.splits["train"], [row["text"] for i, row in enumerate(rows) if i not in (5, 6, 31)]
    assert examples_of(found) == cached(dropping)
    if not lm:
        assert sum(task.prepared.facts["of_label"]) == len(found) == len(texts)
    assert feed_of(dropping).make(1).targets > 0  # each chunk is checked against the index
    write(tmp_path / "validation.jsonl", rows_of(10, 98))
    assert "overlap" not in task_of(dropping).prepared.facts


def test_a_tokenizer_is_trained_on_the_rows_and_columns_that_are_used(tmp_path: Path) -> None:
    rows = [row | {"other": "quite another word", "stars": i % 3} for i, row in enumerate(rows_of(30))]
    write(tmp_path / "train-0.jsonl", rows)
    write(tmp_path / "validation.jsonl", rows)
    folders = {
        task_of(run).prepared.tokenizer
        for run in (
            streamed(tmp_path),
            streamed(tmp_path, data={"filter": {"stars": {"min": 1}}}),
            streamed(tmp_path, task={"text": "other"}),
        )
    }
    assert len(folders) == 3
