"""The torch elastic agent of one machine: it starts the ranks, detects that one died, and restarts them.

In: a run, the number of ranks on this machine, the rendezvous. Out: an exit status, the same on every machine. The
launchers `local` and `torchrun` start it. If a rank or a machine fails, the job stops and restarts from its last
checkpoint, up to `max_restarts` times. A new machine joins after a checkpoint. With `launch.on_rank_failure: continue`
the job continues without failed ranks and machines (`surviving_ranks.py`).
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import socket
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.events import Event, EventSource
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousTimeoutError,
)

from lockstep.checkpoint.manifest import newest_whole
from lockstep.config.errors import BAD, DONE, EXCLUDED, FAILED, HALTED, STOPPED, coded
from lockstep.distributed import job_record, network
from lockstep.distributed.lost_contact import MARKER
from lockstep.distributed.membership import SOON_S, MemberAddress
from lockstep.distributed.signals import Interrupts, handled
from lockstep.launchers.launcher import LaunchPlan, call
from lockstep.launchers.processes.elastic_rendezvous import ElasticRendezvous, End
from lockstep.launchers.processes.out_of_memory import Memory
from lockstep.launchers.processes.surviving_ranks import Machines, Ranks, RanksAmongMachines, lives
from lockstep.track.console import error
from lockstep_trace.coded import quantity

ANNOUNCED_S = 30.0
MARGIN_S = 15.0  # seconds from the failure of a machine until its peers' ranks detect it


def name_of(number: int) -> str:
    """Return the name of a signal."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


# seconds for ranks to end: after another rank died, and after their peers are known to be gone
GRACE_S, NO_GRACE_S = 30, 2


def run_agent(
    plan: LaunchPlan,
    processes: int,
    rendezvous: ElasticRendezvous,
    entry: Callable[..., None],
    arguments: Sequence[Any],
    say: Callable[[str], None],
) -> int:
    """Start `processes` ranks on this machine, each a call of `entry(*arguments)`, and wait for their end."""
    for name in [n for n in logging.root.manager.loggerDict if n.startswith(("torch.distributed", "torch.multiproc"))]:
        logging.getLogger(name).setLevel(logging.CRITICAL)  # `Agent` reports instead
    spec = WorkerSpec(
        role="lockstep",
        local_world_size=processes,
        entrypoint=call,  # torch elastic replaces `$$` and `${local_rank}` in arguments that are texts
        args=(entry, tuple(arguments)),
        rdzv_handler=rendezvous,  # type: ignore[arg-type]
        max_restarts=plan.launch.max_restarts,
        monitor_interval=0.1,
    )
    agent = Agent(spec, rendezvous, plan, say)
    rendezvous.continues = plan.launch.on_rank_failure == "continue" and max(processes, rendezvous.most) > 1
    spec.monitor_interval = 0.01 if rendezvous.continues else 0.1  # `Ranks` polls itself
    # torch elastic would forward signals unchanged, ignore how ranks end, and wait even for ended ones
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ""
    status = FAILED
    with handled(agent.hear):
        try:
            status = _seen_to_end(plan.folder, agent, rendezvous)
            return status
        finally:
            agent.over = True  # nothing to interrupt any more
            with contextlib.suppress(RendezvousError):
                if status == EXCLUDED:  # the job is not over
                    rendezvous.hold(lambda: agent.stop_requested)
                else:
                    rendezvous.end(status)
                    rendezvous.shutdown()
            for marker in Path(tempfile.gettempdir()).glob(f"{MARKER}{rendezvous.get_run_id()}-*"):
                marker.unlink(missing_ok=True)


