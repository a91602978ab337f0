#!/usr/bin/env bash
# torch 2.13.0: ReduceLROnPlateau of a metric below zero, such as a log-likelihood (mode "max") or an energy ("min"). The
# default threshold is relative, `best * (1 + 0.0001)` in mode "max", and of a negative best that is *worse* than the best.
# Seen: a metric that falls a little at each of 1000 steps counts as an improvement each time, so the learning rate is never
# reduced, with patience 0; the same numbers above zero reduce it at every step. threshold_mode="abs" reduces in both.
# Run on 2026-11-29.
# Status 0: it still behaves so. Any other: it changed, or could not be installed.
set -euo pipefail
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
python3 -m venv "$room/environment"
"$room/environment/bin/python" -m pip install -q torch==2.13.0 numpy==2.4.6
cd "$room"
cat > shown.py <<'PYTHON'
import torch

STEPS = 1000


def reductions(mode: str, start: float, change: float, **options: str) -> int:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode, patience=0, eps=0.0, **options)
    count, metric = 0, start
    for _ in range(STEPS):
        before = optimizer.param_groups[0]["lr"]
        plateau.step(metric)
        count += optimizer.param_groups[0]["lr"] < before
        metric += change
    return count


for mode, sign in (("max", -1.0), ("min", 1.0)):
    below, above = reductions(mode, -1.0, sign * 5e-5), reductions(mode, 2.0, sign * 5e-5)
    absolute = reductions(mode, -1.0, sign * 5e-5, threshold_mode="abs")
    print(f"{mode}: of a worsening metric {below} reductions below zero, {above} above, {absolute} with an absolute threshold")
    assert below == 0
    assert above > 300
    assert absolute > 300
PYTHON
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 environment/bin/python shown.py
