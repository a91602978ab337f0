"""Infer the task of a dataset, and its columns.

In: a data source (Hub id, folder, file or the built-in set). Out: a `DatasetProfile` (types, sizes and lengths of its
columns), and a `Fit`: the task's keys, with a doubt for each key that could also name another column; or an error that
says what is missing. A fit without doubts means that names and values allow only one reading.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep.config import plugins
from lockstep.config.run import RunError
from lockstep.config.sections import DataSection
from lockstep.data import row_files, source, usable_rows
from lockstep.data.job import task_class
from lockstep.data.row_files import SIDES, is_language
from lockstep.tasks.classification import Classification
from lockstep.tasks.embedding import Embedding
from lockstep.tasks.language_modeling import LanguageModeling
from lockstep.tasks.task import Task
from lockstep.tasks.token_classification import TokenClassification

if TYPE_CHECKING:
    from datasets import Dataset


_ROWS = 1000  # sampled evenly from the training split
_NO_SEMICOLON = "LS2225"  # message code: lines of a text file are not `text;label`
_FEW = 200  # maximum number of distinct values of a label column
_SPLIT_NAMES = {*chain.from_iterable(source.USUAL.values())}
_COUNTED = ("text", "label", "number", "decimal", "true/false")  # kinds whose distinct values are counted


@dataclass(frozen=True)
class DatasetProfile:
    """The columns of a dataset, from rows of its training split."""

    source: str
    sizes: dict[str, int]  # split -> examples
    # column -> text, texts, label, labels, number, decimal, true/false, messages, image or another kind
    kinds: dict[str, str]
    few: dict[str, int]  # column -> its number of distinct values, if small
    characters: dict[str, int]  # text column -> 99th percentile of its length in characters
    languages: tuple[str, ...] = ()  # of a translation column
    plain: bool = False  # a .txt file without labels
    binary: tuple[str, ...] = ()  # columns with values 0 and 1
    aligned: frozenset[tuple[str, str]] = frozenset()  # list columns with equal lengths in every row
    lacking: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # split -> columns of train that it lacks
    same: tuple[str, ...] = ()  # columns with one value in all rows
    joined: tuple[str, ...] = ()  # text columns of separator-joined lists of their own values: "a", "b", "a,b"
    split_column: str | None = None  # column with the split of each row
    ends: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # numeric column -> minimum and maximum
    deep: bool = False  # whether there are nested columns, which were not looked at
    nearly_apart: tuple[str, tuple[str, ...]] | None = None  # a column of split names, and its other values

    hollow: tuple[str, ...] = ()  # mapping columns that are empty in some rows, as answers of unanswerable questions

    @property
    def texts(self) -> list[str]:
        return [name for name, kind in self.kinds.items() if kind == "text"]

    def described(self) -> str:
        """List the columns in one line: `text (text), label (label)`."""
        return ", ".join(f"{name} ({kind})" for name, kind in self.kinds.items()).replace("\n", "\\n")


def look(data: DataSection, seed: int = 0, deep: bool = False) -> DatasetProfile:
    """Read a dataset's training split. `deep`: also nested columns, by dotted paths. Errors: `RunError`, as
    `source.load`."""
    loaded, plain = _read(data, seed)
    inner = {path: path for path in _within(loaded.splits["train"])}
    if deep:
        splits = {split: usable_rows.added(rows, inner, split, loaded.name) for split, rows in loaded.splits.items()}
        outer = {path.partition(".")[0] for path in inner}
        loaded = replace(loaded, splits={s: rows.remove_columns(sorted(outer)) for s, rows in splits.items()})
    if data.split_column in loaded.splits["train"].column_names:
        loaded = replace(loaded, splits={s: r.remove_columns([data.split_column]) for s, r in loaded.splits.items()})
    whole = loaded.splits["train"]
    train = whole.select(np.linspace(0, len(whole) - 1, min(_ROWS, len(whole))).astype(int))
    kinds = {name: _kind(train, name) for name in whole.column_names}
    for name in whole.column_names:
        _check_texts(whole, train, name, loaded.name)
    values = {name: [v for v in train[name] if v is not None] for name in kinds if kinds[name] in _COUNTED}
    for name, there in values.items():
        if kinds[name] == "decimal" and all(v != v or v == int(v) for v in there):
            kinds[name] = "number"  # 1.0, 2.0: integers of a table with missing values
    counts = {name: len(set(there)) for name, there in values.items() if kinds[name] != "decimal"}
    lists = [name for name, kind in kinds.items() if kind in ("texts", "labels")]
    return DatasetProfile(
        loaded.name,
        {split: len(rows) for split, rows in loaded.splits.items()},
        kinds,
        {name: count for name, count in counts.items() if _is_few(count, len(train))},
        {name: _most(len(text or "") for text in train[name]) for name, kind in kinds.items() if kind == "text"},
        next((tuple(train[0][name]) for name, kind in kinds.items() if kind == "pair"), ()),
        plain,
        tuple(name for name, there in values.items() if kinds[name] in _COUNTED[2:] and set(there) == {0, 1}),
        frozenset((a, b) for a in lists for b in lists if a != b and _as_long(train, a, b)),
        {split: tuple(c for c in kinds if c not in rows.column_names) for split, rows in loaded.splits.items()},
        tuple(name for name, count in counts.items() if count == 1 and len(train) > 1),
        tuple(name for name, there in values.items() if kinds[name] == "text" and _are_lists(set(there))),
        next((name for name in values if kinds[name] == "text" and _are_splits(set(values[name]))), None),
        {name: (min(there), max(there)) for name, there in values.items() if kinds[name] == "decimal"},
        bool(inner) and not deep,
        next(((n, odd) for n in values if kinds[n] == "text" and (odd := _no_splits(set(values[n])))), None),
        tuple(n for n, kind in kinds.items() if kind == "mapping" and any(map(_is_hollow, train[n]))),
    )


def _is_hollow(members: Mapping[str, Any] | None) -> bool:
    return members is not None and all(value == [] for value in members.values())


def _check_texts(whole: Dataset, train: Dataset, name: str, source: str) -> None:
    """Refuse a column that holds texts in most rows and other values in some. `whole`: the split; `train`: a sample of
    it. Errors: `RunError`, naming the row."""
    if type(whole.features[name]).__name__ != "Json":
        return
    texts = [isinstance(value, str) for value in train[name] if value is not None]
    if sum(texts) <= len(texts) // 2:
        return
    for first, part in usable_rows.lists(whole, name):
        for row, value in enumerate(part, first):
            if value is not None and not isinstance(value, str):
                raise RunError(
                    "LS8270",
                    f"data.train: column {name!r} of {source} holds texts, but row {row:,} holds "
                    f"{str(value)[:60]!r}: make it a text, or remove the row",
                )


def _read(data: DataSection, seed: int) -> tuple[source.Source, bool]:
    """Read the data, and whether they are plain lines of text."""
    lines = data.layout == "rows" and any(row_files.format_of(file) == ".txt" for file in source.files_of(data))
    try:
        loaded = source.load(data, seed)
    except RunError as error:
        if error.code != _NO_SEMICOLON:
            raise
    else:  # semicolons also occur in plain text
        labels = loaded.splits["train"]["label"] if lines else ()
        if not lines or _is_few(len(set(labels)), len(labels)):
            return loaded, False
    return source.load(data, seed, plain="line"), True


def _within(rows: Dataset) -> Iterator[str]:
    """Paths of texts, numbers and other values within mappings; within lists of mappings, the first element."""
    for name, feature in rows.features.items():
        if isinstance(feature, dict) and _kind(rows, name) == "mapping":
            yield from _leaves(name, feature)


def _leaves(path: str, feature: Any) -> Iterator[str]:
    if isinstance(feature, dict):
        for name, inner in feature.items():
            yield from _leaves(f"{path}.{name}", inner)
    elif (first := getattr(feature, "feature", None)) is not None:
        yield from _leaves(f"{path}.0", first)
    else:
        yield path


def _are_splits(values: set[str]) -> bool:
    """Return whether all values are names of splits."""
    words = {value.strip().lower() for value in values}
    return len(words) > 1 and words <= _SPLIT_NAMES and bool(words & set(source.USUAL["train"]))


def _no_splits(values: set[str]) -> tuple[str, ...]:
    """Return the values that name no split, if at least as many others do, among them `train`."""
    words = {value.strip().lower() for value in values}
    odd = tuple(sorted(value for value in values if value.strip().lower() not in _SPLIT_NAMES))
    near = len(words & _SPLIT_NAMES) > 1 and words & set(source.USUAL["train"])
    return odd if near and len(odd) <= len(words & _SPLIT_NAMES) else ()


def _kind(rows: Dataset, name: str) -> str:
    """Return the kind of a column from its values."""
    feature: Any = rows.features[name]
    if type(feature).__name__ == "Image" or getattr(feature, "dtype", "") == "binary":
        return "image"
    inner = getattr(feature, "feature", None)
    if inner is None and isinstance(feature, list) and feature:
        inner = feature[0]
    if inner is not None:
        if isinstance(inner, dict):
            if {"role", "content"} <= set(inner):
                return "messages"
            return "turns" if {"from", "value"} <= set(inner) else "list"
        if type(inner).__name__ == "Json":  # rows with different keys
            return _kind_of_turns(rows[:_FEW][name])
        dtype = str(getattr(inner, "dtype", ""))
        if getattr(inner, "names", None):
            return "labels"
        if "string" in dtype:
            return "texts"
        return "labels" if dtype.startswith(("int", "uint")) else "list"
    if isinstance(feature, dict):
        if set(feature) == {"bytes", "path"}:
            return "image"
        if name == "translation" and len(feature) >= 2:
            return "pair"
        return "turn" if {"role", "content"} <= set(feature) or {"from", "value"} <= set(feature) else "mapping"
    if type(feature).__name__.startswith("Translation"):
        return "pair"
    if getattr(feature, "names", None):
        return "label"
    dtype = str(getattr(feature, "dtype", ""))
    if "string" in dtype:
        return "text"
    kinds = {"int": "number", "uint": "number", "bool": "true/false", "float": "decimal", "double": "decimal"}
    return next((kind for start, kind in kinds.items() if dtype.startswith(start)), dtype or type(feature).__name__)


def _kind_of_turns(lists: Iterable[Any]) -> str:
    """Return the kind of a column of lists whose entries have different keys."""
    turns = [turn if isinstance(turn, dict) else {} for each in lists for turn in each or ()] or [{}]
    shared = set.intersection(*map(set, turns))
    if {"role", "content"} <= shared:
        return "messages"
    return "turns" if {"from", "value"} <= shared else "list"


def _is_few(values: int, rows: int) -> bool:
    """Return whether a column repeats a few values, as labels do."""
    return 2 <= values <= min(_FEW, max(2, rows // 2))


def _are_lists(values: set[str]) -> bool:
    """Return whether some values are separator-joined lists of other values in the column."""
    if len(values) > _FEW or any(len(value) > 100 for value in values):
        return False
    for mark in (",", ";", "|"):
        lists = [[part.strip() for part in value.split(mark)] for value in values]
        alone = {parts[0] for parts in lists if len(parts) == 1}
        if any(len(parts) > 1 and set(parts) & alone for parts in lists):
            return True
    return False


def _as_long(rows: Dataset, a: str, b: str) -> bool:
    return all(len(left or ()) == len(right or ()) for left, right in zip(rows[a], rows[b], strict=True))


def _most(lengths: Iterable[int]) -> int:
    """Return the 99th percentile."""
    ordered = sorted(lengths)
    return ordered[int(0.99 * (len(ordered) - 1))] if ordered else 0


@dataclass(frozen=True)
class Fit:
    """A task for a dataset."""

    keys: dict[str, Any]  # of the run file's `task` section, without name
    doubts: dict[str, str] = field(default_factory=dict)  # key -> other possible columns


def task_named(name: str) -> type[Task]:
    """Return the class of a task, whose facts decide what is written. Errors: `RunError`."""
    cls: Any = task_class(name)
    return cls


def tasks() -> list[str]:
    """Candidate tasks: the built-in ones in the order of trial, then plug-ins that define column names."""
    kinds: dict[str, Any] = {name: kind for name, kind in plugins.loadable("tasks") if name not in _FITS}
    return [*_FITS, *(name for name, kind in kinds.items() if kind.column_aliases)]


def fit(task: str, look: DatasetProfile) -> Fit | None:
    """Return the task's keys for this dataset, or None if the task does not fit."""
    return _FITS[task](look) if task in _FITS else _by_aliases(task_named(task), look)


