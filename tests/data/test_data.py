"""From files to tokens: every format gives the same rows, the held-out split is balanced, and nothing is tokenized or
copied twice."""

import json
import os
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest

from lockstep.config.run import DataSection, Run
from lockstep.data import arrow_cache, labels, source, tokenizer
from lockstep.data.arrow_cache import Columns, Prepared
from lockstep.distributed.world import World
from lockstep.tasks.classification import Classification
from support.harness import run_on
from support.messages import raises
from support.rows import prepared, run_of

ROWS = [
    {"text": text, "label": label}
    for text, label in [
        ("i am so happy; really", "joy"),
        ("null", "sadness"),  # text, though readers tend to parse it
        ("a, b and \u2028 c", "joy"),  # a line separator is part of a text
        ("ça va déjà mieux 🙂", "joy"),
        ("he said so", "sadness"),
        ("NA", "anger"),
    ]
]


def write(folder: Path, name: str, rows: list[dict]) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    data = datasets.Dataset.from_list(rows)
    if path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".csv":
        data.to_csv(path, index=False)
    elif path.suffix == ".tsv":
        lines = ["\t".join(data.column_names), *("\t".join(map(str, row.values())) for row in rows)]
        path.write_text("\n".join(lines) + "\n")
    elif path.suffix == ".parquet":
        data.to_parquet(path)
    else:
        path.write_text("".join(f"{row['text']};{row['label']}\n" for row in rows))
    return path


def messages(count: int, labels: tuple = ("joy", "anger", "fear"), **columns: str) -> list[dict]:
    """Return rows with these column names; class i has a share of about 2^-i."""
    text, label = columns.get("text", "text"), columns.get("label", "label")
    found = []
    for i in range(count):
        kind = 0 if i % 2 else 1 if i % 4 else 2
        found.append({text: f"message {i} " + "word " * (i % 7) + f"of {kind}", label: labels[kind % len(labels)]})
    return found


def decoded(found: Prepared, split: str) -> list[tuple[tuple[int, ...], int]]:
    columns = Columns(found.splits[split])
    ids, labels = columns.ragged("input_ids"), columns.flat("label")
    return [(tuple(ids.row(i).tolist()), int(labels[i])) for i in range(len(columns))]


# -- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", [".json", ".jsonl", ".csv", ".tsv", ".parquet", ".txt"])
def test_every_format_gives_the_same_rows(tmp_path: Path, ending: str) -> None:
    path = write(tmp_path, f"data{ending}", ROWS)
    found = source.load(DataSection(source=str(path)), 0)
    assert list(found.splits) == ["train"]
    assert found.splits["train"].to_list() == ROWS


