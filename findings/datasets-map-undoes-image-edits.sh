#!/usr/bin/env bash
# datasets 5.2.0: map with a function that changes images in place (thumbnail, paste, ImageDraw) and returns the row.
# Seen: of images that are files (imagefolder, a column of paths) the change is lost: the file's path is stored, the mapped
# dataset has the old pixels and the old size. Of the same images as bytes it is kept.
# Run on 2026-11-29.
# Status 0: it still behaves so. Any other: it changed, or could not be installed.
set -euo pipefail
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
python3 -m venv "$room/environment"
"$room/environment/bin/python" -m pip install -q datasets==5.2.0 pillow==12.3.0 numpy==2.4.6
cd "$room"
cat > shown.py <<'PYTHON'
import os

import numpy
import PIL.Image
from datasets import Dataset, Image, disable_progress_bars, load_dataset

disable_progress_bars()
os.mkdir("images")
white = numpy.full((32, 32, 3), 255, dtype=numpy.uint8)
PIL.Image.fromarray(white).save("images/0.png")


def shrunk(row: dict) -> dict:
    row["image"].thumbnail((8, 8))
    return row


def masked(row: dict) -> dict:
    row["image"].paste((0, 0, 0), (0, 0, 16, 32))
    return row


with open("images/0.png", "rb") as file:
    content = file.read()
sources = {
    "bytes": Dataset.from_dict({"image": [{"bytes": content, "path": None}]}).cast_column("image", Image()),
    "paths": Dataset.from_dict({"image": ["images/0.png"]}).cast_column("image", Image()),
    "imagefolder": load_dataset("imagefolder", data_dir="images", split="train", cache_dir="cache"),
}
for name, dataset in sources.items():
    size = dataset.map(shrunk)[0]["image"].size
    black = int((numpy.asarray(dataset.map(masked)[0]["image"]) == 0).all(-1).sum())
    print(f"{name}: after thumbnail((8, 8)) {size}, after a black rectangle was pasted {black} black pixels")
    assert (size, black) == (((8, 8), 512) if name == "bytes" else ((32, 32), 0))
PYTHON
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 environment/bin/python shown.py
