"""Labels and texts are exactly those in the file, even if they look like numbers or are mixed with numbers."""

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lockstep.config.plugins import find
from lockstep.config.run import DataSection, Run
from lockstep.data import column_types, source, value_types
from lockstep.data.prepare import prepare
from lockstep.data.tokenizer import load
from support.harness import tiny
from support.messages import raises

pytestmark = pytest.mark.slow  # together a third of the time of tests without processes

WORDS = ["the", "cat", "sat", "on", "a", "mat", "while", "dogs", "and", "birds", "sang", "in", "trees"]
ODD = ["01", "1", "2"]  # 01 differs from 1
LIKE_JSON = ["01", "1", "007", "null", "NaN", "true"]  # texts that parse as JSON
TAGS = ["01", "1", "O", "null", "NaN", "2"]


def sentence(number: int) -> str:
    return " ".join(WORDS[(number * 7 + place * 3) % len(WORDS)] for place in range(6 + number % 4))


def rows(labels: list[Any], count: int = 48) -> list[dict[str, Any]]:
    return [{"text": sentence(i), "label": labels[i % len(labels)]} for i in range(count)]


def lines(some: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in some)


def table(some: list[dict[str, Any]]) -> str:
    return "text,label\n" + "".join(f"{row['text']},{row['label']}\n" for row in some)


def semicolons(some: list[dict[str, Any]]) -> str:
    return "".join(f"{row['text']};{row['label']}\n" for row in some)


def archive(path: Path, some: list[dict[str, Any]]) -> None:
    with tarfile.open(path, "w") as tar:
        for number, row in enumerate(some):
            for ending, text in (("txt", row["text"]), ("cls", f"{row['label']}\n")):
                member = tarfile.TarInfo(f"{number:04d}.{ending}")
                member.size = len(text)
                tar.addfile(member, io.BytesIO(text.encode()))


WRITE: dict[str, Callable[[list[dict[str, Any]]], str]] = {"jsonl": lines, "csv": table, "txt": semicolons}


def save(path: Path, some: list[dict[str, Any]]) -> str:
    if path.suffix == ".tar":
        archive(path, [{"text": row["text"], "label": row["label"]} for row in some])
    elif path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(some), path)
    else:
        path.write_text(WRITE[path.suffix[1:]](some))
    return str(path)


def run_of(data: dict[str, Any], **task: Any) -> Run:
    return tiny(data={"max_length": 32} | data, task={"name": "classification"} | task, model={"type": "bert", **SMALL})


SMALL = {"config": {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 32}}


def facts(data: dict[str, Any], **task: Any) -> dict[str, Any]:
    run = run_of(data, **task)
    return prepare(run, find("tasks", run.task.name)).facts


# -- one label per text ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["jsonl", "csv", "txt", "parquet"])
def test_labels_are_the_strings_of_the_file(ending: str, tmp_path: Path) -> None:
    seen = facts({"source": save(tmp_path / f"a.{ending}", rows(ODD))})
    assert seen["labels"] == ODD
    assert seen["of_label"] == [14, 14, 14]
    told = any("'01'" in note and "data.types" in note for note in seen.get("notes", []))
    assert told == (ending in ("csv", "txt"))  # formats in which a number could have been meant


@pytest.mark.parametrize("ending", ["jsonl", "txt", "parquet", "tar"])
def test_a_stream_has_the_labels_of_the_file(ending: str, tmp_path: Path) -> None:
    train = save(tmp_path / f"a.{ending}", rows(ODD))
    names = {"text": "txt", "label": "cls"} if ending == "tar" else {}
    held_out = [{names.get(key, key): value for key, value in row.items()} for row in rows(ODD, 9)]
    seen = facts({"train": train, "stream": True, "validation": save(tmp_path / "v.jsonl", held_out)}, **names)
    assert seen["labels"] == ODD
    assert seen["of_label"] == [16, 16, 16]


