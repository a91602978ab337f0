"""The watchdog: names a rank that hangs, with its host, step and stack, and ends the job instead of waiting.

In: every rank's activity (`ACTIVITY`), which costs an assignment. Out: one message, and status 1, so that a launcher
restarts the job. On each rank a thread sends heartbeats through the rendezvous store. It detects missing heartbeats (a
stopped process, a lost machine), and an unchanged activity with heartbeats (a rank in an endless loop, or ranks in
different collectives); torch's flight recorder tells which collective a rank waits in. Timeouts of collectives stay as
they are.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousStateError

from lockstep.config.errors import FAILED, coded
from lockstep.config.lazy import lazy
from lockstep.distributed import torch_internals
from lockstep.distributed.world import World
from lockstep.track.busy import ACTIVITY
from lockstep.track.console import error

if TYPE_CHECKING:
    from lockstep.distributed import network, rendezvous
else:  # for several processes
    network, rendezvous = lazy("lockstep.distributed", "network", "rendezvous")

LEFT_S = 2.0  # time for a rank to end after the store is gone


class Watchdog:
    """Watches one job from `start` to `stop`; `limit_s`: maximum time without a heartbeat or a change of activity.
    `building`: ranks may take any time to build or read a model; they hang only if all wait in the same collectives for
    `limit_s`."""

    def __init__(self, world: World, limit_s: float, building: bool = False) -> None:
        self.world, self.limit_s, self.building = world, limit_s, building
        self.interval_s = min(1.0, limit_s / 10)
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._query_began: float | None = None  # start of the pending store query
        self._heartbeats: dict[int, dict[str, Any]] = {}  # last heartbeats by rank
        self._left = False  # whether it has waited for a regroup without the silent rank

    def start(self) -> Watchdog:
        """Start heartbeats and monitoring, if the job has more than one process."""
        if self.world.size > 1 and self.limit_s > 0:
            store = torch_internals.default_store().clone()  # separate connection
            # sealed, because a heartbeat names a process that may be killed
            self._store: Any = rendezvous.Sealed(
                dist.PrefixStore("lockstep-watch", store), "watch", network.secret_from_environment()
            )
            self._main = threading.get_ident()
            self._thread = threading.Thread(target=self._run, name="lockstep-watch", daemon=True)
            self._thread.start()
            threading.Thread(target=self._guard, name="lockstep-guard", daemon=True).start()
        return self

    def anew(self) -> Watchdog:
        """Return a started watchdog for the present ranks."""
        return Watchdog(self.world, self.limit_s).start()

    def stop(self) -> None:
        """Stop: the other ranks no longer expect heartbeats from this one. Not collective."""
        if self._thread is not None:
            self._over.set()
            self._thread.join(self.interval_s * 5)
            self._thread = None

    # -- in the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        beats = 0
        last_beats: dict[int, tuple[Any, float]] = {}  # rank -> its last beat, and when it arrived here
        since = time.monotonic()  # start of the current activity
        place: tuple[int, list[str]] | None = None
        try:
            while not self._over.wait(self.interval_s if beats else 0.0):
                beats += 1
                now = time.monotonic()
                here = (ACTIVITY.moves, torch_internals.open_collectives() if self.building else [])
                if here != place:
                    place, since = here, now
                stuck = now - since > self.limit_s and (not self.building or bool(here[1]))
                self._query_began = now
                self._store.set(str(self.world.rank), json.dumps(self._beat(beats, stuck)))
                latest = self._heartbeats = self._others(last_beats, now)
                self._query_began = None
                silent = [r for r, (_, when) in last_beats.items() if now - when > self.limit_s]
                everyone_waits = len(latest) == self.world.size and all(b["stack"] for b in latest.values())
                if silent or (stuck and everyone_waits):
                    self._tell(latest, silent)
            self._store.set(str(self.world.rank), json.dumps({"over": True}))
        except RendezvousStateError as caught:
            error(
                coded("LS7060", f"rank {self.world.rank}: invalid heartbeat from another rank: {caught}"),
                self.world.log,
            )
            os._exit(FAILED)
        except RuntimeError as caught:  # the store's process is gone
            if self._over.wait(LEFT_S):
                return
            text = " ".join(str(caught).split())[:200]
            error(coded("LS7061", f"rank {self.world.rank} lost contact with the store: {text}"), self.world.log)
            while not self.world.stop.wait(self.interval_s):
                if self._over.is_set():
                    return
            os._exit(FAILED)  # SIGTERM from its launcher cannot end a rank that hangs; nothing is left to save

    def _guard(self) -> None:
        """Thread: detect a store that does not answer, which means that its process, rank 0, is stopped."""
        while not self._over.wait(self.interval_s):
            asked_at = self._query_began
            if asked_at is None or time.monotonic() - asked_at <= self.limit_s:
                continue
            if 0 not in self._heartbeats:
                error(
                    coded("LS7062", f"no heartbeat from rank 0 for {self.limit_s:g} s; this process ends"),
                    self.world.log,
                )
            elif self.world.rank == min(set(self._heartbeats) - {0}, default=self.world.rank):
                self._end_silent(self._heartbeats, [0])
            else:
                time.sleep(self.interval_s)
            sys.stderr.flush()
            os._exit(FAILED)

    def _beat(self, beats: int, stuck: bool) -> dict[str, Any]:
        frame = sys._current_frames().get(self._main) if stuck else None
        return {
            "beat": beats,
            "host": self.world.host,
            "pid": os.getpid(),
            "place": ACTIVITY.name,
            "progress": ACTIVITY.moves,
            "stack": traceback.format_stack(frame)[-12:] if frame is not None else [],
            "collectives": torch_internals.open_collectives() if stuck else [],
            "over": False,
        }

    def _others(self, last_beats: dict[int, tuple[Any, float]], now: float) -> dict[int, dict[str, Any]]:
        """Return the last heartbeat of every rank that has started and not stopped."""
        beats = {}
        for rank in range(self.world.size):
            if not self._store.check([str(rank)]):
                continue
            beat = parsed(self._store.get(str(rank)))
            if beat["over"]:
                last_beats.pop(rank, None)
                continue
            beats[rank] = beat
            if rank not in last_beats or last_beats[rank][0] != beat["beat"]:
                last_beats[rank] = (beat["beat"], now)
        return beats

    def _tell(self, beats: dict[int, dict[str, Any]], silent: list[int]) -> None:
        """Report the hang, once per job, and end this rank; in an elastic job, first give the launcher time to regroup
        without the silent ranks."""
        if first := self._store.add("told", 1) == 1:
            self._end_silent(beats, silent)
        if silent and self.world.members is not None and not self._left:
            self._left = True
            # stopped by the regroup, which starts another watchdog; otherwise proceed as usual
            self._over.wait(self.world.members.place.soon_s)
            return
        if not first:
            time.sleep(self.interval_s)  # let the reporting rank finish before the launcher ends all ranks
        sys.stderr.flush()
        os._exit(FAILED)

    def _end_silent(self, beats: dict[int, dict[str, Any]], silent: list[int]) -> None:
        text = verdict(beats, silent, self.limit_s, goes_on=self.world.members is not None)
        error(coded("LS7065", text), self.world.log)
        for rank in silent:
            if self.world.members is not None and beats[rank]["host"] != self.world.host:
                self.world.members.accuse(rank)
            if beats[rank]["host"] == self.world.host and sibling(beats[rank]["pid"]):
                with contextlib.suppress(OSError):  # a stopped process ignores SIGTERM
                    os.kill(beats[rank]["pid"], signal.SIGKILL)


def parsed(text: bytes) -> dict[str, Any]:
    """Parse a heartbeat, or `{"over": True}`. Errors: `RendezvousStateError` for anything else."""
    try:
        beat = json.loads(text)
        if beat == {"over": True}:
            return dict(beat)
        lists = [beat["stack"], beat["collectives"]]
        right = (
            beat["over"] is False
            and all(type(beat[name]) is int for name in ("beat", "pid", "progress"))
            and all(type(word) is str for word in [beat["host"], beat["place"], *lists[0], *lists[1]])
            and all(type(each) is list for each in lists)
        )
    except (ValueError, TypeError, LookupError, RecursionError):
        right = False
    if not right:
        raise RendezvousStateError(f"{text[:80]!r} is not a heartbeat")
    return dict(beat)


def sibling(pid: int) -> bool:
    """Whether a process has the same parent as this one, as ranks of one launcher do: without a secret, anyone who
    reaches the store can name any process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return pid > 1 and sys.platform != "linux"  # no /proc to check
    return pid > 1 and int(stat.rpartition(")")[2].split()[1]) == os.getppid()


