"""Several labels a text, or none: binary cross-entropy of each, smoothed or focal, weighted; F1, average precision.

In: a column of lists of labels, or several columns of 0 and 1. Out: what `objective.py` says. The loss of an example is
the mean over labels of theirs, as transformers' BCEWithLogitsLoss has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep.data import label_lists
from lockstep.data.tokens import Columns
from lockstep.tasks.objectives import scores
from lockstep.tasks.objectives.objective import LabelCodes, Objective
from lockstep.tasks.objectives.options import ClassificationOptions

if TYPE_CHECKING:
    from datasets import Dataset
    from torch import Tensor

    from lockstep.data.batch import Sums


class SeveralLabels(Objective):
    """Each label is a question of yes or no."""

    problem = "multi_label_classification"
    metric_names = ("loss", "micro_f1", "macro_f1", "average_precision", "roc_auc", "ece", "threshold")

    # -- before any process ------------------------------------------------------------------------------------------

    @classmethod
    def codes(cls, splits: dict[str, Dataset], options: ClassificationOptions, name: str) -> LabelCodes:
        return label_lists.codes_of(splits, list(options.labels.values()), options.label_names, name)

    @classmethod
    def feature(cls) -> Any:
        import datasets

        return datasets.List(datasets.Value("int32"))

    # -- training ----------------------------------------------------------------------------------------------------

    def targets(self, columns: Columns, rows: np.ndarray) -> np.ndarray:
        found = np.zeros((len(rows), len(self.names)), np.int64)  # [B, C]
        for place, row in enumerate(rows):
            found[place, columns.ragged("label").row(int(row))] = 1
        return found

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
        """Micro F1 counts all decisions together, macro F1 is the mean over labels, of 0 where one neither occurs nor
        is given. Average precision and ROC AUC are means over the labels of which the split has examples that have
        it and (ROC AUC) others that have not. ECE is that of all labels together."""
        loss = float(sums["loss"]) / (float(sums["examples"]) * len(self.names))
        probabilities, true = self.metric_inputs(sums)
        if not np.isfinite(probabilities).all():
            return dict.fromkeys(self.metric_names, scores.NAN) | {"loss": loss}
        used = self._used(probabilities, true, threshold)
        right, there, given = _counts(probabilities >= used, true)
        areas = [scores.roc_auc(true[:, code] == 1, probabilities[:, code]) for code in range(len(self.names))]
        return {
            "loss": loss,
            "micro_f1": float(scores.f1(right.sum(), there.sum(), given.sum())),
            "macro_f1": float(scores.f1(right, there, given).mean()),
            "average_precision": scores.mean_of_defined(_average_precisions(probabilities, true)),
            "roc_auc": scores.mean_of_defined(areas),
            "ece": scores.reliability(true.ravel(), probabilities.ravel()).error,
            "threshold": used,
        }

    def _used(self, probabilities: np.ndarray, true: np.ndarray, chosen: float | None) -> float:
        found = self.threshold(true.ravel() == 1, probabilities.ravel(), chosen)
        assert found is not None, "of several labels there is always a threshold"
        return found

    def tables(self, sums: Sums, threshold: float | None) -> dict[str, Any]:
        probabilities, true = self.metric_inputs(sums)
        if not np.isfinite(probabilities).all():
            return {}
        used = self._used(probabilities, true, threshold)
        right, there, given = _counts(probabilities >= used, true)
        found = scores.reliability(true.ravel(), probabilities.ravel())
        return {
            "labels": {
                "names": self.names,
                "threshold": used,
                "examples": there.tolist(),
                "given": given.tolist(),
                "right": right.tolist(),
                "average_precision": [
                    None if np.isnan(each) else each for each in _average_precisions(probabilities, true)
                ],
            },
            "reliability": {"of": "each label"} | found.table(),
        }

    def metric_inputs(self, sums: Sums) -> tuple[np.ndarray, np.ndarray]:
        return scores.sigmoid(sums["predictions"].double().numpy()), sums["labels"].numpy()  # [N, C] each

    def dummy_predictions(self) -> tuple[np.ndarray, np.ndarray]:
        code, row = np.arange(len(self.names)), np.arange(8)[:, None]
        true = (code + row) % 3 % 2  # every label has some and lacks some
        return scores.sigmoid(np.random.default_rng(0).normal(size=true.shape)), true

    # -- answers -----------------------------------------------------------------------------------------------------

    @property
    def chooses_threshold(self) -> bool:
        return self.options.threshold in (None, "validation")

    def answers(self, logits: Tensor, threshold: float | None) -> list[dict[str, Any]]:
        """`labels`, the likeliest first, and the `scores` of all."""
        found = []
        for row in scores.sigmoid(logits.double().cpu().numpy()).tolist():  # as `given`: a threshold decides the same
            scored = dict(zip(self.names, row, strict=True))
            given = [name for name, chance in scored.items() if chance >= (0.5 if threshold is None else threshold)]
            found.append({"labels": sorted(given, key=lambda name: -scored[name]), "scores": scored})
        return found

    @classmethod
    def format_answer(cls, answer: Mapping[str, Any]) -> str:
        given = ", ".join(f"{name} {answer['scores'][name]:.3f}" for name in answer["labels"])
        best = max(answer["scores"], key=answer["scores"].__getitem__)
        return given or f"none (likeliest {best} {answer['scores'][best]:.3f})"

    def format_target(self, targets: Tensor) -> str:
        return ", ".join(name for name, has in zip(self.names, targets.tolist(), strict=True) if has) or "none"


def _each(logits: Tensor, targets: Tensor, smoothing: float = 0.0, weight: Tensor | None = None) -> Tensor:
    """The loss of each label of each example: [B, C]. Smoothed, what is true is so to 1 - smoothing / 2."""
    from torch.nn.functional import binary_cross_entropy_with_logits

    true = targets.clamp(min=0).to(logits.dtype) * (1 - smoothing) + smoothing / 2
    return binary_cross_entropy_with_logits(logits, true, pos_weight=weight, reduction="none")


def _counts(decided: np.ndarray, true: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of each label: examples that have it and were given it, that have it, that were given it."""
    return (decided & (true == 1)).sum(0), true.sum(0), decided.sum(0)


def _average_precisions(probabilities: np.ndarray, true: np.ndarray) -> list[float]:
    return [scores.average_precision(true[:, code] == 1, probabilities[:, code]) for code in range(true.shape[1])]
