#!/usr/bin/env bash
# datasets 5.2.0: the state of a stream that was read up to the 13th of 40 rows after `set_epoch(1)`. The state says
# "epoch: 1", but `load_state_dict` does not set that epoch, and a stream of another epoch ignores the whole state: without
# a warning it starts over, and all 13 rows are read again. After `set_epoch(1)` it continues where it was.
# Shuffled or not, it is the same.
# Run on 2026-11-30.
# Status 0: it still behaves so. Any other: it changed, or could not be installed.
set -euo pipefail
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
python3 -m venv "$room/environment"
"$room/environment/bin/python" -m pip install -q datasets==5.2.0
cd "$room"
cat > shown.py <<'PYTHON'
import itertools

from datasets import Dataset, IterableDataset


def stream(shuffled: bool) -> IterableDataset:
    rows = Dataset.from_dict({"row": list(range(40))}).to_iterable_dataset(num_shards=8)
    return rows.shuffle(seed=3, buffer_size=1) if shuffled else rows


for shuffled in (False, True):
    first = stream(shuffled)
    first.set_epoch(1)
    head = [row["row"] for row in itertools.islice(first, 13)]
    state = first.state_dict()
    for epoch in (None, 1):
        resumed = stream(shuffled)
        if epoch is not None:
            resumed.set_epoch(epoch)
        resumed.load_state_dict(state)
        tail = [row["row"] for row in resumed]
        again = len(set(head) & set(tail))
        print(f"shuffled {shuffled}, state of epoch {state['epoch']}, set_epoch {epoch}: {again} of 13 rows are read again")
        assert again == (13 if epoch is None else 0)
        assert len(tail) == (40 if epoch is None else 27)
PYTHON
HF_HUB_OFFLINE=1 HF_DATASETS_DISABLE_PROGRESS_BARS=1 environment/bin/python shown.py
