"""The interface of an objective: an example's labels or numbers, their loss, scores and answers.

In: the keys of `classification` in the run file, label names and their frequencies in train. Out: targets, loss sums,
metrics and answers. This module does not import torch at the top.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol

import numpy as np
from pydantic import BeforeValidator, Field, model_validator

from lockstep.config.error_messages import read_yaml
from lockstep.config.errors import InvalidValue
from lockstep.config.run import RunError
from lockstep.config.sections import Section
from lockstep.data.arrow_cache import Columns
from lockstep.data.batch import Sums

if TYPE_CHECKING:
    from datasets import Dataset
    from torch import Tensor


# -- weights of labels in the training loss --------------------------------------------------------------------------

_WORD = re.compile(r"[\w.+-]{1,40}")  # labels that YAML may read as numbers
_FINEST = 2.0**-20  # weights are multiples of it, so that their sums are exact in any order


def of_labels(options: ClassificationOptions, names: list[str], counts: list[int], examples: int) -> np.ndarray | None:
    """Label weights, float64 [C], or None if all are equal.

    With one label per example, the weight of its examples; with several, the weight of examples that have the label,
    others weighing 1 (torch's `pos_weight`). `balanced` is scikit-learn's for one label: examples / (labels x examples
    of the label); for several, the ratio of examples without the label to examples with it. Errors: `RunError`.
    """
    class_weights = options.class_weights
    if class_weights is None:
        return None
    if class_weights == "balanced":
        if 0 in counts:
            raise RunError(
                "LS3270",
                f"task.class_weights: the training split has no example of {names[counts.index(0)]!r}, so "
                "balanced cannot compute its weight; give weights by label, or more data",
            )
        of = np.array(counts, np.float64)
        weights = (examples - of) / of if options.multi_label else examples / (len(names) * of)
        if options.multi_label and (weights == 0).any():
            raise RunError(
                "LS3271",
                f"task.class_weights: every example of train has the label {names[int(np.argmin(weights))]!r}, "
                "so balanced cannot compute its weight; give weights by label, or remove that label",
            )
    else:
        if unknown := sorted(set(class_weights) - set(names)):
            raise RunError(
                "LS3272",
                f"task.class_weights: unknown label {unknown[0]!r}; expected one of {', '.join(map(repr, names[:20]))}",
            )
        _check_alike(class_weights, names)
        weights = np.array([class_weights.get(name, 1.0) for name in names])
    return np.maximum(np.round(weights / _FINEST), 1) * _FINEST


def _check_alike(class_weights: Mapping[str, float], names: list[str]) -> None:
    """Refuse a weight that may be meant for another label: without quotes, YAML reads 01 as 1. Errors: `RunError`."""
    for other in names:
        if other not in class_weights and _WORD.fullmatch(other):
            (unquoted,) = _named({read_yaml(other): 1.0})
            if unquoted in class_weights:
                raise RunError(
                    "LS3280",
                    f"task.class_weights: the label {other!r} is read as {unquoted!r}, another label, if it is not in "
                    f"quotes; give both a weight, with quotes: {{{unquoted!r}: ..., {other!r}: ...}}",
                )


# -- keys of the run file --------------------------------------------------------------------------------------------


def _named(value: Any) -> Any:
    """Convert the labels of a weight mapping to texts: YAML parses 0 and true as number and bool."""
    if not isinstance(value, dict):
        return value
    return {str(name).lower() if isinstance(name, bool) else str(name): weight for name, weight in value.items()}


Weight = Annotated[float, Field(ge=1e-5, le=1e6)]
Weights = Annotated[Literal["balanced"] | dict[str, Weight] | None, BeforeValidator(_named)]
Threshold = Annotated[float, Field(gt=0, lt=1)] | Literal["validation"] | None


class LabelOptions(Section):
    """Keys of every task that learns labels."""

    label_names: list[str] | None = Field(
        None, description="names of integer labels, in order; default: from the data set"
    )
    focal_gamma: float = Field(
        2.0,
        ge=0,
        description="focusing parameter gamma of the focal loss: larger values reduce the weight of easy examples",
    )
    class_weights: Weights = Field(
        None, description="balanced, or label -> weight in the training loss; other labels have weight 1"
    )
    label_smoothing: float = Field(0.0, ge=0, lt=1, description="label smoothing of the training loss")
    threshold: Threshold = Field(
        None,
        description="probability at which a label is predicted; validation: the one with the best F1 there, the "
        "default with multi_label. With two labels: of the second; default: the more likely label",
    )
    samples: int = Field(3, ge=0, description="predictions shown after each evaluation")

    @model_validator(mode="after")
    def _of_the_loss(self) -> LabelOptions:
        focal = vars(self)["loss"] == "focal"
        if focal and self.label_smoothing:
            raise InvalidValue("LS3278", "label_smoothing cannot be combined with the focal loss; remove one of them")
        if not focal and "focal_gamma" in self.changed_keys:
            raise InvalidValue(
                "LS3279", "focal_gamma has an effect only with loss: focal; set it, or remove focal_gamma"
            )
        return self


class ClassificationOptions(LabelOptions):
    """The task's own keys in the run file."""

    text: str = Field("text", description="column of the text")
    text_pair: str | None = Field(None, description="column of a second text, for text pairs")
    label: str | list[str] = Field(
        "label",
        description="column of the label: integers, strings, or true and false. With multi_label: lists of labels, or "
        "several columns of 0 and 1. With regression: numbers, or several columns of numbers",
    )
    multi_label: bool = Field(False, description="each text has any number of labels, each learned as yes or no")
    regression: bool = Field(False, description="each text has one or more numbers instead of a label")
    loss: Literal["cross_entropy", "focal", "mse", "mae"] | None = Field(
        None, description="training loss; default: cross_entropy (binary with multi_label), mse with regression"
    )

    @property
    def text_columns(self) -> dict[str, str]:
        """Key of the run file -> text column."""
        pair = {} if self.text_pair is None else {"task.text_pair": self.text_pair}
        return {"task.text": self.text} | pair

    @property
    def labels(self) -> dict[str, str]:
        """Key of the run file -> column of labels or numbers."""
        label_columns = [self.label] if isinstance(self.label, str) else self.label
        return {
            "task.label" if len(label_columns) == 1 else f"task.label[{i}]": column
            for i, column in enumerate(label_columns)
        }

    @model_validator(mode="after")
    def _together(self) -> ClassificationOptions:
        if self.multi_label and self.regression:
            raise InvalidValue("LS3273", "multi_label and regression are both set; remove one of them")
        if not self.labels or len({*self.labels.values()}) < len(self.labels):
            raise InvalidValue(
                "LS3274", f"invalid label {self.label!r}; expected one column, or a list of different columns"
            )
        if len(self.labels) > 1 and not (self.multi_label or self.regression):
            raise InvalidValue(
                "LS3275",
                "several columns in label need multi_label or regression; set one of them, or name a single column",
            )
        losses = ("mse", "mae") if self.regression else ("cross_entropy", "focal")
        if self.loss not in (None, *losses):
            what = "numbers (regression)" if self.regression else "labels; for numbers set regression"
            raise InvalidValue(
                "LS3276", f"loss {self.loss!r} is not supported for {what}; expected {' or '.join(losses)}"
            )
        if self.regression:
            for key in ("class_weights", "label_smoothing", "threshold"):
                if getattr(self, key) != type(self).model_fields[key].default:
                    raise InvalidValue("LS3277", f"{key} applies to labels, and regression has none; remove it")
        return self


# -- scores ----------------------------------------------------------------------------------------------------------

# Scores of complete predictions in any order; equal to scikit-learn's and scipy's within rounding. Undefined scores (an
# AUC with one class, a correlation with a constant) are nan.
NAN = float("nan")
BINS = 15  # of calibration, of equal width: Guo et al. 2017, https://arxiv.org/abs/1706.04599


def softmax(logits: np.ndarray) -> np.ndarray:
    """Softmax over the last axis, float64."""
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def sigmoid(logits: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x)), without overflow."""
    small = np.exp(-np.abs(logits))
    return np.where(logits >= 0, 1 / (1 + small), small / (1 + small))


def average_ranks(values: np.ndarray) -> np.ndarray:
    """Ranks from 1; ties get their mean rank, as in scipy.stats.rankdata."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[place]


