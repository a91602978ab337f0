"""The task `module` under every strategy: the same bits, and checkpoints that any of them goes on from."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_on
from marks import slow
from own_modules import MEAN, NET, NET_FUNCTIONS, job
from safetensors.torch import load_file

from lockstep.config import plugins
from lockstep.config.run import Run
from lockstep.distributed.world import World

pytestmark = pytest.mark.processes


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    return tmp_path


def works(world: World, run: Run) -> int:
    from lockstep.training.rank import work

    return work(run, world)


def trained(here: Path, code: str, name: str, ranks: int, *overrides: str, **values: Any) -> dict[str, torch.Tensor]:
    """The exported weights."""
    functions = NET_FUNCTIONS if code is NET else ()
    strategy = {"name": name} | values.pop("strategy", {})
    folder = values.pop("output", f"{here}/{name}-{ranks}{'-'.join(overrides)}")
    run = job(here, code, *overrides, functions=functions, strategy=strategy, output=folder, **values)
    status = run_on(ranks, works, run, run=run, joined=False)
    assert status == [75 if run.stop_after else 0] * ranks
    return load_file(run.folder / "export/model.safetensors")


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


def lines(folder: Path, split: str) -> list[dict[str, Any]]:
    return [line for text in (folder / "metrics.jsonl").read_text().splitlines() if (line := json.loads(text))["split"] == split]


def test_ddp_on_three_and_fsdp2_on_two_have_the_bits_of_one(here: Path) -> None:
    alone = trained(here, NET, "single", 1)
    assert "blocks.0.0.weight" in alone  # the user's own names
    for name, ranks, *overrides in (("ddp", 3, "data.workers=1"), ("fsdp2", 2)):
        assert same(trained(here, NET, name, ranks, *overrides), alone), name
    (scores,) = lines(here / "single-1", "validation")
    assert scores["accuracy"] == scores["right"]
    assert scores["examples"] == 10
    assert '"guess"' in (here / "single-1/samples.jsonl").read_text()
