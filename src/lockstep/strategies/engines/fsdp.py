"""Help for FSDP: outputs that it does not look into, and weights that a micro-batch does not use.

In: a model before and after `fully_shard`. Out: the same model, every gradient of which is reduced, by all ranks in the
same order; and which weights had one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter as ReduceScatter
from torch.distributed.tensor import DTensor
from torch.utils import _pytree

from lockstep.config.run import RunError
from lockstep.strategies.exact import masters

OTHER_LAYERS = (
    "strategy.name: fsdp2 needs all ranks to run the same layers in the same order, and this model ran others for some "
    "micro-batches (it leaves layers out by itself); nothing was updated. Use strategy.name=ddp"
)


def roomy(model: nn.Module) -> nn.Module:
    """A model on the meta device given memory on the CPU, in place; tied weights stay tied. Memory that is not touched
    is not taken."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((module, name))
    model.to_empty(device="cpu")
    for (first, own), *others in places.values():
        for module, name in others:
            module._parameters[name] = first._parameters[own]
    return model


def leaves_layers_out(model: nn.Module) -> None:
    """A sharded model of transformers that leaves out layers does so: where it sees FSDP it runs them all the same, and
    uses what they give."""
    for module in model.modules():
        module._is_fsdp_managed_module = False  # type: ignore[assignment]


def reshard(model: nn.Module) -> None:
    """Let go of every gathered weight: what is written into shards from here on is what the next forward gathers."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


class Shown:
    """Shows FSDP the tensors that a module returns inside of an object of the user's own.

    FSDP hooks the tensors of the outputs that it finds, and gathers a block's weights for backward when one of them
    gets a gradient; it looks into lists, mappings and the like only. Made before `fully_shard`; `hide` comes after it.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        module.register_forward_hook(lambda module, args, output: (output, inside(output)))

    def hide(self) -> None:
        """Take them away again, after FSDP's own hook."""
        self.module.register_forward_hook(lambda module, args, output: output[0])


def inside(output: Any) -> list[Tensor]:
    """The tensors with a gradient that objects of unknown kinds hold as attributes, if there are no others."""
    left = _pytree.tree_leaves(output)
    if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in left):
        return []
    tensors: list[Tensor] = []
    seen: set[int] = set()
    while left:
        thing = left.pop()
        if id(thing) in seen or isinstance(thing, type | nn.Module | Tensor):
            continue
        seen.add(id(thing))
        slots = [name for kind in type(thing).__mro__ for name in _names(getattr(kind, "__slots__", ()))]
        held = [*getattr(thing, "__dict__", {}).values(), *(getattr(thing, n) for n in slots if hasattr(thing, n))]
        for leaf in _pytree.tree_leaves(held):
            if not isinstance(leaf, Tensor):
                left.append(leaf)
            elif leaf.requires_grad:
                tensors.append(leaf)
    return tensors


def _names(slots: Any) -> Sequence[str]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


class OtherLayers(RuntimeError):
    """This rank alone has seen that it would run other layers than the others."""


def same_order(model: nn.Module) -> None:
    """Have a sharded model of the user's end with `OtherLayers` before it gathers a block that is not the next one of
    its first forward in training: ranks that gather different blocks at the same moment crash."""
    blocks = [m for m in model.modules() if isinstance(m, FSDPModule) and m is not model]
    orders: list[list[nn.Module]] = []  # of the first forward, and of the one that is under way
    under_way = [False]

    def begin(*_: Any) -> None:
        under_way[0] = model.training  # not while activations are computed again
        if model.training:
            orders[1:] = []
            orders.append([])

    def enter(block: nn.Module, *_: Any) -> None:
        if under_way[0]:
            orders[-1].append(block)
            if orders[-1] != orders[0][: len(orders[-1])]:
                raise OtherLayers(OTHER_LAYERS)

    def end(*_: Any) -> None:
        if under_way[0] and orders[-1] != orders[0]:
            raise OtherLayers(OTHER_LAYERS)
        under_way[0] = False

    for block in blocks:
        block.register_forward_pre_hook(enter, prepend=True)
    model.register_forward_pre_hook(begin, prepend=True)
    model.register_forward_hook(end)


