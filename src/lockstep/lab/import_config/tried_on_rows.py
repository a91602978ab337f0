"""Functions passed to `map` that make windows, give tokens the tags of their words, or tokenise texts, tried on rows.

In: such a function. Out: the node that cannot be followed, the function if its result is not what lockstep makes of the
same rows, or None. The function is followed (`followed.py`) with a tokenizer of ours, and not run.
"""

from __future__ import annotations

import ast
from copy import deepcopy
from typing import Any

from lockstep.data.qa_features import TokenWindow
from lockstep.lab.import_config.followed import FollowedFunction, NotFollowed, Ours
from lockstep.lab.import_config.kinds import kind_of
from lockstep.lab.import_config.script import Scope, Script, Unknown
from lockstep.lab.import_config.text_columns import Column

_CLS, _SEP, _PAD = 101, 102, 0
_ROOM, _STRIDE = 7, 3  # tokens of the context in a window, and of the window before it
_FAULTS = (IndexError, KeyError, TypeError, ValueError, AttributeError, RecursionError, ArithmeticError)
# Each row: a question, a context, and the answers in it (empty: none).
_CONTEXT = "Norwich lies on the Wensum in Norfolk, and its market is older than the castle."
_ROWS = (
    ("Where does it lie?", _CONTEXT, ("on the Wensum", "Norfolk")),
    ("What is it?", _CONTEXT, ("Norwich", "Norwich lies")),
    ("What is older?", _CONTEXT, ("market", "its market")),
    ("Older than what is its market?", _CONTEXT, ("castle",)),
    ("Which letters?", _CONTEXT, ("orw", "ensu")),
    ("How does it end?", _CONTEXT, ("than the castle.",)),
    ("Which county?", "It is Norfolk.", ("Norfolk.", "It")),
    ("What of all?", _CONTEXT, (_CONTEXT,)),
    ("Which river?", _CONTEXT, ("the Wensum ", " Wensum")),
)
_WITHOUT = (*_ROWS[:2], ("What is red?", _CONTEXT, ()), *_ROWS[2:])


def _pieces(text: str) -> list[tuple[int, int]]:
    """Cut a text into tokens of at most four letters, as start and end characters."""
    places, start = [], 0
    for word in text.split(" "):
        places += [(start + each, min(start + each + 4, start + len(word))) for each in range(0, len(word), 4)]
        start += len(word) + 1
    return places


class _Tokens(Ours):
    """The result of a tokenizer call."""

    def __init__(self, entries: dict[str, Any], sequences: list[list[int | None]], words: list[Any]) -> None:
        super().__init__(**entries)
        self.sequences, self.words = sequences, words

    def method(self, node: ast.Call, values: list[Any], words: dict[str, Any]) -> Any:
        name, places = getattr(node.func, "attr", ""), [*values, *words.values()]
        if name in ("sequence_ids", "word_ids") and set(words) <= {"batch_index"} and len(places) <= 1:
            of = self.sequences if name == "sequence_ids" else self.words
            return list(of[places[0] if places else 0])
        return super().method(node, values, words)


class _Tokenizer(Ours):
    """A tokenizer of `texts`; a call with others is not followed."""

    def __init__(self, texts: list[list[Any]], tokens: _Tokens) -> None:
        ids = {"cls_token_id": _CLS, "sep_token_id": _SEP, "pad_token_id": _PAD, "bos_token_id": None}
        super().__init__(**ids, padding_side="right", is_fast=True)
        self.texts, self.tokens = texts, tokens

    def called(self, node: ast.Call, values: list[Any]) -> Any:
        if values != self.texts[: len(values)]:
            raise NotFollowed(node)
        return deepcopy(self.tokens)


