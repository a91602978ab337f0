"""Texts of many megabytes, tokenised in parts that overlap: a tokenizer needs some hundred bytes for each one of text.

In: a fast tokenizer and a text. Out: the tokens that it makes of the whole text, and where each of them ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PART = 400_000  # characters that are tokenised at once
_OVERLAP = 4_000  # characters that two parts share
_ALIKE = 25  # tokens on each side of a seam that both parts must agree on
_PIECE = 100_000  # characters of a text, about, that a tokenizer is trained on at once


def tokenized(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[np.ndarray, np.ndarray | None]:
    """The tokens of a text, int32 [N], special ones among them, and the character that each ends before, int64 [N],
    never less than that of the token before it; None where the tokenizer does not tell."""
    if tokenizer.is_fast and len(text) > PART + _OVERLAP and (found := _in_parts(tokenizer, text)) is not None:
        return found
    found = tokenizer(text, return_attention_mask=False, return_offsets_mapping=tokenizer.is_fast, verbose=False)
    return np.asarray(found["input_ids"], dtype=np.int32), ends_of(found.get("offset_mapping"))


def ends_of(offsets: list[tuple[int, int]] | None) -> np.ndarray | None:
    """Where each token ends, int64 [N], never before the one in front of it; None stays None."""
    if offsets is None:
        return None
    return np.maximum.accumulate(np.asarray(offsets, dtype=np.int64).reshape(-1, 2)[:, 1])


def pieces(text: str) -> Iterator[str]:
    """A text for training a tokenizer, a long one cut before single spaces between letters or digits. A pre-tokenizer
    that parts words there, as all that are trained here do, finds the same words with the same counts."""
    at = 0
    while len(text) - at > 2 * _PIECE:
        seam = text.find(" ", at + _PIECE)
        while 0 < seam < len(text) - 1 and not (text[seam - 1].isalnum() and text[seam + 1].isalnum()):
            seam = text.find(" ", seam + 1)
        if not 0 < seam < len(text) - 1:
            break
        yield text[at:seam]
        at = seam
    yield text[at:]


def _in_parts(tokenizer: Any, text: str) -> tuple[np.ndarray, np.ndarray] | None:
    """None where two parts do not agree on what they share, or special tokens are not just put around a text."""
    around = _around(tokenizer)
    if around is None:
        return None
    ids, ends = _part(tokenizer, text, 0)
    done: list[tuple[np.ndarray, np.ndarray]] = []
    start = 0
    while start + PART + _OVERLAP < len(text):
        start += PART
        next_ids, next_ends = _part(tokenizer, text, start)
        seam = _seam(ids, ends, next_ids, next_ends, start)
        if seam is None:
            return None
        done.append((ids[: seam[0]], ends[: seam[0]]))
        ids, ends = next_ids[seam[1] :], next_ends[seam[1] :]
    done.append((ids, ends))
    before, after = around
    last = int(ends[-1]) if len(ends) else 0
    return (
        np.concatenate([before, *(each for each, _ in done), after]),
        np.concatenate([np.zeros(len(before), np.int64), *(each for _, each in done), np.full(len(after), last)]),
    )


def _part(tokenizer: Any, text: str, start: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of a part that begins at `start`, and where they end in the whole text."""
    found = tokenizer(
        text[start : start + PART + _OVERLAP],
        add_special_tokens=False,
        return_attention_mask=False,
        return_offsets_mapping=True,
        verbose=False,
    )
    ends = ends_of(found["offset_mapping"])
    assert ends is not None
    return np.asarray(found["input_ids"], dtype=np.int32), ends + start


def _seam(
    ids: np.ndarray, ends: np.ndarray, next_ids: np.ndarray, next_ends: np.ndarray, start: int
) -> tuple[int, int] | None:
    """How many tokens of a part come before the seam to the next one, which begins at `start`, and how many of that
    one: near the middle of what they share, where both have the same tokens on both sides."""
    shared = np.intersect1d(ends[np.searchsorted(ends, start) :], next_ends)
    for place in sorted(shared.tolist(), key=lambda end: abs(end - start - _OVERLAP // 2)):
        here, there = (int(np.searchsorted(each, place, side="right")) for each in (ends, next_ends))
        if min(here, there, len(ids) - here, len(next_ids) - there) < _ALIKE:
            continue
        ours, theirs = slice(here - _ALIKE, here + _ALIKE), slice(there - _ALIKE, there + _ALIKE)
        if (ids[ours] == next_ids[theirs]).all() and (ends[ours] == next_ends[theirs]).all():
            return here, there
    return None


def _around(tokenizer: Any) -> tuple[np.ndarray, np.ndarray] | None:
    """The special tokens before and after a text."""
    bare = tokenizer("a", add_special_tokens=False, verbose=False)["input_ids"]
    full = tokenizer("a", verbose=False)["input_ids"]
    for at in range(len(full) - len(bare) + 1):
        if full[at : at + len(bare)] == bare:
            return np.asarray(full[:at], dtype=np.int32), np.asarray(full[at + len(bare) :], dtype=np.int32)
    return None
