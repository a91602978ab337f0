"""Variables that another job or tool has left in the environment: ignored or noted, never followed in silence."""

import pytest

from lockstep.cli import main
from lockstep.config import processor
from lockstep.distributed import consistency_check
from lockstep.distributed.world import World
from lockstep.training.beginning import other_arithmetic
from support.harness import tiny

RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@pytest.fixture(autouse=True)
def _without_any(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*RANKS, *processor.ARITHMETIC):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("name", RANKS)
def test_one_variable_of_a_rank_makes_no_rank(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With RANK=1 alone a run wrote nothing, and with WORLD_SIZE=4 alone it waited for three others."""
    monkeypatch.setenv(name, "3")
    world = World(tiny())
    assert (world.rank, world.size, world.local_rank, world.local_size) == (0, 1, 0, 1)
    assert main(["train", "none.yaml"]) == 2
    said = capsys.readouterr().err
    assert f"note: {name}=3 in the environment is ignored" in said
    assert "none.yaml" in said  # errors are printed by rank 0 alone


def test_a_rank_keeps_its_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in zip(RANKS, "2413", strict=True):
        monkeypatch.setenv(name, value)
    world = World(tiny())
    assert (world.rank, world.size, world.local_rank, world.local_size) == (2, 4, 1, 3)


def test_variables_that_change_arithmetic_are_noted_and_compared_between_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    run = tiny()
    assert other_arithmetic(run) == []
    before = consistency_check.facts(run, "data")
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    (note,) = other_arithmetic(run)
    assert note.startswith("ATEN_CPU_CAPABILITY=avx2, NVIDIA_TF32_OVERRIDE=1 in the environment")
    after = consistency_check.facts(run, "data")
    assert {key for key in before if before[key] != after[key]} == {"the environment's variables of arithmetic"}
    assert processor.set_by_user(portable=True) == ["NVIDIA_TF32_OVERRIDE=1"]  # a portable run sets the other one
