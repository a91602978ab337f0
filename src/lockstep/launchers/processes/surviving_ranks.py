"""Detect that single ranks died, and continue without them: `launch.on_rank_failure: continue`.

In: the ranks' function, and the launcher's store. Out: a process context for torch elastic. When a rank is killed and
all others can continue, `Ranks` posts the next generation of the job's ranks (`distributed/membership.py`) and starts a
replacement. A rank evicted by `sdc_check` exits and is not replaced. Any other failure ends all ranks, and torch
elastic restarts them.

With several machines, each writes a heartbeat to the store at least once a second, with its killed ranks and the
processes that wait to join. The first live machine decides: it posts the next generation. The store accepts each
generation once, so two deciding machines cannot conflict. A machine silent for `launch.keep_alive_timeout_s` is lost,
with its ranks. A machine that cannot reach the store learns of no generation, its ranks cannot form a group, and it
ends (`elastic_agent.py`): in a network partition, only the side with the store continues.
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
# Exit codes of a rank that was requested to stop, with and without signal handlers.
STOP_STATUSES = (STOPPED, -signal.SIGTERM, -signal.SIGUSR1)


class Ranks:
    """The ranks of one machine in one formation of a job."""

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
        """`variables`: environment of each local rank. `names`: its name in the roster. `lost`: called with local rank,
        pid and exit code of a failed rank. `spare`: returns whether it may be replaced; called once the others have
        re-formed. `joining`: the processes join a running job."""
        self._entry, self._arguments, self._variables = entry, tuple(arguments), variables
        self.roll, self._place, self._lost, self._spare = roll, place, lost, spare
        self._context = multiprocessing.get_context("forkserver")
        self.processes: dict[int, Any] = {}  # local rank -> process, without failed ones
        self.names = dict(names or {local: str(local) for local in variables})
        self.joining: set[int] = set(variables) if joining else set()  # local ranks that do not train yet
        self._vacant: list[int] = []  # local ranks without a process
        self._spares: set[int] = set()  # local ranks of replacements
        self._started = len(variables)
        self.stop_asked = False  # whether only a rank that had not joined yet was requested to stop
        self.why = ""  # reason why this machine's ranks ended without a failure
        for local in variables:
            self._start(local, joining)

    def pids(self) -> dict[int, int]:
        """Return local rank -> process id of the running ranks."""
        return {local: int(process.pid) for local, process in self.processes.items() if process.exitcode is None}

    def wait(self, timeout: float = 0.0) -> RunProcsResult | None:
        """Return the result once all ranks have finished or one has failed, else None. Waits at most `POLL_S`."""
        gone = self.failed_ranks()
        if gone and not self._go_on(gone):
            return self.failed(gone)
        if self.ended():
            return self.through()
        self.let_in()
        return None

    def close(self, death_sig: signal.Signals | None = None, timeout: int = 30) -> None:
        """End the running ranks."""
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

    def failed_ranks(self) -> dict[int, Any]:
        """Wait at most `POLL_S` for a rank to end, and return local rank -> process of those that failed."""
        running = [process.sentinel for process in self.processes.values() if process.exitcode is None]
        if running:
            wait(running, POLL_S)
        else:
            time.sleep(POLL_S)
        return {local: p for local, p in self.processes.items() if p.exitcode not in (None, 0)}

    def failed(self, gone: Mapping[int, Any]) -> RunProcsResult:
        """End all ranks because of the failed ones in `gone`, and return the result."""
        if not gone:
            pass
        elif all(process.exitcode == STOPPED for process in gone.values()):
            self._see_who_trains()
            for local in self.joining:  # they have no state, and wait for ranks that are gone
                self.processes[local].kill()
        else:
            # releases ranks that wait for others
            self.roll.give_up(f"a rank has ended on {socket.gethostname()}")
        self.close()
        if not gone:
            return RunProcsResult()
        local = min(gone, key=lambda each: gone[each].exitcode)  # prefer a signal to an exit status
        return RunProcsResult(
            failures={local: ProcessFailure(local, gone[local].pid, gone[local].exitcode, os.devnull)}
        )

    def ended(self) -> bool:
        """Return whether all ranks that have trained are finished. Ignores processes that have not trained: finishing
        ranks may just have admitted one, which would wait forever."""
        self._see_who_trains()
        own = [process for local, process in self.processes.items() if local not in self.joining]
        return bool(own) and all(process.exitcode == 0 for process in own)

    def in_vain(self) -> int:
        """Return the number of replacements that have not trained yet."""
        self._see_who_trains()
        return len(self._spares & self.joining)

    def _see_who_trains(self) -> None:
        self.joining -= {local for local in self.joining if self.roll.trains(self.names[local])}

    def through(self) -> RunProcsResult:
        self.close(signal.SIGKILL)  # late replacements
        return RunProcsResult(return_values=dict.fromkeys(self._variables))

    def _go_on(self, gone: Mapping[int, Any]) -> bool:
        """Continue without the ranks in `gone`, if the others can; return whether they do."""
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
        """Return `gone` without replacements that ended before they joined: they printed their error, or were requested
        to stop."""
        members = self.roll.newest.members
        for local in [local for local in gone if self.names[local] not in members]:
            code = gone[local].exitcode
            self.stop_asked |= local in self.joining and code in STOP_STATUSES
            if code > 0 or (local in self.joining and code in STOP_STATUSES):
                self.joining.discard(local)
                self.processes.pop(local)
        return {local: process for local, process in gone.items() if local in self.processes}

    def able(self, left: Sequence[str]) -> bool:
        """Return whether the ranks in `left` can continue alone."""
        there = [p for local, p in self.processes.items() if self.names[local] in left]
        return bool(left) and all(p.exitcode is None for p in there) and self.roll.ready(left)

    def vacate(self, gone: Mapping[int, Any]) -> None:
        """Remove killed or evicted ranks, without which the others continue."""
        for local in gone:
            process = self.processes.pop(local)
            self._lost(local, process.pid, code := process.exitcode)
            self.joining.discard(local)
            if code != EXCLUDED:
                self._vacant.append(local)

    def let_in(self) -> None:
        """Start replacements of failed ranks, and post a generation with those that are ready to join. Only while all
        remaining ranks train."""
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
        """Return the names of processes that this machine may admit, ready or not."""
        names = [self.names[local] for local in sorted(self.joining)]
        return [name for name in names if name not in self.roll.newest.members]


def _begin(variables: Mapping[str, str], entry: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    os.environ.update(variables)
    entry(*arguments)


BEAT_S = 1.0
GONE_S = 2
LEAVE_S = 30.0  # wait of the store's machine until the others have read the end of the job


@dataclass
class Word:
    """Heartbeat of a machine."""

    host: str
    ranks: list[str] = field(default_factory=list)  # names of all started ranks
    coming: list[str] = field(default_factory=list)  # of these, processes waiting to join
    gone: list[str] = field(default_factory=list)  # of these, ranks that ended before the job
    done: bool = False  # its ranks have finished
    left: bool = False  # it has left this formation of the job
    beat: int = 0

    @classmethod
    def of(cls, text: bytes) -> Word:
        """Parse a heartbeat. Errors: `RendezvousStateError` if invalid."""
        try:
            values = json.loads(text)
            ranks, coming, gone = ([str(name) for name in list(values[key])] for key in ("ranks", "coming", "gone"))
            flags = bool(values["done"]), bool(values["left"])
            return cls(str(values["host"]), ranks, coming, gone, *flags, int(values["beat"]))
        except (ValueError, TypeError, LookupError) as caught:
            raise RendezvousStateError(f"another machine wrote unreadable data: {caught!r:.200}") from None


class Machines:
    """The machines of one formation of a job, including later ones, as seen by one machine."""

    def __init__(self, store: Sealed, host: str, place: int | None, count: int, keep_alive_timeout_s: float) -> None:
        """`place`: this machine's index among the `count` that formed the job; None if it joins later."""
        self._store, self._count, self._lost_s = store, count, keep_alive_timeout_s
        self.place = count + store.add("guests", 1) - 1 if place is None else place
        self.mine = Word(host)
        self.others: dict[int, Word | None] = {}  # None: no heartbeat yet
        self._heard: dict[int, float] = {}
        self._spoke_at, self._last = -math.inf, Word("")

    def say(self) -> None:
        """Write the heartbeat if it has changed, or the last one is `BEAT_S` old."""
        now = time.monotonic()
        if self.mine != self._last or now - self._spoke_at >= BEAT_S:
            self.mine.beat += 1
            self._store.set(f"machine/{self.place}", json.dumps(asdict(self.mine)))
            self._spoke_at, self._last = now, replace(self.mine)

    def hear(self) -> None:
        """Read the other machines' heartbeats."""
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
        """Return whether another machine has failed."""
        return time.monotonic() - self._heard[place] > self._lost_s

    def live(self) -> dict[int, Word | None]:
        """Return the other machines that have neither failed nor left."""
        return {
            place: word
            for place, word in self.others.items()
            if not self.silent(place) and not (word is not None and word.left)
        }

    def decides(self) -> bool:
        """Return whether this is the first live machine, which decides."""
        return all(place > self.place for place in self.live())


