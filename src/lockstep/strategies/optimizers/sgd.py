"""SGD with momentum: torch's fused kernel.

In: gradients. Out: each weight updated by its gradient, or by the sum of gradients with `momentum`. 4 bytes per
parameter; none without momentum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pydantic import Field
from typing_extensions import override

from lockstep.config.sections import Section
from lockstep.strategies.optimizers.optimizer import GroupOf, Optimizer, State, zeros

if TYPE_CHECKING:
    from torch import Tensor


class SGD(Optimizer):
    """torch's fused SGD."""

    any_part = True
    heeds_skipped = True

    class Options(Section):
        momentum: float = Field(0.9, ge=0, lt=1, description="factor of the accumulated gradients at each step")

    @override
    def bytes_held(self) -> float:
        return 4.0 if self.options.momentum else 0.0

    @override
    def begin(self, group: GroupOf, like: Tensor) -> State:
        return {"momentum_buffer": zeros(like)} if self.options.momentum else {}

    @override
    def update(
        self, group: GroupOf, weights: Sequence[Tensor], gradients: Sequence[Tensor], states: Sequence[State]
    ) -> None:
        from torch.optim.sgd import sgd

        sgd(
            list(weights),
            list(gradients),
            [state.get("momentum_buffer") for state in states],
            fused=True,
            found_inf=group.get("skipped"),
            weight_decay=group["weight_decay"],
            momentum=self.options.momentum,
            lr=group["lr"],
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )
