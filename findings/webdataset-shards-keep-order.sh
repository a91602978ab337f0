#!/usr/bin/env bash
# webdataset 1.0.2: `shardshuffle` shuffles the shards with a seed that is drawn once, so every epoch of a data set reads them
# in the same order. With `detshuffle=True`, whose order depends on the epoch, that is mended in one process and in workers
# that persist; workers that the DataLoader starts anew begin with the first epoch's order each time.
# Run on 2026-11-30.
# Status 0: it still behaves so. Any other: it changed, or could not be installed.
set -euo pipefail
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
python3 -m venv "$room/environment"
"$room/environment/bin/python" -m pip install -q torch==2.13.0 webdataset==1.0.2 numpy==2.4.6
cd "$room"
cat > shown.py <<'PYTHON'
import torch
import webdataset

SHARDS = [f"{number:02d}.tar" for number in range(12)]
for number, shard in enumerate(SHARDS):
    with webdataset.TarWriter(shard) as writer:
        for row in range(2):
            writer.write({"__key__": f"{number:02d}-{row}", "cls": number})


def epochs(workers: int, persistent: bool, **options: bool) -> list[list[int]]:
    rows = webdataset.WebDataset(SHARDS, shardshuffle=100, **options).decode().map(lambda row: row["cls"])
    loader = torch.utils.data.DataLoader(rows, batch_size=None, num_workers=workers, persistent_workers=persistent)
    return [list(loader) for _ in range(3)]


if __name__ == "__main__":
    for options in ({}, {"detshuffle": True}):
        for workers, persistent in ((0, False), (2, True), (2, False)):
            first, *later = epochs(workers, persistent, **options)
            repeats = all(epoch == first for epoch in later)
            print(f"{options or 'shardshuffle alone'}, workers {workers}, persistent {persistent}: one order {repeats}")
            assert sorted(first) == sorted(list(range(12)) * 2)
            assert repeats == (not options or (workers > 0 and not persistent))
PYTHON
OMP_NUM_THREADS=1 environment/bin/python shown.py
