"""The interface for observing a step while a strategy computes it.

In: a strategy whose `observer` is set. Out: `train_step` calls the observer's methods. An observer changes no number.
If it raises an error, the step updates nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

from torch import Tensor, nn
from typing_extensions import override

from lockstep.distributed.world import World


class WholeGradient(Protocol):
    """The gradient of a step, sharded or not."""

    def whole(self, world: World) -> dict[str, Tensor]:
        """Return the full gradient by parameter name on rank 0; empty on other ranks. Collective."""


class StepObserver:
    """Observer of a training step that ignores everything; subclasses override what they need."""

    def hears(self, index: int) -> bool:
        """Whether to call `gradient` for this micro-batch, which costs one hook per parameter."""
        return False

    def loss(self, index: int, loss: Tensor) -> None:
        """Receive the loss sum of micro-batch `index` on this rank, before division and loss scaling: a scalar."""

    def gradient(self, index: int, name: str, gradient: Tensor) -> None:
        """Receive the gradient of one parameter in one micro-batch on this rank, before it is added to anything; it may
        be row-sparse. It is valid only during the call: a CUDA graph writes the next one into its memory. The first
        pipeline stage reports a weight that several stages use; without `strategy.exact`, it reports only that stage's
        share."""

    def reduced(self, gradient: WholeGradient) -> None:
        """Receive the gradient sum over all micro-batches of all ranks, before clipping. Collective."""


class Observable(Protocol):
    """The part of a strategy that concerns its observer."""

    observer: StepObserver | None


@contextmanager
def listening(strategy: Observable, observer: StepObserver | None) -> Iterator[None]:
    """A context in which `observer` (None: no observer) replaces the strategy's current observer."""
    before, strategy.observer = strategy.observer, observer
    try:
        yield
    finally:
        strategy.observer = before


@contextmanager
def hearing(observer: StepObserver | None, index: int, weights: Iterable[tuple[str, Tensor]]) -> Iterator[None]:
    """A context for the backward pass of micro-batch `index`: the observer receives the gradient of each trained weight
    in `weights`."""
    if observer is None or not observer.hears(index):
        yield
        return
    hooks = [w.register_hook(partial(observer.gradient, index, n)) for n, w in weights if w.requires_grad]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def observing(observer: StepObserver | None, index: int, model: nn.Module) -> Iterator[None]:
    """A context for forward and backward of micro-batch `index`: the observer receives each parameter's gradient."""
    if observer is None or not observer.hears(index):
        yield
        return
    hooks = list[Any]()

    def register(module: nn.Module, inputs: Any) -> None:  # by now the engine has materialized the weights
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                hooks.append(parameter.register_hook(partial(observer.gradient, index, name)))

    hooks.append(model.register_forward_pre_hook(register))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class GradientRecorder(StepObserver):
    """Observer that keeps the gradient of the last step in rank 0's host memory."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.gradients: dict[str, Tensor] = {}  # by parameter name; empty on other ranks

    @override
    def reduced(self, gradient: WholeGradient) -> None:
        whole = gradient.whole(self._world)
        self.gradients = {name: tensor.detach().cpu().clone() for name, tensor in whole.items()}
