"""The quick start, as a new user runs it, nearly reaches the best possible score, with the same weights on one process
and on two."""

import hashlib
import json
from pathlib import Path

import pytest

from lockstep.data import builtin
from support.command import LOCKSTEP, ended, start, until

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(900)]
AS_FAR = 30  # of its 563 steps


def train(folder: Path, cache: Path, *arguments: str) -> tuple[str, str]:
    """Return the hash of the weights, and the output."""
    folder.mkdir()
    status, out, err = ended(start([*LOCKSTEP, "train", *arguments], folder, cache), 800)
    assert status == 0, err
    weights = folder / "outputs" / "quickstart" / "export" / "model.safetensors"
    return hashlib.sha256(weights.read_bytes()).hexdigest(), out


def lines(folder: Path, split: str) -> list[dict]:
    """Return the lines of metrics.jsonl without values that depend on the machine."""
    path = folder / "outputs" / "quickstart" / "metrics.jsonl"
    found = [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []
    return [{k: v for k, v in line.items() if "per_s" not in k} for line in found if line["split"] == split]


@pytest.mark.long
def test_the_quick_start_comes_within_two_points_and_does_not_depend_on_processes(tmp_path: Path, cache: Path) -> None:
    """One process runs a twentieth of the steps, with equal losses and norms to the last digit."""
    weights, said = train(tmp_path / "two", cache)
    best = builtin.best_accuracy(builtin.emotion(0, train=12_000)["validation"])
    assert lines(tmp_path / "two", "validation")[-1]["accuracy"] >= best - 0.02
    for part in (
        "processes  2",
        "micro-batches",
        "label noise caps",
        "random micro-batches: ",
        f"sha256     {weights}",
        "next",
    ):
        assert part in said
    assert [line["step"] for line in lines(tmp_path / "two", "validation")] == [188, 376, 564], "after every epoch"
    # on a slow machine there are more lines of steps, and of what is being prepared
    assert len([line for line in said.splitlines() if not line.startswith(("step  ", "preparing", "finishing"))]) <= 20
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
