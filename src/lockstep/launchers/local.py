"""All processes on this machine: one runs in the terminal's own process, several under torch elastic.

In: a run. Out: an exit status. A rank that dies stops the job; it starts again from the last checkpoint up to
`max_restarts` times.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.console import error
from lockstep.launchers.launcher import TRAIN, Launcher, Plan
from lockstep.run import Run, RunError

if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup


_STOPS = (signal.SIGTERM, signal.SIGUSR1)  # what schedulers send


class Local(Launcher):
    """The launcher of a laptop or of one machine with GPUs."""

    def plan(self, run: Run) -> Plan:
        processes = processes_of(run)
        if processes > run.micro_batches:
            raise RunError(
                f"launch.processes: {processes} processes cannot share {run.micro_batches} micro-batches; "
                "use fewer processes or more micro_batches"
            )
        if run.launch.device == "cuda" and (count := gpus_of(run)) < processes:
            raise RunError(
                f"launch.device: cuda, but this machine has {count} CUDA device(s) for {processes} process(es); "
                "use fewer processes or device=cpu"
            )
        command = [sys.executable, "-m", "lockstep", "train", str(run.folder / "run.yaml")]
        if processes == 1:
            return Plan(1, command, notes=["one process: runs in the terminal's own process"])
        variables = {
            # torch elastic re-forms on a stale address otherwise (pytorch/pytorch#135712)
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        if sys.platform == "linux":
            variables["GLOO_SOCKET_IFNAME"] = "lo"  # needs no host name that resolves
        return Plan(processes, command, variables, notes=["started by torch elastic in this terminal"])

    def start(self, run: Run, plan: Plan, job: Sequence[str] = TRAIN) -> int:
        if plan.processes == 1:
            from lockstep import worker

            return worker.main(run, job=job)
        for name, value in plan.variables.items():
            os.environ.setdefault(name, value)
        return run_agent(str(run.folder / "run.yaml"), plan.processes, run, job)


def processes_of(run: Run) -> int:
    """`launch.processes`; auto: one a GPU, else one a core, at most `micro_batches` (1 for `single`)."""
    if run.launch.processes != "auto":
        return int(run.launch.processes)
    if run.strategy.name == "single":
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(run.micro_batches, gpus_of(run) or cores)


def gpus_of(run: Run) -> int:
    """CUDA devices of this machine that the run may use; 0 where there is no torch."""
    if run.launch.device == "cpu":
        return 0
    try:
        import torch
    except ImportError:  # a machine that only submits
        return 0
    return torch.cuda.device_count()


def prestart() -> None:
    """Let a server process import what workers need while this process is still preparing data; they fork from it."""
    import multiprocessing
    from multiprocessing import forkserver

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["lockstep.worker"])
    if threading.current_thread() is not threading.main_thread():  # who may set no signal handler
        forkserver.ensure_running()
        return
    # Schedulers signal every process of a job, also this server, whose end would be that of the ranks
    before = {number: signal.signal(number, signal.SIG_IGN) for number in _STOPS}
    try:
        forkserver.ensure_running()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)


def run_agent(path: str, processes: int, run: Run, job: Sequence[str]) -> int:
    """Start `processes` ranks of the run file at `path` under a torch elastic agent, and see them to their end."""
    import logging

    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.rendezvous import RendezvousParameters, registry

    for name in [n for n in logging.root.manager.loggerDict if n.startswith(("torch.distributed", "torch.multiproc"))]:
        logging.getLogger(name).setLevel(logging.CRITICAL)  # the agent below speaks for them
    prestart()
    rendezvous = RendezvousParameters("c10d", "localhost:0", uuid.uuid4().hex, 1, 1, local_addr="localhost")
    spec = WorkerSpec(
        role="lockstep",
        local_world_size=processes,
        entrypoint=entry,
        args=(path, tuple(job)),
        rdzv_handler=registry.get_rendezvous_handler(rendezvous),
        max_restarts=run.launch.max_restarts,
        monitor_interval=0.1,
        local_addr="localhost",
    )
    agent = _agent_class()(
        spec, DefaultLogsSpecs(), start_method="forkserver", shutdown_timeout=int(run.launch.timeout_s)
    )
    try:
        result = agent.run()
    except SignalException as stop:
        return 75 if stop.sigval in (signal.SIGTERM, signal.SIGINT) else 1
    finally:
        spec.rdzv_handler.shutdown()
        for marker in Path(tempfile.gettempdir()).glob(f"lockstep-failure-{rendezvous.run_id}*"):
            marker.unlink(missing_ok=True)
    if result.is_failed():
        return next((f.exitcode for f in result.failures.values() if f.exitcode == 2), 1)
    return max((status or 0 for status in result.return_values.values()), default=0)


def _agent_class() -> Any:
    """The agent, made where torch is at hand."""
    import socket

    from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

    class Agent(LocalElasticAgent):
        """Torch elastic's own, told what our exit statuses mean, and saying who died."""

        def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
            result = super()._monitor_workers(worker_group)
            if result.state != WorkerState.FAILED:
                return result
            statuses = {failure.exitcode for failure in result.failures.values()}
            if statuses == {75}:  # stopped on request: not a failure, and no reason to start again
                ranks = (worker.global_rank for worker in worker_group.workers)  # some may be ending still
                return RunResult(WorkerState.SUCCEEDED, return_values=dict.fromkeys(ranks, 75))
            if 2 in statuses:  # starting again would meet the same bad input
                self._remaining_restarts = 0
            for rank, failure in result.failures.items():
                how = (
                    f"was killed by {_signal(-failure.exitcode)}"
                    if failure.exitcode < 0
                    else f"ended with status {failure.exitcode}"
                )
                left = self._remaining_restarts
                then = f"restarting from the last checkpoint ({left} restart(s) left)" if left else "no restarts left"
                if failure.exitcode < 0 or left:  # otherwise the rank's own traceback has said it all
                    error(f"rank {rank} (pid {failure.pid}) on {socket.gethostname()} {how}; {then}")
            return result

    return Agent


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def entry(run: str | Run, job: Sequence[str], variables: Mapping[str, str] | None = None) -> None:
    """One rank of a run, or of the run file at a path. Ends with the launcher, whatever ended that: no orphans that go
    on writing to OUTPUT."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: this rank's parent is the fork server,
    threading.Thread(target=_follow_launcher, name="lockstep-launcher", daemon=True).start()  # not the launcher
    for number in _STOPS:
        signal.signal(number, signal.SIG_DFL)  # until the rank listens itself
    for name, value in (variables or {}).items():
        os.environ.setdefault(name, value)
    from lockstep import worker

    if isinstance(run, str):
        worker.main_of_file(run, job)
    else:
        sys.exit(worker.main(run, job=job))


def _follow_launcher() -> None:
    """Wait for the launcher's end, then end. The fork server does not: it stays for as long as it has children."""
    import multiprocessing

    if (launcher := multiprocessing.parent_process()) is not None:
        launcher.join()
        os.kill(os.getpid(), signal.SIGKILL)
