"""`lockstep sweep` computes common steps of trials once, and each trial has the bits of a separate run."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from lockstep.cli import main
from lockstep.config.run import load
from lockstep.lab.sweep import sweep
from support.branches import began_at, weights_of
from support.command import LOCKSTEP, ended, start, until
from support.harness import TINY

RATE = {"learning_rate": 5e-3, "warmup_steps": 2, "schedule": "wsd", "max_grad_norm": 0.5}
VALUES = TINY | {"optim": RATE, "micro_batches": 4, "strategy": "single"}
VALUES |= {"launch": {"device": "cpu", "threads": 1, "processes": 1}}


def tree_of(*each: dict[str, Any], **values: Any) -> sweep.Tree:
    return sweep.shared_steps({f"t{i}": load(None, keys, VALUES | values) for i, keys in enumerate(each)})


def steps(count: int, decay: int, **keys: Any) -> dict[str, Any]:
    return {"steps": count, "optim.decay_steps": decay, **keys}


def test_trials_are_a_tree_of_stretches() -> None:
    """The rates stay constant for 7, 17, 17 and 27 steps, and one step more; then they fall."""
    tree = tree_of(
        steps(10, 3), steps(20, 3), steps(20, 3, **{"optim.decay_shape": "cosine"}), steps(30, 3), steps(18, 1)
    )
    assert tree.begins == {"t1": ("t0", 8), "t2": ("t1", 18), "t3": ("t1", 18), "t4": ("t1", 18)}
    assert tree.left_at("t0") == [8]
    assert tree.left_at("t1") == [18]
    assert tree.summary == "4 trials from the first steps of another one: 36 steps instead of 98"


@pytest.mark.parametrize(
    "other",
    [
        {"seed": 1},
        {"batch_size": 20},
        {"data.limit": 90},
        {"optim.learning_rate": 4e-3},  # the first step of a warm-up is the same: not worth it
        {"optim.max_grad_norm": 0.4},
    ],
)
def test_trials_with_other_arithmetic_share_no_steps(other: dict[str, Any]) -> None:
    assert tree_of(steps(30, 3), steps(30, 3) | other).begins == {}


def test_trials_share_no_steps_if_the_schedule_depends_on_their_number() -> None:
    cosine = {"schedule": "cosine", "learning_rate": 5e-3}
    assert tree_of({"steps": 200}, {"steps": 300}, optim=cosine).begins == {}
    assert tree_of({"steps": 200}, {"steps": 300}, optim=cosine | {"schedule": "constant"}).begins == {
        "t1": ("t0", 200)
    }


def test_trials_with_another_minimum_rate_share_no_steps() -> None:
    """A schedule with warm-up also starts at its minimum."""
    ends = [steps(30, 3, **{"optim.min_lr_ratio": least}) for least in (0, 0.5)]
    assert tree_of(*ends).begins == {}
    assert tree_of(*(each | {"optim.warmup_steps": 0} for each in ends)).begins == {"t1": ("t0", 28)}


def test_keys_that_may_differ_between_trials_that_share_steps() -> None:
    free = {"checkpoint.every": 7, "track.every": 3, "strategy.name": "ddp", "launch.processes": 2}
    assert tree_of(steps(20, 3), steps(20, 3, **free)).begins == {"t1": ("t0", 20)}
    words = {"strategy.name": "ddp", "strategy.exact": False}
    assert tree_of(steps(20, 3, **words), steps(20, 4, **words)).begins == {}


def trials(folder: Path) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in json.loads((folder / "sweep.json").read_text())["trials"]}


def swept(folder: Path, values: dict[str, Any], *words: str) -> list[str]:
    run = load(None, [], VALUES | values | {"output": str(folder / "out")})
    (folder / "run.yaml").write_text(run.dump())
    return ["sweep", str(folder / "run.yaml"), *words]


class Here:
    """A trial in this process, which saves starting an interpreter."""

    def __init__(self, function: str, words: list[str], folder: Path, name: str, variables: dict[str, str]) -> None:
        self.status = main(words)

    def wait(self) -> None:
        """Return at once, because the process has ended."""


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(900)
def test_eight_trials_that_share_seventy_percent_cost_three_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lockstep.lab.sweep.sweep.Child", Here)
    words = ["--over", "optim.decay_shape=linear,cosine", "--over", "optim.min_lr_ratio=0,0.1,0.2,0.3"]
    assert main(swept(tmp_path, {"steps": 20, "optim": RATE | {"decay_steps": 7, "warmup_steps": 0}}, *words)) == 0
    rows = trials(tmp_path / "out-sweep")
    first = next(iter(rows))
    assert [row["begins_with"] for row in rows.values()] == [None, *[[first, 14]] * 7]
    computed = sum(20 - begun for row in rows.values() for begun in began_at(Path(row["folder"])))
    assert computed == 62  # of 160: 3.1 runs
    assert len({weights_of(Path(row["folder"])) for row in rows.values()}) == 8
    for name, row in list(rows.items())[1::3]:
        alone = tmp_path / f"alone-{name}"
        assert main(["train", f"{row['folder']}/run.yaml", f"output={alone}", "checkpoint.at=[]"]) == 0
        assert weights_of(Path(row["folder"])) == weights_of(alone), name


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(sys.platform != "linux", reason="looks at processes through /proc")
@pytest.mark.usefixtures("nobody_is_left")
def test_a_killed_sweep_resumes(tmp_path: Path, cache: Path) -> None:
    """The sweep is killed while the first trial trains, and stopped while one trains that began with its steps."""
    rate = RATE | {"decay_steps": 20, "warmup_steps": 0}
    words = swept(tmp_path, {"steps": 60, "optim": rate}, "--over", "optim.min_lr_ratio=0,0.1,0.2")
    folder = tmp_path / "out-sweep"
    first, second, third = (folder / f"min_lr_ratio-{value}" for value in ("0", "0.1", "0.2"))
    for trial, number, status in ((first, signal.SIGKILL, -9), (second, signal.SIGTERM, 75)):
        process = start([*LOCKSTEP, *words], tmp_path, cache)
        until(lambda trial=trial: began_at(trial), "a trial to start", process)
        process.send_signal(number)
        assert ended(process)[0] == status
    _, out, err = ended(start([*LOCKSTEP, *words], tmp_path, cache))
    assert "2 trials from the first steps of another one: 98 steps instead of 180" in out, err
    rows = trials(folder)
    assert [row["state"] for row in rows.values()] == ["done"] * 3
    assert [row["begins_with"] for row in rows.values()] == [None, [first.name, 41], [first.name, 41]]
    assert min(began_at(second)) == min(began_at(third)) == 41
    assert main(["train", str(third / "run.yaml"), f"output={tmp_path / 'alone'}"]) == 0
    assert weights_of(tmp_path / "alone") == weights_of(third)
