"""Doors into a training that other code runs: callbacks of Trainer and Lightning, axolotl's plug-in, a script behind
`-m lockstep_trace`; and the folder that they record into. test_doors_of_libraries.py has libraries of the extras."""

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

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


def test_events_of_later_versions_are_ignored(tmp_path: Path) -> None:
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


def steps_of(count: int, folder: Path, level: str = "gradients") -> None:
    """Train `count` steps inside of `traced`."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with lockstep_trace.traced(model, optimizer, folder=folder, level=level):
        for _ in range(count):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).square().mean().backward()
            optimizer.step()


def test_a_trace_replaces_an_older_one_in_its_folder(tmp_path: Path) -> None:
    """A cell of a notebook that is run again: the steps are those of the last run, without those of a longer one."""
    steps_of(5, tmp_path)
    (tmp_path / "rank-00001-elsewhere-7.jsonl").write_text('{"kind": "process", "rank": 1, "world": 2, "time": 0}\n')
    (tmp_path / "trace.json").write_text('{"command": ["python", "old.py"], "status": 1}')
    for path in tmp_path.iterdir():
        os.utime(path, (1, 1))
    steps_of(3, tmp_path)
    assert read(tmp_path).steps(0) == [0, 1, 2]
    assert len(list(tmp_path.iterdir())) == 1


def test_files_of_other_ranks_and_of_a_restarted_run_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    beside = tmp_path / "rank-00001-elsewhere-7.jsonl"  # began before this rank
    beside.write_text('{"kind": "process", "rank": 1, "world": 2, "time": 0}\n')
    os.utime(beside, (1, 1))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    steps_of(2, tmp_path)
    assert beside.is_file()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setenv("WORLD_SIZE", "1")
    steps_of(2, tmp_path)
    assert beside.is_file()


@pytest.mark.processes
def test_a_folder_that_is_given_is_used_in_a_script_that_imports_the_package(tmp_path: Path) -> None:
    """`import lockstep_trace` begins a trace of the script, which a folder or level given later supersedes."""
    (tmp_path / "train.py").write_text(
        "import lockstep_trace\nimport torch\n"
        "model = torch.nn.Linear(4, 1)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "def train():\n    for _ in range(2):\n        optimizer.zero_grad()\n"
        "        model(torch.ones(2, 4)).square().mean().backward()\n        optimizer.step()\n"
        "with lockstep_trace.traced(model, optimizer, folder='given'):\n    train()\n"
        "callback = lockstep_trace.Callback(folder='second')\n"
        "callback.on_train_begin(None, None, None)\ntrain()\ncallback.on_train_end(None, None, None)\n"
    )
    words = [sys.executable, str(tmp_path / "train.py")]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=True)
    assert done.stderr == ""
    assert read(tmp_path / "given").steps(0) == read(tmp_path / "second").steps(0) == [0, 1]
    assert not (tmp_path / "lockstep-trace").exists()
    words = [sys.executable, "-m", "lockstep_trace", "record", "-o", "whole", "--", *words]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=True)
    assert done.stderr.count("this process is traced already") == 2
    assert read(tmp_path / "whole").steps(0) == [0, 1, 2, 3]


@pytest.mark.processes
def test_watch_ends_with_a_recording_made_in_python(tmp_path: Path) -> None:
    steps_of(2, tmp_path)
    words = [sys.executable, "-m", "lockstep_trace", "watch", str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == ["2 optimizer steps on 1 process", "the recording is complete"]


def test_the_plug_in_of_axolotl_gives_its_trainer_the_callback(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in of its base class: axolotl pins versions of a hundred packages."""
    base = ModuleType("axolotl.integrations.base")
    base.BasePlugin = type("BasePlugin", (), {"register": lambda self, cfg: None})  # type: ignore[attr-defined]
    for module in (ModuleType("axolotl"), ModuleType("axolotl.integrations"), base):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delitem(sys.modules, "lockstep_trace.axolotl", raising=False)
    from lockstep_trace.axolotl import Plugin

    plugin = Plugin()
    assert isinstance(plugin, base.BasePlugin)
    (callback,) = plugin.add_callbacks_pre_trainer({}, None)
    assert isinstance(callback, lockstep_trace.Callback)
    monkeypatch.delitem(sys.modules, "lockstep_trace.axolotl")


def test_lightning_callback_without_lightning_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    from lockstep_trace import doors

    for name in doors.LIGHTNING:
        monkeypatch.setitem(sys.modules, name, None)  # an import of it fails
    monkeypatch.setattr(doors, "_lightning_class", doors._lightning_class.__wrapped__)
    with pytest.raises(ImportError, match="pip install lightning"):
        lockstep_trace.LightningCallback()
