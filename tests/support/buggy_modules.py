"""User modules with classic bugs, for `lockstep verify` to detect and name."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset


def data() -> Any:
    inputs = torch.randn(60, 3)
    return TensorDataset(inputs, inputs.sum(-1, keepdim=True) + 3)


def loss(outputs: Tensor, answers: Tensor) -> Tensor:
    return nn.functional.mse_loss(outputs, answers)


class Base(nn.Module):
    """A module without a bug."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 8), nn.Linear(8, 1)

    def between(self, hidden: Tensor) -> Tensor:
        return hidden.tanh()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.between(self.first(inputs)))


class Remembers(Base):
    """Adds a value left by the previous batch."""

    def __init__(self) -> None:
        super().__init__()
        self.memory: Tensor | None = None

    def between(self, hidden: Tensor) -> Tensor:
        before, self.memory = self.memory, hidden.detach().mean(0)
        return hidden.tanh() if before is None else (hidden + before).tanh()


class OwnDice(Base):
    """Draws noise from an unseeded generator."""

    def __init__(self) -> None:
        super().__init__()
        self.dice = torch.Generator().manual_seed(0)

    def between(self, hidden: Tensor) -> Tensor:
        return (hidden + torch.randn(hidden.shape[-1], generator=self.dice)).tanh()
