"""A block that FSDP wraps, whose inputs keep the order in which their gradients are added up.

In: a block around which `fully_shard` has put its hooks. Out: the same block; FSDP is told when its backward is over by
a number that goes in and out beside the inputs.

FSDP puts an autograd node of its own between a block and its inputs, to learn when the block's gradients are there.
An input that the block uses more than once, and that is used outside of it too (an attention's input that is added to
its output, what an encoder gives to every layer of a decoder), then has the terms of the block added up first, and not
in the order of a model without FSDP. So inputs are sealed while FSDP's hooks look at them, and it is given one number
instead, the gate. Autograd takes, of the nodes whose gradients are there, the one that was made last. The gate's node
was made before all of the block's, and so comes after all of them, and before what was computed before the block.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils import _pytree


class _Sealed:
    """The arguments of a block. No dataclass: FSDP looks into those."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args, self.kwargs = args, kwargs


def gate(block: nn.Module) -> None:
    """Seal the inputs of a block that is wrapped already; Accelerate leaves some as they are."""
    if not isinstance(block, FSDPModule):
        return
    gates: list[Tensor] = []  # of the forward that is under way

    def seal(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        device = next(block.parameters()).device
        return (_Sealed(args, kwargs), torch.full((), -0.0, device=device, requires_grad=True)), {}

    def unseal(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        sealed, number = args
        gates.append(number)
        return sealed.args, sealed.kwargs

    def close(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Every output that has a gradient, plus minus zero, which is the same bits for every number. All of them: an
        input that is handed on (T5's position biases) would otherwise wake FSDP again when the block is through."""
        number = gates.pop()
        leaves, spec = _pytree.tree_flatten(output)
        leaves = [x + number if isinstance(x, Tensor) and x.requires_grad else x for x in leaves]
        return _pytree.tree_unflatten(leaves, spec)

    fsdp = next(iter(block._forward_pre_hooks))  # it has put its own before all others
    block.register_forward_pre_hook(unseal, prepend=True, with_kwargs=True)
    hooks: Any = block._forward_pre_hooks  # an OrderedDict, whatever its annotation says
    hooks.move_to_end(fsdp, last=False)
    block.register_forward_pre_hook(seal, prepend=True, with_kwargs=True)
    block.register_forward_hook(close, prepend=True)
