"""Whether a tokenizer makes something of the texts: looked at once they are encoded, before any process starts.

In: rows, their examples and the tokenizer. Out: notes with counts, or a `RunError` if nothing could be learned.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from lockstep.config.run import RunError
from lockstep.data.arrow_cache import Columns

if TYPE_CHECKING:
    from datasets import Dataset

_ROWS = 2_000  # rows whose texts are compared with their tokens
_TOKENS = 1_000_000  # approximate number of tokens counted
_MANY_UNKNOWN = 0.25  # share of tokens
_FEW_DIFFERENT = 0.5  # of the texts
_LEAST = 8  # minimum number of rows for reporting shares


class Limit(NamedTuple):
    """Maximum number of tokens of an example."""

    key: str  # key of the run file
    tokens: int
    special: int  # special tokens among them
    texts: int = 1  # texts that share the rest


def check_limits(limits: Sequence[Limit]) -> None:
    """Errors: `RunError` for a limit that leaves no token of a text. The tokenizers library does not truncate below the
    number of special tokens, and at exactly that number keeps only these."""
    for key, tokens, special, texts in limits:
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
    if len(columns) != len(rows):  # examples are not rows: packed texts, windows
        return notes
    return notes + _alike(rows, texts, split, sample[:_ROWS], limit)


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
            f"tokenizer: none of its {len(tokenizer):,} tokens stands for anything in the {examples:,} examples of "
            f"{split}: their {int(numbers.sum()):,} {what} are {names}, so nothing could be learned; use a tokenizer "
            "for these texts, or set tokenizer.train",
        )
    notes = []
    if total and bad / total >= _MANY_UNKNOWN:
        notes.append(
            f"{bad:,} of {total:,} {what} of {split} ({bad / total:.0%}) are {tokenizer.unk_token!r}: the tokenizer "
            "does not know these texts"
        )
    if total and np.count_nonzero(of_texts) == 1:
        name = tokenizer.convert_ids_to_tokens(int(ids[of_texts][0]))
        notes.append(f"all {total:,} {what} of {split} are {name!r}: texts differ by their lengths alone")
    return notes


def _alike(
    rows: Dataset, texts: Sequence[str], split: str, sample: Sequence[np.ndarray], limit: Limit | None
) -> list[str]:
    """A note if few token sequences represent many texts. Errors: `RunError` if one represents all."""
    if len(sample) < 2:
        return []
    different = len({repr(each) for each in _texts(rows, texts, len(sample))})
    left = len({each.tobytes() for each in sample})
    cut = limit is not None and all(len(each) == limit.tokens for each in sample)
    why, what = "", "use a tokenizer that knows these texts"
    if limit is not None and cut:
        why, what = f", as every text is cut to {limit.tokens} tokens", f"raise {limit.key}"
    if left == 1 and different > 1:
        raise RunError(
            "LS2442",
            f"{'data' if cut else 'tokenizer'}: {different:,} different texts of {split} "
            f"become the same {len(sample[0])} tokens{why}, so nothing could be learned; {what}",
        )
    if len(sample) < _LEAST:
        return []
    of = "" if len(sample) == len(rows) else f" of the first {len(sample):,} rows"
    if different == 1:
        return [f"all {len(sample):,} rows{of} of {split} hold the same text ({', '.join(texts)})"]
    if left <= _FEW_DIFFERENT * different:
        return [f"{different:,} different texts{of} of {split} become {left:,} different sequences{why}"]
    return []


def _texts(rows: Dataset, texts: Sequence[str], count: int) -> Iterator[tuple[Any, ...]]:
    """Values of the columns `texts` in the first rows."""
    first = rows.select_columns(list(texts))[:count]
    return zip(*(first[name] for name in texts), strict=True)
