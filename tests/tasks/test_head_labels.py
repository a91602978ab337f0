"""Labels of a pretrained classifier whose config names them in another order, in other words, or more of them."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForImageClassification,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertForTokenClassification,
    PreTrainedTokenizerFast,
    ResNetConfig,
    ResNetForImageClassification,
    ViTImageProcessorPil,
)

from lockstep.config.run import Run, load
from lockstep.data.job import Job
from lockstep.plain.examples import encode_rows, values_of_labels
from lockstep.plain.rows import UNFILTERED_TRAIN, NotCovered, read_splits
from lockstep.tasks.classification import Classification
from lockstep.tasks.image_classification import ImageClassification
from lockstep.tasks.task import Task
from lockstep.tasks.token_classification import TokenClassification
from support.harness import TINY
from support.messages import raises

MODEL = ["neutral", "positive", "negative"]
SIZES: dict[str, Any] = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
KINDS = {"one": BertForSequenceClassification, "tags": BertForTokenClassification, "masked": BertForMaskedLM}


def source(folder: Path, names: list[str] | None, kind: str = "one", count: int = 3, **entries: Any) -> None:
    """A tiny model whose outputs have these names, and its tokenizer."""
    words = ["[PAD]", "[UNK]", "bad", "good", *MODEL, "0", "1", "2"]
    tokenizer = Tokenizer(models.WordLevel({word: id_ for id_, word in enumerate(words)}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(folder)
    named = {"num_labels": count}
    if names is not None:
        named = {"id2label": dict(enumerate(names)), "label2id": {name: code for code, name in enumerate(names)}}
    torch.manual_seed(1)
    config = BertConfig(**SIZES, vocab_size=10, max_position_embeddings=32, **named, **entries)
    KINDS[kind](config).save_pretrained(folder)


def run_on(folder: Path, rows: list[dict[str, Any]], **task: Any) -> Run:
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows * 6), encoding="utf-8")
    data = {"source": str(folder / "train.jsonl"), "max_length": 16, "validation_fraction": 0.34}
    values = {k: v for k, v in TINY.items() if k != "tokenizer"} | {"data": data, "model": {"source": str(folder)}}
    return load(None, [], values | {"task": {"name": "classification"} | task})


def texts(*labels: Any) -> list[dict[str, Any]]:
    return [{"text": f"{label} good {n}", "label": label} for n in range(3) for label in labels]


def prepared(run: Run, task: type[Task] = Classification) -> Task:
    return task(run).opened(Job.of(run).with_data().data)


def notes(task: Task) -> str:
    return " | ".join(task.prepared.facts.get("notes", []))


def kept_head(task: Any, folder: Path) -> bool:
    """Whether the model of the run has the head of its source, output by output."""
    before = KINDS["one"].from_pretrained(folder).classifier.weight
    model = task.model()
    assert [model.config.id2label[code] for code in range(model.config.num_labels)] == task.labels
    return bool(model.classifier.weight.shape == before.shape and (model.classifier.weight == before).all())


@pytest.mark.parametrize("order", [MODEL, ["positive", "negative", "neutral"]])
def test_the_models_order_decides(order: list[str], tmp_path: Path) -> None:
    source(tmp_path, order)
    run = run_on(tmp_path, texts("negative", "neutral", "positive"))
    task: Any = prepared(run)
    assert task.labels == task.prepared.facts["label_values"] == order
    assert kept_head(task, tmp_path)
    assert notes(task).startswith("labels are in the order of the model's id2label: " + ", ".join(order))
    assert values_of_labels(run.model_dump(mode="json"), texts(*MODEL)) == order  # and by the plain reference


def test_equal_orders_are_not_reported(tmp_path: Path) -> None:
    source(tmp_path, sorted(MODEL))
    task: Any = prepared(run_on(tmp_path, texts(*MODEL)))
    assert kept_head(task, tmp_path)
    assert notes(task) == ""


def test_labels_are_learned_by_the_output_of_their_name(tmp_path: Path) -> None:
    source(tmp_path, MODEL)
    task: Any = prepared(
        run_on(tmp_path, [{"text": t, "label": n} for t, n in (("bad", "negative"), ("good", "positive"))])
    )
    columns = task.splits["train"]
    first = [int(columns.ragged("input_ids").row(row)[0]) for row in range(len(columns))]
    assert {(token, int(code)) for token, code in zip(first, columns.flat("label"), strict=True)} == {(2, 2), (3, 1)}


def test_head_is_kept_if_data_has_some_of_its_labels(tmp_path: Path) -> None:
    source(tmp_path, MODEL)
    run = run_on(tmp_path, texts("negative", "positive"))
    task: Any = prepared(run)
    assert task.labels == MODEL
    assert task.prepared.facts["of_label"][0] == 0
    assert kept_head(task, tmp_path)
    assert "its head keeps all 3 outputs" in notes(task)
    assert values_of_labels(run.model_dump(mode="json"), texts("negative", "positive")) == MODEL


def test_case_and_blanks_do_not_make_another_label(tmp_path: Path) -> None:
    source(tmp_path, [name.upper() for name in MODEL])
    task: Any = prepared(run_on(tmp_path, texts(*MODEL)))
    assert task.labels == MODEL
    assert kept_head(task, tmp_path)
    assert "NEUTRAL, POSITIVE, NEGATIVE where the data have neutral, positive, negative" in notes(task)


def test_names_of_integers_are_looked_up(tmp_path: Path) -> None:
    source(tmp_path, MODEL)
    run = run_on(tmp_path, texts(0, 1, 2), label_names=["negative", "neutral", "positive"])
    task: Any = prepared(run)
    assert (task.labels, task.prepared.facts["label_values"]) == (MODEL, [1, 2, 0])
    assert kept_head(task, tmp_path)
    assert values_of_labels(run.model_dump(mode="json"), texts(0, 1, 2)) == [1, 2, 0]


def test_integers_without_names_are_output_indices_with_a_note(tmp_path: Path) -> None:
    source(tmp_path, MODEL)
    run = run_on(tmp_path, texts(0, 1, 2))
    task: Any = prepared(run)
    assert task.labels == ["0", "1", "2"]
    assert kept_head(task, tmp_path)
    assert "task.label_names lists the model's names in the order of the numbers" in notes(task)
    with pytest.raises(NotCovered, match=r"task\.label"):  # a data set may name them, where plain does not see it
        values_of_labels(run.model_dump(mode="json"), texts(0, 1, 2))


@pytest.mark.parametrize(("labels", "said", "kept"), [
    (("a", "b", "c"), "the outputs of its head get the data's names", True),
    (("a", "b"), "a new head is drawn", False),
    (("negative", "neutral", "positive", "mixed"), "a new head is drawn", False),
])  # fmt: skip
def test_labels_that_differ_from_the_models_are_noted(
    labels: tuple[str, ...], said: str, kept: bool, tmp_path: Path
) -> None:
    source(tmp_path, MODEL)
    task: Any = prepared(run_on(tmp_path, texts(*labels)))
    assert task.labels == sorted(labels)
    assert kept_head(task, tmp_path) == kept
    assert said in notes(task)


def test_names_of_integers_that_the_model_does_not_have_are_not_called_numbers(tmp_path: Path) -> None:
    source(tmp_path, MODEL)
    said = notes(prepared(run_on(tmp_path, texts(0, 1, 2), label_names=["neg", "neu", "pos"])))
    assert "have neg, neu, pos: the outputs of its head get the data's names" in said
    assert "number" not in said


def test_label2id_alone_names_the_outputs(tmp_path: Path) -> None:
    source(tmp_path, MODEL)
    before = KINDS["one"].from_pretrained(tmp_path).classifier.weight
    config = tmp_path / "config.json"
    values = json.loads(config.read_text(encoding="utf-8"))
    config.write_text(json.dumps({key: value for key, value in values.items() if key != "id2label"}), encoding="utf-8")
    run = run_on(tmp_path, texts(*MODEL))
    task: Any = prepared(run)
    assert task.labels == MODEL
    assert (task.model().classifier.weight == before).all()
    assert values_of_labels(run.model_dump(mode="json"), texts(*MODEL)) == MODEL  # and by the plain reference
    without = {key: value for key, value in values.items() if key not in ("id2label", "label2id", "num_labels")}
    config.write_text(json.dumps(without), encoding="utf-8")
    task = prepared(run_on(tmp_path, texts(*MODEL)))
    assert task.labels == sorted(MODEL)
    assert (task.model().classifier.weight == before).all()
    assert "unless its head has 3 outputs, a new one is drawn" in notes(task)


def test_a_model_that_names_two_outputs_alike_is_noted(tmp_path: Path) -> None:
    source(tmp_path, MODEL)
    config = tmp_path / "config.json"
    values = json.loads(config.read_text(encoding="utf-8"))
    values["id2label"] |= {"1": "neutral"}
    config.write_text(json.dumps(values), encoding="utf-8")
    task: Any = prepared(run_on(tmp_path, texts(*MODEL)))
    assert task.labels == sorted(MODEL)
    assert kept_head(task, tmp_path)
    assert "the model's id2label has neutral twice" in notes(task)


def test_a_model_without_names_or_head_needs_no_word(tmp_path: Path) -> None:
    source(tmp_path, None, "masked")
    assert notes(prepared(run_on(tmp_path, texts(*MODEL)))) == ""
    source(tmp_path, None)
    assert notes(prepared(run_on(tmp_path, texts(0, 1, 2)))) == ""  # LABEL_0 is 0
    assert "LABEL_0, LABEL_1, LABEL_2" in notes(prepared(run_on(tmp_path, texts(*MODEL))))


def test_several_labels_are_in_the_models_order(tmp_path: Path) -> None:
    source(tmp_path, MODEL)
    rows = [{"text": f"bad {n}", "label": [["negative"], ["positive", "neutral"], []][n % 3]} for n in range(6)]
    task: Any = prepared(run_on(tmp_path, rows, multi_label=True))
    assert task.labels == MODEL
    assert kept_head(task, tmp_path)
    marks = [{"text": f"bad {n}", "negative": n % 2, "positive": n // 3, "neutral": 1} for n in range(6)]
    task = prepared(run_on(tmp_path, marks, multi_label=True, label=["negative", "positive", "neutral"]))
    assert task.labels == MODEL
    assert kept_head(task, tmp_path)
    columns = task.splits["train"]
    assert all(0 in columns.ragged("label").row(row) for row in range(len(columns)))  # neutral in every row
    values = task.run.model_dump(mode="json")
    splits = read_splits(values)
    labels, tokenizer = values_of_labels(values, splits[UNFILTERED_TRAIN]), AutoTokenizer.from_pretrained(tmp_path)
    job = SimpleNamespace(run=values, labels=labels, tokenizer=tokenizer, reads_types=False)
    plain = encode_rows(job, splits["train"])
    ours = [columns.ragged("label").row(row) for row in range(len(columns))]
    assert [each["labels"] for each in plain] == [[float(code in row) for code in range(3)] for row in ours]


def test_tags_that_are_numbers_are_the_models_outputs(tmp_path: Path) -> None:
    """In the order of texts, 10 was learned by the output of 2."""
    source(tmp_path, None, "tags", count=12)
    tags = [str(n) for n in range(12)]
    rows = [{"tokens": ["bad", *["good"] * 11], "tags": [*range(12)]} for _ in range(6)]
    run = run_on(tmp_path, rows, name="token_classification")
    task: Any = prepared(run, TokenClassification)
    assert task.labels == tags
    assert "LABEL_0" not in notes(task)
    values = run.model_dump(mode="json")
    assert values_of_labels(values, read_splits(values)[UNFILTERED_TRAIN]) == tags
    source(tmp_path, [*"abcdefghijkl"], "tags", count=12)
    assert "use those in the data" in notes(prepared(run, TokenClassification))


def test_another_problem_type_is_noted(tmp_path: Path) -> None:
    source(tmp_path, MODEL, problem_type="multi_label_classification")
    assert "multi_label_classification" in notes(prepared(run_on(tmp_path, texts(*MODEL))))
    rows = [{"text": f"bad {n}", "label": n / 2} for n in range(6)]
    assert "3 outputs, and the data have 1 number per example" in notes(
        prepared(run_on(tmp_path, rows, regression=True))
    )


def test_held_out_rows_do_not_depend_on_the_label_order(tmp_path: Path) -> None:
    def held_out(order: list[str]) -> list[list[int]]:
        source(tmp_path, order)
        columns = prepared(run_on(tmp_path, texts(*MODEL))).splits["validation"]
        return [columns.ragged("input_ids").row(row).tolist() for row in range(len(columns))]

    assert held_out(MODEL) == held_out(sorted(MODEL))


def test_tags_are_in_the_models_order(tmp_path: Path) -> None:
    tags = ["O", "I-PER", "B-PER", "B-LOC"]
    source(tmp_path, tags, "tags")
    rows = [{"tokens": ["bad", "good", str(n)], "tags": ["B-PER", "I-PER", "O"]} for n in range(6)]
    run = run_on(tmp_path, rows, name="token_classification")
    task: Any = prepared(run, TokenClassification)
    assert task.labels == tags
    assert "its head keeps all 4 outputs" in notes(task)
    before = BertForTokenClassification.from_pretrained(tmp_path).classifier.weight
    assert (task.model().classifier.weight == before).all()
    values = run.model_dump(mode="json")
    assert values_of_labels(values, read_splits(values)[UNFILTERED_TRAIN]) == tags
    source(tmp_path, ["X", "Y", "Z"], "tags")
    assert "a new head" not in notes(prepared(run, TokenClassification))
    assert "the outputs of its head get the data's names" in notes(prepared(run, TokenClassification))


def test_labels_of_images_are_in_the_models_order(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    names = {"id2label": {0: "red", 1: "blue"}, "label2id": {"red": 0, "blue": 1}}
    config = ResNetConfig(embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], layer_type="basic", **names)
    ResNetForImageClassification(config).save_pretrained(tmp_path / "model")
    ViTImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(tmp_path / "model")
    for name, color in (("blue", (0, 0, 255)), ("red", (255, 0, 0))):
        (tmp_path / "data" / name).mkdir(parents=True)
        for n in range(6):
            image.new("RGB", (32, 32), tuple(max(0, c - n) for c in color)).save(tmp_path / "data" / name / f"{n}.png")
    values = {k: v for k, v in TINY.items() if k not in ("tokenizer", "data")}
    values |= {"data": {"source": str(tmp_path / "data"), "layout": "class_folders", "validation_fraction": 0.34}}
    values |= {"model": {"source": str(tmp_path / "model")}, "task": {"name": "image_classification"}}
    run = load(None, [], values)
    task: Any = prepared(run, ImageClassification)
    assert task.labels == ["red", "blue"]
    assert "red, blue" in notes(task)
    model = AutoModelForImageClassification.from_pretrained(tmp_path / "model")
    assert (task.model().classifier[1].weight == model.classifier[1].weight).all()


def test_a_tag_of_no_scheme_is_still_refused(tmp_path: Path) -> None:
    source(tmp_path, ["B-PER", "X-PER"], "tags")
    rows = [{"tokens": ["bad", str(n)], "tags": ["B-PER", "X-PER"]} for n in range(6)]
    with raises("LS3360", "X-PER"):
        prepared(run_on(tmp_path, rows, name="token_classification"), TokenClassification)
