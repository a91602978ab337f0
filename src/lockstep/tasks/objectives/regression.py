"""The objective of `classification` with numbers in place of labels.

In: columns of numbers, or a column of lists of numbers. Out: the interface of `objective.py`.
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

_DRAWN = 500  # maximum number of points in a scatter plot


class RegressionObjective(Objective):
    """Regression on the logits: squared or absolute error; Pearson, Spearman, R2. The loss of an example is the mean
    over its numbers, as in torch's MSELoss and L1Loss."""

    problem = "regression"
    metric_names = ("loss", "pearson", "spearman", "r2", "mse", "mae")

    # -- before any process ------------------------------------------------------------------------------------------

    @classmethod
    def codes(cls, splits: dict[str, Dataset], options: ClassificationOptions, name: str) -> LabelCodes:
        return labels.number_codes_of(splits, list(options.labels.values()), options.label_names, name)

    @classmethod
    def feature(cls) -> Any:
        import datasets

        return datasets.List(datasets.Value("float64"))

    # -- training ----------------------------------------------------------------------------------------------------

    def targets(self, columns: Columns, rows: np.ndarray) -> np.ndarray:
        """Float64 [B, 1 + C]: a 0 that marks a real example (IGNORED may be a valid number), and its numbers."""
        numbers = [columns.ragged("label").row(int(row)) for row in rows]
        return np.concatenate([np.zeros((len(rows), 1)), np.stack(numbers)], axis=1)

    def count(self, columns: Columns, rows: np.ndarray) -> float:
        return len(rows) * len(self.names)

    def targets_in_batch(self, targets: Tensor) -> float:
        return int((targets[:, 0] == 0).sum()) * len(self.names)

    def loss_sum(self, logits: Tensor, targets: Tensor) -> Tensor:
        return _errors(logits, targets, squared=self.options.loss != "mae").sum()

    # -- evaluation --------------------------------------------------------------------------------------------------

    def score(self, logits: Tensor, targets: Tensor) -> Sums:
        return {
            "examples": (targets[:, 0] == 0).sum().double(),
            "predictions": logits,
            "labels": targets[:, 1:],
        }

    def metrics(self, sums: Sums, threshold: float | None) -> dict[str, float]:
        """Metrics, averaged over the numbers if there are several."""
        predicted, true = self._columns(sums)
        differences = predicted - true
        errors = {"mse": float(np.square(differences).mean()), "mae": float(np.abs(differences).mean())}
        values = {"loss": errors[self.options.loss or "mse"]}
        for name, formula in (("pearson", objective.pearson), ("spearman", objective.spearman), ("r2", objective.r2)):
            each = [formula(true[:, n], predicted[:, n]) for n in range(true.shape[1])]
            values[name] = objective.mean_of_defined(each) if np.isfinite(predicted).all() else objective.NAN
        return values | errors

    def tables(self, sums: Sums, threshold: float | None) -> dict[str, Any]:
        predicted, true = self._columns(sums)
        if not np.isfinite(predicted).all():
            return {}
        some = np.unique(np.linspace(0, len(true) - 1, _DRAWN).astype(np.int64))  # evenly spread, in order
        scatter: dict[str, Any] = {"names": self.names, "examples": len(true)}
        return {"scatter": scatter | {"true": true[some].T.tolist(), "predicted": predicted[some].T.tolist()}}

    def _columns(self, sums: Sums) -> tuple[np.ndarray, np.ndarray]:
        """Predicted and true numbers: float64 [N, C]."""
        return sums["predictions"].double().numpy(), sums["labels"].double().numpy()

    def metric_inputs(self, sums: Sums) -> tuple[np.ndarray, np.ndarray]:
        predicted, true = self._columns(sums)
        return (predicted[:, 0], true[:, 0]) if len(self.names) == 1 else (predicted, true)

    def dummy_predictions(self) -> tuple[np.ndarray, np.ndarray]:
        predicted, true = np.random.default_rng(0).normal(size=(2, 8, len(self.names)))
        return (predicted[:, 0], true[:, 0]) if len(self.names) == 1 else (predicted, true)

    # -- answers -----------------------------------------------------------------------------------------------------

    def answers(self, logits: Tensor, threshold: float | None) -> list[dict[str, Any]]:
        """`value`, or `values` by name if there are several."""
        rows = [dict(zip(self.names, row, strict=True)) for row in logits.tolist()]
        return [{"values": row} if len(row) > 1 else {"value": next(iter(row.values()))} for row in rows]

    @classmethod
    def format_answer(cls, answer: Mapping[str, Any]) -> str:
        if "value" in answer:
            return f"{answer['value']:.4g}"
        return ", ".join(f"{name} {value:.4g}" for name, value in answer["values"].items())

    def format_target(self, targets: Tensor) -> str:
        return ", ".join(f"{value:.4g}" for value in targets[1:].tolist())


def _errors(logits: Tensor, targets: Tensor, squared: bool) -> Tensor:
    """Error of each number: [B, C]; 0 for padding rows."""
    differences = logits - targets[:, 1:].to(logits.dtype)
    return (differences.square() if squared else differences.abs()).masked_fill(targets[:, :1] != 0, 0.0)
