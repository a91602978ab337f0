"""The matrix products and attentions of a step, one by one, to be computed again by themselves.

In: a step that runs inside of `Products`. Out: every kind with its FLOP, how often it came, and a way to compute it
once more on tensors of the same layout that hold other numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry


@dataclass
class Product:
    """Those that are alike."""

    flops: int  # of one
    call: tuple[Any, Any, Any]  # a function of torch, and its arguments: tensors that stand for those that there were
    count: int = 0

    @property
    def work(self) -> int:
        """FLOP of all."""
        return self.flops * self.count

    def again(self) -> Callable[[], Any]:
        """What computes one: its tensors are given numbers first, since what memory holds by chance may be slow."""
        func, args, kwargs = self.call
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor):
                tensor.normal_() if tensor.is_floating_point() else tensor.zero_()
        return lambda: func(*args, **kwargs)


class Products(TorchDispatchMode):
    """Sees what is computed inside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, Product] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        count = flop_registry.get(func.overloadpacket)
        if count is not None:
            name = f"{func} {tree_map(_told, (args, kwargs))}"
            if name not in self.found:
                flops = int(count(*args, **(kwargs or {}), out_val=out))
                self.found[name] = Product(flops, (func, tree_map(_like, args), tree_map(_like, kwargs or {})))
            self.found[name].count += 1
        return out


def _told(thing: Any) -> Any:
    return (tuple(thing.shape), thing.stride(), str(thing.dtype)) if isinstance(thing, Tensor) else thing


def _like(thing: Any) -> Any:
    """Of the same layout, with memory of its own."""
    return torch.empty_strided(thing.shape, thing.stride(), dtype=thing.dtype) if isinstance(thing, Tensor) else thing