def _by_aliases(kind: Any, look: DatasetProfile) -> Fit | None:
    """Find the columns of a task by the names it defines for them."""
    columns = {key: called(kind.column_aliases.get(key, ()), list(look.kinds)) for key in kind.column_keys}
    return Fit({key: names[0] for key, names in columns.items()}) if columns and all(columns.values()) else None


def guess(look: DatasetProfile) -> tuple[str, Fit]:
    """Return the task that fits the columns, and its keys. Errors: `RunError` if none does, or if the data seem to be
    for an unsupported task."""
    if look.sizes.get("train") == 1 and not look.plain:
        raise RunError(
            "LS8271",
            f"{look.source} has one row only: {look.described()}. If the rows are inside of that document, "
            "write each row on its own line (.jsonl); if not, give --task NAME",
        )
    if (images := _image_classification(look)) is not None:
        return "image_classification", images
    if (answers := _answer_pairs(look)) is not None:
        return "preference", answers
    if (messages := _messages(look)) is not None:
        return "language_modeling", messages
    for task in ("question_answering", "embedding"):  # tasks with characteristic column names
        if (fitted := fit(task, look)) is not None:
            return task, fitted
    if _are_instructions(look) and (instructions := _language_modeling(look)) is not None:
        return "language_modeling", instructions
    if _are_languages(look) and (pair := _translation(look)) is not None:
        return "translation", pair
    if (why := unsupported_reason(look)) is not None:
        raise RunError("LS8273", why)
    for task in tasks():
        if task == "masked_language_modeling":  # only on request
            continue
        if (fitted := fit(task, look)) is not None and not _is_a_shot(task, fitted):
            return task, fitted
    raise RunError(
        "LS8272",
        f"the columns of {look.source} do not determine a task: {look.described()}. Give --task NAME, and its "
        "columns as task.text=... task.label=...",
    )


