#!/usr/bin/env bash
# datasets 5.2.0: casting a column of text to ClassLabel takes a text that is no class name, but reads as a number, for
# the index of a class. Seen: of the names "1", "2", "3" the text "1" is class 0, by its name, and the text "0", which is
# no name, is class 0 as well, by its index. A text that is no name and no number raises an error, as one would expect.
# Run on 2026-11-28.
# Status 0: it still behaves so. Any other: it changed, or could not be installed.
set -euo pipefail
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
python3 -m venv "$room/environment"
"$room/environment/bin/python" -m pip install -q datasets==5.2.0
cd "$room"
cat > shown.py <<'PYTHON'
from datasets import ClassLabel, Dataset, disable_progress_bars

disable_progress_bars()
stars = Dataset.from_dict({"stars": ["1", "2", "3", "0"]}).cast_column("stars", ClassLabel(names=["1", "2", "3"]))
print(stars["stars"][:])
assert stars["stars"][:] == [0, 1, 2, 0]
try:
    Dataset.from_dict({"stars": ["none"]}).cast_column("stars", ClassLabel(names=["1", "2", "3"]))
except ValueError as error:
    print("of the text none:", error)
else:
    raise AssertionError("a text that is no class was taken")
PYTHON
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 environment/bin/python shown.py
