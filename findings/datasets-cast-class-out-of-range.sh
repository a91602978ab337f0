#!/usr/bin/env bash
# datasets 5.2.0: cast_column of numbers to a ClassLabel with two names.
# Seen: 5 and -3 are kept as labels, where a data set that is made with these features refuses 5; int2str fails for it only
# when it is asked.
# Run on 2026-11-29.
# Status 0: it still behaves so. Any other: it changed, or could not be installed.
set -euo pipefail
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
python3 -m venv "$room/environment"
"$room/environment/bin/python" -m pip install -q datasets==5.2.0
cd "$room"
cat > shown.py <<'PYTHON'
from datasets import ClassLabel, Dataset, Features

kind = ClassLabel(names=["no", "yes"])
cast = Dataset.from_dict({"label": [0, 5, -3]}).cast_column("label", kind)
stream = Dataset.from_dict({"label": [0, 5, -3]}).to_iterable_dataset().cast_column("label", kind)
print("cast:", cast["label"][:], "as a stream:", [row["label"] for row in stream], "names:", cast.features["label"].names)
assert cast["label"][:] == [0, 5, -3] == [row["label"] for row in stream]
for value in (5, -3):
    try:
        made = Dataset.from_dict({"label": [0, value]}, features=Features({"label": kind}))
        print("made with these features:", made["label"][:])
    except ValueError as error:
        print("made with these features:", error)
try:
    Dataset.from_dict({"label": [0, 5]}, features=Features({"label": kind}))
except ValueError:
    pass
else:
    raise AssertionError("5 was taken")
PYTHON
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 environment/bin/python shown.py