def verdict(beats: dict[int, dict[str, Any]], silent: list[int], limit_s: float, goes_on: bool = False) -> str:
    """Format the message: silent ranks first; else those that are furthest behind or not in a collective. `goes_on`:
    the other ranks continue without a silent one."""

    def who(rank: int) -> str:
        return f"rank {rank} (pid {beats[rank]['pid']}) on {beats[rank]['host']}, {beats[rank]['place']}"

    def inside(rank: int) -> str:
        collectives = beats[rank].get("collectives")
        return f", in {'; '.join(collectives)}" if collectives else ""

    if silent:
        names = "; ".join(who(rank) for rank in silent)
        return (
            f"no heartbeat for {limit_s:g} s from {names}: the process is stopped, or its machine is gone. "
            f"{'It counts as failed' if goes_on else 'This process ends'}"
        )
    least = min(b["progress"] for b in beats.values())
    behind = [rank for rank, b in beats.items() if b["progress"] == least]
    if len(behind) == len(beats):  # all at the same activity: those not in a collective
        behind = [rank for rank, b in beats.items() if not waits(b["stack"])] or behind
    others = sorted(set(beats) - set(behind))
    lines = [f"no progress for {limit_s:g} s. Held up by:"]
    for rank in behind:
        lines += [f"  {who(rank)}{inside(rank)}; its stack:", "".join(beats[rank]["stack"]).rstrip()]
    if others:
        lines.append("  waiting for it: " + "; ".join(who(rank) + inside(rank) for rank in others))
    return "\n".join(lines)


def waits(stack: list[str]) -> bool:
    """Whether a stack ends in a collective, or waits for one."""
    return any("torch/distributed" in entry or ".wait()" in entry for entry in stack[-3:])
