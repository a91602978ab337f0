"""Metrics of a user's own, right and wrong ones, for the tests of `metrics`."""

from typing import Any

import numpy as np

SEEN: list[tuple[np.ndarray, np.ndarray]] = []  # what `order` was given, in this process


def order(predictions: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Numbers that another order of the rows, or a row too many, would change."""
    SEEN.append((predictions, labels))
    place = np.arange(1, len(labels) + 1) / len(labels)
    found = {"rows": len(labels), "in_order": float((place * predictions.reshape(len(labels), -1)[:, 0]).sum())}
    predictions[:] = 0  # must not be seen by others
    return found


def mean_of_predictions(predictions: np.ndarray, labels: np.ndarray) -> np.float64:
    return predictions.mean()


def drawing(predictions: np.ndarray, labels: np.ndarray) -> float:
    return float(np.random.random())


def failing(predictions: np.ndarray, labels: np.ndarray) -> float:
    return float(predictions[len(labels) + 1, 0])


def of_one(predictions: np.ndarray) -> float:
    return 0.0


def telling(predictions: np.ndarray, labels: np.ndarray) -> Any:
    return "good"


def accuracy(predictions: np.ndarray, labels: np.ndarray) -> float:
    return 0.0


def named_badly(predictions: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    return {"top 5": 1.0}


def truth(predictions: np.ndarray, labels: np.ndarray) -> bool:
    return True


number = 3
