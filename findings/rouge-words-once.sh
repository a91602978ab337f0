#!/usr/bin/env bash
# rouge 1.0.1: by default it counts each n-gram of a text once, in all three scores: "the the the the" for "the cat sat" has
# precision 1. A text that repeats itself is scored as if it did not, which is what ROUGE's clipped counts are there to notice.
# Definition: Lin 2004, "ROUGE: A Package for Automatic Evaluation of Summaries": sums of Count(gram_n) and Count_match(gram_n),
# "the maximum number of n-grams co-occurring", and for ROUGE-L the length of the longest common subsequence over the number of
# words. `rouge-score` computes them so; `Rouge(exclusive=False)` does for n-grams.
# Its author fixed it in https://github.com/pltrdy/rouge/pull/38 in 2019; the newest release still has it.
# Run on 2026-11-30.
# Status 0: it still behaves so. Any other: it changed, or could not be installed.
set -euo pipefail
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
python3 -m venv "$room/environment"
"$room/environment/bin/python" -m pip install -q rouge==1.0.1 rouge-score==0.1.2
cd "$room"
cat > shown.py <<'PYTHON'
from rouge import Rouge
from rouge_score.rouge_scorer import RougeScorer

scorer = RougeScorer(["rouge1", "rouge2", "rougeL"])
for written, reference in (("a b c d", "a b x d"), ("the the the the", "the cat sat"), ("a b c a b c a b c", "a b c")):
    mine, counted = (Rouge(**options).get_scores(written, reference)[0] for options in ({}, {"exclusive": False}))
    theirs = scorer.score(reference, written)
    print(f"{written!r} for {reference!r}:")
    for name in ("1", "2", "l"):
        precisions = mine[f"rouge-{name}"]["p"], theirs[f"rouge{name.upper()}"].precision
        print(f"  ROUGE-{name.upper()} precision: rouge {precisions[0]:.2f}, rouge-score {precisions[1]:.2f}")
        repeats = len(set(written.split())) < len(written.split())
        nothing = precisions == (0, 0)
        assert (abs(precisions[0] - precisions[1]) > 0.4) == (repeats and not nothing)
        if name != "l":
            assert abs(counted[f"rouge-{name}"]["p"] - precisions[1]) < 1e-6
PYTHON
environment/bin/python shown.py