class Uses:
    """Counts the micro-batches that gave each parameter a gradient, and gives zero to those that got none: all ranks
    reduce the same parameters of a block, whatever their micro-batches used."""

    def __init__(self, model: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        self.counting = True  # off for blank micro-batches that only level the ranks
        self._position = {id(p): i for i, p in enumerate(parameters)}
        self._groups = [g for m in model.modules() if isinstance(m, FSDPModule) for g in _groups_of(m)]
        for place, group in enumerate(self._groups):
            group.post_backward = self._before(place, group, group.post_backward)
        if hasattr(model, "lockstep_called_once") and torch.distributed.get_world_size() > 1:
            same_order(model)
        self.clear()

    def clear(self) -> None:
        """A new step."""
        self.counts, self._order = [0] * len(self._position), 0

    def _before(self, place: int, group: Any, post_backward: Any) -> Any:
        """FSDP's `post_backward` of a block, after what is missing was filled in."""

        def filled(*unused: Any) -> None:
            self._order = (31 * self._order + place + 1) % 65521  # below 2^16: squares of sums are exact in float64
            for part, own in _unsharded(group):
                if own.grad is None:
                    own.grad = torch.zeros_like(own, dtype=own.grad_dtype)
                else:
                    self.counts[self._position[id(part.sharded_param)]] += self.counting
            post_backward(*unused)

        return filled

    def check_reduced(self) -> None:
        """After a backward. Errors: `RunError` when FSDP left a gradient unreduced."""
        for group in self._groups:
            for part, own in _unsharded(group):
                if own.grad is not None:
                    raise RunError(
                        f"strategy.name: fsdp2 cannot train {part._param_fqn}: FSDP does not see when its gradient is "
                        "there, since it finds no tensor in what the model returns. Return tensors, a dataclass or a "
                        "mapping of them, or use strategy.name=ddp"
                    )

    def switched(self) -> bool:
        """Whether the model has changed `requires_grad` of a weight that was gathered."""
        parts = (part for group in self._groups for part in group.fsdp_params if hasattr(part, "_unsharded_param"))
        return any(part._unsharded_param.requires_grad != part.sharded_param.requires_grad for part in parts)

    def signature(self) -> list[int]:
        """Two numbers that say in which order this rank reduced its blocks."""
        return [self._order, self._order**2]

    @staticmethod
    def compare(sums: Sequence[float], ranks: int) -> None:
        """From the sums of all ranks' signatures. Errors: `RunError`, on every rank, when the orders differ: what the
        ranks gathered and reduced together was not the same block then."""
        if ranks * sums[1] != sums[0] ** 2:  # the variance of equal numbers is 0, of others it is not
            raise RunError(OTHER_LAYERS)


def sums_in_float32(model: nn.Module) -> None:
    """Let gradients of gathered bfloat16 weights be float32, as `masters.sums_in_float32` has those of whole ones: the
    terms of a weight that a micro-batch uses twice (tied embeddings) would else be added up in bfloat16."""

    def widen(module: FSDPModule, _: Any) -> None:
        for group in _groups_of(module):
            masters.sums_in_float32(own for _, own in _unsharded(group))

    for module in model.modules():
        if isinstance(module, FSDPModule):
            hooked: Any = module
            hooked.register_forward_pre_hook(widen)  # after FSDP's own, which gathers


def _groups_of(module: FSDPModule) -> list[Any]:
    state: Any = module._get_fsdp_state()
    return [group for group in getattr(state, "_fsdp_param_groups", [state._fsdp_param_group]) if group is not None]


def _unsharded(group: Any) -> Iterator[tuple[Any, nn.Parameter]]:
    """FSDP's entry of each trainable parameter that was gathered, and the whole parameter that backward writes to."""
    for part in group.fsdp_params:
        if hasattr(part, "_unsharded_param") and part._unsharded_param.requires_grad:
            yield part, part._unsharded_param


# -- parts of tensors ------------------------------------------------------------------------------------------------


def cuts(tensor: Tensor) -> int:
    """Over how many ranks a tensor is cut; each part is on world / parts of them."""
    assert isinstance(tensor, DTensor)
    sizes = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    return math.prod(size for size, placement in sizes if not placement.is_replicate())