@pytest.mark.parametrize("ending", ["csv", "txt"])
def test_integers_of_tables_and_lines_are_numbers(ending: str, tmp_path: Path) -> None:
    """They are numbers if each is written in one way only, in all splits: 10 sorts after 2, and label names can be
    set."""
    data = {"train": save(tmp_path / f"a.{ending}", rows(["0", "10", "2"]))}
    data["validation"] = save(tmp_path / f"v.{ending}", rows(["0", "2"], 8))
    assert facts(data)["label_values"] == [0, 2, 10]
    assert facts(data, label_names=["a", "b", "c"])["labels"] == ["a", "b", "c"]
    data["validation"] = save(tmp_path / "v.jsonl", rows([0, 2], 8))
    assert facts(data)["label_values"] == [0, 2, 10]
    data["train"] = save(tmp_path / f"b.{ending}", rows(["0", "00", "2"]))
    data["validation"] = save(tmp_path / f"v.{ending}", rows(["0", "2"], 8))  # not numbers in this split alone
    assert facts(data)["label_values"] == ["0", "00", "2"]


@pytest.mark.parametrize("ending", ["txt", "tar"])
@pytest.mark.parametrize("held_out", ["txt", "jsonl", "parquet"])
def test_integers_of_a_stream_are_numbers(held_out: str, ending: str, tmp_path: Path) -> None:
    train = save(tmp_path / f"a.{ending}", rows(["0", "10", "2"]))
    some = rows(["0", "2"], 8) if held_out == "txt" else rows([0, 2], 8)
    names = {"text": "txt", "label": "cls"} if ending == "tar" else {}
    if names and held_out == "txt":
        pytest.skip("lines have the columns text and label")
    some = [{names.get(key, key): value for key, value in row.items()} for row in some]
    data = {"train": train, "stream": True, "validation": save(tmp_path / f"v.{held_out}", some)}
    assert facts(data, **names)["labels"] == ["0", "2", "10"]
    assert facts(data, label_names=["a", "b", "c"], **names)["labels"] == ["a", "b", "c"]


def test_decimals_and_booleans_of_tables_are_distinguished(tmp_path: Path) -> None:
    def labels(some: list[str]) -> list[str]:
        return list(facts({"source": save(tmp_path / "a.csv", rows(some))})["labels"])

    assert labels(["0.0", "1.0", "2.0"]) == ["0", "1", "2"]  # as tables store integers when some are missing
    assert any("'0.0' is 0" in note for note in facts({"source": str(tmp_path / "a.csv")})["notes"])
    assert labels(["0", "1", "1.0"]) == ["0", "1", "1.0"]
    assert labels(["+1", "1", "-1"]) == ["+1", "-1", "1"]
    assert labels(["True", "true", "False"]) == ["False", "True", "true"]


def test_a_column_of_texts_and_numbers_is_refused_with_the_row(tmp_path: Path) -> None:
    some = rows(LIKE_JSON)
    assert facts({"source": save(tmp_path / "a.jsonl", some)})["labels"] == sorted(LIKE_JSON)
    some[5]["label"] = 7
    data = {"source": save(tmp_path / "a.jsonl", some)}
    with raises("LS2106", "row 0 holds '01'", "row 5 holds 7", "data.types={label: text}"):
        facts(data)
    assert facts(data | {"types": {"label": "text"}})["labels"] == sorted([*LIKE_JSON, "7"])
    stream = {"train": data["source"], "stream": True, "validation": save(tmp_path / "v.jsonl", rows(LIKE_JSON, 12))}
    with raises("LS2106", "row 0 holds '01'", "row 5 holds 7"):
        facts(stream)
    assert facts(stream | {"types": {"label": "text"}})["labels"] == sorted([*LIKE_JSON, "7"])


NUMBERS: dict[str, list[Any]] = {"whole": [0, 1], "decimals": [0.0, 1.0]}


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_files_of_texts_and_of_numbers_are_refused_in_either_order(ending: str, tmp_path: Path) -> None:
    """The reader of `datasets` gives every file the types of the first: "01" became 1."""
    names = [save(tmp_path / f"a.{ending}", rows(ODD, 24)), save(tmp_path / f"b.{ending}", rows([1, 2], 24))]
    for files in (names, names[::-1]):
        with raises("LS2106" if ending == "jsonl" else "LS2197", "'label'"):
            facts({"train": files})


def test_parquet_files_of_integers_and_of_decimals_are_united_in_either_order(tmp_path: Path) -> None:
    """They were once refused, and the suggested data.types={label: text} made "0" and "0.0" two labels."""
    whole, decimals = [save(tmp_path / f"{name}.parquet", rows(kinds, 24)) for name, kinds in NUMBERS.items()]
    for files in ([whole, decimals], [decimals, whole]):
        assert facts({"train": files})["labels"] == ["0", "1"]
    large = save(tmp_path / "large.parquet", rows([2**53 + 1, 0], 24))
    with raises("LS2410", "large.parquet", str(2**53 + 1)):
        facts({"train": [large, decimals]})


