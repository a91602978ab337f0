"""Ranks of a machine where the loss of one does not end the others: `launch.on_rank_failure: continue`.

In: what each of them runs, and the launcher's store. Out: a process context for torch elastic; and, when a rank was
killed and all others can go on, the next generation of the job's ranks (`distributed/membership.py`), and a process
that takes its place. A rank that `sdc_check` takes out ends by itself, and nobody takes its place. Any other failure
ends all ranks, and torch elastic starts them again.

With several machines, every machine says in the store, at least once a second, that it lives, which of its ranks were
killed, and which processes wait to come in. The first of those that live decides for all: it posts the next
generation. The store takes each generation once, so two that both decide cannot both be right. A machine that has said
nothing for `launch.keep_alive_timeout_s` is lost, and its ranks with it. One that does not reach the store hears of no
generation, its ranks can meet nobody, and it ends (`elastic.py`): when a network falls apart, only the side that has
the store goes on.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.connection import wait
from typing import Any

from torch.distributed.elastic.multiprocessing.api import ProcessFailure, RunProcsResult
from torch.distributed.elastic.rendezvous import RendezvousStateError

from lockstep.config.errors import EXCLUDED, STOPPED
from lockstep.distributed.membership import MemberAddress, Roster
from lockstep.distributed.rendezvous import Sealed

POLL_S = 0.1
# How one ends that was asked to stop: listening, or not yet.
STOP_STATUSES = (STOPPED, -signal.SIGTERM, -signal.SIGUSR1)


class Ranks:
    """The ranks of one formation of a job on one machine."""

    def __init__(
        self,
        entry: Callable[..., None],
        arguments: Sequence[Any],
        variables: Mapping[int, Mapping[str, str]],
        roll: Roster,
        place: Callable[[str, bool], MemberAddress],
        lost: Callable[[int, int, int], None],
        spare: Callable[[], bool],
        names: Mapping[int, str] | None = None,
        joining: bool = False,
    ) -> None:
        """`variables` of each local rank, and its name in the roll. `lost` is told of a loss: the local rank, its pid
        and its exit code. `spare` says whether another process may take its place: asked once the others have met
        without it. `joining`: the processes come into a job that runs."""
        self._entry, self._arguments, self._variables = entry, tuple(arguments), variables
        self.roll, self._place, self._lost, self._spare = roll, place, lost, spare
        self._context = multiprocessing.get_context("forkserver")
        self.processes: dict[int, Any] = {}  # of local ranks, those that have not been lost
        self.names = dict(names or {local: str(local) for local in variables})
        self.joining: set[int] = set(variables) if joining else set()  # local ranks that have not come to train yet
        self._vacant: list[int] = []  # local ranks that nobody has
        self._spares: set[int] = set()  # local ranks of processes that were started in the place of lost ones
        self._started = len(variables)
        self.stop_asked = False  # whether a rank was asked to stop before it joined, and no other rank was
        self.why = ""  # this machine's ranks have ended, where none of them has failed
        for local in variables:
            self._start(local, joining)

    def pids(self) -> dict[int, int]:
        """The process ids of the running ranks, by local rank."""
        return {local: int(process.pid) for local, process in self.processes.items() if process.exitcode is None}

    def wait(self, timeout: float = 0.0) -> RunProcsResult | None:
        """What became of them, once all are through or one has failed; None before. Looks for `POLL_S` at most."""
        gone = self.look()
        if gone and not self._go_on(gone):
            return self.failed(gone)
        if self.ended():
            return self.through()
        self.let_in()
        return None

    def close(self, death_sig: signal.Signals | None = None, timeout: int = 30) -> None:
        """End those that run."""
        for pid in self.pids().values():
            with suppress(OSError):
                os.kill(pid, death_sig or signal.SIGTERM)
        until = time.monotonic() + timeout
        for process in self.processes.values():
            process.join(max(0.0, until - time.monotonic()))
            if process.exitcode is None:
                process.kill()
                process.join(timeout)

    def _start(self, local: int, joining: bool) -> None:
        place = self._place(self.names[local], joining)
        variables = {**self._variables[local], **place.variable()}
        process = self._context.Process(target=_begin, args=(variables, self._entry, self._arguments))
        process.start()
        self.processes[local] = process

    def look(self) -> dict[int, Any]:
        """Wait for an end of one, for `POLL_S` at most. Returns those that have not ended well, by local rank."""
        running = [process.sentinel for process in self.processes.values() if process.exitcode is None]
        if running:
            wait(running, POLL_S)
        else:
            time.sleep(POLL_S)
        return {local: p for local, p in self.processes.items() if p.exitcode not in (None, 0)}

    def failed(self, gone: Mapping[int, Any]) -> RunProcsResult:
        """All of them end, because of these."""
        if not gone:
            pass
        elif all(process.exitcode == STOPPED for process in gone.values()):
            self._see_who_trains()
            for local in self.joining:  # they hold nothing, and those that they wait for have gone
                self.processes[local].kill()
        else:
            # so that those that wait for the others wait no more
            self.roll.give_up(f"a rank has ended on {socket.gethostname()}")
        self.close()
        if not gone:
            return RunProcsResult()
        local = min(gone, key=lambda each: gone[each].exitcode)  # a signal before a status
        return RunProcsResult(
            failures={local: ProcessFailure(local, gone[local].pid, gone[local].exitcode, os.devnull)}
        )

    def ended(self) -> bool:
        """Whether all ranks that have trained are finished. Processes that have not begun to train are left out:
        finishing ranks may just have let one in, which would wait for them without end."""
        self._see_who_trains()
        own = [process for local, process in self.processes.items() if local not in self.joining]
        return bool(own) and all(process.exitcode == 0 for process in own)

    def in_vain(self) -> int:
        """The number of replacements that were started and have not come to train."""
        self._see_who_trains()
        return len(self._spares & self.joining)

    def _see_who_trains(self) -> None:
        self.joining -= {local for local in self.joining if self.roll.trains(self.names[local])}

    def through(self) -> RunProcsResult:
        self.close(signal.SIGKILL)  # those that have come too late
        return RunProcsResult(return_values=dict.fromkeys(self._variables))

    def _go_on(self, gone: Mapping[int, Any]) -> bool:
        """Let the others go on without these, if they can."""
        gone = self.without_comers(gone)
        members = self.roll.newest.members
        lost = {self.names[local] for local in gone}
        left = [member for member in members if member not in lost]
        failed = any(p.exitcode > 0 and p.exitcode != EXCLUDED for p in gone.values())
        if failed or not (lost.isdisjoint(members) or self.able(left)):
            return False
        self.vacate(gone)
        if not lost.isdisjoint(members):
            self.roll.post(left, lost=True)
        return True

    def without_comers(self, gone: Mapping[int, Any]) -> dict[int, Any]:
        """But for those that have ended by themselves before they came in: they have failed, and their own words say
        why, or they were asked to stop."""
        members = self.roll.newest.members
        for local in [local for local in gone if self.names[local] not in members]:
            code = gone[local].exitcode
            self.stop_asked |= local in self.joining and code in STOP_STATUSES
            if code > 0 or (local in self.joining and code in STOP_STATUSES):
                self.joining.discard(local)
                self.processes.pop(local)
        return {local: process for local, process in gone.items() if local in self.processes}

    def able(self, left: Sequence[str]) -> bool:
        """Whether these can go on by themselves."""
        there = [p for local, p in self.processes.items() if self.names[local] in left]
        return bool(left) and all(p.exitcode is None for p in there) and self.roll.ready(left)

    def vacate(self, gone: Mapping[int, Any]) -> None:
        """These were killed, or taken out, and are gone on without."""
        for local in gone:
            process = self.processes.pop(local)
            self._lost(local, process.pid, code := process.exitcode)
            self.joining.discard(local)
            if code != EXCLUDED:
                self._vacant.append(local)

    def let_in(self) -> None:
        """Start what takes the places of those that are lost, and offer the others those that are ready to come in:
        both only while all that are left train."""
        if self.stop_asked or (not self._vacant and not self.coming()):
            return
        if not self.roll.settled():
            return
        while self._vacant:
            local = self._vacant.pop(0)
            if self._spare():
                self.names[local] = f"{self.names[local].partition('.')[0]}.{self._started}"
                self._started += 1
                self._spares.add(local)
                self.joining.add(local)
                self._start(local, True)
        if able := [name for name in self.coming() if self.roll.ready([name]) and self.roll.admit(name)]:
            self.roll.post([*self.roll.newest.members, *able])

    def coming(self) -> list[str]:
        """Names of those that this machine may let in, ready or not."""
        names = [self.names[local] for local in sorted(self.joining)]
        return [name for name in names if name not in self.roll.newest.members]


def _begin(variables: Mapping[str, str], entry: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    os.environ.update(variables)
    entry(*arguments)


BEAT_S = 1.0
GONE_S = 2
LEAVE_S = 30.0  # that the machine which holds the store waits for the others to have read how the job ended


@dataclass
class Word:
    """What a machine says of itself."""

    host: str
    ranks: list[str] = field(default_factory=list)  # names of all that it has started
    coming: list[str] = field(default_factory=list)  # of these, processes that wait to come in
    gone: list[str] = field(default_factory=list)  # of these, those that have ended before the job
    done: bool = False  # its ranks have come to their end
    left: bool = False  # it takes no part in this formation of the job any more
    beat: int = 0

    @classmethod
    def of(cls, text: bytes) -> Word:
        """Errors: `RendezvousStateError` for what no machine says."""
        try:
            values = json.loads(text)
            ranks, coming, gone = ([str(name) for name in list(values[key])] for key in ("ranks", "coming", "gone"))
            flags = bool(values["done"]), bool(values["left"])
            return cls(str(values["host"]), ranks, coming, gone, *flags, int(values["beat"]))
        except (ValueError, TypeError, LookupError) as caught:
            raise RendezvousStateError(f"what another machine wrote cannot be read: {caught!r:.200}") from None


class Machines:
    """Those of one formation of a job, and those that have come into it, as one of them sees them."""

    def __init__(self, store: Sealed, host: str, place: int | None, count: int, keep_alive_timeout_s: float) -> None:
        """`place`: of this machine among the `count` that formed the job; None: it comes into it."""
        self._store, self._count, self._lost_s = store, count, keep_alive_timeout_s
        self.place = count + store.add("guests", 1) - 1 if place is None else place
        self.mine = Word(host)
        self.others: dict[int, Word | None] = {}  # None: it has not spoken yet
        self._heard: dict[int, float] = {}
        self._spoke_at, self._last = -math.inf, Word("")

    def say(self) -> None:
        """Tell the others, where that is new or long ago."""
        now = time.monotonic()
        if self.mine != self._last or now - self._spoke_at >= BEAT_S:
            self.mine.beat += 1
            self._store.set(f"machine/{self.place}", json.dumps(asdict(self.mine)))
            self._spoke_at, self._last = now, replace(self.mine)

    def hear(self) -> None:
        """What the others say."""
        now = time.monotonic()
        for place in range(self._count + self._store.add("guests", 0)):
            if place == self.place:
                continue
            self._heard.setdefault(place, now)
            before, key = self.others.setdefault(place, None), f"machine/{place}"
            if self._store.check([key]):
                other_word = self.others[place] = Word.of(self._store.get(key))
                if before is None or before.beat != other_word.beat:
                    self._heard[place] = now

    def silent(self, place: int) -> bool:
        """Whether another machine is lost."""
        return time.monotonic() - self._heard[place] > self._lost_s

    def live(self) -> dict[int, Word | None]:
        """The others that are neither lost nor have left."""
        return {
            place: word
            for place, word in self.others.items()
            if not self.silent(place) and not (word is not None and word.left)
        }

    def decides(self) -> bool:
        """Whether this one is the first of those that live."""
        return all(place > self.place for place in self.live())


class RanksAmongMachines(Ranks):
    """This machine's ranks in one formation of a job on several machines."""

    def __init__(
        self,
        *arguments: Any,
        machines: Machines,
        fewest: int,
        most: int,
        missed: Callable[[list[str]], None],
        **named: Any,
    ) -> None:
        """`fewest` machines at least go on, and `most` have ranks in the job. `missed` is told of hosts that are
        lost."""
        self._machines, self._fewest, self._most, self._missed = machines, fewest, most, missed
        self._accused = 0.0  # when it was last looked for
        self._ended = False  # whether this machine's ranks have finished
        self.stopped = False  # the same, because they were asked to stop
        super().__init__(*arguments, **named)

    @property
    def idle(self) -> bool:
        """Whether no rank of this machine has come to train in the job."""
        there = [self.names[local] for local in self.processes if local not in self.joining]
        return not any(name in self.roll.newest.members for name in there)

    def wait(self, timeout: float = 0.0) -> RunProcsResult | None:
        roll, mine = self.roll, self._machines.mine
        gone = self.without_comers(self._tell(self.look()))
        if why := roll.given_up:
            self.why = why
            return self.failed(gone)
        if any(process.exitcode > 0 for process in gone.values()):
            return self.failed(gone)
        if self._out():
            self.why = "the others have gone on without this machine"
            return self.failed({})
        if self._machines.decides():
            self._decide()
        if roll.newest.members:
            self.vacate({local: p for local, p in gone.items() if self.names[local] not in roll.newest.members})
        if self.ended():
            self._ended = mine.done = True
            return self.through()
        mine.done = self.idle
        self.let_in()
        return None

    def failed(self, gone: Mapping[int, Any]) -> RunProcsResult:
        if gone and all(process.exitcode == STOPPED for process in gone.values()):
            self.stopped = self._ended = self._machines.mine.done = True  # no loss: nobody goes on without these
        return super().failed(gone)

    def close(self, death_sig: signal.Signals | None = None, timeout: int = 30) -> None:
        machines = self._machines
        with suppress(RuntimeError):  # the store is gone
            machines.mine.left, machines.mine.done = machines.mine.left or not self._ended, self._ended
            machines.say()
        # a rank that waits for a lost machine does not end by itself
        super().close(death_sig, GONE_S if any(map(machines.silent, machines.others)) else timeout)

    def leave(self, holds: bool, tell: Callable[[], None]) -> bool:
        """This machine's ranks have come to their end: wait for those of the others; of one that is lost nothing is
        expected. `holds`: the store, which the others need until they have left. `tell` says how the job ended: a
        machine whose ranks were lost just now, and whose others have not come in, has nothing else to know it by.
        Returns whether the rank that writes OUTPUT has come to its end."""
        machines, mine = self._machines, self._machines.mine
        while True:
            machines.say()
            machines.hear()
            if self.roll.given_up or all(word is None or word.done for word in machines.live().values()):
                break
            time.sleep(POLL_S)
        first = self.roll.newest.members[0]
        done = any(first in word.ranks and word.done for word in (mine, *machines.others.values()) if word is not None)
        if done:
            tell()
        mine.left = True
        machines.say()
        until = time.monotonic() + LEAVE_S
        while holds and machines.live() and time.monotonic() < until:
            time.sleep(POLL_S)
            machines.hear()
        return done

    def _tell(self, gone: dict[int, Any]) -> dict[int, Any]:
        """The others, of this machine's ranks; and hear what they say. Ends ranks that another one says are stopped."""
        mine, now = self._machines.mine, time.monotonic()
        if now - self._accused >= BEAT_S:
            self._accused = now
            for local, process in self.processes.items():
                if process.exitcode is None and self.roll.accused(self.names[local]):
                    process.kill()
        mine.ranks = sorted({*mine.ranks, *(self.names[local] for local in self.processes)})
        lost = (self.names[local] for local, process in gone.items() if process.exitcode != STOPPED)
        mine.gone = sorted({*mine.gone, *lost})
        mine.coming = super().coming()
        self._machines.say()
        self._machines.hear()
        self.roll.follow()
        return gone

    def _out(self) -> bool:
        """Whether the others have taken this machine for lost."""
        there, newest = [local for local in self.processes if local not in self.joining], self.roll.newest
        names = {self.names[local] for local in there} - set(self._machines.mine.gone)
        return newest.number > 0 and bool(names) and names.isdisjoint(newest.members)

    def _decide(self) -> None:
        """Let the others go on without those that are lost, if they can."""
        machines, roll = self._machines, self.roll
        members, gone, hosts = roll.newest.members, set(machines.mine.gone), []
        for place, word in machines.others.items():
            away = machines.silent(place) or (word is not None and word.left and not word.done)
            if word is None and away:
                roll.give_up("a machine has not started its ranks")
                return
            if word is not None:
                gone.update(word.ranks if away else word.gone)
                hosts += [word.host] if away and not set(members).isdisjoint(word.ranks) else []
        if not members or gone.isdisjoint(members):
            return
        left = [member for member in members if member not in gone]
        there = 1 + len(machines.live())
        if not self.able(left) or there < self._fewest:
            missing = f"no heartbeat from {', '.join(hosts)}" if hosts else "a rank is lost"
            fewer = f", and {there} machine{'s are' if there > 1 else ' is'} too few"
            roll.give_up(f"{missing}{fewer if there < self._fewest else ''}")
            return
        if hosts:
            self._missed(hosts)
        roll.post(left, lost=True)

    def coming(self) -> list[str]:
        """Those of all machines, where this one decides; a machine that would be one too many waits."""
        machines, members = self._machines, self.roll.newest.members
        if not machines.decides():
            return []
        live = [machines.mine, *(word for _, word in sorted(machines.live().items()) if word is not None)]
        inside = sum(not set(word.ranks).isdisjoint(members) for word in live)
        names = []
        for word in live:
            if newcomers := [name for name in word.coming if name not in word.gone and name not in members]:
                new = set(word.ranks).isdisjoint(members)
                if not new or inside < self._most:
                    names += newcomers
                    inside += new
        return names


def lives(store: Sealed, count: int, limit_s: float) -> bool:
    """Whether a machine of a job gives a sign of life in so many seconds. `count`: of those that formed it."""

    def beats() -> dict[int, int]:
        there = [place for place in range(count + store.add("guests", 0)) if store.check([f"machine/{place}"])]
        words = {place: Word.of(store.get(f"machine/{place}")) for place in there}
        return {place: word.beat for place, word in words.items() if not word.left}

    first, until = beats(), time.monotonic() + limit_s
    while time.monotonic() < until:
        if any(beat != first.get(place) for place, beat in beats().items()):
            return True
        time.sleep(POLL_S)
    return False
