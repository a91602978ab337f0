"""Items and weights for which a mean over kept targets differs from a mean over examples.

An untrained model gives every target nearly the same loss, and then any mean looks like any other. In: a data set of
the user's, a model of theirs. Out: groups of items that hold much and little, and random weights in the model's place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from lockstep.config.run import Run
from lockstep.tasks.modules import dataset

GROUPS, HALF = 3, 4  # groups of items, and how many of each hold little, and as many much
LOOKED_AT = 64  # items of which they are chosen, evenly spread
TIMES = 4  # how often a batch holds one half of its items


@dataclass(frozen=True)
class ContrastGroup:
    """Items in three batches. Each holds all of them, so that all are padded alike: once; one half `TIMES` times; the
    other half `TIMES` times."""

    batches: tuple[list[Any], list[Any], list[Any]]

    def adds_up(self, totals: tuple[float, float, float], near: float) -> bool:
        """Whether what was measured of the batches are sums over items, relatively."""
        whole, one, other = totals
        return abs(one + other - (TIMES + 1) * whole) <= near * max(map(abs, (one, other, whole)))


def groups(run: Run, data: Any, places: np.ndarray) -> list[ContrastGroup]:
    """Groups of items of a split: those that hold least beside those that hold most, and so on inwards. Errors:
    `RunError` of an item that cannot be read."""
    chosen = np.unique(places[np.linspace(0, len(places) - 1, LOOKED_AT).astype(np.int64)])
    read = sorted((dataset.item(run, data, int(place), -1) for place in chosen), key=size)
    half = min(HALF, len(read) // 2)
    found = []
    for start in range(0, min(GROUPS * half, len(read) // 2), max(1, half)):
        stop = min(start + half, len(read) // 2)
        little, much = read[start:stop], read[len(read) - stop : len(read) - start]
        whole = [*little, *much]
        found.append(ContrastGroup((whole, whole + little * (TIMES - 1), whole + much * (TIMES - 1))))
    return found


def size(value: Any, depth: int = 4) -> int:
    """How much an item holds: numbers and characters, without what it is filled up with at one end."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, Tensor | np.ndarray):
        return _unfilled(np.asarray(value.detach().cpu() if isinstance(value, Tensor) else value).reshape(-1))
    if isinstance(value, list | tuple) and value and all(isinstance(each, int | float) for each in value):
        return _unfilled(np.asarray(value))
    if depth:
        held = value if isinstance(value, Mapping) else getattr(value, "__dict__", {})
        parts = value if isinstance(value, list | tuple) else held.values()
        return sum(size(part, depth - 1) for part in parts)
    return 0


def _unfilled(flat: np.ndarray) -> int:
    """Numbers of a row without the longer of the runs of equal ones at its ends, but for one of them."""
    if len(flat) < 2 or flat.dtype == object:
        return len(flat)
    turns = np.flatnonzero(flat[1:] != flat[:-1])
    if not len(turns):
        return 1
    return int(len(flat) - max(turns[0], len(flat) - 2 - turns[-1]))


def shaken(model: nn.Module, strength: float) -> Iterator[nn.Module]:
    """The model itself, again and again, its weights moved at random each time: outputs then differ by item and by
    target, and stay what this model can put out."""
    draw = torch.Generator().manual_seed(0)
    while True:
        with torch.no_grad():
            for weight in model.parameters():
                if weight.is_floating_point() and weight.numel():
                    noise = torch.randn(weight.shape, generator=draw).to(weight.dtype)
                    weight.add_(noise, alpha=strength * _spread(weight))
        yield model


def _spread(weight: Tensor) -> float:
    """A standard deviation for the numbers of a weight, by which outputs come to be neither all alike nor very
    large."""
    here = float(weight.float().std()) if weight.numel() > 1 else 0.0
    return max(here, 0.5 if weight.dim() < 2 else weight[0].numel() ** -0.5)


class MeansByClass(TorchFunctionMode):
    """Notes whether a cross entropy divides by the weights of the classes that its batch happens to hold. Items of a
    class that is rare may be missing among those that are tried, and then no number shows it."""

    seen = False

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func in (functional.cross_entropy, functional.nll_loss) and kwargs.get("reduction", "mean") == "mean":
            targets = args[1] if len(args) > 1 else kwargs.get("target")
            weight = args[2] if len(args) > 2 else kwargs.get("weight")
            if weight is not None and isinstance(targets, Tensor) and not targets.is_floating_point():
                self.seen |= bool((weight != weight.flatten()[0]).any())
        return func(*args, **kwargs)