def test_a_string_among_numbers_is_quoted_unchanged(tmp_path: Path) -> None:
    some = rows(["a", "b"])
    some[3]["text"], some[4]["text"], some[5]["text"] = "12", "null", " NaN "
    path = save(tmp_path / "a.jsonl", some)
    assert facts({"source": path})["of_label"] == [22, 22]
    some[7]["text"] = 5
    with raises("LS2314", "row 7 holds 5"):
        facts({"source": save(tmp_path / "a.jsonl", some)})
    cells = "".join(f"{i:03d},{'ab'[i % 2]}\n" for i in range(48))
    (tmp_path / "a.csv").write_text("text,label\n" + cells)
    assert facts({"source": str(tmp_path / "a.csv")})["of_label"] == [22, 22]  # a table's values are all text


def test_regression_targets_are_parsed_in_any_notation(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,label\n" + "".join(f"{sentence(i)},+{i % 5:02d}\n" for i in range(48)))
    (tmp_path / "a.txt").write_text("".join(f"{sentence(i)};{i % 5 / 2}\n" for i in range(48)))
    for name in ("a.csv", "a.txt"):
        assert facts({"source": str(tmp_path / name)}, regression=True)["numbers"] == ["label"]


def test_minus_one_is_a_label_if_train_has_it(tmp_path: Path) -> None:
    for ending in ("jsonl", "csv"):
        folder = tmp_path / ending
        folder.mkdir()
        save(folder / f"train.{ending}", rows(["-1", "0", "1"]))
        save(folder / f"test.{ending}", rows(["-1"], 4))
        run = run_of({"source": str(folder)})
        assert "test" in prepare(run, find("tasks", "classification")).splits
        save(folder / f"train.{ending}", rows(["0", "1"]))
        assert "test" not in prepare(run, find("tasks", "classification")).splits


# -- tags, words, answers, multiple labels ---------------------------------------------------------------------------


def tagged(tags: list[Any]) -> list[dict[str, Any]]:
    return [{"tokens": sentence(i).split()[:6], "tags": list(tags)} for i in range(48)]


def test_tags_are_the_strings_of_the_file(tmp_path: Path) -> None:
    some = tagged(TAGS)
    data = {"source": save(tmp_path / "a.jsonl", some)}
    assert facts(data, name="token_classification")["labels"] == sorted(TAGS)
    some[3]["tags"][2] = 5
    save(tmp_path / "a.jsonl", some)
    with raises("LS3400", "row 0 holds '01'", "row 3 holds 5"):
        facts(data, name="token_classification")
    declared = facts(data | {"types": {"tags": "text"}}, name="token_classification")
    assert declared["labels"] == sorted([*TAGS, "5"])
    stream = {"train": data["source"], "validation": save(tmp_path / "v.jsonl", tagged(TAGS)), "stream": True}
    with raises("LS3400", "row 0 holds '01'", "row 3 holds 5"):
        facts(stream, name="token_classification")


@pytest.mark.processes
def test_shards_of_a_stream_hold_tags_of_one_kind(tmp_path: Path) -> None:
    """ "1" and 1 are the same tag only if the run file says so."""
    save(tmp_path / "a-0.jsonl", tagged(["1", "O", "2", "O", "O", "O"]))
    save(tmp_path / "a-1.jsonl", tagged([1, 2, 2, 1, 1, 1]))
    stream = {"train": str(tmp_path / "a-*.jsonl"), "stream": True}
    stream |= {"validation": save(tmp_path / "v.jsonl", tagged(["1", "O", "2", "O", "O", "O"]))}
    with raises("LS3460", "a-0.jsonl hold '1'", "a-1.jsonl hold 1"):
        facts(stream, name="token_classification")
    declared = facts(stream | {"types": {"tags": "text"}}, name="token_classification")
    assert declared["labels"] == ["1", "2", "O"]


def test_class_labels_out_of_range_are_refused(tmp_path: Path) -> None:
    kinds = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["bad", "good"])})
    some = {"text": [sentence(i) for i in range(48)], "label": [i % 2 for i in range(48)]}
    datasets.Dataset.from_dict(some, features=kinds).to_parquet(tmp_path / "a.parquet")
    table = pq.read_table(tmp_path / "a.parquet")
    pq.write_table(table.set_column(1, table.schema.field("label"), [[7] * 48]), tmp_path / "t.parquet")
    data = {"train": str(tmp_path / "a.parquet"), "test": str(tmp_path / "t.parquet")}
    with raises("LS2103", "label 7 (row 0)", "numbered 0 to 1 (bad, good)"):
        facts(data)


