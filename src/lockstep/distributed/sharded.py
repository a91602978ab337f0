"""Sharded state: the tensors that each rank has of a run's state, whole or in part.

In: one mapping a rank, `model.NAME` and `optimizer.KEY.NAME` -> tensor. A DTensor is a part that knows its place in the
whole; a plain tensor is whole, and ranks that hold one of the same name hold the same. Out: the whole state on rank 0,
or every rank's own part filled from a state that is kept elsewhere: in files, or in slices in the memory of other
ranks (`PeerReader`). One whole tensor at a time is in the host memory of every rank then.
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
from lockstep.config.run import Run
from lockstep.distributed.torch_internals import by_host, is_dtensor
from lockstep.distributed.world import World


class Saved(ABC):
    """A whole state that ranks take their parts from."""

    @abstractmethod
    def __contains__(self, name: str) -> bool: ...

    @abstractmethod
    def read(self, targets: Mapping[str, Tensor]) -> None:
        """Fill these tensors in place; of a DTensor this rank's part. Every rank names what it holds, or nothing.
        Collective."""


class WholeState(Saved):
    """A whole state in memory, the same on every rank that reads from it."""

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        self.state = state

    def __contains__(self, name: str) -> bool:
        return name in self.state

    def read(self, targets: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, own in targets.items():
                fill(own, self.state[name])


class ShardedState(Protocol):
    """A state whose tensors are divided over the ranks, such as a strategy's. Every method but `gives_bits` is
    collective."""

    def gives_bits(self, run: Run) -> bool:
        """Whether the run ends with the bits of a single process."""

    def sharded_state_dict(self) -> dict[str, Tensor]:
        """This rank's part."""

    def load_sharded_state_dict(self, saved: Saved) -> None:
        """Take over what all ranks gave together, here or elsewhere."""


def gather(parts: Mapping[str, Tensor], world: World) -> dict[str, Tensor]:
    """Whole tensors, by name: all of them on rank 0, elsewhere those that are there without being gathered. One tensor
    at a time travels. Collective."""
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


def local(tensor: Tensor | None) -> Tensor:
    """This rank's part, without communication."""
    assert tensor is not None
    if not is_dtensor(tensor):
        return tensor
    with torch.no_grad():  # the tensor itself, and not a view with a graph
        return tensor.to_local()


def whole(tensor: Tensor | None) -> Tensor:
    """All of it, on every rank. Collective."""
    assert tensor is not None
    if not is_dtensor(tensor):
        return tensor
    if by_host(tensor, tensor.device_mesh.get_group(0)):  # the functional collective of CUDA over gloo crashes (2.11)
        return whole(tensor.detach().cpu()).to(tensor.device)
    return tensor.full_tensor()


def fill(own: Tensor, whole_tensor: Tensor) -> None:
    """Write this rank's part of `whole_tensor` (whole, the same on every rank) into `own`."""
    if is_dtensor(own):
        from torch.distributed.tensor import distribute_tensor

        spread = distribute_tensor(whole_tensor.to(own.device), own.device_mesh, own.placements, src_data_rank=None)
        local(own).copy_(local(spread))
    else:
        own.copy_(whole_tensor)


@dataclass(frozen=True)
class TensorSlice:
    """The place of a piece in its tensor: the tensor's name, and the offsets at which the piece begins."""

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
    """Nobody holds some piece of a tensor."""


class PeerReader(Saved):
    """The state of all ranks, read from the ranks that hold it."""

    def __init__(self, mine: SliceMap, world: World) -> None:
        """`mine`: what this rank holds, maybe nothing. Where several hold the same, the first sends it. Collective.
        Errors: `Incomplete`, on every rank."""
        self.world, self.mine = world, mine
        self.holders: dict[str, dict[TensorSlice, int]] = {}  # of each tensor, who sends which piece
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
        """The pieces that this rank sends."""
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
        """A piece, on every rank. Collective."""
        if self.world.rank == rank:
            piece = self.mine[place].detach().cpu().contiguous()
        else:
            piece = torch.empty(place.sizes, dtype=place.dtype)
        if piece.numel():
            self.world.send_round(piece.reshape(-1).view(torch.uint8), rank)
        return piece
