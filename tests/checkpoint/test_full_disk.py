"""Disks that are too small or fill up during training: the run is refused first or warns, and no model is lost."""

import argparse
import hashlib
import io
import json
import os
import re
import resource
from contextlib import redirect_stdout, suppress
from pathlib import Path

import pytest
from transformers import AutoModelForSequenceClassification

from lockstep.checkpoint import export_hashes
from lockstep.checkpoint.folder import DiskSpace
from lockstep.checkpoint.manifest import Goal, newest_first
from lockstep.commands import while_it_runs
from lockstep.config.errors import HALTED, uncoded
from lockstep.config.run import Run
from lockstep.data.job import Job
from lockstep.distributed import job_record
from lockstep.training import disk_forecast, finish, publish, train_job
from lockstep_trace.coded import codes
from support.messages import raises
from support.saving import disk, run_in, trained

pytestmark = pytest.mark.processes  # mount


def fill(folder: Path, left: int) -> None:
    """Fill a disk except for about `left` bytes."""
    with suppress(OSError), open(folder / "ballast", "wb", buffering=0) as file:
        while file.write(bytes(4096)) == 4096:
            pass
    os.truncate(folder / "ballast", max(0, (folder / "ballast").stat().st_size - left))


def full_after(run: Run, step: int) -> tuple[int, str]:
    """Start a run whose disk fills up after a number of updates."""
    return trained(run, step, lambda: fill(run.folder.parent, 0))


def status_of(run: Run) -> str:
    """Return the output of `lockstep status`."""
    with redirect_stdout(io.StringIO()) as printed:
        while_it_runs.run_status(argparse.Namespace(output=str(run.folder), verify=False, trust=False, json=False))
    return uncoded(printed.getvalue())


def is_consistent(run: Run, status: int, said: str) -> None:
    """Check that the output folder agrees with its status, and that no file is incomplete."""
    record = job_record.read(run.folder)
    assert record is not None, said
    assert record.status == status, said
    assert [path for path in run.folder.rglob("*.partial") if path.parent.name != "checkpoints"] == []
    newest = next((manifest for _, manifest in newest_first(run.folder)), None)
    if status == 0:
        assert Goal.of(run).met_by(newest), said
        assert (run.folder / "report.html").is_file(), said


