"""Texts, prompts with responses, or conversations -> documents of tokens, for causal language models.

In: rows of a data set and a tokenizer. Out: `Document`s in the order of the rows; prompts and what the user says are
not scored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep.config.run import RunError
from lockstep.data import long_texts
from lockstep.data.packing import Document, joined, measured

if TYPE_CHECKING:
    from datasets import Dataset


def of_texts(dataset: Dataset, tokenizer: Any, column: str) -> Iterator[Document]:
    """A document a row, closed by the end token."""
    column_of = dataset.select_columns([column]).with_format("arrow")
    for start in range(0, len(dataset), 1000):
        for some in _shares(value.as_py() for value in column_of[start : start + 1000].column(0)):
            if len(some) == 1:
                yield _closed(measured(some[0], *long_texts.tokenized(tokenizer, some[0])), tokenizer)
                continue
            offsets = bool(tokenizer.is_fast)
            found = tokenizer(some, return_attention_mask=False, return_offsets_mapping=offsets, verbose=False)
            for i, text in enumerate(some):
                ends = long_texts.ends_of(found["offset_mapping"][i]) if offsets else None
                yield _closed(measured(text, found["input_ids"][i], ends), tokenizer)


def _shares(texts: Iterable[str]) -> Iterator[list[str]]:
    """Texts in order, as many at a time as have the characters of a part, or one that has more."""
    some: list[str] = []
    size = 0
    for text in texts:
        if some and size + len(text) > long_texts.PART:
            yield some
            some, size = [], 0
        some.append(text)
        size += len(text)
    if some:
        yield some


def of_prompts(dataset: Dataset, tokenizer: Any, prompt: str, response: str) -> Iterator[Document]:
    """Prompt, response, end token; only what comes after the prompt is scored."""
    for row in dataset:
        asked = tokenizer(row[prompt], verbose=False)["input_ids"]
        while asked and asked[-1] == end_of(tokenizer):
            asked = asked[:-1]
        told = tokenizer(
            row[response], add_special_tokens=False, return_offsets_mapping=bool(tokenizer.is_fast), verbose=False
        )
        answer = measured(row[response], told["input_ids"], long_texts.ends_of(told.get("offset_mapping")))
        yield joined([unscored(asked), _closed(answer, tokenizer)])


def of_messages(dataset: Dataset, tokenizer: Any, column: str, template: str | None) -> Iterator[Document]:
    """A conversation in the tokenizer's chat template; only what the assistant says is scored, tokens that reach over
    into it among it."""

    def text(messages: list[dict], opened: bool) -> str:
        return tokenizer.apply_chat_template(
            messages, chat_template=template, tokenize=False, add_generation_prompt=opened
        )

    for number, row in enumerate(dataset):
        messages = [{"role": m["role"], "content": m["content"]} for m in row[column]]
        try:
            whole = text(messages, False)
            spans = []
            for i, message in enumerate(messages):
                if message["role"] == "assistant":
                    before, after = text(messages[:i], True), text(messages[: i + 1], False)
                    if not whole.startswith(after) or not after.startswith(before):
                        raise ValueError("it writes the beginning of a conversation otherwise than the whole of it")
                    spans.append((len(before), len(after)))
        except Exception as error:  # a template is a program of its own
            said = " ".join(str(error).split())
            raise RunError(f"task.messages: the chat template cannot be used on row {number}: {said}") from error
        found = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        document = measured(whole, found["input_ids"], long_texts.ends_of(found["offset_mapping"]))
        ends = np.asarray(found["offset_mapping"], dtype=np.int64).reshape(-1, 2)[:, 1]
        scored = np.zeros(len(document), dtype=bool)
        for start, stop in spans:
            scored |= (ends > start) & (ends <= stop)
        closed = _closed(replace(document, scored=scored), tokenizer)
        closed.scored[len(document) :] = bool(scored[-1:].any())  # the end token belongs to the last message
        yield closed


def unscored(ids: list[int]) -> Document:
    """Tokens that are read and not predicted."""
    nothing = np.zeros(len(ids), dtype=np.int32)
    return Document(np.asarray(ids, dtype=np.int32), nothing.astype(bool), nothing, nothing)


def end_of(tokenizer: Any) -> int | None:
    """The token that ends a text, if there is one."""
    return tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id


def _closed(document: Document, tokenizer: Any) -> Document:
    end = end_of(tokenizer)
    if end is None or (len(document) and document.ids[-1] == end):
        return document
    zero = np.zeros(1, dtype=np.int32)
    return joined([document, Document(np.asarray([end], dtype=np.int32), np.ones(1, dtype=bool), zero, zero)])


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
