"""The ranks of one machine, where the loss of one does not end the others: `launch.on_rank_failure: continue`.

In: what each of them runs, and the launcher's store. Out: what torch elastic asks a process context for; and, when a
rank was killed and all others can go on, the next generation of the job's ranks (`distributed/membership.py`), and a
process that takes its place. One that `guard` takes out ends by itself, and nobody takes its place. Whatever else
happens ends all of them, and torch elastic starts them again.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from typing import Any

from torch.distributed.elastic.multiprocessing.api import ProcessFailure, RunProcsResult

from lockstep.config.errors import EXCLUDED, STOPPED
from lockstep.distributed.membership import MemberAddress, Roster

POLL_S = 0.1
ASKED = (STOPPED, -signal.SIGTERM, -signal.SIGUSR1)  # how one ends that was asked to stop: listening, or not yet


class Ranks:
    """Of one formation of a job on one machine."""

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
        apart: bool = False,
    ) -> None:
        """`variables` of each local rank, and its name in the roll. `lost` is told of a loss: the local rank, its pid
        and its exit code. `spare` says whether another process may take its place: asked once the others have met
        without it. `apart`: the processes come into a job that runs."""
        self._entry, self._arguments, self._variables = entry, tuple(arguments), variables
        self.roll, self._place, self._lost, self._spare = roll, place, lost, spare
        self._context = multiprocessing.get_context("forkserver")
        self.processes: dict[int, Any] = {}  # of local ranks, those that have not been lost
        self.names = dict(names or {local: str(local) for local in variables})
        self.joining: set[int] = set(variables) if apart else set()  # local ranks that have not come to train yet
        self._vacant: list[int] = []  # local ranks that nobody has
        self._spares: set[int] = set()  # local ranks of processes that were started in the place of lost ones
        self._started = len(variables)
        self.stop_asked = False  # whether one was asked to stop before it came in, by somebody who asked nobody else
        self.why = ""  # this machine's ranks have ended, where none of them has failed
        for local in variables:
            self._start(local, apart)

    def pids(self) -> dict[int, int]:
        """Of those that run, by local rank."""
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

    def _start(self, local: int, apart: bool) -> None:
        place = self._place(self.names[local], apart)
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
        """Whether all have come to their end that have come to train. Others may have let one in as they came to their
        end, and it would wait for them in vain."""
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
            self.stop_asked |= local in self.joining and code in ASKED
            if code > 0 or (local in self.joining and code in ASKED):
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