def test_words_are_the_strings_of_the_file(tmp_path: Path) -> None:
    some = tagged(["O", "B-X", "O", "O", "O", "O"])
    some[2]["tokens"][1], some[4]["tokens"][1], some[5]["tokens"][2] = 1999, "007", "null"
    path = save(tmp_path / "a.jsonl", some)
    options = find("tasks", "token_classification").Options()  # type: ignore[attr-defined]
    read = source.load(DataSection(source=path), 0, columns=options.text_columns)
    usable = find("tasks", "token_classification").valid_rows(read.splits["train"], options, "train", "a", False)  # type: ignore[attr-defined]
    assert [usable[row]["words"][place] for row, place in ((2, 1), (4, 1), (5, 2))] == ["1999", "007", "null"]


def test_answers_and_lists_of_labels_are_named_with_the_row(tmp_path: Path) -> None:
    answers = [{"text": ["1999"], "answer_start": [3]} for _ in range(48)]
    some = [{"question": "when", "context": f"in 1999 cat {i}", "answers": each} for i, each in enumerate(answers)]
    data = {"source": save(tmp_path / "a.jsonl", some)}
    facts(data, name="question_answering", stride=4)
    some[7]["answers"] = {"text": [1999], "answer_start": [3]}
    save(tmp_path / "a.jsonl", some)
    with raises("LS2160", "row 7", "[1999]"):
        facts(data, name="question_answering", stride=4)
    lists = [{"text": sentence(i), "label": [["01"], ["1", "a"], ["null"]][i % 3]} for i in range(48)]
    data = {"source": save(tmp_path / "b.jsonl", lists)}
    assert facts(data, multi_label=True)["labels"] == ["01", "1", "a", "null"]
    lists[9]["label"] = [3]
    save(tmp_path / "b.jsonl", lists)
    with raises("LS2114", "row 9 holds [3]"):
        facts(data, multi_label=True)


# -- types set in the run file ---------------------------------------------------------------------------------------


def test_data_types_converts_between_strings_and_numbers(tmp_path: Path) -> None:
    data = {"source": save(tmp_path / "a.csv", rows(ODD))}
    assert facts(data | {"types": {"label": "integer"}})["label_values"] == [1, 2]
    data = {"source": save(tmp_path / "b.csv", rows(["0", "10", "2"]))}
    assert facts(data | {"types": {"label": "text"}})["label_values"] == ["0", "10", "2"]
    data = {"source": save(tmp_path / "a.parquet", rows([3, 20]))}
    assert facts(data | {"types": {"label": "text"}})["label_values"] == ["20", "3"]
    data = {"sources": [{"source": save(tmp_path / "c.csv", rows(ODD)), "types": {"label": "integer"}}]}
    assert facts(data)["label_values"] == [1, 2]


def test_types_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    data = {"source": save(tmp_path / "a.csv", rows(["1", "x"]))}
    with raises("LS2401", "label: integer: row 1", "'x'"):
        facts(data | {"types": {"label": "integer"}})
    with raises("LS2402", "'lable'", "text, label"):
        facts(data | {"types": {"lable": "integer"}})
    with raises("LS2401", "label: number: row 0", "'1_0'"):
        facts({"source": save(tmp_path / "b.csv", rows(["1_0"])), "types": {"label": "number"}}, regression=True)


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (["01", None, "null"], "string"),
        ([1, None, 2**60], "int64"),
        ([1.0, 2.5], "float64"),
        ([True, False, None], "bool"),
        (["01", 1, "null", "1", True, 0.1, None, ["1"], {"a": "1"}], "json"),
        ([{"a": "1"}, {"a": 1}, {"a": "null"}, None], "json"),
        ([[1, "1"], ["01"], [], None], "json"),
        ([{"a": 1, "b": "x"}, {"a": 2}], "json"),
        ([2**53 + 1, 0.5], "json"),
        ([1 / 3, 0.1 + 0.2, 5e-324, 1.7976931348623157e308, -0.0, float("inf"), "text"], "json"),
    ],
)
def test_values_are_unchanged(values: list[Any], kind: str) -> None:
    seen = value_types.dataset_of({"a": values})
    assert kind in str(seen.features["a"]).lower()
    assert seen.to_list() == [{"a": value} for value in values]
    assert [type(row["a"]) for row in seen.to_list()] == [type(value) for value in values]


