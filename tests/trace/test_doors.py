"""Doors into a training that other code runs: Trainer's callback, and a script behind `-m lockstep_trace`."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import lockstep_trace
from lockstep_trace import tracer
from lockstep_trace.read import read


def test_a_trainer_is_traced_from_its_first_step_to_its_last(tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    model = nn.Linear(4, 1)

    class Loss(Trainer):
        def compute_loss(self, model: nn.Module, inputs: dict, *args: object, **kwargs: object) -> torch.Tensor:
            return model(inputs["x"]).square().mean()  # type: ignore[no-any-return]

    options = {"max_steps": 3, "report_to": [], "use_cpu": True, "save_strategy": "no", "disable_tqdm": True}
    arguments = TrainingArguments(str(tmp_path / "out"), remove_unused_columns=False, **options)
    callback = lockstep_trace.Callback(tmp_path / "t")
    Loss(model, arguments, train_dataset=[{"x": torch.ones(4)}] * 32, callbacks=[callback]).train()
    assert tracer.running() is None
    assert read(tmp_path / "t").steps(0) == [0, 1, 2]


def test_events_of_later_versions_do_nothing_and_other_names_are_none(tmp_path: Path) -> None:
    callback = lockstep_trace.Callback(tmp_path)
    assert callback.on_something_new(SimpleNamespace(), None, None, model=1) is None
    assert not hasattr(callback, "state")
    with pytest.raises(ValueError, match="invalid value 'all'"):
        lockstep_trace.Callback(level="all")


@pytest.mark.processes
def test_a_script_behind_the_module_is_run_and_traced(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("RATE = 0.1\n")
    (tmp_path / "train.py").write_text(
        "import sys, torch\nfrom beside import RATE\n"
        "assert __name__ == '__main__' and sys.argv[1:] == ['--lr', '1']\n"
        "model = torch.nn.Linear(4, 1)\noptimizer = torch.optim.SGD(model.parameters(), lr=RATE)\n"
        "for _ in range(3):\n    optimizer.zero_grad()\n    model(torch.ones(2, 4)).square().mean().backward()\n"
        "    optimizer.step()\n"
        "sys.exit(5)\n"
    )
    command = [sys.executable, "-m", "lockstep_trace", str(tmp_path / "train.py"), "--lr", "1"]
    done = subprocess.run(command, env={**os.environ, "LOCKSTEP_TRACE": str(tmp_path / "t")}, timeout=100, check=False)
    assert done.returncode == 5
    assert read(tmp_path / "t").steps(0) == [0, 1, 2]
