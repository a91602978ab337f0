"""The command as a user runs it, in separate processes: to the end, stopped, killed, and started in other ways."""

import os
import re
import shutil
import signal
import socket
import sys
from pathlib import Path

import pytest
import yaml

from lockstep.config.run import load
from lockstep.distributed.lost_contact import tell_failure
from support.command import (
    LOCKSTEP,
    STEPS,
    TORCHRUN,
    CommandJob,
    bits,
    each_step_once,
    ended,
    finish,
    lines,
    processes_in,
    ranks_of,
    start,
    start_anew,
    step_of,
    until,
    write,
)

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="looks at processes through /proc"),
    pytest.mark.usefixtures("nobody_is_left"),
]

# -- an untouched run ------------------------------------------------------------------------------------------------


@pytest.mark.processes
def test_the_files_of_a_run(untouched: Path) -> None:
    out = untouched / "out"
    found = {str(p.relative_to(out)) for p in out.rglob("*") if not p.is_dir() or p.is_symlink()}
    parts = ("manifest.json", *(f"shard-{rank:05d}-of-00002.safetensors" for rank in (1, 2)))
    assert found == {
        "run.yaml",
        "launch.json",
        "export.json",
        "log.txt",
        *(f"{name}.jsonl" for name in ("metrics", "system", "samples", "events", "ranks", "fingerprints")),
        "tables.json",
        "scores.json",
        "report.html",
        "checkpoints/latest",
        *(f"checkpoints/step-{step:06d}/{part}" for step in (STEPS - 10, STEPS) for part in parts),
        *(f"export/{n}" for n in ("config.json", "model.safetensors", "README.md")),
        *(f"export/{n}" for n in ("tokenizer.json", "tokenizer_config.json")),
    }
    assert {p.name for p in untouched.iterdir()} == {"run.yaml", "out"}
    assert (out / "checkpoints/latest").resolve().name == f"step-{STEPS:06d}"
    again = load(out / "run.yaml", [])
    assert again == load(untouched / "run.yaml", []).with_keys("model", compile=False)  # which is decided: no GPU
    assert set(again.model_dump()) == set(yaml.safe_load((out / "run.yaml").read_text()))


@pytest.mark.processes
def test_the_metrics_of_a_run(untouched: Path) -> None:
    found = lines(untouched)
    train = [line for line in found if line["split"] == "train"]
    assert [line["step"] for line in train] == list(range(1, STEPS + 1))
    wanted = {"step", "split", "loss", "learning_rate", "grad_norm", "examples_per_s", "tokens_per_s"}
    assert all(wanted <= line.keys() for line in train)
    assert [(m["step"], m["split"]) for m in found if m["split"] != "train"] == [
        (20, "validation"),
        (STEPS, "validation"),
        (STEPS, "test"),
    ]
    for line in found:
        if line["split"] != "train":
            assert {"loss", "accuracy", "macro_f1", "examples"} <= line.keys()
            assert line["examples"] == 100
    assert train[0]["learning_rate"] == 0.0
    assert train[-1]["loss"] < train[0]["loss"]


@pytest.mark.processes
def test_a_finished_run_reports_that_it_is_finished(untouched: Path, cache: Path) -> None:
    before = {p: p.stat().st_mtime_ns for p in (untouched / "out").rglob("*") if p.is_file()}
    out = finish(untouched, cache)
    assert "finished" in out
    assert "export" in out
    assert {p: p.stat().st_mtime_ns for p in (untouched / "out").rglob("*") if p.is_file()} == before


