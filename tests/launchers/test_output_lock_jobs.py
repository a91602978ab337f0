"""The lock of an output folder in real jobs: two at once, ranks of torchrun, a restart, a folder that is deleted."""

import os
import shutil
import signal
import sys
from pathlib import Path

import pytest

from lockstep.distributed import job_record
from lockstep.launchers import output_lock
from support.command import (
    LOCKSTEP,
    TORCHRUN,
    CommandJob,
    bits,
    each_step_once,
    ended,
    kill,
    processes_in,
    start,
    step_of,
    until,
    write,
)
from support.places import TESTS_PATH

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(sys.platform != "linux", reason="looks at processes through /proc"),
    pytest.mark.usefixtures("nobody_is_left"),
    pytest.mark.slow,
]
HELD = "is already in use by a training run"


def test_the_same_command_twice_at_once(tmp_path: Path, job: CommandJob, untouched: Path) -> None:
    """One of the two is refused, even before the data is prepared, when neither can read the other's launch.json."""
    job.write()
    first, second = (job.start() for _ in range(2))
    (status, _, err), (other, _, said) = sorted([ended(first), ended(second)])
    assert (status, other) == (0, 2), (err, said)
    assert HELD in said
    assert job.bits() == bits(untouched)
    each_step_once(tmp_path, untouched)


def test_ranks_of_torchrun_share_the_lock(tmp_path: Path, cache: Path) -> None:
    """All ranks of a second torchrun are refused; then rank 0 is killed and restarted; then all are killed."""
    write(tmp_path, strategy={"name": "support.waiting_strategy.Held"})
    command = [*TORCHRUN, "train", "run.yaml"]
    command.insert(command.index("-m", 3), "--max-restarts=1")
    # without the variable, torch elastic re-forms at a stale address (pytorch/pytorch#135712)
    variables = {"PYTHONPATH": TESTS_PATH, "HELD_S": "600", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    process = start(command, tmp_path, cache, **variables)
    until(lambda: step_of(tmp_path) >= 25, "step 25", process)
    record = job_record.read(tmp_path / "out")
    assert record is not None
    second = start(command, tmp_path, cache, **variables)
    status, _, err = ended(second)
    assert status == 1  # torchrun has no other status
    assert HELD in err
    assert job_record.read(tmp_path / "out") == record  # the record of the first job is unchanged
    assert record.main is not None
    os.kill(record.main.pid, signal.SIGKILL)

    def again() -> bool:
        found = job_record.read(tmp_path / "out")
        return found is not None and found.main not in (None, record.main)

    until(again, "the second rank 0", process)
    kill(process.pid, *processes_in(tmp_path))
    ended(process)
    until(lambda: not processes_in(tmp_path), "the ranks to end")
    said: list[str] = []
    output_lock.take(tmp_path / "out", said.append).release()  # immediately, without waiting for a heartbeat
    assert said == []


@pytest.mark.parametrize("processes", [1, 2])
def test_output_that_is_deleted_in_training_is_no_success(processes: int, tmp_path: Path, job: CommandJob) -> None:
    """The state is saved, and the run ends with status 1; the same command resumes."""
    job.write(strategy={"name": "support.waiting_strategy.Held"})
    option = f"launch.processes={processes}"
    process = job.start(option, PYTHONPATH=TESTS_PATH, HELD_S="600")
    until(lambda: job.step() >= 25, "step 25", process)
    found = output_lock.look(tmp_path / "out" / output_lock.FILE)
    assert found is not None
    assert found.alive

    def deleted() -> bool:
        shutil.rmtree(tmp_path / "out", ignore_errors=True)  # the job may be writing a file there
        return not (tmp_path / "out").exists()

    until(deleted, "OUTPUT is gone")
    status, out, err = ended(process)
    assert status == 1, (out, err)
    assert err.count("was deleted or moved away") == 1
    (tmp_path / "go").touch()
    status, out, err = job.train(option, PYTHONPATH=TESTS_PATH)
    assert status == 0, (out, err)
    assert "resuming after step" in out


def test_output_replaced_by_a_link_during_training_is_no_success(tmp_path: Path, cache: Path) -> None:
    """The run ends without advice to rerun: the same command would refuse the folder that is there now."""
    write(tmp_path, strategy={"name": "support.waiting_strategy.Held"})
    (theirs := tmp_path / "theirs").mkdir()
    (theirs / "letter.txt").write_text("mine")
    process = start(
        [*LOCKSTEP, "train", "run.yaml", "launch.processes=1"], tmp_path, cache, PYTHONPATH=TESTS_PATH, HELD_S="600"
    )
    until(lambda: step_of(tmp_path) >= 25, "step 25", process)
    (tmp_path / "out").rename(tmp_path / "moved")
    (tmp_path / "out").symlink_to(theirs)
    status, out, err = ended(process)
    assert status == 1, (out, err)
    assert err.count(f"out was replaced by a link to {theirs} during training") == 1
    said = " ".join(out.split())
    assert "the checkpoint of step 20 is wherever that folder was moved to" in said
    assert "the same command continues" not in said
    assert [path.name for path in theirs.iterdir()] == ["letter.txt"]


def test_missing_files_of_a_finished_run_are_reported(tmp_path: Path, job: CommandJob, untouched: Path) -> None:
    """The output folder was moved away at the last moment: a new folder holds the last checkpoint and the export."""
    shutil.copytree(untouched, tmp_path, dirs_exist_ok=True)
    for name in ("run.yaml", "launch.json", "metrics.jsonl", "report.html"):
        (tmp_path / "out" / name).unlink()
    status, out, err = job.train()
    assert status == 0, err
    assert "is finished" in out
    assert "holds the model but no metrics.jsonl" in " ".join(out.split())
    assert "could not be written" not in out
    assert (tmp_path / "out/report.html").is_file()
    assert (tmp_path / "out/run.yaml").is_file()
