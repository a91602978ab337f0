"""Sharded state: each rank's whole tensors and shards of a run's state.

In: one mapping per rank, `model.NAME` and `optimizer.KEY.NAME` -> tensor. A DTensor is a shard that knows its position;
a plain tensor is whole, and replicated if several ranks have one of that name. Out: the whole state on rank 0, or every
rank's part filled from a state stored elsewhere: in files, or in slices in the memory of other ranks (`PeerReader`).
Each rank has at most one whole tensor in host memory at a time.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.config.errors import CodedError
from lockstep.distributed.torch_internals import by_host, is_dtensor, local
from lockstep.distributed.world import World


class Saved(ABC):
    """A full state that ranks read their parts from."""

    @abstractmethod
    def __contains__(self, name: str) -> bool: ...

    @abstractmethod
    def read(self, targets: Mapping[str, Tensor]) -> None:
        """Fill these tensors in place; of a DTensor, this rank's shard. Each rank names the tensors it needs, possibly
        none. Collective."""


class WholeState(Saved):
    """A full state in memory, equal on every rank that reads from it."""

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        self.state = state

    def __contains__(self, name: str) -> bool:
        return name in self.state

    def read(self, targets: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, own in targets.items():
                fill(own, self.state[name])


class ShardedState(Protocol):
    """A state whose tensors are sharded over the ranks, such as a strategy's. Every method is collective."""

    def sharded_state_dict(self) -> dict[str, Tensor]:
        """Return this rank's part."""

    def load_sharded_state_dict(self, saved: Saved) -> None:
        """Load a state that all ranks returned together, in this run or another."""


def gather(parts: Mapping[str, Tensor], world: World) -> dict[str, Tensor]:
    """Return whole tensors by name: all of them on rank 0; on other ranks those that need no gathering. Transfers one
    tensor at a time. Collective."""
    whole_tensors = {}
    for name, tensor in parts.items():
        if not is_dtensor(tensor):
            whole_tensors[name] = tensor
        elif (gathered := whole(tensor)) is not None and world.is_main:
            whole_tensors[name] = gathered.cpu()
    if world.size > 1:
        listings = world.all_gather(
            [(n, t.shape, t.dtype) for n, t in whole_tensors.items()] if not world.is_main else list(whole_tensors)
        )
        arrived = set(listings[0])
        for rank in range(1, world.size):
            for name, shape, dtype in listings[rank]:
                if name in arrived:
                    continue
                arrived.add(name)
                if world.is_main:
                    whole_tensors[name] = torch.empty(shape, dtype=dtype)
                    dist.recv(whole_tensors[name], rank)
                elif world.rank == rank:
                    dist.send(whole_tensors[name].detach().cpu().contiguous(), 0)
    return dict(sorted(whole_tensors.items()))


def whole(tensor: Tensor | None) -> Tensor:
    """Return the whole tensor on every rank. Collective."""
    assert tensor is not None
    if not is_dtensor(tensor):
        return tensor
    if by_host(tensor, tensor.device_mesh.get_group(0)):  # functional CUDA collectives over gloo crash (torch 2.11)
        return whole(tensor.detach().cpu()).to(tensor.device)
    return tensor.full_tensor()


def fill(own: Tensor, whole_tensor: Tensor) -> None:
    """Write this rank's part of `whole_tensor` (replicated) into `own`."""
    if is_dtensor(own):
        from torch.distributed.tensor import distribute_tensor

        spread = distribute_tensor(whole_tensor.to(own.device), own.device_mesh, own.placements, src_data_rank=None)
        local(own).copy_(local(spread))
    else:
        own.copy_(whole_tensor)


@dataclass(frozen=True)
class TensorSlice:
    """A slice of a tensor: the tensor's name, and the slice's offsets and sizes."""

    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    whole: tuple[int, ...]  # shape of the tensor
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.sizes) * self.dtype.itemsize


SliceMap = Mapping[TensorSlice, Tensor]


class Incomplete(CodedError):
    """No rank has some slice of a tensor."""


class PeerReader(Saved):
    """The state of all ranks, read from the ranks that hold it."""

    def __init__(self, mine: SliceMap, world: World) -> None:
        """`mine`: this rank's slices, possibly none. If several ranks hold a slice, the first sends it. Collective.
        Errors: `Incomplete`, on every rank."""
        self.world, self.mine = world, mine
        self.holders: dict[str, dict[TensorSlice, int]] = {}  # by tensor: slice -> rank that sends it
        for rank, places in enumerate(world.all_gather(list(mine))):
            for place in places:
                self.holders.setdefault(place.name, {}).setdefault(place, rank)
        for name, slices in self.holders.items():
            if sum(math.prod(place.sizes) for place in slices) != math.prod(next(iter(slices)).whole):
                raise Incomplete("LS7050", f"no surviving rank has all of {name}")

    def __contains__(self, name: str) -> bool:
        return name in self.holders

    @property
    def sent(self) -> Iterable[TensorSlice]:
        """The slices that this rank sends."""
        own_slices = (
            place for each in self.holders.values() for place, rank in each.items() if rank == self.world.rank
        )
        return sorted(own_slices, key=lambda place: (place.name, place.offsets))

    def read(self, targets: Mapping[str, Tensor]) -> None:
        all_names = {name for names in self.world.all_gather(list(targets)) for name in names}
        for name in sorted(all_names):
            pieces = self.holders[name]
            first = next(iter(pieces))
            whole = torch.empty(first.whole, dtype=first.dtype) if name in targets else None
            for place, rank in sorted(pieces.items(), key=lambda each: each[0].offsets):
                piece = self._sent(place, rank)
                if whole is not None:
                    ranges = zip(place.offsets, place.sizes, strict=True)
                    whole[tuple(slice(begin, begin + size) for begin, size in ranges)] = piece
            if whole is not None:
                WholeState({name: whole}).read({name: targets[name]})

    def _sent(self, place: TensorSlice, rank: int) -> Tensor:
        """Return a slice on every rank. Collective."""
        if self.world.rank == rank:
            piece = self.mine[place].detach().cpu().contiguous()
        else:
            piece = torch.empty(place.sizes, dtype=place.dtype)
        if piece.numel():
            self.world.send_round(piece.reshape(-1).view(torch.uint8), rank)
        return piece
