#!/usr/bin/env bash
# datasets 5.2.0: IterableDataset.shuffle(...).repeat(n), a usual way to write n epochs.
# Seen: each repetition has the order of the first one; set_epoch changes all of them together. Trained on so, a model sees
# the same batches in the same order in every epoch.
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

epochs = Dataset.from_dict({"x": list(range(50))}).to_iterable_dataset(num_shards=5).shuffle(seed=3, buffer_size=50).repeat(3)
rows = [row["x"] for row in epochs]
print(rows[:8], rows[50:58], rows[100:108])
assert sorted(rows[:50]) == list(range(50)) and rows[:50] != list(range(50))
assert rows[:50] == rows[50:100] == rows[100:]

epochs.set_epoch(1)
rows = [row["x"] for row in epochs]
assert rows[:50] == rows[50:100] == rows[100:]
PYTHON
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 environment/bin/python shown.py