def _are_instructions(look: DatasetProfile) -> bool:
    """Return whether names show that one column answers another, and none is a label."""
    names = {c.lower() for c in look.texts}
    return any({*pair} <= names for pair in INSTRUCTIONS) and not {c.lower() for c in look.kinds} & {"label", "labels"}


def _are_languages(look: DatasetProfile) -> bool:
    """Return whether all text columns are named by languages, also if their texts repeat as labels do."""
    return len(look.texts) == 2 and all(map(is_language, look.texts)) and not any(map(is_label, look.kinds))


def _is_a_shot(task: str, fitted: Fit) -> bool:
    """Return whether the text column was guessed among several whose names tell nothing."""
    return task == "language_modeling" and "text" in fitted.doubts and fitted.keys["text"].lower() not in TEXT


def unsupported_reason(look: DatasetProfile) -> str | None:
    """Say which unsupported task a dataset seems to be for, and what to do; None if there is no sign of one."""
    advice = (
        "No text task supports that. Give each row one label (an integer or a text); or use your own model and "
        "loss (task: {name: module, ...}: how-to/own-module on the site); or train without the column: "
        "--task language_modeling"
    )
    one = _of_one_label(look)
    joined = [c for c in look.joined if is_label(c)]
    if joined and len(look.texts) > 1:
        return (
            f"column {joined[0]!r} of {look.source} holds lists of labels, written as one text. Write them as lists "
            '(in jsonl: ["a", "b"]) for classification with several labels (task.multi_label), or keep one label a row'
        )
    odd = [c for c, kind in look.kinds.items() if kind == "list" and is_label(c)]
    if odd and look.texts and not one:
        return f"column {odd[0]!r} of {look.source} holds lists of values that are not labels. {advice}"
    many = [c for c, kind in look.kinds.items() if kind == "number" and c.lower() in LABEL and c not in look.few]
    if many and look.texts and not one:
        return (
            f"column {many[0]!r} of {look.source} holds one distinct number, or nearly one per row, so "
            "it has no classes. Is it a number to predict? Then use --task classification "
            f"task.label={many[0]} task.regression=true. {advice}"
        )
    return None