def roc_auc(true: np.ndarray, scores: np.ndarray) -> float:
    """Area under the ROC curve: probability that a positive example (`true`, bool [N]) scores higher than a negative
    one, ties counting half (Mann-Whitney statistic)."""
    there = int(true.sum())
    rest = len(true) - there
    if not there or not rest:
        return NAN
    return float((average_ranks(scores)[true].sum() - there * (there + 1) / 2) / (there * rest))


def _at_each_threshold(true: np.ndarray, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Distinct scores, descending; the number of examples that score at least that; and how many of these are
    positive."""
    order = np.argsort(-scores, kind="stable")
    ordered = scores[order]
    last = np.r_[np.flatnonzero(np.diff(ordered)), len(ordered) - 1]
    return ordered[last], last + 1, np.cumsum(true[order])[last]


def average_precision(true: np.ndarray, scores: np.ndarray) -> float:
    """Mean of precisions weighted by the increase in recall, without interpolation."""
    if not true.any():
        return NAN
    _, predicted_true, right = _at_each_threshold(true, scores)
    recall = right / true.sum()
    return float(np.sum(np.diff(np.r_[0.0, recall]) * right / predicted_true))


def best_threshold(true: np.ndarray, scores: np.ndarray) -> float:
    """The threshold with the highest F1, halfway to the next lower score, so that rounding moves no example across it.
    Ties: the highest threshold. 0.5 if there are no positives."""
    if not true.any():
        return 0.5
    predicted, predicted_true, right = _at_each_threshold(true, scores)
    best = int(np.argmax(2 * right / (predicted_true + true.sum())))
    below = predicted[best + 1] if best + 1 < len(predicted) else 0.0
    half = (predicted[best] + below) / 2
    return float(half if half > below else predicted[best])


def f1(right: np.ndarray, true: np.ndarray, predicted: np.ndarray) -> np.ndarray:
    """2 right / (true + predicted), and 0 if the denominator is 0, as scikit-learn's zero_division=0."""
    both = np.asarray(true + predicted, np.float64)
    return np.divide(2.0 * right, both, out=np.zeros_like(both), where=both > 0)


def mean_of_defined(values: list[float]) -> float:
    """Mean of the values that are not nan; nan if there are none."""
    numbers = [value for value in values if not np.isnan(value)]
    return float(np.mean(numbers)) if numbers else NAN


@dataclass(frozen=True)
class Reliability:
    """Predicted probabilities and observed frequencies in bins of equal width; nan in empty bins."""

    counts: np.ndarray  # int64 [BINS]
    predicted: np.ndarray  # float64 [BINS]: mean probability
    observed: np.ndarray  # float64 [BINS]: observed frequency

    @property
    def error(self) -> float:
        """Expected calibration error (ECE): mean absolute gap, weighted by examples."""
        some = self.counts > 0
        gaps = np.abs(self.predicted[some] - self.observed[some])
        return float((gaps * self.counts[some]).sum() / self.counts.sum())

    def table(self) -> dict[str, list]:
        """The bins as JSON."""
        lists = {"predicted": self.predicted.tolist(), "observed": self.observed.tolist()}
        return {"counts": self.counts.tolist()} | {
            name: [None if np.isnan(value) else value for value in values] for name, values in lists.items()
        }


def reliability(right: np.ndarray, probability: np.ndarray) -> Reliability:
    """Reliability of predicted probabilities [N], given whether each prediction was `right` [N]; bins as in
    scikit-learn's calibration_curve."""
    place = np.searchsorted(np.linspace(0, 1, BINS + 1)[1:-1], probability)
    counts = np.bincount(place, minlength=BINS)
    sums = [np.bincount(place, weights=values, minlength=BINS) for values in (probability, right)]
    predicted, observed = (np.divide(s, counts, out=np.full(BINS, NAN), where=counts > 0) for s in sums)
    return Reliability(counts, predicted, observed)


def pearson(true: np.ndarray, predicted: np.ndarray) -> float:
    """Pearson correlation."""
    if len(true) < 2 or np.ptp(true) == 0 or np.ptp(predicted) == 0:
        return NAN
    a, b = true - true.mean(), predicted - predicted.mean()
    return float(np.clip(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)), -1, 1))


