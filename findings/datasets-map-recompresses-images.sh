#!/usr/bin/env bash
# datasets 5.2.0: map over rows with JPEG images (of bytes, as in datasets of the Hub), with a function that returns the row
# with a column more, or changes a row that it has looked at, and leaves its image alone.
# Seen: the image is compressed again with Pillow's default quality, and its pixels change. A function
# that returns the new column only keeps them, and so does filter; a new image (rotate, resize) is stored without loss.
# Run on 2026-11-29.
# Status 0: it still behaves so. Any other: it changed, or could not be installed.
set -euo pipefail
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
python3 -m venv "$room/environment"
"$room/environment/bin/python" -m pip install -q datasets==5.2.0 pillow==12.3.0 numpy==2.4.6
cd "$room"
cat > shown.py <<'PYTHON'
import io

import numpy
import PIL.Image
from datasets import Dataset, Image, disable_progress_bars

disable_progress_bars()
stored = io.BytesIO()
pixels = numpy.random.default_rng(0).integers(0, 255, (32, 32, 3), dtype=numpy.uint8)
PIL.Image.fromarray(pixels).save(stored, "JPEG", quality=95)
original = Dataset.from_dict({"image": [{"bytes": stored.getvalue(), "path": None}], "label": [0]}).cast_column("image", Image())


def off(dataset: Dataset) -> int:
    first, other = (numpy.asarray(each[0]["image"]).astype(int) for each in (original, dataset))
    return abs(first - other).max()


def measured(row: dict) -> dict:
    row["width"] = row["image"].width
    return row


kept = {
    "map(lambda row: {'n': 1})": original.map(lambda row: {"n": 1}),
    "filter(lambda row: row['image'].width > 8)": original.filter(lambda row: row["image"].width > 8),
}
changed = {
    "map(lambda row: {**row, 'n': 1})": original.map(lambda row: {**row, "n": 1}),
    "map that adds row['image'].width to the row": original.map(measured),
}
for name, dataset in {**kept, **changed}.items():
    print(f"{name}: pixels change by up to {off(dataset)}")
assert not any(off(dataset) for dataset in kept.values())
assert all(off(dataset) > 10 for dataset in changed.values())
again = original.map(lambda row: {**row, "n": 1}).map(lambda row: {**row, "m": 1})
print(f"two such maps: {len(stored.getvalue())} bytes are {len(again.with_format('arrow')[0]['image'][0]['bytes'].as_py())}")
PYTHON
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 environment/bin/python shown.py
