"""Weights and optimizer state under the task's own names, as a checkpoint wants them.

In: the tensors that a rank answers for, the parameters that its optimizer steps, by name. Out: one mapping,
`model.NAME` and `optimizer.KEY.NAME`, of fp16 also `scaling.KEY`; and the way back.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import Tensor, nn

from lockstep.distributed.sharded import Saved
from lockstep.strategies.exact.optim import Stepper
from lockstep.strategies.exact.scaling import LossScale


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Weights and buffers by name, without their graph."""
    return {name: t.detach() for name, t in [*model.named_parameters(), *model.named_buffers()]}


def sharded(
    tensors: Mapping[str, Tensor],
    stepper: Stepper,
    scaling: LossScale | None = None,
    names: Collection[str] | None = None,
) -> dict[str, Tensor]:
    """The tensors that a rank saves: these, and the optimizer's state of the parameters `names` (default: of all that
    it steps)."""
    state = {f"model.{name}": tensor for name, tensor in tensors.items()}
    return state | stepper.saved(names) | dict(scaling.state() if scaling else {})


def load(
    saved: Saved,
    tensors: Mapping[str, Tensor],
    stepper: Stepper,
    scaling: LossScale | None = None,
    names: Collection[str] | None = None,
) -> None:
    """Read into the tensors, and make the optimizer's state of what there is of it. Collective."""
    targets = {f"model.{name}": tensor for name, tensor in tensors.items()}
    saved.read(targets | stepper.places(saved, names) | dict(scaling.state() if scaling else {}))