def spearman(true: np.ndarray, predicted: np.ndarray) -> float:
    """Spearman correlation; nan if any value is nan, because nan has no rank."""
    if np.isnan(true).any() or np.isnan(predicted).any():
        return NAN
    return pearson(average_ranks(true), average_ranks(predicted))


def r2(true: np.ndarray, predicted: np.ndarray) -> float:
    """Share of the variance explained; negative if worse than the mean, nan if there is no variance."""
    if len(true) < 2 or np.ptp(true) == 0:  # rounding may move the mean of equal numbers off them
        return NAN
    total = float(((true - true.mean()) ** 2).sum())
    return 1 - float(((true - predicted) ** 2).sum()) / total if total else NAN


# -- the interface ---------------------------------------------------------------------------------------------------


class LabelCodes(Protocol):
    """Encodes labels or numbers of rows in the form stored beside their tokens."""

    names: list[str]
    values: list[Any]  # label values of rows, in code order; empty for numbers

    def reordered(self, names: list[str], values: list[Any]) -> LabelCodes:
        """Return these labels in another order, possibly with labels that no row has; numbers unchanged."""

    def of(self, rows: dict[str, list]) -> Any:
        """Labels or numbers of some rows, given by column."""

    def counts(self, dataset: Dataset) -> list[int]:
        """Number of examples per label in a split; empty for numbers."""


