"""Bad input ends with exit status 2 and one message that names the key; nothing is started or written."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from lockstep.cli import main
from lockstep.launchers.local import Local
from lockstep.launchers.tcp import Tcp
from support.harness import TINY

EMOTION = [{"text": f"word {i} of {i % 3}", "label": i % 3} for i in range(30)]
OWN = {"source": "train.jsonl", "max_length": 32}


def jsonl(name: str, rows: list[dict]) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows)) and None


def model_folder(folder: Path) -> None:
    (folder / "mymodel").mkdir()
    (folder / "mymodel" / "model.safetensors").write_bytes(b"")


def many(*makers: Callable[[Path], Any]) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        for maker in makers:
            maker(folder)

    return make


def rows(**values: Any) -> list[dict]:
    """Write good rows, with the fifth one changed."""
    return [row | values if i == 4 else row for i, row in enumerate(EMOTION)]


def nothing(_: Path) -> None:
    """Write nothing, for cases that need no file."""


def blocked(folder: Path) -> None:
    (folder / "out").write_text("a file where the folder should be")


# name -> (files made, values of the run file, overrides, what the message must hold)
CASES: dict[str, tuple[Callable[[Path], Any], dict, list[str], list[str]]] = {
    "unknown key": (nothing, {"batchsize": 3}, [], ["unknown key 'batchsize'", "batch_size", "run.yaml, line"]),
    "unknown key of a section": (nothing, {}, ["data.sorce=x"], ["data.sorce", "'source'", "command line"]),
    "unknown task": (nothing, {"task": {"name": "clasify"}}, [], ["task.name", "classification"]),
    "unknown strategy": (nothing, {}, ["strategy.name=dpp"], ["strategy.name", "'dpp'", "ddp"]),
    "task that cannot be imported": (nothing, {}, ["task.name=no.such.Task"], ["task.name", "no.such.Task"]),
    "strategy that cannot be imported": (nothing, {}, ["strategy.name=no.such.One"], ["strategy.name", "no.such.One"]),
    "launcher that cannot be imported": (nothing, {}, ["launch.name=no.such.One"], ["launch.name", "no.such.One"]),
    "tracker that cannot be imported": (nothing, {}, ["track.to=[no.such.One]"], ["track.to", "no.such.One"]),
    "too many processes": (nothing, {}, ["launch.processes=9"], ["launch.processes", "9", "8 micro-batches"]),
    "single with two": (nothing, {}, ["strategy.name=single", "launch.processes=2"], ["strategy.name", "single", "2"]),
    "unknown option of ddp": (nothing, {}, ["strategy.options.bucket=1"], ["strategy.options", "bucket_cap_mb"]),
    "unknown option of allreduce": (
        nothing,
        {},
        ["strategy.name=allreduce", "strategy.options={find_unused_parameters: true}"],
        ["strategy.options", "bucket_cap_mb"],
    ),
    "no gpu": (nothing, {}, ["launch.device=cuda", "launch.processes=1"], ["launch.device", "cuda"]),
    "tcp without an address": (nothing, {}, ["launch.name=tcp"], ["launch.init_method", "tcp://host:port"]),
    "tcp that goes on": (
        nothing,
        {},
        [
            "launch.name=tcp",
            "launch.init_method=tcp://h:1",
            "launch.rank=0",
            "launch.world_size=2",
            "launch.on_rank_failure=continue",
        ],
        ["launch.on_rank_failure", "launch.name=local, torchrun", "restart"],
    ),
    "a secret": (nothing, {}, ["hub.token=hf_abcdefghijklmnopqrstuvwx"], ["hub.token", "secret", "HF_TOKEN"]),
    "missing file": (nothing, {"data": OWN}, [], ["data.source", "train.jsonl", "no such file"]),
    "missing validation file": (
        jsonl("train.jsonl", EMOTION),
        {"data": OWN | {"validation": "none.jsonl"}},
        [],
        ["data.validation", "none.jsonl"],
    ),
    "file of no known format": (
        lambda folder: (folder / "train.xml").write_text("x"),
        {"data": OWN | {"source": "./train.xml"}},
        [],
        ["data.source", "train.xml", ".jsonl"],
    ),
    "folder without data": (
        lambda folder: (folder / "data").mkdir(),
        {"data": OWN | {"source": "data"}},
        [],
        ["data.source", "no data file", "train.jsonl"],
    ),
    "unknown split": (
        many(lambda folder: (folder / "d").mkdir(), jsonl("d/train.jsonl", EMOTION)),
        {"data": OWN | {"source": "d", "validation": "devel"}},
        [],
        ["data.validation", "devel"],
    ),
    "missing column": (
        jsonl("train.jsonl", EMOTION),
        {"data": OWN, "task": {"name": "classification", "text": "tweet"}},
        [],
        ["task.text", "'tweet'", "it has text, label"],
    ),
    "missing second text": (
        jsonl("train.jsonl", EMOTION),
        {"data": OWN},
        ["task.text_pair=answer"],
        ["task.text_pair", "'answer'", "text, label"],
    ),
    "missing label column": (
        jsonl("train.jsonl", EMOTION),
        {"data": OWN, "task": {"name": "classification", "label": "emotion"}},
        [],
        ["task.label", "'emotion'", "text, label"],
    ),
    "column missing in validation only": (
        many(jsonl("train.jsonl", EMOTION), jsonl("v.jsonl", [{"text": "a"}])),
        {"data": OWN | {"validation": "v.jsonl"}},
        [],
        ["task.label", "validation split"],
    ),
    "empty file": (
        lambda folder: (folder / "train.jsonl").touch(),
        {"data": OWN},
        [],
        ["data.train", "train.jsonl", "empty"],
    ),
    "empty text file": (
        lambda folder: (folder / "train.txt").touch(),
        {"data": OWN | {"source": "train.txt"}},
        [],
        ["data.", "empty"],
    ),
    "header only": (
        lambda folder: (folder / "train.csv").write_text("text,label\n"),
        {"data": OWN | {"source": "train.csv"}},
        [],
        ["data.", "empty"],
    ),
    "broken json": (
        lambda folder: (folder / "train.jsonl").write_text('{"text": "a", "label": 0}\n{"text": \n'),
        {"data": OWN},
        [],
        ["data.train", "train.jsonl"],
    ),
    "line without a label": (
        lambda folder: (folder / "train.txt").write_text("good;joy\nno label here\n"),
        {"data": OWN | {"source": "train.txt"}},
        [],
        ["train.txt, line 2", "text;label"],
    ),
    "not utf-8": (
        lambda folder: (folder / "train.txt").write_bytes("très bien;joy\n".encode("latin-1")),
        {"data": OWN | {"source": "train.txt"}},
        [],
        ["data.train", "train.txt", "UTF-8"],
    ),
    "texts are numbers": (
        jsonl("train.jsonl", [{"text": i, "label": i % 2} for i in range(20)]),
        {"data": OWN},
        [],
        ["task.text", "'text'", "must hold texts", "row 0 holds 0"],
    ),
    "a text is none": (jsonl("train.jsonl", rows(text=None)), {"data": OWN}, [], ["task.text", "row 4", "none"]),
    "a label is none": (jsonl("train.jsonl", rows(label=None)), {"data": OWN}, [], ["task.label", "row 4", "None"]),
    "labels are fractions": (
        jsonl("train.jsonl", [row | {"label": 0.5 + i % 2} for i, row in enumerate(EMOTION)]),
        {"data": OWN},
        [],
        ["task.label", "integers or strings", "0.5"],
    ),
    "label unseen in train": (
        many(jsonl("train.jsonl", EMOTION), jsonl("v.jsonl", rows(label=7))),
        {"data": OWN | {"validation": "v.jsonl"}},
        [],
        ["task.label", "validation split", "7", "row 4", "0, 1, 2"],
    ),
    "a single label": (
        jsonl("train.jsonl", [row | {"label": "joy"} for row in EMOTION]),
        {"data": OWN},
        [],
        ["task.label", "a single label", "'joy'"],
    ),
    "several labels a text": (
        jsonl("train.jsonl", [row | {"label": [i % 3, 1]} for i, row in enumerate(EMOTION)]),
        {"data": OWN},
        [],
        ["task.label", "row 0 holds [0, 1]", "one label per example, not several"],
    ),
    "several labels a text in validation only": (
        many(jsonl("train.jsonl", EMOTION), jsonl("v.jsonl", [{"text": "a", "label": [1]}])),
        {"data": OWN | {"validation": "v.jsonl"}},
        [],
        ["task.label", "validation split", "row 0 holds [1]", "one label per example, not several"],
    ),
    "a label list that is none": (
        jsonl("train.jsonl", [row | {"label": ["a", "b"] if i != 5 else "a"} for i, row in enumerate(EMOTION)]),
        {"data": OWN},
        ["task.multi_label=true"],
        ["task.label", "list of labels in every row", "row 5 holds 'a'", "[] for a text without labels"],
    ),
    "labels, and lists are asked for": (
        jsonl("train.jsonl", EMOTION),
        {"data": OWN},
        ["task.multi_label=true"],
        ["task.label", "list of labels in every row", "row 0 holds", "remove task.multi_label"],
    ),
    "a list with nothing in it": (
        jsonl("train.jsonl", [row | {"label": ["a", "b"] if i != 5 else ["a", None]} for i, row in enumerate(EMOTION)]),
        {"data": OWN},
        ["task.multi_label=true"],
        ["task.label", "row 5 holds ['a', None]", "data.drop_missing=true"],
    ),
    "a label unseen in train, in a list": (
        many(
            jsonl("train.jsonl", [row | {"label": ["a", "b"][: i % 3]} for i, row in enumerate(EMOTION)]),
            jsonl("v.jsonl", [{"text": "a", "label": []}, {"text": "b", "label": ["c"]}]),
        ),
        {"data": OWN | {"validation": "v.jsonl"}},
        ["task.multi_label=true"],
        ["task.label", "validation split", "'c' (row 1)", "the train split has 'a', 'b'"],
    ),
    "a mark that is none": (
        jsonl("train.jsonl", [row | {"a": i % 2, "b": i // 2 % 2 if i != 5 else 2} for i, row in enumerate(EMOTION)]),
        {"data": OWN},
        ["task.multi_label=true", "task.label=[a, b]"],
        ["task.label", "column 'b'", "0 or 1", "row 5 holds 2"],
    ),
    "a number that is not finite": (
        lambda folder: (folder / "train.csv").write_text(
            "text,label\n" + "".join(f"word {i},{'inf' if i == 5 else i / 7}\n" for i in range(20))
        ),
        {"data": OWN | {"source": "train.csv"}},
        ["task.regression=true"],
        ["task.label", "all of them finite", "row 5 holds inf", "correct or remove it"],
    ),
    "a number that is none": (
        lambda folder: (folder / "train.csv").write_text(
            "text,label\n" + "".join(f"word {i},{'high' if i == 5 else i / 7}\n" for i in range(20))
        ),
        {"data": OWN | {"source": "train.csv"}},
        ["task.regression=true"],
        ["task.label", "must hold a number in every row", "row 0 holds '0.0'"],
    ),
    "a number that is missing": (
        jsonl("train.jsonl", [row | {"label": i / 7 if i != 5 else None} for i, row in enumerate(EMOTION)]),
        {"data": OWN},
        ["task.regression=true"],
        ["task.label", "row 5 holds None", "data.drop_missing=true"],
    ),
    "numbers that are fewer in one row": (
        jsonl("train.jsonl", [row | {"label": [i / 7, 1.0][: 1 + (i != 5)]} for i, row in enumerate(EMOTION)]),
        {"data": OWN},
        ["task.regression=true"],
        ["task.label", "a list of 2 numbers", "row 5 holds [0.71"],
    ),
    "a number that never changes": (
        jsonl("train.jsonl", [row | {"label": 0.5} for row in EMOTION]),
        {"data": OWN},
        ["task.regression=true"],
        ["task.label", "the same value in every row", "nothing can be learned"],
    ),
    "a weight of no label": (
        jsonl("train.jsonl", EMOTION),
        {"data": OWN},
        ["task.class_weights={joy: 2}"],
        ["task.class_weights", "unknown label 'joy'", "expected one of '0', '1', '2'"],
    ),
    "a threshold of many labels": (
        jsonl("train.jsonl", EMOTION),
        {"data": OWN},
        ["task.threshold=0.4"],
        ["task.threshold", "there are 3 (0, 1, 2)", "task.multi_label"],
    ),
    "a label for each row": (
        jsonl("train.jsonl", [{"text": f"word {i}", "label": f"id{i}"} for i in range(600)]),
        {"data": OWN},
        [],
        ["task.label: 600 distinct labels in 600 rows", "the right column", "data.validation"],
    ),
    "integers and strings": (
        jsonl("train.jsonl", rows(label="x")),
        {"data": OWN},
        [],
        ["task.label", "mixes integers and strings", "row 4 holds 'x'"],
    ),
    "too few label names": (
        jsonl("train.jsonl", EMOTION),
        {"data": OWN},
        ["task.label_names=[a, b]"],
        ["task.label_names", "2 names given for 3 labels"],
    ),
    "too few to hold out": (
        jsonl("train.jsonl", EMOTION[:3]),
        {"data": OWN},
        [],
        ["data.validation_fraction", "0.1 of 3"],
    ),
    "data set of the hub, offline": (
        nothing,
        {"data": OWN | {"source": "lockstep-tests/none"}},
        [],
        ["data.source", "lockstep-tests/none", "Hub"],
    ),
    "model of the hub, offline": (
        nothing,
        {"model": {"source": "lockstep-tests/none"}},
        [],
        ["model.source", "lockstep-tests/none"],
    ),
    "model folder without config": (
        model_folder,
        {"model": {"source": "mymodel"}},
        [],
        ["model.source", "mymodel", "config.json"],
    ),
    "no such model folder": (nothing, {"model": {"source": "./none"}}, [], ["model.source", "none"]),
    "no such tokenizer folder": (nothing, {"tokenizer": {"source": "./none"}}, [], ["tokenizer.source", "none"]),
    "unknown model type": (nothing, {"model": {"type": "gtp2"}}, [], ["model.type", "'gtp2'", "gpt2"]),
    "type without a classifier": (nothing, {"model": {"type": "clip_vision_model"}}, [], ["model", "classifier"]),
    "unknown entry of the config": (nothing, {}, ["model.config.n_layers=2"], ["model.config", "'n_layers'"]),
    "text longer than positions": (nothing, {}, ["data.max_length=33"], ["data.max_length", "33", "32"]),
    "from scratch without tokenizer": (nothing, {"tokenizer": {}}, [], ["tokenizer", "tokenizer.train"]),
    "output is a file": (blocked, {}, [], ["output", "cannot write", "out"]),
    "override that is none": (nothing, {}, ["batch_size"], ["'batch_size'", "key=value"]),
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder to run in; starting a process there fails the test."""

    def started(*_: object) -> int:
        raise AssertionError("a process was started")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Local, "start", started)
    monkeypatch.setattr(Tcp, "start", started)
    return tmp_path


