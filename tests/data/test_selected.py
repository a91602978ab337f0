"""Row selection and splits: conditions on columns, a split column, shares, duplicates, and examples in two splits.
Dropped rows are counted."""

import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest

from lockstep.cli import main
from lockstep.config import plugins
from lockstep.config.run import DataSection, RunError, load
from lockstep.data import arrow_cache, source, splitting
from lockstep.data.arrow_cache import Columns, Prepared
from lockstep.data.cache import cache_folder
from lockstep.data.job import arithmetic_of
from lockstep.data.prepare import left_out, prepare, warnings
from support.caches import prepared
from support.harness import tiny
from support.marks import slow
from support.messages import mentions, raises
from support.rows import run_of
from support.task_runs import TASKS, rows_of, write

ROWS: list[dict[str, Any]] = [
    {"text": "one two three", "label": "joy", "score": 0.5, "year": 1999, "good": True, "tags": ["a", "b"]},
    {"text": " one  two ", "label": "fear", "score": 0.9, "year": 2001, "good": False, "tags": []},
    {"text": "", "label": "joy", "score": 0.1, "year": 2003, "good": True, "tags": ["a"]},
    {"text": None, "label": None, "score": None, "year": None, "good": None, "tags": None},
    {"text": "Ünïcode", "label": "anger", "score": 0.7, "year": 2005, "good": False, "tags": ["c", "d", "e"]},
]


def splits_of(path: Path, **keys: Any) -> dict[str, list[dict]]:
    found = source.load(DataSection(source=str(path), **keys), 0)
    return {split: rows.to_list() for split, rows in found.splits.items()}


def saved(folder: Path, rows: Sequence[dict], name: str = "data.jsonl") -> Path:
    write(folder / name, list(rows))
    return folder / name


def refused(path: Path, **keys: Any) -> str:
    with pytest.raises(RunError) as caught:
        splits_of(path, **keys)
    return str(caught.value)


# -- conditions ------------------------------------------------------------------------------------------------------

CONDITIONS: list[tuple[dict, list[int]]] = [
    ({"label": "joy"}, [0, 2]),
    ({"label": ["joy", "anger"]}, [0, 2, 4]),
    ({"label": {"none_of": ["joy"]}}, [1, 4]),
    ({"score": {"min": 0.5}}, [0, 1, 4]),
    ({"score": {"min": 0.5, "max": 0.7}}, [0, 4]),
    ({"score": 0.9}, [1]),
    ({"year": {"min": 2000}, "good": True}, [2]),
    ({"year": [1999, 2005]}, [0, 4]),
    ({"year": {"none_of": [1999], "max": 2003.5}}, [1, 2]),
    ({"good": False}, [1, 4]),
    ({"text": {"min_words": 1}}, [0, 1, 4]),
    ({"text": {"max_words": 2}}, [1, 2, 4]),
    ({"text": {"min_characters": 7, "max_characters": 7}}, [4]),
    ({"tags": {"min_words": 1, "max_words": 2}}, [0, 2]),
    ({"tags.0": "a"}, [0, 2]),
]


@pytest.mark.parametrize(("wanted", "rows"), CONDITIONS)
def test_rows_that_meet_all_conditions_are_used(wanted: dict, rows: list[int], tmp_path: Path) -> None:
    path = saved(tmp_path, ROWS)
    assert splits_of(path, filter=wanted)["train"] == [ROWS[i] for i in rows]
    found = source.load(DataSection(source=str(path), filter=wanted), 0)
    assert found.left_out == {"train": len(ROWS) - len(rows)}