def _encoded(rows: tuple[Any, ...]) -> tuple[_Tokens, list[TokenWindow]]:
    """Return the windows of the rows, all of the same length, as a tokenizer gives them, and as lockstep has them."""
    entries: dict[str, list[Any]] = {"input_ids": [], "offset_mapping": [], "overflow_to_sample_mapping": []}
    sequences: list[list[int | None]] = []
    cut: list[TokenWindow] = []
    longest = max(len(_pieces(question)) for question, *_ in rows) + _ROOM + 4
    for row, (question, context, _) in enumerate(rows):
        before, places, first = _pieces(question), _pieces(context), 0
        while first == 0 or first + _STRIDE < len(places):
            part = places[first : first + _ROOM]
            spans = [(0, 0), *before, (0, 0), *part, (0, 0)]
            which: list[int | None] = [None, *[0] * len(before), None, *[1] * len(part), None]
            filled = longest - len(spans)
            ids = [_CLS, *(7 + n for n in range(len(before))), _SEP, *(50 + n for n in range(len(part))), _SEP]
            entries["input_ids"].append(ids + [_PAD] * filled)
            entries["offset_mapping"].append(spans + [(0, 0)] * filled)
            entries["overflow_to_sample_mapping"].append(row)
            sequences.append(which + [None] * filled)
            begins, ends = (
                [span[side] if of == 1 else 0 for span, of in zip(spans, which, strict=True)] for side in (0, 1)
            )
            start = len(before) + 2
            cut.append(TokenWindow(ids, [], start, start + len(part) - 1, begins, ends))
            first += _ROOM - _STRIDE
    entries["attention_mask"] = [[int(each != _PAD) for each in ids] for ids in entries["input_ids"]]
    entries["token_type_ids"] = [[0] * longest for _ in sequences]
    return _Tokens(entries, sequences, []), cut


class _Columns(Ours):
    """The columns of a batch of rows; any other column has the values `others`."""

    def __init__(self, columns: dict[str, Any], others: list[Any]) -> None:
        super().__init__()
        self.entries, self.others = dict(columns), others

    def entry(self, key: Any) -> Any:
        return self.entries.get(key, self.others)


class _OneToOne(Ours):
    """A one-to-one mapping of labels."""

    def entry(self, key: Any) -> Any:
        return ("number of", key)


def _following(script: Script, tokenizer: Ours, mapping: Any = None) -> FollowedFunction:
    functions = {name: each for name, each in script.functions.items() if name not in script.ambiguous}

    def other(node: ast.Name) -> Any:
        if mapping is not None and mapping(node):
            return _OneToOne()
        if kind_of(script, node) == "tokenizer":
            return tokenizer
        if mapping is not None and kind_of(script, node) == "model":
            return Ours(config=Ours(label2id=_OneToOne()))
        if (value := script.known(node, Unknown)) is not Unknown:
            return value
        if (bound := script.bound(node)) is None:
            raise KeyError(node.id)
        return following.elsewhere(bound)

    following = FollowedFunction(
        other, {name: f for name, f in functions.items() if not getattr(f, "decorator_list", None)}
    )
    return following


def other_windows(script: Script, function: Scope, columns: tuple[str, str, str]) -> tuple[ast.AST | None, bool]:
    """Return the node where a function of questions, contexts and answers (`columns`) differs from lockstep (None:
    nowhere), and whether answers that begin at the last token of a window get another start."""
    late = False
    for rows in (_ROWS, _WITHOUT):
        tokens, windows = _encoded(rows)
        questions, contexts = [row[0] for row in rows], [row[1] for row in rows]
        answers = [{"text": list(texts), "answer_start": [of.find(each) for each in texts]} for _, of, texts in rows]
        batch = dict(zip(columns, (questions, contexts, answers), strict=True))
        following = _following(script, _Tokenizer([questions, contexts], tokens))
        try:
            result = following.call(function, [_Columns(batch, questions)])
        except NotFollowed as other:
            return other.node, late
        except _FAULTS:
            return (None if rows is _WITHOUT else function), late  # it takes no question without an answer
        entries = result.entries if isinstance(result, Ours) else result
        if not isinstance(entries, dict) or not _keeps(entries, tokens):
            return function, late
        of_windows = tokens.entries["overflow_to_sample_mapping"]
        spans = [
            window.token_span(start[0], start[0] + len(texts[0])) if texts else (0, 0)
            for window, texts, start in (
                (window, answers[row]["text"], answers[row]["answer_start"])
                for window, row in zip(windows, of_windows, strict=True)
            )
        ]
        theirs = list(zip(*(entries.get(f"{side}_positions", ()) for side in ("start", "end")), strict=False))
        if [end for _, end in theirs] != [end for _, end in spans]:
            return function, late
        for window, own, its in zip(windows, spans, theirs, strict=True):
            late = late or (own != its and own[0] == window.last)
            if own != its and own[0] != window.last:
                return function, late
    return None, late


