"""NAdam (Dozat, "Incorporating Nesterov momentum into Adam", 2016): torch's.

In: gradients. Out: AdamW's update, that looks ahead. 8 bytes a parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pydantic import Field

from lockstep.config.sections import Section
from lockstep.strategies.optimizers.optimizer import GroupOf, Optimizer, State, by_torch, zeros

if TYPE_CHECKING:
    from torch import Tensor


class NAdam(Optimizer):
    """`torch.optim.NAdam`, on whole tensors."""

    class Options(Section):
        betas: tuple[float, float] = Field((0.9, 0.999), description="decays of the two moments")
        momentum_decay: float = Field(4e-3, ge=0, description="how fast the look ahead grows")

    def begin(self, group: GroupOf, like: Tensor) -> State:
        import torch

        counts = {"step": torch.zeros(()), "mu_product": torch.ones(())}
        return {**counts, "exp_avg": zeros(like), "exp_avg_sq": zeros(like)}

    def update(
        self, group: GroupOf, weights: Sequence[Tensor], gradients: Sequence[Tensor], states: Sequence[State]
    ) -> None:
        import torch

        own = self.options.model_dump() | {"lr": group["lr"], "weight_decay": group["weight_decay"]}
        by_torch(torch.optim.NAdam, weights, gradients, states, decoupled_weight_decay=True, foreach=False, **own)
