"""Weights and optimizer state under the task's own names, as a checkpoint wants them.

In: the tensors that a rank answers for, the parameters that its optimizer steps, by name. Out: one mapping,
`model.NAME` and `optimizer.KEY.NAME`, of fp16 also `scaling.KEY`; and the way back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from lockstep.distributed.sharded import Saved, moments
from lockstep.strategies.exact import optim
from lockstep.strategies.exact.scaling import LossScale


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Weights and buffers by name, without their graph."""
    return {name: t.detach() for name, t in [*model.named_parameters(), *model.named_buffers()]}


def as_it_is(name: str, tensor: Tensor) -> Tensor:
    """How the moments of a parameter are spread over ranks: not at all, or as the parameter's DTensor says."""
    return tensor


def sharded(
    tensors: Mapping[str, Tensor],
    trained: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer,
    spread: Callable[[str, Tensor], Tensor] = as_it_is,
    scaling: LossScale | None = None,
) -> dict[str, Tensor]:
    """What a rank has to save. Parameters that no update has touched get the state that they begin with. `spread`: a
    parameter's name and this rank's plain part of it or of a moment -> the DTensor that it is a part of."""
    optim.complete(optimizer)
    found = {f"model.{name}": tensor for name, tensor in tensors.items()}
    for name, parameter in trained.items():
        for key, value in optimizer.state[parameter].items():
            if isinstance(value, Tensor):
                found[f"optimizer.{key}.{name}"] = value if key == "step" else spread(name, value)
    return found | dict(scaling.state() if scaling else {})


def load(
    saved: Saved,
    tensors: Mapping[str, Tensor],
    trained: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer,
    spread: Callable[[str, Tensor], Tensor] = as_it_is,
    scaling: LossScale | None = None,
) -> None:
    """Read into the tensors, and make the optimizer's state of what there is of it. Collective."""
    targets = {f"model.{name}": tensor for name, tensor in tensors.items()}
    for name, parameter in trained.items():
        if found := moments(saved, name, parameter):
            optimizer.state[parameter] = found
            for key, value in found.items():
                targets[f"optimizer.{key}.{name}"] = value if key == "step" else spread(name, value)
    saved.read(targets | dict(scaling.state() if scaling else {}))
