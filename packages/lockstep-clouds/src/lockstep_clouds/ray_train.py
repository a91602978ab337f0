"""Ray: workers of Ray Train, on an existing cluster or on this machine. `launch.name` is `ray`.

In: `launch: {name: ray, workers: 8, address: auto, ...}`. Out: an exit status. Ray places the workers, detects a failed
one and restarts all of them, `launch.max_restarts` times; they resume from the newest checkpoint in OUTPUT, which all
nodes must see.

A Ray worker runs its function in a thread, where Python receives no signals. So each worker starts its rank as a child
process and waits for it. Ray's TorchTrainer forms no process group: the rank does that.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any, Literal

from pydantic import Field

from lockstep.config.errors import BAD, DONE, FAILED, STOPPED, coded
from lockstep.config.redaction import one_line
from lockstep.config.run import Run, RunError
from lockstep.config.sections import Positive, Section
from lockstep.distributed import network
from lockstep.distributed.job_record import TRAIN
from lockstep.launchers.launcher import Launcher, LaunchPlan
from lockstep.launchers.local import processes_of
from lockstep.track.console import Console, error

# Command of the child process. It dies with the Ray worker (PR_SET_PDEATHSIG), so that no rank continues alone.
RANK = (
    "import sys; sys.platform == 'linux' and __import__('ctypes').CDLL(None).prctl(1, 9); "
    "from lockstep.training.rank import main_of_file; main_of_file(sys.argv[1], sys.argv[2:])"
)


class Ray(Launcher):
    """Launcher for Ray Train."""

    class Options(Section):
        """Settings of Ray."""

        address: str | None = Field(
            None, description="auto or host:port of a cluster; default: Ray starts on this machine"
        )
        workers: Positive | None = Field(None, description="total number of processes; default: launch.processes")
        cpus: Positive = Field(1, description="CPU cores per worker")
        placement: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = Field(
            "PACK", description="fill nodes in sequence, or spread the workers over them"
        )

    def plan(self, run: Run) -> LaunchPlan:
        options = self.options(run.launch)
        workers = options.workers or processes_of(run)
        run.check_shared(workers, f"launch.workers: {workers} workers")
        if run.launch.device == "cuda" and run.launch.processes_per_gpu > 1:
            raise RunError("LS7360", "launch.processes_per_gpu: Ray gives each worker its own GPU; remove it")
        notes = [
            f"{name}({', '.join(f'{k}={v!r}' for k, v in values.items())})"
            for name, values in ray_arguments(run, workers, options).items()
        ]
        notes.append(f"cluster: {options.address or 'one that Ray starts on this machine'}; every node must see OUTPUT")
        return LaunchPlan(run, workers, [sys.executable, "-c", RANK, str(run.folder / "run.yaml")], notes=notes)

    def check(self, plan: LaunchPlan) -> None:
        """Check that the address accepts connections: Ray itself would retry for minutes."""
        address = self.options(plan.launch).address
        if address in (None, "auto", "local"):
            return
        try:
            network.reach(*network.endpoint(address.rpartition("//")[2]), limit_s=5, say=Console(True).say)
        except network.NetworkError as caught:
            raise unanswered(address, str(caught)) from None

    def start(self, plan: LaunchPlan, words: Sequence[str] = TRAIN) -> int:
        os.environ["RAY_CHDIR_TO_TRIAL_DIR"] = "0"  # paths of the run file are relative to this folder
        os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")
        try:
            import ray
        except ImportError:
            raise RunError(
                "LS7361", "launch.name: ray needs Ray Train, which is not installed: pip install 'lockstep-train[ray]'"
            ) from None
        options = self.options(plan.launch)
        mine = connect(options.address)
        board: Any = ray.remote(num_cpus=0)(RayBoard).remote()
        config = {
            "path": str((plan.folder / "run.yaml").resolve()),
            "folder": os.getcwd(),
            "job": list(words),
            "board": board,
            "secret": network.secret_or_new(),
        }
        before = {n: signal.signal(n, _asking(board)) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
        try:
            status = fit(ray_arguments(plan.run, plan.processes, options), config)
            return status if status is not None else outcome(ray.get(board.statuses.remote()))
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            if mine:
                ray.shutdown()


def ray_arguments(run: Run, workers: int, options: Any) -> dict[str, dict[str, Any]]:
    """Arguments of Ray Train's classes."""
    gpu = run.launch.device == "cuda"
    return {
        "ScalingConfig": {
            "num_workers": workers,
            "use_gpu": gpu,
            "resources_per_worker": {"CPU": options.cpus} | ({"GPU": 1} if gpu else {}),
            "placement_strategy": options.placement,
        },
        "FailureConfig": {"max_failures": run.launch.max_restarts},
        "RunConfig": {"name": "ray", "storage_path": str(run.folder.resolve())},
    }


