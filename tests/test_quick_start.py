"""The quick start as a new user runs it: close to the best possible, the same weights on one process and two."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from harness import lockstep_environment

from lockstep.data import builtin

pytestmark = pytest.mark.processes


def train(folder: Path, cache: Path, *arguments: str) -> tuple[str, dict, str]:
    """Hash of the weights, the validation line, and what was printed."""
    command = [sys.executable, "-m", "lockstep", "train", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=lockstep_environment(cache))
    assert done.returncode == 0, done.stderr
    output = folder / "outputs" / "quickstart"
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    weights = hashlib.sha256((output / "export" / "model.safetensors").read_bytes()).hexdigest()
    return weights, next(line for line in lines if line["split"] == "validation"), done.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_quick_start_comes_within_two_points_and_does_not_depend_on_processes(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "two").mkdir()
    (tmp_path / "one").mkdir()
    two, validation, said = train(tmp_path / "two", cache)
    best = builtin.best_accuracy(builtin.emotion(0, train=12_000)["validation"])
    assert validation["accuracy"] >= best - 0.02
    for part in ("processes  2", "micro-batches", "best possible", "cut at random", f"sha256 {two}", "next"):
        assert part in said
    one, _, _ = train(tmp_path / "one", cache, "launch.processes=1")
    assert one == two
