"""The quick start as a new user runs it: close to the best possible, the same weights on one process and two."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.data import builtin
from support.command import LOCKSTEP, start, until
from support.harness import lockstep_environment

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(900)]
AS_FAR = 60  # of its 563 steps


def train(folder: Path, cache: Path, *arguments: str) -> tuple[str, str]:
    """Hash of the weights, and what was printed."""
    folder.mkdir()
    command = [sys.executable, "-m", "lockstep", "train", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=lockstep_environment(cache))
    assert done.returncode == 0, done.stderr
    weights = folder / "outputs" / "quickstart" / "export" / "model.safetensors"
    return hashlib.sha256(weights.read_bytes()).hexdigest(), done.stdout


def lines(folder: Path, split: str) -> list[dict]:
    """Of metrics.jsonl, but for what tells of the machine."""
    path = folder / "outputs" / "quickstart" / "metrics.jsonl"
    found = [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []
    return [{k: v for k, v in line.items() if "per_s" not in k} for line in found if line["split"] == split]


def test_the_quick_start_comes_within_two_points_and_does_not_depend_on_processes(tmp_path: Path, cache: Path) -> None:
    """On one process a tenth of it is run, whose losses and norms are the same to the last digit."""
    weights, said = train(tmp_path / "two", cache)
    best = builtin.best_accuracy(builtin.emotion(0, train=12_000)["validation"])
    assert lines(tmp_path / "two", "validation")[-1]["accuracy"] >= best - 0.02
    for part in ("processes  2", "micro-batches", "best possible", "cut at random", f"sha256 {weights}", "next"):
        assert part in said
    assert [line["step"] for line in lines(tmp_path / "two", "validation")] == [188, 376, 564], "after every epoch"
    # on a slow machine there are more lines of steps, and of what is being prepared
    assert len([line for line in said.splitlines() if not line.startswith(("step  ", "preparing"))]) <= 20
    (alone := tmp_path / "one").mkdir()
    one = start([*LOCKSTEP, "train", "launch.processes=1"], alone, cache)
    until(lambda: any(line["step"] >= AS_FAR for line in lines(alone, "train")), f"step {AS_FAR}", one, 800)
    one.kill()
    one.communicate()
    found, whole = lines(alone, "train"), lines(tmp_path / "two", "train")
    assert found == whole[: len(found)]
    assert len(whole) > len(found)


@pytest.mark.long
def test_its_weights_do_not_depend_on_processes(tmp_path: Path, cache: Path) -> None:
    assert train(tmp_path / "two", cache)[0] == train(tmp_path / "one", cache, "launch.processes=1")[0]
