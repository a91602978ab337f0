"""Commands that only read another user's OUTPUT import and run nothing from it, and read, push and signal nothing
outside of it."""

import json
import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from lockstep.checkpoint.hub_push import push
from lockstep.cli import main
from lockstep.config.run import load
from lockstep.distributed import job_record
from lockstep.launchers import output_lock, slurm
from lockstep.launchers.slurm import log_of
from lockstep.training.evaluate_export import finished
from support.messages import mentions, raises
from support.saving import run_in, trained

pytestmark = pytest.mark.slow  # together a third of the time of tests without processes

RUN = {"data": {"source": "builtin/emotion"}, "model": {"type": "gpt2"}, "steps": 4}


@pytest.fixture
def theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return another user's OUTPUT, with a module in its parent, the working directory, that leaves a file when
    imported."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evil_module.py").write_text(
        "open('ran', 'w')\nfrom lockstep.launchers.local import Local\nclass Thing(Local): pass\n"
    )
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "evil_module", raising=False)
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "run.yaml").write_text(yaml.safe_dump(RUN))
    (folder / "log.txt").write_text("a line \x1b]0;owned\x07\n")
    job_record.write(folder, job_record.here("local", 1))
    return folder


@pytest.mark.parametrize("command", ["status", "logs", "stop", "report"])
@pytest.mark.parametrize("section", ["task", "launch", "track", "strategy", "launch.json"])
def test_nothing_of_the_folder_is_imported(command: str, section: str, theirs: Path, tmp_path: Path) -> None:
    name = "evil_module.Thing"
    if section == "launch.json":
        job_record.write(theirs, replace(job_record.here(name, 1), status=0))
    else:
        job_record.write(theirs, replace(job_record.here("local", 1), status=0))
        own = {"to": [name], name: {"a": 1}} if section == "track" else {"name": name, "a": 1}
        (theirs / "run.yaml").write_text(yaml.safe_dump(RUN | {section: own}))
    main([command, str(theirs)])
    assert not (tmp_path / "ran").exists()


def test_a_users_launcher_is_imported_on_request(theirs: Path, tmp_path: Path) -> None:
    job_record.write(theirs, replace(job_record.here("evil_module.Thing", 1), status=0))
    assert main(["status", str(theirs)]) == 2
    assert main(["status", str(theirs), "--trust"]) == 0
    assert (tmp_path / "ran").exists()


def test_escape_sequences_of_a_log_are_not_printed(theirs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["logs", str(theirs)]) == 0
    assert capsys.readouterr().out == "a line \\x1b]0;owned\\x07\n"


def test_files_outside_output_are_not_shown(theirs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "private").write_text("a private key\n")
    (theirs / "log.txt").unlink()
    (theirs / "log.txt").symlink_to(tmp_path / "private")
    assert main(["logs", str(theirs)]) == 2
    run = load(theirs / "run.yaml", {"output": str(theirs)})
    (tmp_path / "slurm-1_0.out").symlink_to("/etc/passwd")
    outside = (tmp_path / "private", theirs / "../private", Path("/etc/passwd"))
    for path, code in [*((path, "LS7391") for path in outside), (tmp_path / "slurm-1_0.out", "LS7000")]:
        with raises(code, path.name):
            log_of(run.folder, job_record.here("slurm", 1, "1", {"log": str(path)}))
    (theirs / "slurm-2.out").symlink_to("/etc/passwd")
    with raises("LS7000"):
        log_of(run.folder, job_record.here("slurm", 1, "2"))
    beside = tmp_path / "slurm-12_3.out"  # a sweep's own
    assert log_of(run.folder, job_record.here("slurm", 1, "15", {"log": str(beside)})) == beside
    assert "private key" not in "".join(capsys.readouterr())


@pytest.mark.parametrize("job", ["--all", "-u me", "1;id", "1\nid", "$(id)", "a b", 3, ["1"]])
def test_an_invalid_job_id_is_not_passed_to_a_scheduler(job: object, theirs: Path) -> None:
    for changed in ({"job": job}, {"facts": {"step": job}}, {"facts": {"namespace": job}}):
        values = json.loads((theirs / "launch.json").read_text()) | changed
        (theirs / "launch.json").write_text(json.dumps(values))
        assert job_record.read(theirs) is None
    for good in ("12", "12_3", "12.0", "lockstep-run-0a1b2c", "ns/name", "arn:aws:eks:eu-1:1:cluster/x", "1_[0-3%2]"):
        values = json.loads((theirs / "launch.json").read_text()) | {"job": good, "facts": {}}
        (theirs / "launch.json").write_text(json.dumps(values))
        assert job_record.read(theirs) is not None, good


