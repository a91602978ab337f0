"""The examples of runs/own: their length, that each trains, and that two processes have the bits of one."""

from pathlib import Path

import pytest

from lockstep.config.run import load
from support.harness import run_on, works
from support.marks import slow
from support.places import ROOT

EXAMPLES = sorted(path.stem for path in (ROOT / "runs/own").glob("*.yaml"))
LINES = dict.fromkeys(EXAMPLES, 60) | {"translation": 105}  # with the number words


def test_examples_of_own_modules_are_short() -> None:
    assert EXAMPLES == ["characters", "images", "linear", "translation"]
    for name in EXAMPLES:
        assert len((ROOT / f"runs/own/{name}.py").read_text().splitlines()) <= LINES[name], name


@pytest.mark.processes
@pytest.mark.parametrize("name", [slow("characters"), slow("images"), "linear", "translation"])
def test_two_processes_have_the_bits_of_one(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("LOCKSTEP_CACHE", str(cache))
    weights = []
    for strategy, ranks in (("single", 1), ("ddp", 2)):
        folder = tmp_path / strategy
        words = [f"output={folder}", f"strategy.name={strategy}", "steps=2", "launch.threads=1", "launch.device=cpu"]
        run = load(f"runs/own/{name}.yaml", [*words, "batch_size=8", "data.limit=40", "evaluate.every=0"])
        assert run_on(ranks, works, run, joined=False, timeout_s=240) == [0] * ranks
        weights.append((folder / "export/model.safetensors").read_bytes())
    assert weights[0] == weights[1]
