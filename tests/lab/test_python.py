"""The Python interface: the examples of docs/how-to/python.md, Ctrl-C, a dead parent process, and a notebook."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import lockstep
from lockstep.lab.subprocess_job import Child
from support.command import RUN, ended, saved, start, step_of, until, write
from support.documents import DOCS
from support.harness import lockstep_environment
from support.messages import raises

linux = pytest.mark.skipif(sys.platform != "linux", reason="looks at processes through /proc")
LONG = RUN | {"steps": 5000, "output": "out", "checkpoint": {"every": 0}}  # saved when it is stopped, and only then
TRAIN = (
    "import lockstep, signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # nohup would have it ignored
    f"lockstep.train(lockstep.Run.load({LONG!r}), show=None)"
)


def blocks(page: Path) -> list[str]:
    """Return the Python examples of a page."""
    return re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.mark.processes
def test_the_examples_of_the_page_run_without_a_main_guard(tmp_path: Path, cache: Path) -> None:
    code = []
    for block in blocks(DOCS / "how-to/python.md"):
        if named := re.match(r"# (\w+\.py)\n", block):
            (tmp_path / named[1]).write_text(block)
        else:
            code.append(block)
    assert len(code) >= 6
    # as typed into a REPL: there is no file that other processes could import
    status, out, err = ended(start([sys.executable, "-c", "\n".join(code)], tmp_path, cache), 280)
    assert status == 0, err
    assert "processes  2 (ddp, exact)" in out
    assert "did you mean 'learning_rate'" in out


@pytest.mark.processes
def test_importing_it_imports_nothing_heavy() -> None:
    code = (
        "import sys, lockstep; assert not {'torch', 'yaml', 'pydantic'} & set(sys.modules); lockstep.train; "
        "lockstep.Run; assert not {'torch', 'transformers', 'datasets'} & set(sys.modules); assert dir(lockstep)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_functions_are_not_hidden_by_modules_of_their_name() -> None:
    from lockstep.training.train_state import is_due

    assert is_due(1, 1, False)
    assert lockstep.train.__module__ == lockstep.evaluate.__module__ == lockstep.verify.__module__ == "lockstep.api"
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = lockstep.trian  # type: ignore[attr-defined]


def test_bad_input_is_an_exception(tmp_path: Path) -> None:
    with raises("LS1000", "'seed'"):
        lockstep.Run.load(RUN | {"sead": 1})
    with raises("LS1112"):
        lockstep.Run.load(RUN, {"optim learning_rate": 1})
    with raises("LS1104"):
        lockstep.train(lockstep.Run.load(RUN, {"launch.processes": 9}))
    with raises("LS0002"):
        lockstep.verify(lockstep.Run.load(RUN), steps=0)
    run = lockstep.Run.load(RUN)
    run = run.model_copy(update={"strategy": run.strategy.model_copy(update={"name": "__main__.Mine"})})
    with raises("LS0001"):
        lockstep.train(run)


@pytest.mark.processes
def test_refusals_of_a_job_are_exceptions(tmp_path: Path) -> None:
    values = RUN | {"output": str(tmp_path / "out"), "data": {"source": str(tmp_path / "nothing")}}
    with pytest.raises(lockstep.RunError, match="nothing"):
        lockstep.train(lockstep.Run.load(values), show=None)
    assert not (tmp_path / "out" / "export").exists()


@pytest.mark.processes
@linux
@pytest.mark.usefixtures("nobody_is_left")
def test_an_interrupt_writes_a_checkpoint_and_the_run_resumes(tmp_path: Path, cache: Path) -> None:
    process = start([sys.executable, "-c", TRAIN], tmp_path, cache)
    until(lambda: step_of(tmp_path) >= 12, "step 12", process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=200)
    assert "KeyboardInterrupt" in err
    assert 12 <= saved(tmp_path) < 5000


@pytest.mark.processes
@linux
@pytest.mark.usefixtures("nobody_is_left")
def test_a_job_whose_caller_is_gone_stops_with_a_checkpoint(tmp_path: Path, cache: Path) -> None:
    process = start([sys.executable, "-c", TRAIN], tmp_path, cache)
    until(lambda: step_of(tmp_path) >= 12, "step 12", process)
    process.kill()
    process.communicate()
    until(lambda: saved(tmp_path) >= 12, "a checkpoint of the last step")


@pytest.mark.extras
@pytest.mark.processes
def test_a_notebook_cell_shows_what_training_says(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    for name, value in lockstep_environment(cache).items():
        monkeypatch.setenv(name, value)
    write(tmp_path, steps=4)
    cells = [
        "import lockstep\nresult = lockstep.train(lockstep.Run.load('run.yaml'))",
        "print(result.status, 'torch' in __import__('sys').modules)",
    ]
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    kernel = client.NotebookClient(book, timeout=None, resources={"metadata": {"path": str(tmp_path)}})
    kernel.create_kernel_manager()
    kernel.km.kernel_spec.argv[0] = sys.executable  # this Python, whatever kernels are installed
    kernel.execute()
    said = ["".join(output.get("text", "") for output in cell.outputs) for cell in book.cells]
    assert "processes  2 (ddp, exact)" in said[0]
    assert said[1].split() == ["done", "False"]


@pytest.mark.processes
@pytest.mark.long
def test_a_child_writes_no_colours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as a notebook's kernel does
    child = Child("lockstep.cli.main", ["plan", "launch.processes=1", "launch.device=cpu"], tmp_path, "job")
    assert child.wait(100)
    assert any(line.startswith("processes  1") for line in child.lines())


@pytest.mark.processes
def test_child_process_reports_why_it_failed(tmp_path: Path) -> None:
    child = Child("lockstep.cli.main", ["train", str(tmp_path / "nothing.yaml")], tmp_path, "job")
    assert child.wait(100)
    assert child.status == 2
    assert child.reason() == child.errors.strip()
    assert "cannot read the run file" in child.errors
    again = Child("os.no_such_function", [], tmp_path, "job")
    assert again.wait(100)
    assert again.reason() == "AttributeError: module 'os' has no attribute 'no_such_function'"
    assert os.path.getsize(again.err) > len(again.errors)  # the file keeps what came before


@pytest.mark.processes
def test_a_child_whose_folder_is_removed_is_a_failure_with_a_reason(tmp_path: Path) -> None:
    folder = tmp_path / "trial"
    folder.mkdir()
    child = Child("os.no_such_function", [], folder, "job")
    shutil.rmtree(folder)
    assert child.wait(100)
    assert child.status
    assert list(child.lines()) == []
    assert child.reason() == f"{folder / 'job.err'} was removed while the job ran"