# -- one task each ---------------------------------------------------------------------------------------------------


def _of_one_label(look: DatasetProfile) -> list[str]:
    """Label columns with one label per row."""
    return [c for c in look.few if is_label(c) and c not in look.binary]


def _several_labels(look: DatasetProfile) -> dict[str, Any] | None:
    """Return the keys of a multi-label column, or of several 0/1 columns."""
    pairs = {name for pair in look.aligned for name in pair}
    lists = [c for c, k in look.kinds.items() if k in ("texts", "labels") and is_label(c) and c not in pairs]
    if lists:
        return {"label": lists[0], "multi_label": True}
    if len(look.binary) > 1 and "label" not in look.binary:
        return {"label": list(look.binary), "multi_label": True}
    return None


def _numbers(look: DatasetProfile) -> tuple[dict[str, Any], dict[str, str]] | None:
    """Return the keys of a numeric target column, and other possible targets."""
    decimal = [c for c, kind in look.kinds.items() if kind == "decimal" and _might_be_read(c, look)]
    called = [c for c in decimal if c.lower() in SCORE]
    if called:
        return {"label": called[0], "regression": True}, _doubts("label", unlike(called[0], called), "the number")
    if len(decimal) == 1:
        doubt = "its name does not mark it as the target"
        return {"label": decimal[0], "regression": True}, {"label": doubt}
    return None


