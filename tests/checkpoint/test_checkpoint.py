"""Checkpoints: what a load restores, what is refused, and what happens to damaged ones."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from lockstep.checkpoint.checkpoint import Checkpoints, check_resumable, newest_first
from lockstep.checkpoint.manifest import Goal, Manifest, changed, read_manifest
from lockstep.config.run import Run, RunError
from lockstep.data.job import Job
from lockstep.data.prepare import prepare
from lockstep.distributed.world import World
from lockstep.strategies.strategy import Strategy
from lockstep.tasks.classification import Classification
from lockstep.training.data_loader import StepLoader
from support.harness import build, digest
from support.messages import raises
from support.saving import job_of, run_in

SHARD = "shard-00001-of-00001.safetensors"


def opened(run: Run) -> tuple[Checkpoints, Strategy, StepLoader]:
    """Open checkpoints as a separate process would."""
    world = World(run)
    task, strategy = build(run, world)
    return (
        Checkpoints(job_of(run), world, 6),
        strategy,
        StepLoader(task, strategy.own_micro_batches(), world.device),
    )


def train(run: Run, steps: int) -> dict[int, str]:
    """Train from the newest checkpoint to `steps`, and save every step. Returns a digest of the full state per step."""
    checkpoints, strategy, feed = opened(run)
    done, _ = checkpoints.resume(strategy.state)
    found = {}
    for step in range(done, steps):
        strategy.train_step(feed.make(step), 5e-3)
        checkpoints.save(step + 1, strategy.state)
        found[step + 1] = digest(strategy.state.state_dict())
    checkpoints.settle()
    return found


def resumed(run: Run) -> tuple[int, list[str], str]:
    checkpoints, strategy, _ = opened(run)
    step, notes = checkpoints.resume(strategy.state)
    return step, notes, digest(strategy.state.state_dict())


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, str]]:
    """Four steps, all checkpoints kept."""
    folder = tmp_path_factory.mktemp("trained") / "out"
    return folder, train(run_in(folder, "checkpoint.keep=4"), 4)


@pytest.fixture
def folder(trained: tuple[Path, dict[int, str]], tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(trained[0], tmp_path / "out", symlinks=True))


def manifest_of(path: Path) -> Manifest:
    found = read_manifest(path)
    assert isinstance(found, Manifest)
    return found


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_the_state_is_restored(trained: tuple[Path, dict[int, str]]) -> None:
    folder, digests = trained
    assert len(set(digests.values())) == 4
    assert resumed(run_in(folder)) == (4, [], digests[4])


def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(folder: Path, tmp_path: Path) -> None:
    assert train(run_in(folder), 6)[6] == train(run_in(tmp_path / "untouched"), 6)[6]


def test_only_the_newest_are_kept_and_latest_is_the_last(tmp_path: Path) -> None:
    train(run_in(tmp_path, "checkpoint.keep=2"), 5)
    here = tmp_path / "checkpoints"
    assert sorted(p.name for p in here.iterdir()) == ["latest", "step-000004", "step-000005"]
    assert (here / "latest").is_symlink()
    assert (here / "latest").readlink() == Path("step-000005")


def test_nothing_is_pickled(folder: Path) -> None:
    found = {p.name for p in (folder / "checkpoints").rglob("*") if p.is_file()}
    assert found == {SHARD, "manifest.json"}
    assert set(load_file(next(folder.rglob(SHARD))))  # safetensors reads it, too


def test_no_checkpoint_is_step_0(tmp_path: Path) -> None:
    assert resumed(run_in(tmp_path))[:2] == (0, [])


def test_a_partial_checkpoint_is_ignored_and_removed(folder: Path, trained: tuple) -> None:
    here = folder / "checkpoints"
    (here / "step-000004").rename(here / ".step-000004.partial")
    run = run_in(folder, "checkpoint.keep=4")
    assert resumed(run)[::2] == (3, trained[1][3])
    assert train(run, 4) == {4: trained[1][4]}
    assert sorted(p.name for p in here.iterdir()) == ["latest", *(f"step-{i:06d}" for i in range(1, 5))]


@pytest.mark.parametrize("name", [SHARD, "manifest.json"])
def test_a_flipped_bit_falls_back_to_the_previous_checkpoint(folder: Path, name: str, trained: tuple) -> None:
    flip_a_bit(folder / "checkpoints" / "step-000004" / name)
    step, notes, state = resumed(run_in(folder))
    assert (step, state) == (3, trained[1][3])
    assert len(notes) == 1
    assert "step-000004" in notes[0]
    assert name in notes[0]


def test_a_missing_file_falls_back_too(folder: Path, trained: tuple) -> None:
    (folder / "checkpoints" / "step-000004" / SHARD).unlink()
    step, notes, state = resumed(run_in(folder))
    assert (step, state) == (3, trained[1][3])
    assert f"{SHARD} is missing" in notes[0]


@pytest.mark.parametrize("damage", ["truncated", "missing", "of another step", "of another format", "empty"])
def test_a_folder_without_a_readable_manifest_is_no_checkpoint(folder: Path, damage: str, trained: tuple) -> None:
    file = folder / "checkpoints" / "step-000004" / "manifest.json"
    text = file.read_text()
    changed = {
        "truncated": text[: len(text) // 2],
        "of another step": text.replace('"step": 4', '"step": 9'),
        "of another format": text.replace('"format": 2', '"format": 99'),
        "empty": "",
    }
    if damage == "missing":
        file.unlink()
    else:
        assert changed[damage] != text
        file.write_text(changed[damage])
    step, notes, state = resumed(run_in(folder))
    assert (step, state) == (3, trained[1][3])
    assert len(notes) == 1
    assert "manifest.json" in notes[0]


def test_a_damaged_checkpoint_is_replaced_at_its_step(folder: Path, trained: tuple) -> None:
    flip_a_bit(folder / "checkpoints" / "step-000004" / SHARD)
    run = run_in(folder, "checkpoint.keep=4")
    assert train(run, 4) == {4: trained[1][4]}
    assert resumed(run) == (4, [], trained[1][4])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("seed=1", ["seed: 0 in the checkpoint, 1 now"]),
        ("optim.learning_rate=1", ["optim.learning_rate: 0.005 in the checkpoint, 1.0 now"]),
        ("batch_size=23", ["batch_size: 22 in the checkpoint, 23 now"]),
        ("micro_batches=4", ["micro_batches: 8 in the checkpoint, 4 now"]),
        ("model.config.n_layer=3", ["model.config.n_layer: 2 in the checkpoint, 3 now"]),
        ("strategy.exact=false", ["strategy.exact: True in the checkpoint, False now"]),
        ("steps=7", ["steps: 6 in the checkpoint, 7 now"]),
    ],
)
def test_other_arithmetic_is_refused_with_the_keys_that_differ(trained: tuple, change: str, named: list[str]) -> None:
    run = run_in(trained[0], change)
    with pytest.raises(RunError) as caught:
        check_resumable(Job.of(run).with_data())
    for text in [*named, "step 4", "output=FOLDER"]:
        assert text in str(caught.value)


def test_other_data_is_refused(trained: tuple) -> None:
    run = run_in(trained[0])
    other = dataclasses.replace(prepare(run, Classification), key="another")
    with raises("LS6051"):
        check_resumable(dataclasses.replace(Job.of(run), prepared=other))


@pytest.mark.parametrize(
    "changes",
    [
        ["launch.processes=4", "strategy.name=ddp"],
        ["strategy.name=allreduce"],
        ["track.to=[tensorboard]", "track.every=1"],
        ["checkpoint.every=1", "checkpoint.keep=9", "evaluate.every=3"],
        ["task.samples=0"],
        ["name=other"],
    ],
)
def test_keys_that_do_not_affect_weights_may_change(trained: tuple, changes: list[str]) -> None:
    run = run_in(trained[0], *changes)
    manifest = check_resumable(Job.of(run).with_data())
    assert manifest is not None
    assert manifest.step == 4


def test_the_same_data_under_another_name_is_the_same_data(trained: tuple, tmp_path: Path) -> None:
    """Renaming or copying a data folder does not matter to a resume; its contents do, and so does every other key."""
    rows = [json.dumps({"text": f"word {i}", "label": i % 3}) + "\n" for i in range(60)]
    for name, lines in (("first", rows), ("other", rows[:-1])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.jsonl").write_text("".join(lines))

    def of(folder: str, *overrides: str) -> Job:
        run = run_in(trained[0], f"data={{source: {tmp_path / folder}, max_length: 32}}", *overrides)
        return Job.of(run).with_data()

    job = of("first")
    manifest = manifest_of(trained[0] / "checkpoints" / "step-000004")
    manifest = dataclasses.replace(manifest, arithmetic=job.arithmetic(), data=job.data.key)
    (tmp_path / "first").rename(tmp_path / "renamed")
    assert changed(of("renamed"), manifest) is None
    told = changed(of("other"), manifest)
    assert told is not None
    assert "trained on other data" in told
    assert f"data.source: '{tmp_path}/first' in the checkpoint, '{tmp_path}/other' now" in told
    told = changed(of("renamed", "optim.max_grad_norm=3"), manifest)
    assert told is not None
    assert "optim.max_grad_norm: 0.5 in the checkpoint, 3.0 now" in told
    assert "data.source" not in told, "the same data under another name is no reason"


def test_the_same_data_in_another_cache_is_the_same_data(
    trained: tuple, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    run = run_in(trained[0])
    job = Job.of(run).with_data()
    assert str(tmp_path) in job.data.tokenizer
    assert check_resumable(job) is not None


def test_a_change_of_version_or_threads_is_reported(folder: Path, trained: tuple) -> None:
    path = folder / "checkpoints" / "step-000004"
    changed = dataclasses.replace(manifest_of(path), threads=64, versions={"torch": "1.0"})
    (path / "manifest.json").write_bytes(changed.dump())
    step, notes, state = resumed(run_in(folder))
    assert (step, state) == (4, trained[1][4])
    assert [note.split()[0] for note in notes] == ["threads", "torch", "transformers"]
    assert "64" in notes[0]
    versions = manifest_of(path).versions | {"the processor's instruction set": "another"}
    (path / "manifest.json").write_bytes(dataclasses.replace(changed, versions=versions).dump())
    assert "instruction set was another" in resumed(run_in(folder))[1][-1]


def test_finished_needs_the_last_step_and_the_export(folder: Path, tmp_path: Path) -> None:
    run = run_in(folder)
    job = Job.of(run).with_data()
    train(run, 5)
    (folder / "export").mkdir()
    (folder / "export" / "config.json").write_text('{"a": 1}')
    (folder / "export.json").write_text('{"config.json": ""}')
    assert not Goal.of(run).met_by(check_resumable(job))
    train(run, 6)
    assert Goal.of(run).met_by(check_resumable(job))
    (folder / "export" / "config.json").unlink()
    assert not Goal.of(run).met_by(check_resumable(job))
    assert not Goal.of(run_in(tmp_path / "none")).met_by(check_resumable(job.into(tmp_path / "none")))


def test_newest_compares_numbers(folder: Path) -> None:
    here = folder / "checkpoints"
    later = dataclasses.replace(manifest_of(here / "step-000004"), step=1_000_000)
    (here / "step-1000000").mkdir()
    (here / "step-1000000" / "manifest.json").write_bytes(later.dump())
    assert [m.step for _, m in newest_first(run_in(folder).folder)] == [1_000_000, 4, 3, 2, 1]