def connect(address: str | None) -> bool:
    """Connect to a cluster, or start one here. Returns True if this call connected, False if Ray
    already was. Errors: `RunError`."""
    import logging

    import ray

    if ray.is_initialized():
        return False
    try:
        ray.init(address=address or "local", logging_level=logging.ERROR)
    except Exception as caught:  # ConnectionError, RuntimeError, errors of gRPC
        reason = one_line(caught, 300)
        if address is None:
            raise RunError("LS7362", f"launch.name: ray: Ray did not start on this machine: {reason}") from None
        raise unanswered(address, reason) from None
    return True


def unanswered(address: str, why: str) -> RunError:
    return RunError(
        "LS7363",
        f"launch.address: no Ray cluster answers at {address}: {why}. Start one with `ray start --head`; if "
        "it uses tokens, set RAY_AUTH_MODE and RAY_AUTH_TOKEN here too",
    )


def fit(arguments: dict[str, dict[str, Any]], config: dict[str, Any]) -> int | None:
    """Run the workers in a thread, so that this thread receives signals. Returns a status if Ray gives up."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.backend import Backend
    from ray.train.torch import TorchConfig, TorchTrainer

    class NoGroup(TorchConfig):
        """A backend without a process group: ranks form their own."""

        @property
        def backend_cls(self) -> type[Backend]:
            return Backend

    failures = FailureConfig(**arguments["FailureConfig"])
    trainer = TorchTrainer(
        work,
        train_loop_config=config,
        torch_config=NoGroup(),
        scaling_config=ScalingConfig(**arguments["ScalingConfig"]),
        run_config=RunConfig(**arguments["RunConfig"], failure_config=failures),
    )
    caught: list[BaseException] = []

    def run() -> None:
        try:
            trainer.fit()
        except BaseException as failure:
            caught.append(failure)

    thread = threading.Thread(target=run, name="lockstep-ray", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.2)
    if caught:
        error(coded("LS7364", f"Ray gave up: {one_line(caught[0], 600)}"))
        return FAILED
    return None


def outcome(statuses: list[int]) -> int:
    """Combine the exit statuses of the ranks: `BAD` if any rank rejected the run file, else the largest."""
    return BAD if BAD in statuses else max(statuses, default=FAILED)


def _asking(board: Any) -> Any:
    def ask(number: int, frame: FrameType | None) -> None:
        board.tell.remote("stop")
        Console(True).say("stop requested: the ranks save and end")

    return ask


class RayBoard:
    """Ray actor shared by all workers and this process: requests to the ranks, and their exit statuses."""

    def __init__(self) -> None:
        self.word, self.ended = "", dict[int, int]()

    def tell(self, word: str) -> None:
        """Set a request. `stop`: save and end. `bad`: a rank rejected the run file, so the others must not wait for
        it."""
        self.word = self.word if self.word == "bad" else word

    def status_word(self) -> str:
        return self.word

    def end(self, rank: int, status: int) -> None:
        self.ended[rank] = status

    def statuses(self) -> list[int]:
        return [self.ended[rank] for rank in sorted(self.ended)]


# -- in a worker of Ray ----------------------------------------------------------------------------------------------


def work(config: dict[str, Any]) -> None:
    """Run one worker: start its rank with torchrun's environment variables, pass on a stop request, and report its
    exit. Raises to make Ray restart all workers."""
    import ray
    import ray.train
    from ray.train.collective import broadcast_from_rank_zero

    from lockstep.distributed import job_record, network

    context, board = ray.train.get_context(), config["board"]
    rank = context.get_world_rank()
    address = ray.util.get_node_ip_address()
    host, port = broadcast_from_rank_zero([address, free_port()])
    variables = {
        "RANK": rank,
        "WORLD_SIZE": context.get_world_size(),
        "LOCAL_RANK": context.get_local_rank(),
        "LOCAL_WORLD_SIZE": context.get_local_world_size(),
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
    }
    environment = os.environ | {name: str(value) for name, value in variables.items()} | {job_record.VARIABLE: "ray"}
    environment[network.SECRET_VARIABLE] = config["secret"]
    interface = network.interface_to(host, several=context.get_world_size() > context.get_local_world_size())
    if interface is not None:
        environment.setdefault("GLOO_SOCKET_IFNAME", interface)
    command = [sys.executable, "-c", RANK, config["path"], *config["job"]]
    child = subprocess.Popen(command, cwd=config["folder"], env=environment)
    passed_on = False
    while child.poll() is None:
        time.sleep(0.5)
        word = ray.get(board.status_word.remote())
        if word == "bad":
            child.kill()
        elif word == "stop" and not passed_on:
            child.send_signal(signal.SIGTERM)
            passed_on = True
    status = child.wait()
    if status == BAD or ray.get(board.status_word.remote()) == "bad":
        ray.get([board.tell.remote("bad"), board.end.remote(rank, BAD)])
    elif status in (DONE, STOPPED):
        ray.get(board.end.remote(rank, status))
    else:
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        raise RuntimeError(f"rank {rank} (pid {child.pid}) on {socket.gethostname()} {how}")


def free_port() -> int:
    """Return a free port of this machine."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
