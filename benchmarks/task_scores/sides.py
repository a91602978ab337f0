"""The two sides of a comparison: a run of lockstep, and the settings that give another library the same recipe.

In: a run as a mapping. Out: its export and scores; keyword arguments of `TrainingArguments` and its kin. One process
and one thread on the CPU, fp32. Both sides have the rows, the initial weights, the number of steps, the batch, AdamW,
rates, decay and clipping of the recipe; each has an order, dropout masks and new heads of its own.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import lockstep

WARM = 0.1


@dataclass(frozen=True)
class Recipe:
    """What both sides do. `batch` is of a step; `micro_batches` are lockstep's pieces of it."""

    rows: int
    batch: int
    rate: float
    epochs: int = 1
    micro_batches: int = 2
    length: int = 64

    @property
    def steps(self) -> int:
        return self.rows * self.epochs // self.batch

    @property
    def warm(self) -> int:
        return round(WARM * self.steps)


def ours(room: Path, recipe: Recipe, seed: int, task: dict, model: dict, data: Path, **more: Any) -> dict[str, Any]:
    """Train with lockstep. Returns the folder of the export, and the scores of the split `test`."""
    values = {
        "name": "ours",
        "output": str(room),
        "seed": seed,
        "task": task,
        "model": model,
        "data": {"source": str(data), "max_length": recipe.length},
        "steps": recipe.steps,
        "batch_size": recipe.batch,
        "micro_batches": recipe.micro_batches,
        "optim": {"learning_rate": recipe.rate, "warmup_steps": recipe.warm},
        "strategy": {"name": "single"},
        "launch": {"processes": 1, "device": "cpu", "threads": 1},
    } | more
    result = lockstep.train(lockstep.Run.load(values), show=None)
    if result.export is None:
        raise SystemExit(f"lockstep's run ended as {result.status}: {room}")
    return {"export": result.export, "scores": dict(result.metrics.get("test", result.metrics.get("validation", {})))}


def settings(room: Path, recipe: Recipe, seed: int, accumulate: int = 1) -> dict[str, Any]:
    """Keyword arguments for transformers' `TrainingArguments`, sentence-transformers' and TRL's."""
    return {
        "output_dir": str(room),
        "use_cpu": True,
        "per_device_train_batch_size": recipe.batch // accumulate,
        "per_device_eval_batch_size": 64,
        "gradient_accumulation_steps": accumulate,
        "max_steps": recipe.steps,
        "learning_rate": recipe.rate,
        "warmup_steps": recipe.warm,
        "lr_scheduler_type": "linear",
        "weight_decay": 0.01,
        "max_grad_norm": 1.0,
        "seed": seed,
        "bf16": False,
        "save_strategy": "no",
        "logging_steps": 10_000,
        "report_to": "none",
        "disable_tqdm": True,
    }