@pytest.mark.processes
def test_the_export_is_the_model_that_was_measured(untouched: Path) -> None:
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    from lockstep.data import builtin

    export = str(untouched / "out" / "export")
    model = AutoModelForSequenceClassification.from_pretrained(export).eval()
    tokenizer = AutoTokenizer.from_pretrained(export)
    assert model.config.id2label == dict(enumerate(builtin.LABELS))
    data = builtin.emotion(0)["validation"]
    texts, labels = data["text"][:100], data["label"][:100]
    right = 0
    for text, label in zip(texts, labels, strict=True):
        with torch.no_grad():
            logits = model(**tokenizer(text, truncation=True, max_length=32, return_tensors="pt")).logits
        right += int(logits.argmax()) == label
    (recorded,) = [m for m in lines(untouched) if (m["step"], m["split"]) == (STEPS, "validation")]
    assert right / 100 == recorded["accuracy"]
    card = (untouched / "out" / "export" / "README.md").read_text()
    assert f"{recorded['accuracy']:.4f}" in card
    assert card.startswith("---\n")


# -- stopped and killed ----------------------------------------------------------------------------------------------


@pytest.mark.processes
@pytest.mark.parametrize(("number", "processes"), [(signal.SIGTERM, 2), (signal.SIGINT, 1)])
def test_a_requested_stop_has_status_75_and_the_same_command_resumes(
    number: signal.Signals, processes: int, tmp_path: Path, job: CommandJob, untouched: Path
) -> None:
    job.write()
    option = f"launch.processes={processes}"
    process = job.start(option)
    until(lambda: job.step() >= 13, "step 13", process)
    process.send_signal(number)
    status, out, err = ended(process)
    assert status == 75, (out, err)
    assert "stopped on request" in out
    assert "Traceback" not in out + err
    stopped = job.saved()
    assert 13 <= stopped < STEPS
    assert not (tmp_path / "out" / "export").exists()
    assert f"resuming after step {stopped}" in job.finish(option)
    assert job.bits() == bits(untouched)


@pytest.mark.processes
def test_ranks_do_not_outlive_their_launcher(tmp_path: Path, cache: Path) -> None:
    write(tmp_path, steps=100_000)
    process = start_anew([*LOCKSTEP, "train", "run.yaml"], tmp_path, cache)
    until(lambda: step_of(tmp_path) >= 2, "step 2", process)
    assert len(ranks_of(process, tmp_path)) == 2
    process.kill()  # the launcher alone
    process.wait()
    until(lambda: not processes_in(tmp_path), "the ranks to end")


@pytest.mark.processes
def test_a_killed_rank_is_named_and_the_job_restarts_automatically(
    tmp_path: Path, job: CommandJob, untouched: Path
) -> None:
    job.write()
    process = job.start("launch.max_restarts=2")
    until(lambda: job.saved() >= 10, "a checkpoint", process)
    victim = job.ranks(process)[-1]
    os.kill(victim, signal.SIGKILL)
    status, out, err = ended(process)
    assert status == 0, (out, err)
    assert re.search(rf"^lockstep: rank [01] \(pid {victim}\) on \S+ was killed by SIGKILL; restarting", err, re.M)
    assert "resuming after step" in out
    assert job.bits() == bits(untouched)
    each_step_once(tmp_path, untouched)


FAILING = """
import os

from lockstep.tasks.classification import Classification


class Failing(Classification):
    calls = 0

    def collate(self, columns, rows, index):
        self.calls += 1
        if os.environ.get("RANK") == "1" and self.calls > 30:
            raise RuntimeError("the data went away")
        return super().collate(columns, rows, index)
"""


@pytest.mark.processes
def test_a_failing_rank_s_traceback_is_shown_once_with_its_name(tmp_path: Path, job: CommandJob) -> None:
    (tmp_path / "mytask.py").write_text(FAILING)
    job.write(task={"name": "mytask.Failing"})
    status, _, err = job.train()
    assert status == 1, err
    assert err.count("RuntimeError: the data went away") == 1, err
    assert err.count("Traceback (most recent call last)") == 1, err
    assert "lockstep: rank 1 of 2 on " in err
    assert not (tmp_path / "out" / "export").exists()


