"""Which task a data set is for, and which column is what.

In: a `Look` at its columns. Out: a `Fit`: the task's keys, and of each that might as well be another column why; or
what stands in the way. A fit without doubts follows from names and values that leave one reading.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lockstep.config import plugins
from lockstep.config.run import RunError
from lockstep.data.text_files import SIDES, is_language
from lockstep.tools.init.columns import Look
from lockstep.tools.init.names import (
    ANCHORS,
    CLASSES,
    INSTRUCTIONS,
    LABEL,
    MESSAGES,
    NEAR,
    NEGATIVES,
    POSITIVES,
    PROMPT,
    RESPONSE,
    SCORE,
    SUMMARIES,
    TAGS,
    TEXT,
    WORDS,
    called,
    first,
    is_label,
    is_name,
    pair_of,
    unlike,
)


@dataclass(frozen=True)
class Fit:
    """A task of a data set."""

    keys: dict[str, Any]  # of the run file's `task` section, name left out
    doubts: dict[str, str] = field(default_factory=dict)  # key -> what else it might be


def tasks() -> list[str]:
    """Those that a data set may be for: the built-in ones in the order in which they are tried, then plug-ins that say
    what columns are called."""
    kinds: dict[str, Any] = {name: plugins.find("tasks", name) for name in plugins.names("tasks") if name not in _FITS}
    return [*_FITS, *(name for name, kind in kinds.items() if kind.column_aliases)]


def fit(task: str, look: Look) -> Fit | None:
    """The task's keys that name columns of this data set, or None when it has none for it."""
    return _FITS[task](look) if task in _FITS else _by_aliases(plugins.find("tasks", task), look)


def _by_aliases(kind: Any, look: Look) -> Fit | None:
    """Columns of a task by the names that it has for them."""
    columns = {key: called(kind.column_aliases.get(key, ()), list(look.kinds)) for key in kind.column_keys}
    return Fit({key: names[0] for key, names in columns.items()}) if columns and all(columns.values()) else None


def guess(found: Look) -> tuple[str, Fit]:
    """The task that fits the columns, and its keys. Errors: `RunError` when none does, or when what they seem to be for
    is no task here."""
    if found.sizes.get("train") == 1 and not found.plain:
        raise RunError(
            f"{found.source} holds one row only: {found.described()}. Is it a document that holds the rows? Write each "
            "row on a line of its own (.jsonl), or say what it is: --task NAME"
        )
    if (images := _image_classification(found)) is not None:
        return "image_classification", images
    if (answers := _answer_pairs(found)) is not None:
        return "preference", answers
    if (messages := _messages(found)) is not None:
        return "language_modeling", messages
    for task in ("question_answering", "embedding"):  # whose columns have names that say it
        if (fitted := fit(task, found)) is not None:
            return task, fitted
    if _are_instructions(found) and (instructions := _language_modeling(found)) is not None:
        return "language_modeling", instructions
    if (why := unfit(found)) is not None:
        raise RunError(why)
    for task in tasks():
        if task == "masked_language_modeling":  # for those who ask for it
            continue
        if (fitted := fit(task, found)) is not None and not _is_a_shot(task, fitted):
            return task, fitted
    raise RunError(
        f"what {found.source} is for cannot be told from its columns: {found.described()}. "
        "Say it: --task NAME, and its columns as task.text=... task.label=..."
    )


def _are_instructions(found: Look) -> bool:
    """Whether names say that a column answers another one, and none that there is a label."""
    names = {c.lower() for c in found.texts}
    return any({*pair} <= names for pair in INSTRUCTIONS) and not {c.lower() for c in found.kinds} & {"label", "labels"}


def _is_a_shot(task: str, fitted: Fit) -> bool:
    """Whether one of several texts was taken whose name says nothing."""
    return task == "language_modeling" and "text" in fitted.doubts and fitted.keys["text"].lower() not in TEXT


