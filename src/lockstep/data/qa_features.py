"""Encodes questions about a text to windows of tokens, in the cache.

In: a question, a context and its answers per row, as in SQuAD. Out: a row's windows concatenated in `input_ids`
(`sizes` holds their lengths), the answer's position in each, and each token's position in the text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep.config.run import RunError
from lockstep.data import source, usable_rows
from lockstep.data.arrow_cache import Columns

if TYPE_CHECKING:
    from datasets import Dataset, Features

QUESTION, CONTEXT, TEXTS, START = "question", "context", "answers", "start"
NOWHERE = 0  # position of an answer outside a window: its first token


@dataclass(frozen=True)
class TokenWindow:
    """A question with a part of its context."""

    ids: list[int]
    types: list[int]  # token_type_ids; empty if the model takes none
    first: int  # first token of the context
    last: int
    begins: list[int]  # start character of each token in the context; 0 for question tokens
    ends: list[int]

    def token_span(self, start: int, end: int) -> tuple[int, int]:
        """First and last token of a character span; `NOWHERE` twice if the span is not entirely in this window."""
        if self.begins[self.first] > start or self.ends[self.last] < end:
            return NOWHERE, NOWHERE
        places = range(self.first, self.last + 1)
        from_here = max((p for p in places if self.begins[p] <= start), default=self.first)
        return from_here, min((p for p in places if self.ends[p] >= end), default=self.last)


@dataclass(frozen=True)
class Stride:
    """Tokens shared by two adjacent windows of a context."""

    tokens: int
    gives_way: bool  # a default: a question that leaves fewer tokens halves what it leaves

    def for_question(self, tokenizer: Any, question: str, most: int) -> int:
        """The stride for a question. Errors: `ValueError` if the question leaves no room."""
        question_ids = tokenizer(question.strip(), add_special_tokens=False, verbose=False)["input_ids"]
        room = most - len(question_ids) - tokenizer.num_special_tokens_to_add(pair=True)
        if room > self.tokens:
            return self.tokens
        if room > 0 and self.gives_way:
            return room // 2
        overlap = "" if self.gives_way else f", too few for windows that overlap by task.stride={self.tokens}"
        raise ValueError(
            f"its question leaves {max(0, room)} of the {most} tokens of data.max_length for the context{overlap}"
        )


def windows(tokenizer: Any, question: str, context: str, most: int, stride: int) -> list[TokenWindow]:
    """Split the context into windows that fit beside the question, each overlapping the previous by `stride` tokens, of
    `Stride.for_question`. Errors: `ValueError` if the context has no token."""
    encodings = tokenizer(
        question.strip(),
        context,
        truncation="only_second",
        max_length=most,
        stride=stride,
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
        verbose=False,
    )
    token_windows = []
    for part, ids in enumerate(encodings["input_ids"]):
        of = encodings.sequence_ids(part)
        places = [place for place, which in enumerate(of) if which == 1]
        if not places:  # a context without tokens
            raise ValueError("its context has no token")
        tokens = zip(encodings["offset_mapping"][part], of, strict=True)
        spans = [_trimmed(context, *span) if which == 1 else (0, 0) for span, which in tokens]
        types = encodings["token_type_ids"][part] if "token_type_ids" in tokenizer.model_input_names else []
        begins, ends = [b for b, _ in spans], [e for _, e in spans]
        token_windows.append(TokenWindow(ids, types, places[0], places[-1], begins, ends))
    return token_windows


def _trimmed(context: str, begin: int, end: int) -> tuple[int, int]:
    """Exclude leading white space, which some tokenizers include in the following token."""
    text = context[begin:end]
    return begin + (len(text) - len(text.lstrip()) if text.strip() else 0), end


def answers_of(value: Any) -> list[tuple[str, int]]:
    """Answer texts and start characters, from SQuAD's `{text: [...], answer_start: [...]}` or a list of `{text,
    answer_start}`. Errors: `ValueError`."""
    if usable_rows.is_nothing(value):
        return []
    if isinstance(value, Mapping):
        texts, starts = value.get("text"), value.get("answer_start")
        if isinstance(texts, str):
            texts, starts = [texts], [starts]
    elif isinstance(value, list) and all(isinstance(each, Mapping) for each in value):
        texts, starts = [each.get("text") for each in value], [each.get("answer_start") for each in value]
    else:
        raise ValueError("expected {text: [...], answer_start: [...]}")
    if not (isinstance(texts, list) and isinstance(starts, list) and len(texts) == len(starts)):
        raise ValueError("expected as many text as answer_start, in lists")
    if not all(isinstance(text, str) and isinstance(start, int) for text, start in zip(texts, starts, strict=True)):
        raise ValueError("expected texts, and whole numbers for answer_start")
    return list(zip(texts, starts, strict=True))


def whole(
    dataset: Dataset, columns: Mapping[str, str], answers: str, unanswerable: bool, split: str, name: str, drop: bool
) -> Dataset:
    """Columns `question`, `context`, `answers` (texts) and `start` (of the first answer; -1 for none) of complete rows.
    Errors: `RunError`."""
    import datasets

    usable_rows.check_columns(dataset, {**columns, "task.answers": answers}, split, name)
    complete_rows = usable_rows.texts(dataset, columns, split, name, drop)
    lacks = []
    for first, part in usable_rows.lists(complete_rows, answers, columns["task.context"]):
        for row, (value, context) in enumerate(part, first):
            _checked(value, context, f"row {row} of the {split} split of {name}", answers)
        lacks.append(np.array([not answers_of(value) for value, _ in part]))
    if not unanswerable:
        complete_rows = usable_rows.without(
            complete_rows, {"task.answers": (answers, np.concatenate(lacks))}, split, name, drop
        )

    def converted(rows: dict[str, list]) -> dict[str, list]:
        answer_lists = [answers_of(value) for value in rows[answers]]
        return {
            QUESTION: rows[columns["task.question"]],
            CONTEXT: rows[columns["task.context"]],
            TEXTS: [[text for text, _ in each] for each in answer_lists],
            START: [each[0][1] if each else -1 for each in answer_lists],
        }

    text = datasets.Value("string")
    features = {QUESTION: text, CONTEXT: text, TEXTS: datasets.List(text), START: datasets.Value("int64")}
    return source.map_rows(complete_rows, converted, features)


def _checked(value: Any, context: str, where: str, column: str) -> None:
    try:
        answer_list = answers_of(value)
    except ValueError as error:
        raise RunError(
            "LS2160",
            f"task.answers: {where} holds {'the text ' * isinstance(value, str)}{str(value)[:80]} in column "
            f"{column!r}; {error}",
        ) from None
    for text, start in answer_list:
        if not text.strip() or start < 0 or context[start : start + len(text)] != text:
            raise RunError(
                "LS2161",
                f"task.answers: {where}: {text[:60]!r} is not at character {start} of its context, which reads "
                f"{context[max(0, start) : start + len(text)][:60]!r} there; correct answer_start",
            )


def encoder_of(
    tokenizer: Any, most: int, stride: Stride, split: str, name: str
) -> tuple[Callable[[dict[str, list]], dict[str, Any]], Features]:
    """Return the function that encodes rows to windows, and the features of its output."""
    import datasets

    numbers, text = datasets.List(datasets.Value("int32")), datasets.Value("string")
    lists = ("input_ids", "types", "begins", "ends", "sizes", "firsts", "lasts", "starts", "stops")
    features = datasets.Features(
        dict.fromkeys(lists, numbers)
        | dict.fromkeys(("width", "windows", "shared"), datasets.Value("int64"))
        | {QUESTION: text, CONTEXT: text, TEXTS: datasets.List(text)}
    )

    def row_of(question: str, context: str, texts: list[str], start: int) -> dict[str, Any]:
        try:
            shared = stride.for_question(tokenizer, question, most)
            parts = windows(tokenizer, question, context, most, shared)
        except ValueError as error:
            raise RunError(
                "LS2162",
                f"task.question: the {split} split of {name} has {question[:60]!r}: {error}; raise "
                f"data.max_length{', lower task.stride' * (not stride.gives_way)}, or remove the row",
            ) from None
        end = start + len(texts[0]) if texts else 0
        answer_spans = [part.token_span(start, end) if texts else (NOWHERE, NOWHERE) for part in parts]
        joined = {"input_ids": "ids", "types": "types", "begins": "begins", "ends": "ends"}
        return {column: [n for part in parts for n in getattr(part, field)] for column, field in joined.items()} | {
            "sizes": [len(part.ids) for part in parts],
            "firsts": [part.first for part in parts],
            "lasts": [part.last for part in parts],
            "starts": [first for first, _ in answer_spans],
            "stops": [last for _, last in answer_spans],
            "width": max(len(part.ids) for part in parts),
            "windows": len(parts),
            "shared": shared,
            QUESTION: question,
            CONTEXT: context,
            TEXTS: texts,
        }

    def encoder(rows: dict[str, list]) -> dict[str, list]:
        features_of = [row_of(*row) for row in zip(*(rows[c] for c in (QUESTION, CONTEXT, TEXTS, START)), strict=True)]
        return {column: [each[column] for each in features_of] for column in features}

    return encoder, features


def parts_of(columns: Columns, rows: Sequence[int] | np.ndarray) -> list[list[TokenWindow]]:
    """Windows of these rows, as encoded."""
    parts = []
    for row in map(int, rows):
        cuts = np.cumsum(columns.ragged("sizes").row(row))[:-1]
        names = ("input_ids", "types", "begins", "ends")
        ids, types, begins, ends = (
            [part.tolist() for part in np.split(values, cuts)] if len(values := columns.ragged(name).row(row)) else []
            for name in names
        )
        firsts, lasts = (columns.ragged(name).row(row).tolist() for name in ("firsts", "lasts"))
        types = types or [[] for _ in ids]
        parts.append([TokenWindow(*each) for each in zip(ids, types, firsts, lasts, begins, ends, strict=True)])
    return parts
