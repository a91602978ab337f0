"""One label a text: cross-entropy, smoothed or focal, weighted by label; accuracy, F1, ROC AUC and calibration.

In: a column of integers, strings, or true and false. Out: what `objective.py` says.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep.config.run import RunError
from lockstep.data import column_scan, labels
from lockstep.data.tokens import Columns
from lockstep.tasks.objectives import scores
from lockstep.tasks.objectives.objective import LabelCodes, Objective
from lockstep.tasks.objectives.options import ClassificationOptions

if TYPE_CHECKING:
    from datasets import Dataset
    from torch import Tensor

    from lockstep.data.batch import Sums

MOST_CLASSES = 100  # of which a table of true against predicted labels is counted


class OneLabel(Objective):
    """A text is of one of several classes."""

    problem = "single_label_classification"
    metric_names = ("loss", "accuracy", "macro_f1", "f1", "threshold", "roc_auc", "ece")

    def __init__(self, options: ClassificationOptions, names: list[str], counts: list[int], examples: int) -> None:
        super().__init__(options, names, counts, examples)
        if options.threshold is not None and len(names) != 2:
            raise RunError(
                f"task.threshold: of two labels the second one's, and there are {len(names)} ({', '.join(names[:5])}"
                f"{', ...' if len(names) > 5 else ''}); leave it out, or set task.multi_label"
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
        """Seeded, and every class in proportion."""
        of_rows = codes.of_all(train)
        chosen = []
        random = np.random.default_rng(seed)
        for code in np.unique(of_rows):
            rows = random.permutation(np.flatnonzero(of_rows == code))
            chosen.append(rows[: round(len(rows) * share)])
        held = np.sort(np.concatenate(chosen))
        rest = np.setdiff1d(np.arange(len(of_rows)), held)
        if len(held) == 0 and round(len(of_rows) * share) > 0:
            raise RunError(
                f"task.label: {len(np.unique(of_rows))} distinct labels in {len(of_rows)} rows: no label has enough of "
                f"them to cut a share of {share:g} off ({key}). Is task.label the column meant? If so, give "
                f"data.{key.partition('_')[0]}, or a larger data.{key}"
            )
        if len(held) == 0 or len(rest) == 0:
            raise RunError(f"data.{key}: {share:g} of {len(of_rows)} examples leaves one of the splits empty")
        return train.select(rest), train.select(held)

    # -- training ----------------------------------------------------------------------------------------------------

    def targets(self, columns: Columns, rows: np.ndarray) -> np.ndarray:
        return columns.flat("label")[rows].astype(np.int64)  # [B]

    def count(self, columns: Columns, rows: np.ndarray) -> float:
        if self.weights is None:
            return len(rows)
        counts = np.bincount(columns.flat("label")[rows], minlength=len(self.names))
        return float((counts * self.weights).sum())  # of multiples of 2^-20: exact

    def targets_in_batch(self, targets: Tensor) -> float:
        found = targets[targets >= 0]
        return len(found) if self.weights is None else float(self.weights[found.cpu().numpy()].sum())

    def loss_sum(self, logits: Tensor, targets: Tensor) -> Tensor:
        from torch.nn.functional import cross_entropy

        if self.options.loss == "focal":
            return self._focal(logits, targets)
        return cross_entropy(  # IGNORED targets count for nothing
            logits,
            targets,
            self.weights_at(logits),
            reduction="sum",
            label_smoothing=self.options.label_smoothing,
        )

    def _focal(self, logits: Tensor, targets: Tensor) -> Tensor:
        """-(1 - p)^gamma log p of the true label: Lin et al. 2017, https://arxiv.org/abs/1708.02002. By logarithms of
        both, so that its gradient is finite where p is 1."""
        from torch.nn.functional import one_hot

        real = targets >= 0
        true = one_hot(targets.clamp(min=0), len(self.names)).bool()  # [B, C]
        whole = logits.logsumexp(-1)
        own = logits.masked_fill(~true, 0.0).sum(-1) - whole  # log p
        others = logits.masked_fill(true, float("-inf")).logsumexp(-1) - whole  # log (1 - p)
        losses = -(self.options.focal_gamma * others).exp() * own  # [B]
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
        """What decisions come to, [B] each."""
        import torch
        from torch.nn.functional import one_hot

        classes = len(self.names)
        known, guessed = one_hot(targets, classes).double(), one_hot(predicted, classes).double()  # [B, C]
        table = {"confusion": known.T @ guessed} if classes <= MOST_CLASSES else {}  # [C, C]: true, predicted
        return table | {
            "right": (targets == predicted).sum().double(),
            "of_class": one_hot(targets, classes).sum(0).double(),  # [C]
            "predicted": one_hot(predicted, classes).sum(0).double(),  # [C]
            "right_of_class": (one_hot(targets, classes) * (targets == predicted)[:, None])
            .sum(0)
            .to(torch.float64),  # [C]
        }

    def metrics(self, sums: Sums, threshold: float | None) -> dict[str, float]:
        """Macro F1 is the mean over classes that occur or are predicted of 2 right / (true + predicted), as
        scikit-learn's. ROC AUC is of the second of two labels, else the mean of each label against all others. ECE is
        that of the likeliest label. `f1`, where there is a threshold, is the second label's."""
        sums, found, used = self._decided(sums, threshold)
        count = float(sums["examples"])
        both = sums["of_class"] + sums["predicted"]
        f1 = 2 * sums["right_of_class"][both > 0] / both[both > 0]
        told = {
            "loss": float(sums["loss"]) / count,
            "accuracy": float(sums["right"]) / count,
            "macro_f1": float(f1.mean()),
        }
        if used is not None:
            told |= {"f1": float(2 * sums["right_of_class"][1] / max(float(both[1]), 1.0)), "threshold": used}
        if found is None:
            return told
        probabilities, true = found
        if not np.isfinite(probabilities).all():
            return told | {"roc_auc": scores.NAN, "ece": scores.NAN}
        of_labels = range(1, 2) if len(self.names) == 2 else range(len(self.names))
        areas = [scores.roc_auc(true == code, probabilities[:, code]) for code in of_labels]
        return told | {"roc_auc": scores.mean_of_defined(areas), "ece": _reliability(probabilities, true).error}

    def _decided(
        self, sums: Sums, threshold: float | None
    ) -> tuple[Sums, tuple[np.ndarray, np.ndarray] | None, float | None]:
        """The sums, with decisions by the threshold where there is one; probabilities and labels, where they were
        gathered; and the threshold."""
        import torch

        if "predictions" not in sums:
            return sums, None, None
        probabilities, true = self.metric_inputs(sums)
        if self.options.threshold is None or not np.isfinite(probabilities).all():
            return sums, (probabilities, true), None
        used = self.threshold(true == 1, probabilities[:, 1], threshold)
        decided = torch.from_numpy((probabilities[:, 1] >= used).astype(np.int64))
        return sums | self._counts(torch.from_numpy(true), decided), (probabilities, true), used

    def tables(self, sums: Sums, threshold: float | None) -> dict[str, Any]:
        sums, found, _ = self._decided(sums, threshold)
        told: dict[str, Any] = {}
        if "confusion" in sums:
            told["confusion"] = {"labels": self.names, "counts": sums["confusion"].long().tolist()}
        if found is not None and np.isfinite(found[0]).all():
            told["reliability"] = {"of": "the likeliest label"} | _reliability(*found).table()
        return told

    def metric_inputs(self, sums: Sums) -> tuple[np.ndarray, np.ndarray]:
        return scores.softmax(sums["predictions"].double().numpy()), sums["labels"].numpy()  # [N, C], [N]

    def dummy_predictions(self) -> tuple[np.ndarray, np.ndarray]:
        true = np.arange(2 * len(self.names)) % len(self.names)
        logits = np.random.default_rng(0).normal(size=(len(true), len(self.names)))
        return scores.softmax(logits), true

    # -- answers -----------------------------------------------------------------------------------------------------

    def answers(self, logits: Tensor, threshold: float | None) -> list[dict[str, Any]]:
        """`label`, its `score`, and the `scores` of all labels, which add up to 1."""
        found = []
        probabilities = scores.softmax(logits.double().cpu().numpy())  # as `given`: a threshold decides the same
        for row, best in zip(probabilities.tolist(), logits.argmax(-1).tolist(), strict=True):
            if threshold is not None:
                best = int(row[1] >= threshold)
            scored = dict(zip(self.names, row, strict=True))
            found.append({"label": self.names[best], "score": row[best], "scores": scored})
        return found

    @classmethod
    def format_answer(cls, answer: Mapping[str, Any]) -> str:
        ordered = sorted(answer["scores"].items(), key=lambda entry: (entry[0] != answer["label"], -entry[1]))[:3]
        return ", ".join(f"{label} {chance:.3f}" for label, chance in ordered)

    def short_answer(self, answer: Mapping[str, Any]) -> str:
        return str(answer["label"])

    def format_target(self, targets: Tensor) -> str:
        return self.names[int(targets)]


def whole_numbers(dataset: Dataset, column: str) -> Dataset:
    """Turn labels that are texts of whole numbers into integers: as they would have been, had none been
    missing."""
    import datasets

    if isinstance(dataset[0][column], str) and all(
        re.fullmatch("-?[0-9]+", label) for label in column_scan.distinct(dataset, column)
    ):
        return dataset.cast_column(column, datasets.Value("int64"))
    return dataset


def _reliability(probabilities: np.ndarray, true: np.ndarray) -> scores.Reliability:
    """Of the likeliest label."""
    return scores.reliability(probabilities.argmax(-1) == true, probabilities.max(-1))
