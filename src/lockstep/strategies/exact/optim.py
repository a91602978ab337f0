"""Parameter groups, optimizers, and learning_rate(step): a pure function.

In: the `optim` section and named parameters. Out: a torch optimizer, and the rate of each step.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from lockstep.config.sections import OptimSection
from lockstep.distributed.sharded import local


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
    return of_groups(optim, groups(model.named_parameters(), undecayed(model), optim.weight_decay))


def of_groups(optim: OptimSection, parts: list[dict]) -> torch.optim.Optimizer:
    """The same for parameter groups that are there already (of sharded parameters)."""
    if optim.name == "sgd":
        return SGD(parts, lr=optim.learning_rate, momentum=optim.momentum, fused=True)
    return AdamW(parts, lr=optim.learning_rate, betas=optim.betas, eps=optim.eps, fused=True)


def complete(optimizer: torch.optim.Optimizer) -> None:
    """Give the parameters that no update has touched yet the state that they begin with, so that what is saved has the
    same names after every step."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            _started(optimizer.state[p], group, p)


def _started(state: dict[str, Any], group: dict[str, Any], p: Tensor) -> dict[str, Any]:
    """The state of a parameter of AdamW or SGD, made where there is none."""
    if not state and "betas" in group:
        state["step"] = torch.zeros((), device=p.device)
        state["exp_avg"], state["exp_avg_sq"] = (torch.zeros_like(p, dtype=torch.float32) for _ in range(2))
    elif not state and group["momentum"]:
        state["momentum_buffer"] = torch.zeros_like(p, dtype=torch.float32)
    return state


class AdamW(torch.optim.AdamW):
    """torch's fused AdamW, on whatever part of a tensor this rank holds.

    What a number becomes depends on nothing but its own past, not on where in its tensor it lies: see `aligned`.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group, held in _portions(self.param_groups):
            states = [_started(self.state[p], group, p) for p in held]
            first, second = ([state[key] for state in states] for key in ("exp_avg", "exp_avg_sq"))
            with aligned(held, [p.grad for p in held], first, second) as (params, gradients, means, squares):
                adamw(
                    params,
                    gradients,
                    means,
                    squares,
                    [],
                    [state["step"] for state in states],
                    fused=True,
                    found_inf=group.get("skipped"),
                    amsgrad=False,
                    beta1=group["betas"][0],
                    beta2=group["betas"][1],
                    lr=group["lr"],
                    weight_decay=group["weight_decay"],
                    eps=group["eps"],
                    maximize=False,
                )


class SGD(torch.optim.SGD):
    """torch's fused SGD in the same way."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group, held in _portions(self.param_groups):
            momentum = group["momentum"]
            states = [_started(self.state[p], group, p) for p in held]
            buffers = [state["momentum_buffer"] for state in states] if momentum else []
            with aligned(held, [p.grad for p in held], buffers) as (params, gradients, velocities):
                sgd(
                    params,
                    gradients,
                    [*velocities] if momentum else [None for _ in params],
                    fused=True,
                    found_inf=group.get("skipped"),
                    weight_decay=group["weight_decay"],
                    momentum=momentum,
                    lr=group["lr"],
                    dampening=0.0,
                    nesterov=False,
                    maximize=False,
                )


WIDENED = 2**24  # numbers of bfloat16 weights without masters that are float32 at a time, while they are updated


def _portions(groups: Sequence[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], list[Tensor]]]:
    """Each group with the parameters of it that have a gradient, as many as are updated together: all, or fewer where
    they have to be widened."""
    for group in groups:
        held = [p for p in group["params"] if p.grad is not None]
        while held and held[0].dtype != torch.float32:
            numbers = itertools.accumulate(local(p).numel() for p in held)
            count = max(1, sum(number <= WIDENED for number in numbers))
            yield group, held[:count]
            held = held[count:]
        if held:
            yield group, held


LINE = 16  # float32 numbers that the fused kernels take at a time on a CPU


@contextmanager
def aligned(*lists: Sequence[Tensor | None]) -> Iterator[list[list[Tensor]]]:
    """Lists of this rank's parts of tensors, each padded to whole `LINE`s; what is written into them is kept.

    torch's fused kernels round a tensor's last `numel % LINE` numbers in another way than the others on a CPU, so a
    number's bits would depend on how its tensor is cut. Few tensors are of odd sizes, and they are small. bfloat16
    weights are float32 in here, and rounded afterwards.
    """
    parts = [[local(tensor) for tensor in tensors] for tensors in lists]
    padded = [[_padded(part) for part in group] for group in parts]
    yield padded
    for group, widened in zip(parts, padded, strict=True):
        for part, wide in zip(group, widened, strict=True):
            if wide is not part:
                part.copy_(wide[: part.numel()].view_as(part))


def _padded(part: Tensor) -> Tensor:
    part = part.float()
    if part.numel() % LINE == 0 or part.device.type != "cpu":
        return part
    return torch.nn.functional.pad(part.reshape(-1), (0, -part.numel() % LINE))


def set_rate(optimizer: torch.optim.Optimizer, rate: float, used: Tensor | None = None) -> None:
    """Set the rate of every group. `used`: a bool scalar on the device; where it is false the next step leaves weights
    and state as they are, without the host having to know."""
    skipped = None if used is None else (~used).float()
    for group in optimizer.param_groups:
        group["lr"] = rate
        group["skipped"] = skipped