@pytest.mark.processes
def test_a_tmpdir_too_long_for_a_socket_is_named(tmp_path: Path, job: CommandJob) -> None:
    job.write()
    (long := tmp_path / ("x" * 100)).mkdir()
    status, out, err = job.train(TMPDIR=str(long))
    assert status == 2, (out, err)
    assert err.startswith("lockstep: TMPDIR: no socket can be opened in ")
    assert "Traceback" not in err


# -- started in other ways -------------------------------------------------------------------------------------------


@pytest.mark.processes
def test_torchrun_gives_the_same_bits_and_resumes(tmp_path: Path, cache: Path, untouched: Path) -> None:
    write(tmp_path)
    shutil.copytree(untouched / "out" / "checkpoints", tmp_path / "out" / "checkpoints", symlinks=True)
    shutil.rmtree(tmp_path / "out" / "checkpoints" / f"step-{STEPS:06d}")
    status, out, err = ended(start([*TORCHRUN, "train", "run.yaml"], tmp_path, cache))
    assert status == 0, err
    assert out.count(f"resuming after step {STEPS - 10}") == 1
    assert bits(tmp_path) == bits(untouched)


def test_a_failing_job_over_old_files_shows_its_traceback_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")  # what torchrun says unless told

    def shown(parent: int, born: str, port: str = "29500") -> int:
        monkeypatch.setattr(os, "getppid", lambda: parent)
        monkeypatch.setattr("lockstep.distributed.job_record.born", lambda pid: f"{pid}, {born}")
        monkeypatch.setenv("MASTER_PORT", port)
        tell_failure(RuntimeError("the data went away"), None)
        return min(1, capsys.readouterr().err.count("the data went away"))

    assert shown(111, "Monday") == 1
    assert shown(111, "Monday") == 0  # another rank of the same job
    assert shown(222, "Monday") == 1
    assert shown(111, "Tuesday") == 1  # a container's parent is always 1
    assert shown(111, "Tuesday", port="29501") == 1  # formed again, with other machines
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
    assert shown(111, "Monday") == 1  # where nothing can be written, it is told rather twice


@pytest.mark.processes
def test_ranks_started_by_hand_over_tcp_give_the_same_bits(job: CommandJob, untouched: Path) -> None:
    job.write()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["strategy.name=allreduce", "launch.name=tcp", f"launch.init_method=tcp://127.0.0.1:{port}"]
    options.append("launch.world_size=2")
    ranks = [job.start(*options, f"launch.rank={rank}") for rank in range(2)]
    for rank in ranks:
        status, _, err = ended(rank)
        assert status == 0, err
    assert job.bits() == bits(untouched)


@pytest.fixture
def joined(tmp_path: Path, untouched: Path) -> dict[str, str]:
    """Return the variables of a rank started by another program, and a copy of a finished run."""
    write(tmp_path)
    shutil.copytree(untouched / "out", tmp_path / "out", symlinks=True)
    return {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}


@pytest.mark.processes
def test_a_joining_rank_refuses_what_the_launcher_would(
    tmp_path: Path, job: CommandJob, joined: dict[str, str]
) -> None:
    before = (tmp_path / "out" / "run.yaml").read_text()
    status, _, err = job.train("seed=1", **joined)
    assert status == 2
    assert "seed: 0 in the checkpoint, 1 now" in err
    assert "Traceback" not in err
    assert (tmp_path / "out" / "run.yaml").read_text() == before


@pytest.mark.processes
def test_joining_a_finished_run_is_reported(job: CommandJob, joined: dict[str, str], untouched: Path) -> None:
    status, out, err = job.train(**joined)
    assert status == 0, err
    assert "finished" in out
    assert job.lines() == lines(untouched)


@pytest.mark.processes
def test_killed_between_the_last_step_and_the_export(
    tmp_path: Path, job: CommandJob, joined: dict[str, str], untouched: Path
) -> None:
    shutil.rmtree(tmp_path / "out" / "export")
    assert f"resuming after step {STEPS}" in job.finish("launch.processes=1")
    assert job.bits() == bits(untouched)
    each_step_once(tmp_path, untouched)
