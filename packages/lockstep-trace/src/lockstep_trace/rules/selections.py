"""A rule on the score by which a trainer chooses the best weights, or when to stop."""

from __future__ import annotations

import re
from collections.abc import Iterator

from lockstep_trace.read import Trace
from lockstep_trace.rules.finding import WRONG, Finding

ERRORS = {
    "loss",
    "mae",
    "mse",
    "rmse",
    "mape",
    "wer",
    "cer",
    "perplexity",
    "ppl",
    "error",
    "err",
    "brier",
    "ece",
    "nll",
}
SCORES = {"accuracy", "acc", "f1", "auc", "auroc", "precision", "recall", "bleu", "rouge", "ndcg", "mrr", "iou", "dice"}
SCORES |= {"map", "miou", "r2", "psnr", "ssim", "mcc", "kappa", "pearson", "spearman", "correlation", "em"}
OTHER = {
    "neg",
    "negative",
    "minus",
    "inverse",
    "inverted",
    "inv",
    "gain",
    "drop",
    "gap",
    "delta",
    "improvement",
    "scale",
}


def wrong_way(trace: Trace) -> Iterator[Finding]:
    """Report an error of which the largest value counts as the best, or a score of which the smallest does.

    What the name means is known for a few names alone, without a word that turns it round. Values below 0 may be turned
    round, too, and are left out. Nobody keeps the weights with the largest error."""
    rows: dict[tuple[str, str, str], list[float]] = {}
    for rank in trace.ranks[:1]:
        for row in rank.selections:
            rows.setdefault((row["by"], row["metric"], row["mode"]), []).append(row["value"])
    for (by, metric, mode), values in rows.items():
        words = set(re.split(r"[^a-z0-9]+", metric.lower()))
        is_error, is_score = bool(words & ERRORS), bool(words & SCORES)
        if is_error == is_score or words & OTHER or min(values) < 0 or len(set(values)) < 2:
            continue
        if mode != ("max" if is_error else "min"):
            continue
        best, other = (max, min) if is_error else (min, max)
        which = "largest" if is_error else "smallest"
        what = f"{by} takes the {which} {metric} for the best: {best(values):.4g}, of {other(values):.4g} to "
        what += f"{best(values):.4g} in {len(values)} evaluations"
        usual = f"mode='{'min' if is_error else 'max'}'"
        cause = f"set {f'greater_is_better={not is_error}' if by == 'Trainer' else usual}"
        yield Finding("best-is-worst", what, cause, None, WRONG)
