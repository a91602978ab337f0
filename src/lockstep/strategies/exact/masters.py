"""Master weights: to each bfloat16 weight a float32 one, which the optimizer updates and the weight is rounded from.

In: a run with `model.dtype: bfloat16`, and the parameters that a rank updates. Out: their masters, and the way back
into the model. An update is often smaller than a bfloat16 weight's last bit; in its master it is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from lockstep.config.run import Run, RunError


def wanted(run: Run) -> bool:
    return run.model.trained_in_bfloat16 and run.optim.master_weights


def of(places: Mapping[str, Tensor]) -> dict[str, nn.Parameter]:
    """A master of each, with its value."""
    return {name: nn.Parameter(place.detach().float()) for name, place in places.items()}


@torch.no_grad()
def write(masters: Iterable[Tensor], places: Iterable[Tensor]) -> None:
    """Round masters into the weights they are of."""
    for master, place in zip(masters, places, strict=True):
        place.copy_(master)


def sums_in_float32(parameters: Iterable[Tensor]) -> None:
    """Let `.grad` of bfloat16 parameters be float32: what backward gives is bfloat16, and is added up in float32."""
    for parameter in parameters:
        parameter.grad_dtype = torch.float32


def check(run: Run, trains_bfloat16: bool, without_masters: bool) -> None:
    """Refuse what does not go together. `trains_bfloat16`: whether the strategy can; `without_masters`: whether also
    without them. Errors: `RunError`."""
    if not run.model.trained_in_bfloat16:
        if not run.optim.master_weights:
            raise RunError("optim.master_weights: only weights in bfloat16 can be without; set model.dtype=bfloat16")
        return
    name = run.strategy.name
    if run.precision != "bf16":
        raise RunError(
            f"model.dtype: bfloat16 weights are computed with in bfloat16, and precision is {run.precision}; set "
            "precision=bf16"
        )
    if not trains_bfloat16:
        raise RunError(
            f"model.dtype: {name} trains float32 weights only, under these options; use strategy.name=ddp or fsdp2 "
            "(DeepSpeed has an option of its own for it: bf16: {enabled: true})"
        )
    if not run.strategy.exact:
        raise RunError(
            "strategy.exact: without it gradients of bfloat16 weights would be added up in bfloat16; leave it true"
        )
    if not run.optim.master_weights and not without_masters:
        raise RunError(
            f"optim.master_weights: {name} keeps them, under these options; leave it true, or use strategy.name=ddp, "
            "or fsdp2 with strategy.options.gather=step"
        )
