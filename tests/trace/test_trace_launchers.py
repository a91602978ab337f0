"""Ranks that launchers start are traced through the environment, and train what one process trains. Starts
processes."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep_trace.compare_traces import compare_traces
from lockstep_trace.findings import findings
from lockstep_trace.read import read
from support import slurm_cluster
from support.command import free_port
from support.harness import lockstep_environment
from support.marks import long, slow

pytestmark = pytest.mark.processes

SCRIPT = str(Path(__file__).parent / "launched.py")
PYTHON = sys.executable
ACCELERATE = "--multi_gpu --num_processes 2 --num_machines 1 --mixed_precision no --dynamo_backend no"
LAUNCHERS = {
    "torchrun": [PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", SCRIPT, "env"],
    "spawn": [PYTHON, SCRIPT, "spawn"],
    "accelerate": [PYTHON, "-m", "accelerate.commands.launch", *ACCELERATE.split(), SCRIPT, "env"],
    "deepspeed": [PYTHON, "-m", "deepspeed.launcher.runner", "--num_gpus", "2", SCRIPT, "env"],
    "ray": [PYTHON, SCRIPT, "ray"],
}


def traced(folder: Path, command: list[str], variables: dict[str, str] | None = None) -> None:
    environment = lockstep_environment(folder.parent / "cache") | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    environment |= {"ACCELERATE_USE_CPU": "1", "DS_ACCELERATOR": "cpu", "RAY_AUTH_MODE": "disabled"} | (variables or {})
    environment["RAY_worker_niceness"] = "0"  # 15 without it: on a busy machine its workers import torch for minutes
    words = [PYTHON, "-m", "lockstep", "trace", "-o", str(folder), "--", *command, str(free_port())]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-2000:]


def of_two_ranks(folder: Path, reference: Path) -> None:
    trace = read(folder)
    assert (len(trace.ranks), trace.world, trace.steps(0)) == (2, 2, [0, 1, 2])
    assert findings(trace) == []
    assert compare_traces(read(reference), trace).first is None


@pytest.fixture(scope="module", name="reference")
def _reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("launchers") / "alone"
    traced(folder, [PYTHON, SCRIPT, "alone"])
    return folder


@pytest.mark.timeout(600)
# Ranks of torch elastic are traced from their first import on in test_trace_bits: torchrun's, Accelerate's and
# DeepSpeed's by hand
@pytest.mark.parametrize("name", ["spawn", slow("ray"), *map(long, ("deepspeed", "torchrun", "accelerate"))])
def test_ranks_of_a_launcher_are_traced(name: str, reference: Path, tmp_path: Path) -> None:
    if name in ("accelerate", "deepspeed", "ray") and importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    traced(tmp_path / "a", LAUNCHERS[name])
    of_two_ranks(tmp_path / "a", reference)


@pytest.mark.cluster
@pytest.mark.timeout(600)
@pytest.mark.skipif(slurm_cluster.missing() is not None, reason=str(slurm_cluster.missing()))
def test_tasks_of_srun_are_traced(reference: Path, tmp_path: Path) -> None:
    cluster = slurm_cluster.Cluster(tmp_path / "slurm")
    try:
        srun = shutil.which("srun")
        assert srun is not None
        command = [srun, "-N", "2", "--ntasks-per-node", "1", PYTHON, SCRIPT, "srun"]
        traced(tmp_path / "a", command, {"SLURM_CONF": str(cluster.config), "SLURM_EXPORT_ENV": "ALL"})
    finally:
        cluster.stop()
    of_two_ranks(tmp_path / "a", reference)
    assert os.path.exists(tmp_path / "a" / "trace.json")
