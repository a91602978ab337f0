"""While the model is being built: signals, deadlocked ranks, and weights that are not compared."""

import signal
import time
from pathlib import Path

import pytest

from support.command import LOCKSTEP, ended, start, until

pytestmark = pytest.mark.processes

CODE = """
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist


def build():
    if any(frame.name == "build_session" for frame in traceback.extract_stack()):  # a rank, not the checks before it
        WAIT
    return torch.nn.Linear(3, 1)


def data():
    inputs = torch.randn(64, 3)
    return torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))


def loss(outputs, answers):
    return torch.nn.functional.mse_loss(outputs, answers)
"""
SLEEPS = """Path("building").touch()
        time.sleep(120)"""
DEADLOCK = """groups = [dist.new_group([0, 1]) for _ in range(2)]
        dist.all_reduce(torch.ones(1), group=groups[dist.get_rank()])"""
RUN = """
task: {name: module, model: slow.build, data: slow.data, loss: slow.loss}
output: out
steps: 2
batch_size: 8
launch: {device: cpu, threads: 1, PROCESSES}
"""


def write(folder: Path, wait: str, launch: str) -> list[str]:
    (folder / "slow.py").write_text(CODE.replace("WAIT", wait))
    (folder / "run.yaml").write_text(RUN.replace("PROCESSES", launch))
    return [*LOCKSTEP, "train", "run.yaml"]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGINT, 130)])
def test_a_stop_signal_ends_one_process_that_builds(number: int, status: int, tmp_path: Path, cache: Path) -> None:
    process = start(write(tmp_path, SLEEPS, "processes: 1"), tmp_path, cache)
    until((tmp_path / "building").exists, "building", process)
    asked = time.monotonic()
    process.send_signal(number)
    code, _, err = ended(process, 60)
    assert time.monotonic() - asked < 60  # building the model would take 120 s
    assert code == status, err
    assert "Traceback" not in err
    assert number == signal.SIGINT or "ended by SIGTERM while nothing was being trained" in err


def test_a_stop_signal_ends_ranks_that_build(tmp_path: Path, cache: Path) -> None:
    process = start(write(tmp_path, SLEEPS, "processes: 2"), tmp_path, cache)
    until((tmp_path / "building").exists, "building", process)
    process.send_signal(signal.SIGTERM)
    code, _, err = ended(process, 60)
    assert code == 1, err
    assert "LS7317" in err
    assert "Traceback" not in err


def test_ranks_that_wait_for_one_another_are_named(tmp_path: Path, cache: Path) -> None:
    process = start(write(tmp_path, DEADLOCK, "processes: 2, hang_timeout_s: 4"), tmp_path, cache)
    code, _, err = ended(process, 120)
    assert code == 1, err
    assert "no progress for 4 s" in err
    assert "building the model" in err
    assert "slow.py" in err  # the stack shows where


def test_a_model_that_takes_longer_to_build_is_no_hang(tmp_path: Path, cache: Path) -> None:
    wait = "time.sleep(6 * dist.get_rank())"
    process = start(write(tmp_path, wait, "processes: 2, hang_timeout_s: 2"), tmp_path, cache)
    code, _, err = ended(process, 120)
    assert code == 0, err