@pytest.mark.parametrize("wanted", [{"min": 0.7}, {"max": 0.7}, {"none_of": [0.7]}, 0.7, [0.1, 0.7]], ids=str)
def test_numbers_of_float32_are_compared_as_numpy_does(wanted: Any, tmp_path: Path) -> None:
    """0.7 in float32 is less than 0.7 in float64."""
    scores = np.array([0.1, 0.3, 0.7, 0.9], dtype=np.float32)
    datasets.Dataset.from_dict({"n": range(4), "score": scores}).to_parquet(tmp_path / "a.parquet")
    if isinstance(wanted, dict):
        ((kind, value),) = wanted.items()
        holds = {"min": np.greater_equal, "max": np.less_equal, "none_of": lambda s, v: ~np.isin(s, np.float32(v))}
        rows = np.flatnonzero(holds[kind](scores, value))
    else:
        rows = np.flatnonzero(np.isin(scores, np.float32(wanted)))
    found = splits_of(tmp_path / "a.parquet", filter={"score": wanted})["train"]
    assert [row["n"] for row in found] == rows.tolist()


@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        ({"label": False}, "label: the train split of {0} holds texts there, and False is true or false: put it betw"),
        ({"label": 3}, "holds texts there, and 3 is a number: put it between quotes"),
        ({"year": "1999"}, "year: the train split of {0} holds numbers there, and '1999' is a text"),
        ({"good": 1}, "good: the train split of {0} holds true and false there, and 1 is a number"),
        ({"text": {"min": 3}}, "text: the train split of {0} holds texts there; min and max are for numbers"),
        ({"year": {"min_words": 3}}, "holds numbers there; words are counted in texts and lists"),
        ({"tags": "a"}, "holds list<item: string> there, and 'a' is a text"),
        ({"nope": 3}, "data.filter: the train split of {0} has no column 'nope'; it has text, label"),
        (
            {"label": "joy", "year": {"max": 1990}},
            "data.filter: no row of the train split of {0} is left of 5: 'joy' of 'label' in 2, {{max: 1990}} of "
            "'year' in 0",
        ),
    ],
)
def test_invalid_conditions_are_refused(wanted: dict, told: str, tmp_path: Path) -> None:
    path = saved(tmp_path, ROWS)
    assert told.format(path) in refused(path, filter=wanted)


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [("int64", [1.5]), ("int64", {"min": 1.5}), ("uint64", {"min": 1}), ("float32", {"max": 2**24 + 1})],
)
def test_numbers_that_arrow_cannot_compare_are_refused(kind: str, wanted: Any, tmp_path: Path) -> None:
    """These ended with an error of Arrow."""
    rows = np.array([2**63 if kind == "uint64" else 2**53 + 1, 1], kind)
    datasets.Dataset.from_dict({"text": ["a", "b"], "id": rows}).to_parquet(tmp_path / "a.parquet")
    assert f"id: the train split of {tmp_path}/a.parquet holds {kind.replace('float32', 'float')} there: Integer" in (
        refused(tmp_path / "a.parquet", filter={"id": wanted})
    )


def test_labels_are_filtered_by_name(tmp_path: Path) -> None:
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["no", "yes"])})
    rows = [{"text": f"t{i}", "label": i % 3 - 1} for i in range(9)]
    datasets.Dataset.from_list(rows, features).to_parquet(tmp_path / "a.parquet")
    found = splits_of(tmp_path / "a.parquet", filter={"label": "yes"})["train"]
    assert [row["text"] for row in found] == ["t2", "t5", "t8"]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("[a]", "invalid value ['a']; expected a mapping of columns to conditions, such as {language: en}"),
        (
            "{a: null}",
            "a: None is not a condition; a condition is a value, a list of values, or a mapping with some of min, max",
        ),
        ("{a: {mni: 3}}", "a: unknown condition 'mni'; a condition is a value"),
        ("{a: {min: x}}", "a: min: invalid value 'x'; expected a number: lower bound of a number"),
        ("{a: {}}", "a: the condition is empty"),
        ("{a: []}", "a: [] is not a condition"),
        (
            "{a: {min_words: 9, max_words: 3}}",
            "a: min_words (9) is more than max_words (3): no row can match; exchange or correct the two values",
        ),
    ],
)
def test_an_invalid_filter_is_refused(given: str, told: str) -> None:
    with pytest.raises(RunError) as caught:
        tiny(f"data.filter={given}")
    assert f"data.filter: {told}" in str(caught.value)