def test_text_files_with_windows_line_ends_and_integer_labels(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("\ufeffone;1\r\n\r\ntwo; x;-2\r\n".encode())
    found = source.load(DataSection(source=str(tmp_path / "a.txt")), 0).splits["train"]
    assert found.to_list() == [{"text": "one", "label": 1}, {"text": "two; x", "label": -2}]
    (tmp_path / "b.txt").write_text("one;²\n")
    assert source.load(DataSection(source=str(tmp_path / "b.txt")), 0).splits["train"]["label"][0] == "²"


@pytest.mark.parametrize("words", [("train", "validation", "test"), ("training", "dev", "test"), ("train", "val", "")])
def test_a_folder_of_splits(tmp_path: Path, words: tuple[str, ...]) -> None:
    for i, word in enumerate(w for w in words if w):
        write(tmp_path, f"{word}.jsonl", ROWS[: 6 - i])
    found = source.load(DataSection(source=str(tmp_path)), 0).splits
    wanted = {"train": 6, "validation": 5} | ({"test": 4} if words[2] else {})
    assert {name: len(split) for name, split in found.items()} == wanted


@pytest.mark.parametrize(
    "names",
    [
        ("train.jsonl", "train-2.jsonl"),
        ("train.jsonl", "train.csv"),
        ("dev.jsonl", "val.jsonl"),
        ("test.csv", "test/a.csv"),
    ],
)
def test_files_of_a_split_that_are_named_in_two_ways_are_refused(tmp_path: Path, names: tuple[str, str]) -> None:
    """Two naming schemes are refused: the datasets library reads both files of the first pair, one of the second."""
    (tmp_path / "test").mkdir()
    for name in ("train.jsonl", *names):
        write(tmp_path, name, ROWS)
    with raises("LS2257", *names):
        source.load(DataSection(source=str(tmp_path)), 0)
    split = {"d": "validation", "t": "test"}.get(names[0][0], "train") if "train" not in names[0] else "train"
    one = source.load(DataSection(source=str(tmp_path), **{split: [names[0]]}), 0).splits
    assert {name: len(rows) for name, rows in one.items()} == {"train": 6} | {split: 6}


def test_files_of_another_format_are_not_part_of_a_split(tmp_path: Path) -> None:
    write(tmp_path, "train.jsonl", ROWS)
    (tmp_path / "training_log.txt").write_text("step 1\n")
    assert source.load(DataSection(source=str(tmp_path)), 0).splits["train"].to_list() == ROWS


def test_several_files_a_split_and_limit(tmp_path: Path) -> None:
    write(tmp_path, "train-00000.jsonl", ROWS[:2])
    write(tmp_path, "train-00001.jsonl", ROWS[2:])
    found = source.load(DataSection(source=str(tmp_path)), 0).splits
    assert found["train"].to_list() == ROWS
    assert source.load(DataSection(source=str(tmp_path), limit=3), 0).splits["train"].to_list() == ROWS[:3]
    listed = DataSection(train=[str(tmp_path / f"train-0000{i}.jsonl") for i in (1, 0)])
    assert source.load(listed, 0).splits["train"].to_list() == ROWS[2:] + ROWS[:2]
    assert len(source.load(DataSection(source=str(tmp_path / "train-*.jsonl")), 0).splits["train"]) == 6


def test_files_named_one_by_one(tmp_path: Path) -> None:
    paths = {s: str(write(tmp_path, f"{s}-own.jsonl", ROWS[:n])) for s, n in (("train", 6), ("validation", 2))}
    assert {k: len(v) for k, v in source.load(DataSection(**paths), 0).splits.items()} == {"train": 6, "validation": 2}


# -- held-out rows ---------------------------------------------------------------------------------------------------


def test_a_single_file_is_split_stratified_and_reproducibly(tmp_path: Path) -> None:
    path = write(tmp_path, "data.jsonl", messages(400))
    run = run_of(path, "data.validation_fraction=0.2")
    found = prepared(run)
    assert set(found.splits) == {"train", "validation"}
    whole, cut = decoded(found, "train"), decoded(found, "validation")
    assert not set(whole) & set(cut)
    assert len(set(whole) | set(cut)) == 400
    assert Counter(label for _, label in cut) == {0: 20, 1: 20, 2: 40}  # anger, fear, joy: 100, 100, 200
    write(tmp_path / "again", "data.jsonl", messages(400))
    again = prepared(run_of(tmp_path / "again" / "data.jsonl", "data.validation_fraction=0.2"))
    assert decoded(again, "validation") == cut
    assert again.key == found.key
    other = prepared(run_of(path, "data.validation_fraction=0.2", "seed=1"))
    texts = {ids for ids, _ in cut}
    assert {ids for ids, _ in decoded(other, "validation")} != texts


# -- columns and labels ----------------------------------------------------------------------------------------------


def test_any_column_names(tmp_path: Path) -> None:
    plain = prepared(run_of(write(tmp_path, "a.jsonl", messages(60))))
    for text, label in (("tweet", "mood"), ("label", "text"), ("label", "y")):
        path = write(tmp_path, f"{text}-{label}.jsonl", messages(60, text=text, label=label))
        found = prepared(run_of(path, f"task.text={text}", f"task.label={label}"))
        assert decoded(found, "train") == decoded(plain, "train")
        assert found.facts["labels"] == ["anger", "fear", "joy"]


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        (("joy", "anger", "fear"), ["anger", "fear", "joy"]),
        ((0, 1, 2), ["0", "1", "2"]),
        ((1, 3, 5), ["1", "3", "5"]),
        ((-1, 1, 10), ["-1", "1", "10"]),
    ],
)
def test_labels_are_strings_or_any_integers(tmp_path: Path, labels: tuple, names: list[str]) -> None:
    found = prepared(run_of(write(tmp_path, "a.parquet", messages(40, labels))))
    assert found.facts["labels"] == names
    assert {label for _, label in decoded(found, "train")} == {0, 1, 2}


