"""Hugging Face's own command, `accelerate launch`, on one or several machines, with its configuration files.

In: `launch: {name: accelerate, machines: 2, machine_rank: R, rendezvous: host:port}`, the same command on every machine
with its own rank. Out: an exit status. accelerate exits with 1 on any failure, and may start fewer processes than
requested; so ranks write their status to a file and check the world size.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

from pydantic import Field

from lockstep.checkpoint.manifest import newest_whole
from lockstep.config.errors import STOPPED, coded
from lockstep.config.run import Run, RunError
from lockstep.config.sections import LaunchSection, Positive, Section, Steps
from lockstep.distributed import job_record, network
from lockstep.distributed.hardware import gpus_of
from lockstep.distributed.job_record import JOB_WORDS, PLANNED_SIZE, RESOLVED, STATUS, TRAIN
from lockstep.distributed.signals import Interrupts, handled
from lockstep.launchers.launcher import Launcher, LaunchPlan, write_files
from lockstep.launchers.local import LOOPBACK, check_gpus, memory_here, processes_of
from lockstep.launchers.processes import accelerate_config, machine_limits
from lockstep.track.console import error
from lockstep_trace.coded import quantity

MODULE = "accelerate.commands.launch"
# `accelerate launch`, without a traceback when a signal ends it
QUIET_MODULE = "lockstep.launchers.processes.accelerate_launch"


class Accelerate(Launcher):
    """Launcher for `accelerate launch -m lockstep train`."""

    joins = True

    class Options(Section):
        """Arguments of `accelerate launch`."""

        machines: Positive = Field(1, description="accelerate: number of machines")
        machine_rank: Steps = Field(
            0, description="accelerate: this machine's rank; machine 0 has the address in launch.rendezvous"
        )
        rendezvous: str | None = Field(None, description="accelerate: host:port of machine 0, the same on all")
        config_file: str | None = Field(None, description="accelerate: a file that `accelerate config` wrote")

    def plan(self, run: Run) -> LaunchPlan:
        options, each = self.options(run.launch), processes_of(run)
        accelerate_config.check_file(run, options.config_file)
        total = options.machines * each
        run.check_shared(
            total, f"launch.machines: {quantity(options.machines, 'machine')} of {quantity(each, 'process')}"
        )
        if options.machine_rank >= options.machines:
            raise RunError(
                "LS7200",
                f"launch.machine_rank: {options.machine_rank} must be less than launch.machines "
                f"({options.machines}); ranks count from 0",
            )
        command = [sys.executable, "-m", MODULE]
        if options.config_file is not None:
            command.append(f"--config_file={options.config_file}")
        command += [f"--num_machines={options.machines}", f"--num_processes={total}"]
        command += ["--multi_gpu"] if total > 1 else []  # also on CPUs: --cpu always starts one process
        if options.machines > 1:
            host, port = self.rendezvous(options)
            command += [f"--machine_rank={options.machine_rank}", "--rdzv_backend=static"]
            command += [f"--main_process_ip={host}", f"--main_process_port={port}"]
        elif total > 1:
            command.append("--main_process_port=0")  # any free port
        command += ["--mixed_precision=no", "--dynamo_backend=no", "--num_cpu_threads_per_process=1"]
        path = str(run.folder / "launch" / f"machine-{options.machine_rank}.yaml")
        command += ["--module", "lockstep", "train", path]
        variables = {PLANNED_SIZE: str(total), job_record.VARIABLE: "accelerate", "TOKENIZERS_PARALLELISM": "false"}
        if not gpus_of(run.launch):
            variables["ACCELERATE_USE_CPU"] = "1"
        notes = [
            "lockstep sets precision and threads itself; --mixed_precision and --num_cpu_threads_per_process change "
            "nothing here"
        ]
        if options.machines > 1:
            notes.append(f"start the same command on {options.machines} machines, with launch.machine_rank=0, 1, ...")
        return LaunchPlan(run, total, command, variables, {path: run.dump()}, notes)

    def rendezvous(self, options: Accelerate.Options) -> tuple[str, int]:
        """Return host and port of machine 0. Errors: `RunError`."""
        if options.rendezvous is None:
            raise RunError(
                "LS7201", "launch.rendezvous: missing; set host:port of machine 0, the same value on every machine"
            )
        with network.under_key("launch.rendezvous"):
            return network.endpoint(options.rendezvous)

    def leads(self, plan: LaunchPlan) -> bool:
        return bool(self.options(plan.launch).machine_rank == 0)

    def _ranks_here(self, plan: LaunchPlan) -> int:
        """Number of ranks on this machine; the same on every machine."""
        return int(plan.processes // self.options(plan.launch).machines)

    def memory(self, plan: LaunchPlan) -> float | None:
        return memory_here(plan, self._ranks_here(plan))  # assumes equal machines

    def start(self, plan: LaunchPlan, words: Sequence[str] = TRAIN) -> int:
        if importlib.util.find_spec("accelerate") is None:
            raise RunError(
                "LS7202", "launch.name: accelerate is not installed: pip install 'lockstep-train[accelerate]'"
            )
        check_gpus(plan.launch, self._ranks_here(plan))
        self.check_address(plan.launch)
        if plan.processes > 1:
            machine_limits.check_open_files(self._ranks_here(plan))
            machine_limits.check_threads(self._ranks_here(plan))
            if self.options(plan.launch).machines == 1:
                machine_limits.check_loopback(LOOPBACK)
        write_files(plan)
        for left in range(plan.launch.max_restarts, -1, -1):
            status, stop_requested = once(plan, words)
            if status != 1 or stop_requested or not left:
                return status
            where = "from the last checkpoint" if newest_whole(plan.folder) is not None else "from the start"
            error(
                coded("LS7203", f"accelerate launch has failed; restarting {where} ({quantity(left, 'restart')} left)")
            )
        return 1

    def check_address(self, launch: LaunchSection) -> None:
        """Check that the rendezvous address is machine 0's, and reachable from the others. Errors: `RunError`."""
        options = self.options(launch)
        if options.machines == 1:
            return
        host, port = self.rendezvous(options)
        with network.under_key("launch.rendezvous"):
            own = network.route_to(host) == network.address_of(host)
            if own != (options.machine_rank == 0):
                is_its = "is this machine's" if own else "is not this machine's"
                raise RunError(
                    "LS7204",
                    f"launch.rendezvous: {host} {is_its}, but launch.machine_rank is {options.machine_rank}; "
                    "machine 0 must be the machine with that address",
                )
            if not own:
                network.reach(host, port, launch.timeout_s, error)
            elif not network.holds(host, port):
                raise RunError(
                    "LS7205",
                    f"launch.rendezvous: port {port} of {host} is in use, perhaps by a process of an earlier job; "
                    "stop that process, or use another port",
                )


