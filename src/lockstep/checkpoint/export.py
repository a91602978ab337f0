"""Write the export folder with its model card.

In: full weights on rank 0 and the final scores. Out: `OUTPUT/export`, which `from_pretrained` loads. Imports no
torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.checkpoint import export_hashes
from lockstep.checkpoint.folder import size_of
from lockstep.checkpoint.model_card import model_card
from lockstep.config import output_files
from lockstep.tasks.task import Task

if TYPE_CHECKING:
    from torch import Tensor


def write_export(
    task: Task,
    weights: Mapping[str, Tensor],
    scores: dict[str, dict[str, float]],
    steps: int,
    folder: Path | None = None,
) -> Path:
    """Write the export and its model card to OUTPUT or another folder, atomically. Rank 0 only. Errors: `OSError`;
    nothing remains of a failed export."""
    folder = folder or task.run.folder
    try:
        export_hashes.settle(_write_aside(folder, task, weights, scores, steps), folder)
    finally:
        output_files.clear(folder / ".export.partial")
    return folder / "export"


def try_export(task: Task, weights: Mapping[str, Tensor], scores: dict[str, dict[str, float]]) -> int:
    """Write an export before training, to check that it can be written, and remove it. Returns its bytes. Rank 0 only.
    Errors: `OSError`."""
    run = task.run
    try:
        return size_of(_write_aside(run.folder, task, weights, scores, 0))
    finally:
        output_files.clear(run.folder / ".export.partial")


def _write_aside(
    folder: Path, task: Task, weights: Mapping[str, Tensor], scores: dict[str, dict[str, float]], steps: int
) -> Path:
    aside = folder / ".export.partial"
    output_files.clear(aside)
    aside.mkdir(parents=True)
    try:
        task.write(aside, weights)
    except Exception as caught:  # safetensors and tokenizers wrap OS errors in their own classes
        number = re.search(r"\(os error (\d+)\)", str(caught))
        if number is None or isinstance(caught, OSError):
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(aside)) from caught
    (aside / "README.md").write_text(model_card(task, scores, steps), encoding="utf-8")
    return aside
