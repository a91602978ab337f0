#!/usr/bin/env bash
# torchmetrics 1.9.0: `MetricTracker.best_metric` takes an epoch whose metric is NaN for the best one, whether the metric is to be
# small or large; after one such epoch no later one is ever better. No warning.
# Run on 2026-11-30.
# Status 0: it still behaves so. Any other: it changed, or could not be installed.
set -euo pipefail
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
python3 -m venv "$room/environment"
"$room/environment/bin/python" -m pip install -q torch==2.13.0 torchmetrics==1.9.0 numpy==2.4.6
cd "$room"
cat > shown.py <<'PYTHON'
import math
import warnings

import torch
from torchmetrics import MeanSquaredError
from torchmetrics.wrappers import MetricTracker

for maximize in (False, True):
    tracker = MetricTracker(MeanSquaredError(), maximize=maximize)
    for error in (3.0, float("nan"), 1.0, 2.0):
        tracker.increment()
        tracker.update(torch.tensor([error]), torch.tensor([0.0]))
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        best, epoch = tracker.best_metric(return_step=True)
    print(f"maximize={maximize}: of the epochs {tracker.compute_all().tolist()} the best is {epoch} with {best}")
    assert math.isnan(best) and epoch == 1 and not raised
PYTHON
OMP_NUM_THREADS=1 environment/bin/python shown.py
