"""Membership of a job whose ranks may be lost and replaced: launchers post it, generation by generation.

In: the launchers' store, and who this process is. Out: the members of the newest generation, in the order of their
ranks; and an end of all that this process waits for in a generation that has lost somebody.
docs/explanation/lost-rank.md tells the whole protocol; `training/elastic/recovery.py` is the ranks' part of it,
`launchers/processes/elastic_ranks.py` the launcher's.

A generation is never taken back or changed: the next one has the next number, and the store takes each number once.
Ranks act on the newest they can see and meet there; one that is still at an older one finds the newer one and follows.
Membership comes from the store alone: a process that cannot reach the store belongs to no group.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousStateError

from lockstep.config.errors import coded
from lockstep.distributed import network, rendezvous, torch_internals
from lockstep.distributed.rendezvous import Sealed
from lockstep.track.console import error

VARIABLE = "LOCKSTEP_MEMBER"  # set by a launcher that keeps a roll: who this process is, and where the roll is
SOON_S = 30.0  # until the launcher has seen what a rank has felt, and until ranks that live have come to a generation
LOOK_S = 0.1  # between two looks for a newer generation
STUCK_S = 45.0  # that a rank may sleep in a group whose connections were cut off: longer than it forms one, `SOON_S`
IN, OUT = "in", "out"  # what becomes of one that is ready to come in: whoever says it first, it or its launcher
NOBODYS = 0x10CC  # the tag of messages that nobody waits for


@dataclass(frozen=True)
class MemberAddress:
    """The address and name that a launcher gives to a process that it starts as a member."""

    host: str  # of the store
    port: int
    room: str  # of this formation of the job
    me: str
    joining: bool = False  # whether it takes the place of a lost one, and is in no generation yet
    soon_s: float = SOON_S  # until launchers have seen what a rank has felt

    def variable(self) -> dict[str, str]:
        return {VARIABLE: json.dumps(asdict(self))}


@dataclass(frozen=True)
class Generation:
    """The ranks of a job, until one is lost or one more comes."""

    number: int
    members: tuple[str, ...]  # the first is rank 0, and so on
    lost: bool = True  # whether one of the generation before is not there any more; else nobody is in a hurry


class Roster:
    """The list of members, which launchers write. Of a job on several machines each has one; the store takes a
    generation from one of them only, however many try."""

    def __init__(self, store: Any, room: str, key: str, members: Sequence[str] | None = None) -> None:
        """`members`: of the first generation, which is posted; None: another machine does that."""
        self.store = Sealed(dist.PrefixStore(room, store), room, key)
        self.newest = Generation(-1, ())
        if members is not None:
            self.post(members)

    def post(self, members: Sequence[str], lost: bool = False) -> None:
        """The next generation, unless another machine has posted that; the newest one is known afterwards."""
        self.store.compare_set(f"generation/{self.newest.number + 1}", "", json.dumps([list(members), lost]))
        self.follow()

    def follow(self) -> None:
        """Hear of generations that others have posted."""
        while self.store.check([f"generation/{self.newest.number + 1}"]):
            self.newest = _generation(self.store, self.newest.number + 1)

    def give_up(self, why: str) -> None:
        """Declare that no rank continues: the ranks end, and the launchers restart the job. The first reason is
        kept."""
        self.store.compare_set("given-up", "", why)

    @property
    def given_up(self) -> str | None:
        """The reason why no rank continues, or None."""
        return self.store.get("given-up").decode() if self.store.check(["given-up"]) else None

    def settled(self) -> bool:
        """Whether all members of the newest generation train in it."""
        return all(self.store.check([f"trains/{self.newest.number}/{member}"]) for member in self.newest.members)

    def trains(self, member: str) -> bool:
        """Whether this one trains in the newest generation."""
        return self.store.check([f"trains/{self.newest.number}/{member}"])

    def ready(self, members: Sequence[str]) -> bool:
        """Whether all of them hold a state, and can go on without those that are lost."""
        return not self.store.check(["over"]) and all(self.store.check([f"ready/{member}"]) for member in members)

    def admit(self, member: str) -> bool:
        """Whether this one, which is ready, may be posted: from here on it does not leave by itself. False: it has."""
        return self.store.compare_set(f"fate/{member}", "", IN) == IN.encode()

    def accused(self, member: str) -> bool:
        """Whether another rank says that this one has been silent for too long."""
        return self.store.check([f"silent/{member}"])


class Membership:
    """The roll as one rank sees it."""

    def __init__(self, place: MemberAddress) -> None:
        self.place, self.me = place, place.me
        self.generation = Generation(-1, ())
        self.offered = 0  # the number of a generation that has more members than this one; 0: none
        self.lost = False  # whether this generation has lost somebody
        self._before: set[int] | None = None  # sockets that were there before a group was formed, while it is
        self._own: set[int] = set()  # of the groups
        self._turn, self._over = threading.Lock(), threading.Event()

    @classmethod
    def from_environment(cls) -> Membership | None:
        """This process's membership; None where the launcher that started it keeps no roster."""
        value = os.environ.get(VARIABLE)
        return None if value is None else cls(MemberAddress(**json.loads(value)))

    def connect(self, limit_s: float) -> None:
        """Errors: `NetworkError`."""
        place = self.place
        self._limit_s = limit_s
        self._connection = rendezvous.connect_store(place.host, place.port, limit_s, limit_s)
        rank_store = dist.PrefixStore(place.room, self._connection)
        self._store = Sealed(rank_store, place.room, network.secret_from_environment())
        if not place.joining:
            self.take(_generation(self._store, 0))

    def stop(self) -> None:
        """Listen no more."""
        self._over.set()

    def newest(self) -> Generation:
        """The newest one that there is; this rank's own where there is no newer one."""
        generation = self.generation
        while self._store.check([f"generation/{generation.number + 1}"]):
            generation = _generation(self._store, generation.number + 1)
        return generation

    def ready(self) -> None:
        """This rank can come in from here on, or go on where another is lost."""
        self._store.set(f"ready/{self.me}", "1")

    def withdraw(self) -> bool:
        """Leave before this rank has come in. False: it is let in at this moment, and the others will wait for it."""
        return self._store.compare_set(f"fate/{self.me}", "", OUT) == OUT.encode()

    def over(self) -> None:
        """Training is over: from here on a loss is another matter."""
        self._store.set("over", "1")

    def accuse(self, rank: int) -> None:
        """Say that another rank has been silent for too long: its launcher ends it."""
        self._store.set(f"silent/{self.generation.members[rank]}", "1")

    @property
    def given_up(self) -> bool:
        """Whether the launchers restart the job and no rank continues."""
        return self._store.check(["given-up"])

    def trains(self) -> None:
        """This rank trains in its generation."""
        self._store.set(f"trains/{self.generation.number}/{self.me}", "1")

    def take(self, generation: Generation) -> None:
        """Belong to this generation, and listen for the next one."""
        with self._turn:  # what is heard from here on is of this generation
            self.generation, self.offered, self.lost = generation, 0, False
        listener = threading.Thread(target=self._listen, args=(generation.number,), name="lockstep-members")
        listener.daemon = True
        listener.start()

    def awaited(self, limit_s: float, stop: Callable[[], bool] = lambda: False) -> Generation | None:
        """The newest generation after this rank's own that includes this rank, once there is one; None after `limit_s`,
        when `stop` returns True, or when no rank continues."""
        until = time.monotonic() + limit_s
        while (generation := self.newest()).number <= self.generation.number or self.me not in generation.members:
            if time.monotonic() > until or stop() or self.given_up:
                return None
            time.sleep(0.01)
        return generation

    def all_come(self, generation: Generation, limit_s: float) -> bool:
        """Whether all members of a generation have come to it; False where a newer one has been posted, or after
        `limit_s`."""
        until = time.monotonic() + limit_s
        self._store.set(f"arrived/{generation.number}/{self.me}", "1")
        keys = [f"arrived/{generation.number}/{member}" for member in generation.members]
        while not self._store.check(keys):
            if time.monotonic() > until or self._store.check([f"generation/{generation.number + 1}"]):
                return False
            time.sleep(0.005)
        return True

    def store(self) -> Any:
        """A connection of its own to where the ranks of this generation meet; `cut` ends it, too."""
        place = self.place
        connection = rendezvous.connect_store(place.host, place.port, self._limit_s, self._limit_s)
        return dist.PrefixStore(f"{place.room}/group-{self.generation.number}", connection)

    # -- an end of waiting -------------------------------------------------------------------------------------------

    @contextmanager
    def forming(self) -> Iterator[None]:
        """A context in which a group is formed: the sockets that appear within it belong to the group. Several groups
        may be formed."""
        with self._turn:
            self._before = set(_sockets())
        try:
            yield
        finally:
            with self._turn:  # no number of a socket is given twice
                self._own, self._before = self._own | (set(_sockets()) - (self._before or set())), None

    def cut(self) -> None:
        """End every connection of this rank's group: whoever waits in one of its collectives, here or on another rank,
        waits no more. The group can only be destroyed then."""
        with self._turn:
            groups = self._shut()
        _rouse(groups)

    def _shut(self) -> list[Any]:
        """End the connections of the groups that there are. Returns the groups. The caller has the turn."""
        now = _sockets()
        own = self._own if self._before is None else self._own | (set(now) - self._before)
        for number in (now[each] for each in own & now.keys()):
            with suppress(OSError), socket.socket(fileno=os.dup(number)) as same:
                inside = same.family in (socket.AF_INET, socket.AF_INET6)
                if inside and not same.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    same.shutdown(socket.SHUT_RDWR)
        return torch_internals.groups()

    def _listen(self, number: int) -> None:
        """Look for newer generations, in a thread, as long as this rank belongs to generation `number`."""
        with suppress(RuntimeError, RendezvousStateError):  # a store that is gone ends the launcher, and that this rank
            newer = number
            while not self._over.wait(LOOK_S) and self.generation.number == number:
                if not self._store.check([f"generation/{newer + 1}"]):
                    continue
                newer += 1
                generation = _generation(self._store, newer)
                lost = generation.lost or self.me not in generation.members
                groups: list[Any] = []
                with self._turn:
                    if self.generation.number != number:  # this rank has found it by itself, and gone on
                        return
                    if lost:
                        self.lost, groups = True, self._shut()
                    else:
                        self.offered = newer
                if lost:
                    _rouse(groups)
                    self._see_out(number)
                    return

    def _see_out(self, number: int) -> None:
        """See that this rank comes out of the collectives of a group that was cut off, and out of the group. One that
        cannot counts as lost, and ends: gloo does not tell who waits for a send that was half through when its
        connection failed."""
        spent, since = -1, time.monotonic()
        while not self._over.wait(min(1.0, STUCK_S / 10)) and self.generation.number == number:
            state, now = _main_thread()
            if state != "S" or now != spent:  # it computes, or looks for the others
                spent, since = now, time.monotonic()
            elif time.monotonic() - since > STUCK_S:
                error(coded("LS7010", "this rank is stuck in a collective that was aborted; it counts as failed"))
                os.kill(os.getpid(), signal.SIGKILL)
                return


