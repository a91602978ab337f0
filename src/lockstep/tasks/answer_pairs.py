"""Base of tasks that learn from a prompt with a chosen and a rejected answer.

In: columns of texts, or of conversations. Out: `input_ids`, the chosen answer with its prompt, followed by the rejected
answer with its prompt; `targets`, equal to the tokens in answers (if the chat template has marks, in what it marks
there) and IGNORED elsewhere; and `chosen`, the number of tokens of the chosen part. A micro-batch has the two answers
of a pair in adjacent rows. Chats of other tasks are rendered by `data/conversations.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from pydantic import Field, model_validator

from lockstep.config.errors import InvalidValue
from lockstep.config.run import RunError
from lockstep.config.sections import ModelSection, Section
from lockstep.data import conversations, lm_documents, tokenizer, usable_rows
from lockstep.data.arrow_cache import Columns, padded
from lockstep.data.batch import IGNORED, Sums
from lockstep.data.token_checks import Limit
from lockstep.tasks import own_metrics
from lockstep.tasks.task import GivesPredictions, Predicts, Streams
from lockstep.tasks.text_task import Encoder, TextData, TextTask, check_template

if TYPE_CHECKING:
    from datasets import Dataset, Features

_ROW = "lockstep row"  # column of row numbers, for messages


class AnswerPairOptions(Section):
    """Keys of the run file shared by tasks on answer pairs."""

    prompt: str | None = Field(
        "prompt", description="column of the prompt; null: the answers contain it, or there is none"
    )
    chosen: str = Field("chosen", description="column of the better answer")
    rejected: str = Field("rejected", description="column of the worse answer")
    conversations: bool = Field(
        False,
        description="render prompts and answers with the chat template: lists of role and content, or texts of user "
        "and assistant",
    )
    chat_template: str | None = Field(None, description="Jinja template of conversations; default: the tokenizer's")

    @model_validator(mode="after")
    def _rendered_tokens(self) -> AnswerPairOptions:
        if self.chat_template is not None and not self.conversations:
            raise InvalidValue(
                "LS3000",
                "chat_template has an effect only with conversations: true; set task.conversations, or remove "
                "task.chat_template",
            )
        return self

    @property
    def text_columns(self) -> dict[str, str]:
        """Key of the run file -> column name."""
        prompt = {} if self.prompt is None else {"task.prompt": self.prompt}
        return prompt | {"task.chosen": self.chosen, "task.rejected": self.rejected}


class AnswerPairs(TextTask, Streams, Predicts, GivesPredictions):
    """A task whose example is a pair of answers."""

    plugin = "tasks"  # a base: it has no name in a run file

    Options: ClassVar[type[AnswerPairOptions]]
    cache_name = ("answers",)
    generative = True
    row_is_example = True
    per_example_outputs = ("rewards",)
    mean_sums: ClassVar[Mapping[str, str]]  # metric -> sum over pairs that it averages

    # -- before any process ------------------------------------------------------------------------------------------

    @classmethod
    def valid_rows(cls, rows: Dataset, options: AnswerPairOptions, split: str, name: str, drop: bool) -> Dataset:
        """Rows with a value in every column. Errors: `RunError`."""
        usable_rows.check_columns(rows, options.text_columns, split, name)
        if options.conversations:
            for key, column in options.text_columns.items():
                rows = conversations.with_roles(rows, column, key, split)
            lacks = {key: (column, usable_rows.empty(rows, column)) for key, column in options.text_columns.items()}
            rows = usable_rows.without(rows, lacks, split, name, drop)
            for key, column in options.text_columns.items():
                for first, part in usable_rows.lists(rows, column):
                    if (bad := next((i for i, value in enumerate(part) if not _is_content(value)), None)) is not None:
                        raise RunError(
                            "LS3001",
                            f"{key}: column {column!r} of the {split} split must hold texts, or lists of role and "
                            f"content; row {first + bad} holds {str(part[bad])[:80]}",
                        )
        else:
            for key, column in options.text_columns.items():
                if type(rows.features[column]).__name__ in ("List", "LargeList", "Sequence"):
                    raise RunError(
                        "LS3002",
                        f"{key}: column {column!r} of the {split} split holds lists; if they are of role and content, "
                        "set task.conversations=true",
                    )
            rows = usable_rows.texts(rows, options.text_columns, split, name, drop)
        return rows

    @classmethod
    def has_unusable_rows(cls, options: AnswerPairOptions) -> bool:
        return True

    @classmethod
    def learnable(cls, rows: Dataset, options: AnswerPairOptions, split: str, name: str, drop: bool) -> Dataset:
        """Rows whose two answers differ. Errors: `RunError`."""
        same: list[int] = []
        for first, part in usable_rows.lists(rows, options.chosen, options.rejected):
            for row, (chosen, rejected) in enumerate(part, first):
                if chosen == rejected:
                    same.append(row)
        if same and not drop:
            answer = rows[same[0]][options.chosen]
            where = usable_rows.of_rows(same, f"the {split} split of {name}", range(len(rows)))
            raise RunError(
                "LS3003",
                f"task.rejected: {where} has the same answer as chosen and as rejected, {str(answer)[:60]!r}, so it "
                "states no preference; remove such rows, or set data.drop_unusable=true to drop them",
            )
        return rows.select(np.setdiff1d(np.arange(len(rows)), same)) if same else rows

    @classmethod
    def tokenizer_texts(cls, rows: Dataset, options: AnswerPairOptions) -> Iterator[list[str]]:
        for values in super().tokenizer_texts(rows, options):  # texts, or conversations
            yield [text for v in values for text in ([v] if isinstance(v, str) else [m["content"] for m in v])]

    def check(self, data: TextData, folder: Path, tok: Any) -> None:
        if self.options.conversations:
            check_template(tok, self.options.chat_template, "conversations")
        super().check(data, folder, tok)

    def limits(self, read_by: Mapping[str, Any]) -> dict[str, Limit]:
        return {"input_ids": Limit("data.max_length", self.run.data.max_length, special=0, sequences=2)}

    def key_parts(self, data: TextData, tok: Any, rows: Dataset | None) -> list[Any]:
        options = self.options
        shared = {key: getattr(options, key) for key in AnswerPairOptions.model_fields}
        written: list[Any] = []
        if options.conversations:
            written = ["marked spans", *tokenizer.template_of(tok, options.chat_template)]
        if options.conversations and rows is not None:  # templates may read these, too
            columns = [
                c for c in options.text_columns.values() if getattr(rows.features[c], "feature", None) is not None
            ]
            further = {column: keys for column in columns if (keys := conversations.further_keys(rows, column))}
            written += [further] if further else []
        return [self.run.data.max_length, shared, *written]

    def encoder(self, folder: str, labels: Any, split: str, name: str) -> tuple[Encoder, Features]:
        """Return the function that tokenizes rows, and the features of its output."""
        import datasets

        options = self.options
        tok: Any = tokenizer.load(folder, self.run.model.trust_remote_code)
        tokens, number = datasets.List(datasets.Value("int32")), datasets.Value("int64")
        features = datasets.Features({"input_ids": tokens, "targets": tokens, "chosen": number, "cut": number})

        most, model = self.run.data.max_length, self.run.model

        def encoder(rows: dict[str, list]) -> dict[str, Any]:
            encoded: dict[str, list] = {name: [] for name in features}
            long: dict[int, int] = {}  # rows without room for an answer -> tokens of the prompt
            same: dict[int, tuple[list[Any], bool]] = {}  # rows whose answers have equal tokens -> answers, truncated
            for row, prompt, *answers in zip(
                rows[_ROW],
                rows[options.prompt] if options.prompt else [None] * len(rows[_ROW]),
                rows[options.chosen],
                rows[options.rejected],
                strict=True,
            ):
                whole = [tokens_of(tok, options, prompt, answer, row) for answer in answers]
                if (prompt_tokens := max(_before_answer(targets) for _, targets in whole)) >= most:
                    long[row] = prompt_tokens
                    continue
                both = [(ids[:most], targets[:most], len(ids) > most) for ids, targets in whole]
                if both[0][0] == both[1][0]:
                    same[row] = answers, both[0][2]
                    continue
                for name, parts in (("input_ids", [b[0] for b in both]), ("targets", [b[1] for b in both])):
                    encoded[name].append([token for part in parts for token in part])
                encoded["chosen"].append(len(both[0][0]))
                encoded["cut"].append(int(any(b[2] for b in both)))
            if long:
                raise _no_room(long, most, model, usable_rows.of_rows(long, split, rows[_ROW]))
            if same:
                answers, truncated = next(iter(same.values()))
                raise _same_tokens(answers, truncated, most, model, usable_rows.of_rows(same, split, rows[_ROW]))
            return encoded

        return encoder, features

    @classmethod
    def encoded_rows(cls, rows: Dataset, options: AnswerPairOptions) -> Dataset:
        return super().encoded_rows(rows, options).add_column(_ROW, list(range(len(rows))))

    def facts(self, data: TextData, files: Mapping[str, str]) -> dict[str, Any]:
        columns = {split: Columns(file).flat("cut") for split, file in files.items()}
        counts = {split: sum(int(part.sum()) for _, part in column.parts()) for split, column in columns.items()}
        notes = [
            f"{count:,} of {len(columns[split]):,} {split} pairs have an answer truncated at "
            f"{self.run.data.max_length} tokens (data.max_length)"
            for split, count in counts.items()
            if count
        ]
        return {"notes": notes} if notes else {}

    # -- in every process --------------------------------------------------------------------------------------------

    def answers(self, columns: Columns, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Padded tokens, mask and targets of pairs: int64 [2B, T] each, chosen and rejected answers alternating. A
        target is the token at its own position (not shifted)."""
        ids, targets, chosen = columns.ragged("input_ids"), columns.ragged("targets"), columns.flat("chosen")[rows]
        both = [(ids.row(int(r)), targets.row(int(r)), int(c)) for r, c in zip(rows, chosen, strict=True)]
        parts = [(i[of], t[of]) for i, t, c in both for of in (slice(None, c), slice(c, None))]
        tokens, mask = padded([i for i, _ in parts], int(self.tokenizer.pad_token_id))
        return tokens, mask, padded([t for _, t in parts], IGNORED)[0]

    def padded_lengths(self, columns: Columns, rows: np.ndarray) -> list[np.ndarray]:
        """Both answers of a pair are padded to the longest answer of the batch."""
        chosen = columns.flat("chosen")[rows]
        return [np.maximum(chosen, columns.lengths[rows] - chosen)] * 2

    def count_targets(self, columns: Columns, rows: np.ndarray) -> int:
        return len(rows)

    def predictions(self, sums: Sums, columns: Columns, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Rewards of both answers, float64 [N, 2]; and the index of the chosen one, always 0, int64 [N]."""
        return sums["rewards"].double().numpy(), np.zeros(len(rows), dtype=np.int64)

    def metrics(self, sums: Sums) -> dict[str, float]:
        count = float(sums["examples"])
        return {name: float(sums[key]) / count for name, key in {"loss": "loss", **self.mean_sums}.items()}

    def tables(self, sums: Sums) -> dict[str, Any]:
        """Plot of the margins between chosen and rejected rewards, sorted."""
        rewards = sums["rewards"].double().numpy()
        return own_metrics.in_order("margins of rewards", "margin", rewards[:, 0] - rewards[:, 1])

    def dummy_predictions(self) -> tuple[np.ndarray, np.ndarray]:
        return np.array([[0.5, -0.5], [-0.25, 0.75], [1.5, 0.0]]), np.zeros(3, dtype=np.int64)

    @property
    def chat_template(self) -> str | None:
        return self.options.chat_template


# -- preparing -------------------------------------------------------------------------------------------------------


def _is_content(value: Any) -> bool:
    """Whether a value is a non-empty text or a list of messages."""
    if isinstance(value, str):
        return bool(value.strip())
    return (
        isinstance(value, list)
        and len(value) > 0
        and all(isinstance(m, dict) and all(isinstance(m.get(k), str) for k in ("role", "content")) for m in value)
    )


def _same_tokens(answers: Sequence[Any], truncated: bool, most: int, model: ModelSection, where: str) -> RunError:
    """Return the error for two answers of a pair that have the same tokens."""
    if truncated:
        from lockstep.tasks.models import models

        return RunError(
            "LS3004",
            f"task.rejected: the two answers of {where} are the same tokens within data.max_length ({most}); "
            f"{models.longer(model, 'data.max_length', most)}, or remove such rows",
        )
    chosen, rejected = (str(answer)[:60] for answer in answers)
    return RunError(
        "LS3424",
        f"task.rejected: the tokenizer makes the same tokens of the two answers of {where}, {chosen!r} and "
        f"{rejected!r}, so no model can tell them apart; use a tokenizer that knows these texts, or remove such rows",
    )


def _before_answer(targets: Sequence[int]) -> int:
    """Number of tokens before the first one that is learned."""
    return next((place for place, target in enumerate(targets) if target != IGNORED), len(targets))


def _no_room(long: Mapping[int, int], most: int, model: ModelSection, where: str) -> RunError:
    """Return the error for prompts that leave no room for an answer. `long`: row -> tokens of its prompt."""
    from lockstep.tasks.models import models

    return RunError(
        "LS3005",
        f"data.max_length: the prompt of {where} fills all {most} tokens and leaves none for an answer; "
        f"{models.longer(model, 'data.max_length', most, max(long.values()) + 2)}, or set data.filter",
    )


def tokens_of(
    tok: Any, options: AnswerPairOptions, prompt: Any, answer: Any, row: int | None = None
) -> tuple[list[int], list[int]]:
    """Tokens of prompt, answer and end token, or of the rendered chat template; and the targets: the tokens of the
    answer, or of what the template marks in it, and IGNORED elsewhere. Errors: `RunError`, which names the row."""
    if options.conversations:
        ids, learned = _rendered_tokens(tok, options, prompt, answer, row)
    else:
        end = lm_documents.end_of(tok)
        prompt_ids = [] if prompt is None else list(tok(prompt, verbose=False)["input_ids"])
        while prompt_ids and prompt_ids[-1] == end:
            prompt_ids.pop()
        ids = prompt_ids + list(tok(answer, add_special_tokens=prompt is None, verbose=False)["input_ids"])
        if end is not None and ids[-1:] != [end]:
            ids = [*ids, end]
        learned = [place >= len(prompt_ids) for place in range(len(ids))]
    known = zip(ids, learned, strict=True)
    return ids, [token if learn and place else IGNORED for place, (token, learn) in enumerate(known)]


def _rendered_tokens(
    tok: Any, options: AnswerPairOptions, prompt: Any, answer: Any, row: int | None
) -> tuple[list[int], list[bool]]:
    """Tokens of a conversation in the chat template, and whether each is learned: those of its last message (the
    answer), or of what the template marks in it."""
    before, after = (
        [{"role": role, "content": content}] if isinstance(content, str) else list(content or ())
        for role, content in (("user", prompt), ("assistant", answer))
    )
    messages = [conversations.without_nulls(message) for message in (*before, *after)]

    def text(some: Sequence[dict], opened: bool) -> str:
        return tok.apply_chat_template(
            some, chat_template=options.chat_template, tokenize=False, add_generation_prompt=opened
        )

    try:
        if messages[-1]["role"] != "assistant":
            raise ValueError("the last message of an answer must be the assistant's")
        if (marks := conversations.marks_of(tok, options.chat_template, messages)) is not None:
            whole, opening = marks[0], len(text(messages[:-1], False)) if len(messages) > 1 else 0
            spans = [(begin, over) for begin, over in marks[1] if opening <= begin < over]
            if not spans:
                raise ValueError("its {% generation %} marks contain nothing of the answer")
        else:
            whole, beginning = text(messages, False), text(messages[:-1], True)
            if not whole.startswith(beginning):
                raise ValueError(
                    "it renders the beginning of a conversation differently than within the whole conversation"
                )
            spans = [(len(beginning), len(whole))]
    except Exception as error:  # templates may raise anything
        at = "this" if row is None else f"row {row}"
        reason = " ".join(str(error).split())
        raise RunError("LS3006", f"task.conversations: the chat template cannot be used on {at}: {reason}") from error
    encoding = tok(whole, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    learned = [any(end > first and begin < over for first, over in spans) for begin, end in encoding["offset_mapping"]]
    return list(encoding["input_ids"]), learned
