"""The objective of `classification` with any number of labels per example: `task.multi_label`.

In: a column of lists of labels, or several columns of 0 and 1. Out: the interface of `objective.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep.config.lazy import lazy
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


class SeveralLabels(Objective):
    """Multi-label: binary cross-entropy per label, optionally smoothed, focal or weighted; F1, average precision. The
    loss of an example is the mean over its labels, as with BCEWithLogitsLoss in transformers."""

    problem = "multi_label_classification"
    metric_names = ("loss", "micro_f1", "macro_f1", "average_precision", "roc_auc", "ece", "threshold")

    # -- before any process ------------------------------------------------------------------------------------------

    @classmethod
    def codes(cls, splits: dict[str, Dataset], options: ClassificationOptions, name: str) -> LabelCodes:
        return labels.list_codes_of(splits, list(options.labels.values()), options.label_names, name)

    @classmethod
    def feature(cls) -> Any:
        import datasets

        return datasets.List(datasets.Value("int32"))

    # -- training ----------------------------------------------------------------------------------------------------

    def targets(self, columns: Columns, rows: np.ndarray) -> np.ndarray:
        matrix = np.zeros((len(rows), len(self.names)), np.int64)  # [B, C]
        for place, row in enumerate(rows):
            matrix[place, columns.ragged("label").row(int(row))] = 1
        return matrix

    def count(self, columns: Columns, rows: np.ndarray) -> float:
        return len(rows) * len(self.names)

    def targets_in_batch(self, targets: Tensor) -> float:
        return int((targets >= 0).sum())

    def loss_sum(self, logits: Tensor, targets: Tensor) -> Tensor:
        from torch.nn.functional import logsigmoid

        smoothing = self.options.label_smoothing
        losses = _each(logits, targets, smoothing, self.weights_at(logits))  # [B, C]
        if self.options.loss == "focal":  # (1 - p of what is true)^gamma, by its logarithm: Lin et al. 2017
            side = 2 * targets.clamp(min=0).to(logits.dtype) - 1
            losses = losses * (self.options.focal_gamma * logsigmoid(-side * logits)).exp()
        return losses.masked_fill(targets < 0, 0.0).sum()

    # -- evaluation --------------------------------------------------------------------------------------------------

    def score(self, logits: Tensor, targets: Tensor) -> Sums:
        real = (targets >= 0).all(-1)
        return {
            "loss": _each(logits, targets).masked_fill(targets < 0, 0.0).double().sum(),
            "examples": real.sum().double(),
            "predictions": logits,
            "labels": targets,
        }

    def metrics(self, sums: Sums, threshold: float | None) -> dict[str, float]:
        """Micro F1 pools all decisions; macro F1 is the mean over labels, 0 for a label that neither occurs nor is
        predicted. Average precision and ROC AUC are means over labels with positive examples, and (ROC AUC) negative
        ones. ECE pools all labels."""
        loss = float(sums["loss"]) / (float(sums["examples"]) * len(self.names))
        probabilities, true = self.metric_inputs(sums)
        if not np.isfinite(probabilities).all():
            return dict.fromkeys(self.metric_names, objective.NAN) | {"loss": loss}
        used = self._used(probabilities, true, threshold)
        right, there, predicted = _counts(probabilities >= used, true)
        areas = [objective.roc_auc(true[:, code] == 1, probabilities[:, code]) for code in range(len(self.names))]
        return {
            "loss": loss,
            "micro_f1": float(objective.f1(right.sum(), there.sum(), predicted.sum())),
            "macro_f1": float(objective.f1(right, there, predicted).mean()),
            "average_precision": objective.mean_of_defined(_average_precisions(probabilities, true)),
            "roc_auc": objective.mean_of_defined(areas),
            "ece": objective.reliability(true.ravel(), probabilities.ravel()).error,
            "threshold": used,
        }

    def _used(self, probabilities: np.ndarray, true: np.ndarray, chosen: float | None) -> float:
        threshold = self.threshold(true.ravel() == 1, probabilities.ravel(), chosen)
        assert threshold is not None, "several labels always have a threshold"
        return threshold

    def tables(self, sums: Sums, threshold: float | None) -> dict[str, Any]:
        probabilities, true = self.metric_inputs(sums)
        if not np.isfinite(probabilities).all():
            return {}
        used = self._used(probabilities, true, threshold)
        right, there, predicted = _counts(probabilities >= used, true)
        bins = objective.reliability(true.ravel(), probabilities.ravel())
        return {
            "labels": {
                "names": self.names,
                "threshold": used,
                "examples": there.tolist(),
                "given": predicted.tolist(),
                "right": right.tolist(),
                "average_precision": [
                    None if np.isnan(each) else each for each in _average_precisions(probabilities, true)
                ],
            },
            "reliability": {"of": "each label"} | bins.table(),
        }

    def metric_inputs(self, sums: Sums) -> tuple[np.ndarray, np.ndarray]:
        return objective.sigmoid(sums["predictions"].double().numpy()), sums["labels"].numpy()  # [N, C] each

    def dummy_predictions(self) -> tuple[np.ndarray, np.ndarray]:
        code, row = np.arange(len(self.names)), np.arange(8)[:, None]
        true = (code + row) % 3 % 2  # every label has positives and negatives
        return objective.sigmoid(np.random.default_rng(0).normal(size=true.shape)), true

    # -- answers -----------------------------------------------------------------------------------------------------

    @property
    def chooses_threshold(self) -> bool:
        return self.options.threshold in (None, "validation")

    def answers(self, logits: Tensor, threshold: float | None) -> list[dict[str, Any]]:
        """Predicted `labels`, most likely first, and the `scores` of all labels."""
        results = []
        probabilities = objective.sigmoid(logits.double().cpu().numpy())  # float64, as for the metrics
        for row in probabilities.tolist():
            scored = dict(zip(self.names, row, strict=True))
            predicted = [name for name, chance in scored.items() if chance >= (0.5 if threshold is None else threshold)]
            results.append({"labels": sorted(predicted, key=lambda name: -scored[name]), "scores": scored})
        return results

    @classmethod
    def format_answer(cls, answer: Mapping[str, Any]) -> str:
        labels = ", ".join(f"{name} {answer['scores'][name]:.3f}" for name in answer["labels"])
        best = max(answer["scores"], key=answer["scores"].__getitem__)
        return labels or f"none (likeliest {best} {answer['scores'][best]:.3f})"

    def format_target(self, targets: Tensor) -> str:
        return ", ".join(name for name, has in zip(self.names, targets.tolist(), strict=True) if has) or "none"


def _each(logits: Tensor, targets: Tensor, smoothing: float = 0.0, weight: Tensor | None = None) -> Tensor:
    """Loss of each label of each example: [B, C]. With smoothing, a positive target is 1 - smoothing / 2."""
    from torch.nn.functional import binary_cross_entropy_with_logits

    true = targets.clamp(min=0).to(logits.dtype) * (1 - smoothing) + smoothing / 2
    return binary_cross_entropy_with_logits(logits, true, pos_weight=weight, reduction="none")


def _counts(decided: np.ndarray, true: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Per label, the number of true positives, of true labels and of predicted labels."""
    return (decided & (true == 1)).sum(0), true.sum(0), decided.sum(0)


def _average_precisions(probabilities: np.ndarray, true: np.ndarray) -> list[float]:
    return [objective.average_precision(true[:, code] == 1, probabilities[:, code]) for code in range(true.shape[1])]
