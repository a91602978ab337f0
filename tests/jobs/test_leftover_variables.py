"""Environment variables that another job or tool left are ignored or noted, never obeyed in silence."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from lockstep import cli
from lockstep.cli import main
from lockstep.data.job import Job
from lockstep.distributed import hardware
from lockstep.distributed.world import World
from lockstep.launchers.start import joining
from lockstep.training import consistency_check
from lockstep.training.startup import other_arithmetic
from support.command import LOCKSTEP, ended, start
from support.harness import tiny
from support.marks import long
from support.messages import raises

RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@pytest.fixture(autouse=True)
def _without_any(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*RANKS, *hardware.ARITHMETIC):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("name", RANKS)
def test_a_single_leftover_variable_makes_no_rank(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run once wrote nothing with RANK=1 alone, and waited for three other ranks with WORLD_SIZE=4 alone."""
    monkeypatch.setenv(name, "3")
    world = World(tiny())
    assert (world.rank, world.size, world.local_rank, world.local_size) == (0, 1, 0, 1)
    assert main(["train", "none.yaml"]) == 2
    said = capsys.readouterr().err
    assert f"note: {name}=3 in the environment is ignored" in said
    assert "none.yaml" in said  # errors are printed by rank 0 alone


@pytest.mark.parametrize(
    ("variables", "code", "words"),
    [
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}, "LS7572", ("MASTER_PORT is not set",)),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "LS7572", ("MASTER_ADDR and MASTER_PORT are not set",)),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "LS7571", ("RANK=2", "WORLD_SIZE=2")),
        ({"RANK": "first", "WORLD_SIZE": "2"}, "LS7570", ("RANK=first",)),
        ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": ""}, "LS7570", ("LOCAL_RANK=",)),
    ],
)
def test_incomplete_torchrun_variables_are_refused(
    variables: dict[str, str], code: str, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with raises(code, *words, "unset RANK WORLD_SIZE"):
        joining()


@pytest.mark.processes
@pytest.mark.parametrize(("level", "status"), [long("1", 0), ("2", 2)])  # 1 compiles all libraries anew
def test_docstrings_are_needed_and_asserts_are_not(level: str, status: int, tmp_path: Path, cache: Path) -> None:
    done = start([*LOCKSTEP, "plan", "data.limit=100"], tmp_path, cache, PYTHONOPTIMIZE=level)
    got, _, err = ended(done)
    assert (got, "LS0210" in err) == (status, status == 2), err


def test_only_removed_docstrings_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for level in (0, 1, 2):
        monkeypatch.setattr(sys, "flags", SimpleNamespace(optimize=level))
        assert ("LS0210" in (cli._no_models() or "")) == (level == 2)


def test_a_rank_keeps_its_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in zip(RANKS, "2413", strict=True):
        monkeypatch.setenv(name, value)
    world = World(tiny())
    assert (world.rank, world.size, world.local_rank, world.local_size) == (2, 4, 1, 3)


def test_variables_that_change_arithmetic_are_noted_and_compared_between_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    run = tiny()
    assert other_arithmetic(Job.of(run)) == []
    job = Job.of(run).with_data()
    before = consistency_check.facts(job)
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    (note,) = other_arithmetic(Job.of(run))
    assert note.startswith("ATEN_CPU_CAPABILITY=avx2, NVIDIA_TF32_OVERRIDE=1 in the environment")
    after = consistency_check.facts(job)
    assert {key for key in before if before[key] != after[key]} == {"environment variables that affect arithmetic"}
    assert hardware.set_by_user(portable=True) == ["NVIDIA_TF32_OVERRIDE=1"]  # a portable run sets the other one
