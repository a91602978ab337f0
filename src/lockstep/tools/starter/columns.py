"""What the columns of a data set are for: which task they are of, and which column is what.

In: a data source (Hub id, folder, file or the built-in set). Out: its columns with what they hold, and the task with
its keys, guessed from their names and values. A guess is a guess: `lockstep init` shows it and lets a person change it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lockstep.config.run import RunError
from lockstep.config.sections import DataSection
from lockstep.data import source

if TYPE_CHECKING:
    from datasets import Dataset

TASKS = ("classification", "token_classification", "translation", "language_modeling")
_ROWS = 1000  # looked at of the training split
_FEW = 200  # different values that a column of labels may have, at most

_TEXT = (
    "text",
    "sentence",
    "content",
    "review",
    "document",
    "body",
    "tweet",
    "comment",
    "message",
    "question",
    "premise",
    "title",
    "story",
    "article",
)
_LABEL = (
    "label",
    "labels",
    "category",
    "class",
    "classes",
    "sentiment",
    "emotion",
    "intent",
    "topic",
    "stars",
    "rating",
    "target",
    "y",
)
_PAIRS = [
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("text1", "text2"),
    ("question", "passage"),
    ("question", "sentence"),
    ("query", "passage"),
]
_WORDS = ("tokens", "words")
_TAGS = ("ner_tags", "tags", "pos_tags", "chunk_tags", "labels")
_PROMPT = ("prompt", "instruction", "question", "input", "query")
_RESPONSE = ("response", "completion", "output", "answer", "answers", "chosen", "target")
_MESSAGES = ("messages", "conversation", "conversations", "dialog", "dialogue")
_SIDES = [("source", "target"), ("src", "tgt"), ("src", "trg")]
_LANGUAGE = re.compile(r"[a-z]{2,3}(_[A-Z][A-Za-z]{3})?")


@dataclass(frozen=True)
class Look:
    """What a data set holds, from the first rows of its training split."""

    source: str
    sizes: dict[str, int]  # split -> examples
    kinds: dict[str, str]  # column -> text, texts, label, labels, number, pair, messages, or something else
    few: dict[str, int]  # column of few different values -> how many
    characters: dict[str, int]  # text column -> characters, of which 99 of 100 rows have no more
    languages: tuple[str, ...] = ()  # of a column of pairs
    plain: bool = False  # a .txt file without labels

    @property
    def texts(self) -> list[str]:
        return [name for name, kind in self.kinds.items() if kind == "text"]

    def described(self) -> str:
        """The columns for a person: `text (text), label (label)`."""
        return ", ".join(f"{name} ({kind})" for name, kind in self.kinds.items())


def look(data: DataSection, seed: int = 0) -> Look:
    """Read a data set's training split. Errors: `RunError`, as `source.load`."""
    plain = False
    try:
        found = source.load(data, seed)
    except RunError as error:
        if "no semicolon" not in str(error):
            raise
        found, plain = source.load(data, seed, plain="line"), True
    train = found.splits["train"].select(range(min(_ROWS, len(found.splits["train"]))))
    kinds = {name: _kind(train, name) for name in train.column_names}
    texts = [name for name, kind in kinds.items() if kind == "text"]
    few = {name: len(set(train[name])) for name in kinds if kinds[name] in ("label", "number", "text")}
    languages = ()
    for name, kind in kinds.items():
        if kind == "pair":
            languages = tuple(train[0][name])
    return Look(
        found.name,
        {split: len(rows) for split, rows in found.splits.items()},
        kinds,
        {name: count for name, count in few.items() if _is_few(count, len(train))},
        {name: _most(len(text or "") for text in train[name]) for name in texts},
        languages,
        plain,
    )


def guess(found: Look) -> dict[str, Any]:
    """The `task` section that fits the columns best. Errors: `RunError` when none does."""
    for name in ("messages", *TASKS):
        keys = _messages(found) if name == "messages" else keys_of(name, found)
        if keys is not None:
            return {"name": "language_modeling" if name == "messages" else name, **keys}
    raise RunError(
        f"what {found.source} is for cannot be told from its columns: {found.described()}. "
        "Say it: --task NAME, and its columns as task.text=... task.label=..."
    )


def keys_of(task: str, found: Look) -> dict[str, Any] | None:
    """The task's keys that name columns of this data set, or None when it has none for it."""
    return {
        "classification": _classification,
        "token_classification": _token_classification,
        "translation": _translation,
        "language_modeling": _language_modeling,
    }[task](found)


