"""Schedule-free AdamW (Defazio et al., "The road less scheduled", 2024): a constant rate, and an average of weights.

In: gradients at y, which interpolates the iterate (z) and its average (x). Out: y and z; x is evaluated and exported.
The updates are those of `AdamWScheduleFree` of the library schedulefree (1.4, Apache-2.0), and so is the warmup, which
starts at a fraction of the rate (`config/schedules.py`). 8 bytes per parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pydantic import Field
from typing_extensions import override

from lockstep.config.run import RunError
from lockstep.config.sections import Decay, OptimSection, Section
from lockstep.strategies.optimizers.optimizer import GroupOf, Optimizer, State, zeros

if TYPE_CHECKING:
    from torch import Tensor


class ScheduleFree(Optimizer):
    """Schedule-free AdamW; during training a weight holds y."""

    any_part = True
    averages = True
    usual_schedule = "constant"
    warms_from_one = True
    counters = ("step", "weight_sum", "highest")

    class Options(Section):
        betas: tuple[Decay, Decay] = Field((0.9, 0.999), description="weight of x in y, and decay of the second moment")
        eps: float = Field(1e-8, gt=0, description="added to the square root of the second moment")
        average_power: float = Field(
            2.0, ge=0, description="exponent: a step's weight in the average is the highest rate so far to this power"
        )

    @override
    def check(self, optim: OptimSection) -> None:
        if optim.schedule != "constant":
            raise RunError(
                "LS4230",
                "optim.schedule: schedule_free uses an average instead of a schedule; set "
                "optim.schedule=constant (warmup is supported)",
            )
        if self.options.betas[0] <= 0:
            raise RunError("LS4231", "optim.betas: the first value must be > 0 with schedule_free")

    @override
    def begin(self, group: GroupOf, like: Tensor) -> State:
        import torch

        # float64 on the host, where they are used, as in the library
        numbers = {key: torch.zeros((), dtype=torch.float64) for key in self.counters}
        return {**numbers, "z": like.detach().to(torch.float32, copy=True), "exp_avg_sq": zeros(like)}

    @override
    def update(
        self, group: GroupOf, weights: Sequence[Tensor], gradients: Sequence[Tensor], states: Sequence[State]
    ) -> None:
        (between, decay), rate = self.options.betas, group["lr"]
        for y, gradient, state in zip(weights, gradients, states, strict=True):
            z, square = state["z"], state["exp_avg_sq"]
            state["step"] += 1
            state["highest"].clamp_(min=rate)
            weight = float(state["highest"]) ** self.options.average_power
            state["weight_sum"] += weight
            share = weight / total if (total := float(state["weight_sum"])) else 0.0  # of this step in the average
            square.mul_(decay).add_((gradient * gradient).mul_(1 - decay))
            root = (square / (1 - decay ** float(state["step"]))).sqrt_().add_(self.options.eps)
            change = (gradient / root).add_(y * group["weight_decay"])
            y.add_((z - y).mul_(share)).add_(change * (rate * (between * (1 - share) - 1)))
            z.sub_(change.mul_(rate))

    @override
    def evaluated(self, weight: Tensor, state: State) -> Tensor:
        """Return the averaged weights x, computed from the trained weights y, which lie between x and z."""
        return weight + (state["z"] - weight).mul_(1 - 1 / self.options.betas[0])
