"""Retrieval metrics of embeddings over a whole split: the rank of the matching text among all texts.

In: vectors and text ids, each in its own slot of an array of zeros, so that a sum over ranks gathers them. Out: recall,
reciprocal rank and nDCG as in sentence-transformers' InformationRetrievalEvaluator.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

SHARP = 2.0**20  # sums are rounded to multiples of 1 / SHARP: gathered values keep a precision of 2^-40
RECALLS = (1, 5, 10)
CURVE = (1, 2, 3, 5, 7, 10, 20, 30, 50, 70, 100)  # values of k for recall@k in a report
TOP = 10  # cutoff of reciprocal rank and nDCG
NAMES = (*(f"recall_at_{within}" for within in RECALLS), f"mrr_at_{TOP}", f"ndcg_at_{TOP}")
_AT_ONCE = 256  # queries per batch


def numbered(sides: list[np.ndarray]) -> list[np.ndarray]:
    """Map text hashes [N, 2] to ids shared across sides: equal texts get equal ids, int64 [N] per side."""
    every = np.concatenate(sides)
    order = np.lexsort((every[:, 1], every[:, 0]))
    numbers = np.empty(len(every), dtype=np.int64)
    numbers[order] = np.cumsum(np.r_[False, (every[order][1:] != every[order][:-1]).any(axis=1)])
    return np.split(numbers, np.cumsum([len(side) for side in sides])[:-1])


def ranks(anchors: np.ndarray, answers: np.ndarray, queries: np.ndarray, texts: np.ndarray) -> tuple[np.ndarray, ...]:
    """Rank, from 0, of each correct text among all texts.

    `anchors` and `answers`: unit vectors [N, H] of pairs; `queries` and `texts`: ids [N] of the texts they encode. A
    text that occurs in several pairs counts once. Returns the query index and the rank of every correct text: int64 [P]
    each. Ties are broken by text order."""
    _, first_query, query_of = np.unique(queries, return_index=True, return_inverse=True)
    _, first_text, text_of = np.unique(texts, return_index=True, return_inverse=True)
    pairs = np.unique(np.stack([query_of, text_of], 1), axis=0)  # by query
    among = answers[first_text]
    at = np.empty(len(pairs), dtype=np.int64)
    for start in range(0, len(first_query), _AT_ONCE):
        scores = anchors[first_query[start : start + _AT_ONCE]] @ among.T  # [Q, D]
        these = np.flatnonzero((pairs[:, 0] >= start) & (pairs[:, 0] < start + _AT_ONCE))
        of = scores[pairs[these, 0] - start]  # [P, D]
        own = of[np.arange(len(these)), pairs[these, 1]][:, None]
        before = (of > own) | ((of == own) & (np.arange(len(among)) < pairs[these, 1][:, None]))
        at[these] = before.sum(1)
    return pairs[:, 0], at


def ranks_of(gathered: Mapping[str, np.ndarray]) -> tuple[np.ndarray, ...]:
    """Return the `ranks` of the gathered arrays."""
    return ranks(*(gathered[name] for name in ("anchors", "positives", "queries", "texts")))


def dummy_predictions(shape: tuple[int, int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Dummy unit vectors, float64 [N, texts, H], and ids of their texts, int64 [N, texts]."""
    vectors = np.cos(np.arange(math.prod(shape))).reshape(shape)
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True), np.arange(shape[0] * shape[1]).reshape(shape[:2])


def recall(query: np.ndarray, at: np.ndarray, within: int) -> float:
    """Mean over queries of the share of their correct texts ranked below `within`."""
    right = np.bincount(query, at < within)
    return float((right / np.bincount(query)).mean())


def scores_of(gathered: Mapping[str, np.ndarray]) -> dict[str, float]:
    """The metrics `NAMES` of the gathered arrays; NaN if any vector is not finite, because comparisons with NaN would
    rank every correct text first."""
    if not all(np.isfinite(gathered[name]).all() for name in ("anchors", "positives")):
        return dict.fromkeys(NAMES, math.nan)
    return scores(*ranks_of(gathered))


def scores(query: np.ndarray, at: np.ndarray) -> dict[str, float]:
    """Retrieval metrics of the ranks that `ranks` returns."""
    right = np.bincount(query)
    first = np.full(len(right), np.iinfo(np.int64).max)
    np.minimum.at(first, query, at)
    reciprocal = np.where(first < TOP, 1.0 / (1.0 + first), 0.0)
    gain = np.bincount(query, np.where(at < TOP, 1.0 / np.log2(at + 2.0), 0.0))
    best = np.cumsum(1.0 / np.log2(np.arange(TOP) + 2.0))[np.minimum(right, TOP) - 1]
    recalls = [recall(query, at, within) for within in RECALLS]
    return dict(zip(NAMES, [*recalls, float(reciprocal.mean()), float((gain / best).mean())], strict=True))
