"""BLEU and chrF as functions of sums: what sacrebleu counts in each sentence is added up, over ranks too.

In: what a model wrote, and references. Out: counts of n-grams and lengths; from their sums, the scores that sacrebleu
gives for the gathered corpus. Needs the extra `lockstep-train[translation]`.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep.config.run import RunError

if TYPE_CHECKING:
    from lockstep.data.batch import Sums

SIZES = {"bleu": 10, "chrf": 18}  # lengths, matches and totals of 1- to 4-grams; three counts of 1- to 6-grams


def check(tokenizer: str) -> None:
    """Errors: `RunError`, when sacrebleu or one of its tokenizers is not there."""
    if importlib.util.find_spec("sacrebleu") is None:
        raise RunError(
            "task.bleu: sacrebleu is not installed: pip install 'lockstep-train[translation]', or set task.bleu=false"
        )
    from sacrebleu.metrics.bleu import BLEU

    if tokenizer not in BLEU.TOKENIZERS:
        raise RunError(
            f"task.bleu_tokenizer: sacrebleu has no tokenizer {tokenizer!r}; it has {', '.join(BLEU.TOKENIZERS)}"
        )
    try:
        BLEU(tokenize=tokenizer)
    except (ImportError, RuntimeError, OSError) as error:  # some need packages or models of their own
        raise RunError(f"task.bleu_tokenizer: {tokenizer}: {' '.join(str(error).split())}") from error


class Overlap:
    """The statistics of one BLEU and one chrF2, both with sacrebleu's defaults but for BLEU's tokenizer."""

    names = tuple(SIZES)  # of the sums
    scored = ("bleu", "chrf")

    def __init__(self, tokenizer: str) -> None:
        from sacrebleu.metrics.bleu import BLEU
        from sacrebleu.metrics.chrf import CHRF

        self._metrics: dict[str, Any] = {"bleu": BLEU(tokenize=tokenizer, force=True), "chrf": CHRF()}

    def sums(self, written: list[str], references: list[str]) -> dict[str, np.ndarray]:
        """Counts over these sentences: int64, of the `SIZES`."""
        found = {name: np.zeros(size, dtype=np.int64) for name, size in SIZES.items()}
        for name, metric in self._metrics.items() if written else ():
            found[name] += np.sum(metric._extract_corpus_statistics(written, [references]), axis=0, dtype=np.int64)
        return found

    def scores(self, sums: Sums) -> dict[str, float]:
        """BLEU and chrF2, from 0 to 100; none where the counts are not among the sums."""
        return {
            name: float(metric._compute_score_from_stats([int(count) for count in sums[name]]).score)
            for name, metric in self._metrics.items()
            if name in sums
        }
