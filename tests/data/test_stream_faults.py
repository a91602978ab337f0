"""Streams that are configured wrongly, damaged, or changed while they are read: one message with file and row, and a
stop from which training can resume."""

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

from lockstep.config.errors import uncoded
from lockstep.config.run import RunError
from lockstep.data import arrow_cache as shard_index
from lockstep.data import row_reader
from lockstep.data.streamed import Streamed, Unreadable
from support.command import LOCKSTEP, ended, lines, start
from support.command import write as write_run
from support.harness import run_on, tiny
from support.marks import long
from support.messages import mentions, raises
from support.stream_runs import (
    LM,
    PACKERS,
    archive_of,
    changed,
    feed_of,
    rows_of,
    shards,
    streamed,
    task_of,
    trained,
    write,
)


@pytest.fixture(autouse=True)
def _one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_index, "available_cores", lambda: 1)


# -- wrong configuration ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "told"),
    [
        (
            "data.deduplicate=true",
            "deduplicate cannot be combined with data.stream: it needs all rows of train at once",
        ),
        (
            "data.validation_fraction=0.2",
            "validation_fraction cannot be combined with data.stream: splitting it off needs all",
        ),
        (
            "data.test_fraction=0.1",
            "test_fraction cannot be combined with data.stream: splitting it off needs all rows",
        ),
        ("data.split_column=split", "split_column cannot be combined with data.stream"),
        (
            "data.group_by_length=5",
            "group_by_length cannot be combined with data.stream: it sorts the examples of many steps",
        ),
        (
            "data.filter={text: {min_tokens: 3}}",
            "filter: text: the tokens of a stream cannot be counted before it is encoded",
        ),
        ("data.limit=10", "limit cannot be combined with data.stream: name fewer shards in data.train"),
        ("data.layout=parallel", "layout cannot be combined with data.stream"),
        ("data.columns=[text]", "columns cannot be combined with data.stream: a stream reads no .csv"),
        ("data.encoding=latin-1", "encoding cannot be combined with data.stream: a stream reads UTF-8 only"),
        ("model.compile=true", "model.compile: it needs the shortest of all examples"),
        ("data.stream=false", "stream_window has an effect only with data.stream; set data.stream=true"),
        ("data.stream_window=0", "data.stream_window"),
    ],
)
def test_keys_without_stream_support_are_refused(override: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(RunError) as caught:
        streamed(tmp_path, override)
    assert told in str(caught.value)


def test_tasks_that_cannot_stream_are_refused(tmp_path: Path) -> None:
    with raises("LS1119", "data.stream"):
        streamed(tmp_path, task={"name": "embedding"})
    with raises("LS1119", "data.stream"):
        streamed(tmp_path, task={"name": "preference"})
    with raises("LS1119", "data.stream", "multi_label"):
        streamed(tmp_path, task={"multi_label": True})
    with pytest.raises(RunError) as caught:  # one line per error, all with the code
        streamed(tmp_path, "batch_size=5", "micro_batches=4", task={"name": "embedding"})
    each = str(caught.value).splitlines()
    assert [line.partition(":")[0] for line in each] == ["batch_size", "data.stream"]
    assert all(mentions(line, "LS1119") for line in each)


def said(folder: Path, *overrides: str, **values: Any) -> str:
    with pytest.raises(RunError) as caught:
        task_of(streamed(folder, *overrides, **values))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_files_that_cannot_be_streamed_are_named(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", rows_of(40))
    assert mentions(said(tmp_path), "LS2260")
    validation = write(tmp_path / "validation.jsonl", rows_of(8, 1))
    for name in ("rows.csv", "rows.json", "rows.tsv.gz"):
        (tmp_path / name).write_text("a")
        told = said(tmp_path, f"data.train={tmp_path / name}")
        assert told.startswith(f"data.train: {tmp_path / name} cannot be streamed, because the start of its rows")
    (tmp_path / "rows.txt").write_text("some text\n")
    told = said(tmp_path, f"data.train={tmp_path / 'rows.txt'}", **LM)
    assert mentions(told, "LS2221")
    assert mentions(said(tmp_path, "data.source=builtin/emotion"), "LS2244", "builtin/emotion")
    told = said(tmp_path, "data.source=some/set")
    assert mentions(told, "LS2087", "some/set", "HF_HUB_OFFLINE")
    archive = tmp_path / "more.tar"
    archive.write_bytes(archive_of("more", rows_of(5)))
    run = tiny("data.limit=null", f"data.source={archive}")
    with raises("LS2193", "more.tar"):
        task_of(run)
    assert mentions(said(tmp_path, f"data.validation={archive}"), "LS2193", "more.tar")
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    told = said(tmp_path, f"data.train={empty}", f"data.validation={validation}")
    assert uncoded(told) == f"data.train: nothing to train on: no row is used in 1 shard, beginning with {empty}"
    told = said(tmp_path, f"data.train={empty}", f"data.validation={validation}", **LM)
    assert f"no example in 1 shard, beginning with {empty}" in uncoded(told)
    rows = tmp_path / "train.jsonl"
    told = said(tmp_path, f"data.train={rows}", f"data.validation={validation}", "data.filter={label: [anger]}")
    assert "data.filter: no row of the validation split" in told
    write(validation, [row | {"label": "anger"} for row in rows_of(8, 1)])
    told = said(tmp_path, f"data.train={rows}", f"data.validation={validation}", "data.filter={label: [anger]}")
    assert uncoded(told).endswith(f"no row is used in 1 shard, beginning with {rows}")


def test_a_text_file_is_streamed_line_by_line(tmp_path: Path) -> None:
    (tmp_path / "train-1.txt.gz").write_bytes(gzip.compress("\n".join(f"text {i} ; of;joy" for i in range(9)).encode()))
    (tmp_path / "train-2.txt").write_text("a text;fear\n\nanother;joy\n")
    (tmp_path / "validation.txt").write_text("a;joy\nb;fear\n")
    task = task_of(streamed(tmp_path))
    assert task.labels == ["fear", "joy"]
    assert [int(label) for label in task.splits["train"].flat("label")[range(11)]] == [1] * 9 + [0, 1]
    asked = {"name": "language_modeling", "document": "line", "packing": False, "block_size": 16}
    assert len(task_of(streamed(tmp_path, task=asked)).splits["train"]) == 11


# -- damaged ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [p for p in PACKERS if p])
def test_a_truncated_shard_is_named_with_its_row(packed: str, tmp_path: Path) -> None:
    folder = shards(tmp_path, f".jsonl{packed}", [40, 3000])
    path = folder / f"train-01.jsonl{packed}"
    path.write_bytes(path.read_bytes()[:-200])
    told = said(folder)
    assert told.startswith(f"data.train: cannot unpack {path} from row ")
    assert "the file is truncated, damaged" in told
    assert 0 <= int(told.partition("from row ")[2].partition(" ")[0].replace(",", "")) < 3000
    path.write_bytes(b"")
    assert f"cannot unpack {path} from row 0 on (it has no bytes)" in said(folder)
    path.write_bytes(b"what is this")
    assert f"cannot unpack {path} from row 0 on" in said(folder)


@pytest.mark.parametrize("cut", [700, 1024])
def test_a_truncated_archive_is_named(cut: int, tmp_path: Path) -> None:
    folder = shards(tmp_path, ".tar", [40, 30])
    write(
        folder / "validation.jsonl", [{"txt": "a", "json": {"label": "joy"}}, {"txt": "b", "json": {"label": "fear"}}]
    )
    path = folder / "train-01.tar"
    whole = path.read_bytes().rstrip(b"\0")
    whole += bytes(-len(whole) % 512)
    # all members without the end of the archive, or a part of the last member
    path.write_bytes(whole if cut == 1024 else whole[:-cut])
    told = said(folder, task={"text": "txt", "label": "json.label"})
    assert told.startswith(f"data.train: cannot read {path} from row ")


def test_truncated_parquet_is_named(tmp_path: Path) -> None:
    path = shards(tmp_path, ".parquet") / "train-02.parquet"
    path.write_bytes(path.read_bytes()[:-30])
    assert said(tmp_path).startswith(f"data.train: cannot read {path} from row 0 on (")


def test_rows_that_cannot_be_used_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_reader, "ROWS", 10)
    folder = shards(tmp_path)
    path = folder / "train-02.jsonl"
    good = path.read_text().splitlines()

    def with_row(text: str, row: int = 25) -> str:
        path.write_text("\n".join([*good[:row], text, *good[row + 1 :]]) + "\n")
        return said(folder)

    assert with_row("{'text': 1}").startswith(f"data.train: {path}, line 26, column 2: expecting property name")
    assert with_row("[1]").startswith(f"data.train: {path}, line 26 holds a list; expected a mapping")
    where = f"(rows are counted from row 20 of {path})"
    assert "task.text: column 'text' of the train split of train-02.jsonl must have a value" in with_row(
        '{"label": "joy"}'
    )
    assert "1 of 10 rows have none (row 5 holds None)" in said(folder)
    assert uncoded(said(folder)).endswith(where)
    told = with_row('{"text": 7, "label": "joy"}')
    assert mentions(told, "LS2314", "'text'", "row 5 holds 7")
    assert uncoded(told).endswith(where)
    assert mentions(with_row('{"text": "a", "label": ["joy"]}'), "LS2105", "row 5 holds ['joy']")
    assert mentions(with_row('{"text": "a", "label": 7}'), "LS2106", "row 5 holds 7")
    path.write_bytes("\n".join(good).encode()[:-10] + b"\xff\xfe\n")
    assert f"{path} is not text in UTF-8 (line {len(good)}: invalid start byte)" in said(folder)
    path.write_text("\n".join(good).replace('"text"', '"body"'))
    assert "data.train: train-02.jsonl has no column 'text'; it has body, label" in said(folder)
    path.write_text("\n".join(json.dumps({"text": "a", "label": i % 2}) for i in range(5)))
    assert mentions(said(folder), "LS2104", f"in rows 0 to 4 of {path}")


# -- files that change during training -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("gone", "no longer exists, and row "),
        ("cut", "bytes now, and had "),
        ("unlike", "a label that was missing when training began: 'fun'"),
        ("other", "the rows have changed since the shards were indexed"),
    ],
)
def test_a_changed_shard_is_reported_before_it_is_needed(how: str, told: str, tmp_path: Path) -> None:
    run = streamed(shards(tmp_path, sizes=[200] * 4), "data.stream_window=8", "batch_size=8", "epochs=1", "steps=null")
    feed = feed_of(run)
    assert isinstance(feed.columns, Streamed)
    last = feed.columns.place(int(feed.order.step(feed.total - 1)[0])).partition(",")[0]
    changed(Path(last), how)
    heard: list[str] = []
    found = feed.steps(0, lambda caught: heard.append(str(caught)))
    steps: list[int] = []
    asked: list[int] = []

    def go() -> None:
        for batch in found:
            steps.append(batch.step)
            asked.extend([batch.step] * (len(heard) > len(asked)))

    with pytest.raises(Unreadable) as caught:
        go()
    assert heard == [str(caught.value)]
    assert told in heard[0]
    assert last in heard[0]
    assert "Restore the file, and the same command resumes" in heard[0]
    assert steps[-1] - asked[0] == 1  # two more steps: one to ask all ranks to stop, one to receive the answer
    if how == "other":  # its size and time are those in the index
        with pytest.raises(Unreadable):
            next(feed_of(run).steps(steps[-1] + 1))


