"""Weights and optimizer state under the task's names for checkpoints, and float32 master weights.

In: this rank's tensors by name, and its stepper. Out: one mapping of `model.NAME`, `optimizer.KEY.NAME` and, with fp16,
`scaling.KEY`; and the same loaded back. With `model.dtype: bfloat16`, the optimizer updates a float32 master of each
weight, and the weight is the rounded master: an update is often smaller than a bfloat16 weight's last bit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch
from torch import Tensor, nn

from lockstep.config.run import RunError
from lockstep.data.job import Job, WeightFormats
from lockstep.distributed.sharded import Saved
from lockstep.strategies.exact.loss_scale import LossScale
from lockstep.strategies.exact.stepper import Stepper


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return weights and buffers by name, detached."""
    return {name: t.detach() for name, t in [*model.named_parameters(), *model.named_buffers()]}


def tensors_to_save(
    tensors: Mapping[str, Tensor],
    stepper: Stepper,
    scaling: LossScale | None = None,
    names: Collection[str] | None = None,
) -> dict[str, Tensor]:
    """Return the tensors that a rank saves: `tensors`, and the optimizer state of the parameters `names` (default: all
    that it steps)."""
    state = {f"model.{name}": tensor for name, tensor in tensors.items()}
    return state | stepper.saved(names) | dict(scaling.state() if scaling else {})


def load(
    saved: Saved,
    tensors: Mapping[str, Tensor],
    stepper: Stepper,
    scaling: LossScale | None = None,
    names: Collection[str] | None = None,
) -> None:
    """Read into the tensors, and create the optimizer state from what is saved. Collective."""
    targets = {f"model.{name}": tensor for name, tensor in tensors.items()}
    saved.read(targets | stepper.places(saved, names) | dict(scaling.state() if scaling else {}))


def sums_in_float32(parameters: Iterable[Tensor]) -> None:
    """Make `.grad` of bfloat16 parameters float32, so that bfloat16 gradients accumulate in float32."""
    for parameter in parameters:
        parameter.grad_dtype = torch.float32


def check_masters(job: Job) -> None:
    """Refuse conflicting options of bfloat16 weights. Errors: `RunError`."""
    run, formats = job.run, job.strategy.weight_formats
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
    if WeightFormats.BFLOAT16 not in formats:
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
    if not run.optim.master_weights and WeightFormats.BFLOAT16_ALONE not in formats:
        raise RunError(
            "LS4164",
            f"optim.master_weights: {name} always keeps master weights with these options; set it to true, or "
            "use strategy.name=ddp, or fsdp2 with strategy.options.gather=step",
        )
