#!/usr/bin/env bash
# datasets 5.2.0: a stream is split as its guide shows, validation = stream.take(8) and training = stream.skip(8). Read by
# the workers of a DataLoader, or split by split_dataset_by_node, skip(8) is divided among them: each of four workers skips 2
# rows of its own file. Seen with four files of ten rows: training reads six of the eight validation rows, and six rows are in
# neither. In one process both are right; so a validation set that is read without workers leaks. No warning.
# Run on 2026-11-29.
# Status 0: it still behaves so. Any other: it changed, or could not be installed.
set -euo pipefail
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
python3 -m venv "$room/environment"
"$room/environment/bin/python" -m pip install -q datasets==5.2.0 torch==2.13.0 numpy==2.4.6
cd "$room"
cat > shown.py <<'PYTHON'
import json
from pathlib import Path

import datasets
from datasets.distributed import split_dataset_by_node
from torch.utils.data import DataLoader

for shard in range(4):
    rows = [json.dumps({"row": 10 * shard + number}) for number in range(10)]
    Path(f"{shard}.jsonl").write_text("\n".join(rows) + "\n")


def stream() -> datasets.IterableDataset:
    files = [f"{shard}.jsonl" for shard in range(4)]
    return datasets.load_dataset("json", data_files=files, split="train", streaming=True)


def read(part: datasets.IterableDataset, workers: int) -> list[int]:
    return sorted(int(batch["row"]) for batch in DataLoader(part, batch_size=1, num_workers=workers))


if __name__ == "__main__":
    validation = [row["row"] for row in stream().take(8)]
    assert validation == list(range(8)) and read(stream().skip(8), 0) == list(range(8, 40))
    nodes = [row["row"] for rank in range(4) for row in split_dataset_by_node(stream().skip(8), rank, 4)]
    for name, training in {"4 workers": read(stream().skip(8), 4), "4 nodes": sorted(nodes)}.items():
        shared, lost = set(training) & set(validation), set(range(40)) - set(training) - set(validation)
        print(name, "in both", sorted(shared), "in neither", sorted(lost))
        assert sorted(shared) == [2, 3, 4, 5, 6, 7] and sorted(lost) == [10, 11, 20, 21, 30, 31]
PYTHON
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 environment/bin/python shown.py