def _keeps(entries: dict[Any, Any], tokens: Ours) -> bool:
    """Return whether the model inputs in `entries` are the tokenizer's output, unchanged."""
    inputs = ("input_ids", "attention_mask", "token_type_ids")
    return "input_ids" in entries and all(entries[each] == tokens.entries[each] for each in inputs if each in entries)


_TEXTS = (
    (" Where does It lie? ", "It lies on the Wensum,\nin Norfolk.", "Sur la  Wensum."),
    ("One", "two words", "Un"),
    ("http://example.org <b>3,5 %</b>; e-mail: a@b.c", "UPPER lower", "Où ? À l'Est -- d'accord !"),
    ("One", "a long text of many words, " * 9, "Une phrase assez longue, " * 9),
)
_LABELS = tuple(Ours() for _ in _TEXTS)
_SIDES = ("text", "text_pair", "text_target")


def _ids(*texts: str) -> list[int]:
    """Return tokens that no other texts have."""
    return [_CLS, *(number for text in texts for number in (*map(ord, text), _SEP))]


class _TextTokenizer(Ours):
    """A tokenizer of any texts. `following` evaluates the texts that a call is given by a keyword."""

    following: FollowedFunction

    def called(self, node: ast.Call, values: list[Any]) -> Any:
        words = {str(word.arg): self.following.value(word.value) for word in node.keywords if word.arg in _SIDES}
        sides = dict(zip(_SIDES, values, strict=False)) | words
        wholes = {key: [of] if isinstance(of, str) else of for key, of in sides.items() if of is not None}
        if not wholes or not all(isinstance(of, list) and all(map(_is_text, of)) for of in wholes.values()):
            raise NotFollowed(node)
        one = any(isinstance(of, str) for of in sides.values())
        target = wholes.pop("text_target", None)
        rows = [_ids(*row) for row in zip(*(wholes or {"text": target}).values(), strict=True)]
        entries: dict[str, Any] = {"input_ids": rows, "attention_mask": [[1] * len(row) for row in rows]}
        entries["token_type_ids"] = [[0] * len(row) for row in rows]
        if target is not None and wholes:
            entries["labels"] = [_ids(text) for text in target]
        return _Tokens({key: of[0] if one else of for key, of in entries.items()}, [], [])


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def other_texts(
    script: Script, function: Scope, columns: dict[str, Column], batched: bool, mapping: Any
) -> ast.AST | None:
    """Return the function if its tokens or labels are not those of the texts of `columns`, unchanged behind their
    prefixes, and the labels of the same rows; None if they are, or if it cannot be followed."""
    named: dict[str, list[Any]] = {}
    for place, side in enumerate(_SIDES):
        for column in [columns[side]] if side in columns else []:
            if column.name in named and not column.language:
                return None  # one column as both texts
            texts = [row[place] for row in _TEXTS]
            whole = named.setdefault(column.name, [{} for _ in texts] if column.language else texts)
            for row, text in zip(whole, texts, strict=True):
                if column.language:
                    row[column.language] = text
    parts = [None] if batched else list(range(len(_TEXTS)))
    for part in parts:
        tokenizer = _TextTokenizer(pad_token_id=_PAD, cls_token_id=_CLS, sep_token_id=_SEP, is_fast=True)
        tokenizer.following = following = _following(script, tokenizer, mapping)
        rows = {key: of if part is None else of[part] for key, of in deepcopy(named).items()}
        try:
            result = following.call(function, [_Columns(rows, list(_LABELS) if part is None else _LABELS[part])])  # type: ignore[arg-type]
        except (NotFollowed, *_FAULTS):
            return None  # its statements decide
        entries = result.entries if isinstance(result, Ours) else result
        if not isinstance(entries, dict) or not _is_of_texts(entries, columns, part):
            return function
    return None