def unfit(found: Look) -> str | None:
    """What a data set seems to be for that no task here is, with what to do; None where nothing seems so."""
    own = (
        "None of the tasks for texts learns that. Make it a column of one label (an integer or a text) a row; or bring "
        "a model and a loss of your own (task: {name: module, ...}: docs/recipes.md); or leave it out: --task "
        "language_modeling"
    )
    one = _of_one_label(found)
    joined = [c for c in found.joined if is_label(c)]
    if joined and len(found.texts) > 1:
        return (
            f"column {joined[0]!r} of {found.source} holds lists of labels, written as one text. Write them as lists "
            '(in jsonl: ["a", "b"]), and classification learns each (task.multi_label); or as one label a row'
        )
    odd = [c for c, kind in found.kinds.items() if kind == "list" and is_label(c)]
    if odd and found.texts and not one:
        return f"column {odd[0]!r} of {found.source} holds lists of what is no label. {own}"
    many = [c for c, kind in found.kinds.items() if kind == "number" and c.lower() in LABEL and c not in found.few]
    if many and found.texts and not one:
        return (
            f"column {many[0]!r} of {found.source} holds one number only, or nearly as many as rows: no classes to "
            "learn. Is it a number to be foretold? Then --task classification "
            f"task.label={many[0]} task.regression=true. {own}"
        )
    return None


# -- one task each ---------------------------------------------------------------------------------------------------


def _of_one_label(found: Look) -> list[str]:
    """Columns that are called labels, and hold one each."""
    return [c for c in found.few if is_label(c) and c not in found.binary]


def _several_labels(found: Look) -> dict[str, Any] | None:
    """The keys of a column of lists of labels, or of columns of 0 and 1."""
    pairs = {name for pair in found.aligned for name in pair}
    lists = [c for c, k in found.kinds.items() if k in ("texts", "labels") and is_label(c) and c not in pairs]
    if lists:
        return {"label": lists[0], "multi_label": True}
    if len(found.binary) > 1 and "label" not in found.binary:
        return {"label": list(found.binary), "multi_label": True}
    return None


def _numbers(found: Look) -> tuple[dict[str, Any], str] | None:
    """The keys of a column of numbers that are foretold, and why it might be another, if it might."""
    decimal = [c for c, kind in found.kinds.items() if kind == "decimal" and _might_be_read(c, found)]
    called = [c for c in decimal if c.lower() in SCORE]
    if called:
        return {"label": called[0], "regression": True}, _might_be(unlike(called[0], called), "the number")
    if len(decimal) == 1:
        return {"label": decimal[0], "regression": True}, "its name does not say that it is to be foretold"
    return None


def _might_be(columns: list[str], what: str) -> str:
    return f"{', '.join(columns)} might be {what} as well" if columns else ""


def _classification(found: Look) -> Fit | None:
    if found.texts and not _of_one_label(found):
        if (several := _several_labels(found)) is not None:
            keys, doubts = _read(found.texts, found)
            return Fit(keys | several, doubts)
        if (numbers := _numbers(found)) is not None:
            keys, doubts = _read(found.texts, found)
            return Fit(keys | numbers[0], doubts | ({"label": numbers[1]} if numbers[1] else {}))
    named = [c for c in found.few if is_label(c)]
    labels = [c for c, kind in found.kinds.items() if kind == "label"]
    truths = [c for c in found.few if found.kinds[c] == "true/false"]
    others = sorted((c for c in found.texts if c in found.few), key=lambda c: found.few[c])
    exact = [c for name in LABEL for c in [*labels, *named] if c.lower() == name]
    label = first(exact, labels, named, truths, others)
    texts = [c for c in found.texts if c != label]
    if label is None or not texts:
        return None
    doubts = {}
    short = [c for c in others if found.few[c] <= CLASSES]
    rivals = unlike(label, exact) or ([] if exact else unlike(label, [*labels, *named, *truths, *short]))
    if rivals:
        doubts["label"] = f"{', '.join(rivals)} might be the label as well"
    keys, of_texts = _read(texts, found)
    return Fit(keys | {"label": label}, doubts | of_texts)


