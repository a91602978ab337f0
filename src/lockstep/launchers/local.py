"""All processes on this machine: one runs in the terminal's own process, several under torch elastic.

In: a run. Out: an exit status. If a rank dies, the job restarts from the last checkpoint, up to `max_restarts` times.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from lockstep.config.lazy import lazy
from lockstep.config.plugins import importing
from lockstep.config.run import Run, RunError
from lockstep.config.sections import LaunchSection
from lockstep.distributed.hardware import available_cores, gpus_of
from lockstep.distributed.job_record import TRAIN
from lockstep.distributed.process_limits import no_threads
from lockstep.distributed.signals import STOP_SIGNALS, handled
from lockstep.launchers.launcher import Launcher, LaunchPlan
from lockstep_trace.coded import quantity

if TYPE_CHECKING:
    from lockstep.distributed import network
else:  # for several processes
    (network,) = lazy("lockstep.distributed", "network")

LOOPBACK = "127.0.0.1"  # reachable only from this machine
# glibc caches freed small blocks. They lie between a step's large tensors and outlive them, which fragments the heap.
# Without these caches a CPU rank uses 12 to 25 % less memory at the same speed.
TUNABLES = "glibc.malloc.tcache_count=0:glibc.malloc.mxfast=0"


class Local(Launcher):
    """Launcher for one machine, such as a laptop or a GPU server."""

    starts_all_ranks = True
    forks_ranks = True
    takes_srun = True

    @classmethod
    def meets_on_loopback(cls, launch: LaunchSection) -> bool:
        return True

    @classmethod
    def loses_ranks(cls, launch: LaunchSection) -> bool:
        return launch.on_rank_failure == "continue"

    def plan(self, run: Run) -> LaunchPlan:
        processes = processes_of(run)
        run.check_shared(processes, f"launch.processes: {processes} processes")
        check_gpus(run.launch, processes)
        command = [sys.executable, "-m", "lockstep", "train", str(run.folder / "run.yaml")]
        if processes == 1:
            return LaunchPlan(run, 1, command, notes=["one process: runs in the terminal's own process"])
        variables = {
            # otherwise torch elastic re-forms on a stale address (pytorch/pytorch#135712)
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        if sys.platform == "linux":
            variables["GLOO_SOCKET_IFNAME"] = "lo"  # works without a resolvable host name
        return LaunchPlan(
            run, processes, command, variables, notes=["runs in this terminal; Ctrl-C saves a checkpoint and stops"]
        )

    def memory(self, plan: LaunchPlan) -> float | None:
        return memory_here(plan, plan.processes)

    def start(self, plan: LaunchPlan, words: Sequence[str] = TRAIN) -> int:
        if plan.processes == 1:
            with importing():
                from lockstep.training import rank as worker

            return worker.main(plan.job or plan.run, words=words)
        for name, value in plan.variables.items():
            os.environ.setdefault(name, value)
        from lockstep.launchers.processes.elastic_agent import run_agent
        from lockstep.launchers.processes.elastic_rendezvous import ElasticRendezvous, Limits, Node

        prestart(plan.launch, plan.processes, loopback=True)
        node = Node(socket.gethostname(), LOOPBACK, plan.processes, holds=True)
        key = network.secret_or_new()
        rendezvous = ElasticRendezvous(LOOPBACK, 0, 1, 1, node, Limits(), key=key)
        sent = str(plan.folder / "run.yaml") if plan.job is None else plan.job.dump()
        arguments = (sent, tuple(words), {network.SECRET_VARIABLE: key})
        return run_agent(plan, plan.processes, rendezvous, entry, arguments, print)


def processes_of(run: Run) -> int:
    """Return `launch.processes`; auto: the number for which there are GPUs, else one per core, at most `micro_batches`
    (1 for `single`)."""
    if run.launch.processes != "auto":
        return int(run.launch.processes)
    if run.strategy.alone:
        return 1
    return min(run.micro_batches, gpus_of(run.launch) * run.launch.processes_per_gpu or available_cores())


def memory_here(plan: LaunchPlan, processes: int) -> float:
    """Return the bytes of memory for each of `processes` processes on this machine."""
    from lockstep.distributed.system_metrics import capacity
    from lockstep.distributed.world import pick_device

    return float(capacity(pick_device(plan.launch, plan.run.precision, 0, processes), processes))


def check_gpus(launch: LaunchSection, processes: int) -> None:
    """Reject more processes than this machine has GPUs for, before any starts. Errors: `RunError`."""
    places = gpus_of(launch) * launch.processes_per_gpu
    if places < processes and places:
        raise RunError(
            "LS7290",
            f"launch.device: {launch.device}, but this machine has {quantity(gpus_of(launch), 'CUDA device')} for "
            f"{quantity(processes, 'process')}; use fewer processes, launch.device=cpu, or "
            f"launch.processes_per_gpu for "
            "processes that share one",
        )


def prestart(launch: LaunchSection, processes: int, loopback: bool) -> None:
    """Start the fork server, which imports the workers' modules while this process prepares data. Workers fork from it.

    `processes`: ranks of this machine. `loopback`: whether they meet at its loopback address. Errors: `RunError` if its
    socket cannot be opened, for example if TMPDIR is too long for a socket's name, and if this machine lacks what
    several ranks need."""
    import multiprocessing
    import tempfile
    from multiprocessing import forkserver, resource_tracker

    from lockstep.launchers.processes import machine_limits

    machine_limits.check(LOOPBACK if loopback else None, processes)
    # do not import torch only for this
    on_cpus = launch.device == "cpu" or ("torch" in sys.modules and gpus_of(launch) == 0)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["lockstep.launchers.processes.fork_server_guard", "lockstep.training.fork_server"])
    # Schedulers and terminals signal every process of a job; if this server ended, so would the ranks.
    with handled(signal.SIG_IGN, STOP_SIGNALS):
        resource_tracker.ensure_running()  # unblocks some of these signals
        # Forked ranks inherit the mask: signals stay pending until `entry` sets their handlers.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            with variable("GLIBC_TUNABLES", TUNABLES if on_cpus else None):
                forkserver.ensure_running()
        except OSError as caught:
            if no_threads(caught) is not None:
                raise
            raise RunError(
                "LS7291",
                f"TMPDIR: no socket can be opened in {tempfile.gettempdir()} ({caught}), which is needed to start "
                "several processes; set TMPDIR to another folder that exists, with a name of less than 80 characters",
            ) from caught
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@contextmanager
def variable(name: str, value: str | None) -> Iterator[None]:
    """Context manager that sets an environment variable, unless it is set already or `value` is None."""
    if value is None or name in os.environ:
        yield
        return
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]


def entry(sent: str | Run, words: Sequence[str], variables: Mapping[str, str] | None = None) -> None:
    """Run one rank. `sent`: a run, the path of a run file, or a job from `Job.dump`.

    The rank is killed when the launcher ends for any reason, so that no orphan writes to OUTPUT."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: the parent is the fork server,
    threading.Thread(target=_follow_launcher, name="lockstep-launcher", daemon=True).start()  # not the launcher
    for number in STOP_SIGNALS:  # until the rank sets handlers; the launcher forwards Ctrl-C as SIGTERM
        signal.signal(number, signal.SIG_IGN if number in (signal.SIGINT, signal.SIGHUP) else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    for name, value in (variables or {}).items():
        os.environ.setdefault(name, value)
    from lockstep.training import rank as worker

    if not isinstance(sent, str):
        sys.exit(worker.main(sent, words=words))
    if not sent.startswith("{"):
        worker.main_of_file(sent, words)
    worker.main_of_job(sent, words)


def _follow_launcher() -> None:
    """Kill this process when the launcher ends. The fork server would outlive it while it has children."""
    import multiprocessing

    if (launcher := multiprocessing.parent_process()) is not None:
        launcher.join()
        os.kill(os.getpid(), signal.SIGKILL)
