"""A start that cannot use an output folder never destroys its contents: unreadable checkpoints, foreign files, partial
lines."""

import json
import os
import shutil
from pathlib import Path

import pytest

from lockstep.checkpoint.checkpoint import check_resumable
from lockstep.commands.while_it_runs import checkpoints, last_metrics
from lockstep.config.run import RunError
from lockstep.track import history
from lockstep.track.jsonl import Jsonl
from support.harness import digest, tiny
from support.messages import raises
from support.saving import SHARD, Job, bytes_in, here, job_of, run_in

# -- checkpoints -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Two checkpoints, metrics, and the digest of the newest state."""
    folder = tmp_path_factory.mktemp("trained") / "out"
    job = Job(run_in(folder))
    job.saved()
    state = job.saved()
    (folder / "metrics.jsonl").write_text('{"step": 2, "split": "train", "loss": 1.0}\n')
    return folder, state


@pytest.fixture
def folder(trained: tuple[Path, str], tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained[0], tmp_path / "out", symlinks=True))


def unreadable(path: Path) -> None:
    """Make a path unreadable, for root too: it becomes a circular link."""
    shutil.move(path, path.with_name(f"kept-{path.name}"))
    path.symlink_to(path.name)


def of_a_newer_version(path: Path) -> None:
    text = path.read_text()
    path.write_text(text.replace('"format": 2', '"format": 3'))


@pytest.mark.parametrize("what", ["newer", "manifests", "shards", "folder", "link"])
def test_a_run_without_a_usable_checkpoint_is_refused_and_unchanged(what: str, folder: Path) -> None:
    kept, steps = folder / "checkpoints", [folder / "checkpoints" / f"step-{step:06d}" for step in (1, 2)]
    if what == "newer":
        for step in steps:
            of_a_newer_version(step / "manifest.json")
    elif what in ("manifests", "shards"):
        for step in steps:
            unreadable(step / ("manifest.json" if what == "manifests" else SHARD))
    elif what == "folder":
        unreadable(kept)
    else:
        kept.rename(folder / "elsewhere")
        kept.symlink_to("not-mounted")
    content = bytes_in(folder)
    run = run_in(folder)
    job = Job(run)
    with raises("LS6050"):
        job.checkpoints.resume(job.strategy.state)
    if what != "shards":  # contents are read once, at the resume
        with raises("LS6050"):
            check_resumable(job_of(run))
    assert bytes_in(folder) == content
    sound, damaged = checkpoints(run.folder, thorough=True)  # as `lockstep status` checks
    assert not sound
    assert damaged


@pytest.mark.parametrize("where", ["checkpoints", "checkpoints/step-000002", "checkpoints/step-000002/manifest.json"])
def test_circular_links_are_reported(where: str, folder: Path) -> None:
    shutil.rmtree(folder / "checkpoints/step-000001")
    path = folder / where
    path.unlink() if path.is_file() else shutil.rmtree(path)
    path.symlink_to(path.name)
    run = run_in(folder)
    with raises("LS6050", "its links form a loop"):
        check_resumable(job_of(run))


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
def test_permission_errors_do_not_restart_training_from_scratch(folder: Path) -> None:
    (folder / "checkpoints").chmod(0)
    try:
        with pytest.raises(RunError, match="Permission denied"):
            check_resumable(job_of(run_in(folder)))
    finally:
        (folder / "checkpoints").chmod(0o755)


def test_foreign_files_are_ignored(folder: Path, trained: tuple[Path, str]) -> None:
    kept = folder / "checkpoints"
    newest = kept / "step-000002"
    for path in (kept, newest):
        (path / ".DS_Store").write_bytes(b"\0\0\0\1Bud1")
        (path / "notes.txt").write_text("the good one")
        (path / f"._{SHARD}").write_bytes(b"\0\5\x16\7")  # macOS leaves it on network disks
        shutil.copy(kept / "step-000001" / SHARD, path / "model.safetensors")
    shutil.copytree(newest, kept / "step-000002 copy")
    (kept / "step-3").write_text("")
    job = Job(run_in(folder))
    assert job.checkpoints.resume(job.strategy.state) == (2, [])
    assert digest(job.strategy.state.state_dict()) == trained[1]
    job.saved()
    assert {"step-000002 copy", "step-3", "notes.txt", ".DS_Store"} < set(here(folder))


