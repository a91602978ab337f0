"""A state in pieces that ranks hold in memory: read from there at another number of ranks, without a file.

In: what each rank holds, as pieces of whole tensors that know their place. Out: a `Saved` state to read from. One whole
tensor at a time is in the host memory of every rank; it is put together from messages of those that hold its pieces.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.distributed.sharded import Given, Saved
from lockstep.distributed.world import World


@dataclass(frozen=True)
class TensorSlice:
    """Of a piece: which tensor it is of, and where it begins."""

    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    whole: tuple[int, ...]  # shape of the tensor
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.sizes) * self.dtype.itemsize


SliceMap = Mapping[TensorSlice, Tensor]


class Incomplete(Exception):
    """Nobody holds some piece of a tensor."""


class PeerReader(Saved):
    """Of all ranks together."""

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
                raise Incomplete(f"nobody who is left holds all of {name}")

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
        wanted = {name for names in self.world.all_gather(list(targets)) for name in names}
        for name in sorted(wanted):
            pieces = self.holders[name]
            first = next(iter(pieces))
            whole = torch.empty(first.whole, dtype=first.dtype) if name in targets else None
            for place, rank in sorted(pieces.items(), key=lambda each: each[0].offsets):
                piece = self._sent(place, rank)
                if whole is not None:
                    ranges = zip(place.offsets, place.sizes, strict=True)
                    whole[tuple(slice(begin, begin + size) for begin, size in ranges)] = piece
            if whole is not None:
                Given({name: whole}).read({name: targets[name]})

    def _sent(self, place: TensorSlice, rank: int) -> Tensor:
        """A piece, on every rank. Collective."""
        if self.world.rank == rank:
            piece = self.mine[place].detach().cpu().contiguous()
        else:
            piece = torch.empty(place.sizes, dtype=place.dtype)
        if piece.numel():
            self.world.send_round(piece.reshape(-1).view(torch.uint8), rank)
        return piece
