"""A task of `srun`: its rank, the world size and the rendezvous address, without a wrapper script.

In: SLURM's variables. Out: a `SlurmTask`, and torchrun's environment variables. Expands node lists such as
`gpu[01-03,07]` without calling SLURM. Imports no torch.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lockstep.config.run import RunError

# Step ids from here on are reserved by SLURM: batch script, interactive shell.
_SPECIAL = 0xFFFFFFF0
# Below the ephemeral ports.
_PORTS = range(20_000, 32_000)
_LOST_S = 600.0  # until SLURM detects a node failure (SlurmdTimeout: 300 s by default)
_ASK_S = 3.0


@dataclass(frozen=True)
class SlurmTask:
    """One task of a job step."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    node: int  # index among the step's nodes
    nodes: int
    host: str  # address of the node of task 0
    port: int  # equal for all tasks of a step, different for the next step
    job: str
    step: str  # JOB.STEP, as SLURM's programs expect it

    def variables(self) -> dict[str, str]:
        """Return torchrun's environment variables of this task."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_size),
            "MASTER_ADDR": self.host,
            "MASTER_PORT": str(self.port),
        }


def task_of(environ: Mapping[str, str]) -> SlurmTask | None:
    """Return this process's task, or None outside a job step. Errors: `RunError` for inconsistent variables."""
    if not {"SLURM_STEP_ID", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"} <= environ.keys():
        return None  # also in the batch script and a shell of salloc, which have SLURM_PROCID and SLURM_NTASKS
    try:
        job, step = int(environ["SLURM_JOB_ID"]), int(environ["SLURM_STEP_ID"])
        if step >= _SPECIAL:
            return None
        node = int(environ["SLURM_NODEID"])
        names = hosts(environ["SLURM_STEP_NODELIST"])
        return SlurmTask(
            rank=int(environ["SLURM_PROCID"]),
            size=int(environ["SLURM_STEP_NUM_TASKS"]),
            local_rank=int(environ["SLURM_LOCALID"]),
            local_size=counts(environ["SLURM_STEP_TASKS_PER_NODE"])[node],
            node=node,
            nodes=len(names),
            host=address(names[0]),
            port=_PORTS[(job * 31 + step) % len(_PORTS)],
            job=str(job),
            step=f"{job}.{step}",
        )
    except (KeyError, ValueError, IndexError) as error:
        raise RunError(
            "LS7350",
            f"this looks like a task of srun, but SLURM's variables are invalid ({error!r}); if this is "
            "not a SLURM job, unset SLURM_STEP_ID",
        ) from None


def see_to_script(task: SlurmTask, status_file: Path, requeue: bool, say: Callable[[str], None]) -> None:
    """Requeue (or cancel) a job whose first node has failed, after the ranks on this node have failed.

    The job's script ran on that node; with --no-kill, SLURM would keep the job without a script until its time limit.
    Does nothing if the first node has written `status_file`, if the store answers, or while SLURM lists the node in the
    job."""
    if shutil.which("squeue") is None:
        return
    first, until = hosts(os.environ["SLURM_STEP_NODELIST"])[0], time.monotonic() + _LOST_S
    while time.monotonic() < until and not (status_file.exists() and status_file.stat().st_size) and not _listens(task):
        words = ["squeue", "-h", "-j", task.job, "-o", "%T %N"]
        state, _, nodes = (
            subprocess.run(words, capture_output=True, encoding="utf-8", errors="replace", check=False)
            .stdout.strip()
            .partition(" ")
        )
        if state != "RUNNING":
            return
        if nodes and first not in hosts(nodes):
            then = "the job goes back to the queue" if requeue else "the job ends (launch.requeue: false)"
            say(f"node {first} failed, and with it the job's script and the rendezvous store; {then}")
            subprocess.run(["scontrol", "requeue", task.job] if requeue else ["scancel", task.job], check=False)
            return
        time.sleep(_ASK_S)


def _listens(task: SlurmTask) -> bool:
    """Return whether the job's store is reachable."""
    try:
        with socket.create_connection((task.host, task.port), timeout=5):
            return True
    except OSError:
        return False


def hosts(text: str) -> list[str]:
    """Expand a node list such as `gpu[01-03,07],login`. Errors: `ValueError`."""
    host_names: list[str] = []
    for part in re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", text):
        names = [""]
        for plain, ranges in re.findall(r"([^\[\]]+)|\[([^\]]*)\]", part):
            names = [name + end for name in names for end in ([plain] if plain else _numbers(ranges))]
        host_names += names
    if not host_names:
        raise ValueError(f"{text!r} is not a list of nodes")
    return host_names


def _numbers(ranges: str) -> list[str]:
    numbers: list[str] = []
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        numbers += [f"{n:0{len(first)}d}" for n in range(int(first), int(last or first) + 1)]
    return numbers


def counts(text: str) -> list[int]:
    """Expand a list of tasks per node such as `2(x3),1`. Errors: `ValueError`."""
    task_counts: list[int] = []
    for part in text.split(","):
        if (match := re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)) is None:
            raise ValueError(f"{text!r} is not a list of counts")
        task_counts += [int(match[1])] * int(match[2] or 1)
    return task_counts


def address(node: str) -> str:
    """Return a resolvable name or address of a node: its name, else the address that SLURM uses."""
    try:
        socket.getaddrinfo(node, None)
        return node
    except OSError:
        with suppress(OSError):  # no scontrol, as in a container
            words = ["scontrol", "-o", "show", "node", node]
            reply = subprocess.run(words, capture_output=True, encoding="utf-8", errors="replace", check=False)
            if match := re.search(r"\bNodeAddr=(\S+)", reply.stdout):
                return match[1]
        return node
