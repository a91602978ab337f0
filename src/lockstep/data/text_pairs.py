"""Encodes related texts for embedding models (two or more columns of texts, or two and a score), in the cache.

In: rows of a data set and a tokenizer. Out: a row's texts concatenated in `input_ids`, with their lengths in `sizes`.
Equal texts of a split have equal ids, so that copies of a text in other rows are not used as its negatives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep.config.run import RunError
from lockstep.data import lm_documents, splitting, usable_rows
from lockstep.data.arrow_cache import Columns, encode, padded
from lockstep.data.batch import IGNORED

if TYPE_CHECKING:
    from datasets import Dataset

ONE = 2**30  # fixed-point representation of a score of 1: targets are integers
_NUMBERS = "numbers of the texts"  # internal column


def number(targets: Any) -> Any:
    """Text ids of non-anchor texts, from their targets."""
    return IGNORED - 1 - targets


def whole(
    dataset: Dataset,
    columns: Mapping[str, str],
    score: str | None,
    ends: tuple[float, float],
    split: str,
    name: str,
    drop: bool,
) -> Dataset:
    """Rows that have all texts, and a score if there is a score column. Errors: `RunError` for incomplete rows unless
    `drop` is set, and for scores that are not numbers within `ends`."""
    rows = usable_rows.texts(dataset, columns, split, name, drop)
    if score is None:
        return rows
    usable_rows.check_columns(rows, {"task.score": score}, split, name)
    rows = usable_rows.complete(rows, {"task.score": score}, split, name, drop)
    for first, part in usable_rows.lists(rows, score):
        for row, value in enumerate(part, first):
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not ends[0] <= value <= ends[1]:
                remedy = "" if not number else "; set the range of the scores, such as task.score_range=[0,5]"
                raise RunError(
                    "LS2290",
                    f"task.score: row {row} of the {split} split of {name} holds {str(value)[:60]!r} in column "
                    f"{score!r}, which is not a number from {ends[0]:g} to {ends[1]:g}{remedy}",
                )
    return rows


def without_own_negatives(dataset: Dataset, columns: list[str]) -> Dataset:
    """Rows whose negatives all differ from their anchor and positive, ignoring white space."""
    anchor, positive, *negatives = (splitting.hashes(dataset, [column]) for column in columns)
    own = np.zeros(len(dataset), dtype=bool)
    for negative in negatives:
        own |= (negative == anchor).all(axis=1) | (negative == positive).all(axis=1)
    return dataset.select(np.flatnonzero(~own)) if own.any() else dataset


def refuse_own_negatives(
    dataset: Dataset, columns: Mapping[str, str], numbers: Sequence[np.ndarray], split: str, name: str
) -> None:
    """Refuse a negative that equals its row's anchor or positive. Errors: `RunError`."""
    keys = list(columns)
    for key, negative in zip(keys[2:], numbers[2:], strict=True):
        for other, theirs in zip(keys[:2], numbers[:2], strict=True):
            if len(rows := np.flatnonzero(negative == theirs)):
                text = str(dataset[int(rows[0])][columns[key]])[:60]
                raise RunError(
                    "LS2291",
                    f"{key}: the same text as {other} in {len(rows)} of {len(dataset)} rows of the {split} split of "
                    f"{name}, first in row {rows[0]}: {text!r}. Such a row teaches nothing; correct or remove these "
                    "rows, or set data.drop_unusable=true to leave them out",
                )


def read(tokenizer: Any, texts: list[str], most: int) -> list[list[int]]:
    """Tokens of each text, at least one."""
    instead = lm_documents.end_or_padding(tokenizer)
    token_ids = tokenizer(texts, truncation=True, max_length=most, return_attention_mask=False)["input_ids"]
    return [ids or [instead] for ids in token_ids]


def encoded(
    dataset: Dataset,
    texts: list[str],
    numbers: np.ndarray,
    score: str | None,
    ends: tuple[float, float],
    tokenizer: Any,
    most: int,
    key: str,
) -> str:
    """Encode a split to shards. `numbers`: ids of each row's texts, int64 [N, sides]."""
    import datasets

    lists = datasets.List(datasets.Value("int32"))
    features = datasets.Features(
        {"input_ids": lists, "sizes": lists, "numbers": datasets.List(datasets.Value("int64"))}
        | {"width": datasets.Value("int64")}
        | ({"score": datasets.Value("int64")} if score is not None else {})
    )

    def encoder(rows: dict[str, list]) -> dict[str, list]:
        sides = [read(tokenizer, rows[column], most) for column in texts]
        each = list(zip(*sides, strict=True))
        columns = {
            "input_ids": [[token for ids in row for token in ids] for row in each],
            "sizes": [[len(ids) for ids in row] for row in each],
            "numbers": rows[_NUMBERS],
            "width": [max(len(ids) for ids in row) for row in each],
        }
        if score is not None:
            low, high = ends
            columns["score"] = [round((value - low) / (high - low) * ONE) for value in rows[score]]
        return columns

    columns = [*texts, *([score] if score is not None else [])]
    numbered = dataset.select_columns(columns).add_column(_NUMBERS, numbers.tolist())
    return encode(numbered, encoder, features, key)


def true_of(columns: Columns, rows: np.ndarray) -> np.ndarray:
    """Scores of these pairs, from 0 to 1: float64 [B]; or the ids of their texts: int64 [B, sides]."""
    if "score" in columns.names:
        return np.asarray(columns.flat("score")[rows], dtype=np.float64) / ONE
    return np.asarray(columns.ragged("numbers").padded(rows, 0)[0], dtype=np.int64)


def inputs_of(columns: Columns, rows: np.ndarray, pad: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Model inputs of these rows' texts, int64 [sides x B, T] each: all first texts, then all second texts, ...; and
    targets, int64 [sides x B]. The target of a first text is its score or id; other texts have their id, mapped below
    IGNORED."""
    sizes, _ = columns.ragged("sizes").padded(rows, 0)  # [B, sides]
    numbers, _ = columns.ragged("numbers").padded(rows, 0)
    tokens = columns.ragged("input_ids")
    count, sides = sizes.shape
    texts = [np.split(tokens.row(int(row)), np.cumsum(of)[:-1]) for row, of in zip(rows, sizes, strict=True)]
    ids, mask = padded([each[side] for side in range(sides) for each in texts], pad)
    if "score" in columns.names:
        targets = np.concatenate([columns.flat("score")[rows], np.full((sides - 1) * count, IGNORED)])
    else:
        targets = np.concatenate([numbers[:, 0], number(numbers[:, 1:].T.ravel())])
    return {"input_ids": ids, "attention_mask": mask}, targets.astype(np.int64)
