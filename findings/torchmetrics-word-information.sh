#!/usr/bin/env bash
# torchmetrics 1.9.0 and torcheval 0.0.7: word information preserved (and lost) need the number of words that the reference and
# the hypothesis share in their alignment. Both take the length of the longer text less the edit distance for it, which is too
# small where words are both left out and added: "d a b" and "a b c d" share "a b", and it is 1.
# Definition: Morris, Maier, Green 2004, "From WER and RIL to MER and WIL": WIP = H/N1 * H/N2, with H the number of hits; jiwer
# computes it so. torchmetrics' documentation says "C is the number of correct words"; its `MatchErrorRate` has the same fault.
# Reported in https://github.com/Lightning-AI/torchmetrics/issues/3511.
# Run on 2026-11-30.
# Status 0: it still behaves so. Any other: it changed, or could not be installed.
set -euo pipefail
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
python3 -m venv "$room/environment"
"$room/environment/bin/python" -m pip install -q torch==2.13.0 torchmetrics==1.9.0 torcheval==0.0.7 jiwer==4.0.0 numpy==2.4.6
cd "$room"
cat > shown.py <<'PYTHON'
import jiwer
from torcheval.metrics.functional import word_information_preserved as torcheval_preserved
from torchmetrics.functional.text import match_error_rate, word_error_rate, word_information_preserved

for reference, hypothesis, hits in (("hello world", "hello word", 1), ("d a b", "a b c d", 2)):
    first, second = len(reference.split()), len(hypothesis.split())
    by_hand = hits / first * hits / second
    seen = {
        "torchmetrics": word_information_preserved([hypothesis], [reference]).item(),
        "torcheval": torcheval_preserved([hypothesis], [reference]).item(),
        "jiwer": jiwer.wip(reference, hypothesis),
    }
    mers = match_error_rate([hypothesis], [reference]).item(), jiwer.mer(reference, hypothesis)
    wers = word_error_rate([hypothesis], [reference]).item(), jiwer.wer(reference, hypothesis)
    print(f"{reference!r}, {hypothesis!r}: preserved, by hand {by_hand:.3f},", {k: round(v, 3) for k, v in seen.items()})
    print(f"  match error rate: torchmetrics {mers[0]:.3f}, jiwer {mers[1]:.3f}; word error rate {wers[0]:.3f}, {wers[1]:.3f}")
    assert abs(seen["jiwer"] - by_hand) < 1e-6 and abs(wers[0] - wers[1]) < 1e-6
    agree = hits == 1
    assert (abs(seen["torchmetrics"] - by_hand) < 1e-6) == agree
    assert (abs(seen["torcheval"] - by_hand) < 1e-6) == agree
    assert (abs(mers[0] - mers[1]) < 1e-6) == agree
PYTHON
OMP_NUM_THREADS=1 environment/bin/python shown.py
