"""Copies of the state in the memory of ranks, taken every `launch.replicate_every` steps beside training: what a rank
that is lost has held is in the memory of another one.

In: each rank's share of the state after some step, cut as a checkpoint cuts it, so that all together have everything
once. Out: versions of the state, of which each rank has its own share and that of the rank before it. A step waits for
the copy into host memory; sending goes on beside training, over connections of its own.

A copy is used only where all shares of it can be brought together. The one before it is let go of once all ranks have
said that the new one has arrived: at rest a rank has two shares, while a copy travels four. A rank that is alone makes
no copies beside training, which nobody could use after its loss; only one for itself, before others come in, of a state
that it cannot read any more once it has left its group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.checkpoint.storage import Background, place_of, share_out
from lockstep.distributed.sharded import TensorSlice, local
from lockstep.training.session import Session
from lockstep.training.train_state import TrainState

Key = tuple[int, int, str]  # updates made, generation of the ranks it was cut for, and `live` or `copied`


@dataclass
class Version:
    """A rank's shares of the state after some step."""

    key: Key
    shares: dict[int, dict[TensorSlice, Tensor]]  # by number
    count: int  # shares that make up the whole
    train_state: dict[str, Any]  # `TrainState.state_dict`


@dataclass
class _Flight:
    """A copy that travels."""

    version: Version
    arriving: tuple[int, dict[TensorSlice, Tensor]] | None  # number and pieces of the share of the rank before
    work: Background
    answer: Callable[[], int] | None = None  # whether any rank was still at it a step ago


@dataclass
class _Layout:
    """Where each piece lies in a buffer."""

    places: list[TensorSlice] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        return sum(place.bytes for place in self.places)

    def room(self) -> tuple[Tensor, dict[TensorSlice, Tensor]]:
        """A buffer, and the pieces in it."""
        buffer, views, end = torch.empty(self.bytes, dtype=torch.uint8), {}, 0
        for place in self.places:  # wide types first: all are aligned
            start, end = end, end + place.bytes
            views[place] = buffer[start:end].view(place.dtype).view(place.sizes)
        return buffer, views


class PeerCheckpoints:
    """The copies of training state in the memory of the ranks of one generation, and those left from generations
    before."""

    def __init__(self, session: Session) -> None:
        """Nothing is copied where `launch.replicate_every` is 0."""
        self._session = session
        self.every = session.run.launch.replicate_every
        self.versions: list[Version] = []  # newest last
        self._flight: _Flight | None = None
        self._shapes: Any = None

    def form(self, session: Session, state: TrainState) -> None:
        """The ranks have met: connections of their own, and a first copy. Collective."""
        self._session, self._shapes, world = session, None, session.world
        self._next, self._before = neighbours(world.hosts, world.rank)
        if not self.every or world.size == 1:
            self.versions = []
            return
        with world.forming():
            self._group = world.group(backend="gloo")
        self._take(state)

    def after_step(self, state: TrainState) -> None:
        """Everything is done that is due after an update. Collective. Errors: what a collective raises where a rank is
        lost."""
        if not self.every or self._session.world.size == 1:
            return
        self._advance()
        if not state.step % self.every:
            self._take(state)

    def before_join(self, state: TrainState) -> None:
        """Others are to come in: where a rank's part can be read with all ranks of this group only, a copy of the
        present step, once it has arrived. Collective. Errors: as `after_step`."""
        strategy: Any = self._session.strategy
        if self.every and strategy.state_needs_all_ranks:
            self._take(state)
            self._land()

    def detach_group(self) -> list[Version]:
        """The group is gone: nothing travels any more. Returns what has arrived, newest last."""
        if (flight := self._flight) is not None:
            flight.work.wait()
            self._arrived(flight)
            self.versions.append(flight.version)
            self._flight = None
        return self.versions

    # -- a copy ------------------------------------------------------------------------------------------------------

    def _take(self, state: TrainState) -> None:
        """Begin one; waits for the one before. Collective."""
        self._land()
        session, world = self._session, self._session.world
        parts = session.strategy.sharded_state_dict()
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
            return buffer  # which must not be let go of before

        self._flight = _Flight(version, arriving, Background(wait))

    def _land(self) -> None:
        """Wait for what travels, until all ranks have it. Collective."""
        while self._flight is not None:
            self._flight.work.wait(1.0)  # shorter than a collective may take
            self._advance()

    def _lay_out(self, parts: Mapping[str, Tensor]) -> None:
        """See who holds what. Collective."""
        world = self._session.world
        shapes = {name: (tensor.shape, local(tensor).shape, tensor.dtype) for name, tensor in parts.items()}
        if not any(world.all_gather(shapes != self._shapes)):
            return
        places = [place_of(item, parts) for item in share_out(parts, world, True)]
        places.sort(key=lambda place: (-place.dtype.itemsize, place.name))
        places_of_ranks = world.all_gather(places)
        self._own, self._theirs, self._shapes = _Layout(places), _Layout(places_of_ranks[self._before]), shapes

    def _advance(self) -> None:
        """Find out whether all ranks have what travels. Waits for nobody who has not. Collective."""
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
    """The rank that keeps a copy of this one's share, and the one whose copy this one keeps: on another host, unless
    more than half of all ranks are on one."""
    order = sorted(range(len(hosts)), key=lambda each: (hosts[each], each))
    most = max(list(hosts).count(host) for host in hosts)
    shift = most if most < len(hosts) else 1
    place = order.index(rank)
    return order[(place + shift) % len(order)], order[place - shift]
