"""`lockstep verify` names what in a user's own module depends on the number of processes."""

from pathlib import Path

import pytest

from lockstep.config.run import Run, load
from lockstep.distributed.world import World
from lockstep.proof import recording
from lockstep.proof.verify import compare_recordings, findings
from lockstep.training.resolve import for_rank
from support.harness import run_on
from support.marks import slow

pytestmark = pytest.mark.processes

SAID = {
    "AcrossRanks": "buggy_across_ranks.py, line 5: your code uses torch.distributed",
    "Remembers": "the model keeps state between batches: memory",
    "OwnDice": "model.dice (torch's Generator)",
}


def recorded(world: World, run: Run) -> int:
    return recording.record(for_rank(run, world), world, "2")


def of(model: str, strategy: str, ranks: int, folder: Path) -> Path:
    task = {"name": "module", "data": "support.buggy_modules.data", "loss": "support.buggy_modules.loss"}
    values = {
        "task": task
        | {"model": f"support.{'buggy_across_ranks' if model == 'AcrossRanks' else 'buggy_modules'}.{model}"},
        "output": str(folder / strategy),
        "strategy": {"name": strategy},
        "steps": 3,
        "batch_size": 16,
        "micro_batches": 4,
        "optim": {"learning_rate": 1e-2},
        "launch": {"device": "cpu", "threads": 1},
    }
    run = load(None, [], values)
    assert run_on(ranks, recorded, run, joined=False) == [0] * ranks
    return folder / strategy


@pytest.mark.parametrize("model", ["Base", "Remembers", slow("AcrossRanks"), slow("OwnDice")])
def test_side_effects_of_a_module_are_named(model: str, tmp_path: Path) -> None:
    alone, ours = of(model, "single", 1, tmp_path), of(model, "ddp", 2, tmp_path)
    mine = recording.read(ours)
    said = findings(mine, compare_recordings(ours, alone))
    if model == "Base":
        assert said == []
        return
    assert "loss" in said[1]
    assert [name for name, words in SAID.items() if words in "\n".join(said)] == [model], said
