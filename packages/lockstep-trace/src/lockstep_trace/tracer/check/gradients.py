"""Recomputes the gradient that an optimizer should see: the sum of the gradients of the step's micro-batches.

In: the recorded calls, the optimizer's parameters. Out: `Recomputed`. The reader averages over
ranks, from their records: the tracer never communicates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ..graph import loss_function, loss_nodes
from ..versions import written
from . import replay
from .calls import ModuleCall, NotRecomputable, connect


@dataclass
class LossFactor:
    """A loss function of torch in one backward. `factor`: gradient that reaches its result (None until the backward).
    `targets`: number of targets that count. `mean`: whether it is a mean over them."""

    node: Any
    targets: Tensor | None
    mean: bool
    factor: Tensor | None = None

    def keep(self, gradients: Any) -> None:
        first = gradients[0] if gradients else None
        if isinstance(first, Tensor) and first.numel() == 1:
            self.factor = first.detach().clone()


@dataclass
class Backward:
    """A backward of the checked step. `outside`: parameters that the loss uses outside of calls."""

    number: int
    outside: dict[int, Tensor]
    factors: list[LossFactor]
    reason: str | None = None


def observed(calls: list[ModuleCall], losses: list[Tensor], number: int) -> Backward:
    """Record a backward before it is made."""
    try:
        outside, _ = connect(calls, losses, number)
    except NotRecomputable as error:
        return Backward(number, {}, [], str(error))
    factors = []
    for node in loss_nodes(losses[0]) if len(losses) == 1 else []:
        about = loss_function(node)
        targets = None if about.targets is None else about.targets[0].clone()
        row = LossFactor(node, targets, about.about["reduction"] == 1)
        node.register_prehook(row.keep)
        factors.append(row)
    return Backward(number, outside, factors)


@dataclass
class Recomputed:
    """Recomputed gradients of an optimizer's parameters, by id. `parts`: the same by backward, in order. `excluded`: id
    of a parameter -> why its gradient cannot be recomputed. `distance`: how far repeated outputs are from those of
    training."""

    parts: list[dict[int, Tensor]]
    excluded: dict[int, str]
    distance: float = 0.0
    reasons: list[str] = field(default_factory=list)

    def total(self, weights: Sequence[float] | None = None) -> dict[int, Tensor]:
        """Return the sum over backwards, weighted."""
        total: dict[int, Tensor] = {}
        for part, weight in zip(self.parts, weights or [1.0] * len(self.parts), strict=True):
            for key, gradient in part.items():
                value = gradient if weight == 1.0 else gradient * weight
                total[key] = total[key] + value if key in total else value
        return total


def recomputed(calls: Sequence[ModuleCall], backwards: Sequence[Backward], parameters: Sequence[Tensor]) -> Recomputed:
    """Recompute the gradients of `parameters` from the calls that took part in the backwards."""
    trained = {id(p): p for p in parameters if p.requires_grad}
    excluded: dict[int, str] = {}
    reasons: list[str] = []
    for key, p in trained.items():
        if getattr(p, "_backward_hooks", None) or getattr(p, "_post_accumulate_grad_hooks", None):
            excluded[key] = "it has a hook on its gradient"
        elif any(key in b.outside for b in backwards):
            excluded[key] = "the loss uses it outside of the model's calls"
    result = Recomputed([], excluded, reasons=reasons)
    for backward in backwards:
        part: dict[int, Tensor] = {}
        for call in calls:
            own = [p for p in call.module.parameters() if id(p) in trained]
            if not own or not (
                backward.number in call.seeds or any(backward.number in o.gradients for o in call.outputs)
            ):
                continue
            try:
                added = _of_call(call, backward, result)
            except NotRecomputable as error:
                reasons.append(str(error))
                excluded |= {id(p): str(error) for p in own}
                continue
            for key, gradient in added.items():
                if key in trained:
                    part[key] = part[key] + gradient if key in part else gradient
        result.parts.append(part)
    return result


def _of_call(call: ModuleCall, backward: Backward, result: Recomputed) -> dict[int, Tensor]:
    if backward.reason:
        raise NotRecomputable(backward.reason)
    if any(call.versions.get(id(p)) != written(p) for p in call.module.parameters()):
        raise NotRecomputable("weights were written between the forward and the optimizer's step")
    added, distance = replay.gradients(replay.copied(call), call, backward.number)
    result.distance = max(result.distance, distance)
    if distance > replay.rounding_of(call):
        how = (
            "the compiled model draws different random numbers or rounds differently"
            if replay.is_compiled(call.module)
            else "the forward depends on more than its inputs, buffers and random numbers"
        )
        raise NotRecomputable(f"repeated outputs differ from those of training by {distance:.2g}: {how}")
    return added
