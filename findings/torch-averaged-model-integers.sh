#!/usr/bin/env bash
# torch 2.13.0: AveragedModel with use_buffers=True, which averages buffers too, and a buffer of integers, as each
# BatchNorm has one, num_batches_tracked.
# Seen: the equal average, which is the default, cuts off the fraction of each step: of the counts 1 to 30 it makes 1,
# not 15. A BatchNorm that weighs by its count (momentum=None) then gives the next batch half of the say: training that
# goes on from the averaged model forgets half of its statistics at once. The average with a decay stays near the count.
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
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

BATCHES = 30

for name, function, expected in (("equal", None, 1), ("decay 0.9", get_ema_multi_avg_fn(0.9), 20)):
    torch.manual_seed(0)
    model = nn.BatchNorm1d(1, momentum=None)
    averaged = AveragedModel(model, multi_avg_fn=function, use_buffers=True)
    for _ in range(BATCHES):
        model(torch.randn(64, 1) + 5)
        averaged.update_parameters(model)
    count, before = int(averaged.module.num_batches_tracked), averaged.module.running_mean.item()
    averaged.module.train()(torch.zeros(64, 1))
    left = averaged.module.running_mean.item() / before
    print(f"{name}: the mean of counts 1 to {BATCHES} is {count}; {left:.2f} of the mean is left after one more batch")
    assert int(model.num_batches_tracked) == BATCHES
    assert count == expected
    assert abs(left - count / (count + 1)) < 1e-3
PYTHON
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 environment/bin/python shown.py
