"""`lockstep init` recognizes common layouts, reads exactly what their files say, and writes run files that train."""

import gzip
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import datasets
import pytest

from lockstep.cli import main
from lockstep.config import plugins
from lockstep.config.run import DataSection, Run, RunError
from lockstep.data import annotated, conversations, source, value_types
from lockstep.data.prepare import prepare
from lockstep.training import predicting
from support.command import ended, start
from support.init_runs import here, written
from support.messages import mentions, raises

__all__ = ["here"]  # fixtures

WORDS = ["the", "sun", "went", "down", "over", "my", "house", "again", "until", "nobody", "was", "there"]


def rows(**keys: object) -> list[dict]:
    return source.load(DataSection.model_validate(keys), 0).splits["train"].to_list()


def refused(**keys: object) -> str:
    with pytest.raises(RunError) as caught:
        rows(**keys)
    return str(caught.value)


def text(i: int) -> str:
    return " ".join(WORDS[(i + k) % len(WORDS)] for k in range(3 + i % 5))


# -- files -----------------------------------------------------------------------------------------------------------


def squad(version: str = "1.1") -> str:
    paragraphs = []
    for i in range(40):
        context = f"{text(i)} and {text(i + 1)}."
        asked = {"id": str(i), "question": f"what {i}?", "answers": [{"text": text(i), "answer_start": 0}]}
        if version == "v2.0":
            asked["is_impossible"] = i % 4 == 0
            asked["plausible_answers" if i % 4 == 0 else "answers"] = asked.pop("answers")
            asked.setdefault("answers", [])
        paragraphs.append({"context": context, "qas": [asked]})
    return json.dumps({"version": version, "data": [{"title": "sun", "paragraphs": paragraphs}]})


def conll(separator: str = " ", end: str = "\n", blank: str = "") -> str:
    lines = ["-DOCSTART- -X- -X- O", ""] if separator == " " else []
    for i in range(40):
        for k, word in enumerate(text(i).split()):
            cells = (
                [word, "NN", "B-NP", "B-LOC" if k == 1 else "O"]
                if separator == " "
                else [word, "BO"[k != 1] + "-LOC" * (k == 1)]
            )
            lines.append(separator.join(cells))
        lines.append(blank)
    return end.join(lines)


def conllu() -> str:
    lines = []
    for i in range(40):
        words = text(i).split()
        lines += [f"# sent_id = {i}", f"# text = {text(i)}", "1-2\tthesun" + "\t_" * 8]
        lines += [
            "\t".join([str(k), word, word, ["NOUN", "VERB"][k % 2], "_", "_", "0", "root", "_", "_"])
            for k, word in enumerate(words, 1)
        ]
        lines.append("")
    return "\n".join(lines)


ALPACA = [{"instruction": f"say {text(i)}", "input": "", "output": ["yes", "no"][i % 2]} for i in range(12)]
DOLLY = [
    {"instruction": f"say {i}", "context": text(i), "response": text(i + 1), "category": ["open_qa", "qa"][i % 2]}
    for i in range(12)
]
SHAREGPT = [
    {
        "id": str(i),
        "conversations": [
            {"from": "system", "value": "be short"},
            {"from": "human", "value": text(i)},
            {"from": "gpt", "value": text(i + 1)},
        ],
    }
    for i in range(40)
]
PAIRS = [  # as LLaMA-Factory has them
    {
        "conversations": [{"from": "human", "value": text(i)}],
        "chosen": {"from": "gpt", "value": text(i + 1)},
        "rejected": {"from": "gpt", "value": text(i + 2)},
    }
    for i in range(40)
]
LABELLED = {"text": [f"{text(i)} {i}" for i in range(60)], "label": [["joy", "fear"][i % 2] for i in range(60)]}


def saved(path: Path) -> None:
    datasets.DatasetDict({s: datasets.Dataset.from_dict(LABELLED) for s in ("train", "test")}).save_to_disk(path)


def saved_alone(path: Path) -> None:
    names = datasets.ClassLabel(names=["fear", "joy"])
    datasets.Dataset.from_dict(LABELLED).cast_column("label", names).save_to_disk(path, num_shards=2)
    (path / "cache-0123456789abcdef.arrow").write_bytes(b"of a map that somebody tried")


def put(content: str | list | dict, encoding: str = "utf-8") -> Callable[[Path], None]:
    told = content if isinstance(content, str) else json.dumps(content)

    def write(path: Path) -> None:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(gzip.compress(told.encode(encoding)) if path.suffix == ".gz" else told.encode(encoding))

    return write