def _seen_to_end(folder: Path, agent: Agent, rendezvous: ElasticRendezvous) -> int:
    try:
        result = agent.run()
    except SignalException:
        status = _unheard(folder, agent)
        rendezvous.end(FAILED if status == FAILED else STOPPED, "stopped on request")
        rendezvous.leave_together(GRACE_S)
        return status
    except RendezvousTimeoutError:
        there = rendezvous.there()
        error(
            coded(
                "LS7314",
                f"too few machines joined at {rendezvous.at}:{rendezvous.port} within "
                f"{rendezvous.limits.meeting(rendezvous.fewest, rendezvous.most):g} s: "
                f"expected {rendezvous.fewest}, got {len(there)} ({', '.join(there)}). Start the same command on the "
                "other machines, or lower launch.machines",
            )
        )
        return FAILED
    except RendezvousClosedError:
        return agent.left_out()
    except RendezvousConnectionError as caught:
        error(
            coded(
                "LS7315",
                f"{socket.gethostname()} lost contact with the rendezvous of this job at "
                f"{rendezvous.at}:{rendezvous.port} ({' '.join(str(caught.__cause__ or caught).split())[:120]}). "
                "The job ends here; start the same command again on every machine, and it resumes from its last "
                "checkpoint",
            )
        )
        return FAILED
    except RendezvousError as caught:  # forged or damaged state, detected by torch elastic or here
        error(
            coded(
                "LS7316",
                f"the rendezvous at {rendezvous.at}:{rendezvous.port} failed: {caught}; "
                "start the same command again on every machine",
            )
        )
        return FAILED
    except (EOFError, ConnectionError):  # in the start of a rank
        error(
            coded(
                "LS7325",
                f"the process from which the ranks of {socket.gethostname()} are forked has ended; see its message, or "
                "the kernel's log",
            )
        )
        return FAILED
    if result is None:  # the job ended while this machine was spare
        return agent.left_out()
    if agent.verdict is not None:
        return agent.verdict
    if result.is_failed():
        return next((f.exitcode for f in result.failures.values() if f.exitcode == BAD), FAILED)
    status = max((status or 0 for status in result.return_values.values()), default=DONE)
    return _unheard(folder, agent) if status == STOPPED and not agent.saved else status


def _unheard(folder: Path, agent: Agent) -> int:
    """Return the exit status of a job that was stopped before its ranks handled signals. Errors: `KeyboardInterrupt`
    for a job that does not train, such as `lockstep verify`, which cannot be resumed."""
    if not agent.trains:
        raise KeyboardInterrupt
    if newest_whole(folder) is not None:
        return STOPPED
    error(coded("LS7317", "stopped before the first checkpoint; the same command starts over"))
    # this status lets job.sbatch requeue the job
    return 128 + signal.SIGTERM if os.environ.get(job_record.VARIABLE) == "slurm" else FAILED


