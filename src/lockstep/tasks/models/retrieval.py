"""Scores of embeddings that need all of a split: at which rank the right text is found among all others.

In: vectors and numbers that ranks have put into places of their own, and zeros elsewhere, so that a sum gathers them.
Out: recall, reciprocal rank and nDCG as of sentence-transformers' InformationRetrievalEvaluator.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

SHARP = 2.0**20  # sums are rounded to its inverse: what is gathered is kept to 2^-40
RECALLS = (1, 5, 10)
CURVE = (1, 2, 3, 5, 7, 10, 20, 30, 50, 70, 100)  # where a report shows recall
TOP = 10  # of the ranks that reciprocal rank and nDCG look at
NAMES = (*(f"recall_at_{within}" for within in RECALLS), f"mrr_at_{TOP}", f"ndcg_at_{TOP}")
_AT_ONCE = 256  # queries


def numbered(sides: list[np.ndarray]) -> list[np.ndarray]:
    """Numbers of texts from their hashes [N, 2], side by side: the same number for the same text, int64 [N] each."""
    every = np.concatenate(sides)
    order = np.lexsort((every[:, 1], every[:, 0]))
    numbers = np.empty(len(every), dtype=np.int64)
    numbers[order] = np.cumsum(np.r_[False, (every[order][1:] != every[order][:-1]).any(axis=1)])
    return np.split(numbers, np.cumsum([len(side) for side in sides])[:-1])


def ranks(anchors: np.ndarray, answers: np.ndarray, queries: np.ndarray, texts: np.ndarray) -> tuple[np.ndarray, ...]:
    """The rank, from 0, of the right texts. `anchors` and `answers` are unit vectors [N, H] of pairs; `queries` and
    `texts` are the numbers of the texts that they encode [N]. A text that occurs in several pairs is one query, or one
    text. Returns query, from 0, and rank of every right text: int64 [P] each. Of equal scores the first text comes
    first."""
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
    """Ranks of the right texts, from the arrays gathered under these names."""
    return ranks(*(gathered[name] for name in ("anchors", "positives", "queries", "texts")))


def dummy_predictions(shape: tuple[int, int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Unit vectors that stand for nothing, float64 [N, texts, H], and numbers of their texts, int64 [N, texts]."""
    vectors = np.cos(np.arange(math.prod(shape))).reshape(shape)
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True), np.arange(shape[0] * shape[1]).reshape(shape[:2])


def recall(query: np.ndarray, at: np.ndarray, within: int) -> float:
    """The mean, over queries, of the share of its right texts that stand within the first so many."""
    right = np.bincount(query, at < within)
    return float((right / np.bincount(query)).mean())


def scores_of(gathered: Mapping[str, np.ndarray]) -> dict[str, float]:
    """`NAMES`, of what was gathered; NaN where a vector is none: nothing is more alike than that, and so all that is
    right would come first."""
    if not all(np.isfinite(gathered[name]).all() for name in ("anchors", "positives")):
        return dict.fromkeys(NAMES, math.nan)
    return scores(*ranks_of(gathered))


def scores(query: np.ndarray, at: np.ndarray) -> dict[str, float]:
    """The retrieval metrics of the ranks that `ranks` returns."""
    right = np.bincount(query)
    first = np.full(len(right), np.iinfo(np.int64).max)
    np.minimum.at(first, query, at)
    reciprocal = np.where(first < TOP, 1.0 / (1.0 + first), 0.0)
    gain = np.bincount(query, np.where(at < TOP, 1.0 / np.log2(at + 2.0), 0.0))
    best = np.cumsum(1.0 / np.log2(np.arange(TOP) + 2.0))[np.minimum(right, TOP) - 1]
    recalls = [recall(query, at, within) for within in RECALLS]
    return dict(zip(NAMES, [*recalls, float(reciprocal.mean()), float((gain / best).mean())], strict=True))
