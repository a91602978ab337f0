"""Evaluation of torch's encoder layers: their path for evaluation passes their modules by."""

from typing import Any

import pytest
import torch
from torch import nn

from lockstep.distributed import torch_internals
from lockstep.distributed.world import KEPT_KERNELS, World
from support.harness import tiny


class Adapted(nn.Module):
    """A linear layer with an addition of rank 1, whose `weight` is the base weight, as in peft."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.down, self.up = base, nn.Linear(base.in_features, 1), nn.Linear(1, base.out_features)
        base.requires_grad_(False)

    @property
    def weight(self) -> torch.Tensor:
        return self.base.weight

    @property
    def bias(self) -> torch.Tensor:
        return self.base.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def layers(activation: Any, adapted: bool) -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, activation=activation, batch_first=True)
    if adapted:
        layer.linear1 = Adapted(layer.linear1)  # type: ignore[assignment]
    return layer


@pytest.mark.parametrize("exact", ["true", "false"])
def test_encoder_layers_compute_in_evaluation_what_they_train(exact: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in KEPT_KERNELS:
        monkeypatch.setenv(name, "64")
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    monkeypatch.setattr(torch_internals, "gloo_threads", lambda count: None)
    world = World(tiny(f"strategy.exact={exact}"))
    monkeypatch.setattr(world.stop, "listen", lambda: None)
    x = 3 * torch.randn(4, 5, 8)
    try:
        world.join()
        for activation, adapted in (("relu", True), (nn.GELU(approximate="tanh"), False)):
            model = layers(activation, adapted)
            with torch.no_grad():
                assert torch.equal(model.train()(x), model.eval()(x))
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
