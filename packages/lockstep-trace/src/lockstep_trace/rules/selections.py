"""A rule on the metric by which a trainer chooses the best weights, or when to stop."""

from __future__ import annotations

import re
from collections.abc import Iterator

from lockstep_trace.read import Trace
from lockstep_trace.rules.finding import Finding, weakened

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
# words that do not change a name's meaning, unless it begins with a number ("1-acc")
NEUTRAL = {"eval", "val", "valid", "validation", "dev", "test", "rate", "mean", "avg", "average", "macro", "micro"}
NEUTRAL |= {"weighted", "balanced", "top", "at", "k", "word", "char", "character", "token", "epoch", "step", "score"}


def wrong_way(trace: Trace) -> Iterator[Finding]:
    """Report an error metric whose largest value counts as the best, or a score whose smallest value does.

    The direction is known only for a few names, without a word that reverses it. Metrics with negative values may be
    reversed, too, and are skipped. No one keeps the weights with the largest error of the model itself, but the error
    of an adversary, or on data to be forgotten, may be maximized: other words in the name, and a loss that is
    maximized, make it a suspicion."""
    raised = any(g.get("maximize") for r in trace.ranks[:1] for s in r.steps.values() for g in s[max(s)].groups)
    rows: dict[tuple[str, str, str], list[float]] = {}
    for rank in trace.ranks[:1]:
        for row in rank.selections:
            rows.setdefault((row["by"], row["metric"], row["mode"]), []).append(row["value"])
    for (by, metric, mode), values in rows.items():
        parts = [w for w in re.split(r"[^a-z0-9]+", metric.lower()) if w]
        words = set(parts)
        is_error, is_score = bool(words & ERRORS), bool(words & SCORES)
        if is_error == is_score or words & OTHER or min(values) < 0 or len(set(values)) < 2:
            continue
        if mode != ("max" if is_error else "min"):
            continue
        best, other = (max, min) if is_error else (min, max)
        which = "largest" if is_error else "smallest"
        what = (
            f"{by} treats the {which} {metric} as the best: {best(values):.4g}, in a range of {other(values):.4g} to "
        )
        what += f"{best(values):.4g} over {len(values)} evaluations"
        usual = f"mode='{'min' if is_error else 'max'}'"
        cause = f"set {f'greater_is_better={not is_error}' if by == 'Trainer' else usual}"
        rest = [w for w in parts if w not in NEUTRAL]
        plain = all(w in ERRORS | SCORES or (i and w.isdigit()) for i, w in enumerate(rest))
        otherwise = "a metric of something that should get worse, such as an adversary"
        yield weakened(
            Finding("best-is-worst", what, cause), plain and not raised, otherwise, "what the metric measures"
        )
