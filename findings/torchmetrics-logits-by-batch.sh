#!/usr/bin/env bash
# torchmetrics 1.9.0: metrics of binary predictions take numbers outside [0, 1] for logits, and decide so for each batch. Logits of
# a batch that all lie between 0 and 1 are used as probabilities: the score of the same logits depends on how they were batched.
# Run on 2026-11-30.
# Status 0: it still behaves so. Any other: it changed, or could not be installed.
set -euo pipefail
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
python3 -m venv "$room/environment"
"$room/environment/bin/python" -m pip install -q torch==2.13.0 torchmetrics==1.9.0 numpy==2.4.6
cd "$room"
cat > shown.py <<'PYTHON'
import torch
from torchmetrics.classification import BinaryAUROC, BinaryAveragePrecision, BinaryF1Score

logits = torch.tensor([0.2, 0.9, 0.6, 0.1, -3.0, 5.0, -1.0, 2.0])
labels = torch.tensor([0, 1, 0, 1, 0, 1, 1, 0])
for kind in (BinaryAUROC, BinaryAveragePrecision, BinaryF1Score):
    values = {}
    for name, numbers in (("logits", logits), ("probabilities", logits.sigmoid())):
        for rows in (8, 4):
            metric = kind()
            for start in range(0, 8, rows):
                metric.update(numbers[start : start + rows], labels[start : start + rows])
            values[name, rows] = round(metric.compute().item(), 4)
    print(kind.__name__, values)
    assert values["probabilities", 8] == values["probabilities", 4] == values["logits", 8] != values["logits", 4]
PYTHON
OMP_NUM_THREADS=1 environment/bin/python shown.py
