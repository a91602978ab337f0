"""`lockstep evaluate` and `lockstep predict`: the scores that training ended with, and a look at what a model does."""

from __future__ import annotations

import io
import json
import random
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.cli import main
from lockstep.config.run import load
from lockstep.data import conversations
from lockstep.training.predicting import predictions
from support.harness import TINY
from support.messages import mentions, raises
from support.predictions import numbers
from support.task_runs import BERT, make, write

pytestmark = pytest.mark.slow  # together a third of the time of tests without processes

KINDS = ["classification", "documents", "prompts", "messages", "translation", "token_classification"]
ONE = ("launch.processes=1", "strategy.name=single", "micro_batches=2", "steps=4")


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A finished run of every kind."""
    found = {}
    for kind in KINDS:
        folder = tmp_path_factory.mktemp(kind)
        if kind == "classification":
            run = load(None, list(ONE), TINY | {"output": str(folder / "out")})
        else:
            run = make(folder, kind, *ONE)
        (folder / "run.yaml").write_text(run.dump())
        assert main(["train", str(folder / "run.yaml")]) == 0
        found[kind] = folder / "out"
    return found


@pytest.mark.processes
@pytest.mark.parametrize("kind", KINDS)
def test_evaluate_gives_the_scores_of_the_run(kind: str, outputs: dict, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", str(outputs[kind])]) == 0
    found = numbers(capfd.readouterr().out)
    lines = [json.loads(line) for line in (outputs[kind] / "metrics.jsonl").read_text().splitlines()]
    wanted = [line for line in lines if line["split"] != "train"]
    assert len(wanted) == (2 if kind == "classification" else 1)
    for place, line in enumerate(wanted):
        for name, value in line.items():
            if name not in ("step", "split"):
                assert found[name][place] == pytest.approx(value, rel=1e-5)


def test_evaluate_takes_a_split(outputs: dict, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", str(outputs["translation"]), "--split", "train"]) == 0
    assert numbers(capfd.readouterr().out)["examples"] == [90]
    assert main(["evaluate", str(outputs["translation"]), "--split", "tests"]) == 2
    assert mentions(capfd.readouterr().err, "LS5053", "lockstep", "'tests'")


@pytest.mark.parametrize("kind", KINDS)
def test_predict_has_a_line_for_each_text(
    kind: str, outputs: dict, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["predict", str(outputs[kind]), "the dog runs .", "a"]) == 0
    said = capfd.readouterr().out
    monkeypatch.setattr("sys.stdin", io.StringIO("the dog runs .\na\n"))
    assert main(["predict", str(outputs[kind])]) == 0
    assert capfd.readouterr().out == said
    if kind == "classification":
        assert len(said.splitlines()) == 2
        assert said.splitlines()[0].endswith("the dog runs .")
    if kind == "token_classification":
        assert [pair.split("/")[0] for pair in said.split()] == ["the", "dog", "runs", ".", "a"]


@pytest.mark.parametrize("kind", ["translation", "token_classification", "prompts"])
def test_every_task_answers_in_data(kind: str, outputs: dict[str, Path]) -> None:
    asked = ["the dog runs .", "a", "old house near the big red bird"]
    found = list(predictions(outputs[kind], asked, []))
    alone = [each for text in asked for each in predictions(outputs[kind], [text], [])]
    column, answer = {
        "translation": ("en", "translation"),
        "token_classification": ("tokens", "words"),
        "prompts": ("question", "written"),
    }[kind]
    assert [each[column] for each in found] == asked
    assert json.loads(json.dumps(found)) == found
    if kind == "token_classification":
        words = [[each["word"] for each in row[answer]] for row in found]
        assert words == [text.split() for text in asked]
        assert all(0 < each["score"] <= 1 for row in found for each in row[answer])
    else:
        assert [each[answer] for each in found] == [each[answer] for each in alone]  # a batch changes no word


def test_predict_reads_a_file_of_conversations(
    outputs: dict[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each up to where the last answer begins: an answer that is there is left out, and a text is what a user says."""
    first, more = {"role": "user", "content": "why ."}, {"role": "assistant", "content": "no ."}
    write(tmp_path / "talks.jsonl", [{"id": n, "messages": [first, more]} for n in range(2)])
    write(tmp_path / "named.jsonl", [{"messages": [{"from": "human", "value": "why ."}]}])
    files = [str(tmp_path / name) for name in ("talks.jsonl", "named.jsonl")]
    assert main(["predict", str(outputs["messages"]), *files, "why .", "--json"]) == 0
    *talks, text = map(json.loads, capfd.readouterr().out.splitlines())
    assert talks == [{"messages": [first], "written": text["written"]}] * 3
    (row,) = predictions(outputs["messages"], [[first, more, first]], [])
    assert row["messages"] == [first, more, first]
    for value in ({"messages": [more]}, {"question": "x"}):
        with raises("LS2404" if value.get("messages") else "LS5071", "messages"):
            list(predictions(outputs["messages"], [value], []))
    tok: Any = SimpleNamespace(apply_chat_template=lambda some, **how: repr((some, how["add_generation_prompt"])))
    assert conversations.prompt_text(tok, conversations.Writing("m"), "a") == repr(
        ([{"role": "user", "content": "a"}], True)
    )