def test_a_filter_is_saved_unchanged() -> None:
    run = tiny("data.filter={language: en, n: {min: 3}}", "data.filter.s=[a, b]")
    assert run.model_dump(mode="json")["data"]["filter"] == {"language": "en", "n": {"min": 3}, "s": ["a", "b"]}
    assert arithmetic_of(run)["data.filter.n.min"] == 3
    assert tiny("data.filter={language: 'no'}").data.filter == {"language": "no"}


# -- a split column --------------------------------------------------------------------------------------------------


def test_split_column_assigns_splits(tmp_path: Path) -> None:
    words = ["train", "Test", "valid", "training", "dev ", "train", "test"]
    path = saved(tmp_path, [{"text": str(i), "split": word} for i, word in enumerate(words)])
    found = splits_of(path, split_column="split")
    assert {s: [int(row["text"]) for row in rows] for s, rows in found.items()} == {
        "train": [0, 3, 5],
        "validation": [2, 4],
        "test": [1, 6],
    }


def test_split_column_with_other_values(tmp_path: Path) -> None:
    words = ["train", "test", "extra", None, "extra"]
    path = saved(tmp_path, [{"text": str(i), "split": word} for i, word in enumerate(words)])
    said = refused(path, split_column="split")
    assert mentions(said, "LS2321", "'split'")
    assert mentions(said, "LS2321", "'extra'", "2", "row 2")
    assert mentions(said, "LS2321")
    assert set(splits_of(path, split_column="split", filter={"split": ["test", "train"]})) == {"train", "test"}
    assert mentions(refused(path, split_column="split", filter={"split": "test"}), "LS2322")
    saved(tmp_path, [{"text": "a", "split": "test"}], "test.jsonl")
    assert mentions(refused(path, split_column="split", test=str(tmp_path / "test.jsonl")), "LS2320")
    assert mentions(refused(path, split_column="nope"), "LS2310", "data.split_column")


# -- for all tasks ---------------------------------------------------------------------------------------------------


def sizes(found: Prepared) -> dict[str, int]:
    return {split: len(Columns(path)) for split, path in found.splits.items()}


LABELLED = [{"text": f"word {i}", "label": "joy" if i % 4 else "anger", "language": "en"} for i in range(80)]


def test_held_out_splits_are_stratified_and_disjoint(tmp_path: Path) -> None:
    path = saved(tmp_path, LABELLED)
    found = prepared(run_of(path, "data.test_fraction=0.2", "data.validation_fraction=0.1"))
    assert sizes(found) == {"train": 56, "validation": 8, "test": 16}
    assert [int((Columns(found.splits[s]).flat("label") == 0).sum()) for s in ("validation", "test")] == [2, 4]
    assert warnings(found.facts) == []
    assert prepared(run_of(path, "data.test_fraction=0.2", "seed=1")).key != found.key
    alone = prepared(run_of(path, "data.validation_fraction=0.1"))
    assert sizes(alone) == {"train": 72, "validation": 8}
    with raises("LS1131", "0.3", "0.7"):
        run_of(path, "data.test_fraction=0.7", "data.validation_fraction=0.3")
    with raises("LS2263"):
        prepared(run_of(path, f"data.test={path}", "data.test_fraction=0.1"))


def test_duplicates_are_dropped_and_counted(tmp_path: Path) -> None:
    more = [{"text": " word   5\n", "label": "joy", "language": "de"}, {"text": "word 5", "label": "anger"}]
    whole = saved(tmp_path, [*LABELLED[:40], more[1], *LABELLED[40:]], "whole.jsonl")
    path = saved(tmp_path, [*LABELLED[:40], *more, *LABELLED[40:]])
    found = prepared(run_of(path, "data.deduplicate=true"))
    assert found.facts["duplicates"] == {"train": 1}
    assert found.key == prepared(run_of(whole)).key  # another label makes another example
    assert left_out(found.facts) == "; left out as duplicates: 1 of train"


