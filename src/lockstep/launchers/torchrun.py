"""Several machines, the same command on each: they meet at an address, and each starts its own ranks.

In: `launch: {name: torchrun, machines: 2, rendezvous: host:port}`; `machines: "1:4"` for 1 to 4 machines. Out: an exit
status, the same on every machine. Beyond torchrun: distinct exit statuses, detection of failed machines within seconds,
and automatic choice of the network interface. Plain `torchrun ... -m lockstep train` works too.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from lockstep.config.run import Run, RunError
from lockstep.config.sections import LaunchSection, Positive, Section, Steps
from lockstep.data.job import Job
from lockstep.distributed import network
from lockstep.distributed.job_record import INTRODUCED, TRAIN
from lockstep.launchers.launcher import Launcher, LaunchPlan
from lockstep.launchers.local import check_gpus, entry, memory_here, prestart, processes_of
from lockstep.track.console import Console
from lockstep_trace.coded import quantity

Seconds = Annotated[float, Field(gt=0)]


class Torchrun(Launcher):
    """Launcher that runs torch elastic on every machine, with a c10d rendezvous."""

    joins = True
    forks_ranks = True

    @classmethod
    def meets_on_loopback(cls, launch: LaunchSection) -> bool:
        return not launch.options.get("rendezvous")

    class Options(Section):
        """Rendezvous address and timeouts."""

        machines: Positive | Annotated[str, Field(pattern=r"^[1-9]\d*:[1-9]\d*$")] = Field(
            1,
            description="torchrun: number of machines, or fewest:most for a job that continues without failed machines",
        )
        rendezvous: str | None = Field(
            None, description="torchrun, accelerate: host:port where the machines meet, the same on every machine"
        )
        interface: str | None = Field(
            None, description="torchrun: network interface of this machine; default: the one towards the rendezvous"
        )
        node_rank: Steps | None = Field(
            None, description="torchrun: this machine's rank; default: the rendezvous machine first, then by address"
        )
        join_timeout_s: Seconds = Field(
            600.0, description="torchrun: seconds to wait until enough machines have joined"
        )
        last_call_timeout_s: Seconds = Field(
            30.0, description="torchrun: seconds to wait for further machines once the minimum has joined"
        )
        keep_alive_timeout_s: Seconds = Field(
            15.0, description="torchrun: seconds without a heartbeat after which a machine counts as failed"
        )

    @classmethod
    def fewest_machines(cls, launch: LaunchSection) -> int | None:
        fewest, most = node_range(launch.options.get("machines", 1))
        return fewest if launch.on_rank_failure == "restart" and fewest < most else None

    @classmethod
    def loses_ranks(cls, launch: LaunchSection) -> bool:
        return launch.on_rank_failure == "continue" and node_range(launch.options.get("machines", 1)) == (1, 1)

    def plan(self, run: Run) -> LaunchPlan:
        options = self.options(run.launch)
        fewest, most = node_range(options.machines)
        processes = processes_of(run)
        if fewest > most:
            raise RunError(
                "LS7430", f"launch.machines: invalid value {options.machines!r}; the minimum comes first, as in 1:4"
            )
        run.check_shared(
            most * processes, f"launch.machines: {quantity(most, 'machine')} of {quantity(processes, 'process')}"
        )
        if options.keep_alive_timeout_s < 3:
            raise RunError(
                "LS7431",
                f"launch.keep_alive_timeout_s: {options.keep_alive_timeout_s:g} is too short; heartbeats are "
                "sent once per second at most",
            )
        if fewest < most and not run.launch.max_restarts:
            raise RunError(
                "LS7432",
                f"launch.machines: {options.machines} lets the job continue when a machine fails; set "
                "launch.max_restarts to the number of failures to survive",
            )
        if options.rendezvous is None and most > 1:
            raise RunError(
                "LS7433", "launch.rendezvous: missing; set host:port of one of the machines, the same value on all"
            )
        with network.under_key("launch.rendezvous"):
            host, port = network.endpoint(options.rendezvous or "localhost:29400")
        variables = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "TOKENIZERS_PARALLELISM": "false"}
        if options.interface is not None:
            variables |= {"GLOO_SOCKET_IFNAME": options.interface, "NCCL_SOCKET_IFNAME": options.interface}
        same = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={options.machines}"]
        same += [f"--nproc-per-node={processes}", f"--max-restarts={run.launch.max_restarts}"]
        same += ["--rdzv-backend=c10d", f"--rdzv-endpoint={host}:{port}", "-m", "lockstep", "train", "RUN.yaml"]
        together = quantity(most, "machine") if fewest == most else f"{fewest} to {most} machines"
        notes = [
            f"start the same command on {together}; they meet at {host}:{port}, each starts "
            f"{quantity(processes, 'process')}",
            "torch elastic runs in this terminal; the command above is torchrun's for the same job",
            "every machine needs the run file, the data, and the same package versions",
        ]
        if fewest < most:
            notes.append(
                "a failed machine costs a restart; a new one joins after a checkpoint. Put OUTPUT on a disk that "
                "all machines share, or the checkpoints are lost with the machine of rank 0"
            )
        return LaunchPlan(run, most * processes, same, variables, notes=notes)

    def leads(self, plan: LaunchPlan) -> bool:
        """Return whether this machine has `node_rank` 0, if given, else whether it has the rendezvous address."""
        if (rank := self.options(plan.launch).node_rank) is not None:
            return bool(rank == 0)
        host = network.endpoint(self.options(plan.launch).rendezvous or "localhost:29400")[0]
        with network.under_key("launch.rendezvous"):
            return network.route_to(host) == network.address_of(host)

    def _ranks_here(self, plan: LaunchPlan) -> int:
        """Number of ranks on this machine, as on each."""
        return plan.processes // node_range(self.options(plan.launch).machines)[1]

    def memory(self, plan: LaunchPlan) -> float | None:
        return memory_here(plan, self._ranks_here(plan))  # assumes equal machines

    def start(self, plan: LaunchPlan, words: Sequence[str] = TRAIN) -> int:
        check_gpus(plan.launch, self._ranks_here(plan))
        for name, value in plan.variables.items():
            os.environ.setdefault(name, value)
        options = self.options(plan.launch)
        try:
            return _start(plan, self._ranks_here(plan), options, words)
        except network.NetworkError as caught:
            raise RunError(
                caught.code,
                f"launch.{'interface' if 'interface' in caught.message else 'rendezvous'}: {caught.message}",
            ) from None


def node_range(value: int | str) -> tuple[int, int]:
    """Parse `launch.machines` into (fewest, most)."""
    fewest, _, most = str(value).partition(":")
    return int(fewest), int(most or fewest)


def _start(plan: LaunchPlan, processes: int, options: Torchrun.Options, words: Sequence[str]) -> int:
    from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousError

    from lockstep.checkpoint.manifest import newest_first
    from lockstep.launchers.processes.elastic_agent import run_agent
    from lockstep.launchers.processes.elastic_rendezvous import ElasticRendezvous, Limits, Node
    from lockstep.training.consistency_check import facts

    prestart(plan.launch, processes, Torchrun.meets_on_loopback(plan.launch))
    # the server that forks the ranks may be older than this variable
    variables = dict(plan.variables) | {name: os.environ[name] for name in (INTRODUCED,) if name in os.environ}
    host, port = network.endpoint(options.rendezvous or "localhost:29400")
    fewest, most = node_range(options.machines)
    say = Console(True).say
    address = network.address_on(options.interface) if options.interface else network.route_to(host)
    holds = network.holds(host, port)
    interface = options.interface or network.interface_to(host, several=most > 1)
    if interface is not None:
        variables |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
    where = f"{address}, ranks connect over {interface}" if interface else address
    say(f"machine    {socket.gethostname()}, {where}; rendezvous at {host}:{port}")
    key = network.secret_from_environment() if most > 1 else network.secret_or_new()
    if key:
        variables[network.SECRET_VARIABLE] = key
    else:
        say(
            f"note: {network.SECRET_VARIABLE} is not set: anyone who can reach {host}:{port} can disturb this job. "
            "Set the same value on every machine (reference/security on the site)"
        )
    if not holds:
        network.reach(host, port, options.join_timeout_s, say)
    node = Node(socket.gethostname(), address, processes, options.node_rank, holds)
    limits = Limits(options.join_timeout_s, options.last_call_timeout_s, options.keep_alive_timeout_s)

    def newest() -> int:
        return next((manifest.step for _, manifest in newest_first(plan.folder)), 0)

    try:
        rendezvous = ElasticRendezvous(host, port, fewest, most, node, limits, newest, key)
        rendezvous.admit(facts(plan.job or Job.of(plan.run).with_data()))
    except RendezvousConnectionError as caught:
        raise RunError(
            "LS7434",
            f"launch.rendezvous: {host}:{port} is not a rendezvous: {caught}; correct host and port",
        ) from None
    except RendezvousError as caught:  # wrong secret, or data from a stranger
        raise RunError(
            "LS7435",
            f"launch.rendezvous: the rendezvous at {host}:{port} failed: {caught}; give all machines one "
            "secret, and a port that only this job uses",
        ) from None
    sent = plan.run if plan.job is None else plan.job.dump()
    return run_agent(plan, processes, rendezvous, entry, (sent, tuple(words), variables), say)
