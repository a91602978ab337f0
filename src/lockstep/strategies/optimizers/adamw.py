"""AdamW (Loshchilov and Hutter, "Decoupled weight decay regularization", 2019): torch's fused kernel.

In: gradients. Out: each weight updated by its mean gradient over the root of its mean square. 8 bytes per parameter.
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


class AdamW(Optimizer):
    """torch's fused AdamW."""

    any_part = True
    heeds_skipped = True

    class Options(Section):
        betas: tuple[Decay, Decay] = Field((0.9, 0.999), description="decays of the two moments")
        eps: float = Field(1e-8, gt=0, description="added to the square root of the second moment")

    @override
    def begin(self, group: GroupOf, like: Tensor) -> State:
        import torch

        return {"step": torch.zeros((), device=like.device), "exp_avg": zeros(like), "exp_avg_sq": zeros(like)}

    @override
    def update(
        self, group: GroupOf, weights: Sequence[Tensor], gradients: Sequence[Tensor], states: Sequence[State]
    ) -> None:
        from torch.optim.adamw import adamw

        first, second, steps = ([state[key] for state in states] for key in ("exp_avg", "exp_avg_sq", "step"))
        adamw(
            list(weights),
            list(gradients),
            first,
            second,
            [],
            steps,
            fused=True,
            found_inf=group.get("skipped"),
            amsgrad=False,
            beta1=self.options.betas[0],
            beta2=self.options.betas[1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=self.options.eps,
            maximize=False,
        )