def _doubts(key: str, columns: list[str], what: str) -> dict[str, str]:
    """Why a key might name another of these columns."""
    return {key: f"{', '.join(columns)} might be {what} as well"} if columns else {}


def _classification(look: DatasetProfile) -> Fit | None:
    if look.texts and not _of_one_label(look):
        keys, doubts = _read_fit(look.texts, look)
        if (several := _several_labels(look)) is not None:
            return Fit(keys | several, doubts)
        if (numbers := _numbers(look)) is not None:
            return Fit(keys | numbers[0], doubts | numbers[1])
    by_name = [c for c in look.few if is_label(c)]
    labels = [c for c, kind in look.kinds.items() if kind == "label"]
    truths = [c for c in look.few if look.kinds[c] == "true/false"]
    others = sorted((c for c in look.texts if c in look.few), key=lambda c: look.few[c])
    exact = [c for name in LABEL for c in [*labels, *by_name] if c.lower() == name]
    label = first(exact, labels, by_name, truths, others)
    texts = [c for c in look.texts if c != label]
    if label is None or not texts:
        return None
    short = [c for c in others if look.few[c] <= CLASSES]
    rivals = unlike(label, exact) or ([] if exact else unlike(label, [*labels, *by_name, *truths, *short]))
    keys, of_texts = _read_fit(texts, look)
    return Fit(keys | {"label": label}, _doubts("label", rivals, "the label") | of_texts)


