"""Muon (Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024): torch's; the rest by AdamW.

In: gradients. Out: each matrix of the layers updated by its orthogonalized mean gradient, which requires the whole
matrix. AdamW updates embeddings, heads, biases and norms. 4 bytes per element of a matrix, 8 for others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Literal

from pydantic import Field
from typing_extensions import override

from lockstep.config.run import RunError
from lockstep.config.sections import Decay, Section
from lockstep.strategies.optimizers.adamw import AdamW
from lockstep.strategies.optimizers.optimizer import GroupOf, Optimizer, State, Weight, by_torch, zeros

if TYPE_CHECKING:
    from torch import Tensor

MATRIX = "matrix"


class Muon(Optimizer):
    """`torch.optim.Muon` for matrices, fused AdamW for the rest."""

    enlarges_rounding = True
    selective = True

    class Options(Section):
        momentum: float = Field(0.95, ge=0, lt=1, description="decay of the mean gradient")
        nesterov: bool = Field(True, description="Nesterov momentum")
        ns_steps: int = Field(5, ge=1, lt=100, description="Newton-Schulz iterations to orthogonalize a matrix")
        lr_adjust: Literal["match_rms_adamw", "original"] = Field(
            "match_rms_adamw",
            description="match_rms_adamw: updates of AdamW's size, so that one learning_rate suits both (Liu et al., "
            "2025); original: larger for tall matrices",
        )
        muon_params: list[str] | None = Field(
            None, description="names of the matrices, with * for any part of a name; default: those of the layers"
        )
        betas: tuple[Decay, Decay] = Field((0.9, 0.999), description="decays of AdamW's two moments")
        eps: float = Field(1e-8, gt=0, description="AdamW's epsilon")

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self.others = AdamW(AdamW.Options(betas=options.betas, eps=options.eps))

    @override
    def kind(self, weight: Weight) -> str:
        if len(weight.shape) != 2:
            return ""
        if self.options.muon_params is not None:
            return MATRIX if any(fnmatchcase(weight.name, each) for each in self.options.muon_params) else ""
        return MATRIX if weight.in_layer and not weight.embedding else ""

    @override
    def check_weights(self, kinds: Mapping[str, str]) -> None:
        matrices = [name for name, kind in kinds.items() if kind == MATRIX]
        for pattern in self.options.muon_params or ():
            if not any(fnmatchcase(name, pattern) for name in matrices):
                raise RunError("LS4225", f"optim.muon_params: no trained matrix is called {pattern!r}")
        if not matrices:
            raise RunError(
                "LS4226",
                "optim.name: muon updates matrices of the model's layers, and no trained weight is one, so AdamW would "
                "update all; use optim.name=adamw, or name matrices in optim.muon_params",
            )

    @override
    def whole(self, group: GroupOf) -> bool:
        return bool(group["kind"] == MATRIX)

    @override
    def begin(self, group: GroupOf, like: Tensor) -> State:
        return {"momentum_buffer": zeros(like)} if self.whole(group) else self.others.begin(group, like)

    @override
    def update(
        self, group: GroupOf, weights: Sequence[Tensor], gradients: Sequence[Tensor], states: Sequence[State]
    ) -> None:
        import torch

        if not self.whole(group):
            self.others.update(group, weights, gradients, states)
            return
        own = self.options.model_dump(include={"momentum", "nesterov", "ns_steps"})
        own |= {"lr": group["lr"], "weight_decay": group["weight_decay"], "adjust_lr_fn": self.options.lr_adjust}
        by_torch(torch.optim.Muon, weights, gradients, states, **own)
