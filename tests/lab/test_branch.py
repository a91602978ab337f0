"""A run branched by `lockstep branch` has the bits of one that computed all its steps; differences in arithmetic are
refused by key."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from lockstep.checkpoint.manifest import name_of, newest_first
from lockstep.cli import main
from lockstep.config.run import load
from lockstep.lab.branch import parsed
from lockstep.training import fingerprints
from support import stream_runs
from support.branches import began_at, weights_of
from support.harness import TINY
from support.messages import raises

ONE = ("strategy.name=single", "launch.processes=1", "micro_batches=4")
RATE = {"learning_rate": 5e-3, "warmup_steps": 2, "schedule": "wsd", "decay_steps": 3, "max_grad_norm": 0.5}
VALUES = TINY | {"optim": RATE, "steps": 10, "checkpoint": {"every": 4, "keep": 1, "at": [6]}}
pytestmark = pytest.mark.processes


def written(folder: Path, name: str, *overrides: str, **values: Any) -> Path:
    run = load(None, [*ONE, *overrides], VALUES | values | {"output": str(folder / name)})
    (folder / f"{name}.yaml").write_text(run.dump())
    return folder / f"{name}.yaml"


def trained(folder: Path, name: str, *overrides: str, **values: Any) -> Path:
    assert main(["train", str(written(folder, name, *overrides, **values))]) == 0
    return folder / name


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the runs `first` (10 steps) and `alone` (14 steps), which share their first 8 steps."""
    folder = tmp_path_factory.mktemp("branch")
    trained(folder, "first")
    trained(folder, "alone", "steps=14")
    return folder


def branched(folder: Path, name: str, step: int, *overrides: str, **values: Any) -> int:
    return main(["branch", f"{folder / 'first'}@{step}", str(written(folder, name, *overrides, **values))])


