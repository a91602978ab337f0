"""An output folder has one owner at a time, on one machine and on several, however runs end; foreign folders are
refused."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from lockstep.cli import main
from lockstep.config.run import Run, RunError, write_run_yaml
from lockstep.distributed import hardware, job_record
from lockstep.distributed.job_record import Process
from lockstep.launchers import output_lock
from lockstep.launchers.output_lock import FILE, Holder, check_ours, take
from support.harness import TINY, tiny
from support.messages import mentions, raises

HOLD = """
import sys
from pathlib import Path
from lockstep.launchers import output_lock
if sys.argv[2] == "without":
    output_lock._flock = lambda *_: None
lock = output_lock.take(Path(sys.argv[1]), print, beat_s=0.1)
print("taken", flush=True)
sys.stdin.read()
lock.release()
"""
HELD = "LS7347"


def nothing(text: str) -> None:
    raise AssertionError(f"nobody was to be told: {text}")


@pytest.fixture
def holding(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Start another process that holds the lock of `tmp_path/out`."""
    with holder(tmp_path / "out") as process:
        yield process
        process.kill()


def holder(folder: Path, flock: str = "with") -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder), flock], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "taken\n"
    return process


def written(folder: Path, **changes: object) -> Path:
    """Write a lock that no process here holds; by default, of another machine."""
    held = Holder("t", Process("elsewhere", 7, "then"), "another kernel", "", True, time.time())
    folder.mkdir(exist_ok=True)
    (folder / FILE).write_text(f"{0:012d}\n{json.dumps(asdict(replace(held, **changes)))}\n")
    return folder / FILE


# -- on one machine --------------------------------------------------------------------------------------------------


@pytest.mark.processes
@pytest.mark.parametrize("flock", ["with", "without"])
def test_one_holder_at_a_time_and_a_killed_one_is_replaced(
    flock: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if flock == "without":
        monkeypatch.setattr(output_lock, "_flock", lambda *_: None)
    process = holder(tmp_path / "out", flock)
    with raises(HELD, f"process {process.pid} on ", "output=FOLDER"):
        take(tmp_path / "out", nothing)
    process.kill()
    process.wait()
    end = f"the previous start: process {process.pid} on "
    told: list[str] = []
    take(tmp_path / "out", told.append).release()
    assert [text.startswith(end) and "it was killed" in text for text in told] == [True]
    assert not (tmp_path / "out" / FILE).exists()


@pytest.mark.processes
def test_a_released_lock_leaves_no_file(tmp_path: Path, holding: subprocess.Popen[str]) -> None:
    holding.communicate("")
    assert not (tmp_path / "out").exists()
    lock = take(tmp_path / "out", nothing)
    (tmp_path / "out" / "log.txt").touch()
    lock.release()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["log.txt"]


@pytest.mark.processes
def test_a_reused_process_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_lock, "_flock", lambda *_: None)
    this = Process.this()
    own = {"kernel": output_lock._kernel(), "space": output_lock._space()}
    written(tmp_path, process=this, **own)
    with raises(HELD):
        take(tmp_path, nothing)
    written(tmp_path, process=Process(this.host, this.pid, "yesterday"), **own)
    told: list[str] = []
    take(tmp_path, told.append).release()
    assert len(told) == 1


