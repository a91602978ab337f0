"""Base of tasks that learn labels or numbers of any kind of example: losses, scores, a threshold.

In: an objective (objectives/), and the logits of a model: float32 [B, C]. Out: losses from sums; scores from sums and
from predictions gathered in the order of the split.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep.data.arrow_cache import Columns
from lockstep.data.batch import MicroBatch, Sums
from lockstep.tasks.objectives.objective import Objective
from lockstep.tasks.objectives.objectives import MOST_CLASSES, OneLabel, RegressionObjective, SeveralLabels
from lockstep.tasks.task import Calibrates, Forward, Generate, GivesPredictions, Predicts

if TYPE_CHECKING:
    from torch import Tensor

THRESHOLD = "decision_threshold"  # its name in an export's config


class LabelTask(Predicts, GivesPredictions, Calibrates):
    """A task whose targets are read and learned by an objective."""

    plugin = "tasks"  # a base: it has no name in a run file

    objective: Objective
    threshold: float | None = None  # chosen on the validation split

    def set_objective(self, objective: Objective) -> None:
        """Set the objective, and gather the per-example outputs that its scores need."""
        self.objective = objective
        if len(objective.names) <= MOST_CLASSES or self.run.metrics or not isinstance(objective, OneLabel):
            self.per_example_outputs = ("predictions", "labels")

    def count_targets(self, columns: Columns, rows: np.ndarray) -> float:
        return self.objective.count(columns, rows)

    def targets_in_batch(self, targets: Tensor) -> float:
        return self.objective.targets_in_batch(targets)

    def loss_sum(self, outputs: Any, targets: Tensor) -> Tensor:
        return self.objective.loss_sum(outputs.logits.float(), targets)

    def loss_each(self, outputs: Any, targets: Tensor) -> tuple[Tensor, Tensor | None]:
        import torch

        logits = outputs.logits.float()
        loss = self.objective.loss_sum(logits, targets)
        with torch.no_grad():  # logits are small here, and this works for any objective
            rows = zip(logits.split(1), targets.split(1), strict=True)
            return loss, torch.stack([self.objective.loss_sum(row, target) for row, target in rows])

    def score(self, forward: Forward, batch: MicroBatch) -> Sums:
        sums = self.objective.score(forward(batch.inputs).float(), batch.targets)
        gathers = bool(self.per_example_outputs)
        return {name: value for name, value in sums.items() if gathers or name not in ("predictions", "labels")}

    def metrics(self, sums: Sums) -> dict[str, float]:
        return self.objective.metrics(sums, self.threshold)

    def tables(self, sums: Sums) -> dict[str, Any]:
        return self.objective.tables(sums, self.threshold)

    @property
    def metric_names(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.objective.metric_names

    def score_names(self) -> tuple[str, ...] | None:
        every = [*OneLabel.metric_names, *SeveralLabels.metric_names, *RegressionObjective.metric_names]
        return tuple(dict.fromkeys(every)) if self.built_in() else None

    def possible_scores(self) -> tuple[str, ...] | None:
        return self.objective.score_names if self.built_in() else None

    def predictions(self, sums: Sums, columns: Columns, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self.objective.metric_inputs(sums)

    def dummy_predictions(self) -> tuple[np.ndarray, np.ndarray]:
        return self.objective.dummy_predictions()

    def sample_texts(
        self, columns: Columns, rows: np.ndarray, batch: MicroBatch, generate: Generate, forward: Forward
    ) -> list[dict[str, str]]:
        answers = self.objective.answers(forward(batch.inputs).float(), self.threshold)
        columns_shown = self.inputs_shown(rows, batch) | {
            "predicted": [self.objective.short_answer(answer) for answer in answers],
            "label": [self.objective.format_target(target) for target in batch.targets],
        }
        return [dict(zip(columns_shown, values, strict=True)) for values in zip(*columns_shown.values(), strict=True)]

    @abstractmethod
    def inputs_shown(self, rows: np.ndarray, batch: MicroBatch) -> dict[str, list[str]]:
        """Input columns of the samples at `rows` of the validation split."""

    # -- the threshold -----------------------------------------------------------------------------------------------

    def calibrate(self, scores: Mapping[str, float]) -> None:
        if self.objective.chooses_threshold and np.isfinite(chosen := scores.get("threshold", np.nan)):
            self.threshold = float(chosen)

    @property
    def needs_calibration(self) -> bool:
        return self.objective.chooses_threshold and self.threshold is None

    @classmethod
    def calibration_in(cls, folder: Path) -> dict[str, float]:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return {"threshold": config[THRESHOLD]} if config.get(THRESHOLD) is not None else {}

    def keep_threshold(self, config: Any) -> None:
        """Store the current threshold in the config of an exported model."""
        vars(config).pop(THRESHOLD, None)  # the threshold of the base model
        threshold = self.threshold if self.objective.chooses_threshold else self.objective.fixed_threshold
        if threshold is not None:
            setattr(config, THRESHOLD, threshold)

    @classmethod
    def threshold_of(cls, objective: Objective, folder: Path) -> float | None:
        """The threshold of an export."""
        threshold = cls.calibration_in(folder).get("threshold")
        return threshold if objective.chooses_threshold else objective.fixed_threshold
