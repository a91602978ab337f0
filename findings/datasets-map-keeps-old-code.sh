#!/usr/bin/env bash
# datasets 5.2.0: map of a data set on disk with a function that calls one of another module, run again after that module
# was changed.
# Seen: the second run returns what the first one computed, in silence: the fingerprint holds the code of the mapped function
# and the name of the one that it calls. A change of the mapped function itself is seen.
# Run on 2026-11-29.
# Status 0: it still behaves so. Any other: it changed, or could not be installed.
set -euo pipefail
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
python3 -m venv "$room/environment"
"$room/environment/bin/python" -m pip install -q datasets==5.2.0
cd "$room"
echo '{"text": "a"}' > rows.jsonl
cat > shown.py <<'PYTHON'
import datasets
import labels

datasets.disable_progress_bars()
rows = datasets.load_dataset("json", data_files="rows.jsonl", split="train", cache_dir="cache")
print(rows.map(lambda row: {"label": labels.label_of(row["text"])})["label"][0])
PYTHON
run() {  # run LABEL: the module with this label, then the script
    printf 'def label_of(text):\n    return "%s"\n' "$1" > labels.py
    HF_HUB_OFFLINE=1 PYTHONDONTWRITEBYTECODE=1 environment/bin/python shown.py
}
first=$(run before)
second=$(run after)
sed -i 's/labels.label_of(row\["text"\])/labels.label_of(row["text"]) + ""/' shown.py
third=$(run after)
echo "before the change: $first; after it: $second; after a change of the mapped function: $third"
[ "$first $second $third" = "before before after" ]