def test_filtered_rows_are_counted(tmp_path: Path) -> None:
    rows = [row | {"language": "de" if i < 7 else "en"} for i, row in enumerate(LABELLED)]
    found = prepared(run_of(saved(tmp_path, rows), "data.filter.language=en"))
    assert found.facts["filtered"] == {"train": 7}
    assert found.key == prepared(run_of(saved(tmp_path, rows[7:], "whole.jsonl"))).key
    assert "; left out by data.filter: 7 of train" in left_out(found.facts)


def test_examples_in_two_splits_are_reported_or_dropped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(tmp_path, [*LABELLED, LABELLED[9]], "train.jsonl")
    held = [{"text": f"other {i}", "label": "joy"} for i in range(20)]
    saved(
        tmp_path,
        [*held[:5], {"text": "word  9", "label": "anger"}, *held[5:], {"text": "word 3", "label": "joy"}],
        "dev.jsonl",
    )
    saved(tmp_path, [*held[:3], {"text": "word 9 ", "label": "joy"}], "test.jsonl")
    run = run_of(tmp_path)
    found = prepared(run)
    assert sizes(found) == {"train": 81, "validation": 22, "test": 4}
    assert warnings(found.facts) == [
        "2 of 22 validation rows are also in train; the first is row 5 of validation, row 9 of train: "
        "'word  9'. Scores on them are too good; data.decontaminate=true removes them from train",
        "1 of 4 test rows are also in train; the first is row 3 of test, row 9 of train: 'word 9 '. Scores on "
        "them are too good; data.decontaminate=true removes them from train",
    ]
    dropped = prepared(run_of(tmp_path, "data.decontaminate=true"))
    assert sizes(dropped) == {"train": 78, "validation": 22, "test": 4}
    assert left_out(dropped.facts) == "; left out because they are also in validation or test: 3 of train"
    assert warnings(dropped.facts) == []
    (tmp_path / "run.yaml").write_text(run.dump())
    assert main(["plan", str(tmp_path / "run.yaml")]) == 0
    assert "note: 2 of 22 validation rows are also in train" in capsys.readouterr().out
    assert (
        main(["plan", str(tmp_path / "run.yaml"), "data.decontaminate=true", "data.filter={text: {max_words: 2}}"]) == 0
    )
    said = " ".join(capsys.readouterr().out.split())
    assert "left out because they are also in validation or test: 3 of train" in said
    everything = [{"text": "word 1", "label": label} for label in ("joy", "anger")]
    saved(tmp_path, everything, "train.jsonl")
    saved(tmp_path, everything, "dev.jsonl")
    with raises("LS2261"):
        prepared(run_of(tmp_path, "data.decontaminate=true"))


@pytest.mark.parametrize("kind", ["packed", "translation", *map(slow, ["prompts", "messages", "token_classification"])])
def test_every_task_filters_rows(kind: str, tmp_path: Path) -> None:
    draw = random.Random(0)
    rows: list[dict] = []
    while len(rows) < 60:
        if (row := rows_of(kind, draw)) not in rows:
            rows.append(row)
    values = TASKS[kind] | {"tokenizer": {"train": "bpe", "vocab_size": 400}}
    whole = prepared(run_of(saved(tmp_path, rows, "whole.jsonl"), "data.test_fraction=0.1", **values))
    twice = saved(tmp_path, [*rows, rows[7], rows[20]])
    found = prepared(run_of(twice, "data.test_fraction=0.1", "data.deduplicate=true", **values))
    assert found.facts["duplicates"] == {"train": 2}
    assert found.key == whole.key
    assert set(found.splits) == {"train", "validation", "test"}
    (tmp_path / "both").mkdir()
    saved(tmp_path / "both", rows, "train.jsonl")
    saved(tmp_path / "both", [*rows[3:5], {**rows[50]}], "test.jsonl")
    told = prepared(run_of(tmp_path / "both", "data.decontaminate=true", **values))
    assert 1 <= told.facts["overlap"]["test"]["examples"] <= 3  # some of them may have been held out for validation
    assert told.facts["dropped"] == {"train": told.facts["overlap"]["test"]["examples"]}


