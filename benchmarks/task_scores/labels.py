"""Classification and regression beside transformers' Trainer; both models are scored by scikit-learn and scipy.

In: the data folder, a folder with MiniLM. Out: scores of the test split, of both
sides, and lockstep's own of its export.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import texts
import torch
from sides import Recipe, ours, settings
from torch.nn.functional import cross_entropy

ONE = Recipe(rows=320, batch=16, rate=3e-4, epochs=2, micro_batches=2, length=64)
SCORES = Recipe(rows=384, batch=16, rate=2e-4, micro_batches=2, length=96)
KINDS: dict[str, dict[str, Any]] = {
    "one-label": {},
    "class-weights": {"class_weights": "balanced"},
    "focal": {"loss": "focal"},
    "label-smoothing": {"label_smoothing": 0.1},
    "several-labels": {"multi_label": True, "threshold": 0.5},
}


def logits_of(path: Path, rows: list[dict], columns: tuple[str, ...], length: int) -> np.ndarray:
    """What an exported model says of each row: float64 [N, labels]."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(path).eval()
    tokenizer, parts = AutoTokenizer.from_pretrained(path), []
    for start in range(0, len(rows), 50):
        some = [[row[c] for row in rows[start : start + 50]] for c in columns]
        with torch.no_grad():
            batch = tokenizer(*some, truncation=True, max_length=length, padding=True, return_tensors="pt")
            parts.append(model(**batch).logits.double().numpy())
    return np.concatenate(parts)


def scored(logits: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """scikit-learn's scores. `labels`: [N], or 0 and 1 of [N, labels]."""
    from sklearn import metrics

    if labels.ndim == 2:
        told = 1 / (1 + np.exp(-logits))
        return {
            "micro_f1": metrics.f1_score(labels, told >= 0.5, average="micro"),
            "macro_f1": metrics.f1_score(labels, told >= 0.5, average="macro"),
            "average_precision": metrics.average_precision_score(labels, told, average="macro"),
        }
    return {
        "accuracy": metrics.accuracy_score(labels, logits.argmax(1)),
        "macro_f1": metrics.f1_score(labels, logits.argmax(1), average="macro"),
        "loss": metrics.log_loss(labels, torch.from_numpy(logits).softmax(1).numpy(), labels=range(logits.shape[1])),
    }


def told_of(logits: np.ndarray, scores: np.ndarray) -> dict[str, float]:
    from scipy import stats
    from sklearn import metrics

    value = logits[:, 0]
    return {
        "pearson": float(stats.pearsonr(value, scores).statistic),
        "spearman": float(stats.spearmanr(value, scores).statistic),
        "r2": float(metrics.r2_score(scores, value)),
    }


def loss_of(kind: str, labels: np.ndarray, count: int) -> Callable[..., torch.Tensor] | None:
    """What a user of Trainer gives as `compute_loss_func`, where its own arguments do not do it."""
    if kind == "class-weights":
        weight = torch.tensor(len(labels) / (count * np.bincount(labels, minlength=count)), dtype=torch.float32)
        return lambda outputs, wanted, num_items_in_batch=None: cross_entropy(outputs.logits, wanted, weight)
    if kind == "focal":

        def focal(outputs: Any, wanted: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
            own = outputs.logits.log_softmax(1).gather(1, wanted[:, None])[:, 0]
            return -((1 - own.exp()) ** 2 * own).mean()

        return focal
    return None


def theirs(
    model: Path, rows: list[dict], columns: tuple[str, ...], labels: np.ndarray, count: int, room: Path,
    recipe: Recipe, seed: int, kind: str,
) -> Path:  # fmt: skip
    """Trainer, as its user writes it."""
    import transformers
    from datasets import Dataset

    transformers.set_seed(seed)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    problem = {"several-labels": "multi_label_classification", "score": "regression"}.get(kind)
    learned = transformers.AutoModelForSequenceClassification.from_pretrained(
        model, num_labels=count, problem_type=problem
    )
    encoded = tokenizer(*([row[c] for row in rows] for c in columns), truncation=True, max_length=recipe.length)
    data = Dataset.from_dict({**encoded, "labels": labels.tolist()})
    smoothed = {"label_smoothing_factor": 0.1} if kind == "label-smoothing" else {}
    arguments = transformers.TrainingArguments(**settings(room, recipe, seed), **smoothed)
    trainer = transformers.Trainer(
        learned, arguments, train_dataset=data, data_collator=transformers.DataCollatorWithPadding(tokenizer),
        compute_loss_func=loss_of(kind, labels, count),
    )  # fmt: skip
    trainer.train()
    learned.save_pretrained(room / "model")
    tokenizer.save_pretrained(room / "model")
    return room / "model"


def classified(kind: str, data: Path, model: Path, room: Path, seed: int) -> dict[str, Any]:
    several = kind == "several-labels"
    folder = (texts.topics if several else texts.feelings)(data, room / "data", ONE.rows)
    train, test = texts.read(folder / "train.jsonl"), texts.read(folder / "test.jsonl")
    names = sorted({name for row in train for name in (row["label"] if several else [row["label"]])})

    def numbers(rows: list[dict]) -> np.ndarray:
        if several:
            return np.array([[float(name in row["label"]) for name in names] for row in rows])
        return np.array([names.index(row["label"]) for row in rows])

    mine = ours(room / "ours", ONE, seed, {"name": "classification", **KINDS[kind]}, {"source": str(model)}, folder)
    told = json.loads((mine["export"] / "config.json").read_text())["id2label"]
    assert [told[str(place)] for place in range(len(names))] == names, "the columns are not the labels"
    other = theirs(model, train, ("text",), numbers(train), len(names), room / "theirs", ONE, seed, kind)
    return {
        "lockstep": scored(logits_of(mine["export"], test, ("text",), ONE.length), numbers(test)),
        "Trainer": scored(logits_of(other, test, ("text",), ONE.length), numbers(test)),
        "lockstep, as it says": mine["scores"],
    }


def regressed(data: Path, model: Path, room: Path, seed: int) -> dict[str, Any]:
    """How alike two captions are, read together."""
    folder, columns = texts.alike(data, room / "data", SCORES.rows), ("first", "second")
    train, test = texts.read(folder / "train.jsonl"), texts.read(folder / "test.jsonl")
    told = {"text": "first", "text_pair": "second", "label": "score", "regression": True}
    mine = ours(room / "ours", SCORES, seed, {"name": "classification", **told}, {"source": str(model)}, folder)
    wanted, asked = (np.array([row["score"] for row in rows]) for rows in (test, train))
    other = theirs(model, train, columns, asked, 1, room / "theirs", SCORES, seed, "score")
    return {
        "lockstep": told_of(logits_of(mine["export"], test, columns, SCORES.length), wanted),
        "Trainer": told_of(logits_of(other, test, columns, SCORES.length), wanted),
        "lockstep, as it says": mine["scores"],
    }


RECIPES = {kind: partial(classified, kind) for kind in KINDS} | {"regression": regressed}
