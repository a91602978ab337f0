"""Summaries, and whatever else is one text written for another (headlines, corrections, questions).

In: two columns of texts. Out: loss and perplexity per target token, ROUGE-1, -2 and -L of what the model writes, all
from sums; all else is that of `translation`.

ROUGE-1, ROUGE-2 and ROUGE-L (Lin 2004, "ROUGE: A Package for Automatic Evaluation of Summaries") are those of Google's
`rouge_score` without its stemmer: words are runs of a-z and 0-9, in lower case, so that it says nothing of languages in
other letters.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import numpy as np
from pydantic import Field

from lockstep.data.batch import Sums
from lockstep.tasks.translation import Translation, WritingOptions

NAMES = ("rouge1", "rouge2", "rougeL")
_SHARP = 2.0**20  # sums are rounded to its inverse: these are kept to 2^-40


class Rouge:
    """Mean F-measures of texts, from 0 to 100."""

    names = ("rouge", "rouge_texts")  # of the sums
    scored = NAMES

    def sums(self, written: list[str], references: list[str]) -> dict[str, np.ndarray]:
        """Over these texts: how many they are, and the F-measures' sums [3]."""
        totals = np.zeros(len(NAMES))
        for one, other in zip(written, references, strict=True):
            totals += f_measures(words(one), words(other))
        return {"rouge": totals * _SHARP, "rouge_texts": np.array(float(len(written)))}

    def scores(self, sums: Sums) -> dict[str, float]:
        """None where these are not among the sums."""
        if "rouge" not in sums:
            return {}
        means = sums["rouge"] / _SHARP / max(1.0, float(sums["rouge_texts"]))
        return {name: 100 * float(mean) for name, mean in zip(NAMES, means, strict=True)}


def words(text: str) -> list[str]:
    """The words of a text that are compared."""
    return re.findall("[a-z0-9]+", text.lower())


def f_measures(written: list[str], reference: list[str]) -> np.ndarray:
    """The F-measures of the `NAMES`: float64 [3]."""
    return np.array([*(_grams(written, reference, size) for size in (1, 2)), _f(*_sequence(written, reference))])


def _grams(written: list[str], reference: list[str], size: int) -> float:
    one, other = (Counter(zip(*(each[i:] for i in range(size)), strict=False)) for each in (written, reference))
    return _f((one & other).total(), one.total(), other.total())


def _sequence(written: list[str], reference: list[str]) -> tuple[int, int, int]:
    """Length of the longest common subsequence, and of both. Bit by bit: a one stands where it does not grow (Hyyro
    2004, "Bit-parallel LCS-length computation revisited")."""
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
    """The F-measure of precision and recall; 0 where both have nothing in common."""
    precision, recall = both / max(1, written), both / max(1, reference)
    return 2 * precision * recall / (precision + recall) if both else 0.0


class SummarizationOptions(WritingOptions):
    """The task's own keys in the run file."""

    source: str = Field("text", description="column of the text")
    target: str = Field("summary", description="column of its summary, or of what else is written for it")
    rouge: bool = Field(True, description="write texts at each evaluation, and score them by ROUGE-1, -2 and -L")


class Summarization(Translation):
    """One text for another, shorter or not."""

    Options = SummarizationOptions
    pipeline = "summarization"
    display_keys = ("rouge", "beams", "samples")
    answer_name = "summary"
    metric_names = ("accuracy", "perplexity", *NAMES)

    @classmethod
    def overlap_of(cls, options: Any) -> Any:
        return Rouge() if options.rouge else None
