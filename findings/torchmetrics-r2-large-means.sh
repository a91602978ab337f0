#!/usr/bin/env bash
# torchmetrics 1.9.0: `R2Score` keeps float32 sums of squares. For targets whose mean is large beside their spread (2000 with a
# standard deviation of 1: years, prices) it reports another number: 0.81 for 0.51, and 0 at a mean of 10000.
# float32 holds these targets to 0.001 or better, and the same targets less their mean get the right score.
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
from torchmetrics import R2Score

generator = torch.Generator().manual_seed(1)
noise, error = (torch.randn(4000, generator=generator) for _ in range(2))


def score(predictions: torch.Tensor, targets: torch.Tensor) -> float:
    metric = R2Score()
    for rows in range(0, 4000, 100):
        metric.update(predictions[rows : rows + 100], targets[rows : rows + 100])
    return metric.compute().item()


for mean in (0, 300, 2000, 10000):
    targets = mean + noise
    predictions = targets + 0.7 * error
    exact = targets.double()
    right = 1 - (predictions.double() - exact).square().sum() / (exact - exact.mean()).square().sum()
    found, centred = score(predictions, targets), score(predictions - mean, targets - mean)
    print(f"mean {mean}: R2Score {found:.3f}, of the same less {mean} {centred:.3f}, in float64 {right:.3f}")
    assert abs(centred - right) < 0.001
    assert (abs(found - right) > 0.02) == (mean >= 2000)
PYTHON
OMP_NUM_THREADS=1 environment/bin/python shown.py