class Agent(LocalElasticAgent):
    """torch elastic's agent, extended by lockstep's exit statuses, failure messages and monitoring of other
    machines."""

    goes_on = False  # whether this formation continues without failed ranks
    _running_job = "", 0  # (namespace of the running job that this machine joins, number of machines that formed it)
    _namespace = _abandoned = ""  # of this machine's ranks; of a job that all machines have to re-form

    def __init__(
        self, spec: WorkerSpec, rendezvous: ElasticRendezvous, plan: LaunchPlan, say: Callable[[str], None]
    ) -> None:
        super().__init__(spec, DefaultLogsSpecs(os.devnull), start_method="forkserver")
        self._shutdown_timeout = int(plan.launch.timeout_s)  # not a parameter before torch 2.13
        self.rendezvous, self.plan, self.say, self.memory = rendezvous, plan, say, Memory()
        words = spec.args[1][1:2] if spec.args else ()
        self.trains = not words or tuple(words[0]) == job_record.TRAIN  # else it only records some steps
        self.verdict: int | None = None  # exit status taken over from another machine
        self.saved = False  # whether ranks or another machine stopped with a checkpoint
        self.over = False
        self._hopeless = False  # a peer is known to be gone: ranks waiting for it will not end
        self.stop_requested = False  # by a signal, or on another machine
        self._meets = True  # in the rendezvous, without ranks that could stop
        self._interrupts = Interrupts()
        self._signalled_at, self._limit = 0.0, math.inf  # time of the last stop request to ranks, and their deadline

    def hear(self, number: int, frame: FrameType | None) -> None:
        """Handle a stop signal. `_monitor_workers` forwards it to the ranks; a second Ctrl-C kills them and this
        process."""
        if self._interrupts.again(number):
            self._signal(signal.SIGKILL)
            raise KeyboardInterrupt
        self.stop_requested = True
        if self._meets and not self.over:
            raise SignalException("asked to stop", sigval=signal.Signals(number))

    def _signal(self, number: signal.Signals) -> None:
        for pid in self._pcontext.pids().values() if self._pcontext is not None else ():
            with contextlib.suppress(OSError):
                os.kill(pid, number)

    def _pass_on(self) -> None:
        """Request the ranks to stop, once a second, because a starting rank ignores signals. They end normally, or
        after the time limit of a collective."""
        now = time.monotonic()
        self._limit = min(self._limit, now + self._shutdown_timeout)
        if now > self._limit:
            error(
                coded(
                    "LS7318",
                    f"some ranks did not end within {self._shutdown_timeout} s (launch.timeout_s) of being asked to "
                    "stop",
                )
            )
            self._signal(signal.SIGKILL)
        elif now - self._signalled_at >= 1.0:
            self._signalled_at = now
            self._signal(signal.SIGTERM)

    def follow(self, end: object) -> int:
        """Report how another machine ended, and return its exit status."""
        if not isinstance(end, End):
            error(
                coded(
                    "LS7319",
                    f"the job at {self.rendezvous.at}:{self.rendezvous.port} ended before this machine, "
                    f"{socket.gethostname()}, joined",
                )
            )
            return FAILED
        if end.status in (FAILED, BAD):
            error(
                coded(
                    "LS7320",
                    f"the job has ended on {end.host} with status {end.status}{f': {end.text}' if end.text else ''}",
                )
            )
        else:
            self.say(f"the job has ended on {end.host} ({end.text or 'done'})")
        return end.status

    def left_out(self) -> int:
        """Return the status of a job that ended while this machine waited to join it."""
        status = self.follow(self.rendezvous.ended())
        self.rendezvous.acknowledge_end()
        return status

    # -- on_rank_failure: continue -----------------------------------------------------------------------------------

    @property
    def several(self) -> bool:
        """Whether the job also continues without failed machines."""
        return self.goes_on and self.rendezvous.most > 1

    def come_in(self, worker_group: WorkerGroup) -> bool:
        """Join a running job without re-forming it; return False if there is none."""
        store = self.rendezvous
        self._running_job = self._running() if store.continues and store.most > 1 else ("", 0)
        if not self._running_job[0]:
            return False
        self._namespace, count = self._running_job[0], worker_group.spec.local_world_size
        worker_group.workers = [Worker(local, local, local, count, count) for local in range(count)]
        group: Any = worker_group
        group.group_rank, group.group_world_size = 0, 1
        group.master_addr, group.master_port = store.at, store.port
        self.goes_on = True
        self.say(f"machine    {socket.gethostname()} joins the running job at {store.at}:{store.port}")
        return True

    def _running(self) -> tuple[str, int]:
        """Return (namespace, number of machines that formed it) of a running job that continues after failures; ("", 0)
        if the machines have to form the job. Waits a while for a job that has just formed to announce itself."""
        store, until = self.rendezvous, time.monotonic() + ANNOUNCED_S
        while True:
            number, namespace, count = store.announced()
            if namespace and namespace != self._abandoned:
                with store.reading():
                    roll = store.roll(namespace, network.secret_from_environment(), None)
                    if roll.given_up is None and lives(roll.store, count, max(store.limits.lost, ANNOUNCED_S)):
                        store.formed_by_others()
                        return namespace, count
                    self._abandoned = namespace
            if not store.formed_by_others() or number == store.round or time.monotonic() > until:
                return "", 0
            time.sleep(0.1)

    def abandon_job(self) -> None:
        """Mark the running job as abandoned: all machines re-form it."""
        self._abandoned = self._namespace

    def formed(self) -> None:
        """After the rendezvous, determine whether all machines continue after rank failures."""
        store = self.rendezvous
        self.goes_on = store.continues and all(node.continues for node in store.nodes)
        if store.continues and not self.goes_on:
            self.say(
                "note: launch.on_rank_failure: continue is not set on every machine, so a failed rank ends the others"
            )
        if store.most > 1:
            self._namespace = f"lockstep-ranks-{store.get_run_id()}-{store.round}"
        if store.most > 1 and store.place == 0:
            store.announce(self._namespace if self.goes_on else "")

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        if not self.goes_on:
            return super()._start_workers(worker_group)
        spec, store, workers = worker_group.spec, self.rendezvous, worker_group.workers
        key = dict(spec.args[1][-1]).get(network.SECRET_VARIABLE, network.secret_from_environment())
        entered, count = self._running_job
        namespace = self._namespace or f"lockstep-ranks-{uuid.uuid4().hex}"
        soon_s = max(SOON_S, store.limits.lost + MARGIN_S) if store.most > 1 else SOON_S

        def place(name: str, joining: bool) -> MemberAddress:
            return MemberAddress(store.at, store.port, namespace, name, joining, soon_s)

        posts = not entered and store.place == 0
        roll = store.roll(namespace, key, [str(rank) for rank in range(workers[0].world_size)] if posts else None)
        assert callable(spec.entrypoint)
        arguments = (
            spec.entrypoint,
            spec.args,
            self._variables(worker_group),
            roll,
            place,
            self._report_lost_rank,
            self._spare,
        )
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
        """Return local rank -> environment variables that torch elastic sets."""
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

    def _report_lost_rank(self, local: int, pid: int, code: int) -> None:
        """Report a failed rank without which the others continue."""
        left, who = self._remaining_restarts, f"rank process {local} of {socket.gethostname()}"
        then = (
            f"a replacement is started ({quantity(left, 'start')} left)"
            if left
            else "no restarts left for a replacement"
        )
        if code == EXCLUDED:
            error(
                coded(
                    "LS7310",
                    f"{who} computed wrong values (sdc_check) and is evicted; the other ranks continue without a "
                    "replacement",
                )
            )
        else:
            error(
                coded(
                    "LS7311",
                    f"{who} was killed by {name_of(-code)}{self.memory.why(pid, code)}; the other ranks continue; "
                    f"{then}",
                )
            )

    def _missed(self, hosts: list[str]) -> None:
        """Report that machines failed and that the others continue."""
        error(
            coded(
                "LS7312",
                f"no heartbeat from {', '.join(hosts)} for {self.rendezvous.limits.lost:g} s; the other machines "
                "continue",
            )
        )

    def _spare(self) -> bool:
        """Return whether a failed rank may be replaced; the replacement counts as a restart."""
        left = self._remaining_restarts
        self._remaining_restarts -= bool(left)
        return bool(left)

    def give_back_starts(self) -> None:
        """Refund the restarts spent on replacements that have not trained yet, before all ranks restart."""
        if isinstance(self._pcontext, Ranks):
            with self.rendezvous.reading():
                self._remaining_restarts += self._pcontext.in_vain()

    def then(self) -> str:
        """Describe what follows the end of all ranks of this machine."""
        if not (left := self._remaining_restarts):
            return "no restarts left"
        if newest_whole(self.plan.folder) is not None:
            where = "restarting from the last checkpoint"
        elif (
            self.rendezvous.place or self.plan.run.remote_dir is not None
        ):  # it may be on another machine or the remote
            where = "restarting from the last checkpoint, if there is one"
        else:
            where = "no checkpoint yet; training starts over"
        return f"{where} ({quantity(left, 'restart')} left)"

    def state_of_ranks(self, worker_group: WorkerGroup) -> RunResult:
        """Return the state of this machine's ranks."""
        if not self.goes_on:
            return super()._monitor_workers(worker_group)
        assert self._pcontext is not None
        with self.rendezvous.reading():
            finished = self._pcontext.wait(0)
        self.stop_requested |= isinstance(self._pcontext, Ranks) and self._pcontext.stop_asked
        if finished is None:
            return RunResult(WorkerState.HEALTHY)
        ranks = {worker.local_rank: worker.global_rank for worker in worker_group.workers}
        if finished.is_failed() or finished.return_values == {}:
            if not finished.failures:
                self._tell_end(self._pcontext.why)  # type: ignore[attr-defined]
            return RunResult(WorkerState.FAILED, failures={ranks[k]: v for k, v in finished.failures.items()})
        return RunResult(WorkerState.SUCCEEDED, return_values={ranks[k]: v for k, v in finished.return_values.items()})

    def _tell_end(self, why: str) -> None:
        """Report that this machine's ranks ended although none of them failed."""
        error(coded("LS7313", f"{why}; {self.then()}"))

    def leave_together(self) -> bool:
        """Wait for the other machines' ranks, and return whether the job is finished."""
        assert isinstance(self._pcontext, RanksAmongMachines)
        with self.rendezvous.reading():
            end = (STOPPED, "stopped on request") if self._pcontext.stopped else (DONE, "")
            return self._pcontext.leave(self.rendezvous.holds, lambda: self.rendezvous.end(*end))

    # -- methods called by torch elastic -----------------------------------------------------------------------------

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        self._meets = True
        if self.stop_requested:
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
            first, descriptions = 0, []
            for node in nodes:
                last = first + node.processes - 1
                descriptions.append(
                    f"{node.host} (rank{'s' if last > first else ''} {first}{f'-{last}' * (last > first)})"
                )
                first = last + 1
            self.say(
                f"machines   {len(nodes)} at {self.rendezvous.at}:{self.rendezvous.port}: {', '.join(descriptions)}"
            )

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if self.stop_requested:
            self._remaining_restarts = 0
            self._pass_on()
        self.memory.look(self._pcontext.pids().values() if self._pcontext is not None else ())
        result = self.state_of_ranks(worker_group)
        if result.state == WorkerState.HEALTHY:
            return self._look_around(worker_group) or result
        if result.state != WorkerState.FAILED:
            return result
        ranks = [worker.global_rank for worker in worker_group.workers]  # some may still be ending
        statuses = {failure.exitcode for failure in result.failures.values()}
        alone = self.rendezvous.most == 1
        end = None if alone else self.rendezvous.ended()
        if not alone and EXCLUDED in statuses:
            error(
                coded(
                    "LS7321",
                    f"{socket.gethostname()} computed wrong values (sdc_check) and is evicted; the other machines "
                    "continue without it",
                )
            )
            self.rendezvous.leave()
            return self._give_up(EXCLUDED)
        if not alone and BAD not in statuses and self.rendezvous.grows():
            return RunResult(WorkerState.HEALTHY)  # torch elastic will notice the waiting machine and re-form
        if statuses == {STOPPED}:  # not a failure: no restart
            self.saved = True
            return RunResult(WorkerState.SUCCEEDED, return_values=dict.fromkeys(ranks, STOPPED))
        unheard = self.stop_requested and statuses <= {-signal.SIGTERM, STOPPED}  # ranks without signal handlers yet
        elsewhere = end is not None and end.status == STOPPED  # it has the checkpoint
        if unheard or elsewhere:
            self.saved = elsewhere
            return RunResult(WorkerState.SUCCEEDED, return_values=dict.fromkeys(ranks, STOPPED))
        if end is not None and end.status in (FAILED, BAD):
            return self._give_up(self.follow(end))
        if self.goes_on and not self.stop_requested:
            self.give_back_starts()
        if not statuses.isdisjoint((BAD, HALTED)):  # a restart would have the same bad input or machine
            self._remaining_restarts = 0
        self._tell(result)
        if not self._remaining_restarts:
            self.rendezvous.end(BAD if BAD in statuses else FAILED, "see the messages of that machine")
        return result

    def _look_around(self, worker_group: WorkerGroup) -> RunResult | None:
        """Check the other machines while this one's ranks are healthy."""
        if self.rendezvous.most == 1:
            return None
        if (end := self.rendezvous.ended(at_once=False)) is not None:
            if end.status == STOPPED:
                self.stop_requested = True  # running ranks agree themselves; a starting one does not
            elif end.status in (FAILED, BAD):
                return self._give_up(self.follow(end))
            if isinstance(self._pcontext, RanksAmongMachines) and self._pcontext.idle:
                return self._give_up(self.follow(end))
        if self.goes_on:  # the machines monitor each other
            return None
        if hosts := self.rendezvous.lost():
            self._hopeless = True
            error(
                coded(
                    "LS7322",
                    f"no heartbeat from {', '.join(hosts)} for {self.rendezvous.limits.lost:g} s; {self.then()}",
                )
            )
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
            if failure.exitcode < 0 or self._remaining_restarts or self.goes_on:  # else its own message suffices
                error(
                    coded("LS7323", f"rank {rank} (pid {failure.pid}) on {socket.gethostname()} {how}; {self.then()}")
                )

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        if worker_group.state == WorkerState.HEALTHY:  # a machine has joined
            self.say("another machine joined: saving a checkpoint and re-forming the job")
            self.rendezvous.grow()
            self.abandon_job()
        super()._restart_workers(worker_group)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        growing = worker_group.state == WorkerState.HEALTHY
        self._shutdown(timeout=self._shutdown_timeout if growing else GRACE_S)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int | None = None) -> None:
        if self._pcontext:
            limit = self._shutdown_timeout if timeout is None else timeout  # before torch 2.13, its agent passes none
            self._pcontext.close(death_sig, NO_GRACE_S if self._hopeless or self.rendezvous.gone else limit)
        super()._shutdown(death_sig)

    def _construct_event(self, state: str, source: EventSource, *more: Any, **named: Any) -> Event:
        """Create an event without the machine's full name. Events are not recorded, and without a DNS server each
        lookup would take six seconds, five or more times per start."""
        return Event(f"torchelastic.worker.status.{state}", source)

    def _exit_barrier(self) -> None:
        if self.several:
            if not self.leave_together():
                error(
                    coded(
                        "LS7324",
                        "rank 0 runs on another machine and has not finished; run the same command again there",
                    )
                )
                self.verdict = FAILED
        elif self.rendezvous.most > 1:
            self.rendezvous.leave_together()
