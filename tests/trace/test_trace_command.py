"""`lockstep trace`, `diff`, `verify` and `report` on commands, as a user types them. Starts processes."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from support.command import LOCKSTEP, ended, start, start_anew
from support.forked import FORK_TRACED
from support.places import TESTS

pytestmark = pytest.mark.processes

LOOP = TESTS / "museum" / "loop.py"
PLAIN = [sys.executable, str(LOOP), "--batch", "32", "--epochs", "1"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def call(words: list[str], folder: Path, **variables: str) -> tuple[int, str, str]:
    return ended(start(words, folder, folder / "cache", **variables), 250)


def test_torchrun_is_compared_with_one_process_and_a_fault_is_named(tmp_path: Path) -> None:
    """The control is the fault: gradients that are summed."""
    ddp = [*TORCHRUN, str(LOOP), "--batch", "16", "--epochs", "1", "--wrap", "hand"]
    for name, command in (("a", PLAIN), ("b", ddp), ("c", [*ddp, "--fault", "summed"])):
        # from its first import on: test_trace_launchers.py, and below
        status, out, err = call([*LOCKSTEP, "trace", "-o", name, "--", *command], tmp_path, **{FORK_TRACED: "1"})
        assert status == 0, err
        assert "steps 4" in out
        assert "4 steps of AdamW" in err
    same = call([*LOCKSTEP, "diff", "a", "b"], tmp_path)
    assert same[0] == 0, same
    assert "within rounding" in same[1]
    wrong = call([*LOCKSTEP, "diff", "a", "c"], tmp_path)
    assert wrong[0] == 1, wrong
    assert ", gradient:" in wrong[1]
    assert "summed over ranks" in wrong[1]
    assert call([*LOCKSTEP, "report", "a", "c"], tmp_path)[0] == 0
    text = (tmp_path / "c" / "report.html").read_text()
    assert "summed over ranks" in text
    assert "Differences of gradients" in text  # though they part in the first step


def test_a_script_keeps_its_weights_status_and_output(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import importlib.util, sys\n"
        "assert importlib.util.find_spec('torch')\n"  # as transformers asks, before anything imports it
        "import torch\n"
        "torch.manual_seed(0)\n"
        "model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.2), torch.nn.Linear(4, 1))\n"
        "optimizer = torch.optim.AdamW(model.parameters())\n"
        "for _ in range(5):\n"
        "    optimizer.zero_grad()\n"
        "    model(torch.randn(3, 4)).square().mean().backward()\n"
        "    optimizer.step()\n"
        "print([p.tolist() for p in model.parameters()])\n"
        "sys.exit(7)\n"
    )
    plain = call([sys.executable, "train.py"], tmp_path)
    script = [sys.executable, "-W", "always::ResourceWarning", "train.py"]
    traced = call([*LOCKSTEP, "trace", "-o", "t", "--", *script], tmp_path)
    assert (traced[0], traced[1]) == (plain[0], plain[1])
    assert plain[0] == 7
    assert "5 steps of AdamW" in traced[2]
    assert "unclosed file" not in traced[2]
    (tmp_path / "nothing.py").write_text("import torch\nprint('no training')\n")
    status, out, err = call([*LOCKSTEP, "trace", "-o", "n", "--", sys.executable, "nothing.py"], tmp_path)
    assert (status, out) == (0, "no training\n")
    assert "no optimizer step was seen" in err
    assert call([*LOCKSTEP, "trace", "-o", "x", "--", "no-such-command"], tmp_path)[0] == 2
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    status, _, err = call([*LOCKSTEP, "trace", "-o", "full", "--", "true"], tmp_path)
    assert status == 2
    assert "is not a trace" in err


def test_the_records_of_a_killed_process_remain(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import lockstep_trace, torch, time, pathlib\n"
        "model = torch.nn.Linear(4, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for step in range(3):\n"
        "    optimizer.zero_grad()\n"
        "    model(torch.ones(3, 4)).square().mean().backward()\n"
        "    optimizer.step()\n"
        "pathlib.Path('ready').touch()\n"
        "time.sleep(300)\n"
    )
    command = [sys.executable, "train.py"]
    process = start_anew(command, tmp_path, tmp_path / "cache", LOCKSTEP_TRACE=str(tmp_path / "t"))
    deadline = time.monotonic() + 200
    while not (tmp_path / "ready").exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    lines = [json.loads(line) for line in next((tmp_path / "t").glob("rank-*.jsonl")).read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "step"] == [0, 1, 2]
    status, out, _ = call([*LOCKSTEP, "diff", "t", "t", "--exact"], tmp_path)
    assert status == 0
    assert "the same bits in all 3 common steps" in out