def test_a_process_named_by_another_user_is_not_stopped(
    theirs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert main(["stop", str(theirs), "--wait", "0"]) == 2  # it names this very process
    assert mentions(capsys.readouterr().err, "LS8137")


def test_code_of_a_model_folder_runs_only_on_request(theirs: Path) -> None:
    (theirs / "export").mkdir()
    (theirs / "export/config.json").write_text('{"a": 1}')
    (theirs / "export.json").write_text('{"config.json": ""}')
    asking = RUN | {"model": {"source": "gpt2", "trust_remote_code": True}}
    (theirs / "run.yaml").write_text(yaml.safe_dump(asking))
    with raises("LS5052"):
        finished(theirs, [])
    assert main(["predict", str(theirs), "a text"]) == 2
    assert finished(theirs, ["model.trust_remote_code=true"])[0].model.trust_remote_code
    assert not finished(theirs, {"model.trust_remote_code": False})[0].model.trust_remote_code


@pytest.mark.parametrize("linked", ["export/notes.txt", "export/deep/notes.txt", "export"])
def test_a_link_is_not_pushed(linked: str, theirs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_of_nobody")
    real = tmp_path / "private"
    real.mkdir()
    (real / "README.md").write_text("---\nlibrary_name: transformers\n---\n")
    if linked == "export":
        (theirs / "export").symlink_to(real)
    else:
        (theirs / linked).parent.mkdir(parents=True)
        (theirs / "export/README.md").write_text("a card")
        (theirs / linked).symlink_to(real / "README.md")
    with raises("LS6018"):
        push(theirs, "user/model", True, print)


def job(folder: Path, **values: object) -> slurm.BatchJob:
    asked = {
        "name": "run",
        "nodes": 1,
        "tasks": 1,
        "processes": 1,
        "folder": folder,
        "here": Path("/"),
        "command": ["x"],
    }
    return slurm.BatchJob(**(asked | values))  # type: ignore[arg-type]


@pytest.mark.processes
@pytest.mark.parametrize("name", ["$(touch ran)", "`touch ran`", 'a" ; touch ran; "', "a'; touch ran; '", "$HOME x"])
def test_a_folder_name_injects_nothing_into_an_array_script(name: str, tmp_path: Path) -> None:
    text = slurm.text_of(job(Path("/data") / name, array=[Path("/data") / name / "run.yaml"], command=["echo", "$run"]))
    shown = 'printf "%s\\n" "$LOCKSTEP_FACT" "$run"\n'
    lines = [line for line in text.splitlines() if line.startswith(("export", "runs", "run=", ")", "  "))]
    script = "\n".join(line for line in lines if "scontrol" not in line) + "\n" + shown
    variables = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "0", "PATH": os.environ["PATH"]}
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=variables, capture_output=True, text=True)
    assert done.stdout.splitlines() == [f"log=/data/{name}/slurm-7_0.out", f"/data/{name}/run.yaml"], done.stderr
    assert not (tmp_path / "ran").exists()


def test_a_newline_injects_nothing_into_a_job_script(tmp_path: Path) -> None:
    with raises("LS7395"):
        slurm.text_of(job(Path("/data/a\ntouch ran")))
    with raises("LS7395"):
        slurm.text_of(job(Path("/data"), here=Path("/a\ntouch ran")))
    assert shlex.split(slurm.text_of(job(Path("/data/a b"))).splitlines()[1].partition("again by hand:")[2]) == [
        "sbatch",
        "/data/a b/job.sbatch",
    ]


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("what", ["documents", "another run"])
def test_output_is_not_written_through_a_link(what: str, tmp_path: Path) -> None:
    """The link's target stays unchanged, and the model is saved elsewhere."""
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "log.txt").write_text("theirs\n")
    (theirs / "checkpoints").mkdir()
    if what == "another run":
        (theirs / "run.yaml").write_text(yaml.safe_dump(RUN))
        job_record.write(theirs, replace(job_record.here("local", 1), main=job_record.Process("elsewhere", 1, "")))
    before = files_in(theirs)
    run = run_in(tmp_path / "out", f"checkpoint.rescue={tmp_path}/rescue", "checkpoint.every=2")

    def swap() -> None:
        run.folder.rename(tmp_path / "moved")
        run.folder.symlink_to(theirs)

    status, said = trained(run, 3, swap)
    assert files_in(theirs) == before
    assert list((theirs / "checkpoints").iterdir()) == []
    assert status == 1
    assert f"was replaced by a link to {theirs}, where nothing is written" in said
    (place,) = (tmp_path / "rescue").iterdir()
    assert (place / "export/model.safetensors").is_file()
    assert mentions(said, "LS5091", str(place / "export"), "there is no checkpoint")
    assert (tmp_path / "moved/checkpoints/step-000002").is_dir()  # what was there before


def test_an_output_that_is_moved_and_linked_is_written_on(tmp_path: Path) -> None:
    run = run_in(tmp_path / "out", "checkpoint.every=2")

    def move() -> None:
        run.folder.rename(tmp_path / "elsewhere")
        run.folder.symlink_to(tmp_path / "elsewhere")

    status, said = trained(run, 3, move)
    assert status == 0, said
    assert (tmp_path / "elsewhere/checkpoints/step-000006").is_dir()
    assert (tmp_path / "elsewhere/export/model.safetensors").is_file()


