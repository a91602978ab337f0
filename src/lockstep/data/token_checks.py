"""Check that the tokenizer represents the texts and that the texts differ, after encoding and before any process
starts.

In: rows, their examples and the tokenizer. Out: notes with counts, or a `RunError` if nothing could be learned.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep.config.run import RunError
from lockstep.data import splitting
from lockstep.data.arrow_cache import Columns

if TYPE_CHECKING:
    from datasets import Dataset

_ROWS = 2_000  # rows whose texts are compared with their tokens
_TOKENS = 1_000_000  # approximate number of tokens counted
_MANY_UNKNOWN = 0.25  # share of tokens
_FEW_DIFFERENT = 0.5  # of the texts
_LEAST = 8  # minimum number of rows for reporting shares
_NEARLY_ALL = 0.9  # of the rows, or of the tokens
_TOKENS_OF_SHARE = 100  # minimum number of tokens for reporting the most frequent one


@dataclass(frozen=True)
class Limit:
    """Maximum number of tokens of a sequence."""

    key: str  # key of the run file
    tokens: int
    special: int  # special tokens among them
    texts: int = 1  # texts that share the rest
    sequences: int = 1  # sequences of an example, each truncated separately
    positions: int | None = None  # maximum number of tokens that the model has positions for


def check_limits(limits: Sequence[Limit]) -> None:
    """Refuse a limit that leaves no token of a text. Errors: `RunError`. The tokenizers library does not truncate below
    the number of special tokens, and at exactly that number keeps only these."""
    for limit in limits:
        key, tokens, special, texts = limit.key, limit.tokens, limit.special, limit.texts
        if tokens < special + texts:
            each = "the text" if texts == 1 else f"each of the {texts} texts"
            raise RunError(
                "LS2440",
                f"{key}: {tokens} token{'s' * (tokens > 1)}, of which the tokenizer's special tokens take {special}, "
                f"so that no token of {each} is left; expected {special + texts} or more",
            )


def check(
    rows: Dataset, texts: Sequence[str], split: str, columns: Columns, side: str, tokenizer: Any, limit: Limit | None
) -> list[str]:
    """Notes on the tokens in the column `side` of a split, encoded from the columns `texts` of `rows`. `limit`: the
    truncation limit. Errors: `RunError` if no token represents any text, or if different texts all became equal."""
    sample, more = _sample(columns, side)
    if not sample:
        return []
    counts = np.unique(np.concatenate(sample), return_counts=True)
    notes = _unknown(counts, tokenizer, split, side, len(columns), more)
    values = _texts(rows, texts, min(len(rows), _ROWS))
    if len(columns) == len(rows):  # else examples are not rows: packed texts, windows
        notes += _alike(values, split, sample[:_ROWS], limit, rows)
    return notes + _constant(values, split, len(rows))


def _sample(columns: Columns, side: str) -> tuple[list[np.ndarray], bool]:
    """The first examples, [T] each, and whether there are more."""
    examples: list[np.ndarray] = []
    tokens, ragged = 0, columns.ragged(side)
    for row in range(len(columns)):
        if tokens >= _TOKENS:
            return examples, True
        examples.append(ragged.row(row))
        tokens += len(examples[-1])
    return examples, False


def _unknown(
    counts: tuple[np.ndarray, np.ndarray], tokenizer: Any, split: str, side: str, examples: int, more: bool
) -> list[str]:
    """A note on many unknown tokens. `counts`: token ids and their frequencies. Errors: `RunError`."""
    ids, numbers = counts
    unknown = tokenizer.unk_token_id
    around = [id_ for id_ in tokenizer.all_special_ids if id_ != unknown]
    of_texts = ~np.isin(ids, around)
    total = int(numbers[of_texts].sum())
    bad = int(numbers[ids == unknown].sum()) if unknown is not None and unknown not in around else 0
    what = "tokens" if side == "input_ids" else "tokens of targets"
    if bad == total and not more:
        names = ", ".join(map(repr, tokenizer.convert_ids_to_tokens(ids.tolist())[:4])) or "nothing"
        raise RunError(
            "LS2441",
            f"tokenizer: none of its {len(tokenizer):,} tokens represents any text of the {examples:,} examples of "
            f"{split}: their {int(numbers.sum()):,} {what} are {names}, so nothing could be learned; use a tokenizer "
            "for these texts, or set tokenizer.train",
        )
    notes = []
    if total and bad / total >= _MANY_UNKNOWN:
        notes.append(
            f"{bad:,} of {total:,} {what} of {split} ({bad / total:.0%}) are {tokenizer.unk_token!r}: the tokenizer "
            "does not know these texts"
        )
    if not total:
        return notes
    most, id_ = int(numbers[of_texts].max()), int(ids[of_texts][numbers[of_texts].argmax()])
    name = tokenizer.convert_ids_to_tokens(id_)
    if most == total:
        notes.append(f"all {total:,} {what} of {split} are {name!r}: texts differ only in length")
    elif id_ != unknown and total >= _TOKENS_OF_SHARE and most / total >= _NEARLY_ALL:
        notes.append(f"{most:,} of {total:,} {what} of {split} ({most / total:.0%}) are {name!r}")
    return notes


def of_stream(rows: Iterator[Dataset], texts: Sequence[str], split: str) -> list[str]:
    """Notes on the texts of the first rows of a stream. `rows`: its usable rows, in order."""
    first = next(rows, None)
    return [] if first is None else _constant(_texts(first, texts, min(len(first), _ROWS)), split, None)


def pictures(columns: Columns, name: str, split: str) -> list[str]:
    """A note on pictures that are nearly all the same. `name`: the column that holds their pixels."""
    ragged, count = columns.ragged(name), min(len(columns), _ROWS)
    most = Counter(ragged.row(row).tobytes() for row in range(count)).most_common(1)[0][1] if count else 0
    if count < _LEAST or most < _NEARLY_ALL * count:
        return []
    of = f"the {count:,}" if count == len(columns) else f"the first {count:,}"
    return [f"{most:,} of {of} images of {split} are the same picture"]


def _alike(
    values: Mapping[str, Sequence[str]],
    split: str,
    sample: Sequence[np.ndarray],
    limit: Limit | None,
    rows: Dataset,
) -> list[str]:
    """A note if few token sequences represent many texts. `values`: see `_texts`. Errors: `RunError` if one represents
    all."""
    if len(sample) < 2:
        return []
    different = len(set(zip(*(each[: len(sample)] for each in values.values()), strict=True)))
    left = len({each.tobytes() for each in sample})
    cut = limit is not None and all(len(each) == limit.tokens * limit.sequences for each in sample)
    why, what = "", "use a tokenizer that knows these texts"
    if limit is not None and cut:
        why, what = f", because every text is truncated to {limit.tokens} tokens", f"raise {limit.key}"
        if limit.positions is not None and limit.positions <= limit.tokens:
            what = f"use a model with positions for more than {limit.positions} tokens, or other texts"
    elif different > left and (keys := _unwritten(rows.select(range(len(sample))), list(values), left)):
        why = f", because they differ only in keys that the chat template does not write ({', '.join(map(repr, keys))})"
        if left == 1:
            raise RunError(
                "LS2411",
                f"data: {different:,} different conversations of {split} become the same {len(sample[0])} tokens{why}, "
                "so nothing could be learned; correct the data, or use a template that writes them",
            )
    if left == 1 and different > 1:
        raise RunError(
            "LS2442",
            f"{'data' if cut else 'tokenizer'}: {different:,} different texts of {split} "
            f"become the same {len(sample[0])} tokens{why}, so nothing could be learned; {what}",
        )
    if len(sample) >= _LEAST and different > 1 and left <= _FEW_DIFFERENT * different:
        of = "" if len(sample) == len(next(iter(values.values()))) else f" of the first {len(sample):,} rows"
        less = why or ": the tokenizer does not distinguish the others"
        return [f"{different:,} different texts{of} of {split} give only {left:,} different sequences of tokens{less}"]
    return []


def _unwritten(rows: Dataset, texts: Sequence[str], sequences: int) -> list[str]:
    """Message keys other than role and content in which these rows differ, if without these keys at most `sequences`
    rows are distinct; else empty, also if the columns `texts` hold no messages."""
    values_of: dict[str, set[str]] = {}  # key of messages -> values in different rows
    same = set()
    for row in zip(*(rows[name] for name in texts), strict=True):
        messages = [m for value in row if isinstance(value, list) for m in value if isinstance(m, Mapping)]
        for key in {key for message in messages for key in message}:
            values_of.setdefault(key, set()).add(splitting.normalized([message.get(key) for message in messages]))
        others = [value for value in row if not isinstance(value, list)]
        same.add(splitting.normalized([others, *([m.get("role"), m.get("content")] for m in messages)]))
    keys = sorted(key for key, some in values_of.items() if len(some) > 1 and key not in ("role", "content"))
    return keys if len(same) <= sequences else []


def _constant(values: Mapping[str, Sequence[str]], split: str, rows: int | None) -> list[str]:
    """Notes on rows that nearly all hold the same text, and on columns that hold the same or equal each other in every
    row. `values`: see `_texts`; `rows`: number of all rows of the split; None: not known."""
    count = len(next(iter(values.values()), ()))
    if count < _LEAST:
        return []
    most = Counter(zip(*values.values(), strict=True)).most_common(1)[0][1]
    of_all = count == rows
    where = f"rows of {split}" if of_all else f"the first {count:,} rows of {split}"
    number = f"{most:,} of {count:,}" if of_all else f"{most:,} of"
    every = f"all {count:,}" if of_all else "all of"
    if most >= _NEARLY_ALL * count:
        return [f"{every if most == count else number} {where} hold the same text ({', '.join(values)})"]
    notes = [f"{every} {where} hold the same text in {name}" for name, each in values.items() if len(set(each)) == 1]
    for (name, each), (other, more) in combinations(values.items(), 2):
        if each == more:
            notes.append(f"{every} {where} hold the same text in {name} as in {other}")
    return notes


def _texts(rows: Dataset, texts: Sequence[str], count: int) -> dict[str, list[str]]:
    """Values of each of the columns `texts` in the first rows, as they are written; of conversations, without nulls."""
    first = rows.select_columns(list(texts))[:count]
    return {name: [repr(v) if isinstance(v, str) else splitting.normalized(v) for v in first[name]] for name in texts}
