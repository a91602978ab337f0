"""The ranks of one machine under a torch elastic agent, for the launchers `local` and `torchrun`.

In: a run, how many ranks this machine starts, and where the machines meet. Out: an exit status, the same on every
machine. A rank that dies, and a machine that is lost, stop the job; it forms again from its last checkpoint up to
`max_restarts` times. A machine that comes is let in after a checkpoint.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.events import Event, EventSource
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousTimeoutError,
)

from lockstep.checkpoint.manifest import newest_whole
from lockstep.config.errors import BAD, DONE, EXCLUDED, FAILED, HALTED, STOPPED
from lockstep.config.run import Run
from lockstep.distributed import job_record
from lockstep.distributed.failure import MARKER
from lockstep.distributed.signals import Interrupts, heard
from lockstep.launchers.processes.elastic_agent import Survivors, name_of
from lockstep.launchers.processes.elastic_node_monitor import RanksAmongMachines
from lockstep.launchers.processes.elastic_rendezvous import ElasticRendezvous, End
from lockstep.launchers.processes.out_of_memory import Memory
from lockstep.track.console import error

# seconds that ranks have to end by themselves: when another rank died, and when their peers are gone for sure
GRACE_S, NO_GRACE_S = 30, 2


def run_agent(
    run: Run,
    processes: int,
    rendezvous: ElasticRendezvous,
    entry: Callable[..., None],
    arguments: Sequence[Any],
    say: Callable[[str], None],
) -> int:
    """Start `processes` ranks of this machine, each a call of `entry(*arguments)`, and see them to their end."""
    for name in [n for n in logging.root.manager.loggerDict if n.startswith(("torch.distributed", "torch.multiproc"))]:
        logging.getLogger(name).setLevel(logging.CRITICAL)  # the agent below speaks for them
    spec = WorkerSpec(
        role="lockstep",
        local_world_size=processes,
        entrypoint=entry,
        args=tuple(arguments),
        rdzv_handler=rendezvous,  # type: ignore[arg-type]
        max_restarts=run.launch.max_restarts,
        monitor_interval=0.1,
    )
    agent = Agent(spec, rendezvous, run, say)
    rendezvous.continues = run.launch.on_rank_failure == "continue" and max(processes, rendezvous.most) > 1
    spec.monitor_interval = 0.01 if rendezvous.continues else 0.1  # `Ranks` waits by itself
    # Torch elastic would pass a signal on as it came, look no more at how ranks end, and wait even for those that have
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ""
    main = threading.current_thread() is threading.main_thread()  # no other may set a handler
    before = {number: signal.signal(number, agent.hear) for number in heard()} if main else {}
    status = FAILED
    try:
        status = _seen_to_end(run, agent, rendezvous)
        return status
    finally:
        agent.over = True  # nothing is left to interrupt
        with contextlib.suppress(RendezvousError):
            if status == EXCLUDED:  # the job is not over
                rendezvous.hold(lambda: agent.asked)
            else:
                rendezvous.end(status)
                rendezvous.shutdown()
        for number, handler in before.items():
            signal.signal(number, handler)
        for marker in Path(tempfile.gettempdir()).glob(f"{MARKER}{rendezvous.get_run_id()}-*"):
            marker.unlink(missing_ok=True)


def _seen_to_end(run: Run, agent: Agent, rendezvous: ElasticRendezvous) -> int:
    try:
        result = agent.run()
    except SignalException:
        status = _unheard(run)
        rendezvous.end(FAILED if status == FAILED else STOPPED, "stopped on request")
        rendezvous.leave_together(GRACE_S)
        return status
    except RendezvousTimeoutError:
        there = ", ".join(rendezvous.there()) or "none"
        error(
            f"not enough machines came to {rendezvous.at}:{rendezvous.port} within {rendezvous.limits.join:g} s: "
            f"wanted are {rendezvous.fewest}, there were {there}. Start the same command on the others, or lower "
            "launch.machines"
        )
        return FAILED
    except RendezvousClosedError:
        return agent.left_out()
    except RendezvousConnectionError as caught:
        error(
            f"{socket.gethostname()} lost the machine at {rendezvous.at}:{rendezvous.port}, where the machines of this "
            f"job meet ({' '.join(str(caught.__cause__ or caught).split())[:120]}). The job ends here; start the same "
            f"command again on every machine, and it goes on from its last checkpoint"
        )
        return FAILED
    except RendezvousError as caught:  # forged or damaged: what torch elastic raises for it, and what is raised here
        error(f"the machines cannot meet at {rendezvous.at}:{rendezvous.port}: {caught}")
        return FAILED
    if result is None:  # the job ended while this machine was one too many
        return agent.left_out()
    if agent.verdict is not None:
        return agent.verdict
    if result.is_failed():
        return next((f.exitcode for f in result.failures.values() if f.exitcode == BAD), FAILED)
    status = max((status or 0 for status in result.return_values.values()), default=DONE)
    return _unheard(run) if status == STOPPED and not agent.saved else status


def _unheard(run: Run) -> int:
    """The exit status of a job whose ranks were not there yet, or did not listen yet, when it was asked to stop."""
    if newest_whole(run) is not None:
        return STOPPED
    error("stopped before there was a checkpoint: the same command begins from the start")
    # by this one, job.sbatch knows that it may put the job back into the queue
    return 128 + signal.SIGTERM if os.environ.get(job_record.VARIABLE) == "slurm" else FAILED


class Agent(Survivors):
    """Torch elastic's own, told what our exit statuses mean, saying who died, and looking after the other machines."""

    def __init__(self, spec: WorkerSpec, rendezvous: ElasticRendezvous, run: Run, say: Callable[[str], None]) -> None:
        super().__init__(spec, DefaultLogsSpecs(os.devnull), start_method="forkserver")
        self._shutdown_timeout = int(run.launch.timeout_s)  # which torch before 2.13 does not take
        self.rendezvous, self.job, self.say, self.memory = rendezvous, run, say, Memory()
        self.verdict: int | None = None  # another machine's exit status, once this one follows it
        self.saved = False  # whether ranks, or another machine, said that they stopped with a checkpoint
        self.over = False
        self._hopeless = False  # a peer is gone for sure: ranks that wait for it will not end by themselves
        self.asked = False  # to stop: by a signal, or on another machine
        self._meets = True  # no ranks are there that could stop by themselves
        self._interrupts = Interrupts()
        self._told, self._limit = 0.0, math.inf  # when ranks were last told to stop, and have to have stopped

    def hear(self, number: int, frame: FrameType | None) -> None:
        """A stop signal. Ranks are told by `_monitor_workers`; a second Ctrl-C ends them and this process at once."""
        if self._interrupts.again(number):
            self._signal(signal.SIGKILL)
            raise KeyboardInterrupt
        self.asked = True
        if self._meets and not self.over:
            raise SignalException("asked to stop", sigval=signal.Signals(number))

    def _signal(self, number: signal.Signals) -> None:
        for pid in self._pcontext.pids().values() if self._pcontext is not None else ():
            with contextlib.suppress(OSError):
                os.kill(pid, number)

    def _pass_on(self) -> None:
        """Tell the ranks to stop, once a second: one that is just starting hears nothing. They come to an end by
        themselves, which may be the run's; only the limit for a collective ends them otherwise."""
        now = time.monotonic()
        self._limit = min(self._limit, now + self._shutdown_timeout)
        if now > self._limit:
            error(f"ranks that were asked to stop have not ended within {self._shutdown_timeout} s (launch.timeout_s)")
            self._signal(signal.SIGKILL)
        elif now - self._told >= 1.0:
            self._told = now
            self._signal(signal.SIGTERM)

    def follow(self, end: object) -> int:
        """End as another machine did; says so. Returns the exit status."""
        if not isinstance(end, End):
            error(f"the job at {self.rendezvous.at}:{self.rendezvous.port} has ended without {socket.gethostname()}")
            return FAILED
        if end.status in (FAILED, BAD):
            error(f"the job has ended on {end.host} with status {end.status}{f': {end.text}' if end.text else ''}")
        else:
            self.say(f"the job has ended on {end.host} ({end.text or 'done'})")
        return end.status

    def left_out(self) -> int:
        """End with the job's status where it has ended while this machine waited to join it."""
        status = self.follow(self.rendezvous.ended())
        self.rendezvous.acknowledge_end()
        return status

    # -- what torch elastic calls ------------------------------------------------------------------------------------

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        self._meets = True
        if self.asked:
            raise SignalException("asked to stop", sigval=signal.SIGTERM)
        with self.rendezvous.reading():
            entered = self.come_in(worker_group)
            if not entered:
                super()._rendezvous(worker_group)
        self._hopeless = self._meets = False
        if entered:
            return
        self.formed()
        nodes = self.rendezvous.nodes
        if self.rendezvous.most > 1:
            first, said = 0, []
            for node in nodes:
                last = first + node.processes - 1
                said.append(f"{node.host} (rank{'s' if last > first else ''} {first}{f'-{last}' * (last > first)})")
                first = last + 1
            self.say(f"machines   {len(nodes)} at {self.rendezvous.at}:{self.rendezvous.port}: {', '.join(said)}")

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if self.asked:
            self._remaining_restarts = 0
            self._pass_on()
        self.memory.look(self._pcontext.pids().values() if self._pcontext is not None else ())
        result = self.looked_at(worker_group)
        if result.state == WorkerState.HEALTHY:
            return self._look_around(worker_group) or result
        if result.state != WorkerState.FAILED:
            return result
        ranks = [worker.global_rank for worker in worker_group.workers]  # some may be ending still
        statuses = {failure.exitcode for failure in result.failures.values()}
        alone = self.rendezvous.most == 1
        end = None if alone else self.rendezvous.ended()
        if not alone and EXCLUDED in statuses:
            error(f"{socket.gethostname()} computed wrongly (guard) and is taken out; the others go on without it")
            self.rendezvous.leave()
            return self._give_up(EXCLUDED)
        if not alone and BAD not in statuses and self.rendezvous.grows():
            return RunResult(WorkerState.HEALTHY)  # torch elastic sees in a moment who waits, and forms again
        if statuses == {STOPPED}:  # not a failure, and no reason to start again
            self.saved = True
            return RunResult(WorkerState.SUCCEEDED, return_values=dict.fromkeys(ranks, STOPPED))
        unheard = self.asked and statuses <= {-signal.SIGTERM, STOPPED}  # by ranks that were not yet listening
        elsewhere = end is not None and end.status == STOPPED  # which knows of the checkpoint
        if unheard or elsewhere:
            self.saved = elsewhere
            return RunResult(WorkerState.SUCCEEDED, return_values=dict.fromkeys(ranks, STOPPED))
        if end is not None and end.status in (FAILED, BAD):
            return self._give_up(self.follow(end))
        if self.goes_on and not self.asked:
            self.give_back_starts()
        if not statuses.isdisjoint((BAD, HALTED)):  # starting again would meet the same bad input, or machine
            self._remaining_restarts = 0
        self._tell(result)
        if not self._remaining_restarts:
            self.rendezvous.end(BAD if BAD in statuses else FAILED, "see what that machine says")
        return result

    def _look_around(self, worker_group: WorkerGroup) -> RunResult | None:
        """What has become of the other machines, while this one's ranks are well."""
        if self.rendezvous.most == 1:
            return None
        if (end := self.rendezvous.ended(at_once=False)) is not None:
            if end.status == STOPPED:
                self.asked = True  # ranks agree by themselves; one that starts does not
            elif end.status in (FAILED, BAD):
                return self._give_up(self.follow(end))
            if isinstance(self._pcontext, RanksAmongMachines) and self._pcontext.idle:
                return self._give_up(self.follow(end))
        if self.goes_on:  # the ranks' machines look after each other
            return None
        if hosts := self.rendezvous.lost():
            self._hopeless = True
            error(f"no sign of life from {', '.join(hosts)} for {self.rendezvous.limits.lost:g} s; {self.then()}")
            if not self._remaining_restarts:
                self.rendezvous.end(FAILED, f"{', '.join(hosts)} was lost")
            return RunResult(WorkerState.FAILED)
        return None

    def _give_up(self, status: int) -> RunResult:
        self.verdict, self._remaining_restarts, self._hopeless = status, 0, True
        return RunResult(WorkerState.FAILED)

    def _tell(self, result: RunResult) -> None:
        for rank, failure in result.failures.items():
            how = (
                f"was killed by {name_of(-failure.exitcode)}{self.memory.why(failure.pid, failure.exitcode)}"
                if failure.exitcode < 0
                else f"ended with status {failure.exitcode}"
            )
            if failure.exitcode < 0 or self._remaining_restarts or self.goes_on:  # else its own words have said it all
                error(f"rank {rank} (pid {failure.pid}) on {socket.gethostname()} {how}; {self.then()}")

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        if worker_group.state == WorkerState.HEALTHY:  # a machine has come
            self.say("another machine has come: a checkpoint, and the job forms again")
            self.rendezvous.grow()
            self.leave_room()
        super()._restart_workers(worker_group)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        growing = worker_group.state == WorkerState.HEALTHY
        self._shutdown(timeout=self._shutdown_timeout if growing else GRACE_S)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = GRACE_S) -> None:
        if self._pcontext:
            self._pcontext.close(death_sig, NO_GRACE_S if self._hopeless or self.rendezvous.gone else timeout)
        super()._shutdown(death_sig)

    def _construct_event(self, state: str, source: EventSource, *more: Any, **named: Any) -> Event:
        """Nobody records these; torch elastic's hold the machine's full name, and where no server of names answers, as
        between machines of their own, each would wait six seconds for it, five of them or more a start."""
        return Event(f"torchelastic.worker.status.{state}", source)

    def _exit_barrier(self) -> None:
        if self.several:
            if not self.leave_together():
                error("rank 0 has not come to its end, which is on another machine; start the same command again there")
                self.verdict = FAILED
        elif self.rendezvous.most > 1:
            self.rendezvous.leave_together()