@pytest.mark.parametrize("what", ["documents", "another run"])
def test_checkpoints_are_not_written_through_a_link(what: str, tmp_path: Path) -> None:
    """The link's target, with folders named like checkpoints, stays unchanged; the run prints a note at each save."""
    theirs = tmp_path / "theirs"
    for name in ("step-000002", "step-000004", "step-000006"):
        (theirs / name).mkdir(parents=True)
        (theirs / name / "letter.txt").write_text("mine")
        if what == "another run":
            (theirs / name / "manifest.json").write_text("{}")
    before = files_in(theirs)
    run = run_in(tmp_path / "out", "checkpoint.every=2")

    def swap() -> None:
        (run.folder / "checkpoints").rename(tmp_path / "moved")
        (run.folder / "checkpoints").symlink_to(theirs)

    status, said = trained(run, 3, swap)
    assert files_in(theirs) == before
    assert sorted(path.name for path in theirs.iterdir()) == ["step-000002", "step-000004", "step-000006"]
    assert said.count(f"checkpoints was replaced by a link to {theirs}, where nothing is written") == 2
    assert status == 0  # the model is there
    assert (tmp_path / "out/export/model.safetensors").is_file()
    assert (tmp_path / "moved/step-000002").is_dir()  # what was there before


@pytest.mark.parametrize("when", ["from the start", "moved"])
def test_checkpoints_on_another_disk_are_written(when: str, tmp_path: Path) -> None:
    run = run_in(tmp_path / "out", "checkpoint.every=2")
    checkpoints, disk = run.folder / "checkpoints", tmp_path / "disk"

    def move() -> None:
        if when == "moved":
            checkpoints.rename(disk)
            checkpoints.symlink_to(disk)

    if when == "from the start":
        disk.mkdir()
        run.folder.mkdir(parents=True, exist_ok=True)
        checkpoints.symlink_to(disk)
    status, said = trained(run, 3, move)
    assert status == 0, said
    assert (disk / "step-000006").is_dir()
    assert "replaced by a link" not in said


@pytest.mark.parametrize("name", [".export.partial", ".export.removed"])
def test_temporary_files_are_not_written_through_a_link(name: str, tmp_path: Path) -> None:
    (theirs := tmp_path / "theirs").mkdir()
    (theirs / "letter.txt").write_text("mine")
    run = run_in(tmp_path / "out")

    def swap() -> None:
        (run.folder / name).symlink_to(theirs)

    status, said = trained(run, 3, swap)
    assert status == 0, said
    assert files_in(theirs) == {"letter.txt": b"mine"}
    assert (tmp_path / "out/export/model.safetensors").is_file()
    assert not (tmp_path / "out" / name).is_symlink()


@pytest.mark.parametrize("name", ["tensorboard", "profile"])
def test_other_folders_of_output_are_not_written_through_a_link(name: str, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    (theirs := tmp_path / "theirs").mkdir()
    run = run_in(tmp_path / "out", "track.to=[tensorboard]", "track.every=1", "profile.steps=1", "profile.after=3")

    def swap() -> None:
        if (run.folder / name).exists():
            (run.folder / name).rename(tmp_path / "moved")
        (run.folder / name).symlink_to(theirs)

    status, said = trained(run, 3, swap)
    assert status == 0, said
    assert list(theirs.iterdir()) == []
    assert f"{name} was replaced by a link to {theirs}" in said


@pytest.mark.long
def test_files_of_output_are_not_written_through_links(tmp_path: Path) -> None:
    """Every file that is written while training is replaced by a link; a file that is deleted begins again."""
    (theirs := tmp_path / "theirs").mkdir()
    run = run_in(tmp_path / "out", "track.every=1", "sdc_check.every=2", "evaluate.every=2")
    names = [f"{name}.jsonl" for name in ("metrics", "system", "events", "ranks")]
    names += ["log.txt", "launch.json", "tables.json", "scores.json", "report.html", "export.json", "run.yaml"]

    def swap() -> None:
        (run.folder / "fingerprints.jsonl").unlink()
        for name in names:
            (theirs / name).write_text("{}\n")
            (run.folder / name).unlink(missing_ok=True)
            (run.folder / name).symlink_to(theirs / name)

    status, said = trained(run, 3, swap)
    assert files_in(theirs) == dict.fromkeys(names, b"{}\n")
    assert status == 0, said
    assert f"{run.folder / 'metrics.jsonl'} is a link to {theirs / 'metrics.jsonl'}, and nothing is" in said
    assert f"{run.folder / 'events.jsonl'} is a link to {theirs / 'events.jsonl'}: lines of this run" in said
    assert len((run.folder / "fingerprints.jsonl").read_bytes().splitlines()) >= 3
    assert not (run.folder / "report.html").is_symlink()
    with raises("LS7348", "metrics.jsonl", str(theirs)):
        output_lock.check_ours(run.folder)
