"""Random input ends in success, or in status 2 with a message. `fuzz.py` generates the cases, also for longer runs."""

import os
from pathlib import Path

import pytest
import torch
import yaml
from transformers import GPT2Config

from lockstep import cli
from lockstep.data import row_reader
from lockstep.distributed.world import World
from lockstep.training.predicting import Reads, row_of
from support.fuzz import KINDS, RUN, Fuzz, without_ranks
from support.harness import build
from support.messages import mentions, raises
from support.saving import run_in

FEW = [(kind, 1, 25) for kind in KINDS]  # cases of each kind: some ten seconds
MORE = [pytest.param(kind, 2, 125, marks=pytest.mark.slow) for kind in KINDS]  # a minute


@pytest.mark.parametrize(("kind", "seed", "cases"), [*FEW, *MORE])
def test_fuzzed_input_is_used_or_refused(
    kind: str, seed: int, cases: int, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCKSTEP_CACHE", str(here / "cache"))
    without_ranks(monkeypatch.setattr)
    fuzz = Fuzz(here / "case", seed)
    for number in range(cases):
        fuzz.run(number * len(KINDS) + KINDS.index(kind))
    assert fuzz.findings == []
    assert sum(fuzz.statuses.values()) == cases


def test_a_recorded_crash_is_detected(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unexplained errors and failures without a message count as findings."""
    monkeypatch.setattr("lockstep.cli.main", lambda words: 1 // 0)
    fuzz = Fuzz(here / "case", seed=1)
    fuzz.run(0)
    monkeypatch.setattr("lockstep.cli.main", lambda words: 2)
    fuzz.run(1)
    assert ["ZeroDivisionError" in fuzz.findings[0].what, "status 2" in fuzz.findings[1].what] == [True, True]


# -- what once ended the process, or came to a traceback -------------------------------------------------------------

ROWS = '{"text": "a", "label": 0}\n{"text": "b", "label": 1, "x": %s}\n'
NESTED = "nested more than 200 levels deep"
ONCE = {
    "a line nested 200,000 deep": (
        {"rows.jsonl": ROWS % ("[" * 200_000 + "]" * 200_000)},
        ["data.source=rows.jsonl"],
        f"rows.jsonl, line 2: {NESTED}",
    ),
    "mappings": (
        {"rows.jsonl": ROWS % ('{"a":' * 30_000 + "1" + "}" * 30_000)},
        ["data.source=rows.jsonl"],
        f"rows.jsonl, line 2: {NESTED}",
    ),
    "an array 5,000 deep": (
        {"rows.json": f'[{{"text": "a", "label": 0, "x": {"[" * 5000 + "]" * 5000}}}]'},
        ["data.source=rows.json"],
        f"rows.json, line 1: {NESTED}",
    ),
    "in UTF-16": (
        {"rows.json": f'[{{"text": "a", "x": {"[" * 5000 + "]" * 5000}}}]'.encode("utf-16")},
        ["data.source=rows.json", "data.encoding=utf-16"],
        "rows.json, line 1: nested more than 200 levels deep",
    ),
    "a number of 5,000 digits": (
        {"long.yaml": "steps: " + "9" * 5000},
        ["long.yaml"],
        "long.yaml is not valid YAML: line 1, column 8: a value of 5,000 characters cannot be read",
    ),
    "on the command line": ({}, ["seed=" + "9" * 5000], "the value of seed is not valid YAML"),
    "a month that is none": ({}, ["name=2020-13-45"], "'2020-13-45' cannot be read: month must be in 1..12"),
    "a tag that does not fit": ({}, ["name=!!timestamp x"], "line 1, column 1: 'x' cannot be read"),
    "another": ({}, ["name=!!bool maybe"], "'maybe' cannot be read"),
    "a source of 5,000 characters": (
        {"sub/run.yaml": yaml.safe_dump(RUN | {"data": {"source": "a" * 5000}})},
        ["sub/run.yaml"],
        "data.source: 'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa'... has 5,000 characters; a path or name cannot",
    ),
    "a name of 300": ({}, ["data.train=" + "a" * 300], "data.train"),
    "an output of 5,000": ({}, ["output=" + "a" * 5000], "output: "),
    "half a character": ({}, ['model.source="\\ud800"'], "model.source: '\\ud800' is not valid UTF-8"),
}


@pytest.mark.parametrize("name", ONCE)
def test_former_crashes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files, words, wanted = ONCE[name]
    monkeypatch.chdir(tmp_path)
    without_ranks(monkeypatch.setattr)
    Path("run.yaml").write_text(yaml.safe_dump(RUN))
    for file, content in files.items():
        Path(file).parent.mkdir(exist_ok=True)
        Path(file).write_bytes(content if isinstance(content, bytes) else content.encode())
    words = words if words[0].endswith(".yaml") else ["run.yaml", *words]
    assert cli.main(["train", *words]) == 2
    said = capsys.readouterr().err
    assert wanted in said
    assert len(said) < 1000


def test_brackets_in_strings_are_not_markup(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "%s \\" [[[", "x": [[1]]}\n' % ("[" * 500))
    assert [row_reader.count(rows) for rows in row_reader.whole(tmp_path / "rows.jsonl", "data.train")] == [1]
    (tmp_path / "rows.json").write_text("[" + ",".join(['{"x": [1, {}]}'] * 400) + "]")
    assert [row_reader.count(rows) for rows in row_reader.whole(tmp_path / "rows.json", "data.train")] == [400]


def test_a_path_of_a_command_that_is_too_long(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status", "a" * 5000]) == 2
    assert mentions(" ".join(capsys.readouterr().err.split()), "LS0011")


def test_a_string_that_is_not_utf_8_is_refused() -> None:
    with raises("LS5073", "1"):
        row_of(os.fsdecode(b"\xff words"), Reads(["text"]), "text 1")
    assert row_of("\u202e é 😀", Reads(["text"]), "text 1") == ("\u202e é 😀",)


class Payload:
    """Leaves a file where it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("ran",)


@pytest.mark.parametrize("what", ["payload", "cut off", "no safetensors"])
def test_weights_that_cannot_be_trusted_or_read(what: str, here: Path) -> None:
    GPT2Config(n_layer=1, n_head=2, n_embd=32, n_positions=32, vocab_size=400).save_pretrained("weights")
    if what == "no safetensors":
        Path("weights/model.safetensors").write_bytes(b"garbage" * 9)
    else:
        torch.save({"x": Payload()}, "weights/pytorch_model.bin")
    if what == "cut off":
        os.truncate("weights/pytorch_model.bin", 100)
    run = run_in(here / "out", "model.type=null", "model.config={}", "model.source=./weights")
    with raises("LS2081") as caught:
        build(run, World(run))
    assert ("more than tensors is not loaded" in str(caught.value)) == (what == "payload")
    assert not Path("ran").exists()
