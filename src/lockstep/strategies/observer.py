"""Listening to a step while a strategy computes it: the one interface for it.

In: a strategy whose `observer` is set. Out: `train_step` calls the observer's methods. An observer changes no number.
It may raise an error: nothing has been updated then.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from lockstep.distributed.world import World


class WholeGradient(Protocol):
    """The gradient of a step, however it is cut over ranks."""

    def whole(self, world: World) -> dict[str, Tensor]:
        """By parameter name on rank 0, nothing on other ranks. Collective."""


class StepObserver:
    """Ignores everything; subclasses override the methods that they need."""

    def hears(self, index: int) -> bool:
        """Whether `gradient` is to be called for this micro-batch, which costs a hook a parameter."""
        return False

    def loss(self, index: int, loss: Tensor) -> None:
        """The loss sum of micro-batch `index` on this rank, before it is divided and scaled: a scalar."""

    def gradient(self, index: int, name: str, gradient: Tensor) -> None:
        """The gradient of one parameter in one micro-batch on this rank, before it is added to anything; it may be
        row-sparse. The pipeline, whose micro-batches overlap, does not call it."""

    def reduced(self, gradient: WholeGradient) -> None:
        """The sum over all micro-batches of all ranks, before clipping. Collective."""


class GradientRecorder(StepObserver):
    """Keeps the gradient of the last step on rank 0's host."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.gradients: dict[str, Tensor] = {}  # by parameter name; empty on other ranks

    def reduced(self, gradient: WholeGradient) -> None:
        whole = gradient.whole(self._world)
        self.gradients = {name: tensor.detach().cpu().clone() for name, tensor in whole.items()}
