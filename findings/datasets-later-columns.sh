#!/usr/bin/env bash
# datasets 5.2.0: rows that do not all have the same keys. A key that the first row lacks is dropped from all rows, without a
# word, by `Dataset.from_list`, `Dataset.from_generator` and a `map` that adds a column to some rows only. A stream of the
# same rows keeps it, and so does a JSON file of them.
# Run on 2026-11-30.
# Status 0: it still behaves so. Any other: it changed, or could not be installed.
set -euo pipefail
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
python3 -m venv "$room/environment"
"$room/environment/bin/python" -m pip install -q datasets==5.2.0
cd "$room"
cat > shown.py <<'PYTHON'
import json

from datasets import Dataset, IterableDataset, load_dataset

ROWS = [{"text": "a"}, {"text": "b", "label": 1}, {"text": "c", "label": 0}]


def rows():
    yield from ROWS


def labelled(row):
    return {"label": 1} if row["text"] == "b" else {}


with open("rows.jsonl", "w") as file:
    file.writelines(json.dumps(row) + "\n" for row in ROWS)

columns = {
    "from_list": Dataset.from_list(ROWS).column_names,
    "from_generator": Dataset.from_generator(rows, cache_dir="cache").column_names,
    "map": Dataset.from_list([{"text": row["text"]} for row in ROWS]).map(labelled).column_names,
    "a stream": sorted({name for row in IterableDataset.from_generator(rows) for name in row}, reverse=True),
    "a JSON file": load_dataset("json", data_files="rows.jsonl", split="train", cache_dir="cache").column_names,
}
for way, names in columns.items():
    print(f"{way}: {names}")
    assert names == (["text", "label"] if way.startswith("a ") else ["text"])
PYTHON
HF_HUB_OFFLINE=1 HF_DATASETS_DISABLE_PROGRESS_BARS=1 environment/bin/python shown.py