# -- one task each ---------------------------------------------------------------------------------------------------


def _classification(found: Look) -> dict[str, Any] | None:
    named = [c for c, kind in found.kinds.items() if c.lower() in _LABEL and c in found.few]
    labels = [c for c, kind in found.kinds.items() if kind == "label"]
    others = sorted((c for c in found.texts if c in found.few), key=lambda c: found.few[c])
    label = _first([c for c in _LABEL if c in [*labels, *named]], labels, named, others)
    texts = [c for c in found.texts if c != label]
    if label is None or not texts:
        return None
    for pair in _PAIRS:
        if set(pair) <= set(texts):
            return {"text": pair[0], "text_pair": pair[1], "label": label}
    longest = sorted(texts, key=lambda c: -found.characters[c])
    text = _first([c for c in _TEXT if c in texts], longest)
    return {"text": text, "label": label}


def _token_classification(found: Look) -> dict[str, Any] | None:
    words = [c for c, kind in found.kinds.items() if kind == "texts"]
    word = _first([c for c in _WORDS if c in words], words)
    tags = [c for c, kind in found.kinds.items() if kind in ("texts", "labels") and c != word]
    tag = _first([c for c in _TAGS if c in tags], [c for c in tags if found.kinds[c] == "labels"])
    return {"words": word, "tags": tag} if word and tag else None


def _translation(found: Look) -> dict[str, Any] | None:
    if len(found.languages) >= 2:
        return {"source": found.languages[0], "target": found.languages[1]}
    texts = found.texts
    for sides in _SIDES:
        if set(sides) <= set(texts):
            return {"source": sides[0], "target": sides[1]}
    languages = [c for c in texts if _LANGUAGE.fullmatch(c) and c not in ("id", "url", "tag")]
    return {"source": languages[0], "target": languages[1]} if len(languages) == len(texts) == 2 else None


def _language_modeling(found: Look) -> dict[str, Any] | None:
    if (messages := _messages(found)) is not None:
        return messages
    if found.plain:
        return {"document": "line" if found.sizes["train"] > 1 else "file"}
    texts = found.texts
    prompt = _first([c for c in _PROMPT if c in texts])
    response = _first([c for c in _RESPONSE if c in texts and c != prompt])
    if prompt and response:
        return {"prompt": prompt, "response": response}
    longest = sorted(texts, key=lambda c: -found.characters[c])
    text = _first([c for c in _TEXT if c in texts], longest)
    return {"text": text} if text else None


def _messages(found: Look) -> dict[str, Any] | None:
    there = [c for c, kind in found.kinds.items() if kind == "messages"]
    name = _first([c for c in _MESSAGES if c in there], there)
    return {"messages": name} if name else None


# -- small parts -----------------------------------------------------------------------------------------------------


def _kind(rows: Dataset, name: str) -> str:
    """What a column holds, from its type."""
    feature: Any = rows.features[name]
    inner = getattr(feature, "feature", None)
    if inner is None and isinstance(feature, list) and feature:
        inner = feature[0]
    if inner is not None:
        if isinstance(inner, dict):
            return "messages" if {"role", "content"} <= set(inner) else "list"
        dtype = str(getattr(inner, "dtype", ""))
        if getattr(inner, "names", None):
            return "labels"
        return "texts" if "string" in dtype else "labels" if dtype.startswith(("int", "uint")) else "list"
    if isinstance(feature, dict):
        return "pair" if name == "translation" and len(feature) >= 2 else "mapping"
    if type(feature).__name__.startswith("Translation"):
        return "pair"
    if getattr(feature, "names", None):
        return "label"
    dtype = str(getattr(feature, "dtype", ""))
    if "string" in dtype:
        return "text"
    return "number" if dtype.startswith(("int", "uint", "bool")) else dtype or type(feature).__name__


def _is_few(values: int, rows: int) -> bool:
    """Whether a column repeats a few values, as labels do."""
    return 2 <= values <= min(_FEW, max(2, rows // 2))


def _most(lengths: Iterable[int]) -> int:
    """The length that 99 of 100 do not exceed."""
    ordered = sorted(lengths)
    return ordered[int(0.99 * (len(ordered) - 1))] if ordered else 0


def _first(*choices: Iterable[str]) -> str | None:
    """The first of the first list that has one."""
    return next((each for choice in choices for each in choice), None)
