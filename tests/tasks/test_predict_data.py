"""Answers as data: files and pairs, batches, JSON lines, checkpoints; and runs that begin from a run."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from lockstep.cli import main
from lockstep.config.run import load
from lockstep.tasks.models.inference import answers
from lockstep.training.predicting import Reads, predictions, row_of
from support.harness import TINY
from support.messages import mentions, raises
from support.predictions import numbers
from support.task_runs import write

pytestmark = pytest.mark.slow  # together a third of the time of tests without processes

ONE = ("launch.processes=1", "strategy=single", "micro_batches=2")
TEXTS = ["i feel wonderful", "so sad, really sad today", "", 'he said "no", and left', "a"] * 8


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of four steps, each with a checkpoint."""
    folder = tmp_path_factory.mktemp("predict")
    values = TINY | {"steps": 4, "output": str(folder / "out"), "checkpoint": {"every": 1, "keep": 9}}
    (folder / "run.yaml").write_text(load(None, list(ONE), values).dump())
    assert main(["train", str(folder / "run.yaml")]) == 0
    return folder / "out"


def found_in(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_scores_equal_those_of_the_model_alone(output: Path) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(output / "export").eval()
    tokenizer = AutoTokenizer.from_pretrained(output / "export")
    found = list(predictions(output, TEXTS, []))
    assert [each["text"] for each in found] == TEXTS
    for text, each in zip(TEXTS, found, strict=True):
        ids = tokenizer(text, truncation=True, max_length=32)["input_ids"] or [tokenizer.eos_token_id]
        with torch.no_grad():
            chances = model(torch.tensor([ids])).logits[0].softmax(-1)
        wanted = {model.config.id2label[i]: chance for i, chance in enumerate(chances.tolist())}
        assert each["scores"] == pytest.approx(wanted, abs=1e-5)
        assert each["label"] == max(wanted, key=wanted.__getitem__)
        assert each["score"] == each["scores"][each["label"]]


def test_batches_keep_the_order_and_hold_rows_of_like_length() -> None:
    rows = [("x" * (n * 7 % 23),) for n in range(101)]
    seen: list[list[int]] = []

    def answer(asked: list[Any]) -> list[dict[str, Any]]:
        seen.append([len(row[0]) for row in asked])
        return [{"length": len(row[0])} for row in asked]

    assert [each["length"] for each in answers(rows, answer, at_once=4)] == [len(row[0]) for row in rows]
    assert max(map(len, seen)) == 4
    assert all(lengths == sorted(lengths) for lengths in seen)
    with pytest.raises(ValueError, match="zip"):
        list(answers(rows, lambda asked: [], at_once=4))


def test_files_of_every_kind_are_read(output: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    import csv

    texts = [text for text in TEXTS[:5] if text]
    write(tmp_path / "a.jsonl", [{"id": n, "text": text} for n, text in enumerate(texts)])
    with open(tmp_path / "a.csv", "w", newline="") as file:
        csv.writer(file).writerows([["id", "text"], *([str(n), text] for n, text in enumerate(texts))])
    (tmp_path / "a.txt").write_text("\n".join(texts) + "\n")
    wanted = list(predictions(output, texts, []))
    for name in ("a.jsonl", "a.csv", "a.txt"):
        assert main(["predict", str(output), str(tmp_path / name), "--json"]) == 0
        assert found_in(capfd.readouterr().out) == wanted
    assert main(["predict", str(output), str(tmp_path / "a.csv"), "--out", str(tmp_path / "found.jsonl")]) == 0
    assert capfd.readouterr().out == f"{tmp_path}/found.jsonl: 4 predictions\n"
    assert found_in((tmp_path / "found.jsonl").read_text()) == wanted
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.csv", "a.jsonl", "a.txt", "found.jsonl"]
    assert main(["predict", str(output), texts[0], str(tmp_path / "a.txt")]) == 0  # a text and a file
    assert len(capfd.readouterr().out.splitlines()) == 5


def test_unreadable_inputs_are_refused(output: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.csv").write_text("body,id\nx,1\n")
    (tmp_path / "b.jsonl").write_text('{"text": "x"}\n{"text": 5}\n')
    (tmp_path / "c.pdf").write_text("x")
    (tmp_path / "d.txt").write_bytes(b"caf\xe9\n")
    for name, wanted in (
        ("a.csv", "a.csv, row 0 has no column 'text', which this model reads; it has body, id"),
        ("b.jsonl", "b.jsonl"),
        ("c.pdf", "expected .jsonl"),
        ("d.txt", "d.txt cannot be read as utf-8"),
    ):
        assert main(["predict", str(output), str(tmp_path / name)]) == 2
        said = capfd.readouterr()
        assert wanted in said.err
        assert len(said.err.splitlines()) == 1
        assert not said.out
    for name, wanted in (
        (
            "nosuchfile.csv",
            "nosuchfile.csv names a file that does not exist. To predict this text itself, add --texts",
        ),
        (f"{tmp_path}/no.jsonl.gz", "no.jsonl.gz names a file that does not exist"),
        (f"{tmp_path}/*.txt", "*.txt names a file that does not exist"),
        (f"{tmp_path}/a b.csv", "a b.csv names a file that does not exist"),
        (str(tmp_path), f"{tmp_path} is a folder; name its files"),
    ):
        assert main(["predict", str(output), "hello", name]) == 2
        assert wanted in capfd.readouterr().err
    assert main(["predict", str(output), "--texts", "hello", "nosuchfile.csv", str(tmp_path / "a.csv")]) == 0
    assert main(["predict", str(output), "it stands in some.csv", "lockstep.org", "x" * 400]) == 0
    assert len(capfd.readouterr().out.splitlines()) == 6
    assert main(["predict", str(output), "x", "--out", str(tmp_path / "none" / "x.jsonl")]) == 2
    assert mentions(capfd.readouterr().err, "LS5079")


def test_rows_of_pairs() -> None:
    two = Reads(("q", "a"))
    for given in ("x\ty", ["x", "y"], {"a": "y", "q": "x", "id": "7"}):
        assert row_of(given, two, "text 1") == ("x", "y")
    assert row_of("x\ty", Reads(("text",)), "text 1") == ("x\ty",)
    assert row_of({"tokens": ["a", "dog"]}, Reads(("tokens",)), "row 1") == ("a dog",)
    for given, code, value in (
        ("x", "LS5072", "(q and a)"),
        ("x\ty\tz", "LS5072", "text 1"),
        (["x"], "LS5072", "text 1"),
        ({"q": "x"}, "LS5071", "'a'"),
        ({"q": "x", "a": None}, "LS5077", "'a' holds None"),
    ):
        with raises(code, value):
            row_of(given, two, "text 1")


# -- checkpoints -----------------------------------------------------------------------------------------------------


def test_predict_and_evaluate_use_a_checkpoint(output: Path, capfd: pytest.CaptureFixture[str]) -> None:
    last = list(predictions(output / "checkpoints" / "step-000004", TEXTS[:3], []))
    assert (
        last
        == list(predictions(output, TEXTS[:3], []))
        == list(predictions(output / "checkpoints/latest", TEXTS[:3], []))
    )
    first = list(predictions(output / "checkpoints" / "step-000002", TEXTS[:3], []))
    assert first != last
    scored = []
    for place in ("", "/checkpoints/step-000004", "/checkpoints/step-000002"):
        assert main(["evaluate", f"{output}{place}", "--split", "validation"]) == 0
        scored.append(numbers(capfd.readouterr().out))
    assert scored[0] == scored[1] != scored[2]
    assert main(["predict", f"{output}/checkpoints/step-000009", "x"]) == 2
    assert mentions(capfd.readouterr().err, "LS5010", "step-000009", "no such folder", "has step-000001, step-000002,")


def test_a_damaged_checkpoint_is_refused(output: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    copy = Path(shutil.copytree(output, tmp_path / "out", symlinks=True))
    shard = next((copy / "checkpoints/step-000003").glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-3] ^= 1
    shard.write_bytes(content)
    assert main(["predict", f"{copy}/checkpoints/step-000003", "x"]) == 2
    assert mentions(capfd.readouterr().err, "LS5010")


# -- a run that begins from a run ------------------------------------------------------------------------------------


def begun_from(source: Path, folder: Path, *words: str) -> int:
    values = TINY | {"model": str(source), "tokenizer": {}, "steps": 1, "output": str(folder / "out")}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.yaml").write_text(yaml.safe_dump(values))
    return main(["train", str(folder / "run.yaml"), *ONE, *words])


@pytest.mark.parametrize("place", ["", "checkpoints/step-000004", "checkpoints/latest"])
def test_a_run_begins_from_an_output_or_a_checkpoint(place: str, output: Path, tmp_path: Path) -> None:
    nothing = ("optim.warmup_steps=1", "evaluate.every=0")  # the first step has a rate of 0: weights stay
    assert begun_from(output / place, tmp_path, *nothing) == 0
    before, after = (load_file(folder / "export/model.safetensors") for folder in (output, tmp_path / "out"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert begun_from(output / place, tmp_path, *nothing) == 0  # it is finished: found out anew from the same source


def test_predict_refuses_a_folder_without_an_export(
    output: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    copy = Path(shutil.copytree(output, tmp_path / "copy", symlinks=True))
    shutil.rmtree(copy / "export")
    assert begun_from(copy, tmp_path) == 2
    assert mentions(capfd.readouterr().err, "LS2080")
    assert begun_from(copy / "checkpoints/step-000009", tmp_path) == 2
    assert mentions(capfd.readouterr().err, "LS5010", "step-000009")


def test_more_steps_start_from_the_export(output: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    copy = Path(shutil.copytree(output, tmp_path / "out", symlinks=True))
    words = ["train", str(copy / "run.yaml"), f"output={copy}", *ONE]
    before = {path: path.read_bytes() for path in sorted(copy.rglob("*")) if path.is_file()}
    assert main([*words, "steps=7", "track.console=quiet"]) == 0
    said = capfd.readouterr().out
    assert f"{copy} is finished (step 4) and stays as it is. 3 more steps start from its export" in " ".join(
        said.split()
    )
    assert {path: path.read_bytes() for path in sorted(copy.rglob("*")) if path.is_file()} == before
    more = load(tmp_path / "out-7-steps/run.yaml", [])
    assert (more.steps, more.model.source, more.seed, more.tokenizer.train) == (3, str(copy), 0, None)
    assert {each for each in ("steps", "model.source", "tokenizer.train") if more.wrote(each)} == {
        "steps",
        "model.source",
    }
    assert not more.wrote("launch.processes_per_gpu")
    assert "processes_per_gpu" not in said, "a key that nobody wrote"
    assert (tmp_path / "out-7-steps/export/model.safetensors").is_file()
    assert main([*words, "steps=7"]) == 0
    assert "out-7-steps is finished" in capfd.readouterr().out
    assert main([*words, "steps=3"]) == 2  # lowered
    assert main([*words, "steps=7", "seed=1"]) == 2  # something else changed, too
    assert mentions(capfd.readouterr().err, "LS6051")
