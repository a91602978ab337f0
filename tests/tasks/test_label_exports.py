"""Exports of several labels, of numbers and with a threshold: transformers loads them, and what they score alone is
what the run said; `evaluate` and `predict` use the threshold that was chosen on the validation split."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline

from lockstep.cli import main
from lockstep.config.run import load
from lockstep.training.predicting import predictions
from support import own_scores
from support.browser import CHROMIUM, browser
from support.label_runs import make
from support.predictions import numbers

pytestmark = pytest.mark.slow  # together a third of the time of tests without processes

ONE = ("launch.processes=1", "strategy.name=single", "micro_batches=2", "steps=20", "optim.learning_rate=1e-2")
KINDS = ("lists", "two", "number", "numbers")


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A finished run of each, the best model exported, with a checkpoint that was evaluated and one that was not."""
    folder = tmp_path_factory.mktemp("exports")
    found = {}
    for kind in KINDS:
        best = ("evaluate.every=10", "checkpoint.every=15", "checkpoint.best=-loss", "checkpoint.keep=9")
        run = make(folder, kind, *ONE, *best)
        (folder / "run.yaml").write_text(run.dump())
        assert main(["train", str(folder / "run.yaml")]) == 0
        found[kind] = run.folder
    return found


def final(output: Path) -> dict[str, dict[str, float]]:
    """Scores of the exported model, by split."""
    found: dict[str, dict[str, float]] = json.loads((output / "scores.json").read_text())["splits"]
    return found


def config(output: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((output / "export" / "config.json").read_text())
    return found


def rows_of(output: Path, split: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output.parent / "data" / f"{split}.jsonl").read_text().splitlines()]


def logits_of(output: Path, rows: list[dict[str, Any]]) -> np.ndarray:
    """Return the logits of the exported model, computed one text at a time."""
    model = AutoModelForSequenceClassification.from_pretrained(output / "export").eval()
    tokenizer = AutoTokenizer.from_pretrained(output / "export")
    found = []
    for row in rows:
        ids = tokenizer(row["text"], truncation=True, max_length=32)["input_ids"]
        with torch.no_grad():
            found.append(model(torch.tensor([ids])).logits[0].double().numpy())
    return np.stack(found)


def test_exported_config_has_the_learned_labels(outputs: dict[str, Path]) -> None:
    told = {kind: config(output) for kind, output in outputs.items()}
    problems = {kind: each["problem_type"] for kind, each in told.items()}
    assert problems == {
        "lists": "multi_label_classification",
        "two": "single_label_classification",
        "number": "regression",
        "numbers": "regression",
    }
    assert list(told["lists"]["id2label"].values()) == ["bird", "cat", "dog"]
    assert list(told["numbers"]["id2label"].values()) == ["length", "birds"]
    assert "decision_threshold" not in told["number"]
    for kind in ("lists", "two"):
        assert told[kind]["decision_threshold"] == final(outputs[kind])["validation"]["threshold"]
        assert final(outputs[kind])["test"]["threshold"] == final(outputs[kind])["validation"]["threshold"]


@pytest.mark.extras
def test_multi_label_scores_equal_those_of_scikit_learn_on_the_export(outputs: dict[str, Path]) -> None:
    theirs = pytest.importorskip("sklearn.metrics")
    output = outputs["lists"]
    for split in ("validation", "test"):
        rows = rows_of(output, split)
        p = 1 / (1 + np.exp(-logits_of(output, rows)))
        y = np.array([[name in row["animals"] for name in ("bird", "cat", "dog")] for row in rows])
        found = final(output)[split]
        given = p >= found["threshold"]
        assert found["micro_f1"] == pytest.approx(theirs.f1_score(y, given, average="micro"), abs=1e-6)
        assert found["macro_f1"] == pytest.approx(theirs.f1_score(y, given, average="macro"), abs=1e-6)
        assert found["average_precision"] == pytest.approx(theirs.average_precision_score(y, p), abs=1e-6)
        assert found["roc_auc"] == pytest.approx(theirs.roc_auc_score(y, p), abs=1e-6)
        assert found["loss"] == pytest.approx(theirs.log_loss(y.ravel(), p.ravel()), abs=1e-5)


