"""`lockstep verify --write` and `--against`: a few steps of training as a test of a commit."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lockstep.cli import main
from lockstep.config.run import load
from lockstep.distributed.event_log import versions
from lockstep.distributed.hardware import processor
from lockstep.proof import recording
from lockstep.training.step_record import read_records
from support.harness import TINY
from support.messages import mentions
from support.places import TESTS

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run file, and what its first steps came to on one process."""
    folder = tmp_path_factory.mktemp("golden")
    run = load(None, ["strategy.name=single", "launch.processes=1"], TINY | {"output": str(folder / "out")})
    (folder / "run.yaml").write_text(run.dump())
    assert main(["verify", str(folder / "run.yaml"), "--steps", "3", "--write", str(folder / "golden.jsonl")]) == 0
    return folder


def asked(folder: Path, *words: str, golden: Path | None = None) -> int:
    return main(["verify", str(folder / "run.yaml"), *words, "--against", str(golden or folder / "golden.jsonl")])


def test_equal_training_writes_equal_files(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    about, steps = read_records(folder / "golden.jsonl")
    assert len(steps) == 3
    assert about["data"]
    assert about["versions"]["torch"]
    assert not (folder / "out").exists()
    assert asked(folder) == 0
    assert "the same bits" in capfd.readouterr().out


def test_two_processes_have_the_bits_of_the_file(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert asked(folder, "strategy.name=ddp", "launch.processes=2") == 0
    said = capfd.readouterr().out
    assert "the same bits" in said
    assert "processes: 1 then, 2 now" in said


@pytest.mark.parametrize(
    ("key", "said"),
    [("optim.learning_rate=0.0051", "step 1: weights after the step:"), ("seed=1", "step 0: loss is "),
     ("optim.max_grad_norm=0.4", "step 1: weights after the step:")],
)  # fmt: skip
def test_differences_are_named(key: str, said: str, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert asked(folder, key) == 1
    out = " ".join(capfd.readouterr().out.split())
    assert said in out
    assert key.partition("=")[0] + ":" in out


def test_a_change_of_code_is_found(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that no key tells of: a rate that is wrong in its last bit."""
    right = recording.learning_rate
    monkeypatch.setattr(recording, "learning_rate", lambda *given: right(*given) * (1 + 2**-20))
    assert asked(folder) == 1
    out = capfd.readouterr().out
    assert "step 1: weights after the step:" in out
    assert "no other recorded value has changed" in out


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "No such file"),
        ("{", "is not JSON"),
        ("{}", "was not written by this version of lockstep verify --write"),
    ],
)
def test_invalid_files_are_refused(
    content: str | None, said: str, folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / "golden.jsonl").write_text(content)
    assert asked(folder, golden=tmp_path / "golden.jsonl") == 2
    assert said in capfd.readouterr().err


def test_a_strategy_that_promises_no_bits_is_refused(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["verify", str(folder / "run.yaml"), "strategy.name=ddp", "strategy.exact=false"]
    assert main([*words, "--write", str(folder / "other.json")]) == 2
    assert mentions(capfd.readouterr().err, "LS8396", "ddp")
    assert not (folder / "other.json").exists()


def test_this_version_trains_like_the_golden_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Comparable on one kind of processor, with the same versions: elsewhere there is nothing to compare with."""
    golden = TESTS / "golden" / "training.jsonl"
    run = load(None, ["strategy.name=single", "launch.processes=1"], TINY | {"output": str(tmp_path / "out")})
    (tmp_path / "run.yaml").write_text(run.dump())
    if os.environ.get("LOCKSTEP_GOLDEN"):
        assert main(["verify", str(tmp_path / "run.yaml"), "--steps", "2", "--write", str(golden)]) == 0
    then, _ = read_records(golden)
    here = {"processor": processor()} | {k: versions(run.model, ())[k] for k in ("torch", "transformers", "tokenizers")}
    there = {"processor": then["device"]} | {k: then["versions"][k] for k in ("torch", "transformers", "tokenizers")}
    if other := [f"{k} {there[k]} then, {here[k]} now" for k in here if here[k] != there[k]]:
        pytest.skip(f"tests/golden/training.jsonl is of {'; '.join(other)}")
    assert asked(tmp_path, golden=golden) == 0, (
        f"{capfd.readouterr().out}\na change that is meant to change bits writes the file anew: LOCKSTEP_GOLDEN=1"
    )
