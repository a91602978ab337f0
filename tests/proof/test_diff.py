"""`lockstep diff`: the step, the micro-batch and the thing in which two runs part, for mistakes planted at a known
place and for runs that were given other things."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from lockstep.cli import main
from lockstep.config.run import load
from lockstep.training import fingerprints
from support import planted_mistakes
from support.diffs import ONE, diff_output
from support.harness import TINY
from support.marks import long
from support.planted_mistakes import MICRO_BATCH, STEP, WEIGHT

pytestmark = pytest.mark.processes


def trained(folder: Path, name: str, *overrides: str, **values: object) -> Path:
    run = load(None, [*ONE, *overrides], TINY | values | {"output": str(folder / name)})
    (folder / f"{name}.yaml").write_text(run.dump())
    assert main(["train", str(folder / f"{name}.yaml")]) == 0
    return folder / name


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("right"), "right")


@pytest.mark.parametrize(
    ("mistake", "parts", "first", "why"),
    [
        ("OtherDropout", STEP, f"micro-batch {MICRO_BATCH}: forward output of transformer.drop", "dropout"),
        long(
            "WrongLeaf", STEP, f"micro-batch {MICRO_BATCH}: gradient of {WEIGHT}", "how its weight gradient is computed"
        ),
        (
            "WrongSum",
            STEP,
            f"gradient of {WEIGHT}, summed over micro-batches",
            f"a part of the parameters ({WEIGHT})",
        ),
        long("AllTwice", STEP, "summed over micro-batches", "every gradient is 2 times"),
        ("WrongRate", STEP + 1, "weights after the step:", "clipping, weight decay, or the optimizer"),
    ],
)
def test_a_planted_mistake_is_located(
    mistake: str, parts: int, first: str, why: str, right: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert hasattr(planted_mistakes, mistake)
    wrong = trained(tmp_path, "wrong", f"strategy.name=support.planted_mistakes.{mistake}")
    said = diff_output(right, wrong, capfd)
    assert f"first difference: step {parts}," in said
    assert "both runs are bitwise equal in this step" in said
    assert f"first differing value: {wrong}, step {STEP}, " in said
    assert first in said.partition("first differing value:")[2]
    assert why in said


@pytest.mark.parametrize(
    ("key", "first_step", "first", "why"),
    [
        ("optim.learning_rate=4e-3", 2, "learning rate", "the schedule"),  # that of the first step is 0
        long("seed=1", 1, "weights before the step:", "started from different weights"),
        long("optim.weight_decay=0.1", 2, "weights after the step:", "weight decay"),
        ("optim.max_grad_norm=0.1", 1, "weights after the step: optimizer.", "clipping"),
    ],
)
def test_another_key_is_found(
    key: str, first_step: int, first: str, why: str, right: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    said = diff_output(right, trained(tmp_path, "other", key), capfd)
    assert f"{key.partition('=')[0]}: " in said
    assert f"first differing value: step {first_step}, " in said
    assert first in said.partition("first differing value:")[2]
    assert why in said


def test_a_row_that_was_changed_is_found(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rows = [{"text": f"text number {n} of {n * n}", "label": n % 2} for n in range(66)]
    folders = []
    for name in ("a", "b"):
        if name == "b":
            rows[7] = rows[7] | {"text": rows[7]["text"].replace("of", "or")}
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        data = {"train": str(tmp_path / f"{name}.jsonl"), "validation": str(tmp_path / "a.jsonl"), "max_length": 32}
        folders.append(trained(tmp_path, name, "tokenizer.train=character", data=data))
    said = diff_output(*folders, capfd)
    lines = [json.loads(line) for line in (folders[0] / fingerprints.FILE).read_text().splitlines()]
    assert len(lines) == 9
    assert "inputs of the model" in said.partition("first differing value:")[2]
    assert "the same rows were tokenized differently" in said


def test_equal_runs_have_no_difference(right: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    other = trained(tmp_path, "other", "strategy.name=ddp", "checkpoint.every=0")
    said = diff_output(right, other, capfd, status=0)
    assert "the same bits in all 9 common steps" in said


def test_fingerprint_of_a_machine_that_computed_wrongly(
    right: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nothing that can be computed here explains it: said so, and whose line is right."""
    other = trained(tmp_path, "other")
    lines = (other / fingerprints.FILE).read_text().splitlines()
    changed = json.loads(lines[4]) | {"hash": "0" * 16, "grad_norm": 7.5}
    (other / fingerprints.FILE).write_text("\n".join([*lines[:4], json.dumps(changed), *lines[5:]]) + "\n")
    said = diff_output(right, other, capfd)
    assert "first difference: step 5," in said
    assert f"{right} recorded these bits" in said
    assert "a machine that computed wrongly" in said
    assert "recomputing" not in diff_output(right, other, capfd, "--quick")


@pytest.mark.parametrize("both", [False, True])
def test_a_changed_loss_with_its_old_hash_is_found(
    both: bool, right: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folders = [right, tmp_path / "edited"]
    shutil.copytree(right, folders[1])
    lines = (right / fingerprints.FILE).read_text().splitlines()
    edited = [*lines[:4], json.dumps(json.loads(lines[4]) | {"loss": 0.001}), *lines[5:]]
    (folders[1] / fingerprints.FILE).write_text("\n".join(edited) + "\n")
    said = diff_output(folders[both], folders[1], capfd, "--quick")
    assert "step 5: the hash does not match loss and gradient norm: the line was changed" in said
    assert ("first difference: step 5, loss or gradient norm: loss" in said) != both


def test_folders_without_fingerprints(right: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", str(right), str(tmp_path)]) == 2
    assert "it has no run.yaml" in capfd.readouterr().err
    (tmp_path / "run.yaml").write_text((right / "run.yaml").read_text())
    assert main(["diff", str(right), str(tmp_path)]) == 2
    assert "has no fingerprints.jsonl" in capfd.readouterr().err