# -- training --------------------------------------------------------------------------------------------------------


@pytest.mark.processes
@pytest.mark.parametrize("values", [long({}), LM])
def test_the_same_bits_on_one_two_and_three_processes(values: dict[str, Any], tmp_path: Path) -> None:
    run = streamed(shards(tmp_path, ".jsonl.gz"), "strategy.name=ddp", "steps=12", **values)
    (alone,) = run_on(1, trained, run)
    for ranks in (2, 3):
        found = run_on(ranks, trained, run)
        assert found[0] == alone
        assert all(other["losses"] == alone["losses"] for other in found)
    (control,) = run_on(1, trained, run.model_copy(update={"seed": 1}), run=run)
    assert control["weights"] != alone["weights"]


@pytest.mark.processes
def test_a_run_stops_before_a_changed_shard_and_resumes_once_restored(tmp_path: Path, cache: Path) -> None:
    folder = shards(tmp_path / "data", sizes=[64] * 5)
    data = {"source": str(folder), "stream": True, "stream_window": 16, "max_length": 32}
    values: dict[str, Any] = {"data": data, "steps": 30, "batch_size": 8, "evaluate": {"every": 0}}
    job, untouched = tmp_path / "job", tmp_path / "untouched"
    for each in (job, untouched):
        write_run(each, **values)
    status, _, err = ended(start([*LOCKSTEP, "train", "run.yaml"], untouched, cache))
    assert status == 0, err
    feed = feed_of(streamed(folder, "data.stream_window=16", "batch_size=8", "steps=30"))
    assert isinstance(feed.columns, Streamed)
    path = Path(feed.columns.place(int(feed.order.step(26)[0])).partition(",")[0])
    was, before = path.read_text(), path.stat()
    changed(path, "other")
    status, out, err = ended(start([*LOCKSTEP, "train", "run.yaml"], job, cache))
    assert status == 75, err
    assert "the rows have changed since the shards were indexed" in err
    assert f"data.train: {path}, rows " in err
    assert "stopped on request after step " in out
    stopped = max(line["step"] for line in lines(job))
    path.write_text(was)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    status, out, err = ended(start([*LOCKSTEP, "train", "run.yaml", "launch.processes=3"], job, cache))
    assert status == 0, err
    assert f"resuming after step {stopped}" in out
    exports = [(each / "out/export/model.safetensors").read_bytes() for each in (job, untouched)]
    assert exports[0] == exports[1]
