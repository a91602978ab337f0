"""Peer checkpoints: copies of the state in other ranks' memory, every `launch.replicate_every` steps.

In: each rank's share of the state after some step, cut as for a checkpoint, so that the shares together contain
everything once. Out: versions of the state; of each, a rank holds its own share and that of the preceding rank, so that
the share of a failed rank survives. A step waits for the copy into host memory; sending continues during training, over
separate connections.

A copy is used only if all its shares are available. The previous one is freed once all ranks confirm that the new one
has arrived: a rank normally holds two shares, and four while a copy is in flight. A single rank makes no periodic
copies, because nobody could use them after its failure; before other ranks join, it makes one for itself, of a state
that it can no longer read after leaving its group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.checkpoint.shard_files import Background, place_of, share_out
from lockstep.distributed.sharded import TensorSlice
from lockstep.distributed.torch_internals import local
from lockstep.training.session import Session
from lockstep.training.train_state import TrainState

Key = tuple[int, int, str]  # updates made, generation that the shares were cut for, `live` or `copied`


@dataclass
class Version:
    """The training state after one step, as far as this rank holds shares of it."""

    key: Key
    shares: dict[int, dict[TensorSlice, Tensor]]  # share number -> slices
    count: int  # number of shares of the whole state
    train_state: dict[str, Any]  # `TrainState.state_dict`


@dataclass
class _Flight:
    """A copy in flight."""

    version: Version
    arriving: tuple[int, dict[TensorSlice, Tensor]] | None  # share of the preceding rank: number and slices
    work: Background
    answer: Callable[[], int] | None = None  # whether any rank was still transferring one step ago


@dataclass
class _Layout:
    """Layout of slices in a buffer."""

    places: list[TensorSlice] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        return sum(place.bytes for place in self.places)

    def room(self) -> tuple[Tensor, dict[TensorSlice, Tensor]]:
        """Allocate a buffer, with a view for each slice."""
        buffer, views, end = torch.empty(self.bytes, dtype=torch.uint8), {}, 0
        for place in self.places:  # wide dtypes first, so that all are aligned
            start, end = end, end + place.bytes
            views[place] = buffer[start:end].view(place.dtype).view(place.sizes)
        return buffer, views


class PeerCheckpoints:
    """Copies of the training state in the memory of one generation's ranks, and those left from earlier generations."""

    def __init__(self, session: Session) -> None:
        """Makes no copies if `launch.replicate_every` is 0."""
        self._session = session
        self.every = session.run.launch.replicate_every
        self.versions: list[Version] = []  # newest last
        self._flight: _Flight | None = None
        self._shapes: Any = None

    def form(self, session: Session, state: TrainState) -> None:
        """Connect to the ranks of a new group and make a first copy. Collective."""
        self._session, self._shapes, world = session, None, session.world
        self._next, self._before = neighbours(world.hosts, world.rank)
        if not self.every or world.size == 1:
            self.versions = []
            return
        with world.forming():
            self._group = world.group(backend="gloo")
        self._take(state)

    def after_step(self, state: TrainState) -> None:
        """Advance a copy in flight and start a new one if due. Collective. Errors: those of a collective when a rank
        fails."""
        if not self.every or self._session.world.size == 1:
            return
        self._advance()
        if not state.step % self.every:
            self._take(state)

    def before_join(self, state: TrainState) -> None:
        """Copy the present state before other ranks join, if a rank's part can be read only with all ranks of this
        group; waits for its arrival. Collective. Errors: as `after_step`."""
        if self.every and self._session.strategy.state.needs_all_ranks:
            self._take(state)
            self._land()

    def detach_group(self) -> list[Version]:
        """Stop copying, because the group is gone. Returns the versions that have arrived, newest last."""
        if (flight := self._flight) is not None:
            flight.work.wait()
            self._arrived(flight)
            self.versions.append(flight.version)
            self._flight = None
        return self.versions

    # -- a copy ------------------------------------------------------------------------------------------------------

    def _take(self, state: TrainState) -> None:
        """Start a copy, after waiting for the previous one. Collective."""
        self._land()
        session, world = self._session, self._session.world
        parts = session.strategy.state.sharded_state_dict()
        self._lay_out(parts)
        buffer, own = self._own.room()
        with torch.no_grad():
            for place, view in own.items():
                view.copy_(local(parts[place.name]))
        arriving, work = None, []
        if world.size > 1:
            box, theirs = self._theirs.room()
            arriving = self._before, theirs
            if len(buffer):
                work.append(dist.isend(buffer, self._next, group=self._group))
            if len(box):
                work.append(dist.irecv(box, self._before, group=self._group))
        assert world.members is not None
        key = (state.step, world.members.generation.number, "copied")
        version = Version(key, {world.rank: own}, world.size, state.state_dict())

        def wait() -> Tensor:
            for each in work:
                assert each is not None
                each.wait()
            return buffer  # keeps the buffer alive until sent

        self._flight = _Flight(version, arriving, Background(wait))

    def _land(self) -> None:
        """Wait until all ranks have the copy in flight. Collective."""
        while self._flight is not None:
            self._flight.work.wait(1.0)  # shorter than a collective's timeout
            self._advance()

    def _lay_out(self, parts: Mapping[str, Tensor]) -> None:
        """Compute which rank holds which slices. Collective."""
        world = self._session.world
        shapes = {name: (tensor.shape, local(tensor).shape, tensor.dtype) for name, tensor in parts.items()}
        if not any(world.all_gather(shapes != self._shapes)):
            return
        places = [place_of(item, parts) for item in share_out(parts, world, True)]
        places.sort(key=lambda place: (-place.dtype.itemsize, place.name))
        places_of_ranks = world.all_gather(places)
        self._own, self._theirs, self._shapes = _Layout(places), _Layout(places_of_ranks[self._before]), shapes

    def _advance(self) -> None:
        """Check, without waiting, whether all ranks have the copy in flight. Collective."""
        if (flight := self._flight) is None:
            return
        if flight.answer is None or flight.answer():
            flight.answer = self._session.world.all_reduce_max(int(not flight.work.done))
            return
        self._flight = None
        if flight.work.error is not None:
            raise flight.work.error
        self._arrived(flight)
        self.versions = [flight.version]

    @staticmethod
    def _arrived(flight: _Flight) -> None:
        if flight.work.error is None and flight.arriving is not None:
            number, pieces = flight.arriving
            flight.version.shares[number] = pieces


def neighbours(hosts: Sequence[str], rank: int) -> tuple[int, int]:
    """(rank that keeps a copy of this rank's share, rank whose share this rank keeps): on another host, unless one host
    has more than half of all ranks."""
    order = sorted(range(len(hosts)), key=lambda each: (hosts[each], each))
    most = max(list(hosts).count(host) for host in hosts)
    shift = most if most < len(hosts) else 1
    place = order.index(rank)
    return order[(place + shift) % len(order)], order[place - shift]
