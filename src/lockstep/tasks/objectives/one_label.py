"""The objective of `classification` with one label per example.

In: a column of labels. Out: the interface of `objective.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep.config.lazy import lazy
from lockstep.config.run import RunError
from lockstep.data.arrow_cache import Columns
from lockstep.data.batch import Sums
from lockstep.tasks.objectives import objective
from lockstep.tasks.objectives.objective import ClassificationOptions, LabelCodes, Objective

if TYPE_CHECKING:
    from datasets import Dataset
    from torch import Tensor

    from lockstep.data import labels
else:
    (labels,) = lazy("lockstep.data", "labels")

MOST_CLASSES = 100  # maximum number of classes for a confusion matrix


class OneLabel(Objective):
    """One of several classes: cross-entropy, optionally smoothed, focal or weighted; accuracy, F1, ROC AUC and
    calibration."""

    problem = "single_label_classification"
    metric_names = ("loss", "accuracy", "macro_f1", "f1", "threshold", "roc_auc", "ece")

    def __init__(self, options: ClassificationOptions, names: list[str], counts: list[int], examples: int) -> None:
        super().__init__(options, names, counts, examples)
        if options.threshold is not None and len(names) != 2:
            raise RunError(
                "LS3290",
                "task.threshold: expected exactly two labels (the threshold is for the second), but there are "
                f"{len(names)} ({', '.join(names[:5])}{', ...' if len(names) > 5 else ''}); remove it, or set "
                "task.multi_label",
            )

    # -- before any process ------------------------------------------------------------------------------------------

    @classmethod
    def readable(cls, dataset: Dataset, options: ClassificationOptions) -> Dataset:
        return labels.readable(dataset, options.labels["task.label"])

    @classmethod
    def codes(cls, splits: dict[str, Dataset], options: ClassificationOptions, name: str) -> LabelCodes:
        return labels.codes_of(splits, options.labels["task.label"], options.label_names, name)

    @classmethod
    def feature(cls) -> Any:
        import datasets

        return datasets.Value("int64")

    @classmethod
    def cut(cls, codes: Any, train: Dataset, share: float, seed: Any, key: str) -> tuple[Dataset, Dataset]:
        """Hold out a seeded, stratified share: every class in proportion."""
        of_rows = codes.of_all(train)
        chosen = []
        random = np.random.default_rng(seed)
        for code in sorted(np.unique(of_rows).tolist(), key=lambda code: codes.values[code]):  # in the data's order
            rows = random.permutation(np.flatnonzero(of_rows == code))
            chosen.append(rows[: round(len(rows) * share)])
        held_out = np.sort(np.concatenate(chosen))
        rest = np.setdiff1d(np.arange(len(of_rows)), held_out)
        if len(held_out) == 0 and round(len(of_rows) * share) > 0:
            raise RunError(
                "LS3291",
                f"task.label: {len(np.unique(of_rows))} distinct labels in {len(of_rows)} rows: no label has "
                f"enough rows to hold out a share of {share:g} ({key}). Check that task.label names the right "
                f"column; if so, set data.{key.partition('_')[0]}, or a larger data.{key}",
            )
        if len(held_out) == 0 or len(rest) == 0:
            raise RunError(
                "LS3292",
                f"data.{key}: {share:g} of {len(of_rows)} examples leaves one of the splits empty; give another "
                "share, or more data",
            )
        return train.select(rest), train.select(held_out)

    # -- training ----------------------------------------------------------------------------------------------------

    def targets(self, columns: Columns, rows: np.ndarray) -> np.ndarray:
        return columns.flat("label")[rows].astype(np.int64)  # [B]

    def count(self, columns: Columns, rows: np.ndarray) -> float:
        if self.weights is None:
            return len(rows)
        counts = np.bincount(columns.flat("label")[rows], minlength=len(self.names))
        return float((counts * self.weights).sum())  # of multiples of 2^-20: exact

    def targets_in_batch(self, targets: Tensor) -> float:
        labels = targets[targets >= 0]
        return len(labels) if self.weights is None else float(self.weights[labels.cpu().numpy()].sum())

    def loss_sum(self, logits: Tensor, targets: Tensor) -> Tensor:
        from torch.nn.functional import cross_entropy

        if self.options.loss == "focal":
            return self._focal(logits, targets)
        return cross_entropy(  # IGNORED targets contribute nothing
            logits,
            targets,
            self.weights_at(logits),
            reduction="sum",
            label_smoothing=self.options.label_smoothing,
        )

    def _focal(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Focal loss -(1 - p)^gamma log p of the true label: Lin et al. 2017, https://arxiv.org/abs/1708.02002.
        Computed from logarithms, so that the gradient is finite at p = 1."""
        from torch.nn.functional import one_hot

        real = targets >= 0
        true = one_hot(targets.clamp(min=0), len(self.names)).bool()  # [B, C]
        whole = logits.logsumexp(-1)
        log_likelihood = logits.masked_fill(~true, 0.0).sum(-1) - whole  # log p
        others = logits.masked_fill(true, float("-inf")).logsumexp(-1) - whole  # log (1 - p)
        losses = -(self.options.focal_gamma * others).exp() * log_likelihood  # [B]
        weight = self.weights_at(logits)
        if weight is not None:
            losses = losses * weight[targets.clamp(min=0)]
        return losses.masked_fill(~real, 0.0).sum()

    # -- evaluation --------------------------------------------------------------------------------------------------

    def score(self, logits: Tensor, targets: Tensor) -> Sums:
        from torch.nn.functional import cross_entropy

        real = targets >= 0
        return self._counts(targets[real], logits[real].argmax(dim=-1)) | {
            "loss": cross_entropy(logits, targets, reduction="sum").double(),
            "examples": real.sum().double(),
            "predictions": logits,
            "labels": targets,
        }

    def _counts(self, targets: Tensor, predicted: Tensor) -> Sums:
        """Counts over true and predicted labels, [B] each."""
        import torch
        from torch.nn.functional import one_hot

        classes = len(self.names)
        actual, guessed = one_hot(targets, classes).double(), one_hot(predicted, classes).double()  # [B, C]
        table = {"confusion": actual.T @ guessed} if classes <= MOST_CLASSES else {}  # [C, C]: true, predicted
        return table | {
            "right": (targets == predicted).sum().double(),
            "of_class": one_hot(targets, classes).sum(0).double(),  # [C]
            "predicted": one_hot(predicted, classes).sum(0).double(),  # [C]
            "right_of_class": (one_hot(targets, classes) * (targets == predicted)[:, None])
            .sum(0)
            .to(torch.float64),  # [C]
        }

    def metrics(self, sums: Sums, threshold: float | None) -> dict[str, float]:
        """Metrics of the counts. Macro F1 is the mean of 2 right / (true + predicted) over classes that occur or are
        predicted, as in scikit-learn. ROC AUC is that of the second of two labels, else the mean over one-vs-rest. ECE
        concerns the most likely label. `f1`, with a threshold, is that of the second label."""
        sums, gathered, used = self._decided(sums, threshold)
        count = float(sums["examples"])
        both = sums["of_class"] + sums["predicted"]
        f1 = 2 * sums["right_of_class"][both > 0] / both[both > 0]
        values = {
            "loss": float(sums["loss"]) / count,
            "accuracy": float(sums["right"]) / count,
            "macro_f1": float(f1.mean()),
        }
        if used is not None:
            values |= {"f1": float(2 * sums["right_of_class"][1] / max(float(both[1]), 1.0)), "threshold": used}
        if gathered is None:
            return values
        probabilities, true = gathered
        if not np.isfinite(probabilities).all():
            return values | {"roc_auc": objective.NAN, "ece": objective.NAN}
        of_labels = range(1, 2) if len(self.names) == 2 else range(len(self.names))
        areas = [objective.roc_auc(true == code, probabilities[:, code]) for code in of_labels]
        return values | {"roc_auc": objective.mean_of_defined(areas), "ece": _reliability(probabilities, true).error}

    def _decided(
        self, sums: Sums, threshold: float | None
    ) -> tuple[Sums, tuple[np.ndarray, np.ndarray] | None, float | None]:
        """The sums, with predictions by the threshold if there is one; the gathered probabilities and labels, or None;
        and the threshold."""
        import torch

        if "predictions" not in sums:
            return sums, None, None
        probabilities, true = self.metric_inputs(sums)
        if self.options.threshold is None or not np.isfinite(probabilities).all():
            return sums, (probabilities, true), None
        used = self.threshold(true == 1, probabilities[:, 1], threshold)
        decided = torch.from_numpy((probabilities[:, 1] >= used).astype(np.int64))
        return sums | self._counts(torch.from_numpy(true), decided), (probabilities, true), used

    @property
    def score_names(self) -> tuple[str, ...]:
        only = () if self.options.threshold is not None else ("f1", "threshold")
        return tuple(name for name in self.metric_names if name not in only)

    def tables(self, sums: Sums, threshold: float | None) -> dict[str, Any]:
        sums, gathered, _ = self._decided(sums, threshold)
        tables: dict[str, Any] = {}
        if "confusion" in sums:
            tables["confusion"] = {"labels": self.names, "counts": sums["confusion"].long().tolist()}
        if gathered is not None and np.isfinite(gathered[0]).all():
            tables["reliability"] = {"of": "the likeliest label"} | _reliability(*gathered).table()
        return tables

    def metric_inputs(self, sums: Sums) -> tuple[np.ndarray, np.ndarray]:
        return objective.softmax(sums["predictions"].double().numpy()), sums["labels"].numpy()  # [N, C], [N]

    def dummy_predictions(self) -> tuple[np.ndarray, np.ndarray]:
        true = np.arange(2 * len(self.names)) % len(self.names)
        logits = np.random.default_rng(0).normal(size=(len(true), len(self.names)))
        return objective.softmax(logits), true

    # -- answers -----------------------------------------------------------------------------------------------------

    def answers(self, logits: Tensor, threshold: float | None) -> list[dict[str, Any]]:
        """`label`, its `score`, and the `scores` of all labels, which add up to 1."""
        results = []
        probabilities = objective.softmax(logits.double().cpu().numpy())  # float64, as for the metrics
        for row, best in zip(probabilities.tolist(), logits.argmax(-1).tolist(), strict=True):
            if threshold is not None:
                best = int(row[1] >= threshold)
            scored = dict(zip(self.names, row, strict=True))
            results.append({"label": self.names[best], "score": row[best], "scores": scored})
        return results

    @classmethod
    def format_answer(cls, answer: Mapping[str, Any]) -> str:
        ordered = sorted(answer["scores"].items(), key=lambda entry: (entry[0] != answer["label"], -entry[1]))[:3]
        return ", ".join(f"{label} {chance:.3f}" for label, chance in ordered)

    def short_answer(self, answer: Mapping[str, Any]) -> str:
        return str(answer["label"])

    def format_target(self, targets: Tensor) -> str:
        return self.names[int(targets)]


def _reliability(probabilities: np.ndarray, true: np.ndarray) -> objective.Reliability:
    """Reliability of the most likely label's probability."""
    return objective.reliability(probabilities.argmax(-1) == true, probabilities.max(-1))