def test_the_bits_of_a_run_that_was_never_branched(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert [m.step for _, m in newest_first(folder / "first")] == [10, 6]  # checkpoint.at is kept
    assert branched(folder, "same", 6, "steps=14") == 0
    assert weights_of(folder / "same") == weights_of(folder / "alone")
    assert began_at(folder / "same") == [6]
    assert (folder / "same/fingerprints.jsonl").read_text() == (folder / "alone/fingerprints.jsonl").read_text()
    assert "begins with the checkpoint of step 6" in capfd.readouterr().out

    assert branched(folder, "same", 6, "steps=14") == 0  # once more: it is finished
    assert began_at(folder / "same") == [6]
    assert main(["replay", str(folder / "same"), "--step", "3"]) == 0  # also a step that it has not computed


@pytest.mark.slow
def test_steps_after_the_checkpoint_are_computed_again_and_compared(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ("steps=14", "strategy.name=ddp", "launch.processes=2")
    assert branched(folder, "again", 8, *words) == 0
    assert "steps 7 to 8 are recomputed" in capfd.readouterr().out
    assert weights_of(folder / "again") == weights_of(folder / "alone")

    shutil.copytree(folder / "first", tmp_path / "first", symlinks=True)
    path = tmp_path / "first" / fingerprints.FILE
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[6]["hash"] = "0" * 16  # of step 7
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert branched(tmp_path, "wrong", 8, "steps=14") == 1
    assert "step 7 was recomputed and differs from" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("step", "key", "said"),
    [
        (6, "batch_size=24", "batch_size is 22 there and 24 here, which changes every step"),
        (6, "seed=1", "seed is 0 there and 1 here"),
        (6, "optim.max_grad_norm=0.4", "optim.max_grad_norm is 0.5 there and 0.4 here"),
        (6, "data.limit=90", "data.limit is 100 there and 90 here"),
        (6, "model.freeze=[transformer.wte.*]", "model.freeze is [] there"),
        (6, "optim.decay_steps=7", "optim.decay_steps: the learning rate of step 5 is 0.005 in one and"),
        (6, "optim.decay_steps=7", "first@4 is possible"),
        (6, "optim.schedule=[[0, 0], [2, 5.0e-3], [3, 1.0e-3]]", "first@3 is possible"),
        (9, "steps=14", "steps: the learning rate of step 9 is"),
        (12, "steps=10", "one of the runs ends there (10 steps there, 10 here)"),
        (3, "steps=14", "no checkpoint of at most 3 steps exists (existing: 6, 10)"),
        (6, "strategy.exact=false", "strategy.exact is True there and False here"),
        (6, "optim.groups=[{match: '*', learning_rate: 1.0e-3}]", "optim.groups: the rates of optim.groups"),
        (6, "average.last=3", "branch at step 4 or before"),
    ],
)
def test_branch_names_the_steps_and_keys_that_cannot_be_shared(
    step: int, key: str, said: str, folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["branch", f"{folder / 'first'}@{step}", str(folder / "first.yaml"), key, f"output={tmp_path / 'none'}"]
    if "schedule" in key:
        words += ["optim.warmup_steps=0", "optim.decay_steps=0"]
    assert main(words) == 2
    assert said in " ".join(capfd.readouterr().err.split())
    assert not (tmp_path / "none" / "checkpoints").exists()


def test_invalid_branch_arguments_are_refused(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for spec in ("first", "first@", "first@x", "@3", "first@0"):
        with raises("LS8052", repr(spec)):
            parsed(spec)
    with raises("LS1123"):
        parsed(f"{folder}@3")
    assert main(["branch", f"{folder / 'first'}@6", str(folder / "first.yaml")]) == 2
    assert "is the output of the original run" in capfd.readouterr().err


def test_a_damaged_checkpoint_is_not_begun_with(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(folder / "first", tmp_path / "first", symlinks=True)
    (file,) = (tmp_path / "first" / "checkpoints" / name_of(6)).glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    assert branched(tmp_path, "other", 6, "steps=14") == 2
    assert "does not match its hash" in capfd.readouterr().err


@pytest.mark.slow
def test_the_best_model_may_be_one_from_before(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The first evaluations are the best, so the export is a checkpoint that the branch did not compute."""
    rates = ("optim.schedule=[[0, 5.0e-3], [4, 5.0e-3], [5, 0.5], [6, 0.5]]", "optim.learning_rate=0.5")
    words = ("evaluate.every=2", "checkpoint.best=-loss", *rates, "optim.warmup_steps=0", "optim.decay_steps=0")
    trained(folder, "best-first", *words)
    trained(folder, "best-alone", *words, "steps=12")
    path = written(folder, "best", *words, "steps=12")
    assert main(["branch", f"{folder / 'best-first'}@6", str(path)]) == 0
    assert weights_of(folder / "best") == weights_of(folder / "best-alone")
    scores = [json.loads((folder / name / "scores.json").read_text()) for name in ("best", "best-alone")]
    assert scores[0] == scores[1]
    assert scores[0]["step"] < 6

    capfd.readouterr()
    assert main(["branch", f"{folder / 'best-first'}@6", str(path), "evaluate.every=3", f"output={folder}/none"]) == 2
    assert "depends on evaluations before the branch" in capfd.readouterr().err


@pytest.mark.slow
def test_branch_of_a_mixture_whose_weights_change_later(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        stream_runs.write(tmp_path / f"{name}.jsonl", stream_runs.rows_of(60, ord(name)))
    held = str(stream_runs.write(tmp_path / "held.jsonl", stream_runs.rows_of(20, 9)))

    def data(*weights: Any) -> dict[str, Any]:
        names = [{"source": str(tmp_path / f"{n}.jsonl"), "weight": w} for n, w in zip("ab", weights, strict=True)]
        names[0]["validation"] = held
        return {"sources": names, "max_length": 32}

    trained(tmp_path, "first", data=data(1, 1), task={"text": "text", "label": "label"})
    later = data([[0, 2], [6, 1]], [[0, 2], [6, 5]])
    alone = trained(tmp_path, "alone", data=later, task={"text": "text", "label": "label"})
    assert branched(tmp_path, "same", 6, data=later, task={"text": "text", "label": "label"}) == 0
    assert weights_of(tmp_path / "same") == weights_of(alone) != weights_of(tmp_path / "first")
    assert main(["replay", str(tmp_path / "same"), "--step", "9"]) == 0
    assert "3 of 3 steps were recorded; all have the same bits" in capfd.readouterr().out
    sooner = data(1, [[0, 1], [4, 7]])
    capfd.readouterr()
    assert branched(tmp_path, "other", 6, data=sooner, task={"text": "text", "label": "label"}) == 2
    assert "data.sources: step 5 has other examples" in capfd.readouterr().err


@pytest.mark.slow
def test_branch_of_a_stream(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    data = {"source": str(stream_runs.shards(tmp_path / "shards")), "stream": True, "stream_window": 24}
    data["max_length"] = 32
    trained(tmp_path, "first", data=data)
    alone = trained(tmp_path, "alone", "steps=14", data=data)
    assert branched(tmp_path, "same", 7, "steps=14", "strategy.name=ddp", "launch.processes=2", data=data) == 0
    assert weights_of(tmp_path / "same") == weights_of(alone) != weights_of(tmp_path / "first")
    capfd.readouterr()
    assert main(["replay", str(tmp_path / "same"), "--step", "9", "--from", "0", "--processes", "2"]) == 0
    said = capfd.readouterr().out
    assert "9 of 9 steps were recorded; all have the same bits" in said  # over the windows of the stream
    assert "the 8 of 22 examples with the highest losses" in said
