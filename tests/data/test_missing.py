"""Rows without a text or a label: refused, with the key that drops them, or dropped and counted, in every task."""

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from lockstep.config.run import RunError
from lockstep.data.arrow_cache import Columns
from lockstep.data.prepare import left_out
from support.caches import prepared
from support.messages import raises
from support.rows import run_of
from support.task_runs import TASKS, rows_of, write

pytestmark = pytest.mark.slow  # together a third of the time of tests without processes

GOOD: dict[str, list[dict]] = {
    "classification": [{"text": f"word {i}", "label": "joy" if i % 2 else "anger"} for i in range(40)],
    "pairs": [{"text": f"word {i}", "other": f"another {i}", "label": i % 2} for i in range(40)],
}
LACKING: dict[str, tuple[dict[str, Any], str]] = {
    "no text": ({"text": None}, "task.text"),
    "an empty text": ({"text": ""}, "task.text"),
    "a blank text": ({"text": " \n\t"}, "task.text"),
    "no label": ({"label": None}, "task.label"),
    "an empty label": ({"label": ""}, "task.label"),
    "a blank label": ({"label": "  "}, "task.label"),
}


def save(path: Path, rows: list[dict]) -> Path:
    if path.suffix == ".csv":
        datasets.Dataset.from_list(rows).to_csv(path, index=False)
    elif path.suffix == ".parquet":
        datasets.Dataset.from_list(rows).to_parquet(path)
    else:
        write(path, rows)
    return path


@pytest.mark.parametrize("ending", [".csv", ".jsonl", ".parquet"])
@pytest.mark.parametrize("case", LACKING)
def test_incomplete_rows_are_refused_or_dropped(case: str, ending: str, tmp_path: Path) -> None:
    change, key = LACKING[case]
    rows = [row | change if i in (4, 9) else row for i, row in enumerate(GOOD["classification"])]
    path = save(tmp_path / f"data{ending}", rows)
    with pytest.raises(RunError) as caught:
        prepared(run_of(path))
    assert str(caught.value).startswith(f"{key}: column {key[5:]!r} of the train split of ")
    assert "but 2 of 40 rows have none (row 4 holds " in str(caught.value)
    assert "set data.drop_missing=true" in str(caught.value)
    found = prepared(run_of(path, "data.drop_missing=true"))
    assert found.facts["left_out"] == {"train": 2}
    assert found.facts["labels"] == ["anger", "joy"]
    whole = prepared(run_of(save(tmp_path / f"whole{ending}", [r for i, r in enumerate(rows) if i not in (4, 9)])))
    assert found.key == whole.key
    assert "left_out" not in whole.facts


def test_missing_values_of_several_columns_are_one_message(tmp_path: Path) -> None:
    rows = [row | ({"text": ""} if i == 3 else {"other": None} if i < 6 else {}) for i, row in enumerate(GOOD["pairs"])]
    path = save(tmp_path / "data.jsonl", rows)
    with pytest.raises(RunError) as caught:
        prepared(run_of(path, "task.text_pair=other"))
    head, first, second = caught.value.message.splitlines()
    assert head.endswith(":")
    assert first.startswith("  task.text: ")
    assert "1 of 40 rows have none (row 3 holds '')" in first
    assert f"train split of {path} must" in first
    assert second.startswith("  task.text_pair: ")
    assert "5 of 40 rows have none (row 0 holds None)" in second


def test_integer_labels_stay_integers(tmp_path: Path) -> None:
    """A CSV reader turns a column with an empty cell into text; ten classes in text order would be 0, 1, 10."""
    rows: list[dict] = [{"text": f"word {i}", "label": i % 11} for i in range(110)]
    rows[7]["label"] = None
    path = save(tmp_path / "data.csv", rows)
    assert ",\n" in path.read_text()
    found = prepared(run_of(path, "data.drop_missing=true"))
    assert found.facts["labels"] == [str(i) for i in range(11)]
    named = prepared(run_of(path, "data.drop_missing=true", f"task.label_names={list('abcdefghijk')}"))
    assert named.facts["labels"] == list("abcdefghijk")


def test_minus_one_is_a_missing_label_if_labels_have_names(tmp_path: Path) -> None:
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["no", "yes"])})
    rows = [{"text": f"word {i}", "label": -1 if i == 5 else i % 2} for i in range(40)]
    datasets.Dataset.from_list(rows, features=features).to_parquet(tmp_path / "a.parquet")
    with raises("LS2323", "task.label", "1", "40", "5", "-1"):
        prepared(run_of(tmp_path / "a.parquet"))
    assert prepared(run_of(tmp_path / "a.parquet", "data.drop_missing=true")).facts["left_out"] == {"train": 1}


def test_dropping_every_row_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "data.jsonl", [{"text": "", "label": 1}] * 9)
    with raises("LS2313", "'text'"):
        prepared(run_of(path, "data.drop_missing=true"))