QA, TAGS = "question_answering", "token_classification"
# file -> what writes it, the layout that is seen, the task, and some of its keys
CASES: dict[str, tuple[Callable[[Path], None], str, str, dict]] = {
    "train-v1.1.json": (put(squad()), "squad", QA, {"answers": "answers"}),
    "dev-v2.0.json.gz": (put(squad("v2.0")), "squad", QA, {"unanswerable": True}),
    "a.conll": (put(conll()), "conll", TAGS, {"words": "tokens", "tags": "ner_tags"}),
    "ner/train.txt": (put(conll(end="\r\n", blank=" "), "utf-8-sig"), "conll", TAGS, {"tags": "ner_tags"}),
    "eng.testa": (put(conll()), "conll", TAGS, {"tags": "ner_tags"}),
    "wnut.tsv": (put(conll("\t")), "conll", TAGS, {"words": "tokens", "tags": "tags"}),
    "a.conllu": (put(conllu()), "conll", TAGS, {"words": "tokens", "tags": "pos_tags"}),
    "alpaca.json": (put(ALPACA), "rows", "language_modeling", {"prompt": "instruction", "response": "output"}),
    "dolly.json": (put(DOLLY), "rows", "language_modeling", {"prompt": "instruction", "response": "response"}),
    "sharegpt.json": (put(SHAREGPT), "rows", "language_modeling", {"messages": "conversations"}),
    "lists.json": (put(LABELLED), "columns", "classification", {"text": "text", "label": "label"}),
    "pandas.json": (
        put({name: {str(i): value for i, value in enumerate(values)} for name, values in LABELLED.items()}),
        "columns",
        "classification",
        {"text": "text", "label": "label"},
    ),
    "document.json": (
        put(
            {
                "version": "1.0",
                "data": [dict(zip(LABELLED, row, strict=True)) for row in zip(*LABELLED.values(), strict=True)],
            }
        ),
        "records",
        "classification",
        {"text": "text", "label": "label"},
    ),
    "pairs.json": (
        put(PAIRS),
        "rows",
        "preference",
        {"prompt": "conversations", "conversations": True},
    ),
    "saved": (saved, "rows", "classification", {"text": "text", "label": "label"}),
    "saved_alone": (saved_alone, "rows", "classification", {"text": "text", "label": "label"}),
}


@pytest.mark.parametrize("name", CASES)
def test_init_recognizes_annotation_formats(name: str, here: Path) -> None:
    write, layout, task, keys = CASES[name]
    write(here / name)
    run = written("--data", name, "--model", "scratch")
    assert (run.data.layout, run.task.name) == (layout, task)
    assert keys.items() <= run.task.options.items()
    prepared = prepare(run, plugins.find("tasks", task))  # type: ignore[type-abstract]
    assert prepared.splits.keys() >= {"train", "validation"}


@pytest.mark.processes
def test_written_run_files_train(here: Path, cache: Path) -> None:
    """All runs share one process, to import torch once."""
    names = [
        name
        for name in CASES
        if name not in ("dev-v2.0.json.gz", "eng.testa", "pandas.json", "document.json", "saved_alone")
    ]
    for number, name in enumerate(names):
        CASES[name][0](here / name)
        written("--data", name, "--model", "scratch", path=f"r{number}.yaml")
    code = (
        f"from lockstep.cli import main\nfor n in range({len(names)}):\n"
        "    main(['train', f'r{n}.yaml', 'steps=1', 'evaluate.every=1', 'launch.processes=1', 'launch.threads=1'])\n"
    )
    status, _, err = ended(start([sys.executable, "-c", code], here, cache), 400)
    assert status == 0, err
    assert [n for n in range(len(names)) if not (here / f"outputs/r{n}/export/config.json").exists()] == [], err


# -- what the files hold ---------------------------------------------------------------------------------------------


def test_questions_equal_those_of_the_file(here: Path) -> None:
    put(squad())(here / "a.json")
    put(squad("v2.0"))(here / "b.json.gz")
    held = json.loads(squad())["data"][0]["paragraphs"]
    found = rows(source="a.json", layout="squad")
    assert [row["question"] for row in found] == [each["qas"][0]["question"] for each in held]
    for row in found:
        start = row["answers"]["answer_start"][0]
        assert row["context"][start:].startswith(row["answers"]["text"][0])
    found = rows(train=["a.json", "b.json.gz"], layout="squad")
    assert [len(row["answers"]["text"]) for row in found] == [1] * 40 + [int(i % 4 != 0) for i in range(40)]
    (here / "c.json").write_text(squad().replace('"answers"', '"other"'))
    assert mentions(refused(source="c.json", layout="squad"), "LS2008", "c.json", "'sun'", "'0'")
    put(LABELLED)(here / "d.json")
    assert mentions(refused(source="d.json", layout="squad"), "LS2005")


