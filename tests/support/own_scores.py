"""User metrics, correct and wrong ones, for the tests of `metrics`."""

from typing import Any

import numpy as np

SEEN: list[tuple[np.ndarray, np.ndarray]] = []  # arguments of `order` in this process


def order(predictions: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Numbers that depend on the order and number of the rows."""
    SEEN.append((predictions, labels))
    place = np.arange(1, len(labels) + 1) / len(labels)
    found = {"rows": len(labels), "in_order": float((place * predictions.reshape(len(labels), -1)[:, 0]).sum())}
    predictions[:] = 0  # others must not see this
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


# -- other tasks: their arguments, and their own scores recomputed
# --------------------------------------------------------


def _given(predictions: np.ndarray, labels: np.ndarray, of_each: Any) -> dict[str, float]:
    """Number of rows, and a number that depends on their order."""
    SEEN.append((predictions, labels))
    place = np.arange(1, len(labels) + 1) / len(labels)
    return {"rows": len(labels), "in_order": float((place * np.asarray(of_each, dtype=np.float64)).sum())}


def tokens(predictions: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    there = labels >= 0
    assert ((predictions >= 0) == there).all()
    right = (predictions == labels) & there
    return _given(predictions, labels, predictions.sum(1)) | {"own_accuracy": float(right.sum() / there.sum())}


def tags(predictions: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    from lockstep.tasks.token_classification import entities, parts

    pairs = [(one, other) for row in zip(predictions, labels, strict=True) for one, other in zip(*row, strict=True)]
    found, there = ([entities(list(map(parts(row).get, row))) for row in rows] for rows in (predictions, labels))
    both = sum(len(one & other) for one, other in zip(found, there, strict=True))
    count = sum(map(len, found)) + sum(map(len, there))
    scores = {"own_accuracy": sum(a == b for a, b in pairs) / len(pairs), "own_f1": 2 * both / count if count else 0.0}
    return _given(predictions, labels, [len(row) for row in labels]) | scores


def texts(predictions: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    from sacrebleu.metrics import BLEU, CHRF

    sizes = [len(a) + 7 * len(b) for a, b in zip(predictions, labels, strict=True)]
    both = {"own_bleu": BLEU(force=True), "own_chrf": CHRF()}
    scores = {name: metric.corpus_score(predictions.tolist(), [labels.tolist()]).score for name, metric in both.items()}
    return _given(predictions, labels, sizes) | scores


def answers(predictions: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    from lockstep.tasks.models.qa_spans import scores

    exact, f1 = np.mean([scores(one, right) for one, right in zip(predictions, labels, strict=True)], axis=0)
    told = {"own_exact": 100 * float(exact), "own_f1": 100 * float(f1)}
    return _given(predictions, labels, [len(one) for one in predictions]) | told


def vectors(predictions: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    asked, right = predictions[:, 0], predictions[:, 1:]
    cosines = (asked[:, None] * right).sum(-1)  # [N, texts - 1]
    among = asked @ right[:, 0].T
    first = labels[among.argmax(1), 1]  # index of the nearest text
    told = {"own_triplets": float((cosines[:, :1] > cosines[:, 1:]).mean())}
    return _given(predictions, labels, cosines[:, 0]) | told | {"own_recall": float((first == labels[:, 1]).mean())}


def cosines(predictions: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    return _given(predictions, labels, predictions) | {"own_pearson": float(np.corrcoef(predictions, labels)[0, 1])}


def rewards(predictions: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    apart = predictions[:, 0] - predictions[:, 1]
    told = {"own_accuracy": float(((apart > 0) == (labels == 0)).mean()), "own_margin": float(apart.mean())}
    return _given(predictions, labels, predictions[:, 0]) | told


def emptying(predictions: np.ndarray, labels: np.ndarray) -> float:
    for row in predictions:
        row.clear()
    return 0.0