# kind of task_runs -> what a row lacks, and the key in the message
OTHERS: dict[str, list[tuple[dict[str, Any], str]]] = {
    "packed": [({"text": None}, "task.text"), ({"text": ""}, "task.text"), ({"text": " "}, "task.text")],
    "prompts": [({"question": ""}, "task.prompt"), ({"answer": None}, "task.response")],
    "messages": [
        ({"messages": None}, "task.messages"),
        ({"messages": []}, "task.messages"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": None}]}, "task.messages"),
    ],
    "translation": [
        ({"translation": {"en": "", "de": "b"}}, "task.source"),
        ({"translation": {"en": "a", "de": None}}, "task.target"),
        ({"translation": None}, "task.source"),
    ],
    "token_classification": [
        ({"tokens": None, "tags": None}, "task.words"),
        ({"tokens": [], "tags": []}, "task.words"),
        ({"tokens": [], "tags": ["O"]}, "task.words"),
        ({"tokens": ["a", "b"], "tags": []}, "task.tags"),
        ({"tokens": ["a", ""], "tags": ["O", "O"]}, "task.words"),
        ({"tokens": ["a", "b"], "tags": ["O", None]}, "task.tags"),
        ({"tokens": ["a", "b"], "tags": ["", "O"]}, "task.tags"),
    ],
    "pairs": [({"negative": None}, "task.negative"), ({"negative": []}, "task.negative")],
    "preference": [({"rejected": []}, "task.rejected")],
    "questions": [({"answers": {}}, "task.answers")],
}


@pytest.mark.parametrize(("kind", "place"), [(kind, i) for kind, cases in OTHERS.items() for i in range(len(cases))])
def test_every_task_handles_missing_values(kind: str, place: int, tmp_path: Path) -> None:
    import random

    change, key = OTHERS[kind][place]
    draw = random.Random(0)
    rows = [rows_of(kind, draw) for _ in range(60)]
    write(tmp_path / "data.jsonl", [row | change if i == 4 else row for i, row in enumerate(rows)])
    values = TASKS[kind] | {"tokenizer": {"train": "bpe", "vocab_size": 400}}
    with raises("LS2323", str(key), "1", "60", "4", "data.drop_missing=true"):
        prepared(run_of(tmp_path / "data.jsonl", **values))
    found = prepared(run_of(tmp_path / "data.jsonl", "data.drop_missing=true", **values))
    write(tmp_path / "whole.jsonl", [row for i, row in enumerate(rows) if i != 4])
    whole = prepared(run_of(tmp_path / "whole.jsonl", **values))
    assert found.key == whole.key
    assert found.facts["left_out"] == {"train": 1}
    if kind == "token_classification":
        assert found.facts["labels"] == ["B-ANIMAL", "I-ANIMAL", "O"]


def test_conversations_and_label_lists_handle_missing_values(tmp_path: Path) -> None:
    talk = [[{"role": "user", "content": f"a{i}"}, {"role": "assistant", "content": f"b{i}"}] for i in range(40)]
    template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    task = {"name": "preference", "prompt": None, "conversations": True, "chat_template": template}
    other = {"role": "assistant", "content": "another answer"}
    answers: list[dict] = [{"chosen": some, "rejected": [*some[:1], other]} for some in talk]
    answers[4]["rejected"] = []
    labels: list[dict] = [{"text": f"word {i}", "label": [["x"], ["y"], [], ["x", "y"]][i % 4]} for i in range(40)]
    labels[4]["label"], labels[5]["label"], labels[9]["label"] = [None], ["x", " "], ""
    model: dict[str, Any] = {"model": TASKS["preference"]["model"], "tokenizer": {"train": "bpe", "vocab_size": 400}}
    spoken: list[dict] = [{"messages": some} for some in talk]
    spoken[4]["messages"] = " "
    messages = {"name": "language_modeling", "messages": "messages", "chat_template": template, "block_size": 24}
    for rows, values, count in (
        (spoken, {"task": messages} | model, 1),
        (answers, {"task": task} | model, 1),
        (labels, {"task": {"name": "classification", "multi_label": True}}, 3),
    ):
        write(tmp_path / "data.jsonl", rows)
        with raises("LS2323", f"but {count} of 40 rows have none (row 4 holds "):
            prepared(run_of(tmp_path / "data.jsonl", "data.max_length=32", **values))
        found = prepared(run_of(tmp_path / "data.jsonl", "data.max_length=32", "data.drop_missing=true", **values))
        assert found.facts["left_out"] == {"train": count}


def test_dropped_rows_are_reported(tmp_path: Path) -> None:
    rows = [row | ({"text": ""} if i < 3 else {}) for i, row in enumerate(GOOD["classification"])]
    run = run_of(save(tmp_path / "data.jsonl", rows), "data.drop_missing=true")
    found = prepared(run)
    assert left_out(found.facts) == "; left out for a missing text or label: 3 of train"
    assert sum(len(Columns(path)) for path in found.splits.values()) == 37
    assert json.loads(json.dumps(found.facts))["left_out"] == {"train": 3}