def test_sentences_equal_those_of_the_file(here: Path) -> None:
    for name in ("a.conll", "ner/train.txt", "wnut.tsv", "a.conllu"):
        CASES[name][0](here / name)
        found = rows(source=name, layout="conll")
        assert [" ".join(row["tokens"]) for row in found] == [text(i) for i in range(40)]
    (here / "odd.conll").write_text("# O\n#tag B-X\nEU B-ORG\n\n# a comment of the file\nGerman B-MISC\n")
    assert [row["tokens"] for row in rows(source="odd.conll", layout="conll")] == [["#", "#tag", "EU"], ["German"]]
    put(conll() + "\nlate line\n")(here / "b.conll")
    said = refused(source="b.conll", layout="conll")
    number = len(conll().split("\n")) + 1
    assert mentions(said, "LS2000", "b.conll", str(number), "2", "4", "pos_tags", "chunk_tags")
    named = rows(source="a.conll", layout="conll", columns=["w", "p", "c", "t"])
    assert list(named[0]) == ["w", "p", "c", "t"]
    assert mentions(refused(source="a.conll", layout="conll", separator=";"), "LS2249", "data.separator")
    (here / "empty.conll").write_text("\n\n")
    assert mentions(refused(source="empty.conll", layout="conll"), "LS2001")


def test_lists_of_columns_are_rows(here: Path) -> None:
    for name in ("lists.json", "pandas.json"):
        CASES[name][0](here / name)
        assert rows(source=name, layout="columns") == datasets.Dataset.from_dict(LABELLED).to_list()
    put({"text": ["a", "b"], "label": [1]})(here / "uneven.json")
    assert mentions(refused(source="uneven.json", layout="columns"), "LS2005")


@pytest.mark.parametrize("orient", ["table", "index", "split"])
def test_documents_hold_their_rows(orient: str, here: Path) -> None:
    """The rows are compared with those that pandas reads."""
    pandas = pytest.importorskip("pandas")
    pandas.DataFrame(LABELLED).to_json(here / "a.json", orient=orient)
    wanted = datasets.Dataset.from_dict(LABELLED).to_list()
    found = rows(source="a.json", layout="records")
    assert [{name: row[name] for name in ("text", "label")} for row in found] == wanted


def test_a_document_is_not_one_row(here: Path) -> None:
    """An earlier version read each of these as one row."""
    held = [{"text": "a"}, {"text": "b", "label": "x"}]
    put({"version": "1.1", "data": held})(here / "a.json")
    assert rows(source="a.json", layout="records") == [{"text": "a", "label": None}, held[1]]
    assert mentions(refused(source="a.json"), "LS2002")
    CASES["train-v1.1.json"][0](here / "b.json")
    assert mentions(refused(source="b.json"), "LS2002")
    put({"train": held, "test": held})(here / "c.json")
    assert mentions(refused(source="c.json"), "LS2003")
    (here / "d.json").write_text("".join(json.dumps(row) + "\n" for row in held))  # control: a row on each line
    assert len(rows(source="d.json")) == 2


def test_a_column_that_the_first_row_lacks_is_read_in_every_encoding(here: Path) -> None:
    held = [{"text": "a"}, {"text": "\xe9", "label": "x"}]
    for encoding in ("utf-8", "latin-1"):
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in held)
        (here / f"{encoding}.jsonl").write_text(lines, encoding=encoding)
        assert rows(source=f"{encoding}.jsonl", encoding=encoding) == [{"text": "a", "label": None}, held[1]]


def test_predict_reads_annotated_files(here: Path) -> None:
    CASES["a.conll"][0](here / "new.txt")
    CASES["train-v1.1.json"][0](here / "new.json")
    for name, layout, columns, first in (
        ("new.txt", "conll", ["tokens"], (text(0),)),
        ("new.json", "squad", ["question", "context"], ("what 0?", f"{text(0)} and {text(1)}.")),
    ):
        run = Run.model_validate({"model": {"type": "gpt2"}, "data": {"source": name, "layout": layout}})
        found = predicting.rows_of(run.data, run.seed, name, predicting.Reads(columns))
        assert (len(found), found[0]) == (40, first)
    run = Run.model_validate({"model": {"type": "gpt2"}, "data": {"source": "a.jsonl"}})
    assert predicting.rows_of(run.data, run.seed, "new.txt", predicting.Reads(["text"]))[0] == ("-DOCSTART- -X- -X- O",)