def test_names_of_integer_labels(tmp_path: Path) -> None:
    words = {1: "bad", 2: "fair", 5: "good"}
    rows = messages(40, (1, 2, 5))
    named = [row | {"label_name": words[row["label"]]} for row in rows]
    assert prepared(run_of(write(tmp_path, "a.jsonl", named))).facts["labels"] == ["bad", "fair", "good"]
    path = write(tmp_path, "b.jsonl", rows)
    assert prepared(run_of(path, "task.label_names=[x, y, z]")).facts["labels"] == ["x", "y", "z"]
    zero = write(tmp_path, "c.jsonl", messages(40, (0, 1, 3)))
    found = prepared(run_of(zero, "task.label_names=[a, b, c, d]"))  # one of them does not occur in train
    assert found.facts["labels"] == ["a", "b", "c", "d"]
    assert {label for _, label in decoded(found, "train")} == {0, 1, 3}
    with raises("LS2101", "task.label_names", "5 names", "3 labels", "1 to 5"):  # which names are missing?
        prepared(run_of(path, "task.label_names=[one, two, three, four, five]"))


def test_a_constant_label_is_refused_with_its_value() -> None:
    rows = datasets.Dataset.from_dict({"stars": [1.0, 2.0], "helpful": [7.5, 7.5]})
    with raises("LS2108", "'helpful'", "7.5"):
        labels.number_codes_of({"train": rows}, ["stars", "helpful"], None, "a.jsonl")


def test_duplicate_label_names_are_not_used(tmp_path: Path) -> None:
    rows = [row | {"label_text": "same"} for row in messages(40, (0, 1, 2))]
    assert prepared(run_of(write(tmp_path, "a.jsonl", rows))).facts["labels"] == ["0", "1", "2"]


def test_names_of_class_labels_are_used(tmp_path: Path) -> None:
    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["no", "yes", "never seen"])}
    )
    rows = messages(40, (0, 1))
    datasets.Dataset.from_list(rows, features=features).to_parquet(tmp_path / "a.parquet")
    assert prepared(run_of(tmp_path / "a.parquet")).facts["labels"] == ["no", "yes", "never seen"]


# -- tokens ----------------------------------------------------------------------------------------------------------


def test_tokens_equal_the_tokenizers(tmp_path: Path) -> None:
    rows = [*messages(40), {"text": "word " * 60, "label": "joy"}, {"text": "\u0007", "label": "fear"}]
    for name in ("train", "validation"):
        write(tmp_path, f"{name}.jsonl", rows)
    found = prepared(run_of(tmp_path))
    tok = tokenizer.load(found.tokenizer)
    for (ids, label), row in zip(decoded(found, "train"), rows, strict=True):
        assert list(ids) == tok(row["text"], truncation=True, max_length=32)["input_ids"]
        assert found.facts["labels"][label] == row["label"]
        assert len(ids) <= 32
    assert len(decoded(found, "train")[-2][0]) == 32


@pytest.mark.parametrize("kind", ["bpe", "wordpiece", "wordlevel", "unigram"])
def test_an_empty_text_has_at_least_one_token(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path, "a.jsonl", [*messages(40), *({"text": "\u0007", "label": "joy"} for _ in range(20))])
    found = prepared(run_of(path, tokenizer={"train": kind, "vocab_size": 300}))
    for split in found.splits:
        assert Columns(found.splits[split]).lengths.min() >= 1


def test_texts_without_tokens_are_examples(shared: Path, tmp_path: Path) -> None:
    """GPT-2's tokenizer adds no special tokens."""
    path = write(tmp_path, "a.jsonl", [*messages(40), *({"text": "\u0007", "label": "joy"} for _ in range(20))])
    from tokenizers.normalizers import Replace
    from transformers import GPT2TokenizerFast, PreTrainedTokenizerFast

    known = GPT2TokenizerFast.from_pretrained(str(shared / "gpt2_tokenizer")).backend_tokenizer
    known.normalizer = Replace("\u0007", "")
    PreTrainedTokenizerFast(tokenizer_object=known, eos_token="<|endoftext|>").save_pretrained(tmp_path / "tok")
    found = prepared(run_of(path, tokenizer={"source": str(tmp_path / "tok")}))
    end = tokenizer.load(found.tokenizer).eos_token_id
    both = decoded(found, "train") + decoded(found, "validation")
    assert sum(ids == (end,) for ids, _ in both) == 20


