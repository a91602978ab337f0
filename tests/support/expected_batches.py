"""Batches returned by the loader, and the expected ones."""

from __future__ import annotations

import numpy as np
import torch

from lockstep.data.batch import IGNORED, StepBatch
from lockstep.training.data_loader import StepLoader

CPU = torch.device("cpu")


def rows_in(batch: StepBatch) -> list[tuple[int, ...]]:
    """Token ids without padding, then the label, of each collated row. Padding examples are left out."""
    found = []
    for micro in batch.micro_batches:
        for ids, mask, target in zip(
            micro.inputs["input_ids"], micro.inputs["attention_mask"], micro.targets, strict=True
        ):
            if target != IGNORED:
                found.append((*ids[mask.bool()].tolist(), int(target)))
    return found


def wanted_rows(feed: StepLoader, rows: np.ndarray) -> list[tuple[int, ...]]:
    ids, labels = feed.columns.ragged("input_ids"), feed.columns.flat("label")
    return [(*ids.row(int(i)).tolist(), int(labels[i])) for i in rows]