def _read_fit(texts: list[str], look: DatasetProfile) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the keys of one or two text columns, and other possible columns for each."""
    if pair := pair_of(texts):
        rest = [c for c in texts if _might_be_read(c, look) and c not in (*pair, *look.few)]
        return {"text": pair[0], "text_pair": pair[1]}, _doubts("text", rest, "a text")
    free = [c for c in texts if c not in look.few] or texts
    longest = sorted(free, key=lambda c: -look.characters[c])
    text = first([c for name in TEXT for c in free if c.lower() == name], longest)
    others = unlike(text, [c for c in free if _might_be_read(c, look)])
    doubts = _doubts("text", others, "the text")
    return {"text": text}, {key: f"{why}, or a second one (task.text_pair)" for key, why in doubts.items()}


def _image_classification(look: DatasetProfile) -> Fit | None:
    images = [c for c, kind in look.kinds.items() if kind == "image"]
    labels = [c for c, kind in look.kinds.items() if kind == "label"]
    label = first(_of_one_label(look), labels, look.few)
    if not images or label is None:
        return None
    rivals = unlike(label, [*dict.fromkeys([*_of_one_label(look), *labels])])
    doubts = _doubts("label", rivals, "the label") | _doubts("image", images[1:], "the image")
    return Fit({"image": images[0], "label": label}, doubts)


def _token_classification(look: DatasetProfile) -> Fit | None:
    words = [c for c, kind in look.kinds.items() if kind == "texts"]
    word = first([c for c in WORDS if c in words], words)
    tags = [c for c, kind in look.kinds.items() if kind in ("texts", "labels") and (word, c) in look.aligned]
    tag = first([c for c in TAGS if c in tags], [c for c in tags if look.kinds[c] == "labels"])
    if not word or not tag:
        return None
    return Fit({"words": word, "tags": tag}, _doubts("tags", unlike(tag, tags), "the tags"))


def _translation(look: DatasetProfile) -> Fit | None:
    if len(look.languages) >= 2:
        return _sides(list(look.languages))
    for sides in SIDES:
        if set(sides) <= set(look.texts):
            return Fit({"source": sides[0], "target": sides[1]})
    languages = [c for c in look.texts if is_language(c)]
    long = [c for c in look.texts if _might_be_read(c, look) and c not in look.few]
    return _sides(languages) if len(languages) >= 2 and set(long) <= set(languages) else None


def _sides(languages: list[str]) -> Fit:
    """Direction of a translation: first language to second, with a doubt, because nothing says otherwise."""
    source, target = languages[:2]
    return Fit(
        {"source": source, "target": target},
        {"source": f"the direction ({source} to {target}) is a guess; to change it, edit task.source and task.target"},
    )


def _summarization(look: DatasetProfile) -> Fit | None:
    texts = next((pair for pair in SUMMARIES if set(pair) <= set(look.texts)), None)
    return Fit({"source": texts[0], "target": texts[1]}) if texts else None


def _embedding(look: DatasetProfile) -> Fit | None:
    """Columns named anchor and positive; or two texts and a decimal similarity score."""
    anchor = first(c for name in ANCHORS for c in look.texts if c.lower() == name)
    positive = first(c for name in POSITIVES for c in look.texts if c.lower() == name)
    if anchor and positive:
        fit: dict[str, Any] = {"anchor": anchor, "positive": positive}
        if negative := [c for c in look.texts if NEGATIVES.fullmatch(c.lower())]:
            fit["negative"] = negative[0] if len(negative) == 1 else negative
        return Fit(fit)
    score = first(c for c, kind in look.kinds.items() if kind == "decimal" and c.lower() in NEAR)
    if score is None or (pair := pair_of(look.texts)) is None:
        return None
    least, most = look.ends[score]
    high = next((each for each in (1, 5, 10, 100) if most <= each), most)
    ends = [0 if least >= 0 else -high, high]
    doubt = f"the scores range from {least:g} to {most:g}, so task.score_range {ends} is a guess"
    return Fit({"anchor": pair[0], "positive": pair[1], "score": score, "score_range": ends}, {"score": doubt})


def _question_answering(look: DatasetProfile) -> Fit | None:
    """SQuAD's columns: a question, its context, and answers with their start."""
    if not {"question", "context"} <= set(look.texts) or look.kinds.get("answers") not in ("mapping", "list"):
        return None
    keys = {"question": "question", "context": "context", "answers": "answers"}
    return Fit(keys | ({"unanswerable": True} if "answers" in look.hollow else {}))


def _masked_language_modeling(look: DatasetProfile) -> Fit | None:
    fitted = _language_modeling(look)
    return fitted if fitted and set(fitted.keys) <= {"text", "document"} else None


def _language_modeling(look: DatasetProfile) -> Fit | None:
    if (messages := _messages(look)) is not None:
        return messages
    if look.plain:
        return Fit({"document": "line" if look.sizes["train"] > 1 else "file"})
    texts = look.texts
    prompt = first(called(PROMPT, texts))
    response = first(c for c in called(RESPONSE, texts) if c != prompt)
    if prompt and response:
        doubts = {}
        for more in ("input", "context"):
            if more in texts and prompt != more and look.characters[more]:
                doubts["prompt"] = f"the column {more} is not read; to learn from both, join them into one column first"
        if "rejected" in texts:
            why = "only the response is learned; --task preference learns from both"
            doubts["response"] = f"rejected is not read: {why}"
        return Fit({"prompt": prompt, "response": response}, doubts)
    longest = sorted(texts, key=lambda c: -look.characters[c])
    text = first([c for name in TEXT for c in texts if c.lower() == name], longest)
    if not text:
        return None
    others = [c for c in unlike(text, texts) if _might_be_read(c, look) and c not in look.few]
    return Fit({"text": text}, _doubts("text", others, "the text"))


