#!/usr/bin/env bash
# torchmetrics 1.9.0: a `MetricCollection` lets metrics share one state if their states are equal after the first batch. Two
# metrics of one class whose options differ (a threshold, `ignore_index`) have equal states if that batch has no row on which
# they differ; from then on the second one reports the first one's number.
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
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import BinaryF1Score, MulticlassAccuracy

Batch = tuple[torch.Tensor, torch.Tensor]


def thresholds() -> dict[str, Metric]:
    return {"low": BinaryF1Score(threshold=0.5), "high": BinaryF1Score(threshold=0.7)}


def ignoring() -> dict[str, Metric]:
    return {
        "all": MulticlassAccuracy(3, average="micro"),
        "without 2": MulticlassAccuracy(3, average="micro", ignore_index=2),
    }


scores: list[Batch] = [
    (torch.tensor([0.9, 0.1, 0.8]), torch.tensor([1, 0, 0])),
    (torch.tensor([0.6, 0.65, 0.2]), torch.tensor([1, 0, 1])),
]
classes: list[Batch] = [
    (torch.tensor([0, 1, 0, 1]), torch.tensor([0, 1, 1, 1])),
    (torch.tensor([0, 1, 2, 2]), torch.tensor([2, 2, 2, 0])),
]
for make, batches in ((thresholds, scores), (ignoring, classes)):
    for order in (batches, batches[::-1]):
        collection, alone = MetricCollection(make()), make()
        for batch in order:
            collection.update(*batch)
            for metric in alone.values():
                metric.update(*batch)
        together = {name: round(value.item(), 4) for name, value in collection.compute().items()}
        apart = {name: round(metric.compute().item(), 4) for name, metric in alone.items()}
        first = "equal" if order is batches else "different"
        print(f"states after the first batch {first}: in a collection {together}, each alone {apart}")
        assert (together == apart) == (order is not batches)
        assert len(set(together.values())) == (1 if order is batches else 2)
PYTHON
OMP_NUM_THREADS=1 environment/bin/python shown.py
