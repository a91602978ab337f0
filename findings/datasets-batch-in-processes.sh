#!/usr/bin/env bash
# datasets 5.2.0: Dataset.batch with num_proc, which is documented as the number of processes that write the cache.
# Seen: each process makes batches of its own part of the rows. 10 rows in batches of 4 are 4, 4, 2 with one process,
# and 4, 1, 4, 1 with two: short batches stand in the middle. With drop_last_batch each process drops its last one.
# Run on 2026-11-29.
# Status 0: it still behaves so. Any other: it changed, or could not be installed.
set -euo pipefail
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
python3 -m venv "$room/environment"
"$room/environment/bin/python" -m pip install -q datasets==5.2.0
cd "$room"
cat > shown.py <<'PYTHON'
from datasets import Dataset

ROWS = Dataset.from_dict({"row": list(range(10))})

if __name__ == "__main__":
    sizes = {
        (processes, drop): [
            len(each) for each in ROWS.batch(4, num_proc=processes, drop_last_batch=drop)["row"]
        ]
        for processes in (None, 2)
        for drop in (False, True)
    }
    for (processes, drop), each in sizes.items():
        print(f"num_proc={processes} drop_last_batch={drop}: batches of {each}, {sum(each)} rows")
    assert sizes[None, False] == [4, 4, 2]
    assert sizes[2, False] == [4, 1, 4, 1]
    assert (len(sizes[None, True]), len(sizes[2, True])) == (2, 2)
PYTHON
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 environment/bin/python shown.py
