"""Assumptions about `accelerate launch`, whose main function its launcher calls."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest

from support.assumed import rests_on_it


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`accelerate launch` without a default file of `accelerate config`."""
    pytest.importorskip("accelerate")
    from accelerate.commands import launch

    monkeypatch.setattr(launch, "default_config_file", "/nowhere/default_config.yaml")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return launch


def command(processes: int, *more: str) -> list[str]:
    """The options that lockstep passes."""
    own = ["accelerate-launch", *more, f"--num_processes={processes}", *(["--multi_gpu"] if processes > 1 else [])]
    own += ["--mixed_precision=no", "--dynamo_backend=no", "--num_cpu_threads_per_process=1"]
    return [*own, "--module", "lockstep", "train", "run.yaml"]


@rests_on_it("src/lockstep/launchers/accelerate.py", "src/lockstep/launchers/processes/accelerate_launch.py")
def test_accelerate_launch_calls_torch_run_for_several_processes(launch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """main() reads sys.argv. With --multi_gpu, also on a machine without GPUs, it calls torch.distributed.run.run in
    its own process with the number of processes per machine (num_processes / num_machines), the machine rank, the
    address and the command. During the call, OMP_NUM_THREADS in os.environ is --num_cpu_threads_per_process. Exceptions
    of run, SignalException included, propagate out of main."""
    import torch.distributed.run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException

    calls: list[Any] = []

    def run(args: Any) -> None:
        calls.append((args, dict(os.environ)))
        raise SignalException("stopped", 15)  # type: ignore[arg-type]

    monkeypatch.setattr(torchrun, "run", run)
    monkeypatch.setattr(launch, "check_cuda_p2p_ib_support", lambda: True)  # it starts nvidia-smi
    machines = ["--num_machines=2", "--machine_rank=1", "--rdzv_backend=static"]
    machines += ["--main_process_ip=10.0.0.1", "--main_process_port=4711"]
    for processes, more in ((2, ["--num_machines=1", "--main_process_port=0"]), (6, machines)):
        monkeypatch.setattr(sys, "argv", command(processes, *more))
        with pytest.raises(SignalException) as caught:
            launch.main()
        assert caught.value.sigval == 15
    (one, variables), (several, _) = calls
    assert (one.nproc_per_node, str(one.nnodes)) in [("2", "1"), ("2", "1:1")]
    assert (one.module, one.training_script, one.training_script_args) == (True, "lockstep", ["train", "run.yaml"])
    assert (several.nproc_per_node, str(several.nnodes), int(several.node_rank)) == ("3", "2", 1)
    address = several.rdzv_endpoint or f"{several.master_addr}:{several.master_port}"
    assert (address, several.rdzv_backend) == ("10.0.0.1:4711", "static")
    assert variables["OMP_NUM_THREADS"] == "1"
    assert "OMP_NUM_THREADS" not in os.environ


@rests_on_it("src/lockstep/launchers/accelerate.py", "src/lockstep/launchers/processes/accelerate_launch.py")
def test_accelerate_runs_a_single_process_as_a_child(launch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """For one process, main() starts python -m MODULE and waits. A nonzero exit status raises CalledProcessError, so
    the command always exits with 1. The child's environment has ACCELERATE_MIXED_PRECISION and no RANK."""
    import subprocess

    started: list[tuple[list[str], dict[str, str]]] = []

    class Child:
        returncode = 0

        def __init__(self, words: list[str], env: dict[str, str]) -> None:
            started.append((words, env))

        def wait(self) -> None:
            self.returncode = 77

    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(launch.subprocess, "Popen", Child)
    monkeypatch.setattr(sys, "argv", command(1, "--num_machines=1"))
    with pytest.raises(subprocess.CalledProcessError) as caught:
        launch.main()
    assert caught.value.returncode == 77
    words, variables = started[0]
    assert words[1:] == ["-m", "lockstep", "train", "run.yaml"]
    assert variables["ACCELERATE_MIXED_PRECISION"] == "no"
    assert "RANK" not in variables


@rests_on_it("src/lockstep/launchers/accelerate.py", "src/lockstep/launchers/start.py")
def test_cpu_starts_a_single_process(launch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """--cpu starts one process even if several are requested. --cpu with --multi_gpu raises, and so does --multi_gpu
    with one process."""
    called: list[str] = []
    monkeypatch.setattr(launch, "simple_launcher", lambda args: called.append("one"))
    monkeypatch.setattr(launch, "multi_gpu_launcher", lambda args: called.append("several"))
    monkeypatch.setattr(sys, "argv", [each for each in command(2, "--cpu") if each != "--multi_gpu"])
    launch.main()
    assert called == ["one"]
    for wrong in (command(2, "--cpu"), command(1, "--multi_gpu")):
        monkeypatch.setattr(sys, "argv", wrong)
        with pytest.raises(ValueError, match="multi_gpu"):
            launch.main()


@rests_on_it("src/lockstep/launchers/processes/accelerate_config.py")
def test_config_files_of_accelerate(launch: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """load_config_from_file reads YAML and JSON and raises for unknown keys. Command line options override the file.
    distributed_type FSDP or DEEPSPEED of a file applies only if the command line names no kind of launcher."""
    file = tmp_path / "config.yaml"
    file.write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nmixed_precision: bf16\nnum_machines: 3\n"
        "num_processes: 12\nuse_cpu: false\ndebug: false\n"
    )
    args, _, _ = launch._validate_launch_command(
        launch.launch_command_parser().parse_args([f"--config_file={file}", *command(2, "--num_machines=1")[1:]])
    )
    assert (args.num_processes, args.num_machines, args.mixed_precision, args.use_fsdp) == (2, 1, "no", False)
    args, _, _ = launch._validate_launch_command(
        launch.launch_command_parser().parse_args([f"--config_file={file}", "script.py"])
    )
    assert (args.num_processes, args.num_machines, args.mixed_precision, args.use_fsdp) == (12, 3, "bf16", True)