def _is_of_texts(entries: dict[Any, Any], columns: dict[str, Column], part: int | None) -> bool:
    """Return whether entries are the tokens of all rows, or of one, and their labels."""
    which = list(range(len(_TEXTS))) if part is None else [part]

    def of(side: str, row: int) -> str:
        return columns[side].prefix + _TEXTS[row][_SIDES.index(side)]

    sides = [side for side in ("text", "text_pair") if side in columns]
    own = [_ids(*(of(side, row) for side in sides)) for row in which]
    usual = {"input_ids": own, "attention_mask": [[1] * len(ids) for ids in own]}
    usual["token_type_ids"] = [[0] * len(ids) for ids in own]
    if "text_target" in columns:
        labels: list[list[Any]] = [[_ids(of("text_target", row)) for row in which]]
    else:
        labels = [[_LABELS[row] for row in which], [("number of", _LABELS[row]) for row in which]]
    actual = {key: value if part is None else [value] for key, value in entries.items()}
    plain = all(actual[key] == of_rows for key, of_rows in usual.items() if key in actual) and "input_ids" in actual
    needed = "text_target" not in columns or "labels" in actual
    return plain and needed and all(actual[key] in labels for key in ("labels", "label") if key in actual)


_WORDS = (("Anna", "lives", "in", "Reykjavik", "."), ("Oslo",), ("Herr", "Hallgrimsson", "visits", "Akureyri"))
_TAGS = tuple(tuple(Ours() for _ in row) for row in _WORDS)  # distinct, and without a known number or text


def other_tags(script: Script, function: Scope, words: str, mapping: Any) -> ast.AST | None:
    """Return the node where a function of words and tags differs from lockstep, which gives the first token of a word
    its tag and the others -100; None if nowhere. `mapping`: whether a name is a one-to-one mapping of labels."""
    longest = 16
    which: list[list[int | None]] = []
    for row in _WORDS:
        of = [None, *(place for place, word in enumerate(row) for _ in _pieces(word)), None]
        which.append(of + [None] * (longest - len(of)))
    ids = [[_PAD if each is None else 50 + each for each in of] for of in which]
    entries = {"input_ids": ids, "attention_mask": [[1] * longest for _ in ids]}
    entries["token_type_ids"] = [[0] * longest for _ in ids]
    tokens = _Tokens(entries, [], which)
    texts, tags = [list(row) for row in _WORDS], [list(row) for row in _TAGS]
    following = _following(script, _Tokenizer([texts], tokens), mapping)
    try:
        result = following.call(function, [_Columns({words: texts}, tags)])
    except NotFollowed as other:
        return other.node
    except _FAULTS:
        return function
    after = result.entries if isinstance(result, Ours) else result
    if not isinstance(after, dict) or not _keeps(after, tokens):
        return function
    own = [
        [
            row[of] if of is not None and of != before else -100
            for before, of in zip([None, *places], places, strict=False)
        ]
        for row, places in zip(tags, which, strict=True)
    ]
    numbered = [[("number of", each) if isinstance(each, Ours) else each for each in row] for row in own]
    return None if after.get("labels") in (own, numbered) else function
