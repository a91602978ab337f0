"""Scores of predictions that are all there: areas, F1, calibration, correlations. Plain formulas of numpy.

In: what is true and what was predicted, in any order. Out: numbers, equal to those of scikit-learn and scipy to
rounding (tests/tasks/test_scores.py compares them). What is not defined (an area where every example is of one kind, a
correlation with a constant) is nan; scikit-learn warns of it or refuses.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

NAN = float("nan")
BINS = 15  # of calibration, of equal width: Guo et al. 2017, https://arxiv.org/abs/1706.04599


def softmax(logits: np.ndarray) -> np.ndarray:
    """Over the last axis: float64."""
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def sigmoid(logits: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x)), without overflow."""
    small = np.exp(-np.abs(logits))
    return np.where(logits >= 0, 1 / (1 + small), small / (1 + small))


def average_ranks(values: np.ndarray) -> np.ndarray:
    """Ranks from 1; equal values share the mean of theirs, as scipy.stats.rankdata has them."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[place]


def roc_auc(true: np.ndarray, scores: np.ndarray) -> float:
    """Area under the ROC curve: how often an example that is (bool [N]) scores higher than one that is not, ties being
    half; the statistic of Mann and Whitney."""
    there = int(true.sum())
    rest = len(true) - there
    if not there or not rest:
        return NAN
    return float((average_ranks(scores)[true].sum() - there * (there + 1) / 2) / (there * rest))


def _at_each_threshold(true: np.ndarray, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The different scores, the highest first; how many examples score at least that, and how many of these are."""
    order = np.argsort(-scores, kind="stable")
    ordered = scores[order]
    last = np.r_[np.flatnonzero(np.diff(ordered)), len(ordered) - 1]
    return ordered[last], last + 1, np.cumsum(true[order])[last]


def average_precision(true: np.ndarray, scores: np.ndarray) -> float:
    """The mean of precisions, each weighted by the recall that it adds; nothing is interpolated."""
    if not true.any():
        return NAN
    _, given, right = _at_each_threshold(true, scores)
    recall = right / true.sum()
    return float(np.sum(np.diff(np.r_[0.0, recall]) * right / given))


def best_threshold(true: np.ndarray, scores: np.ndarray) -> float:
    """The threshold of the highest F1, half way down to the next score, so that rounding moves no example across it; of
    equal ones the highest. 0.5 where nothing is true."""
    if not true.any():
        return 0.5
    found, given, right = _at_each_threshold(true, scores)
    best = int(np.argmax(2 * right / (given + true.sum())))
    below = found[best + 1] if best + 1 < len(found) else 0.0
    half = (found[best] + below) / 2
    return float(half if half > below else found[best])


def f1(right: np.ndarray, true: np.ndarray, given: np.ndarray) -> np.ndarray:
    """2 right / (true + given), and 0 where there is neither, as scikit-learn's zero_division=0."""
    both = np.asarray(true + given, np.float64)
    return np.divide(2.0 * right, both, out=np.zeros_like(both), where=both > 0)


def mean_of_defined(values: list[float]) -> float:
    """The mean of those that are not nan; nan of none."""
    known = [value for value in values if not np.isnan(value)]
    return float(np.mean(known)) if known else NAN


@dataclass(frozen=True)
class Reliability:
    """Predicted probabilities beside what came true, in bins of equal width; nan in those that are empty."""

    counts: np.ndarray  # int64 [BINS]
    predicted: np.ndarray  # float64 [BINS]: mean probability
    observed: np.ndarray  # float64 [BINS]: share that came true

    @property
    def error(self) -> float:
        """The expected calibration error (ECE): the mean distance of the two, weighted by examples."""
        some = self.counts > 0
        apart = np.abs(self.predicted[some] - self.observed[some])
        return float((apart * self.counts[some]).sum() / self.counts.sum())

    def table(self) -> dict[str, list]:
        """As JSON has it."""
        lists = {"predicted": self.predicted.tolist(), "observed": self.observed.tolist()}
        return {"counts": self.counts.tolist()} | {
            name: [None if np.isnan(value) else value for value in values] for name, values in lists.items()
        }


def reliability(right: np.ndarray, probability: np.ndarray) -> Reliability:
    """Of events that were given a probability [N], and whether they came true [N]; bins as scikit-learn's
    calibration_curve has them."""
    place = np.searchsorted(np.linspace(0, 1, BINS + 1)[1:-1], probability)
    counts = np.bincount(place, minlength=BINS)
    sums = [np.bincount(place, weights=values, minlength=BINS) for values in (probability, right)]
    predicted, observed = (np.divide(s, counts, out=np.full(BINS, NAN), where=counts > 0) for s in sums)
    return Reliability(counts, predicted, observed)


def pearson(true: np.ndarray, predicted: np.ndarray) -> float:
    """The correlation of two columns."""
    if len(true) < 2 or np.ptp(true) == 0 or np.ptp(predicted) == 0:
        return NAN
    a, b = true - true.mean(), predicted - predicted.mean()
    return float(np.clip(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)), -1, 1))


def spearman(true: np.ndarray, predicted: np.ndarray) -> float:
    """The correlation of their ranks."""
    return pearson(average_ranks(true), average_ranks(predicted))


def r2(true: np.ndarray, predicted: np.ndarray) -> float:
    """The share of the variance that is explained; below 0 for what is worse than the mean; nan where there is none to
    explain."""
    if len(true) < 2 or np.ptp(true) == 0:  # the mean of equal numbers is not always that number
        return NAN
    total = float(((true - true.mean()) ** 2).sum())
    return 1 - float(((true - predicted) ** 2).sum()) / total if total else NAN
