"""`lockstep init` recognises compressed files, several formats, columns within columns and a column of splits."""

import bz2
import gzip
import json
import random
from pathlib import Path

import pyarrow as pa
import pytest

from lockstep.cli import main
from lockstep.config import plugins
from lockstep.config.run import Run, load
from lockstep.data.prepare import prepare
from support.init_runs import check_arithmetic, here, written
from support.messages import mentions

__all__ = ["here"]  # fixtures

WORDS = ("sad", "happy", "tired", "the", "sun", "went", "down", "over", "my", "house", "again", "until", "nobody")


def texts(count: int, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(4, 12))) + f" {i}" for i in range(count)]


def lines(rows: list[dict]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


LABELLED = [{"text": text, "label": "joy" if i % 2 else "fear"} for i, text in enumerate(texts(120))]


def test_a_compressed_table_without_a_header(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = "".join(f'"I feel it, {row["text"]}",{row["label"]}\n' for row in LABELLED).encode()
    (here / "a.csv.zst").write_bytes(pa.compress(table, codec="zstd", asbytes=True))
    run = written("--data", "a.csv.zst", "--model", "scratch")
    assert (run.data.source, run.data.columns) == ("a.csv.zst", ["text", "label"])
    assert "a.csv.zst has no header" in capsys.readouterr().out
    check_arithmetic(here / "run.yaml")


def test_a_folder_of_several_formats(here: Path) -> None:
    (here / "mix").mkdir()
    (here / "mix/a.jsonl.bz2").write_bytes(bz2.compress(lines(LABELLED[:60])))
    rest = "".join(f"{row['text']},{row['label']}\n" for row in LABELLED[60:])
    (here / "mix/b.csv").write_text(f"text,label\n{rest}")
    run = written("--data", "mix", "--model", "scratch")
    assert (run.data.source, run.task.name, run.task.options["label"]) == ("mix", "classification", "label")
    assert "mix: 120 train examples" in (here / "run.yaml").read_text()


def test_a_column_of_splits(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train"] * 8 + ["dev", "test"]
    rows = [row | {"split": words[i % 10]} for i, row in enumerate(LABELLED)]
    (here / "one.jsonl.gz").write_bytes(gzip.compress(lines(rows)))
    run = written("--data", "one.jsonl.gz", "--model", "scratch")
    assert (run.data.split_column, run.task.options["label"]) == ("split", "label")
    said = capsys.readouterr().out
    assert "column split names the split of each row" in said
    assert "96 train, 12 validation, 12 test examples; columns text (text), label (text)" in " ".join(said.split())
    check_arithmetic(here / "run.yaml")


def test_column_with_values_other_than_splits_is_noted_and_not_used(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train"] * 7 + ["dev", "test", "holdout"]
    (here / "one.jsonl").write_bytes(lines([row | {"split": words[i % 10]} for i, row in enumerate(LABELLED)]))
    run = written("--data", "one.jsonl", "--model", "scratch")
    assert run.data.split_column is None
    said = " ".join(capsys.readouterr().out.split())
    assert "except in rows with holdout: all are used as train" in said
    told = ["data.split_column=split", "data.filter={split: {none_of: [holdout]}}"]
    found = prepare(load("run.yaml", told), plugins.find("tasks", "classification"))  # type: ignore[type-abstract]
    assert set(found.splits) == {"train", "validation", "test"}


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        (
            "a.jsonl",
            lines([*LABELLED, {"text": 5, "label": "joy"}]),
            "data.train: column 'text' of a.jsonl holds texts, but row 120 holds '5': make it a text, or remove",
        ),
        (
            "a.csv",
            b"text,label\nsome text,joy\nmore, and more,fear\n" * 20,
            "data.train: a.csv, line 3: the row has 3 columns, and the header has 2: 'more | and more | fear'. Put",
        ),
    ],
)
def test_deviating_rows_are_named(
    name: str, content: bytes, told: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / name).write_bytes(content)
    assert main(["init", "run.yaml", "--data", name, "--model", "scratch"]) == 2
    assert told in " ".join(capsys.readouterr().err.split())


def test_columns_within_columns(here: Path) -> None:
    rows = [{"data": {"text": row["text"], "lang": "en"}, "meta": {"label": row["label"]}} for row in LABELLED]
    (here / "deep.jsonl").write_bytes(lines(rows))
    run = written("--data", "deep.jsonl", "--model", "scratch")
    assert (run.task.name, run.task.options["text"]) == ("classification", "data.text")
    assert run.task.options["label"] == "meta.label"
    questions = [
        {"id": str(i), "context": f"{text}.", "question": f"{text}?", "answers": {"text": [text], "answer_start": [0]}}
        for i, text in enumerate(texts(120, 1))
    ]
    (here / "squad.jsonl").write_bytes(lines(questions))
    run = written("--data", "squad.jsonl", "--model", "scratch", path="squad.yaml")
    assert (run.task.name, run.task.options["context"]) == ("question_answering", "context")
    flat = [{**row, "meta": {"source": "web" if i % 2 else "book"}} for i, row in enumerate(LABELLED)]
    (here / "flat.jsonl").write_bytes(lines(flat))  # what is beside what a task needs is left alone
    assert written("--data", "flat.jsonl", "--model", "scratch", path="flat.yaml").task.options["text"] == "text"


def test_examples_in_two_splits_are_noted(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "both").mkdir()
    (here / "both/train.jsonl").write_bytes(lines(LABELLED))
    (here / "both/test.jsonl").write_bytes(lines([*LABELLED[4:7], {"text": "something else", "label": "joy"}]))
    written("--data", "both", "--model", "scratch")
    assert "note: 3 of 4 test rows are also in train" in " ".join(capsys.readouterr().out.split())
    assert "Note: 3 of 4 test rows are also in train" in (here / "run.yaml").read_text()


# -- several together ------------------------------------------------------------------------------------------------


def rows_of(run: Run) -> dict[str, list[int]]:
    rows: dict[str, list[int]] = prepare(run, plugins.find("tasks", run.task.name)).facts["sources"]["rows"]  # type: ignore[type-abstract]
    return rows


def test_several_sources_become_a_mixture(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "web.jsonl.gz").write_bytes(gzip.compress(lines(LABELLED[:80])))
    (here / "chat.csv").write_text("".join(f'"I feel it, {r["text"]}",{r["label"]}\n' for r in LABELLED[80:]))
    for i, row in enumerate(LABELLED[:20]):
        place = here / "boxes" / row["label"] / f"{i}.txt"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(f"boxed {row['text']}")
    deep = [{"said": {"text": f"book {r['text']}"}, "mood": r["label"]} for r in LABELLED[:40]]
    (here / "book.jsonl").write_bytes(lines(deep))
    (here / "runs").mkdir()
    given = [word for name in ("web.jsonl.gz", "chat.csv", "boxes", "book.jsonl") for word in ("--data", name)]
    path = "runs/mixed.yaml"
    assert main(["init", path, "--yes", "--model", "scratch", *given, "data.max_length=24"]) == 0
    run = load(path, [])
    web, chat, boxes, book = run.data.sources or []
    assert (web.name, web.source, web.rename) == ("web", "web.jsonl.gz", {})
    assert (chat.name, chat.source, chat.columns) == ("chat", "chat.csv", ["text", "label"])
    assert (boxes.name, boxes.source, boxes.layout) == ("boxes", "boxes", "class_folders")
    assert (book.name, book.source) == ("book", "book.jsonl")
    assert book.rename == {"text": "said.text", "label": "mood"}
    assert run.data.max_length == 24
    assert rows_of(run) == {"train": [72, 36, 18, 36], "validation": [8, 4, 2, 4]}
    assert "book.jsonl: text is called said.text, label is called mood" in capsys.readouterr().out
    check_arithmetic(here / path)


def test_files_of_the_same_name_are_called_by_their_folders(here: Path) -> None:
    for folder in ("a", "b"):
        (here / folder).mkdir()
        (here / folder / "train.jsonl").write_bytes(lines([{"body": text} for text in texts(60)]))
    (here / "c.txt").write_text("\n".join(texts(60)))
    given = ["--data", "a/train.jsonl", "--data", "b/train.jsonl", "--data", "c.txt"]
    run = written(*given, "--model", "scratch")
    sources = run.data.sources or []
    assert [(each.name, each.rename) for each in sources] == [("a_train", {}), ("b_train", {}), ("c", {"body": "text"})]
    assert (run.task.name, run.task.options["document"]) == ("language_modeling", "line")


def test_sources_that_do_not_fit_each_other_are_named(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "a.jsonl").write_bytes(lines(LABELLED))
    (here / "b.jsonl").write_bytes(lines([{"amount": i} for i in range(40)]))
    assert main(["init", "run.yaml", "--yes", "--model", "scratch", "--data", "a.jsonl", "--data", "b.jsonl"]) == 2
    told = capsys.readouterr().err
    assert mentions(told, "LS8282", "b.jsonl", "'text'")
    assert not (here / "run.yaml").exists()
    (here / "ds.json").write_text("{}")
    assert main(["init", "--from", "ds.json", "--data", "a.jsonl", "--data", "b.jsonl"]) == 2
    assert mentions(capsys.readouterr().err, "LS8109")


def test_data_that_are_not_there_are_called_as_they_were_given(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "run.yaml", "--yes", "--data", "gone.csv"]) == 2
    assert mentions(capsys.readouterr().err, "LS2250", "--data: no such file or folder")
    assert main(["init", "run.yaml", "--yes", "data.source=gone.csv"]) == 2
    assert mentions(capsys.readouterr().err, "LS2250", "data.source: no such file or folder")
