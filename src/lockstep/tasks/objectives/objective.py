"""The interface of what is learned of a text: its labels or numbers, their loss, their scores, and answers.

In: the options of `classification`, what its labels are called and how often each is there. Out: targets, loss sums,
metrics and answers. Nothing here imports torch at the top.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np

from lockstep.data import lm_documents
from lockstep.data.tokens import Columns
from lockstep.tasks.objectives import weights
from lockstep.tasks.objectives.options import ClassificationOptions

if TYPE_CHECKING:
    from datasets import Dataset
    from torch import Tensor

    from lockstep.data.batch import Sums


class LabelCodes(Protocol):
    """What gives the rows of a split their labels or numbers, as they are kept beside their tokens."""

    names: list[str]
    values: list[Any]  # of labels, as rows hold them, in the order of their codes; none of numbers

    def of(self, rows: dict[str, list]) -> Any:
        """Of some rows, by column."""

    def counts(self, dataset: Dataset) -> list[int]:
        """Examples of each label in a split; none of numbers."""


class Objective(ABC):
    """One way to read labels, and to learn them. All sums are over examples."""

    problem: ClassVar[str]  # transformers' `problem_type`
    metric_names: ClassVar[tuple[str, ...]]  # that `metrics` may give

    def __init__(self, options: ClassificationOptions, names: list[str], counts: list[int], examples: int) -> None:
        """`counts`: of each label in the `examples` of train."""
        self.options, self.names = options, names
        self.weights = weights.of_labels(options, names, counts, examples) if counts else None
        self._weights_there: Tensor | None = None

    # -- before any process ------------------------------------------------------------------------------------------

    @classmethod
    def readable(cls, dataset: Dataset, options: ClassificationOptions) -> Dataset:
        """A split whose rows all hold something, with its labels as they are read."""
        return dataset

    @classmethod
    @abstractmethod
    def codes(cls, splits: dict[str, Dataset], options: ClassificationOptions, name: str) -> LabelCodes:
        """Of all splits. Errors: `RunError` for what is no label, or no number, with its row."""

    @classmethod
    @abstractmethod
    def feature(cls) -> Any:
        """How they are kept: a feature of `datasets`."""

    @classmethod
    def cut(cls, codes: LabelCodes, train: Dataset, share: float, seed: Any, key: str) -> tuple[Dataset, Dataset]:
        """A share cut off the training split, as `documents.cut`. Errors: `RunError`."""
        return lm_documents.cut(train, share, seed, key)

    # -- training ----------------------------------------------------------------------------------------------------

    @abstractmethod
    def targets(self, columns: Columns, rows: np.ndarray) -> np.ndarray:
        """Of the examples at `rows`: [B], or [B, C]. A row of nothing but IGNORED is no example."""

    @abstractmethod
    def count(self, columns: Columns, rows: np.ndarray) -> float:
        """What the loss of these examples is divided by, with weights; exact, whatever is added up first."""

    @abstractmethod
    def targets_in_batch(self, targets: Tensor) -> float:
        """The divisor of the loss, from targets that go through the model."""

    @abstractmethod
    def loss_sum(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The training loss of a micro-batch: float32 scalar. `logits`: float32 [B, C]."""

    # -- evaluation --------------------------------------------------------------------------------------------------

    @abstractmethod
    def score(self, logits: Tensor, targets: Tensor) -> Sums:
        """Sums over the examples of a batch; the plain loss among them, without weights or smoothing."""

    @abstractmethod
    def metrics(self, sums: Sums, threshold: float | None) -> dict[str, float]:
        """Of a split. `threshold`: the one that was chosen before, if any."""

    @abstractmethod
    def tables(self, sums: Sums, threshold: float | None) -> dict[str, Any]:
        """What a report shows of a split beside its metrics."""

    @abstractmethod
    def metric_inputs(self, sums: Sums) -> tuple[np.ndarray, np.ndarray]:
        """Predictions and labels of a split, as functions of `metrics` get them."""

    @abstractmethod
    def dummy_predictions(self) -> tuple[np.ndarray, np.ndarray]:
        """Made-up predictions and labels of a few examples, with every label among them."""

    # -- answers -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def answers(self, logits: Tensor, threshold: float | None) -> list[dict[str, Any]]:
        """What the model says of each row: JSON by name."""

    @classmethod
    @abstractmethod
    def format_answer(cls, answer: Mapping[str, Any]) -> str:
        """An answer for a person."""

    def short_answer(self, answer: Mapping[str, Any]) -> str:
        """An answer in a few words, for the list of samples."""
        return self.format_answer(answer)

    @abstractmethod
    def format_target(self, targets: Tensor) -> str:
        """What is true of an example, for a person."""

    @property
    def fixed_threshold(self) -> float | None:
        """The one that the run file gives."""
        return self.options.threshold if isinstance(self.options.threshold, float) else None

    @property
    def chooses_threshold(self) -> bool:
        """Whether it is chosen on the validation split."""
        return self.options.threshold == "validation"

    def threshold(self, true: np.ndarray, probabilities: np.ndarray, chosen: float | None) -> float | None:
        """The one that holds for a split: given, chosen before, or the best one here."""
        from lockstep.tasks.objectives.scores import best_threshold

        if not self.chooses_threshold:
            return self.fixed_threshold
        return best_threshold(true, probabilities) if chosen is None else chosen

    def weights_at(self, logits: Tensor) -> Tensor | None:
        """The weights of labels where the logits are: float32 [C]."""
        import torch

        if self.weights is None:
            return None
        if self._weights_there is None or self._weights_there.device != logits.device:
            self._weights_there = torch.tensor(self.weights, dtype=torch.float32, device=logits.device)
        return self._weights_there