def _read(texts: list[str], found: Look) -> tuple[dict[str, Any], dict[str, str]]:
    """The keys of the columns that are read, one or two, and why each might be another."""
    doubts = {}
    if pair := pair_of(texts):
        rest = [c for c in texts if _might_be_read(c, found) and c not in (*pair, *found.few)]
        if rest:
            doubts["text"] = f"{', '.join(rest)} might be a text as well"
        return {"text": pair[0], "text_pair": pair[1]}, doubts
    free = [c for c in texts if c not in found.few] or texts
    longest = sorted(free, key=lambda c: -found.characters[c])
    text = first([c for name in TEXT for c in free if c.lower() == name], longest)
    if others := unlike(text, [c for c in free if _might_be_read(c, found)]):
        doubts["text"] = f"{', '.join(others)} might be the text as well, or a second one (task.text_pair)"
    return {"text": text}, doubts


def _image_classification(found: Look) -> Fit | None:
    images = [c for c, kind in found.kinds.items() if kind == "image"]
    labels = [c for c, kind in found.kinds.items() if kind == "label"]
    label = first(_of_one_label(found), labels, found.few)
    if not images or label is None:
        return None
    rivals = unlike(label, [*dict.fromkeys([*_of_one_label(found), *labels])])
    doubts = {"label": f"{', '.join(rivals)} might be the label as well"} if rivals else {}
    more = {"image": f"{', '.join(images[1:])} might be the image as well"} if images[1:] else {}
    return Fit({"image": images[0], "label": label}, doubts | more)


def _token_classification(found: Look) -> Fit | None:
    words = [c for c, kind in found.kinds.items() if kind == "texts"]
    word = first([c for c in WORDS if c in words], words)
    tags = [c for c, kind in found.kinds.items() if kind in ("texts", "labels") and (word, c) in found.aligned]
    tag = first([c for c in TAGS if c in tags], [c for c in tags if found.kinds[c] == "labels"])
    if not word or not tag:
        return None
    others = unlike(tag, tags)
    return Fit(
        {"words": word, "tags": tag}, {"tags": f"{', '.join(others)} might be the tags as well"} if others else {}
    )


def _translation(found: Look) -> Fit | None:
    if len(found.languages) >= 2:
        return _sides(list(found.languages))
    for sides in SIDES:
        if set(sides) <= set(found.texts):
            return Fit({"source": sides[0], "target": sides[1]})
    languages = [c for c in found.texts if is_language(c)]
    long = [c for c in found.texts if _might_be_read(c, found) and c not in found.few]
    return _sides(languages) if len(languages) >= 2 and set(long) <= set(languages) else None


def _sides(languages: list[str]) -> Fit:
    """From the first to the second; nothing says that it is not the other way round."""
    source, target = languages[:2]
    return Fit(
        {"source": source, "target": target},
        {"source": f"of {', '.join(languages)}: nothing says which one is translated into which"},
    )


def _summarization(found: Look) -> Fit | None:
    texts = next((pair for pair in SUMMARIES if set(pair) <= set(found.texts)), None)
    return Fit({"source": texts[0], "target": texts[1]}) if texts else None


