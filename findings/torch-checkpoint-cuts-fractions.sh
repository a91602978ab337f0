#!/usr/bin/env bash
# torch 2.13.0: torch.distributed.checkpoint.load of floats into a tensor of integers (a script's counter that was a float
# when it was saved); sizes are compared, dtypes are not.
# Seen: 1.7 becomes 1 and NaN some integer, and nothing is said; another size is refused.
# Run on 2026-11-29.
# Status 0: it still behaves so. Any other: it changed, or could not be installed.
set -euo pipefail
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
python3 -m venv "$room/environment"
"$room/environment/bin/python" -m pip install -q torch==2.13.0 numpy
cd "$room"
cat > shown.py <<'PYTHON'
import torch
import torch.distributed.checkpoint as dcp

dcp.save({"seen": torch.tensor([1.7, -1.7, float("nan")])}, checkpoint_id="kept", no_dist=True)
target = {"seen": torch.zeros(3, dtype=torch.int64)}
dcp.load(target, checkpoint_id="kept", no_dist=True)
print("saved [1.7, -1.7, nan], loaded", target["seen"].tolist())
assert target["seen"].tolist()[:2] == [1, -1]

try:
    dcp.load({"seen": torch.zeros(2)}, checkpoint_id="kept", no_dist=True)
except BaseException as error:
    assert "Size mismatch" in str(error)
else:
    raise AssertionError("another size was loaded")
PYTHON
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 environment/bin/python shown.py
