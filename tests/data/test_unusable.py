"""Rows from which nothing can be learned or evaluated: refused, or dropped and counted with `data.drop_unusable`."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from lockstep.config.plugins import find
from lockstep.config.run import Run, load
from lockstep.data.arrow_cache import Columns, Prepared
from lockstep.data.prepare import left_out, prepare
from lockstep.plain import rows as plain_rows
from lockstep.training.plain_sides import with_defaults
from support.harness import TINY, tiny
from support.messages import raises
from support.task_runs import BERT, sentence

DRAW = random.Random(4)
TEXTS = [sentence(DRAW) + f" {i}" for i in range(200)]
PAIRS = [{"anchor": TEXTS[i], "positive": TEXTS[i + 50], "negative": TEXTS[i + 100]} for i in range(40)]
ANSWERS = [{"prompt": "say ", "chosen": TEXTS[i], "rejected": TEXTS[i + 50]} for i in range(40)]
LABELS = [{"text": TEXTS[i], "label": "xyz"[i % 3]} for i in range(40)]
LISTS = [{"text": TEXTS[i], "label": ["xyz"[i % 3]]} for i in range(40)]
TAGS = [{"tokens": TEXTS[i].split(), "tags": ["B-X"] + ["O"] * (len(TEXTS[i].split()) - 1)} for i in range(40)]
EMBEDDING = {"name": "embedding", "negative": "negative"}
# what -> task, rows, what makes a row unusable, whether in train as well, the message
KINDS: dict[str, tuple[dict[str, Any], list[dict[str, Any]], dict[str, Any], bool, str]] = {
    "a negative that is the positive": (EMBEDDING, PAIRS, {"negative": f" {TEXTS[53]} "}, True, "LS2291"),
    "a negative that is the anchor": (EMBEDDING, PAIRS, {"negative": TEXTS[3]}, True, "LS2291"),
    "answers that are the same": ({"name": "reward"}, ANSWERS, {"rejected": TEXTS[3]}, True, "LS3003"),
    "a label": ({"name": "classification"}, LABELS, {"label": "w"}, False, "LS2103"),
    "one of several labels": (
        {"name": "classification", "multi_label": True},
        LISTS,
        {"label": ["x", "w"]},
        False,
        "LS2112",
    ),
    "a word without a tag": ({"name": "token_classification"}, TAGS, {"tags": ["O"]}, True, "LS3363"),
    "a tag": ({"name": "token_classification"}, TAGS, {"tags": ["B-Y", "O"], "tokens": ["a", "b"]}, False, "LS3361"),
}


def prepared(run: Run) -> Prepared:
    return prepare(run, find("tasks", run.task.name))


def written(path: Path, rows: list[dict[str, Any]], change: dict[str, Any] | None = None) -> str:
    some = [row | change if change and i == 3 else row for i, row in enumerate(rows)]
    path.write_text("".join(json.dumps(row) + "\n" for row in some))
    return str(path)


@pytest.mark.parametrize("kind", KINDS)
def test_unusable_rows_are_refused_or_dropped_and_counted(kind: str, tmp_path: Path) -> None:
    task, rows, change, trained, code = KINDS[kind]
    data = {
        "train": written(tmp_path / "a.jsonl", rows, change if trained else None),
        "validation": written(tmp_path / "v.jsonl", rows[:12], change),
        "max_length": 32,
    }
    model: dict[str, Any] = {} if task["name"] == "reward" else {"model": BERT}
    run = tiny(task=task, data=data, **model)
    with raises(code, "data.drop_unusable"):
        prepared(run)
    run = tiny(task=task, data=data | {"drop_unusable": True}, **model)
    result = prepared(run)
    fewer = {"train": 1, "validation": 1} if trained else {"validation": 1}
    assert result.facts["unusable"] == fewer
    assert "left_out" not in result.facts
    assert "as unusable" in left_out(result.facts)
    assert len(Columns(result.splits["validation"])) == 11
    plain = plain_rows.read_splits(with_defaults(find("tasks", run.task.name)(run)))
    assert [len(plain[split]) for split in ("train", "validation")] == [40 - trained, 11]


def test_incomplete_rows_are_counted_separately(tmp_path: Path) -> None:
    held_out = [*LABELS[:9], {"text": "a", "label": "w"}, {"text": None, "label": "x"}]
    data = {
        "train": written(tmp_path / "a.jsonl", LABELS),
        "validation": written(tmp_path / "v.jsonl", held_out),
        "drop_unusable": True,
        "max_length": 32,
    }
    facts = prepared(tiny(data=data | {"drop_missing": True})).facts
    assert facts["unusable"] == {"validation": 1}
    assert facts["left_out"] == {"validation": 1}
    data["validation"] = written(tmp_path / "w.jsonl", [{"text": "a", "label": "w"}])
    with raises("LS2405", "validation"):
        prepared(tiny(data=data))


def test_a_stream_drops_unusable_rows(tmp_path: Path) -> None:
    held_out = written(tmp_path / "v.jsonl", LABELS[:12], {"label": "w"})
    data = {"train": written(tmp_path / "a.jsonl", LABELS), "validation": held_out, "stream": True}
    data |= {"max_length": 32}
    with raises("LS2103", "'w'"):
        prepared(tiny(data=data))
    assert prepared(tiny(data=data | {"drop_unusable": True})).facts["unusable"] == {"validation": 1}
    pairs = {"train": written(tmp_path / "p.jsonl", ANSWERS, {"rejected": TEXTS[3]}), "stream": True}
    pairs |= {"validation": written(tmp_path / "q.jsonl", ANSWERS[:9]), "max_length": 32}
    with raises("LS3003", "row 3"):
        prepared(tiny(task={"name": "reward"}, data=pairs))
    facts = prepared(tiny(task={"name": "reward"}, data=pairs | {"drop_unusable": True})).facts
    assert facts["lacking_or_unusable"] == {"train": 1}
    assert "or as unusable: 1 of train" in left_out(facts)


@pytest.mark.parametrize(
    "task",
    [
        {"name": "language_modeling"},
        {"name": "embedding"},
        {"name": "classification", "regression": True},
    ],
)
def test_drop_unusable_without_effect_is_refused(task: dict[str, Any]) -> None:
    values = TINY | {"task": task, "data": {"train": "a.jsonl", "drop_unusable": True}}
    with raises("LS1119", "data.drop_unusable"):
        load(None, [], values)
