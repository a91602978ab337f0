"""Membership of a job whose ranks may fail and be replaced: launchers post it, generation by generation.

In: the launchers' store, and this process's member name. Out: the members of the newest generation, in rank order; and
aborted collectives of a generation that lost a member.
docs/how-to/faults.md describes the protocol; `training/recovery/recovery.py` is the ranks' side of it,
`launchers/processes/surviving_ranks.py` the launchers'.

A generation never changes: the next one has the next number, and the store accepts each number once. Ranks join the
newest generation they can see; a rank in an older one follows when it sees the newer one. Membership comes from the
store alone: a process that cannot reach the store belongs to no group.
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
from lockstep.distributed.job_record import MEMBER
from lockstep.distributed.rendezvous import Sealed
from lockstep.track.console import error

SOON_S = 30.0  # for the launcher to notice a failure that a rank noticed, and for live ranks to reach a generation
LOOK_S = 0.1  # between two checks for a newer generation
STUCK_S = 45.0  # maximum sleep of a rank in an aborted group; longer than forming one takes (`SOON_S`)
IN, OUT = "in", "out"  # fate of a ready replacement: the first to set it decides, the rank or its launcher
NOBODYS = 0x10CC  # tag of messages without a receiver


@dataclass(frozen=True)
class MemberAddress:
    """The member name of a process, and the address of its store, set by its launcher."""

    host: str  # of the store
    port: int
    namespace: str  # key prefix of this incarnation of the job
    me: str
    joining: bool = False  # whether it replaces a lost member, and is in no generation yet
    soon_s: float = SOON_S  # for launchers to notice a failure that a rank noticed

    def variable(self) -> dict[str, str]:
        return {MEMBER: json.dumps(asdict(self))}


@dataclass(frozen=True)
class Generation:
    """The ranks of a job between two changes of membership."""

    number: int
    members: tuple[str, ...]  # the first is rank 0, and so on
    lost: bool = True  # whether a member of the previous generation failed; else there is no hurry


class Roster:
    """The list of members, written by launchers. In a job on several machines each launcher has one; the store accepts
    each generation from only one of them."""

    def __init__(self, store: Any, namespace: str, key: str, members: Sequence[str] | None = None) -> None:
        """`members`: post the first generation with these; None: another machine posts it."""
        self.store = Sealed(dist.PrefixStore(namespace, store), namespace, key)
        self.newest = Generation(-1, ())
        if members is not None:
            self.post(members)

    def post(self, members: Sequence[str], lost: bool = False) -> None:
        """Post the next generation, unless another machine has; `newest` is up to date afterwards."""
        self.store.compare_set(f"generation/{self.newest.number + 1}", "", json.dumps([list(members), lost]))
        self.follow()

    def follow(self) -> None:
        """Update `newest` with generations posted by other machines."""
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
        """Whether all members of the newest generation are training in it."""
        return all(self.store.check([f"trains/{self.newest.number}/{member}"]) for member in self.newest.members)

    def trains(self, member: str) -> bool:
        """Whether `member` trains in the newest generation."""
        return self.store.check([f"trains/{self.newest.number}/{member}"])

    def ready(self, members: Sequence[str]) -> bool:
        """Whether all `members` have a state and training is not over, so that they can continue without lost ones."""
        return not self.store.check(["over"]) and all(self.store.check([f"ready/{member}"]) for member in members)

    def admit(self, member: str) -> bool:
        """Reserve a ready member for the next generation, so that it no longer leaves on its own. Returns False if it
        has left."""
        return self.store.compare_set(f"fate/{member}", "", IN) == IN.encode()

    def accused(self, member: str) -> bool:
        """Whether another rank reported this member as silent for too long."""
        return self.store.check([f"silent/{member}"])


class Membership:
    """One rank's view of the roster."""

    def __init__(self, place: MemberAddress) -> None:
        self.place, self.me = place, place.me
        self.generation = Generation(-1, ())
        self.offered = 0  # number of a larger generation; 0: none
        self.lost = False  # whether this generation lost a member
        self._before: set[int] | None = None  # while forming: the sockets from before
        self._own: set[int] = set()  # the groups' sockets
        self._turn, self._over = threading.Lock(), threading.Event()

    @classmethod
    def from_environment(cls) -> Membership:
        """Return this process's membership, which a launcher with a roster gives it."""
        return cls(MemberAddress(**json.loads(os.environ[MEMBER])))

    def connect(self, limit_s: float) -> None:
        """Connect to the store. Errors: `NetworkError`."""
        place = self.place
        self._limit_s = limit_s
        self._connection = rendezvous.connect_store(place.host, place.port, limit_s, limit_s)
        rank_store = dist.PrefixStore(place.namespace, self._connection)
        self._store = Sealed(rank_store, place.namespace, network.secret_from_environment())
        if not place.joining:
            self.take(_generation(self._store, 0))

    def stop(self) -> None:
        """Stop listening for generations."""
        self._over.set()

    def newest(self) -> Generation:
        """Return the newest generation; this rank's own if there is no newer one."""
        generation = self.generation
        while self._store.check([f"generation/{generation.number + 1}"]):
            generation = _generation(self._store, generation.number + 1)
        return generation

    def ready(self) -> None:
        """Report that this rank has a state: it can join, or continue if another rank fails."""
        self._store.set(f"ready/{self.me}", "1")

    def withdraw(self) -> bool:
        """Leave before this rank has joined. Returns False if it was just admitted and the others will wait for it."""
        return self._store.compare_set(f"fate/{self.me}", "", OUT) == OUT.encode()

    def over(self) -> None:
        """Report the end of training: recovery from failures no longer applies."""
        self._store.set("over", "1")

    def accuse(self, rank: int) -> None:
        """Report another rank as silent for too long; its launcher kills it."""
        self._store.set(f"silent/{self.generation.members[rank]}", "1")

    @property
    def given_up(self) -> bool:
        """Whether no rank continues and the launchers restart the job."""
        return self._store.check(["given-up"])

    def trains(self) -> None:
        """Report that this rank trains in its generation."""
        self._store.set(f"trains/{self.generation.number}/{self.me}", "1")

    def take(self, generation: Generation) -> None:
        """Join this generation, and listen for the next one."""
        with self._turn:  # from here on the listener's news concerns this generation
            self.generation, self.offered, self.lost = generation, 0, False
        listener = threading.Thread(target=self._listen, args=(generation.number,), name="lockstep-members")
        listener.daemon = True
        listener.start()

    def awaited(self, limit_s: float, stop: Callable[[], bool] = lambda: False) -> Generation | None:
        """Wait for the newest generation after this rank's own that includes this rank; returns None after `limit_s`,
        when `stop` returns True, or when no rank continues."""
        until = time.monotonic() + limit_s
        while (generation := self.newest()).number <= self.generation.number or self.me not in generation.members:
            if time.monotonic() > until or stop() or self.given_up:
                return None
            time.sleep(0.01)
        return generation

    def all_come(self, generation: Generation, limit_s: float) -> bool:
        """Wait until all members of a generation have arrived. Returns False if a newer generation is posted, or after
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
        """Open a connection to the store for forming this generation's group; `cut` closes it, too."""
        place = self.place
        connection = rendezvous.connect_store(place.host, place.port, self._limit_s, self._limit_s)
        return dist.PrefixStore(f"{place.namespace}/group-{self.generation.number}", connection)

    # -- aborting collectives ----------------------------------------------------------------------------------------

    @contextmanager
    def forming(self) -> Iterator[None]:
        """A context in which groups are formed: sockets opened within it count as theirs."""
        with self._turn:
            self._before = set(_sockets())
        try:
            yield
        finally:
            with self._turn:  # inodes are not reused
                self._own, self._before = self._own | (set(_sockets()) - (self._before or set())), None

    def cut(self) -> None:
        """Abort this rank's groups by closing their connections: all waits in their collectives end, here and on other
        ranks. Required before the groups can be destroyed."""
        with self._turn:
            groups = self._shut()
        _rouse(groups)

    def _shut(self) -> list[Any]:
        """Shut down the sockets of the groups and return the groups. The caller holds `_turn`."""
        now = _sockets()
        own = self._own if self._before is None else self._own | (set(now) - self._before)
        for number in (now[each] for each in own & now.keys()):
            with suppress(OSError), socket.socket(fileno=os.dup(number)) as same:
                inside = same.family in (socket.AF_INET, socket.AF_INET6)
                if inside and not same.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    same.shutdown(socket.SHUT_RDWR)
        return torch_internals.groups()

    def _listen(self, number: int) -> None:
        """Thread: watch for newer generations while this rank belongs to generation `number`."""
        with suppress(RuntimeError, RendezvousStateError):  # a lost store ends the launcher, which ends this rank
            newer = number
            while not self._over.wait(LOOK_S) and self.generation.number == number:
                if not self._store.check([f"generation/{newer + 1}"]):
                    continue
                newer += 1
                generation = _generation(self._store, newer)
                lost = generation.lost or self.me not in generation.members
                groups: list[Any] = []
                with self._turn:
                    if self.generation.number != number:  # this rank noticed without being told, and has moved on
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
        """Kill this process if it stays stuck in an aborted collective, so that it counts as failed. gloo does not wake
        a rank that waits for a half-sent message when its connection fails."""
        spent, since = -1, time.monotonic()
        while not self._over.wait(min(1.0, STUCK_S / 10)) and self.generation.number == number:
            state, now = _main_thread()
            if state != "S" or now != spent:  # it computes, or looks for the other ranks
                spent, since = now, time.monotonic()
            elif time.monotonic() - since > STUCK_S:
                error(coded("LS7010", "this rank is stuck in a collective that was aborted; it counts as failed"))
                os.kill(os.getpid(), signal.SIGKILL)
                return