def weights_in(export: Path) -> str:
    return hashlib.sha256((export / "model.safetensors").read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights of an uninterrupted run of this job."""
    run = run_in(tmp_path_factory.mktemp("untouched") / "out")
    assert trained(run)[0] == 0
    return weights_in(run.folder / "export")


def test_a_limit_of_file_sizes_is_refused_before_the_first_step(tmp_path: Path) -> None:
    """A limit (`ulimit -f`) below the model's size is refused before training: the model would be lost at the end."""
    run = run_in(tmp_path / "out")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, before[1]))
        with raises("LS6160", "at most 150 kB"):  # `lockstep plan`, from the sizes of a model without weights
            disk_forecast.check(Job.of(run, 1).with_data())
        status, said = trained(run)
        space = DiskSpace(Job.of(run))
        space.export = 150_000
        space.check(0, 9, 3, 1)
        space.export = 200_000
        with raises("LS6160", "at most 150 kB", "the export has a file of about 200 kB"):
            space.check(0, 9, 3, 1)
        space.export_written = True
        space.check(0, 9, 3, 1)
        space.too_large = "tokenizer.json"
        with raises("LS6160", "larger one (tokenizer.json)"):
            space.check(0, 9, 3, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (status, codes(said)[-1]) == (2, "LS6160")
    assert not (run.folder / "metrics.jsonl").exists()
    assert not (run.folder / "export").exists()


# kB; a checkpoint takes 496, the export 182, all other files 200
SIZES = [900, 1300, *(pytest.param(size, marks=pytest.mark.long) for size in (64, 300, 600, 1100, 1700, 2500))]


@pytest.mark.parametrize("kilobytes", SIZES)
def test_a_run_on_a_disk_of_any_size_loses_nothing(kilobytes: int, tmp_path: Path, weights: str) -> None:
    """Either the run is refused before the first step, or it finishes; nothing is lost after training."""
    with disk(tmp_path / "disk", kilobytes):
        run = run_in(tmp_path / "disk/out", "checkpoint.every=1", "checkpoint.keep=3")
        status, said = trained(run)
        is_consistent(run, status, said)
        if status == 2:
            assert re.search(r"output: the disk of \S+ has [\d.]+ .B left, and the run needs [\d.]+ .B", said)
            assert not (run.folder / "metrics.jsonl").exists()
            assert kilobytes <= 900
        else:
            assert (status, kilobytes > 900) == (0, True), said
            assert weights_in(run.folder / "export") == weights
            assert (run.folder / "checkpoints/step-000006").is_dir()
            assert "Traceback" not in said
            assert ("to make room" in said) == (kilobytes < 2500), said


@pytest.mark.parametrize("after", [1, 4])
def test_a_disk_that_fills_up_while_a_run_trains(after: int, tmp_path: Path, weights: str) -> None:
    """The model is saved elsewhere, and the message names the place; the same command then does what the message
    promises."""
    with disk(tmp_path / "disk", 8000):
        run = run_in(tmp_path / "disk/out", f"checkpoint.rescue={tmp_path}/rescue", "checkpoint.every=2")
        status, said = full_after(run, after)
        is_consistent(run, status, said)
        assert status == 1
        assert "free disk space" in said  # before the end
        assert f"{run.folder}/export could not be written (No space left on device). The model is in" in said
        (place,) = (tmp_path / "rescue").iterdir()
        assert f"{place}/export instead (from_pretrained loads it): keep it" in said
        assert export_hashes.damage(place) is None
        assert f"the model is in {place}/export" in status_of(run)
        assert weights_in(place / "export") == weights
        assert AutoModelForSequenceClassification.from_pretrained(place / "export").num_labels == 6
        goes_on = "resumes from step 2" if after == 4 else "starts over: there is no checkpoint"
        assert uncoded(said).endswith(f"The same command {goes_on}")
        (tmp_path / "disk/ballast").unlink()
        status, said = trained(run)
        is_consistent(run, status, said)
        assert status == 0
        assert ("resuming after step 2" in said) == (after == 4)
        assert "rescued" not in status_of(run).replace(str(run.folder), "")
        assert weights_in(run.folder / "export") == weights


def test_a_disk_that_is_full_once_the_last_checkpoint_is_there(tmp_path: Path, weights: str) -> None:
    """The export only needs space: the message says so, and no other folder is created."""
    with disk(tmp_path / "disk", 8000):
        run = run_in(tmp_path / "disk/out", f"checkpoint.rescue={tmp_path}/rescue", "checkpoint.keep=1")
        with pytest.MonkeyPatch.context() as patch:
            real = publish.write_export
            patch.setattr(publish, "write_export", lambda *given: (fill(tmp_path / "disk", 0), real(*given)))
            status, said = trained(run)
        is_consistent(run, status, said)
        assert status == 1
        assert "which writes it from step-000006" in said
        assert not (tmp_path / "rescue").exists()
        (tmp_path / "disk/ballast").unlink()
        status, said = trained(run)
        is_consistent(run, status, said)
        assert (status, weights_in(run.folder / "export")) == (0, weights)


def test_a_disk_that_is_full_when_the_scores_are_there(tmp_path: Path, weights: str) -> None:
    """An older checkpoint is deleted to make room for the scores too, not only for the export."""
    with disk(tmp_path / "disk", 8000):
        run = run_in(tmp_path / "disk/out", "checkpoint.every=2")
        with pytest.MonkeyPatch.context() as patch:
            real = train_job.final_scores
            patch.setattr(train_job, "final_scores", lambda *given: (fill(tmp_path / "disk", 0), real(*given))[1])
            status, said = trained(run)
        is_consistent(run, status, said)
        assert (status, weights_in(run.folder / "export")) == (0, weights)
        assert "to make room, lockstep removed " in said
        assert "step-000004" in said
        assert "could not be written" not in said
        assert json.loads((run.folder / "scores.json").read_text())["step"] == 6
        last = json.loads((run.folder / "metrics.jsonl").read_text().splitlines()[-1])
        assert (last["step"], last["split"]) == (6, "test")


def test_a_full_disk_does_not_restart_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk ends a job that has restarts left: it would train again and fail on the same disk."""
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "2")
    with disk(tmp_path / "disk", 8000):
        run = run_in(tmp_path / "disk/out", f"checkpoint.rescue={tmp_path}/rescue")
        assert full_after(run, 1)[0] == HALTED


def test_a_disk_that_is_full_once_the_export_is_there(tmp_path: Path) -> None:
    """launch.json has the exit status even so, and no message names the missing report page."""
    with disk(tmp_path / "disk", 8000):
        run = run_in(tmp_path / "disk/out")
        with pytest.MonkeyPatch.context() as patch:
            real = finish.write_summary
            patch.setattr(finish, "write_summary", lambda *given: (fill(tmp_path / "disk", 0), real(*given))[1])
            status, said = trained(run)
        record = job_record.read(run.folder)
        assert status == 0
        assert record is not None
        assert record.status == 0
        assert list(run.folder.rglob("*.partial")) == []
        assert "report.html could not be written" in said
        assert "report file:" not in said