class Objective(ABC):
    """A way to read and learn labels. All sums are over examples."""

    problem: ClassVar[str]  # transformers' `problem_type`
    metric_names: ClassVar[tuple[str, ...]]  # names that `metrics` may return, with any options

    def __init__(self, options: ClassificationOptions, names: list[str], counts: list[int], examples: int) -> None:
        """`counts`: examples per label among the `examples` of train."""
        self.options, self.names = options, names
        self.weights = of_labels(options, names, counts, examples) if counts else None
        self._weights_there: Tensor | None = None

    # -- before any process ------------------------------------------------------------------------------------------

    @classmethod
    def readable(cls, dataset: Dataset, options: ClassificationOptions) -> Dataset:
        """Convert the labels of a split of complete rows to their canonical form."""
        return dataset

    @classmethod
    @abstractmethod
    def codes(cls, splits: dict[str, Dataset], options: ClassificationOptions, name: str) -> LabelCodes:
        """Labels of all splits and their codes. Errors: `RunError` with the row of an invalid label or number."""

    @classmethod
    @abstractmethod
    def feature(cls) -> Any:
        """The `datasets` feature that stores labels."""

    @classmethod
    def cut(cls, codes: LabelCodes, train: Dataset, share: float, seed: Any, key: str) -> tuple[Dataset, Dataset]:
        """Hold out a share of the training split, as `lm_documents.cut`. Errors: `RunError`."""
        from lockstep.data import lm_documents

        return lm_documents.cut(train, share, seed, key)

    # -- training ----------------------------------------------------------------------------------------------------

    @abstractmethod
    def targets(self, columns: Columns, rows: np.ndarray) -> np.ndarray:
        """Targets of the examples at `rows`: [B] or [B, C]. A row that is entirely IGNORED is not an example."""

    @abstractmethod
    def count(self, columns: Columns, rows: np.ndarray) -> float:
        """Loss divisor of these examples, weighted; exact in any summation order."""

    @abstractmethod
    def targets_in_batch(self, targets: Tensor) -> float:
        """Loss divisor, computed from a micro-batch's targets."""

    @abstractmethod
    def loss_sum(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Training loss of a micro-batch: float32 scalar. `logits`: float32 [B, C]."""

    # -- evaluation --------------------------------------------------------------------------------------------------

    @abstractmethod
    def score(self, logits: Tensor, targets: Tensor) -> Sums:
        """Sums over the examples of a batch, including the plain loss (no weights or smoothing)."""

    @abstractmethod
    def metrics(self, sums: Sums, threshold: float | None) -> dict[str, float]:
        """Metrics of a split. `threshold`: chosen earlier, if any."""

    @property
    def score_names(self) -> tuple[str, ...]:
        """Names that `metrics` may return with this run's options."""
        return self.metric_names

    @abstractmethod
    def tables(self, sums: Sums, threshold: float | None) -> dict[str, Any]:
        """Report content of a split beside its metrics."""

    @abstractmethod
    def metric_inputs(self, sums: Sums) -> tuple[np.ndarray, np.ndarray]:
        """Predictions and labels of a split, as passed to the functions of `metrics`."""

    @abstractmethod
    def dummy_predictions(self) -> tuple[np.ndarray, np.ndarray]:
        """Dummy predictions and labels that contain every label."""

    # -- answers -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def answers(self, logits: Tensor, threshold: float | None) -> list[dict[str, Any]]:
        """The model's answer for each row: JSON by name."""

    @classmethod
    @abstractmethod
    def format_answer(cls, answer: Mapping[str, Any]) -> str:
        """Format an answer for display."""

    def short_answer(self, answer: Mapping[str, Any]) -> str:
        """Format an answer briefly, for the list of samples."""
        return self.format_answer(answer)

    @abstractmethod
    def format_target(self, targets: Tensor) -> str:
        """Format the labels or numbers of an example for display."""

    @property
    def fixed_threshold(self) -> float | None:
        """The threshold set in the run file, if any."""
        return self.options.threshold if isinstance(self.options.threshold, float) else None

    @property
    def chooses_threshold(self) -> bool:
        """Whether the threshold is chosen on the validation split."""
        return self.options.threshold == "validation"

    def threshold(self, true: np.ndarray, probabilities: np.ndarray, chosen: float | None) -> float | None:
        """The threshold for a split: fixed, chosen earlier, or the best one on this split."""

        if not self.chooses_threshold:
            return self.fixed_threshold
        return best_threshold(true, probabilities) if chosen is None else chosen

    def weights_at(self, logits: Tensor) -> Tensor | None:
        """Label weights on the logits' device: float32 [C]."""
        import torch

        from lockstep.distributed.torch_internals import to_device

        if self.weights is None:
            return None
        if self._weights_there is None or self._weights_there.device != logits.device:
            self._weights_there = to_device(torch.tensor(self.weights, dtype=torch.float32), logits.device)
        return self._weights_there