def test_an_unreadable_checkpoint_is_kept_at_its_step(folder: Path) -> None:
    of_a_newer_version(folder / "checkpoints/step-000002/manifest.json")
    newer = bytes_in(folder / "checkpoints/step-000002")
    job = Job(run_in(folder))
    step, (note,) = job.checkpoints.resume(job.strategy.state)
    assert step == 1
    assert "is of format 3, this version reads 2" in note
    job.done = 1
    job.saved()
    (aside,) = (folder / "checkpoints").glob("step-000002.unread-*")
    assert bytes_in(aside) == newer
    assert job.opened(job.run).resume(job.strategy.state) == (2, [])


# -- lines -----------------------------------------------------------------------------------------------------------


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_bytes().split(b"\n") if line]


def opened(folder: Path, after: int) -> Jsonl:
    sink = Jsonl(tiny(f"output={folder}"), None, after, None)
    sink.open()
    return sink


def test_metrics_are_not_truncated_before_the_first_new_line(tmp_path: Path) -> None:
    path, old = tmp_path / "metrics.jsonl", '{"step": 1, "split": "train"}\n{"step": 2, "split": "train"}\n'
    path.write_text(old)
    for after in (0, 1):
        opened(tmp_path, after).close("failed")  # it was killed, or failed, before its first step
        assert path.read_text() == old
    sink = opened(tmp_path, 1)
    sink.log(2, "train", {"loss": 3.0})
    sink.close("done")
    assert lines_of(path) == [{"step": 1, "split": "train"}, {"step": 2, "split": "train", "loss": 3.0}]


TEXT = "\u2028 \u00e9 \u0085 \U0001f600"


@pytest.mark.parametrize("cut", range(1, 60))
def test_partial_lines_are_truncated(cut: int, tmp_path: Path) -> None:
    """A full disk may cut a line in the middle of a multi-byte character; U+2028 and similar characters end no line."""
    sink = opened(tmp_path, 0)
    for step in (1, 2, 3):
        sink.show(step, [{"text": TEXT, "label": "x"}])
    sink.close("stopped")
    path = tmp_path / "samples.jsonl"
    whole = path.read_bytes()
    assert whole.count(b"\n") == 3
    path.write_bytes(whole[:-cut])
    sink = opened(tmp_path, 2)
    sink.show(3, [{"text": TEXT, "label": "x"}])
    sink.close("done")
    assert path.read_bytes() == whole


def test_readers_skip_invalid_lines(tmp_path: Path) -> None:
    values = {"step": 1, "split": "train", "text": TEXT}
    line = json.dumps(values, ensure_ascii=False).encode()
    (tmp_path / "metrics.jsonl").write_bytes(b"\0\0\0\n" + line + b"\n\xff\xfe\n[1]\n" + line[:-4])
    assert list(history.lines_of(tmp_path / "metrics.jsonl", ("step", "split"))) == [values]
    assert last_metrics(tmp_path) == {"train": values}


def test_duplicate_lines_are_dropped(tmp_path: Path) -> None:
    line = '{"step": 1, "split": "train"}\n'
    (tmp_path / "metrics.jsonl").write_text(line * 2)
    sink = opened(tmp_path, 1)
    sink.log(2, "train", {})
    sink.close("done")
    assert [found["step"] for found in lines_of(tmp_path / "metrics.jsonl")] == [1, 2]


def test_lone_surrogates_are_written(tmp_path: Path) -> None:
    """A byte-level tokenizer may produce such text, which is no reason to lose the line."""
    sink = opened(tmp_path, 0)
    sink.show(1, [{"text": "\ud83d"}])
    sink.close("done")
    assert lines_of(tmp_path / "samples.jsonl")[0]["samples"] == [{"text": "\ud83d"}]