def test_a_nested_column_trains_as_a_flat_one(tmp_path: Path) -> None:
    deep = [{"said": [{"by": "me", "text": row["text"]}], "meta": {"label": row["label"]}} for row in LABELLED]
    asked = {"name": "classification", "text": "said.0.text", "label": "meta.label"}
    found = prepared(run_of(saved(tmp_path, deep), task=asked))
    flat = [{"said": row["text"], "meta": row["label"]} for row in LABELLED]
    plain = prepared(run_of(saved(tmp_path, flat, "flat.jsonl"), task=asked | {"text": "said", "label": "meta"}))
    for split, file in found.splits.items():
        one, other = Columns(file), Columns(plain.splits[split])
        assert one.flat("label").tolist() == other.flat("label").tolist()
        assert [one.ragged("input_ids").row(i).tolist() for i in range(len(one))] == [
            other.ragged("input_ids").row(i).tolist() for i in range(len(other))
        ]
    with raises("LS2314", "task.text", "'said'", "said.0.by"):
        prepared(run_of(tmp_path / "data.jsonl", task=asked | {"text": "said"}))


def test_every_key_is_in_the_cache_key(tmp_path: Path) -> None:
    path = saved(tmp_path, [*LABELLED, LABELLED[0]])
    keys = [
        "seed=0",
        "data.filter.language=en",
        "data.deduplicate=true",
        "data.test_fraction=0.1",
        "data.decontaminate=true",
    ]
    entries = cache_folder() / "prepared"
    before = len(list(entries.iterdir()))
    for count, key in enumerate([*keys, *keys]):
        prepared(run_of(path, key))
        assert len(list(entries.iterdir())) == before + min(count + 1, len(keys))
    assert load(None, [], run_of(path).model_dump(mode="json")).data == run_of(path).data


@pytest.mark.processes
def test_several_processes_hash_rows_as_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [f"a {'b ' * (i % 7)}{i % 500}" for i in range(3000)]
    dataset = datasets.Dataset.from_dict({"text": texts, "more": [[i % 3] for i in range(3000)]})
    monkeypatch.setattr(arrow_cache, "available_cores", lambda: 1)
    alone = splitting.hashes(dataset, ["text", "more"])
    monkeypatch.setattr(arrow_cache, "available_cores", lambda: 2)
    monkeypatch.setattr(arrow_cache, "ROWS", 700)
    assert (splitting.hashes(dataset, ["text", "more"]) == alone).all()
    assert len(np.unique(alone, axis=0)) == len({(text, i % 3) for i, text in enumerate(texts)})
    first = splitting.first_of(alone)
    told, rows = splitting.overlap({"train": dataset, "test": dataset.select(range(0, 3000, 5))}, ["text"])
    assert told["test"]["examples"] == 600
    assert set(rows) == {i for i, text in enumerate(texts) if text in {*texts[::5]}}
    assert told["test"]["train_row"] == first[0] == 0


def test_edits_are_detected_by_size_and_time(tmp_path: Path) -> None:
    """An edit that keeps both is not detected, as docs/reference/run-file.md says."""
    path = tmp_path / "train.jsonl"
    write(path, [{"text": f"text {i}", "label": i % 2} for i in range(30)])
    before, was = path.stat(), path.read_text()
    run = tiny(data={"source": str(path), "limit": None, "max_length": 16})
    task: Any = plugins.find("tasks", "classification")
    key = prepare(run, task).key
    path.write_text(was.replace("text 7", "test 7"))
    assert prepare(run, task).key != key  # the same size, another time
    path.write_text(was)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert prepare(run, task).key == key
    path.write_text(was.replace("text 7", "test 7"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert prepare(run, task).key == key
    write(path, [{"text": f"text {i}", "label": i % 2} for i in range(31)])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert prepare(run, task).key != key  # another size, the same time
