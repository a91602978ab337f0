"""MFU: operations per token, counted as in the PaLM paper, over a measured rate."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, T5Config, T5ForConditionalGeneration

from lockstep.data.batch import StepBatch, StepResult
from lockstep.distributed.world import World
from lockstep.track.report.panels import _CURVES
from lockstep.training import utilization
from lockstep.training.train_state import Meter
from support.harness import build
from support.task_runs import make


def test_operations_of_a_token() -> None:
    """GPT-2 124M at 1,024 tokens: 6 x 124,439,808 + 12 x 12 x 768 x 1,024."""
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config())
    count = model.num_parameters()
    assert utilization.operations_per_token(model, count, count, 1024) == 6 * 124_439_808 + 12 * 12 * 768 * 1024
    assert utilization.operations_per_token(model, count, 0, 0) == 4 * 124_439_808  # frozen weights have no gradient
    with torch.device("meta"):
        model = T5ForConditionalGeneration(T5Config())
    assert utilization.operations_per_token(model, 1, 1, 1) == 0  # two lengths


def test_the_speed_of_a_device_is_measured() -> None:
    assert 1e8 < utilization.matrix_rate(torch.device("cpu"), torch.float32) < 1e15


def test_utilization_is_shared_by_the_gpus_of_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make(tmp_path, "packed", "strategy.name=single", "precision=bf16")
    task, strategy = build(run, world := World(run))
    assert utilization.per_token_rate(world, task, strategy) == 0  # on a CPU
    asked = list[torch.dtype]()
    monkeypatch.setattr(utilization, "matrix_rate", lambda device, dtype: asked.append(dtype) or 1e12)
    gpus = SimpleNamespace(device=torch.device("cuda"), size=4)
    count = strategy.weights.parameter_count
    expected = (6 * count + 12 * 2 * 32 * task.splits["train"].mean_length) / 4e12
    assert utilization.per_token_rate(gpus, task, strategy) == pytest.approx(expected)  # type: ignore[arg-type]
    assert asked == [torch.bfloat16]
    strategy.close()


def test_a_line_has_utilization_if_known() -> None:
    import numpy as np

    batch = StepBatch(0, [], 1, 4, 4.0, 4000, 4000, 4000, np.arange(4))
    result = StepResult(torch.tensor(1.0), torch.tensor(1.0))
    meter = Meter()
    meter.add(batch, result)
    assert "mfu" not in meter.line(result, 0.1)
    meter.utilization = 1e-6
    meter.add(batch, result)
    line = meter.line(result, 0.1)
    assert line["mfu"] == pytest.approx(1e-6 * line["tokens_per_s"])
    assert ("train", "mfu") in [key for lines in _CURVES.values() for key in lines.values()]
