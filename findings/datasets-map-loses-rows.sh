#!/usr/bin/env bash
# datasets 5.2.0: map with a function that returns None for a row it would leave as it is; for the first row that raises.
# Seen: any later row it returns None for is dropped from the result, in silence; and if that row is the last one, the
# whole result is dropped: what comes back is the dataset as it was, without the new column.
# Run on 2026-11-29.
# Status 0: it still behaves so. Any other: it changed, or could not be installed.
set -euo pipefail
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
python3 -m venv "$room/environment"
"$room/environment/bin/python" -m pip install -q datasets==5.2.0
cd "$room"
cat > shown.py <<'PYTHON'
from datasets import Dataset, disable_progress_bars

disable_progress_bars()
rows = Dataset.from_dict({"x": [0, 1, 2, 3]})


def mapped(without: int) -> dict[str, list[int]]:
    return rows.map(lambda row: None if row["x"] == without else {"y": row["x"] * 10})[:]


print("None for row 2:", mapped(2))
print("None for row 3:", mapped(3))
assert mapped(-1) == {"x": [0, 1, 2, 3], "y": [0, 10, 20, 30]}
assert mapped(2) == {"x": [0, 1, 3], "y": [0, 10, 30]}
assert mapped(3) == {"x": [0, 1, 2, 3]}
try:
    mapped(0)
except AttributeError as error:
    print("None for row 0:", error)
else:
    raise SystemExit("None for row 0 raised no error")
PYTHON
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 environment/bin/python shown.py