def _embedding(found: Look) -> Fit | None:
    """Texts called anchor and positive; or two texts and how near they are, a number with decimals."""
    anchor = first(c for name in ANCHORS for c in found.texts if c.lower() == name)
    positive = first(c for name in POSITIVES for c in found.texts if c.lower() == name)
    if anchor and positive:
        negative = [c for c in found.texts if NEGATIVES.fullmatch(c.lower())]
        more = {"negative": negative[0] if len(negative) == 1 else negative} if negative else {}
        return Fit({"anchor": anchor, "positive": positive} | more)
    score = first(c for c, kind in found.kinds.items() if kind == "decimal" and c.lower() in NEAR)
    if score is None or (pair := pair_of(found.texts)) is None:
        return None
    least, most = found.ends[score]
    high = next((each for each in (1, 5, 10, 100) if most <= each), most)
    ends = [0 if least >= 0 else -high, high]
    doubt = f"scores from {least:g} to {most:g} were seen, from which task.score_range {ends} is guessed"
    return Fit({"anchor": pair[0], "positive": pair[1], "score": score, "score_range": ends}, {"score": doubt})


def _question_answering(found: Look) -> Fit | None:
    """SQuAD's columns: of texts a question and its context, and answers that say where they begin."""
    if not {"question", "context"} <= set(found.texts) or found.kinds.get("answers") not in ("mapping", "list"):
        return None
    keys = {"question": "question", "context": "context", "answers": "answers"}
    return Fit(keys | ({"unanswerable": True} if "answers" in found.hollow else {}))


def _masked_language_modeling(found: Look) -> Fit | None:
    fitted = _language_modeling(found)
    return fitted if fitted and set(fitted.keys) <= {"text", "document"} else None


def _language_modeling(found: Look) -> Fit | None:
    if (messages := _messages(found)) is not None:
        return messages
    if found.plain:
        return Fit({"document": "line" if found.sizes["train"] > 1 else "file"})
    texts = found.texts
    prompt = first(called(PROMPT, texts))
    response = first(c for c in called(RESPONSE, texts) if c != prompt)
    if prompt and response:
        doubts = {}
        for more in ("input", "context"):
            if more in texts and prompt != more and found.characters[more]:
                doubts["prompt"] = f"the column {more} is not read; to learn from both, join them into one column first"
        if "rejected" in texts:
            doubts["response"] = (
                "rejected is not read: only the response is learned; --task preference learns from both"
            )
        return Fit({"prompt": prompt, "response": response}, doubts)
    longest = sorted(texts, key=lambda c: -found.characters[c])
    text = first([c for name in TEXT for c in texts if c.lower() == name], longest)
    if not text:
        return None
    others = [c for c in unlike(text, texts) if _might_be_read(c, found) and c not in found.few]
    return Fit({"text": text}, {"text": f"{', '.join(others)} might be the text as well"} if others else {})


def _answer_pairs(found: Look) -> Fit | None:
    """A prompt with two answers, as data of preferences have them."""
    spoken = ("messages", "turns", "turn")
    readable = {c for c in found.kinds if c in found.texts or found.kinds[c] in spoken}
    if not {"chosen", "rejected"} <= readable:
        return None
    answers = {found.kinds["chosen"], found.kinds["rejected"]}
    names = (*PROMPT, *MESSAGES) if answers == {"turn"} else PROMPT  # lists may hold the whole conversation
    prompt = first(c for c in names if c in readable)
    return Fit({"prompt": prompt} | ({"conversations": True} if answers != {"text"} else {}))


def _messages(found: Look) -> Fit | None:
    there = [c for c, kind in found.kinds.items() if kind in ("messages", "turns")]
    name = first([c for c in MESSAGES if c in there], there)
    return Fit({"messages": name}) if name else None


# -- small parts -----------------------------------------------------------------------------------------------------


def _might_be_read(column: str, found: Look) -> bool:
    """Not what tells rows apart, nor what is the same in all of them."""
    return not is_name(column) and column not in found.same


_FITS: dict[str, Callable[[Look], Fit | None]] = {
    "classification": _classification,
    "token_classification": _token_classification,
    "translation": _translation,
    "summarization": _summarization,
    "language_modeling": _language_modeling,
    "preference": _answer_pairs,
    "reward": _answer_pairs,
    "embedding": _embedding,
    "question_answering": _question_answering,
    "image_classification": _image_classification,
    "masked_language_modeling": _masked_language_modeling,
}
