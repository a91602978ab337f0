"""An agent of torch elastic whose ranks may be lost one by one: `launch.on_rank_failure: continue`.

In: a formation of the job, or a job that runs and that this machine comes into. Out: ranks on a roll, and what torch
elastic asks of them. The loss of a rank on one machine is `elastic_ranks.py`'s, that of machines
`elastic_machines.py`'s.
"""

from __future__ import annotations

import signal
import socket
import time
import uuid
from collections.abc import Callable
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from lockstep.checkpoint.manifest import newest_whole
from lockstep.config.errors import DONE, EXCLUDED, STOPPED
from lockstep.config.run import Run
from lockstep.distributed import secret
from lockstep.distributed.membership import SOON_S, MemberAddress
from lockstep.launchers.processes.elastic_node_monitor import Machines, RanksAmongMachines, lives
from lockstep.launchers.processes.elastic_ranks import Ranks
from lockstep.launchers.processes.elastic_rendezvous import ElasticRendezvous
from lockstep.launchers.processes.out_of_memory import Memory
from lockstep.track.console import error

ANNOUNCED_S = 30.0
MARGIN_S = 15.0  # from when a machine counts as lost until its peers' ranks have heard of it


class Survivors(LocalElasticAgent):
    """What the agent of a machine does with its ranks."""

    rendezvous: ElasticRendezvous
    job: Run
    say: Callable[[str], None]
    memory: Memory
    asked: bool  # to stop
    goes_on = False  # whether ranks may be lost one by one in this formation
    _room = "", 0  # that this machine comes into, and how many machines formed the job there
    _in = _dead = ""  # the room of this machine's ranks; one in which nobody lives

    @property
    def several(self) -> bool:
        """Whether machines may be lost, too."""
        return self.goes_on and self.rendezvous.most > 1

    def come_in(self, worker_group: WorkerGroup) -> bool:
        """Into a job that runs, without a new formation; False where there is none."""
        store = self.rendezvous
        self._room = self._running() if store.continues and store.most > 1 else ("", 0)
        if not self._room[0]:
            return False
        self._in, count = self._room[0], worker_group.spec.local_world_size
        worker_group.workers = [Worker(local, local, local, count, count) for local in range(count)]
        group: Any = worker_group
        group.group_rank, group.group_world_size = 0, 1
        group.master_addr, group.master_port = store.at, store.port
        self.goes_on = True
        self.say(f"machine    {socket.gethostname()} comes into the job at {store.at}:{store.port}, which runs")
        return True

    def _running(self) -> tuple[str, int]:
        """The room of a job that goes on when it loses ranks, in which somebody lives, and how many machines formed it;
        no room where machines have to form the job. One that has just formed is given a while to say so."""
        store, until = self.rendezvous, time.monotonic() + ANNOUNCED_S
        while True:
            number, room, count = store.announced()
            if room and room != self._dead:
                with store.reading():
                    roll = store.roll(room, secret.from_environment(), None)
                    if roll.given_up is None and lives(roll.store, count, max(store.limits.lost, ANNOUNCED_S)):
                        store.formed_by_others()
                        return room, count
                    self._dead = room
            if not store.formed_by_others() or number == store.round or time.monotonic() > until:
                return "", 0
            time.sleep(0.1)

    def leave_room(self) -> None:
        """All machines form the job anew: nobody comes into what it was."""
        self._dead = self._in

    def formed(self) -> None:
        """The machines have met: do all of them go on when they lose ranks?"""
        store = self.rendezvous
        self.goes_on = store.continues and all(node.continues for node in store.nodes)
        if store.continues and not self.goes_on:
            self.say(
                "note: launch.on_rank_failure: continue is not the same on every machine: a lost rank ends the others"
            )
        if store.most > 1:
            self._in = f"lockstep-ranks-{store.get_run_id()}-{store.round}"
        if store.most > 1 and store.place == 0:
            store.announce(self._in if self.goes_on else "")

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        if not self.goes_on:
            return super()._start_workers(worker_group)
        spec, store, workers = worker_group.spec, self.rendezvous, worker_group.workers
        key = dict(spec.args[-1]).get(secret.VARIABLE, secret.from_environment())
        entered, count = self._room
        room = self._in or f"lockstep-ranks-{uuid.uuid4().hex}"
        soon_s = max(SOON_S, store.limits.lost + MARGIN_S) if store.most > 1 else SOON_S

        def place(name: str, apart: bool) -> MemberAddress:
            return MemberAddress(store.at, store.port, room, name, apart, soon_s)

        posts = not entered and store.place == 0
        roll = store.roll(room, key, [str(rank) for rank in range(workers[0].world_size)] if posts else None)
        assert callable(spec.entrypoint)
        arguments = spec.entrypoint, spec.args, self._variables(worker_group), roll, place, self._lost, self._spare
        names = {worker.local_rank: str(worker.global_rank) for worker in workers}
        if store.most == 1:
            ranks: Ranks = Ranks(*arguments)
        else:
            mine = None if entered else store.place
            machines = Machines(roll.store, socket.gethostname(), mine, count or len(store.nodes), store.limits.lost)
            if entered:
                names = {local: f"{machines.place}-{local}" for local in names}
            most = {"fewest": store.fewest, "most": store.most}
            ranks = RanksAmongMachines(*arguments, names, bool(entered), machines=machines, missed=self._missed, **most)
        self._pcontext = ranks  # type: ignore[assignment]
        return ranks.pids()

    def _variables(self, worker_group: WorkerGroup) -> dict[int, dict[str, str]]:
        """What torch elastic sets for ranks, by local rank."""
        spec = worker_group.spec
        shared = {
            "LOCAL_WORLD_SIZE": spec.local_world_size,
            "GROUP_RANK": worker_group.group_rank,
            "GROUP_WORLD_SIZE": worker_group.group_world_size,
            "MASTER_ADDR": worker_group.master_addr,
            "MASTER_PORT": worker_group.master_port,
            "TORCHELASTIC_RESTART_COUNT": spec.max_restarts - self._remaining_restarts,
            "TORCHELASTIC_MAX_RESTARTS": spec.max_restarts,
            "TORCHELASTIC_RUN_ID": self.rendezvous.get_run_id(),
        }
        return {
            worker.local_rank: {k: str(v) for k, v in shared.items()}
            | {
                "RANK": str(worker.global_rank),
                "LOCAL_RANK": str(worker.local_rank),
                "WORLD_SIZE": str(worker.world_size),
            }
            for worker in worker_group.workers
        }

    def _lost(self, local: int, pid: int, code: int) -> None:
        """Say that a rank is lost and the others go on."""
        left, who = self._remaining_restarts, f"rank process {local} of {socket.gethostname()}"
        then = f"another takes its place ({left} start(s) left)" if left else "no starts are left for another"
        if code == EXCLUDED:
            error(f"{who} computed wrongly (guard) and is taken out; the others go on, and no other takes its place")
        else:
            error(f"{who} was killed by {name_of(-code)}{self.memory.why(pid, code)}; the others go on; {then}")

    def _missed(self, hosts: list[str]) -> None:
        """Say that machines are lost and the others go on."""
        error(f"no sign of life from {', '.join(hosts)} for {self.rendezvous.limits.lost:g} s; the others go on")

    def _spare(self) -> bool:
        """Whether another rank may take the place of one that is lost; it counts as a start."""
        left = self._remaining_restarts
        self._remaining_restarts -= bool(left)
        return bool(left)

    def give_back_starts(self) -> None:
        """All start again: what was started in the place of lost ranks and has not come to train counts for nothing."""
        if isinstance(self._pcontext, Ranks):
            with self.rendezvous.reading():
                self._remaining_restarts += self._pcontext.in_vain()

    def then(self) -> str:
        """What follows where all ranks of this machine have ended, in words."""
        if not (left := self._remaining_restarts):
            return "no restarts left"
        if newest_whole(self.job) is not None:
            where = "restarting from the last checkpoint"
        elif self.rendezvous.place or self.job.remote_dir is not None:  # another machine may have one, or the mirror
            where = "restarting from the last checkpoint, if there is one"
        else:
            where = "there is no checkpoint yet; restarting from the beginning"
        return f"{where} ({left} restart(s) left)"

    def looked_at(self, worker_group: WorkerGroup) -> RunResult:
        """What became of this machine's ranks."""
        if not self.goes_on:
            return super()._monitor_workers(worker_group)
        assert self._pcontext is not None
        with self.rendezvous.reading():
            found = self._pcontext.wait(0)
        self.asked |= isinstance(self._pcontext, Ranks) and self._pcontext.stop_asked
        if found is None:
            return RunResult(WorkerState.HEALTHY)
        ranks = {worker.local_rank: worker.global_rank for worker in worker_group.workers}
        if found.is_failed() or found.return_values == {}:
            if not found.failures:
                self._tell_end(self._pcontext.why)  # type: ignore[attr-defined]
            return RunResult(WorkerState.FAILED, failures={ranks[k]: v for k, v in found.failures.items()})
        return RunResult(WorkerState.SUCCEEDED, return_values={ranks[k]: v for k, v in found.return_values.items()})

    def _tell_end(self, why: str) -> None:
        """None of this machine's ranks has failed, and they have ended all the same."""
        error(f"{why}; {self.then()}")

    def leave_together(self) -> bool:
        """Wait for the ranks of the other machines. Returns whether the job has come to its end."""
        assert isinstance(self._pcontext, RanksAmongMachines)
        with self.rendezvous.reading():
            end = (STOPPED, "stopped on request") if self._pcontext.stopped else (DONE, "")
            return self._pcontext.leave(self.rendezvous.holds, lambda: self.rendezvous.end(*end))


def name_of(number: int) -> str:
    """Of a signal."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
