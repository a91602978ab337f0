"""Weights and optimizer state under the task's own names, as a checkpoint wants them, and float32 master weights.

In: the tensors that a rank answers for, the parameters that its optimizer steps, by name. Out: one mapping,
`model.NAME` and `optimizer.KEY.NAME`, of fp16 also `scaling.KEY`; and the way back. With `model.dtype: bfloat16` each
weight has a float32 master, which the optimizer updates and the weight is rounded from: an update is often smaller than
a bfloat16 weight's last bit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch
from torch import Tensor, nn

from lockstep.config.run import Run, RunError
from lockstep.distributed.sharded import Saved
from lockstep.strategies.exact.gradient import LossScale
from lockstep.strategies.exact.optim import Stepper


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


def keeps_masters(run: Run) -> bool:
    return run.model.trained_in_bfloat16 and run.optim.master_weights


def masters_of(places: Mapping[str, Tensor]) -> dict[str, nn.Parameter]:
    """A master of each, with its value."""
    return {name: nn.Parameter(place.detach().float()) for name, place in places.items()}


@torch.no_grad()
def write_masters(masters: Iterable[Tensor], places: Iterable[Tensor]) -> None:
    """Round masters into the weights they are of."""
    for master, place in zip(masters, places, strict=True):
        place.copy_(master)


def sums_in_float32(parameters: Iterable[Tensor]) -> None:
    """Let `.grad` of bfloat16 parameters be float32: what backward gives is bfloat16, and is added up in float32."""
    for parameter in parameters:
        parameter.grad_dtype = torch.float32


def check_masters(run: Run, trains_bfloat16: bool, without_masters: bool) -> None:
    """Refuse what does not go together. `trains_bfloat16`: whether the strategy can; `without_masters`: whether also
    without them. Errors: `RunError`."""
    if not run.model.trained_in_bfloat16:
        if not run.optim.master_weights:
            raise RunError(
                "LS4160",
                "optim.master_weights: false needs weights in bfloat16; set model.dtype=bfloat16, or "
                "master_weights=true",
            )
        return
    name = run.strategy.name
    if run.precision != "bf16":
        raise RunError(
            "LS4161",
            f"model.dtype: bfloat16 weights need precision=bf16, and precision is {run.precision}; set precision=bf16",
        )
    if not trains_bfloat16:
        raise RunError(
            "LS4162",
            f"model.dtype: {name} supports float32 weights only with these options; use strategy.name=ddp or "
            "fsdp2 (DeepSpeed's own option is bf16: {enabled: true})",
        )
    if not run.strategy.exact:
        raise RunError(
            "LS4163",
            "strategy.exact: with strategy.exact=false the gradients of bfloat16 weights would be summed in "
            "bfloat16; set strategy.exact=true",
        )
    if not run.optim.master_weights and not without_masters:
        raise RunError(
            "LS4164",
            f"optim.master_weights: {name} always keeps master weights with these options; set it to true, or "
            "use strategy.name=ddp, or fsdp2 with strategy.options.gather=step",
        )