def _answer_pairs(look: DatasetProfile) -> Fit | None:
    """A prompt with two answers, as in preference data."""
    spoken = ("messages", "turns", "turn")
    readable = {c for c in look.kinds if c in look.texts or look.kinds[c] in spoken}
    if not {"chosen", "rejected"} <= readable:
        return None
    answers = {look.kinds["chosen"], look.kinds["rejected"]}
    names = (*PROMPT, *MESSAGES) if answers == {"turn"} else PROMPT  # lists may hold whole conversations
    prompt = first(c for c in names if c in readable)
    return Fit({"prompt": prompt} | ({"conversations": True} if answers != {"text"} else {}))


def _messages(look: DatasetProfile) -> Fit | None:
    there = [c for c, kind in look.kinds.items() if kind in ("messages", "turns")]
    name = first([c for c in MESSAGES if c in there], there)
    return Fit({"messages": name}) if name else None


# -- small parts -----------------------------------------------------------------------------------------------------


def _might_be_read(column: str, look: DatasetProfile) -> bool:
    """Return whether a column may be read: neither an id nor constant."""
    return not is_name(column) and column not in look.same


_FITS: dict[str, Callable[[DatasetProfile], Fit | None]] = {
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


TEXT, LABEL = (Classification.column_aliases[key] for key in ("text", "label"))
WORDS, TAGS = TokenClassification.column_aliases.values()
PROMPT, RESPONSE, MESSAGES = LanguageModeling.column_aliases.values()
ANCHORS, POSITIVES, NEAR = Embedding.column_aliases.values()
SCORE = (*LABEL, "score", "similarity", "relatedness", "value", "price")
FIRSTS = [("premise", "hypothesis"), ("question", "passage"), ("question", "sentence"), ("query", "passage")]
INSTRUCTIONS = [  # pairs of names that identify instruction data
    (prompt, response) for prompt in ("instruction", "prompt") for response in ("response", "completion", "output")
]
CLASSES = 50  # maximum number of classes of a label column whose name does not say that it is one
NEGATIVES = re.compile(r"(hard_)?neg(ative)?(_passage)?(_\d+)?")
SUMMARIES = (
    *((text, "summary") for text in ("document", "article", "dialogue", "text", "content")),
    ("article", "highlights"),
    ("document", "abstract"),
)
_IDENTIFYING = {"id", "idx", "index", "url", "link", "uuid", "guid", "hash", "date", "time", "timestamp", "file"}
SECOND = {"1": "2", "a": "b", "A": "B"}  # suffixes of the first and the second column of a pair


def is_known(column: str) -> bool:
    """Return whether a text is a usual column name."""
    names = {*TEXT, *SCORE, *WORDS, *TAGS, *PROMPT, *RESPONSE, *MESSAGES, *chain.from_iterable(FIRSTS)}
    return column.strip().lower() in names or is_name(column)


def is_label(column: str) -> bool:
    """Return whether a name denotes a label: label, airline_sentiment, is_spam, classLabel."""
    parts = _parts(column)
    return parts[0] == "is" or any(part in LABEL for part in parts)


def is_name(column: str) -> bool:
    """Return whether a name denotes an id, which is not read."""
    return not _IDENTIFYING.isdisjoint(_parts(column))


def _parts(column: str) -> list[str]:
    """Words of a name: airline_sentiment, classLabel."""
    return [part.lower() for part in re.split(r"[_\W]+|(?<=[a-z])(?=[A-Z])", column)]


def pair_of(texts: list[str]) -> tuple[str, str] | None:
    """Find two columns that form a pair by name: premise and hypothesis, sentence1 and sentence2, text_a and text_b."""
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
    """Columns with these names, in their order; then columns nested in them: answers.text.0."""
    return [n for n in names if n in columns] + [c for n in names for c in columns if n in c.split(".")[:-1]]


def first(*choices: Iterable[str]) -> str | None:
    """Return the first element of the first non-empty list."""
    return next((each for choice in choices for each in choice), None)