def test_saved_data_sets_are_what_was_saved(here: Path) -> None:
    saved_alone(here / "one")
    found = source.load(DataSection(source="one"), 0).splits
    assert found["train"].to_list() == datasets.load_from_disk("one").to_list()
    assert found["train"].features["label"].names == ["fear", "joy"]
    saved(here / "two")
    assert {split: len(each) for split, each in source.load(DataSection(source="two"), 0).splits.items()} == {
        "train": 60,
        "test": 60,
    }
    for name in ("one/state.json", "one/dataset_info.json"):  # as a copy of its rows alone
        (here / name).unlink()
    assert len(rows(source="one")) == 60


def test_a_single_message_becomes_a_list_of_one() -> None:
    plain = [{"role": "assistant", "content": "b"}]
    for turn in ({"from": "gpt", "value": "b"}, plain[0]):
        alone = datasets.Dataset.from_list([{"c": turn}])
        assert conversations.with_roles(alone, "c", "task.chosen", "train").to_list() == [{"c": plain}]


def test_speakers_become_roles() -> None:
    told = [{"from": "human", "value": "a"}, {"from": "GPT", "value": "b"}]
    plain = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    spoken = datasets.Dataset.from_list([{"c": told}, {"c": None}])
    assert conversations.with_roles(spoken, "c", "task.messages", "train").to_list() == [{"c": plain}, {"c": None}]
    same = datasets.Dataset.from_list([{"c": plain}])
    assert conversations.with_roles(same, "c", "task.messages", "train") is same
    some = {"c": [[told[0], told[1] | {"weight": 1}], None, plain]}  # a key that not all messages have
    ragged = conversations.with_roles(value_types.dataset_of(some), "c", "task.messages", "train")
    assert ragged.to_list() == [{"c": [plain[0], plain[1] | {"weight": 1}]}, {"c": None}, {"c": plain}]
    odd = datasets.Dataset.from_list([{"c": told}, {"c": [{"from": "narrator", "value": "a"}]}])
    with raises("LS2040", "task.messages", "'c'", "row 1", "'narrator'"):
        conversations.with_roles(odd, "c", "task.messages", "train")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.txt", "some words here\nand more of them\n\na poem\nof two lines\n\nand\nmore\n"),
        ("b.txt", "I feel fine;joy\nI feel bad;sad\n"),
        ("c.tsv", "text\tlabel\nword\tO\nword\tB-X\n"),
        ("d.json", json.dumps([{"text": "a", "label": 1}])),
        ("e.json", '{"text": "a", "label": 1}\n{"text": "b", "label": 0}\n'),
        ("f.json", json.dumps({"text": "one row", "tags": ["a"]})),
        ("g.json", json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]})),
        ("i.json", json.dumps({"chosen": {"from": "gpt", "value": "a"}, "rejected": {"from": "gpt", "value": "b"}})),
        ("j.json", json.dumps({"translation": {"en": "a", "de": "b"}})),
        ("h.json", "{"),
        ("train.en", "two words\n\nin lines\n\nof text\n"),
    ],
)
def test_unannotated_files_are_read_as_rows(name: str, content: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    assert annotated.layout_of(tmp_path / name, "utf-8") is None


# -- labels ----------------------------------------------------------------------------------------------------------


def test_labels_that_are_nearly_the_same_are_noted(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["joy", "fear", "Joy", "joy ", "fear"]
    (here / "a.csv").write_text("text,label\n" + "".join(f"{text(i)} {i},{words[i % 5]}\n" for i in range(100)))
    written("--data", "a.csv", "--model", "scratch")
    said = " ".join(capsys.readouterr().out.split())
    assert "labels that differ only in surrounding blanks or case count as different labels: 'J" in said
    assert all(f"{name!r} (18)" in said for name in ("joy", "Joy", "joy "))
    assert "'fear'" not in said.partition("labels that differ")[2].partition("If they stand")[0]
    sentences = [{"tokens": ["a", "b"], "tags": ["O", ["B-X", "b-x"][i % 2]]} for i in range(60)]
    (here / "b.jsonl").write_text("\n".join(map(json.dumps, sentences)))
    assert main(["init", "b.yaml", "--yes", "--data", "b.jsonl", "--model", "scratch"]) == 0
    counts = re.search(
        r"different labels: '(B-X|b-x)' \((\d+)\), '(B-X|b-x)' \((\d+)\)", " ".join(capsys.readouterr().out.split())
    )
    assert counts is not None
    assert int(counts[2]) + int(counts[4]) == 54  # of train, without what was cut off it