@pytest.mark.processes
def test_one_of_many_concurrent_starts_gets_the_lock(tmp_path: Path) -> None:
    """Of several concurrent starts exactly one gets the lock, even if the previous owner was killed."""
    for _ in range(10):
        process = holder(tmp_path)
        process.kill()
        process.wait()
        found: list[output_lock.Lock] = []
        refused: list[RunError] = []
        told: list[str] = []

        def come(
            found: list[output_lock.Lock] = found, refused: list[RunError] = refused, told: list[str] = told
        ) -> None:
            try:
                found.append(take(tmp_path, told.append))
            except RunError as caught:
                refused.append(caught)

        threads = [threading.Thread(target=come) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (len(found), len(refused), len(told)) == (1, 7, 1)
        found[0].release()
    assert list(tmp_path.iterdir()) == []


# -- on several machines ---------------------------------------------------------------------------------------------


@pytest.mark.processes
def test_a_heartbeat_from_another_machine_keeps_the_lock(tmp_path: Path) -> None:
    path, over = written(tmp_path), threading.Event()

    def beat() -> None:
        for number in range(1, 1000):
            if over.wait(0.1):
                return
            with open(path, "r+b") as file:
                file.write(b"%012d" % number)

    thread = threading.Thread(target=beat)
    thread.start()
    said: list[str] = []
    try:
        with raises(HELD, "process 7 on elsewhere"):
            take(tmp_path, said.append, beat_s=0.2, stale_s=60)
    finally:
        over.set()
        thread.join()
    assert len(said) == 1
    assert "Waiting 60 s" in said[0]


@pytest.mark.processes
@pytest.mark.parametrize("torn", [False, True])
def test_a_lock_without_heartbeats_from_another_machine_expires(torn: bool, tmp_path: Path) -> None:
    path = written(tmp_path)
    if torn:  # killed while it wrote its name
        path.write_bytes(b"")
    said: list[str] = []
    lock = take(tmp_path, said.append, beat_s=0.02, stale_s=0.5)
    assert len(said) == 1
    assert "Waiting 0.5 s" in said[0]
    assert f"delete {path}" in said[0]
    lock.release()


def test_a_holder_that_is_writing_its_name_is_awaited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty lock belongs to a process that is about to write its first line; others wait for that line."""
    path = written(tmp_path)
    path.write_bytes(b"")
    monkeypatch.setattr(output_lock.time, "sleep", lambda seconds: written(tmp_path))
    with raises("LS7347", "7"):
        take(tmp_path, nothing)


@pytest.mark.processes
def test_an_old_lock_is_observed_for_three_heartbeats(tmp_path: Path) -> None:
    os.utime(written(tmp_path), (0, 0))
    said: list[str] = []
    take(tmp_path, said.append, beat_s=0.02).release()
    assert "Waiting 0.06 s" in said[0]


@pytest.mark.processes
def test_status_and_stop_read_the_lock(tmp_path: Path) -> None:
    record = job_record.here("local", 2)
    assert output_lock.now(tmp_path, record) == (record, None)
    path = written(tmp_path)
    found, state = output_lock.now(tmp_path, None)
    assert found is not None
    assert (found.process.host, found.process.pid) == ("elsewhere", 7)
    assert state is not None
    assert (state.word, state.text) == ("running", "process 7 on elsewhere")
    old = replace(record, status=75)  # it ended, and another process has started again
    assert output_lock.now(tmp_path, old)[0] == found
    other = replace(record, process=Process("elsewhere", 7, "then"))
    assert output_lock.now(tmp_path, other) == (other, state)
    queued = replace(record, launcher="slurm", job="12")
    assert output_lock.now(tmp_path, queued) == (queued, None)
    os.utime(path, (0, 0))
    gone = output_lock.now(tmp_path, other)[1]
    assert gone is not None
    assert gone.word == "gone"


def test_start_killed_before_its_record_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hardware, "kills", lambda *_: (3, 3))
    killed = Process(socket.gethostname(), 999_999_999, f"{output_lock._kernel()}/1")
    here = {"process": killed, "kernel": output_lock._kernel(), "space": output_lock._space()}
    written(tmp_path, **here, kills=(2, 2), cgroup=hardware.cgroup())
    assert main(["status", str(tmp_path)]) == 2
    cause = "the kernel killed 1 process of its cgroup because memory ran out"
    assert mentions(capsys.readouterr().err, "LS8131", "process 999999999 on ", cause)
    earlier = replace(job_record.here("local", 2), began=1.0, status=75)
    record, state = output_lock.now(tmp_path, earlier)
    assert record is not None
    assert state is not None
    assert (record.process, state.word) == (killed, "gone")
    for known in (replace(earlier, process=killed), replace(earlier, status=0), replace(earlier, job="12")):
        assert output_lock.now(tmp_path, known) == (known, None)
    told: list[str] = []
    take(tmp_path, told.append).release()
    assert cause in told[0]


# -- the folder is replaced or deleted -------------------------------------------------------------------------------


def test_a_folder_that_is_deleted_is_no_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    asked = threading.Event()
    monkeypatch.setattr(os, "kill", lambda pid, number: asked.set() if number == signal.SIGTERM else None)
    lock = take(tmp_path / "out", nothing, beat_s=0.05)
    assert lock.verdict(0) == 0
    (tmp_path / "out").rename(tmp_path / "moved")
    assert asked.wait(60)  # as after Ctrl-C: with a checkpoint
    assert [lock.verdict(status) for status in (0, 1, 75)] == [1, 1, 1]
    assert (tmp_path / "out" / FILE).exists()  # it still has the folder
    with raises(HELD):
        take(tmp_path / "out", nothing)
    lock.release()
    assert capfd.readouterr().err.count("was deleted or moved away") == 1


def test_a_folder_that_a_link_replaces_is_not_written_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Neither a lock nor another run's record is written through such a link; a link to the folder's new place is
    accepted."""
    asked = threading.Event()
    monkeypatch.setattr(os, "kill", lambda pid, number: asked.set() if number == signal.SIGTERM else None)
    (theirs := tmp_path / "theirs").mkdir()
    job_record.write(theirs, job_record.here("local", 1))
    before = {path.name: path.read_bytes() for path in theirs.iterdir()}
    lock = take(tmp_path / "out", nothing, beat_s=0.05)
    (tmp_path / "out").rename(tmp_path / "moved")
    (tmp_path / "out").symlink_to(tmp_path / "moved")
    assert lock.verdict(0) == 0
    (tmp_path / "link").symlink_to(theirs)
    (tmp_path / "link").replace(tmp_path / "out")  # atomically: between two calls the folder would be missing
    assert asked.wait(60)
    assert lock.verdict(75) == 1
    lock.release()
    assert {path.name: path.read_bytes() for path in theirs.iterdir()} == before
    said = capfd.readouterr().err
    assert said.count(f"out was replaced by a link to {theirs} ") == 1
    assert mentions(said, "LS7340")
    assert "new folder of that name" not in said


def test_output_deleted_at_the_last_moment(tmp_path: Path) -> None:
    lock = take(tmp_path / "out", nothing, beat_s=1000)
    shutil.rmtree(tmp_path / "out")
    assert lock.verdict(0) == 1
    lock.release()


def test_a_replaced_output_folder_is_detected(tmp_path: Path) -> None:
    lock = take(tmp_path / "out", nothing, beat_s=1000)
    shutil.rmtree(tmp_path / "out")
    (tmp_path / "out").mkdir()
    assert lock.verdict(0) == 1
    lock.release()


def test_a_deleted_lock_is_recreated(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    lock = take(tmp_path / "out", nothing, beat_s=1000)
    (tmp_path / "out/run.yaml").touch()
    for _ in range(2):
        (tmp_path / "out" / FILE).unlink()
        assert lock.verdict(0) == 0
    with raises(HELD):
        take(tmp_path / "out", nothing)
    said = capfd.readouterr().err
    assert said.count(".lock was deleted during training") == 2
    assert "moved away" not in said
    lock.release()
    assert not (tmp_path / "out" / FILE).exists()


@pytest.mark.parametrize("also", [True, False])
def test_a_folder_that_is_emptied_is_no_success(also: bool, tmp_path: Path) -> None:
    """A run whose folder is emptied fails, whether or not its lock is deleted too."""
    lock = take(tmp_path / "out", nothing, beat_s=1000)
    (tmp_path / "out/run.yaml").touch()
    assert lock.verdict(0) == 0
    (tmp_path / "out/run.yaml").unlink()
    if also:
        (tmp_path / "out" / FILE).unlink()
    assert lock.verdict(0) == 1
    lock.release()


@pytest.mark.processes
def test_a_run_that_lost_its_lock_ends_at_once(tmp_path: Path, holding: subprocess.Popen[str]) -> None:
    (tmp_path / "out" / FILE).unlink()
    written(tmp_path / "out")
    assert holding.wait(60) == 1
    assert b"elsewhere" in (tmp_path / "out" / FILE).read_bytes()


# -- foreign folders -------------------------------------------------------------------------------------------------


def run_in(folder: Path) -> Run:
    return tiny(f"output={folder}")


def test_a_project_is_not_written_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "mine.csv").write_text("years of work")
    (tmp_path / "run.yaml").write_text(json.dumps(TINY | {"output": "."}))
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert main(["train", "run.yaml"]) == 2
    said = capsys.readouterr().err
    assert mentions(said, "LS7346")
    assert mentions(said, "LS7346", "train.py")
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("name", ["run.yaml", "metrics.jsonl", "checkpoints", "notes"])
def test_a_single_foreign_file_is_enough(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("name: mine\n")
    with raises("LS7346", str(name)):
        check_ours(run_in(tmp_path).folder)


def test_lockstep_files_are_accepted(tmp_path: Path) -> None:
    check_ours(run_in(tmp_path / "not there").folder)
    run = run_in(tmp_path)
    check_ours(run.folder)
    for name in (".DS_Store", "lost+found", "train.out", "slurm-7.out"):
        (tmp_path / name).touch()
    check_ours(run.folder)
    (tmp_path / "notes").touch()
    with raises("LS7346"):
        check_ours(run.folder)
    job_record.write(tmp_path, job_record.here("local", 1))
    check_ours(run.folder)  # a user's notes in a run's folder
    (tmp_path / "launch.json").write_text("{")  # as after a power failure
    with raises("LS7346", "launch.json"):
        check_ours(run.folder)
    write_run_yaml(run)  # as a sweep does before each trial, and every start
    check_ours(run.folder)
    (tmp_path / "run.yaml").write_text(run.model_copy(update={"output": "elsewhere"}).dump())  # a copy
    with raises("LS7346", "launch.json"):
        check_ours(run.folder)


def test_a_concurrent_start_of_the_same_run_is_recognized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, listed = run_in(tmp_path), os.listdir

    def meanwhile(folder: Path) -> list[str]:
        write_run_yaml(run)
        job_record.write(tmp_path, job_record.here("local", 1))
        return listed(folder)

    monkeypatch.setattr(os, "listdir", meanwhile)
    check_ours(run.folder)


@pytest.mark.parametrize("kind", ["link", "dangling", "file"])
def test_an_export_that_cannot_be_replaced_is_refused_before_training(kind: str, tmp_path: Path) -> None:
    run = run_in(tmp_path / "out")
    write_run_yaml(run)
    job_record.write(run.folder, job_record.here("local", 1))
    if kind == "file":
        (run.folder / "export").touch()
    else:
        (run.folder / "export").symlink_to(tmp_path if kind == "link" else "nowhere")
    with raises("LS7344"):
        check_ours(run.folder)