def once(plan: LaunchPlan, words: Sequence[str]) -> tuple[int, bool]:
    """Run the command to its end, forwarding stop signals.

    Returns the exit status of the ranks (1 if they left none), and whether a stop was requested."""
    with tempfile.TemporaryDirectory(prefix="lockstep-status-") as folder:
        answer = Path(folder) / "status"
        environment = {**os.environ, **plan.variables, STATUS: str(answer), JOB_WORDS: " ".join(words)}
        if plan.job is not None:
            (resolved := Path(folder) / "job.json").write_text(plan.job.dump(), encoding="utf-8")
            environment[RESOLVED] = str(resolved)
        command = [each if each != MODULE else QUIET_MODULE for each in plan.command]
        # own process group: Ctrl-C reaches only this process, which forwards it once
        process = subprocess.Popen(command, env=environment, process_group=0)
        stop_requested, interrupts = False, Interrupts()

        def forward(number: int, frame: FrameType | None) -> None:
            nonlocal stop_requested
            stop_requested = True
            with suppress(ProcessLookupError):
                if interrupts.again(number):
                    os.killpg(process.pid, signal.SIGKILL)
                    raise KeyboardInterrupt
                process.send_signal(signal.SIGTERM)

        with handled(forward):
            code = process.wait()
        with suppress(OSError, ValueError):
            return int(answer.read_text()), stop_requested
        if stop_requested and newest_whole(plan.folder) is not None:
            return STOPPED, stop_requested
        return min(code, 1) if code >= 0 and not stop_requested else 1, stop_requested
