"""AdamW with moments in 8 bits (Dettmers et al., "8-bit optimizers via block-wise quantization", 2022).

In: gradients. Out: AdamW's update, with moments packed by bitsandbytes into 8 bits each, and a float32 scale per
`BLOCK` of them. Small tensors and embeddings keep float32 moments, as with Trainer. 2 bytes per parameter. Needs the
extra `lockstep-train[quantization]`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pydantic import Field
from typing_extensions import override

from lockstep.config.sections import Decay, Section
from lockstep.strategies.optimizers.adamw import AdamW
from lockstep.strategies.optimizers.optimizer import GroupOf, Optimizer, State, Weight

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 256  # elements that share a scale, as in bitsandbytes
EIGHT = "8 bits"
_MOMENTS = {"exp_avg": True, "exp_avg_sq": False}  # whether they may be negative


class AdamW8bit(Optimizer):
    """Fused AdamW with moments that are unpacked for the update, tensor by tensor. bitsandbytes' own update adds in a
    different order."""

    packages = ("bitsandbytes",)
    extra = "quantization"

    class Options(Section):
        betas: tuple[Decay, Decay] = Field((0.9, 0.999), description="decays of the two moments")
        eps: float = Field(1e-8, gt=0, description="added to the square root of the second moment")
        min_8bit_size: int = Field(4096, ge=0, description="tensors with fewer elements keep their moments in 32 bits")

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self.plain = AdamW(AdamW.Options(betas=options.betas, eps=options.eps))
        self._maps: dict[tuple[bool, Any], Tensor] = {}

    @override
    def bytes_held(self) -> float:
        return 2.0

    @override
    def kind(self, weight: Weight) -> str:
        large = math.prod(weight.shape) >= self.options.min_8bit_size
        return EIGHT if large and not weight.embedding else ""

    @override
    def whole(self, group: GroupOf) -> bool:
        return bool(group["kind"] == EIGHT)  # blocks are counted from the tensor's first element

    @override
    def begin(self, group: GroupOf, like: Tensor) -> State:
        import torch

        if not self.whole(group):
            return self.plain.begin(group, like)
        blocks = -(-like.numel() // BLOCK)
        state = {"step": torch.zeros((), device=like.device)}
        for key in _MOMENTS:
            state[key] = torch.zeros_like(like, dtype=torch.uint8)
            state[f"{key}_scale"] = torch.zeros(blocks, device=like.device)
        return state

    @override
    def update(
        self, group: GroupOf, weights: Sequence[Tensor], gradients: Sequence[Tensor], states: Sequence[State]
    ) -> None:
        if not self.whole(group):
            self.plain.update(group, weights, gradients, states)
            return
        from bitsandbytes import functional

        for weight, gradient, state in zip(weights, gradients, states, strict=True):
            moments = {}
            for key, signed in _MOMENTS.items():
                code = self._code(signed, weight.device)
                moments[key] = functional.dequantize_blockwise(
                    state[key], absmax=state[f"{key}_scale"], code=code, blocksize=BLOCK
                )
            self.plain.update(group, [weight], [gradient], [{"step": state["step"], **moments}])
            for key, signed in _MOMENTS.items():
                code = self._code(signed, weight.device)
                packed, quantization = functional.quantize_blockwise(moments[key], code=code, blocksize=BLOCK)
                state[key].copy_(packed)
                state[f"{key}_scale"].copy_(quantization.absmax)

    def _code(self, signed: bool, device: Any) -> Tensor:
        """Return the 256 quantization levels, as factors of a block's largest value."""
        from bitsandbytes import functional

        if (signed, device) not in self._maps:
            self._maps[signed, device] = functional.create_dynamic_map(signed=signed).to(device)
        return self._maps[signed, device]