def test_values_out_of_range_are_refused_with_their_rows(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a", "label": "x"}\n{"text": "\\ud800", "label": "y"}\n')
    with raises("LS2409", "a.jsonl, rows 0 to 1", "'text'"):
        facts({"source": str(tmp_path / "a.jsonl")})
    (tmp_path / "b.jsonl").write_text(f'{{"text": "a", "label": "x"}}\n{{"text": "b", "label": {10**30}}}\n')
    with raises("LS2409", "b.jsonl, rows 0 to 1", "64 bits"):
        facts({"source": str(tmp_path / "b.jsonl")})
    (tmp_path / "c.jsonl").write_text('{"text": "a", "label": "x"}\n{"text": "b", "label": "x", "label": "y"}\n')
    with raises("LS2226", "c.jsonl, line 2", "'label' occurs twice"):
        facts({"source": str(tmp_path / "c.jsonl")})


def test_rows_of_json_may_stand_on_several_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("\n".join(json.dumps(row, indent=2) for row in rows(ODD, 6)))
    assert source.load(DataSection(source=str(path)), 0).splits["train"].to_list() == rows(ODD, 6)
    path.write_text(json.dumps(["01", "null"]))
    assert source.load(DataSection(source=str(path)), 0).splits["train"]["text"][:] == ["01", "null"]
    path.write_text('{"text": "a",\n "label": }')
    with raises("LS2226", "line 1"):
        source.load(DataSection(source=str(path)), 0)


# -- files of different types ----------------------------------------------------------------------------------------


UNREAD: dict[str, tuple[Any, Any]] = {
    "null throughout": (None, "s"),
    "of another type": (5, "s"),
    "of other keys": ({"a": 1}, {"b": [2]}),
}


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
@pytest.mark.parametrize("kind", [*UNREAD, "not there"])
def test_unused_columns_are_dropped_first(kind: str, ending: str, tmp_path: Path) -> None:
    values = UNREAD.get(kind, (None, "s"))
    files = []
    for name, value in zip("ab", values, strict=True):
        more = {} if kind == "not there" and name == "a" else {"more": value}
        files.append(save(tmp_path / f"{name}.{ending}", [row | more for row in rows(["x", "y"], 24)]))
    for some in (files, files[::-1]):
        assert facts({"train": some})["of_label"] == [22, 22]


def test_tables_may_differ_in_unused_columns(tmp_path: Path) -> None:
    first = save(tmp_path / "a.csv", rows(["x", "y"], 24))
    (tmp_path / "b.csv").write_text("text,more,label\n" + "".join(f"{sentence(i)},{i},x\n" for i in range(24)))
    for files in ([first, str(tmp_path / "b.csv")], [str(tmp_path / "b.csv"), first]):
        assert facts({"train": files})["labels"] == ["x", "y"]


def test_used_columns_must_be_in_every_file(tmp_path: Path) -> None:
    first = save(tmp_path / "a.parquet", rows(["x", "y"], 24))
    pq.write_table(pa.table({"text": [sentence(i) for i in range(24)]}), tmp_path / "b.parquet")
    files = [first, str(tmp_path / "b.parquet")]
    with raises("LS2211", "b.parquet", "'label'"):
        facts({"train": files})
    with raises("LS2212", "a.parquet", "'label'"):
        facts({"train": files[::-1]})
    for some in (files, files[::-1]):
        assert facts({"train": some, "drop_missing": True})["left_out"] == {"train": 24}


@pytest.mark.parametrize("endings", [("jsonl", "jsonl"), ("parquet", "parquet"), ("parquet", "jsonl")])
def test_optional_keys_of_messages_are_read_in_either_order(endings: tuple[str, str], tmp_path: Path) -> None:
    def talk(number: int, **more: Any) -> dict[str, Any]:
        turns = [{"role": "user", "content": sentence(number)} | more, {"role": "assistant", "content": "null"}]
        return {"messages": turns}

    files = [
        save(tmp_path / f"a.{endings[0]}", [talk(i) for i in range(24)]),
        save(tmp_path / f"b.{endings[1]}", [talk(i, name="bob") for i in range(24)]),
    ]
    columns, seen = {"task.messages": "messages"}, []
    for some in (files, files[::-1]):
        read = source.load(DataSection(train=some), 0, columns=columns).splits["train"].to_list()  # type: ignore[arg-type]
        turns = [turn for row in read for turn in row["messages"]]
        seen.append(sorted(str({key: turn[key] for key in turn if turn[key] is not None}) for turn in turns))
    assert seen[0] == seen[1]
    assert sum("bob" in turn for turn in seen[0]) == 24
    assert sum("'content': 'null'" in turn for turn in seen[0]) == 48


def test_missing_columns_are_reported_with_all_existing_ones(tmp_path: Path) -> None:
    path = save(tmp_path / "a.jsonl", [row | {"more": 1} for row in rows(["x", "y"])])
    with raises("LS2312", "'tweet'", "text, label, more"):
        facts({"source": path}, text="tweet")


def test_data_types_applies_to_files_of_different_types(tmp_path: Path) -> None:
    """Files were once concatenated before `data.types` was applied, so no key could unite their columns."""
    texts = save(tmp_path / "a.parquet", rows(["01", "1"], 24))
    for other in (save(tmp_path / "b.parquet", rows([1, 2], 24)), save(tmp_path / "b.jsonl", rows([1, 2], 24))):
        for files in ([texts, other], [other, texts]):
            with raises("LS2197", "data.types={label: text}"):
                facts({"train": files})
            assert facts({"train": files, "types": {"label": "text"}})["labels"] == ["01", "1", "2"]
            assert facts({"train": files, "types": {"label": "integer"}})["labels"] == ["1", "2"]
    pointed = save(tmp_path / "c.parquet", rows(["1", "2.5"], 24))
    with raises("LS2401", "row 1", "c.parquet", "'2.5'"):
        facts({"train": [other, pointed], "types": {"label": "integer"}})


def test_blanks_around_integers_are_noted(tmp_path: Path) -> None:
    data = {"source": save(tmp_path / "a.csv", rows(["0", "1", " 1"]))}
    (note,) = facts(data)["notes"]
    assert "' 1' and '1'" in note
    assert facts(data)["labels"] == ["0", "1"]
    assert facts(data | {"types": {"label": "text"}})["labels"] == [" 1", "0", "1"]
    assert "notes" not in facts({"source": save(tmp_path / "b.csv", rows(["0", " 1"]))})


def test_labels_of_several_types_are_quoted_as_in_the_file(tmp_path: Path) -> None:
    def refused(labels: list[Any], *texts: str) -> None:
        with raises(*texts):
            facts({"source": save(tmp_path / "a.jsonl", rows(labels))})

    refused([1, 2.5], "LS2105", "row 1 holds 2.5")  # not the 1 of row 0, which Arrow stores as 1.0
    refused([1.0, 1e300], "LS2105", "row 1 holds 1e+300")  # it does not fit 64 bits
    refused([True, "x"], "LS2106", "true and false", "row 0 holds true", "row 1 holds 'x'")
    refused([0, 2, True], "LS2106", "row 0 holds 0", "row 2 holds true")
    refused(["a", 1.0], "LS2106", "row 0 holds 'a'", "row 1 holds 1.0")


def test_tags_that_are_numbers_are_in_their_order(tmp_path: Path) -> None:
    def labels(tags: list[Any]) -> Any:
        some = [{"tokens": [f"{n}", *["a"] * (len(tags) - 1)], "tags": tags} for n in range(12)]
        return facts({"source": save(tmp_path / "a.jsonl", some)}, name="token_classification")["labels"]

    assert labels([*range(12)]) == [str(n) for n in range(12)]
    assert labels([0, 1.0, 2]) == ["0", "1", "2"]  # Arrow stores all of them as 1.0
    with raises("LS3423", "'tags'", "1.5"):
        labels([0, 1.5])


def test_paths_into_columns_with_optional_keys(tmp_path: Path) -> None:
    """Such columns are stored as JSON, in which paths once failed: "there is no 'body'"."""
    some = [{"doc": {"body": sentence(i)} | ({"by": {"name": "ab"[i // 4 % 2]}} if i % 2 else {})} for i in range(48)]
    labelled = [row | {"label": "xy"[i // 2 % 2]} for i, row in enumerate(some)]
    data = {"source": save(tmp_path / "a.jsonl", labelled)}
    task = {"text": "doc.body"}
    assert sum(facts(data, **task)["of_label"]) == 44  # 4 are held out
    assert sum(facts(data | {"filter": {"doc.by.name": "a"}}, **task)["of_label"]) == 10
    with raises("LS2323", "'doc.by.name'", "24 of 48", "data.drop_missing=true"):
        facts(data, text="doc.body", label="doc.by.name")
    assert facts(data | {"drop_missing": True}, text="doc.body", label="doc.by.name")["labels"] == ["a", "b"]
    with raises("LS2311", "has no 'title' in any row"):
        facts(data, text="doc.title")
    labelled[7]["doc"] = "01"  # type: ignore[assignment]
    with raises("LS2311", "'01' in row 7"):
        facts({"source": save(tmp_path / "b.jsonl", labelled)}, **task)
    talks = [
        {"talk": [{"text": sentence(i)}, {"text": "xy"[i % 2], **({"by": 1} if i % 3 else {})}]} for i in range(48)
    ]
    path = save(tmp_path / "c.jsonl", talks)
    assert facts({"source": path}, text="talk.0.text", label="talk.-1.text")["labels"] == ["x", "y"]


def test_examples_are_made_of_rows_whose_keys_hold_several_types(tmp_path: Path) -> None:
    """Examples of raw rows were once read by the reader of `datasets`: a traceback, or a missing key became null."""

    def talks(**more: Any) -> list[dict[str, Any]]:
        turns = [{"role": "user", "content": "a"} | more, {"role": "assistant", "content": "b"}]
        return [{"messages": [*turns, {"role": "user", "content": sentence(i)}, turns[1]]} for i in range(24)]

    files = [save(tmp_path / f"{i}.jsonl", talks(**more)) for i, more in enumerate(({}, {"w": 1}, {"w": "1"}))]
    template = "{% for m in messages %}{{ 'said' if m.w is defined else 'bare' }} {{ m.content }} {% endfor %}"
    task = {"name": "language_modeling", "messages": "messages", "chat_template": template, "block_size": 200}
    small = {"n_layer": 1, "n_head": 2, "n_embd": 8, "n_positions": 256}
    run = tiny(data={"train": files}, task=task, model={"type": "gpt2", "config": small})
    prepared = prepare(run, find("tasks", run.task.name))
    stored = prepared.facts["raw_rows"]
    words = load(prepared.tokenizer, False).decode([i for row in stored["examples"]["input_ids"] for i in row])
    turns = [turn for row in stored["rows"] for turn in row["messages"]]
    assert words.count("said") == sum("w" in turn for turn in turns) > 0
    assert words.count("bare") == sum("w" not in turn for turn in turns)


def test_a_label_written_differently_in_another_split_has_a_remedy(tmp_path: Path) -> None:
    for name, labels in (("a", ["0.0", "1.0"]), ("v", ["1", "0"])):
        text = "".join(f"{sentence(i)},{labels[i % 2]}\n" for i in range(16))
        (tmp_path / f"{name}.csv").write_text(f"text,label\n{text}")
    files: dict[str, Any] = {"train": str(tmp_path / "a.csv"), "validation": str(tmp_path / "v.csv")}
    with raises("LS2103", "With data.types={label: integer}, '1' and '1.0' are the same label"):
        facts(files)
    assert facts(files | {"types": {"label": "integer"}})["labels"] == ["0", "1"]
    hint = column_types.same_label_hint
    assert "data.types={tags: text}, 1 and '1' are" in hint("tags", 1, ["0", "1"])
    assert hint("label", "1", ["1.0", "01", "a"]) == ""  # not all are numbers
    assert hint("label", "1", ["1.0", "01"]) == ""  # two labels of train would become one
    assert hint("label", "01", ["1", str(2**63)]) == ""  # an integer has 64 bits
    assert column_types.label_note("label", ["01", "1"]) != column_types.label_note("label", ["01", str(2**63)]) == []
    assert column_types.label_note("label", ["01", "9" * 5000]) == []  # Python refuses to read so many digits
    assert "integer" not in hint("label", "9" * 5000, ["1", "2"])
    assert "'b' only in blanks or capitals" in hint("label", " B", ["a", "b"])
