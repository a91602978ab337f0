"""`lockstep status`, `logs` and `stop`, run from another terminal than the training one."""

import errno
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.cli import main
from lockstep.commands.while_it_runs import advice, run_and_record, state_sentence
from lockstep.config.run import load
from lockstep.distributed import job_record
from lockstep.distributed.job_record import TRAIN, JobRecord, Process, State
from lockstep.distributed.world import World
from lockstep.track.json_output import Answer
from lockstep.training.rank import note_end
from support.command import (
    LOCKSTEP,
    STEPS,
    TORCHRUN,
    CommandJob,
    bits,
    ended,
    saved,
    start,
    step_of,
    train,
    until,
    write,
)
from support.harness import tiny
from support.messages import mentions
from support.places import TESTS_PATH

linux = pytest.mark.skipif(sys.platform != "linux", reason="looks at processes through /proc")


def status_of(folder: Path, capsys: pytest.CaptureFixture[str]) -> dict:
    capsys.readouterr()
    assert main(["status", str(folder / "out"), "--json"]) == 0
    return Answer.model_validate_json(capsys.readouterr().out).facts


@pytest.mark.processes
@linux
@pytest.mark.usefixtures("nobody_is_left")
@pytest.mark.parametrize("how", ["local, 1", "local, 2", "torchrun"])
def test_status_of_a_run_in_another_terminal(
    how: str, tmp_path: Path, cache: Path, untouched: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, strategy={"name": "support.waiting_strategy.Held"})
    command = [*TORCHRUN, "train", "run.yaml"] if how == "torchrun" else [*LOCKSTEP, "train", "run.yaml"]
    command += [f"launch.processes={how[-1]}"] if how != "torchrun" else []
    process = start(command, tmp_path, cache, PYTHONPATH=TESTS_PATH, HELD_S="600")
    until(lambda: step_of(tmp_path) >= 25, "step 25", process)

    found = status_of(tmp_path, capsys)
    assert (found["state"], found["step"], found["steps"], found["finished"]) == ("running", 25, STEPS, False)
    assert found["launcher"] == ("" if how == "torchrun" else "local")
    assert found["resumable_from"] == 20
    assert found["metrics"]["train"]["step"] == 25
    status, _, err = train(tmp_path, cache)
    assert status == 2
    assert "is already in use by a training run" in err

    following = start([*LOCKSTEP, "logs", "out", "--follow"], tmp_path, cache)
    assert main(["stop", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "SIGTERM sent to process" in said
    assert "stopped on request (exit status 75)" in said
    assert ended(process)[0] == (1 if how == "torchrun" else 75)  # torchrun has no other status for a rank's 75
    status, log, err = ended(following)
    assert status == 0, err
    assert "stopped on request after step" in log

    found = status_of(tmp_path, capsys)
    assert (found["state"], found["status"]) == ("stopped", 75)
    assert found["resumable_from"] == saved(tmp_path) >= 25
    assert main(["stop", str(tmp_path / "out")]) == 0  # once more: nothing happens
    assert "is not running" in capsys.readouterr().out

    (tmp_path / "go").touch()
    status, _, err = train(tmp_path, cache, PYTHONPATH=TESTS_PATH)
    assert status == 0, err
    assert bits(tmp_path) == bits(untouched)
    found = status_of(tmp_path, capsys)
    assert (found["state"], found["finished"], found["resumable_from"]) == ("done", True, None)


@pytest.mark.processes
@linux
@pytest.mark.usefixtures("nobody_is_left")
def test_a_killed_run_is_not_shown_as_running(
    tmp_path: Path, job: CommandJob, capsys: pytest.CaptureFixture[str]
) -> None:
    job.write(strategy={"name": "support.waiting_strategy.Held"})
    process = job.start("launch.processes=1", PYTHONPATH=TESTS_PATH)
    until(lambda: job.step() >= 25, "step 25", process)
    process.kill()
    process.wait()
    found = status_of(tmp_path, capsys)
    assert (found["state"], found["status"], found["resumable_from"]) == ("gone", None, 20)
    assert "without an exit status" in found["text"]
    damaged = tmp_path / "out/checkpoints/step-000020/shard-00001-of-00001.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    capsys.readouterr()
    assert main(["status", str(tmp_path / "out"), "--verify"]) == 1
    said = capsys.readouterr().out
    assert "does not match its hash" in said
    assert "resumes from step 10" in said


@pytest.mark.processes
def test_files_of_a_failed_run(tmp_path: Path, job: CommandJob, capsys: pytest.CaptureFixture[str]) -> None:
    job.write(strategy={"name": "support.waiting_strategy.None"})
    process = job.start("strategy.name=single")
    status, _, err = ended(process)
    assert status == 2, err
    assert not (tmp_path / "out").exists()
    assert main(["status", str(tmp_path / "out")]) == 2
    assert "LS1122" in capsys.readouterr().err


# -- launch.json -----------------------------------------------------------------------------------------------------


@pytest.mark.processes
def test_a_record_survives_writing(tmp_path: Path) -> None:
    record = job_record.here("slurm", 4, "12", {"step": "12.0"})
    job_record.write(tmp_path, record)
    assert job_record.read(tmp_path) == record
    job_record.note(tmp_path, status=75, main=Process("n1", 7, "then"), steps=60)
    found = job_record.read(tmp_path)
    assert found is not None
    assert (found.status, found.main, found.steps, found.job) == (75, Process("n1", 7, "then"), 60, "12")
    assert [path.name for path in tmp_path.iterdir()] == ["launch.json"]


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"launcher": 3}', '{"process": 7}'])
def test_an_unreadable_job_record_is_ignored_and_kept(text: str, tmp_path: Path) -> None:
    (tmp_path / "launch.json").write_text(text)
    assert job_record.read(tmp_path) is None
    job_record.note(tmp_path, status=0)
    assert (tmp_path / "launch.json").read_text() == text


@pytest.mark.processes
def test_reused_process_numbers_are_recognized() -> None:
    this = Process.this()
    assert this.alive() is True
    assert Process(this.host, this.pid, "yesterday").alive() is False
    assert Process("elsewhere", this.pid, this.born).alive() is None


@pytest.mark.processes
def test_a_zombie_process_counts_as_dead() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    born = job_record.born(child.pid)
    process = Process(Process.this().host, child.pid, born or "")
    assert process.alive() is True
    os.kill(child.pid, signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert process.alive() is False
    child.wait()


@pytest.mark.processes
@pytest.mark.parametrize(
    ("record", "word"),
    [
        (JobRecord("local", 1, 0.0, Process("elsewhere", 1, "")), "unknown"),
        (JobRecord("local", 1, 0.0, Process.this()), "running"),
        (JobRecord("local", 1, 0.0, Process.this(), status=0), "done"),
        (JobRecord("local", 1, 0.0, Process.this(), status=75), "stopped"),
        (JobRecord("local", 1, 0.0, Process.this(), status=1), "failed"),
        (JobRecord("local", 1, 0.0, Process(Process.this().host, 1, "then")), "gone"),
    ],
)
def test_states(record: JobRecord, word: str) -> None:
    state = job_record.state_of_process(record)
    assert state.word == word
    assert state.live == (word == "running")


def test_lines_that_come_while_one_reads(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    assert list(job_record.lines_of(path, False)) == []
    path.write_text("one\ntwo\nhal")
    assert list(job_record.lines_of(path, False)) == ["one", "two", "hal"]
    left = ["f\nthree\n", "four\n"]

    def live() -> bool:
        if left:
            with open(path, "a") as file:
                file.write(left.pop(0))
        return bool(left)

    assert list(job_record.lines_of(path, True, live, every_s=0)) == ["one", "two", "half", "three", "four"]


def test_states_by_exit_status() -> None:
    assert job_record.outcome(None) == State("gone")
    assert job_record.outcome(2) == State("failed", "", 2)
    assert not job_record.outcome(75).live


@pytest.mark.processes
def test_partial_files_of_killed_writers_alone_are_removed(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    here = socket.gethostname()
    left = [f".{name}.{here}-{child.pid}.partial" for name in ("launch.json", "run.yaml")]
    others = [f".run.yaml.{here}-{os.getpid()}.partial", ".run.yaml.elsewhere-1.partial", ".metrics.jsonl.partial"]
    for name in left + others:
        (tmp_path / name).touch()
    job_record.write(tmp_path, job_record.here("local", 1))
    assert {path.name for path in tmp_path.iterdir()} == {*others, job_record.FILE}


def test_restarting_rank_does_not_report_a_failed_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tiny(f"output={tmp_path}")
    job_record.write(tmp_path, job_record.here("local", 2))
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    for count, expected in (("0", None), ("1", 1)):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
        note_end(run.folder, World(run), TRAIN, 1)
        record = job_record.read(tmp_path)
        assert record is not None
        assert record.status == expected


def test_advice_is_a_command_that_trains_into_this_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "a folder"
    folder.mkdir()
    (folder / "run.yaml").write_text(tiny("output=out").dump())
    for place, output in ((folder, "."), (tmp_path, "a folder"), (tmp_path, str(folder))):
        monkeypatch.chdir(place)
        run, _ = run_and_record(output)
        said = advice(run.folder, State("gone"), False, 7)
        words = shlex.split(said.split("`")[1])
        assert words[:2] == ["lockstep", "train"]
        assert load(words[2], words[3:]).folder.resolve() == folder


@pytest.mark.processes
def test_logs_may_be_cut_off_by_head(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(tiny("output=out").dump())
    (tmp_path / "log.txt").write_text("a line of the log\n" * 100_000)
    job_record.write(tmp_path, replace(job_record.here("local", 1), status=0))
    command = f"{shlex.join(LOCKSTEP)} logs . | head -n 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "a line of the log\n", "")


@pytest.mark.parametrize("command", [["logs"], ["stop"]])
def test_a_folder_without_a_launch(command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path)
    (tmp_path / "run.yaml").rename(tmp_path / "moved.yaml")
    (tmp_path / "out").mkdir()
    (tmp_path / "moved.yaml").rename(tmp_path / "out" / "run.yaml")
    assert main([*command, str(tmp_path / "out")]) == 2
    assert "launch.json" in capsys.readouterr().err
    assert main(["status", str(tmp_path / "out")]) == 0
    assert "unknown: there is no readable launch.json" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["logs", "OUT", "--tail", "-1"], ["stop", "OUT", "--wait", "-1"]])
def test_numbers_that_make_no_sense(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "run.yaml").rename(tmp_path / "out" / "run.yaml")
    job_record.write(tmp_path / "out", job_record.here("local", 1))
    assert main([word.replace("OUT", str(tmp_path / "out")) for word in words]) == 2
    assert mentions(capsys.readouterr().err, "LS8134" if words[0] == "logs" else "LS8136", words[2], "-1")


def test_the_last_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "run.yaml").rename(tmp_path / "out" / "run.yaml")
    job_record.write(tmp_path / "out", job_record.here("local", 1))
    (tmp_path / "out" / "log.txt").write_text("1\n2\n3\n")
    for tail, expected in (("2", "2\n3\n"), ("9", "1\n2\n3\n"), ("0", "")):
        assert main(["logs", str(tmp_path / "out"), "--tail", tail]) == 0
        assert capsys.readouterr().out == expected


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES])
def test_launch_json_on_a_full_disk_is_written_in_its_place(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Overwriting in place needs no room; `write` returns an error of another disk."""
    before = job_record.here("local", 2)
    assert job_record.write(tmp_path, before)

    def refused(path: Path, text: str) -> None:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(job_record, "replace_text", refused)
    assert job_record.note(tmp_path, status=75) is (number == errno.ENOSPC)
    assert job_record.read(tmp_path) == replace(before, status=75 if number == errno.ENOSPC else None)
    assert not job_record.write(tmp_path / "new", before)


def test_advice_on_a_run_that_is_done_without_its_last_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(tiny(f"output={tmp_path}").dump())
    (tmp_path / "export").mkdir()
    (tmp_path / "export/config.json").write_text("{}")
    run, _ = run_and_record(str(tmp_path))
    said = advice(run.folder, State("done", status=0), False, None)
    assert said.startswith(f"the model is in {tmp_path}/export, but its checkpoint is gone")
    assert said.endswith("trains from the start")


def test_progress_is_known_if_records_end_early(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On a disk that filled up during training, metrics.jsonl ends early; launch.json needs no more room."""
    (tmp_path / "run.yaml").write_text(tiny(f"output={tmp_path}", "track.every=1").dump())
    (tmp_path / "metrics.jsonl").write_text('{"step": 12, "split": "train", "loss": 1.5}\n')
    record = job_record.here("local", 1)
    job_record.write(tmp_path, replace(record, steps=300, status=0))
    job_record.note(tmp_path, reached=300)
    assert main(["status", str(tmp_path)]) == 0
    said = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "300 of 300" in said["step"]
    assert "metrics.jsonl ends at step 12" in said["records"]


@pytest.mark.parametrize("name", ["launcher", "processes", "began", "process", "steps", "reached", "status", "kills"])
@pytest.mark.parametrize("value", [[], {}, "text", 10**400, [[1]]], ids=["list", "object", "text", "huge", "nested"])
def test_a_job_record_of_other_types_is_unreadable(name: str, value: object, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(tiny(f"output={tmp_path}").dump())
    job_record.write(tmp_path, job_record.here("local", 2))
    values = json.loads((tmp_path / "launch.json").read_text())
    (tmp_path / "launch.json").write_text(json.dumps(values | {name: value}))
    assert main(["status", str(tmp_path)]) in (0, 2)  # 2: no such launcher


def test_a_run_that_its_user_interrupted_is_not_called_failed() -> None:
    assert state_sentence(State("failed", status=130)) == "interrupted (exit status 130)"
    assert state_sentence(State("failed", status=1)) == "failed (exit status 1)"
