"""The formulas of scores beside scikit-learn and scipy, where these are installed, and beside their definitions."""

import warnings
from collections.abc import Iterator

import numpy as np
import pytest

from lockstep.tasks.objectives import objective


@pytest.fixture(autouse=True)
def _their_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def drawn(seed: int, count: int = 60, ties: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Return labels (bool) and scores that correlate with them; with `ties`, many scores are equal."""
    random = np.random.default_rng(seed)
    true = random.random(count) < 0.3
    found = objective.sigmoid(random.normal(size=count) + true)
    return true, np.round(found, 1) if ties else found


# -- by definition ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ties", [False, True])
def test_roc_auc_is_the_share_of_ordered_pairs(ties: bool) -> None:
    true, found = drawn(0, ties=ties)
    pairs = [(a > b) + 0.5 * (a == b) for a in found[true] for b in found[~true]]
    assert objective.roc_auc(true, found) == pytest.approx(np.mean(pairs), abs=1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_the_threshold_has_the_best_f1_and_lies_between_scores(seed: int) -> None:
    true, found = drawn(seed, ties=seed % 2 == 1)
    chosen = objective.best_threshold(true, found)

    def f1_at(threshold: float) -> float:
        given = found >= threshold
        return float(2 * (given & true).sum() / (given.sum() + true.sum()))

    assert f1_at(chosen) == pytest.approx(max(f1_at(each) for each in found), abs=1e-12)
    assert chosen not in found
    assert 0 < chosen < 1


def test_thresholds_between_adjacent_floats() -> None:
    """Half way between them rounds to the lower one, which must not be given the label."""
    low = 0.5
    high = float(np.nextafter(low, 1))
    assert objective.best_threshold(np.array([True, False]), np.array([high, low])) == high
    assert objective.best_threshold(np.array([False, False]), np.array([0.9, 0.8])) == 0.5


def test_undefined_scores_are_nan() -> None:
    some = np.array([0.1, 0.9])
    assert np.isnan(objective.roc_auc(np.array([True, True]), some))
    assert np.isnan(objective.average_precision(np.array([False, False]), some))
    assert np.isnan(objective.pearson(np.array([1.0, 1.0]), some))
    assert np.isnan(objective.spearman(some, np.array([2.0, 2.0])))
    assert np.isnan(objective.r2(np.array([1.0, 1.0]), some))
    for constant in (0.1, 1 / 3, 1e8 + 0.1, -7e-5):  # whose mean is not always the number itself
        same, random = np.full(7, constant), np.random.default_rng(0).normal(size=7)
        assert np.isnan(objective.r2(same, random))
        for correlation in (objective.pearson, objective.spearman):
            assert np.isnan(correlation(same, random))
            assert np.isnan(correlation(random, same))
    assert np.isnan(objective.r2(some[:1], some[:1]))
    assert np.isnan(objective.pearson(some[:1], some[:1]))
    assert objective.mean_of_defined([1.0, objective.NAN]) == 1.0
    assert np.isnan(objective.mean_of_defined([objective.NAN]))


def test_calibration_is_counted_by_bins() -> None:
    found = objective.reliability(np.array([1, 0, 1, 1]), np.array([0.01, 0.02, 0.5, 1.0]))
    assert found.counts.sum() == 4
    assert found.counts[[0, 7, 14]].tolist() == [2, 1, 1]
    assert found.error == pytest.approx((2 * abs(0.015 - 0.5) + 0.5 + 0.0) / 4)
    table = found.table()
    assert table["observed"][0] == 0.5
    assert table["observed"][1] is None


def test_no_score_overflows() -> None:
    with np.errstate(all="raise", under="ignore"):
        assert objective.sigmoid(np.array([-2000.0, 0.0, 2000.0])).tolist() == [0.0, 0.5, 1.0]
        assert objective.softmax(np.array([[2000.0, -2000.0]])).tolist() == [[1.0, 0.0]]


# -- beside the field's libraries ------------------------------------------------------------------------------------


@pytest.mark.extras
@pytest.mark.parametrize("seed", range(6))
def test_scores_match_scikit_learn(seed: int) -> None:
    theirs = pytest.importorskip("sklearn.metrics")
    calibration = pytest.importorskip("sklearn.calibration")
    true, found = drawn(seed, ties=seed % 2 == 1)
    assert objective.roc_auc(true, found) == pytest.approx(theirs.roc_auc_score(true, found), abs=1e-12)
    wanted = theirs.average_precision_score(true, found)
    assert objective.average_precision(true, found) == pytest.approx(wanted, abs=1e-12)
    observed, predicted = calibration.calibration_curve(true, found, n_bins=objective.BINS)
    mine = objective.reliability(true, found)
    some = mine.counts > 0
    assert mine.observed[some] == pytest.approx(observed, abs=1e-12)
    assert mine.predicted[some] == pytest.approx(predicted, abs=1e-12)


@pytest.mark.extras
@pytest.mark.parametrize("seed", range(6))
def test_scores_match_scipy(seed: int) -> None:
    theirs = pytest.importorskip("scipy.stats")
    metrics = pytest.importorskip("sklearn.metrics")
    random = np.random.default_rng(seed)
    true = np.round(random.normal(size=50), seed % 3)  # with ties, and without
    predicted = true * 0.3 + random.normal(size=50)
    assert objective.pearson(true, predicted) == pytest.approx(theirs.pearsonr(true, predicted).statistic, abs=1e-12)
    assert objective.spearman(true, predicted) == pytest.approx(theirs.spearmanr(true, predicted).statistic, abs=1e-12)
    assert objective.r2(true, predicted) == pytest.approx(metrics.r2_score(true, predicted), abs=1e-12)
    assert objective.average_ranks(true) == pytest.approx(theirs.rankdata(true), abs=1e-12)