class RanksAmongMachines(Ranks):
    """The ranks of one machine in one formation of a job on several machines."""

    def __init__(
        self,
        *arguments: Any,
        machines: Machines,
        fewest: int,
        most: int,
        missed: Callable[[list[str]], None],
        **named: Any,
    ) -> None:
        """`fewest`: machines required to continue. `most`: most machines with ranks. `missed`: called with failed
        hosts."""
        self._machines, self._fewest, self._most, self._missed = machines, fewest, most, missed
        self._accused = 0.0  # time of the last check
        self._ended = False  # whether this machine's ranks have finished
        self.stopped = False  # likewise, because of a stop request
        super().__init__(*arguments, **named)

    @property
    def idle(self) -> bool:
        """Whether no rank of this machine trains in the job."""
        there = [self.names[local] for local in self.processes if local not in self.joining]
        return not any(name in self.roll.newest.members for name in there)

    def wait(self, timeout: float = 0.0) -> RunProcsResult | None:
        roll, mine = self.roll, self._machines.mine
        gone = self.without_comers(self._tell(self.failed_ranks()))
        if why := roll.given_up:
            self.why = why
            return self.failed(gone)
        if any(process.exitcode > 0 for process in gone.values()):
            return self.failed(gone)
        if self._out():
            self.why = "the others continue without this machine"
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
            self.stopped = self._ended = self._machines.mine.done = True  # no failure
        return super().failed(gone)

    def close(self, death_sig: signal.Signals | None = None, timeout: int = 30) -> None:
        machines = self._machines
        with suppress(RuntimeError):  # the store is gone
            machines.mine.left, machines.mine.done = machines.mine.left or not self._ended, self._ended
            machines.say()
        # a rank waiting for a failed machine does not end
        super().close(death_sig, GONE_S if any(map(machines.silent, machines.others)) else timeout)

    def leave(self, holds: bool, tell: Callable[[], None]) -> bool:
        """Wait for the other live machines' ranks after this one's have finished, and return whether the rank that
        writes OUTPUT has finished.

        `holds`: this machine holds the store, which the others need until they leave. `tell`: publishes how the job
        ended, for machines whose ranks failed just before and were not replaced yet."""
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
        """Exchange heartbeats, including failed ranks, with the other machines. Kills ranks that others report as
        stopped."""
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
        """Return whether the others regard this machine as failed."""
        there, newest = [local for local in self.processes if local not in self.joining], self.roll.newest
        names = {self.names[local] for local in there} - set(self._machines.mine.gone)
        return newest.number > 0 and bool(names) and names.isdisjoint(newest.members)

    def _decide(self) -> None:
        """Post a generation without failed ranks and machines, if the others can continue."""
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
            missing = f"no heartbeat from {', '.join(hosts)}" if hosts else "a rank failed"
            fewer = f", and {there} machine{'s are' if there > 1 else ' is'} too few"
            roll.give_up(f"{missing}{fewer if there < self._fewest else ''}")
            return
        if hosts:
            self._missed(hosts)
        roll.post(left, lost=True)

    def coming(self) -> list[str]:
        """Return the processes to admit on all machines if this one decides; a surplus machine waits."""
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
    """Return whether a machine of a job sends a heartbeat within `limit_s`. `count`: machines that formed the job."""

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
