"""Summaries, and other tasks that generate one text from another (headlines, corrections, questions).

In: two text columns. Out: loss and perplexity per target token, and ROUGE-1, -2 and -L of generated texts, all from
sums; the rest is as in `translation`.

ROUGE-1, ROUGE-2 and ROUGE-L (Lin 2004, "ROUGE: A Package for Automatic Evaluation of Summaries") match Google's
`rouge_score` without its stemmer: words are lower-cased runs of a-z and 0-9, so the scores are meaningless for
languages in other scripts.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from lockstep.data.batch import Sums
from lockstep.tasks.translation import Translation, WritingOptions

NAMES = ("rouge1", "rouge2", "rougeL")
_SHARP = 2.0**20  # sums are rounded to multiples of 1 / _SHARP: they keep a precision of 2^-40


class Rouge:
    """Mean ROUGE F-measures of texts, from 0 to 100."""

    names = ("rouge", "rouge_texts")  # of the sums
    scored = NAMES

    def sums(self, written: list[str], references: list[str]) -> dict[str, np.ndarray]:
        """Number of texts and the sums of their F-measures [3]."""
        totals = np.zeros(len(NAMES))
        for one, other in zip(written, references, strict=True):
            totals += f_measures(words(one), words(other))
        return {"rouge": totals * _SHARP, "rouge_texts": np.array(float(len(written)))}

    def scores(self, sums: Sums) -> dict[str, float]:
        """Mean F-measures; empty if `sums` has none."""
        if "rouge" not in sums:
            return {}
        means = sums["rouge"] / _SHARP / max(1.0, float(sums["rouge_texts"]))
        return {name: 100 * float(mean) for name, mean in zip(NAMES, means, strict=True)}


def words(text: str) -> list[str]:
    """Words of a text, as ROUGE compares them."""
    return re.findall("[a-z0-9]+", text.lower())


def f_measures(written: list[str], reference: list[str]) -> np.ndarray:
    """F-measures of `NAMES`: float64 [3]."""
    return np.array([*(_grams(written, reference, size) for size in (1, 2)), _f(*_sequence(written, reference))])


def _grams(written: list[str], reference: list[str], size: int) -> float:
    one, other = (Counter(zip(*(each[i:] for i in range(size)), strict=False)) for each in (written, reference))
    return _f((one & other).total(), one.total(), other.total())


def _sequence(written: list[str], reference: list[str]) -> tuple[int, int, int]:
    """Lengths of the longest common subsequence and of both texts. Bit-parallel: a one marks a position where the
    length does not grow (Hyyro 2004, "Bit-parallel LCS-length computation revisited")."""
    places: Counter[str] = Counter()
    for place, word in enumerate(reference):
        places[word] |= 1 << place
    all_of_them = (1 << len(reference)) - 1
    row = all_of_them
    for word in written:
        same = row & places[word]
        row = ((row + same) | (row - same)) & all_of_them
    return len(reference) - row.bit_count(), len(written), len(reference)


def _f(both: int, written: int, reference: int) -> float:
    """F-measure of precision and recall; 0 if there is no overlap."""
    precision, recall = both / max(1, written), both / max(1, reference)
    return 2 * precision * recall / (precision + recall) if both else 0.0


class SummarizationOptions(WritingOptions):
    """The task's own keys in the run file."""

    source: str = Field("text", description="column of the text")
    target: str = Field("summary", description="column of the summary, or of another target text")
    rouge: bool = Field(True, description="generate texts at each evaluation, and score them by ROUGE-1, -2 and -L")


class Summarization(Translation):
    """Generate one text from another, such as a summary."""

    Options = SummarizationOptions
    greedy_by = "set task.beams=1, or switch generation off (task.samples=0, task.rouge=false)"
    pipeline = "summarization"
    t5_prefix = "summarize: "
    language_keys: ClassVar[tuple[str, ...]] = ()
    display_keys = ("rouge", "beams", "samples")
    answer_name = "summary"
    metric_names = ("accuracy", "perplexity", *NAMES)

    @classmethod
    def overlap_of(cls, options: Any) -> Any:
        return Rouge() if options.rouge else None
