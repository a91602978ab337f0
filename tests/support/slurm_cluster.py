"""A real SLURM cluster of two nodes on this machine, for a test session: one slurmctld and two slurmd in a folder.

In: an empty folder. Out: `SLURM_CONF` for SLURM's programs; `stop` ends everything that was started, by process id.
Needs root and Debian's slurm-wlm; no systemd, munge or cgroups.
"""

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from support.forked import programs
from support.harness import LEAN
from support.places import TESTS_PATH

CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthType=auth/none
CredType=cred/none
MpiDefault=none
FirstJobId={ports[0]}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=1,requeue_setup_env_fail
ReturnToService=2
SlurmdTimeout=5
KillWait=10
MinJobAge=300
JobRequeue=1
JobCompType=jobcomp/filetxt
JobCompLoc={folder}/jobs.txt
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
NodeName=n[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{ports[1]}-{ports[2]}] CPUs=4 RealMemory=1000
PartitionName=main Nodes=n[1-2] Default=YES PriorityTier=1 GraceTime={grace_s} MaxTime=INFINITE OverSubscribe=NO
PartitionName=urgent Nodes=n[1-2] PriorityTier=10 PreemptMode=OFF MaxTime=INFINITE
"""


def missing() -> str | None:
    """Reason why there can be no cluster here, or None."""
    if os.geteuid() != 0:
        return "SLURM's daemons need root here"
    lacking = [name for name in ("slurmctld", "slurmd", "sbatch", "srun", "scontrol") if shutil.which(name) is None]
    return f"needs Debian's slurm-wlm ({lacking[0]} is missing)" if lacking else None


class Cluster:
    """Two nodes of 4 CPUs; partition `main` is preempted by `urgent` after `grace_s` seconds."""

    def __init__(self, folder: Path, grace_s: int = 60) -> None:
        self.folder = folder
        self.config = folder / "slurm.conf"
        self.python = str(programs(folder / "programs") / "python")  # an interpreter with all imports
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        for name in ("state", "spool-n1", "spool-n2"):
            (folder / name).mkdir(parents=True)
        ports = _free_ports()
        text = CONFIG.format(host=socket.gethostname().split(".")[0], folder=folder, ports=ports, grace_s=grace_s)
        self.config.write_text(text)
        path = os.pathsep.join([LEAN, TESTS_PATH, *filter(None, [os.environ.get("PYTHONPATH")])])
        self.variables = {"SLURM_CONF": str(self.config), "PYTHONPATH": path}
        try:
            self.start("slurmctld", ["slurmctld", "-D", "-c"])
            for node in ("n1", "n2"):
                self.start(node, ["slurmd", "-D", "-N", node])
            self.until(lambda: self.ask("sinfo", "-h", "-N", "-p", "main", "-o", "%T").split() == ["idle"] * 2, "nodes")
        except BaseException:
            self.stop()
            raise

    def start(self, name: str, command: list[str]) -> None:
        """Start a daemon in the foreground, as our child."""
        with open(self.folder / f"{name}.out", "ab") as out:
            self._daemons[name] = subprocess.Popen(
                [*command, "-f", str(self.config)], env=os.environ | self.variables, stdout=out, stderr=out
            )

    def start_node(self, node: str) -> None:
        """Restart a killed node."""
        self.start(node, ["slurmd", "-D", "-N", node])

    def kill_node(self, node: str) -> None:
        """Kill a node like a power loss: slurmd, its stepds and their tasks at once."""
        os.kill(self._daemons.pop(node).pid, signal.SIGKILL)
        spool, stepds, tasks = str(self.folder / f"spool-{node}"), set(), []
        for pid in _processes():
            try:
                files = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
                variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if _name(pid) == "slurmstepd" and any(file.startswith(spool) for file in files):
                stepds.add(pid)
            elif f"SLURMD_NODENAME={node}".encode() in variables and f"SLURM_CONF={self.config}".encode() in variables:
                tasks.append(pid)
                if _name(parent := _parent(pid)) == "slurmstepd":
                    stepds.add(parent)
        for pid in [*stepds, *tasks]:  # a surviving stepd would report to the controller how its task ended
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)

    def ask(self, *command: str) -> str:
        """Output of a SLURM program."""
        return subprocess.run(
            command, env=os.environ | self.variables, capture_output=True, text=True, check=False, timeout=60
        ).stdout

    def field(self, job: str, name: str) -> str:
        """A field of `scontrol show job`: JobState, ExitCode, Restarts, Reason, ..."""
        words = self.ask("scontrol", "-o", "show", "job", job).split()
        return next((word.partition("=")[2] for word in words if word.startswith(f"{name}=")), "")

    def hurry(self, job: str) -> None:
        """Skip the two-minute wait of a requeued job. Not at once: a node refuses credentials from the second in which
        it ended the previous job."""
        time.sleep(2)
        self.ask("scontrol", "update", f"JobId={job}", "StartTime=now")

    def until(self, true: Callable[[], bool], what: str, seconds: float = 120) -> None:
        """Wait for a condition. The limit only makes failures end."""
        limit = time.monotonic() + seconds
        while not true():
            if time.monotonic() >= limit:
                logs = "\n".join(f"{p.name}: {p.read_text()[-800:]}" for p in self.folder.glob("slurm*.log"))
                raise AssertionError(f"waited in vain for {what}\n{self.ask('squeue')}\n{logs}")
            time.sleep(0.5)  # most conditions start a program

    def stop(self) -> None:
        """End all jobs and daemons."""
        if "slurmctld" in self._daemons:
            self.ask("scancel", "--full", "--signal=KILL", "--state=RUNNING", "-u", "root")
            self.ask("scancel", "-u", "root")
            limit = time.monotonic() + 15
            while self.ask("squeue", "-h").strip() and time.monotonic() < limit:
                time.sleep(0.2)
        for daemon in reversed(self._daemons.values()):
            daemon.terminate()
        for daemon in self._daemons.values():
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self._daemons.clear()


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _processes() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _free_ports() -> list[int]:
    """Ports for slurmctld and two adjacent ones for the nodes, below those that the system assigns."""
    first = 14_000 + 4 * (os.getpid() % 1000)
    for start in range(first, 19_000, 4):
        try:
            for port in range(start, start + 3):
                with socket.socket() as probe:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    probe.bind(("", port))
            return list(range(start, start + 3))
        except OSError:
            continue
    raise OSError("no free ports")
