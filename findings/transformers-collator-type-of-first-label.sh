#!/usr/bin/env bash
# transformers 5.23.0: default_data_collator, which Trainer uses where it has no tokenizer, takes the type of a batch's
# labels from its first example. Seen: scores of 1 and 0.5, as JSON writes them, come out as (1, 0) where the example with
# the whole number is first, and as (0.5, 1.0) in the other order: shuffling decides which scores are cut to whole numbers.
# Run on 2026-11-29.
# Status 0: it still behaves so. Any other: it changed, or could not be installed.
set -euo pipefail
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
python3 -m venv "$room/environment"
"$room/environment/bin/python" -m pip install -q torch==2.13.0 transformers==5.23.0
cd "$room"
cat > shown.py <<'PYTHON'
import torch
from transformers import default_data_collator

whole_first = default_data_collator([{"x": [1], "label": 1}, {"x": [2], "label": 0.5}])["labels"]
half_first = default_data_collator([{"x": [2], "label": 0.5}, {"x": [1], "label": 1}])["labels"]
print(whole_first, half_first)
assert whole_first.dtype == torch.int64 and whole_first.tolist() == [1, 0]
assert half_first.dtype == torch.float32 and half_first.tolist() == [0.5, 1.0]
PYTHON
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 environment/bin/python shown.py
