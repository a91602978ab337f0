"""Parameter groups, optimizers, and learning_rate(step): a pure function.

In: the `optim` section and named parameters. Out: a torch optimizer, and the rate of each step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from lockstep.run import OptimSection


def learning_rate(optim: OptimSection, step: int, steps: int) -> float:
    """The rate of the update numbered `step` (from 0) of `steps`.

    Linear warm-up reaches the full rate with the update after the last warm-up step; then constant, linear to 0,
    or half a cosine to 0 (Loshchilov and Hutter, "SGDR", ICLR 2017) - the schedules of transformers'
    `get_*_schedule_with_warmup`.
    """
    warmup = optim.warmup_steps or math.ceil(optim.warmup_fraction * steps)
    if step < warmup:
        return optim.learning_rate * step / warmup
    if optim.schedule == "constant":
        return optim.learning_rate
    progress = (step - warmup) / max(1, steps - warmup)
    if optim.schedule == "linear":
        return optim.learning_rate * max(0.0, 1.0 - progress)
    return optim.learning_rate * max(0.0, 0.5 * (1.0 + math.cos(math.pi * progress)))


def undecayed(model: nn.Module) -> set[str]:
    """Names of the parameters that weight decay leaves alone: biases, and the weights of normalisation layers."""
    names = set()
    for prefix, module in model.named_modules():
        norm = "norm" in type(module).__name__.lower()
        for name, _ in module.named_parameters(recurse=False):
            if norm or name.endswith("bias"):
                names.add(f"{prefix}.{name}" if prefix else name)
    return names


def groups(named: Iterable[tuple[str, nn.Parameter]], exempt: set[str], weight_decay: float) -> list[dict]:
    """Two parameter groups, decayed and not; frozen parameters are in neither."""
    named = [(n, p) for n, p in named if p.requires_grad]
    return [
        {"params": [p for n, p in named if n not in exempt], "weight_decay": weight_decay},
        {"params": [p for n, p in named if n in exempt], "weight_decay": 0.0},
    ]


def build(optim: OptimSection, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of a model; its rate is set anew at every step. AdamW and SGD in their fused form."""
    parts = groups(model.named_parameters(), undecayed(model), optim.weight_decay)
    if optim.name == "sgd":
        return torch.optim.SGD(parts, lr=optim.learning_rate, momentum=optim.momentum, fused=True)
    return torch.optim.AdamW(parts, lr=optim.learning_rate, betas=optim.betas, eps=optim.eps, fused=True)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the rate of every group."""
    for group in optimizer.param_groups:
        group["lr"] = rate
