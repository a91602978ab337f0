"""Lion (Chen et al., "Symbolic discovery of optimization algorithms", 2023): every number moves by the rate.

In: gradients. Out: each weight moved by the rate in the direction of its mean gradient's sign. 4 bytes per parameter.
The paper's advice: a third to a tenth of AdamW's rate, and weight decay increased by the same factor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pydantic import Field
from typing_extensions import override

from lockstep.config.sections import Decay, Section
from lockstep.strategies.optimizers.optimizer import GroupOf, Optimizer, State, zeros

if TYPE_CHECKING:
    from torch import Tensor


class Lion(Optimizer):
    """Lion: algorithm 2 of the paper."""

    any_part = True

    class Options(Section):
        betas: tuple[Decay, Decay] = Field(
            (0.9, 0.99), description="weight of the momentum in the update's sign, and decay of the momentum"
        )

    @override
    def bytes_held(self) -> float:
        return 4.0

    @override
    def begin(self, group: GroupOf, like: Tensor) -> State:
        return {"exp_avg": zeros(like)}

    @override
    def update(
        self, group: GroupOf, weights: Sequence[Tensor], gradients: Sequence[Tensor], states: Sequence[State]
    ) -> None:
        (now, later), rate = self.options.betas, group["lr"]
        for weight, gradient, state in zip(weights, gradients, states, strict=True):
            mean = state["exp_avg"]
            direction = (mean * now).add_(gradient * (1 - now)).sign_()
            weight.mul_(1 - rate * group["weight_decay"]).sub_(direction.mul_(rate))
            mean.mul_(later).add_(gradient * (1 - later))