def test_pairs_have_token_types(tmp_path: Path) -> None:
    from transformers import BertTokenizerFast

    rows = [row | {"answer": f"answer {i}"} for i, row in enumerate(messages(40))]
    path = write(tmp_path, "a.jsonl", rows)
    trained = prepared(run_of(path, tokenizer={"train": "wordpiece", "vocab_size": 300}, model=_bert()))
    vocabulary = tokenizer.load(trained.tokenizer).get_vocab()
    (tmp_path / "tok").mkdir()
    (tmp_path / "tok" / "vocab.txt").write_text("\n".join(sorted(vocabulary, key=vocabulary.__getitem__)) + "\n")
    BertTokenizerFast(str(tmp_path / "tok" / "vocab.txt")).save_pretrained(tmp_path / "tok")
    run = run_of(path, "task.text_pair=answer", tokenizer={"source": str(tmp_path / "tok")}, model=_bert())
    found = prepared(run)
    columns = Columns(found.splits["train"])
    assert "token_type_ids" in columns.names
    tok = tokenizer.load(found.tokenizer)
    wanted = {tuple(tok(r["text"], r["answer"])["input_ids"]): tok(r["text"], r["answer"]) for r in rows}
    types = columns.ragged("token_type_ids")
    for i, (ids, _) in enumerate(decoded(found, "train")):
        assert types.row(i).tolist() == wanted[ids]["token_type_ids"]
        assert set(types.row(i).tolist()) == {0, 1}
    micro = Classification(run).opened(found).collate(columns, np.arange(3), 0)
    assert micro.inputs["token_type_ids"].shape == micro.inputs["input_ids"].shape
    assert "token_type_ids" not in Columns(trained.splits["train"]).names


def _bert() -> dict:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    return {"type": "bert", "config": sizes}


# -- the cache -------------------------------------------------------------------------------------------------------


def test_the_second_run_uses_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(write(tmp_path, "data.jsonl", messages(40)))
    calls = []
    whole = arrow_cache.fill

    def spy(*arguments: Any) -> list[Path]:
        calls.append("fill")
        return whole(*arguments)

    monkeypatch.setattr(arrow_cache, "fill", spy)
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))  # other tests prepare the same texts
    first = prepared(run)
    assert calls == ["fill", "fill"]
    monkeypatch.setattr(source, "load", lambda *_: calls.append("load"))
    assert prepared(run) == first
    assert prepared(run.model_copy(update={"batch_size": 9})) == first
    assert calls == ["fill", "fill"]


def test_a_changed_file_is_noticed_and_a_touched_one_is_the_same_data(tmp_path: Path) -> None:
    path = write(tmp_path, "data.jsonl", messages(40))
    first = prepared(run_of(path))
    os.utime(path, ns=(1, 1))
    assert prepared(run_of(path)) == first
    rows = messages(40)
    rows[3]["text"] = rows[3]["text"].replace("message", "massage")  # same length
    write(tmp_path, "data.jsonl", rows)
    os.utime(path, ns=(2, 2))
    assert prepared(run_of(path)).key != first.key


def test_another_length_or_tokenizer_misses_the_cache(tmp_path: Path) -> None:
    path = write(tmp_path, "data.jsonl", messages(40))
    keys = [
        prepared(run_of(path, *o)).key for o in ([], ["data.max_length=8"], ["tokenizer.vocab_size=270"], ["seed=5"])
    ]
    assert len(set(keys)) == 4


def test_deleted_tokens_are_recomputed(tmp_path: Path) -> None:
    run = run_of(write(tmp_path, "data.jsonl", messages(40)))
    first = prepared(run)
    wanted = decoded(first, "train")
    shutil.rmtree(first.splits["train"])
    assert decoded(prepared(run), "train") == wanted


def prepare_in(world: World, run: Run, cache: str) -> tuple[str, int]:
    os.environ["LOCKSTEP_CACHE"] = cache
    found = prepared(run)
    return found.key, int(Columns(found.splits["train"]).lengths.sum())


@pytest.mark.processes
def test_four_processes_at_once(tmp_path: Path) -> None:
    run = run_of(write(tmp_path, "data.jsonl", messages(300)))
    assert len(set(run_on(4, prepare_in, run, str(tmp_path / "cache")))) == 1
    assert len(list((tmp_path / "cache" / "tokens").rglob("*.arrow/*.arrow"))) == 2
    assert not list((tmp_path / "cache").rglob("*.tmp"))


@pytest.mark.parametrize("name", ["./away", "away/", "a/b/away", "./away.d"])
def test_a_missing_folder_is_reported(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path is not looked up on the Hub, where a name has at most one slash."""
    monkeypatch.chdir(tmp_path)
    with raises("LS2250", "data.source: no such file or folder", Path(name).name):
        source.load(DataSection(source=name), 0)
    for layout, code in (("class_folders", "LS2200"), ("parallel", "LS2205"), ("conll", "LS2250")):
        with raises(code, "does not exist" if code != "LS2250" else "no such file or folder"):
            source.load(DataSection(source=name, layout=layout), 0)  # type: ignore[arg-type]
    Path(name).mkdir(parents=True)
    with raises("LS2248", "holds no data file"):
        source.load(DataSection(source=name), 0)
