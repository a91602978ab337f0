"""An export is hashed, synced and readable like its neighbour files, and the memory of a save is allocated before the
first step."""

import hashlib
import json
import os
import resource
import stat
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.checkpoint import export_hashes, shard_files
from lockstep.checkpoint.checkpoint import CheckpointError
from lockstep.checkpoint.export import write_export
from lockstep.checkpoint.manifest import Goal, newest_first
from lockstep.config.run import write_run_yaml
from lockstep.distributed.world import World
from lockstep.tasks.models.models import exported_model
from lockstep.track.report.report import write_comparison
from support.checkpoints import digest as digest_of
from support.harness import build, digest, tiny
from support.messages import raises
from support.saving import Job, run_in
from support.task_runs import make

# -- the export ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A finished run of two steps, with its export."""
    job = Job(run_in(tmp_path_factory.mktemp("export") / "out", "steps=2"))
    job.checkpoints.steps = 2
    job.saved()
    job.saved()
    write(job)
    return job


def write(job: Job) -> Path:
    weights = job.strategy.state.export()
    assert weights is not None
    return write_export(job.task, weights, {"validation": {"loss": 1.0, "examples": 3}}, 2)


def is_finished(job: Job) -> bool:
    return Goal.of(job.run).met_by(next(manifest for _, manifest in newest_first(job.run.folder)))


def test_every_file_has_the_mode_that_the_umask_leaves(trained: Job) -> None:
    before = os.umask(0o027)
    try:
        export = write(trained)
        (export.parent / "mine").touch()
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in export.rglob("*") if path.is_file()}
    assert "model.safetensors" in modes
    assert set(modes.values()) == {0o640}
    assert {path.name for path in export.parent.iterdir()} == {"checkpoints", "export", "export.json", "mine"}


@pytest.mark.parametrize("kib", [1, 4, 20])
def test_a_full_disk_is_an_oserror_for_every_writer(trained: Job, kib: int) -> None:
    before, limits = export_hashes.damage(trained.run.folder), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (kib * 1024, limits[1]))  # Python ignores the signal SIGXFSZ
    try:
        with pytest.raises(OSError, match="File too large"):  # safetensors and tokenizers raise their own exceptions
            write(trained)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert export_hashes.damage(trained.run.folder) == before


