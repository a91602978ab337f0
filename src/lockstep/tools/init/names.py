"""What columns are called: names that say what a column is for.

In: names. Out: whether one is known, a label, or tells rows apart; two that make a pair.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from lockstep.tasks.classification import Classification
from lockstep.tasks.embedding import Embedding
from lockstep.tasks.language_modeling import LanguageModeling
from lockstep.tasks.token_classification import TokenClassification

TEXT, LABEL = (Classification.column_aliases[key] for key in ("text", "label"))
WORDS, TAGS = TokenClassification.column_aliases.values()
PROMPT, RESPONSE, MESSAGES = LanguageModeling.column_aliases.values()
ANCHORS, POSITIVES, NEAR = Embedding.column_aliases.values()
SCORE = (*LABEL, "score", "similarity", "relatedness", "value", "price")
FIRSTS = [("premise", "hypothesis"), ("question", "passage"), ("question", "sentence"), ("query", "passage")]
INSTRUCTIONS = [  # pairs that say it by themselves, whatever else there is
    (prompt, response) for prompt in ("instruction", "prompt") for response in ("response", "completion", "output")
]
CLASSES = 50  # that a column without a telling name has, at most, where it might be the label
NEGATIVES = re.compile(r"(hard_)?neg(ative)?(_passage)?(_\d+)?")
SUMMARIES = (
    *((text, "summary") for text in ("document", "article", "dialogue", "text", "content")),
    ("article", "highlights"),
    ("document", "abstract"),
)
SECOND = {"1": "2", "a": "b", "A": "B"}  # what the second column of a pair ends in


def is_known(column: str) -> bool:
    """Whether a name is one that columns have, and texts are not."""
    known = (
        *TEXT,
        *SCORE,
        *WORDS,
        *TAGS,
        *PROMPT,
        *RESPONSE,
        *MESSAGES,
        *(each for pair in FIRSTS for each in pair),
    )
    return column.strip().lower() in known or is_name(column)


def is_label(column: str) -> bool:
    """Whether a name says that a column is a label: label, airline_sentiment, is_spam, classLabel."""
    parts = [part.lower() for part in re.split(r"[_\W]+|(?<=[a-z])(?=[A-Z])", column)]
    return parts[0] == "is" or any(part in LABEL for part in parts)


def is_name(column: str) -> bool:
    """Whether a name says that a column tells rows apart, and is not read."""
    parts = {part.lower() for part in re.split(r"[_\W]+|(?<=[a-z])(?=[A-Z])", column)}
    return bool(
        parts & {"id", "idx", "index", "url", "link", "uuid", "guid", "hash", "date", "time", "timestamp", "file"}
    )


def pair_of(texts: list[str]) -> tuple[str, str] | None:
    """Two columns whose names make them a pair: premise and hypothesis, sentence1 and sentence2, text_a and text_b."""
    for pair in FIRSTS:
        if set(pair) <= set(texts):
            return pair
    for name in texts:
        other = name[:-1] + SECOND.get(name[-1:], "")
        if name[-1:] in SECOND and other in texts:
            return name, other
    return None


def unlike(name: str | None, columns: Iterable[str]) -> list[str]:
    return [c for c in dict.fromkeys(columns) if c != name]


def called(names: Iterable[str], columns: list[str]) -> list[str]:
    """Columns of these names, in their order; then those within columns of these names: answers.text.0."""
    return [n for n in names if n in columns] + [c for n in names for c in columns if n in c.split(".")[:-1]]


def first(*choices: Iterable[str]) -> str | None:
    """The first of the first list that has one."""
    return next((each for choice in choices for each in choice), None)