def _generation(store: Sealed, number: int) -> Generation:
    """One that is there. Errors: `RendezvousStateError`."""
    try:
        members, lost = json.loads(store.get(f"generation/{number}"))
        return Generation(number, tuple(map(str, members)), bool(lost))
    except (ValueError, TypeError) as caught:
        raise RendezvousStateError(f"generation {number} of the ranks cannot be read: {caught!r:.200}") from None


def _rouse(groups: list[Any]) -> None:
    """Whoever waits for a connection of gloo's that is cut off hears of it: once a message was begun for somebody who
    waits no more, gloo reads nothing from that connection, not even its end. It does notice that it cannot write."""
    for group in groups:
        for rank in range(group.size()):
            if rank != group.rank():
                with suppress(RuntimeError):  # which is what is wanted
                    group.send([torch.zeros(1)], rank, NOBODYS)


def _main_thread() -> tuple[str, int]:
    """The state of this process's main thread as /proc has it (S: it sleeps), and its processor time in ticks. Linux
    only."""
    with open(f"/proc/self/task/{os.getpid()}/stat", encoding="ascii", errors="replace") as file:
        fields = file.read().rpartition(")")[2].split()
    return fields[0], int(fields[11]) + int(fields[12])


def _sockets() -> dict[int, int]:
    """The sockets of this process: inode -> file descriptor. Linux only."""
    sockets = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                sockets[status.st_ino] = int(name)
    return sockets
