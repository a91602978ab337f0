#!/usr/bin/env bash
# datasets 5.2.0: DatasetDict.class_encode_column numbers the labels of each split on its own.
# Seen: "negative" is class 0 in train and "positive" is class 0 in test, because test holds no "negative". A model
# trained on the one and scored on the other is scored against other classes; nothing is said.
# Of integer labels, the numbers are sorted as text: 10 becomes class 2, and 2 becomes class 3.
# Run on 2026-11-28.
# Status 0: it still behaves so. Any other: it changed, or could not be installed.
set -euo pipefail
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
python3 -m venv "$room/environment"
"$room/environment/bin/python" -m pip install -q datasets==5.2.0
cd "$room"
cat > shown.py <<'PYTHON'
from datasets import Dataset, DatasetDict, disable_progress_bars

disable_progress_bars()
splits = DatasetDict(
    train=Dataset.from_dict({"label": ["negative", "neutral", "positive"]}),
    test=Dataset.from_dict({"label": ["positive", "neutral"]}),
).class_encode_column("label")
for name, split in splits.items():
    print(name, split.features["label"].names, split["label"][:])
assert splits["train"].features["label"].names == ["negative", "neutral", "positive"]
assert splits["test"].features["label"].names == ["neutral", "positive"]

numbers = Dataset.from_dict({"label": [0, 1, 2, 10]}).class_encode_column("label")
print("of 0, 1, 2, 10:", numbers["label"][:])
assert numbers["label"][:] == [0, 1, 3, 2]
PYTHON
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 environment/bin/python shown.py
