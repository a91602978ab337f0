"""Converts conversations to documents of tokens with a chat template; only the assistant's text is scored.

In: rows of a data set, a tokenizer, and a `Writing`. Out: `Documents`, one per conversation or per assistant turn.

Assistant spans are those that the template marks with `{% generation %}`. For a template without marks, they are
derived from rendered prefixes of the conversation: up to a turn with the generation prompt, and including the turn.
This requires each prefix to be a prefix of the next. Templates of reasoning models render earlier turns differently
once a later one exists (they drop the thinking): such conversations are refused, naming the turn, or each turn is
trained as rendered when it is the last.

Chats of preference pairs are rendered by `_rendered_tokens` in `tasks/answer_pairs.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, takewhile
from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep.config.run import RunError
from lockstep.data import arrow_cache, usable_rows, value_types
from lockstep.data.lm_documents import Documents, EncodedDocuments, end_of, flat, measured, shares

if TYPE_CHECKING:
    from datasets import Dataset

Spans = list[tuple[int, int]]  # character spans [start, end)
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")  # marks around assistant text in a template


@dataclass(frozen=True)
class RenderedText:
    """A text and its learned spans."""

    text: str
    spans: Spans
    marked: bool = False  # by the template: tokens that overlap a span are learned, as in transformers' mask


@dataclass(frozen=True)
class Writing:
    """How conversations are rendered to text."""

    column: str  # of the messages
    template: str | None = None  # Jinja; None: the tokenizer's
    arguments: Mapping[str, Any] = field(default_factory=dict)  # variables of the template, such as enable_thinking
    tools: str | None = None  # column of tool schemas: a list, or JSON
    each: bool = False  # each assistant turn is a document that ends with it

    @property
    def columns(self) -> dict[str, str]:
        """Key of the run file -> column name."""
        return {"task.messages": self.column} | ({} if self.tools is None else {"task.tools": self.tools})

    def text(self, tokenizer: Any, messages: list[dict], tools: Any, opened: bool) -> str:
        """Render messages to text. `opened`: with the generation prompt. Errors: any that the template raises."""
        return tokenizer.apply_chat_template(
            messages,
            tools=tools,
            chat_template=self.template,
            tokenize=False,
            add_generation_prompt=opened,
            **self.arguments,
        )


@dataclass(frozen=True)
class Question:
    """A conversation whose last message the model answers or scores."""

    column: str
    messages: list[dict]
    tools: Any = None  # as in the row
    place: str = ""  # for error messages

    def __str__(self) -> str:
        return json.dumps(self.messages, default=str)

    @classmethod
    def of(cls, messages: Any, column: str, tools: Any, place: str, answered: bool = False) -> Question | None:
        """The messages before the last answer, if there is one (including it with `answered`), or None for a value that
        is not a conversation. Errors: `RunError`."""
        messages = [messages] if isinstance(messages, Mapping) else messages
        if not is_talk(messages):
            return None
        some = [without_nulls(renamed(message, f"predict: {column!r} of {place}")) for message in messages]
        while some and some[-1]["role"] == "assistant" and not answered:
            some.pop()
        if not some:
            raise RunError(
                "LS2404", f"predict: {column!r} of {place} has no message to answer: all are the assistant's"
            )
        if answered and some[-1]["role"] != "assistant":
            raise RunError(
                "LS2407",
                f"predict: {column!r} of {place} ends with a message of {some[-1]['role']}; this model scores an "
                "answer, so the last message must be the assistant's",
            )
        return cls(column, some, tools, place)


def is_talk(value: Any) -> bool:
    """Return whether a value is a list of messages."""
    if not isinstance(value, list | tuple) or not value:
        return False
    return all(isinstance(m, Mapping) and ("role" in m or {"from", "value"} <= m.keys()) for m in value)


def prompt_text(tokenizer: Any, how: Writing, content: str | Question) -> str:
    """Render a `Question`, or a text as a user message, up to the start of the answer. Errors: `RunError`."""
    if isinstance(content, Question):
        messages = [{**message, "content": message.get("content", "")} for message in content.messages]
        tools, place = _offered(content.tools, how, content.place), content.place
    else:
        messages, tools, place = [{"role": "user", "content": content}], None, f"the text {content[:40]!r}"
    try:
        return how.text(tokenizer, messages, tools, True)
    except Exception as error:  # templates may raise anything
        reason = " ".join(str(error).split())
        raise RunError("LS2406", f"predict: the chat template cannot be used on {place}: {reason}") from error


def require_template(tokenizer: Any, rows: Iterable[Sequence[Any]]) -> bool:
    """Return whether there is a conversation among rows of a model that was trained on texts. Errors: `RunError` if its
    tokenizer has no chat template."""
    talk = next((row[0] for row in rows if isinstance(row[0], Question)), None)
    if talk is not None and not tokenizer.chat_template:
        raise RunError(
            "LS2408",
            f"predict: {talk.place} is a conversation, and this model was trained on texts, with a tokenizer that has "
            "no chat template; give it a text",
        )
    return talk is not None


def _is_marked(tokenizer: Any, template: str | None, tools: Any) -> bool:
    return _MARKS.search(tokenizer.get_chat_template(template, tools)) is not None


def marks_of(
    tokenizer: Any,
    template: str | None,
    messages: list[dict],
    tools: Any = None,
    arguments: Mapping[str, Any] | None = None,
) -> tuple[str, Spans] | None:
    """Render a conversation as `apply_chat_template` does; return the text and the spans that the template marks with
    `{% generation %}`, or None for a template without marks. `template`: None for the tokenizer's. Errors: any that the
    template raises."""
    if not _is_marked(tokenizer, template, tools):
        return None
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered: Any = render_jinja_template(  # texts and spans of one conversation
        conversations=[messages],
        tools=tools,
        chat_template=tokenizer.get_chat_template(template, tools),
        return_assistant_tokens_mask=True,
        **{**tokenizer.special_tokens_map, **(arguments or {})},
    )
    (text,), (spans,) = rendered
    return text, [(begin, over) for begin, over in spans]


# Speaker names of ShareGPT-like formats -> roles of chat templates
ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard", "model", "bot"), "assistant"),
    "system": "system",
    **dict.fromkeys(("tool", "observation"), "tool"),
}


def renamed(turn: Any, where: str) -> Any:
    """Convert a message with `from` and `value` to `role` and `content`. `where`: location for error messages. Errors:
    `RunError` for an unknown speaker."""
    if not isinstance(turn, Mapping) or "role" in turn or not {"from", "value"} <= set(turn):
        return turn
    role = ROLES.get(str(turn["from"]).strip().lower())
    if role is None:
        raise RunError("LS2040", f"{where}: unknown role {turn['from']!r}; expected one of {', '.join(ROLES)}")
    rest = {name: value for name, value in turn.items() if name not in ("from", "value")}
    return {"role": role, "content": turn["value"], **rest}


def with_roles(dataset: Dataset, column: str, key: str, split: str) -> Dataset:
    """Rows whose messages have `role` and `content`: `from` and `value` are renamed, and a single message becomes a
    list. Errors: `RunError` for an unknown speaker."""
    import datasets

    feature = dataset.features[column]
    inner = feature if isinstance(feature, Mapping) else getattr(feature, "feature", None)
    ragged = value_types.has_json(feature)  # optional keys, which the features do not list
    if not ragged:
        if not isinstance(inner, Mapping) or not ({"from", "value"} <= set(inner) or {"role", "content"} <= set(inner)):
            return dataset
        if inner is not feature and "role" in inner:
            return dataset

    of = f"{key}: column {column!r} of the {split} split, row"

    def batch(rows: dict[str, list], places: list[int]) -> dict[str, list]:
        several = ([messages] if isinstance(messages, Mapping) else messages for messages in rows[column])
        return {
            column: [
                [renamed(turn, f"{of} {row}") for turn in messages] if isinstance(messages, list) else messages
                for messages, row in zip(several, places, strict=True)
            ]
        }

    if not ragged:
        # the key of a cached result does not cover the functions that `batch` calls
        return dataset.map(batch, with_indices=True, batched=True, load_from_cache_file=False)
    parts, changed = [], False
    kind = datasets.List(datasets.Json()) if isinstance(feature, datasets.List) else datasets.Json()
    for first, part in usable_rows.lists(dataset, column):
        values = batch({column: part}, list(range(first, first + len(part))))[column]
        changed = changed or values != part
        parts.append(value_types.in_memory({column: values}, datasets.Features({column: kind})))
    return usable_rows.with_column(dataset, column, datasets.concatenate_datasets(parts)) if changed else dataset


def usable(dataset: Dataset, column: str, split: str, name: str, drop: bool) -> Dataset:
    """Rows with an assistant turn in which every message has content or tool calls. Errors: `RunError`."""
    dataset = with_roles(dataset, column, "task.messages", split)
    lacks = []
    for first, part in usable_rows.lists(dataset, column):
        for row, messages in enumerate(part, first):
            good = isinstance(messages, list) and all(
                isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str | None)
                for m in messages
            )
            if not (good or usable_rows.is_nothing(messages)):
                raise RunError(
                    "LS2041",
                    f"task.messages: column {column!r} of the {split} split must hold lists of role and content; row "
                    f"{row} holds {str(messages)[:80]}",
                )
        lacks.append(np.array([usable_rows.is_nothing(messages) or _lacks(messages) for messages in part]))
    return usable_rows.without(dataset, {"task.messages": (column, np.concatenate(lacks))}, split, name, drop)


def _lacks(messages: list[dict]) -> bool:
    return not turns(messages) or any(m.get("content") is None and not m.get("tool_calls") for m in messages)


def turns(messages: list[dict]) -> int:
    """Number of assistant turns."""
    return sum(message["role"] == "assistant" for message in messages)


def documents_in(dataset: Dataset, how: Writing) -> int:
    """Number of documents that a split yields."""
    if not how.each:
        return len(dataset)
    return sum(turns(messages) for _, part in usable_rows.lists(dataset, how.column) for messages in part)


def further_keys(dataset: Dataset, column: str) -> list[str]:
    """Message keys other than role and content."""
    inner = getattr(dataset.features[column], "feature", None)
    if not isinstance(inner, Mapping):  # JSON, whose keys the features do not list
        inner = {key for _, part in usable_rows.lists(dataset, column) for row in part for each in row for key in each}
    return sorted(set(inner) - {"role", "content"})


def turn_end(tokenizer: Any, how: Writing) -> int | None:
    """Return the special token that ends an answer in the template if it is not the end token (as in Gemma's template).
    None if answers end with the end token or with no special token."""
    question, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    try:
        before, whole = (how.text(tokenizer, some, None, len(some) == 1) for some in ([question], [question, answer]))
    except Exception:  # templates may raise anything
        return None
    if not whole.startswith(before):
        return None
    ids = tokenizer(whole[len(before) :], add_special_tokens=False, verbose=False)["input_ids"]
    marks = {*tokenizer.all_special_ids} | {i for i, each in tokenizer.added_tokens_decoder.items() if each.special}
    special = [token for token in ids if token in marks - {tokenizer.unk_token_id}]
    return special[-1] if special and end_of(tokenizer) not in special else None


def never_ends(tokenizer: Any, learned: Iterable[np.ndarray], other: int | None = None) -> list[str]:
    """A note if no learned answer contains the end token. `learned`: tokens of some answers, [T] each, before
    truncation. `other`: `turn_end`."""
    end, learned = end_of(tokenizer), list(learned)
    if end is not None and other is not None and any(other in ids for ids in learned):
        name, of = tokenizer.convert_ids_to_tokens([other, end])
        return [
            f"the chat template ends an answer by {name!r}, not by the end token ({of!r}): samples, predict and the "
            f"export's generation_config.json stop at both (with an adapter alone, which has no such file, give "
            f"generate eos_token_id=[{end}, {other}])"
        ]
    if end is None:
        return ["the tokenizer has no end token, so the model does not learn where an answer ends; set its eos_token"]
    if any(end in ids for ids in learned):
        return []
    return [
        f"no trained answer contains the end token ({tokenizer.convert_ids_to_tokens(end)!r}), so the model does not "
        "learn to stop: change task.chat_template to write it after the assistant's text (inside its generation marks, "
        "if it has any), or set the tokenizer's eos_token to the token that ends a turn"
    ]


def without_nulls(value: Any) -> Any:
    """Remove null entries of mappings. Read from a table, rows with different keys have all keys of all rows, but
    templates test which keys exist."""
    if isinstance(value, Mapping):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [without_nulls(inner) for inner in value] if isinstance(value, list | tuple) else value


def documents_of(dataset: Dataset, tokenizer: Any, how: Writing, rows: range) -> EncodedDocuments:
    """Yield the documents of some rows; tokens that overlap a learned span are learned. Errors: `RunError`."""
    columns = [how.column] if how.tools is None else [how.column, how.tools]
    for start, batch in arrow_cache.batches(dataset.select_columns(columns), rows):
        offered = batch[how.tools] if how.tools is not None else [None] * len(batch[how.column])
        rows_of = zip(batch[how.column], offered, strict=True)
        texts_of = [
            rendered(tokenizer, messages, tools, how, row) for row, (messages, tools) in enumerate(rows_of, start)
        ]
        for some in shares(texts_of, (sum(len(each.text) for each in texts) for texts in texts_of)):
            yield _documents([each for texts in some for each in texts], tokenizer), len(some)


def _documents(some: list[RenderedText], tokenizer: Any) -> Documents:
    texts = [each.text for each in some]
    encodings = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    lengths, ids = flat(encodings["input_ids"])
    offsets = np.fromiter(chain.from_iterable(chain.from_iterable(encodings["offset_mapping"])), np.int64, 2 * len(ids))
    begins, ends = offsets[::2], offsets[1::2]  # [tokens], characters of each text
    documents = measured(texts, ids, lengths, ends)
    scored = np.zeros(len(ids), dtype=bool)
    stops = documents.ends
    for each, first, stop in zip(some, stops - lengths, stops, strict=True):
        for begin, over in each.spans:
            inside = begins[first:stop] < over if each.marked else ends[first:stop] <= over
            scored[first:stop] |= (ends[first:stop] > begin) & inside
    documents.scored[:] = scored
    return documents  # no end token is added: the template ends turns itself


def rendered(tokenizer: Any, row: list[dict], tools: Any, how: Writing, number: int) -> list[RenderedText]:
    """Render a conversation to one text, or to one per assistant turn. Errors: `RunError`, with the row and the
    message."""
    messages = [without_nulls(message) for message in row]
    messages = [message | {"content": message.get("content", "")} for message in messages]  # or only tool calls
    offered = _offered(tools, how, f"row {number}")

    def text(count: int, opened: bool = False) -> str:
        try:
            return how.text(tokenizer, messages[:count], offered, opened)
        except Exception as error:  # templates may raise anything
            reason = " ".join(str(error).split())
            part = "" if count == len(messages) else f" up to message {count - 1}"
            raise RunError(
                "LS2042", f"task.messages: the chat template cannot be used on row {number}{part}: {reason}"
            ) from error

    if messages[:1] and messages[0]["role"] == "assistant":
        raise RunError(
            "LS2043",
            f"task.messages: row {number}, message 0 (assistant): the assistant's message has no message before it to "
            "answer; remove such rows",
        )
    if _is_marked(tokenizer, how.template, offered):
        return _marked(tokenizer, messages, offered, how, number, text)
    whole, spans, turns = "" if how.each else text(len(messages)), [], []
    for place, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        where = f"task.messages: row {number}, message {place} (assistant)"
        before, after = text(place, opened=True), text(place + 1)
        if not after.startswith(before):
            raise RunError(
                "LS2044",
                f"{where}: the chat template opens a turn with {_differing_part(before, after)} when it asks for an "
                "answer, but writes the answered turn without it, so the tokens to train on cannot be located. "
                "Try another task.chat_template or task.template_arguments",
            )
        if not how.each and not whole.startswith(after):
            raise RunError(
                "LS2045",
                f"{where}: the chat template changes this turn, or the text before it, when later messages "
                "follow (reasoning models drop the thinking of earlier turns). Set task.turns=per_turn, which "
                "trains each turn on the conversation up to that turn",
            )
        spans.append((len(before), len(after)))
        turns.append(RenderedText(after, spans[-1:]))
    return turns if how.each else [RenderedText(whole, spans)]


def _marked(
    tokenizer: Any, messages: list[dict], offered: Any, how: Writing, number: int, text: Callable[[int], str]
) -> list[RenderedText]:
    """Render as `rendered` does, for a template with marks. `text`: renders the first messages. Errors: `RunError`."""
    places = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    examples = [(place, place + 1) for place in places] if how.each else [(places[0], len(messages))]
    turns = []
    for place, count in examples:
        before = text(place)
        text(count)  # raises, with the row, if the template fails
        whole, marks = marks_of(tokenizer, how.template, messages[:count], offered, how.arguments) or ("", [])
        spans = [span for span in marks if span[0] >= len(before)]
        if not spans:
            raise RunError(
                "LS2400",
                f"task.messages: row {number}, message {place} (assistant): the chat template marks trained text by "
                "{% generation %}, but none in this turn; correct it, or give another task.chat_template",
            )
        turns.append(RenderedText(whole, spans, marked=True))
    return turns


def _offered(tools: Any, how: Writing, place: str) -> Any:
    """Tool schemas of the row at a place, or None. Errors: `RunError`."""
    if isinstance(tools, str) and tools.strip():
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise RunError("LS2046", f"task.tools: column {how.tools!r} of {place} is not JSON: {error}") from None
    if tools and not (isinstance(tools, list) and all(isinstance(each, Mapping) for each in tools)):
        raise RunError(
            "LS2047",
            f"task.tools: column {how.tools!r} must hold lists of schemas, or JSON of them; {place} holds "
            f"{str(tools)[:80]}",
        )
    return without_nulls(tools) if tools else None


def _differing_part(before: str, after: str) -> str:
    """The part of `before` from its first difference to `after`."""
    same = len(list(takewhile(lambda both: both[0] == both[1], zip(before, after, strict=False))))
    return repr(before[max(0, same - 10) :][:60])