def test_a_model_of_texts_answers_conversations_by_a_template(
    outputs: dict[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The template is that of its tokenizer, as a note says; a model without one is refused."""
    talk = {"messages": [{"role": "user", "content": "why ."}, {"role": "assistant", "content": "no ."}]}
    with raises("LS2408", "text 1", "no chat template"):
        list(predictions(outputs["documents"], [talk], []))
    (row,) = predictions(outputs["documents"], [{"text": "why .", **talk}], [])  # what it learned comes first
    assert row["text"] == "why ."
    out = Path(shutil.copytree(outputs["documents"], tmp_path / "out"))
    (out / "export/chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    write(tmp_path / "talks.jsonl", [talk])
    assert main(["predict", str(out), str(tmp_path / "talks.jsonl"), "--json"]) == 0
    read = capfd.readouterr()
    assert "trained on texts; the chat template of its tokenizer renders conversations" in read.err
    assert json.loads(read.out)["messages"] == talk["messages"][:1]


@pytest.mark.parametrize("command", ["evaluate", "predict"])
def test_folders_without_a_finished_run_are_refused(
    command: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([command, str(tmp_path)]) == 2
    assert mentions(capfd.readouterr().err, "LS1123")
    (tmp_path / "run.yaml").write_text(make(tmp_path, "documents").dump())
    assert main([command, str(tmp_path)]) == 2
    assert mentions(capfd.readouterr().err, "LS5051")
    newest = tmp_path / "checkpoints" / "latest"
    newest.mkdir(parents=True)
    assert main([command, str(tmp_path)]) == 2
    assert f"name its newest checkpoint, {newest}, instead" in capfd.readouterr().err


def test_evaluate_and_predict_override_keys(outputs: dict, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", str(outputs["translation"]), "task.bleu=false", "data.limit=5"]) == 0
    found = numbers(capfd.readouterr().out)
    assert found["examples"] == [5]
    assert "bleu" not in found
    assert main(["predict", str(outputs["translation"]), "a dog", "--set", "task.beams=3"]) == 0
    assert main(["evaluate", str(outputs["translation"]), "task.beems=3"]) == 2
    assert mentions(capfd.readouterr().err, "LS1000", "'beams'")


def test_predict_without_a_text_is_refused(outputs: dict, capfd: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert main(["predict", str(outputs["documents"])]) == 2
    assert mentions(capfd.readouterr().err, "LS5070")


def test_a_model_of_pairs_reads_both_texts(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    """The label says what the second text is, which nobody can tell from the first."""
    draw = random.Random(0)
    rows = []
    for i in range(120):
        first, second = draw.choice(["red", "blue", "old"]), "old" if i % 2 else "blue"
        rows.append({"q": first, "a": second, "label": "age" if i % 2 else "colour"})
    write(tmp_path / "train.jsonl", rows)
    values = TINY | {
        "data": {"source": str(tmp_path / "train.jsonl"), "max_length": 16},
        "task": {"name": "classification", "text": "q", "text_pair": "a"},
        "model": BERT,
        "tokenizer": {"train": "wordlevel", "vocab_size": 50},
        "output": str(tmp_path / "out"),
        "steps": 40,
    }
    run = load(None, [*ONE[:3], "optim.learning_rate=1e-2", "model.config.hidden_dropout_prob=0"], values)
    (tmp_path / "run.yaml").write_text(run.dump())
    assert main(["train", str(tmp_path / "run.yaml")]) == 0
    assert '"text_pair": "another text"' in (tmp_path / "out" / "export" / "README.md").read_text()
    capfd.readouterr()
    assert main(["predict", str(tmp_path / "out"), "red\told", "old\tblue", "old\told"]) == 0
    said = capfd.readouterr().out.splitlines()
    assert [line.split()[0] for line in said] == ["age", "colour", "age"]
    for wrong in ("red", "red\tblue\told"):
        assert main(["predict", str(tmp_path / "out"), "red\tred", wrong]) == 2
        assert mentions(capfd.readouterr().err, "LS5072")
    monkeypatch.setattr("sys.stdin", io.StringIO("red\told\n"))
    assert main(["predict", str(tmp_path / "out")]) == 0
    assert capfd.readouterr().out.startswith("age ")
