#!/usr/bin/env bash
# torch 2.13.0: swa_utils.update_bn, which is said to set the statistics of BatchNorm to those of the data, over a loader whose
# last batch is shorter (130 rows in batches of 64).
# Seen: each batch counts the same, so that each of the last two rows counts as much as 32 others. And the variance is the mean of
# the batches' variances. The order of rows changes both.
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
from torch.optim.swa_utils import update_bn
from torch.utils.data import DataLoader

usual = torch.zeros(128, 1)
usual[::2] = 1.0
rare = torch.full((2, 1), 9.0)
for name, data in (("two rows of 9 last", torch.cat([usual, rare])), ("two rows of 9 first", torch.cat([rare, usual]))):
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(1))
    update_bn(DataLoader(data, batch_size=64), model)
    mean, variance = model[0].running_mean.item(), model[0].running_var.item()
    print(f"{name}: mean {mean:.3f} (of the data {data.mean():.3f}), variance {variance:.3f} ({data.var():.3f})")
    assert abs(data.mean().item() - 0.631) < 0.001
    assert abs(mean - (3.333 if name.endswith("last") else 0.588)) < 0.01
PYTHON
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 environment/bin/python shown.py
