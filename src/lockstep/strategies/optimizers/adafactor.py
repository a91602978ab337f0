"""Adafactor (Shazeer and Stern, "Adafactor: adaptive learning rates with sublinear memory cost", 2018): torch's.

In: gradients. Out: each matrix updated as by AdamW without the first moment, with the second moment factored into one
number per row and one per column, and a step relative to the size of its weights. The rate is therefore relative
(torch's default is 1e-2), and at most 1 / sqrt(step). Few bytes per parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pydantic import Field
from typing_extensions import override

from lockstep.config.sections import Section
from lockstep.strategies.optimizers.optimizer import GroupOf, Optimizer, State, by_torch, zeros

if TYPE_CHECKING:
    from torch import Tensor


class Adafactor(Optimizer):
    """`torch.optim.Adafactor`, on whole tensors, because its norms cover whole tensors."""

    class Options(Section):
        beta2_decay: float = Field(-0.8, le=0, description="exponent of the step in the decay of mean squares")
        eps: tuple[float | None, float] = Field(
            (None, 1e-3),
            description="lower bounds: of a mean square (null: the dtype's epsilon), and of the root "
            "mean square of a tensor's weights",
        )
        d: float = Field(
            1.0, ge=1, description="upper bound of the root mean square of an update, which is scaled down to it"
        )

    @override
    def bytes_held(self) -> float:
        return 0.0  # per row and per column

    @override
    def begin(self, group: GroupOf, like: Tensor) -> State:
        import torch

        state = {"step": torch.zeros(())}
        if like.dim() > 1:
            return state | {"row_var": zeros(like[..., :1]), "col_var": zeros(like[..., :1, :])}
        return state | {"variance": zeros(like)}

    @override
    def update(
        self, group: GroupOf, weights: Sequence[Tensor], gradients: Sequence[Tensor], states: Sequence[State]
    ) -> None:
        import torch

        own = self.options.model_dump() | {"lr": group["lr"], "weight_decay": group["weight_decay"]}
        by_torch(torch.optim.Adafactor, weights, gradients, states, foreach=False, **own)