def run_with(values: dict, overrides: list[str]) -> int:
    base = TINY | {"output": "out", "launch": {"device": "cpu", "threads": 1, "processes": 2}}
    Path("run.yaml").write_text(yaml.safe_dump(base | values))
    return main(["train", "run.yaml", *overrides])


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_refused_with_one_message(case: str, here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    make, values, overrides, wanted = CASES[case]
    make(here)
    before = {p.name for p in here.iterdir()} | {"run.yaml"}
    assert run_with(values, overrides) == 2
    said = capfd.readouterr()
    assert said.err.startswith("lockstep: "), said.err
    assert said.err.count("lockstep: ") == 1, said.err
    assert "Traceback" not in said.err
    assert all(line.startswith(("lockstep  ", "preparing  ")) for line in said.out.splitlines()), said.out
    for text in wanted:
        assert text in said.err, said.err
    assert {p.name for p in here.iterdir()} == before


def test_a_secret_is_never_repeated(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    secret = "hf_abcdefghijklmnopqrstuvwx"
    assert run_with({"model": {"source": secret}}, []) == 2
    assert run_with({}, [f"wandb_api_key={secret[3:]}"]) == 2
    said = capfd.readouterr()
    assert secret[3:] not in said.err + said.out


def test_good_input_is_not_refused(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: the same run file without the fault starts processes."""
    monkeypatch.setattr(Local, "start", lambda *_: 0)
    jsonl("train.jsonl", EMOTION)(here)
    assert run_with({"data": OWN}, []) == 0
    assert (here / "out" / "run.yaml").exists()


def test_debug_shows_the_traceback(here: Path) -> None:
    from lockstep.config.run import RunError

    with pytest.raises(RunError):
        run_with({"data": OWN}, ["--debug"])