def _generation(store: Sealed, number: int) -> Generation:
    """Read a posted generation. Errors: `RendezvousStateError`."""
    try:
        members, lost = json.loads(store.get(f"generation/{number}"))
        return Generation(number, tuple(map(str, members)), bool(lost))
    except (ValueError, TypeError) as caught:
        raise RendezvousStateError(f"generation {number} of the ranks cannot be read: {caught!r:.200}") from None


def _rouse(groups: list[Any]) -> None:
    """Wake ranks that wait on a closed gloo connection, by sending to every rank: gloo does not read a connection with
    a pending send to a rank that left, so it misses its end, but it notices that it cannot write."""
    for group in groups:
        for rank in range(group.size()):
            if rank != group.rank():
                with suppress(RuntimeError):  # the expected error
                    group.send([torch.zeros(1)], rank, NOBODYS)


def _main_thread() -> tuple[str, int]:
    """Return the state of this process's main thread from /proc (S: sleeping) and its processor time in ticks. Linux
    only."""
    with open(f"/proc/self/task/{os.getpid()}/stat", encoding="ascii", errors="replace") as file:
        fields = file.read().rpartition(")")[2].split()
    return fields[0], int(fields[11]) + int(fields[12])


def _sockets() -> dict[int, int]:
    """Return this process's sockets: inode -> file descriptor. Linux only."""
    sockets = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                sockets[status.st_ino] = int(name)
    return sockets