@pytest.mark.extras
def test_binary_scores_equal_those_of_scikit_learn_on_the_export(outputs: dict[str, Path]) -> None:
    theirs = pytest.importorskip("sklearn.metrics")
    output = outputs["two"]
    rows = rows_of(output, "test")
    logits = logits_of(output, rows)
    p = 1 / (1 + np.exp(logits[:, 0] - logits[:, 1]))
    y = np.array([row["long"] == "long" for row in rows])
    found = final(output)["test"]
    assert found["f1"] == pytest.approx(theirs.f1_score(y, p >= found["threshold"]), abs=1e-6)
    assert found["accuracy"] == pytest.approx(theirs.accuracy_score(y, p >= found["threshold"]), abs=1e-6)
    assert found["roc_auc"] == pytest.approx(theirs.roc_auc_score(y, p), abs=1e-6)


@pytest.mark.extras
def test_regression_scores_equal_those_of_scipy_on_the_export(outputs: dict[str, Path]) -> None:
    stats, theirs = pytest.importorskip("scipy.stats"), pytest.importorskip("sklearn.metrics")
    output = outputs["number"]
    rows = rows_of(output, "test")
    predicted, true = logits_of(output, rows)[:, 0], np.array([row["length"] for row in rows])
    found = final(output)["test"]
    assert found["pearson"] == pytest.approx(stats.pearsonr(true, predicted).statistic, abs=1e-5)
    assert found["spearman"] == pytest.approx(stats.spearmanr(true, predicted).statistic, abs=1e-2)  # near ties
    assert found["mse"] == found["loss"] == pytest.approx(theirs.mean_squared_error(true, predicted), rel=1e-4)
    assert found["r2"] == pytest.approx(theirs.r2_score(true, predicted), abs=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_evaluate_gives_the_scores_of_the_run(kind: str, outputs: dict, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", str(outputs[kind])]) == 0
    found = numbers(capfd.readouterr().out)
    for place, split in enumerate(("validation", "test")):
        for name, value in final(outputs[kind])[split].items():
            assert found[name][place] == pytest.approx(value, rel=1e-5), (split, name)


def test_the_test_split_never_chooses_a_threshold(outputs: dict, capfd: pytest.CaptureFixture[str]) -> None:
    """Neither for an export nor for a checkpoint without an evaluation; a user may set one."""
    output = outputs["lists"]
    alone = []
    for place in (output, output / "checkpoints" / "step-000015"):
        assert main(["evaluate", str(place), "--split", "test"]) == 0
        alone.append(numbers(capfd.readouterr().out)["threshold"])
        assert main(["evaluate", str(place)]) == 0
        validation, test = numbers(capfd.readouterr().out)["threshold"]
        assert [validation] == [test] == alone[-1]
    assert main(["evaluate", str(output), "task.threshold=0.25", "--split", "test"]) == 0
    assert numbers(capfd.readouterr().out)["threshold"] == [0.25]


def test_functions_get_the_rows_of_the_split_in_its_order(outputs: dict[str, Path]) -> None:
    for kind, wanted in (("lists", "animals"), ("number", "length")):
        own_scores.SEEN.clear()
        assert main(["evaluate", str(outputs[kind]), "metrics=support.own_scores.order", "--split", "test"]) == 0
        predicted, true = own_scores.SEEN[-1]
        rows = rows_of(outputs[kind], "test")
        assert len(predicted) == len(true) == len(rows)
        if kind == "number":
            assert true.tolist() == [row[wanted] for row in rows]
        else:
            assert true.tolist() == [[int(name in row[wanted]) for name in ("bird", "cat", "dog")] for row in rows]
    assert "in_order" not in final(outputs["number"])["test"], "it was asked for by that command alone"


def test_predict_gives_labels_by_the_threshold(outputs: dict[str, Path]) -> None:
    rows = rows_of(outputs["lists"], "test")
    threshold = config(outputs["lists"])["decision_threshold"]
    texts = [row["text"] for row in rows]
    p = 1 / (1 + np.exp(-logits_of(outputs["lists"], rows)))
    for answer, chances in zip(predictions(outputs["lists"], texts, []), p, strict=True):
        assert list(answer["scores"].values()) == pytest.approx(chances.tolist(), abs=1e-5)
        given = {name for name, chance in zip(("bird", "cat", "dog"), chances, strict=True) if chance >= threshold}
        assert set(answer["labels"]) == given
    none = list(predictions(outputs["lists"], texts, ["task.threshold=0.9999"]))
    assert all(answer["labels"] == [] for answer in none)
    of_two = list(predictions(outputs["two"], texts, []))
    cut = config(outputs["two"])["decision_threshold"]
    assert all((answer["label"] == "long") == (answer["scores"]["long"] >= cut) for answer in of_two)


def test_predict_returns_numbers(outputs: dict, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", str(outputs["number"]), "the dog runs ."]) == 0
    value, text = capfd.readouterr().out.strip().split("  ")
    assert text == "the dog runs ."
    (answer,) = predictions(outputs["number"], [text], [])
    assert answer == {"text": text, "value": pytest.approx(float(value), rel=1e-3)}
    (answer,) = predictions(outputs["numbers"], [text], [])
    assert list(answer["values"]) == ["length", "birds"]
    assert main(["predict", str(outputs["lists"]), "the dog runs ."]) == 0
    assert capfd.readouterr().out.rstrip().endswith("  the dog runs .")


def test_transformers_pipeline_reads_exports_unchanged(outputs: dict[str, Path]) -> None:
    text = "the dog sees a cat ."
    for kind in KINDS:
        ask = pipeline("text-classification", model=str(outputs[kind] / "export"), top_k=None)
        (found,) = ask([text])
        told = {each["label"]: each["score"] for each in found}  # type: ignore[index, union-attr]
        (answer,) = predictions(outputs[kind], [text], [])
        wanted = answer.get("scores") or answer.get("values") or {"length": answer["value"]}
        assert told == pytest.approx(wanted, abs=1e-5)


def test_a_model_that_begins_from_an_export_has_its_own_threshold(outputs: dict, tmp_path: Path) -> None:
    run = make(tmp_path, "balanced", *ONE, "steps=2", f"model.source={outputs['lists']}", "model.type=null")
    values = run.model_dump(mode="json")
    values["model"] = {"source": str(outputs["lists"])}
    values["tokenizer"] = {}
    (tmp_path / "run.yaml").write_text(load(None, {}, values).dump())
    assert main(["train", str(tmp_path / "run.yaml")]) == 0
    told = config(run.folder)
    assert "decision_threshold" not in told
    assert told["problem_type"] == "single_label_classification"
    assert list(told["id2label"].values()) == ["bird", "cat", "dog", "none"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_page_shows_what_a_person_wants_to_see(kind: str, outputs: dict[str, Path]) -> None:
    text = (outputs[kind] / "report.html").read_text()
    assert ("F1 of each label" in text) == (kind == "lists")
    assert ("calibration of" in text) == (kind in ("lists", "two"))
    assert ("predicted against true value" in text) == (kind in ("number", "numbers"))
    twice = 2 * 2  # a chart of each split, with its name for who cannot see it
    assert text.count("length: predicted against true value") == twice * (kind in ("number", "numbers"))
    tables = json.loads((outputs[kind] / "tables.json").read_text())
    assert set(tables) == {"validation", "test"}


@pytest.mark.processes
@pytest.mark.skipif(not CHROMIUM, reason="needs Chromium")
@pytest.mark.parametrize("width", [360, 1280])
def test_the_page_holds_together_in_a_browser(width: int, outputs: dict[str, Path]) -> None:
    for kind in KINDS:
        with browser() as page:
            page.open(outputs[kind] / "report.html", width)
            assert page.complaints == []
            assert page.value("document.documentElement.scrollWidth") <= width
