"""Model FLOPs utilization (MFU): a training run's share of the GPU's rate of matrix products.

In: a built model, the length of its examples, a device. Out: a factor that turns tokens per second into MFU. The
operations of a token are those of the PaLM paper, appendix B (https://arxiv.org/abs/2204.02311): 6 per parameter and 12
x layers x width x length for attention, without recomputation. The rate is measured with a large product in the run's
precision, because no program reaches the manufacturer's figure.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from torch import nn

from lockstep.config.sections import ModelSection
from lockstep.distributed.world import World
from lockstep.strategies.strategy import Strategy
from lockstep.tasks.task import Task

SIZE = {"cuda": 8192, "cpu": 512}  # rows and columns of the measured product
TIMES = 10  # products timed together, after as many untimed ones


def per_token_rate(world: World, task: Task, strategy: Strategy) -> float:
    """MFU of one token per second; 0 if it is not known: on a CPU, for tasks without tokens, streams, and models whose
    layers and width their config does not name. Measures the rate of this rank's GPU."""
    run = task.run
    if world.device.type != "cuda" or task.unit is None or task.own_model or run.data.stream:
        return 0.0
    lengths = task.splits["train"].mean_length
    weights = strategy.weights
    operations = operations_per_token(strategy.model, weights.parameter_count, weights.trained_count, lengths)
    gpus = max(1, world.size // max(1, run.launch.processes_per_gpu))
    return operations / (matrix_rate(world.device, dtype_of(run.model, run.precision)) * gpus)


def operations_per_token(model: nn.Module, parameters: int, trained: int, length: float) -> float:
    """Operations of a token's forward and backward: 4 per parameter and 2 more per trained one, and those of attention
    over `length` tokens. 0 if the model's config does not name its layers and width, and for an encoder with a
    decoder."""
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    layers, width = (getattr(config, name, None) for name in ("num_hidden_layers", "hidden_size"))
    if not isinstance(layers, int) or not isinstance(width, int) or getattr(config, "is_encoder_decoder", False):
        return 0.0
    return 4.0 * parameters + 2.0 * trained + 12.0 * layers * width * length


def dtype_of(model: ModelSection, precision: str) -> torch.dtype:
    """The dtype in which a run computes its matrix products."""
    if model.trained_in_bfloat16:
        return torch.bfloat16
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)


def matrix_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second of square matrix products on a device: the median of five measurements."""
    size = SIZE[device.type]
    left, right = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    rates = []
    for _ in range(6):  # the first one warms up
        _wait(device)
        began = time.perf_counter()
        for _ in range(TIMES):
            torch.mm(left, right)
        _wait(device)
        rates.append(TIMES * 2.0 * size**3 / (time.perf_counter() - began))
    return float(np.median(rates[1:]))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
