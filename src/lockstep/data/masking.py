"""Choose the masked tokens of an example as BERT does (Devlin et al. 2019, arXiv:1810.04805, and its
create_pretraining_data.py): of a share of the tokens, 80 % become the
mask token, 10 % a random token, and 10 % stay unchanged.

In: tokens, and the seed, step and row of each example. Out: inputs and targets. No generator is used: each token's
random number is a hash of its position, so it is the same in any micro-batch, on any rank and with any library version.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lockstep.data.batch import IGNORED
from lockstep.distributed.randomness import mixed

_ORDER, _KIND, _TOKEN = range(3)  # purposes of a token's random numbers
AS_MASK, AS_ANY = 0.8, 0.1  # shares of the selected tokens
WITHOUT_STEP = -1  # step number of evaluations: always the same masks


@dataclass(frozen=True)
class Vocabulary:
    """The tokenizer properties that masking needs."""

    size: int
    mask: int
    special: np.ndarray  # int64: special tokens
    begins: np.ndarray | None  # bool [size]: always begins a word; None: unknown
    joins: np.ndarray | None  # int8 [size]: the next token never (0), possibly (1), always (2) continues its word


def vocabulary(tokenizer: Any) -> Vocabulary:
    """Build the `Vocabulary` of a tokenizer. The caller must refuse a tokenizer without a mask token."""
    special = [t for t in tokenizer.all_special_ids if t != tokenizer.unk_token_id]
    begins, joins = _words(tokenizer)
    return Vocabulary(len(tokenizer), int(tokenizer.mask_token_id), np.array(sorted(special)), begins, joins)


def _words(tokenizer: Any) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Return `begins` and `joins` of a `Vocabulary` (word boundaries of tokens), from the vocabulary's marks:
    `##` inside a word, or a mark at its beginning; punctuation is a separate word. None without such marks."""
    import json

    if not tokenizer.is_fast:
        return None, None
    settings = json.loads(tokenizer.backend_tokenizer.to_str())
    kinds = str(settings["pre_tokenizer"])
    tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    if settings["model"].get("continuing_subword_prefix") == "##" and settings["model"]["type"] == "WordPiece":
        return np.array([not token.startswith("##") for token in tokens]), np.ones(len(tokens), np.int8)
    signs = {"ByteLevel": "\u0120", "Metaspace": "\u2581"}  # marks that begin a word
    sign = next((sign for kind, sign in signs.items() if kind in kinds), None)
    if sign is None:
        return None, None
    begins = [token.startswith(sign) or not _goes_on(token[0]) for token in tokens]
    return np.array(begins), np.array([2 if token == sign else _goes_on(token[-1]) for token in tokens], np.int8)


def _goes_on(character: str) -> bool:
    """Return whether a character can be inside a word: a letter, a digit, or a non-ASCII byte."""
    return character.isalnum() or (ord(character) > 127 and character not in "\u0120\u2581")


def chosen(
    ids: np.ndarray,
    real: np.ndarray,
    rows: np.ndarray,
    place: Sequence[int],
    share: float,
    vocabulary: Vocabulary,
    whole_word_mask: bool,
) -> np.ndarray:
    """Mask of the tokens to predict: bool [B, T]. Selects `share` of each example's tokens, rounded, at least one. With
    whole words, selects at most that many unless a single word is longer. `place`: seed and step."""
    can = (real == 1) & ~np.isin(ids, vocabulary.special)
    can |= (real == 1) & ~can.any(1, keepdims=True)  # if there are only special tokens
    counts = np.maximum(1, np.rint(share * can.sum(1)).astype(np.int64))  # [B]
    at = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
    if whole_word_mask:
        at = _starts(ids, can, vocabulary)
    order = mixed(*place, _ORDER, rows[:, None], at)  # [B, T]: the same for all tokens of a word
    order[~can] = np.iinfo(np.uint64).max
    ranked = np.argsort(order, axis=1, kind="stable")
    mask = np.zeros(ids.shape, dtype=bool)
    if not whole_word_mask:
        np.put_along_axis(mask, ranked, np.arange(ids.shape[1])[None] < counts[:, None], axis=1)
        return mask
    for row, most in enumerate(counts.tolist()):
        words = np.split(ranked[row], np.flatnonzero(np.diff(at[row][ranked[row]])) + 1)
        words = [word for word in words if can[row, word[0]]]
        room = most
        for word in words:
            if len(word) <= room:
                mask[row, word] = True
                room -= len(word)
            if room == 0:
                break
        if room == most:  # every word is longer than the share
            mask[row, words[0]] = True
    return mask


def _starts(ids: np.ndarray, can: np.ndarray, vocabulary: Vocabulary) -> np.ndarray:
    """Start of each token's word: int64 [B, T]."""
    assert vocabulary.begins is not None
    assert vocabulary.joins is not None
    begins = vocabulary.begins[ids]
    before = vocabulary.joins[ids[:, :-1]]
    begins[:, 1:] = (begins[:, 1:] & (before < 2)) | (before == 0) | ~can[:, :-1]
    begins[:, 0] = True
    begins |= ~can
    at = np.arange(ids.shape[1])
    return np.maximum.accumulate(np.where(begins, at, 0), axis=1)


def masked(
    ids: np.ndarray, picked: np.ndarray, rows: np.ndarray, place: Sequence[int], vocabulary: Vocabulary
) -> tuple[np.ndarray, np.ndarray]:
    """Inputs with masks, and targets: int64 [B, T] each."""
    at = np.arange(ids.shape[1])
    kind = mixed(*place, _KIND, rows[:, None], at) / 2.0**64  # [B, T], from 0 to 1
    drawn = (mixed(*place, _TOKEN, rows[:, None], at) % np.uint64(vocabulary.size)).astype(np.int64)
    instead = np.where(kind < AS_MASK, vocabulary.mask, np.where(kind < AS_MASK + AS_ANY, drawn, ids))
    return np.where(picked, instead, ids), np.where(picked, ids, IGNORED)