def test_files_are_synced_before_they_are_renamed(trained: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    sync, rename = export_hashes.sync, os.rename
    monkeypatch.setattr(export_hashes, "sync", lambda path: (events.append(f"sync {path.name}"), sync(path)))
    monkeypatch.setattr(os, "rename", lambda a, b: (events.append(f"rename {Path(a).name}"), rename(a, b)))
    write(trained)
    place = events.index("rename .export.partial")
    assert {"sync model.safetensors", "sync config.json", "sync .export.partial"} < set(events[:place])
    assert f"sync {trained.run.folder.name}" in events[place:]


@pytest.mark.parametrize(
    "what", ["flipped", "cut", "missing", "zeros in JSON", "no keys", "no hashes", "tokenizer", "no record"]
)
def test_a_damaged_export_is_not_finished(what: str, trained: Job) -> None:
    export = write(trained)
    assert is_finished(trained)
    weights = export / "model.safetensors"
    if what == "flipped":
        content = bytearray(weights.read_bytes())
        content[-1] ^= 1
        weights.write_bytes(content)
    elif what == "cut":
        os.truncate(weights, 100)
    elif what == "missing":
        weights.unlink()
    elif what == "zeros in JSON":
        (export / "config.json").write_bytes(bytes(200))
    elif what == "no keys":
        (export / "config.json").write_text("[1]")
    elif what == "no record":
        (export.parent / export_hashes.FILE).unlink()
    elif what == "tokenizer":
        (export / "tokenizer.json").unlink()
    else:
        (export.parent / export_hashes.FILE).write_text("[")
    assert not is_finished(trained)
    assert export_hashes.damage(export.parent) is not None


def test_card_and_config_may_be_edited(trained: Job) -> None:
    export = write(trained)
    (export / "README.md").write_text("mine")
    config = json.loads((export / "config.json").read_text())
    (export / "config.json").write_text(json.dumps(config | {"note": "mine"}))
    (export / "more.txt").touch()
    assert is_finished(trained)
    assert hashlib.sha256((export / "model.safetensors").read_bytes()).hexdigest()


def test_links_of_a_comparison_lead_to_the_pages(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("a #1 50%", "b:c?d")]
    for folder in folders:
        write_run_yaml(tiny(output=str(folder)))
    page = write_comparison(folders, tmp_path / "comparison.html").read_text()
    assert 'href="a%20%231%2050%25/report.html"' in page
    assert 'href="b%3Ac%3Fd/report.html"' in page


# -- the memory of a save --------------------------------------------------------------------------------------------


def full(*_: Any) -> None:
    raise MemoryError("cannot allocate 3 GiB")


def test_the_dry_run_allocates_the_buffer_and_leaves_nothing(tmp_path: Path) -> None:
    job, untouched = Job(run_in(tmp_path / "a")), Job(run_in(tmp_path / "b"))
    before = digest(job.strategy.state.state_dict())
    job.strategy.dry_run(job.feed.longest(), lambda: job.checkpoints.dry_run(job.strategy.state))
    assert digest(job.strategy.state.state_dict()) == before
    shard = job.checkpoints._shard
    assert shard is not None
    state = job.saved()
    assert job.checkpoints._shard is shard  # the memory allocated in the trial, and no other
    assert state == untouched.saved() == digest_of(tmp_path / "a/checkpoints/step-000001")


@pytest.mark.parametrize("then", ["continue", "stop"])
def test_on_failure_applies_if_a_checkpoint_does_not_fit_into_memory(
    then: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(run_in(tmp_path / "out", f"checkpoint.on_failure={then}"))
    job.step()
    monkeypatch.setattr(shard_files, "Shard", full)
    if then == "stop":
        with raises("LS6000", "rank 0", "3"):
            job.checkpoints.dry_run(job.strategy.state)
        with raises("LS6004", "3", error=CheckpointError):
            job.save()
        return
    job.checkpoints.dry_run(job.strategy.state)
    job.save()
    assert [text.partition(":")[0] for text in job.said] == [
        "no checkpoint can be written",
        "the checkpoint of step 1 could not be written (rank 0 on " + job.world.host,
    ]
    monkeypatch.undo()
    state = job.saved()
    assert digest_of(tmp_path / "out/checkpoints/step-000002") == state


def test_moments_created_later_are_saved(tmp_path: Path) -> None:
    """A moment of a weight that the dry run, or the first save, did not use."""
    job = Job(run_in(tmp_path / "out"))
    job.step()
    parts = job.strategy.state.sharded_state_dict()
    assert not job.checkpoints._lay_out({k: v for k, v in parts.items() if not k.startswith("optimizer.exp_avg.")})
    job.save()
    job.checkpoints.settle()
    assert digest_of(tmp_path / "out/checkpoints/step-000001") == digest(job.strategy.state.state_dict())


@pytest.mark.parametrize("kind", ["packed", "translation", "token_classification"])
def test_an_export_draws_no_weights_that_it_overwrites(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Export draws no random weights, and has the run's weights, tied and computed ones included."""
    run = make(tmp_path, kind, "strategy.name=single")
    task, strategy = build(run, World(run))
    weights = strategy.state.export()
    assert weights is not None
    drawn = list[str]()
    for name in ("normal_", "uniform_"):
        monkeypatch.setattr(torch.Tensor, name, lambda tensor, *_, name=name, **__: drawn.append(name) or tensor)
    (tmp_path / "export").mkdir()
    task.write(tmp_path / "export", weights)
    assert drawn == []
    monkeypatch.undo()
    loaded = exported_model(str(task.head), tmp_path / "export", run.model).state_dict()
    assert loaded.keys() == weights.keys()
    assert all(torch.equal(loaded[name], weights[name]) for name in weights)
    strategy.close()
