"""Texts, or prompts with responses -> documents of tokens, for causal language models.

In: rows of a data set and a tokenizer. Out: `Documents` in the order of the rows, some rows at a time; prompts are not
scored. Conversations: `conversations.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep.config.run import RunError
from lockstep.data import arrow_cache, chunked_tokenization
from lockstep.data.packing import Documents, interleaved, measured

if TYPE_CHECKING:
    from datasets import Dataset

Found = Iterator[tuple[Documents, int]]  # documents, and of how many rows they are


def of_texts(dataset: Dataset, tokenizer: Any, column: str, rows: range) -> Found:
    """A document a row, closed by the end token."""
    for _, batch in arrow_cache.batches(dataset.select_columns([column]), rows):
        for some in shares(batch[column], map(len, batch[column])):
            yield closed(_tokenized(tokenizer, some), tokenizer), len(some)


def _tokenized(tokenizer: Any, texts: Sequence[str], **options: Any) -> Documents:
    """As many documents as texts, without their ends."""
    if len(texts) == 1 and not options:
        ids, ends = chunked_tokenization.tokenized(tokenizer, texts[0])
        return measured(texts, ids, [len(ids)], ends)
    offsets = bool(tokenizer.is_fast)
    found = tokenizer(
        list(texts), return_attention_mask=False, return_offsets_mapping=offsets, verbose=False, **options
    )
    lengths, ids = flat(found["input_ids"])
    ends = None
    if offsets:
        spans = chain.from_iterable(found["offset_mapping"])
        ends = np.fromiter((end for _, end in spans), np.int64, len(ids))
    return measured(texts, ids, lengths, ends)


def flat(rows: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """How many numbers each row has, int64, and all of them, int32."""
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    return lengths, np.fromiter(chain.from_iterable(rows), np.int32, int(lengths.sum()))


def shares(rows: Sequence[Any], sizes: Iterator[int]) -> Iterator[list[Any]]:
    """Rows in order, as many at a time as have the characters of a part, or one that has more."""
    some: list[Any] = []
    total = 0
    for row, size in zip(rows, sizes, strict=True):
        if some and total + size > chunked_tokenization.PART:
            yield some
            some, total = [], 0
        some.append(row)
        total += size
    if some:
        yield some


def of_prompts(dataset: Dataset, tokenizer: Any, prompt: str, response: str, rows: range) -> Found:
    """Prompt, response, end token; only what comes after the prompt is scored."""
    end = end_of(tokenizer)
    for _, batch in arrow_cache.batches(dataset.select_columns(list(dict.fromkeys([prompt, response]))), rows):
        pairs = list(zip(batch[prompt], batch[response], strict=True))
        for some in shares(pairs, (len(asked) + len(told) for asked, told in pairs)):
            asked = tokenizer([one for one, _ in some], return_attention_mask=False, verbose=False)["input_ids"]
            for ids in asked:
                while ids and ids[-1] == end:
                    ids.pop()
            answers = _tokenized(tokenizer, [other for _, other in some], add_special_tokens=False)
            yield interleaved(unscored(asked), closed(answers, tokenizer)), len(some)


def unscored(rows: Sequence[Sequence[int]]) -> Documents:
    """Tokens that are read and not predicted."""
    lengths, ids = flat(rows)
    nothing = np.zeros(len(ids), dtype=np.int32)
    return Documents(ids, nothing.astype(bool), nothing, nothing, lengths)


def end_of(tokenizer: Any) -> int | None:
    """The token that ends a text, if there is one."""
    return tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id


def before(tokenizer: Any) -> int | None:
    """The token after which a text begins, where nothing else is before it (as in lm-evaluation-harness), if there is
    one."""
    return tokenizer.bos_token_id if tokenizer.bos_token_id is not None else end_of(tokenizer)


def closed(documents: Documents, tokenizer: Any, scored: np.ndarray | None = None) -> Documents:
    """Documents, each with its end token. `scored`: whether that is predicted, bool [documents]; None: all of them."""
    end = end_of(tokenizer)
    if end is None:
        return documents
    stops = documents.ends
    some = documents.lengths > 0
    open_ended = ~some
    open_ended[some] = documents.ids[stops[some] - 1] != end
    marks = np.ones(len(stops), dtype=bool) if scored is None else scored
    at = stops[open_ended]
    return Documents(
        np.insert(documents.ids, at, end),
        np.insert(documents.scored, at, marks[open_ended]),
        np.insert(documents.bytes, at, 0),
        np.insert(documents.words, at, 0),
        documents.lengths + open_ended,
    )


def cut(train: Dataset, share: float, seed: Any, key: str, column: str | None = None) -> tuple[Dataset, Dataset]:
    """Cut a share off the training split: rows drawn with the seed; of a single text, in this column, its end. The rest
    and what was cut off. `key`: what of `data` asks for it. Errors: `RunError`."""
    if len(train) == 1 and column is not None:
        text = train[0][column]
        at = int(len(text) * (1 - share))
        return train.from_dict({column: [text[:at]]}), train.from_dict({column: [text[at:]]})
    order = np.random.default_rng(seed).permutation(len(train))
    held = round(len(train) * share)
    if held in (0, len(train)):
        raise RunError(f"data.{key}: {share:g} of {len(train)} examples leaves one of the splits empty")
    return train.select(np.sort(order[held:])), train.select(np.sort(order[:held]))
