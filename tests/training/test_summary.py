"""The line `repeat` at the end of a run: a command that can be pasted, and does what it says."""

import shlex
from pathlib import Path

import pytest

from lockstep.config.run import Run, load
from lockstep.distributed.world import World
from lockstep.launchers.start import planned
from lockstep.training.summary import the_same_elsewhere
from support.harness import tiny


@pytest.mark.parametrize("output", ["out", "my runs/a $HOME 'run'", "2024", "a: b"])
@pytest.mark.parametrize(
    ("overrides", "now", "then"),
    [
        (["strategy.name=ddp", "launch.processes=2"], 2, ("ddp", 1)),
        (["strategy.name=ddp", "launch.processes=1", "strategy.options={bucket_cap_mb: 5}"], 1, ("ddp", 2)),
        (["strategy.name=single", "launch.processes=1"], 1, ("ddp", 2)),
        (["strategy.name=pipeline", "strategy.options={stages: 2}", "launch.processes=2"], 2, ("pipeline", 4)),
        (["strategy.name=fsdp2", "launch.processes=4"], 4, ("fsdp2", 1)),
    ],
)
def test_the_same_weights_on_another_number_of_processes(
    output: str, overrides: list[str], now: int, then: tuple[str, int], here: Path
) -> None:
    elsewhere = {"hub": {"push_to": "somebody/model"}, "remote_dir": "s3://bucket/run"}
    run = tiny(*overrides, "max_time=1h", output=output, **elsewhere)
    found, said = pasted(run, now)
    assert (found.strategy.name, found.launch.processes) == then
    assert said == f"gives the same weights on {then[1]} process(es)"
    assert found.arithmetic() == run.arithmetic()
    assert found.folder == Path(f"{output}-{then[1]}")
    assert (found.max_time, found.hub.push_to, found.remote_dir) == (None, None, None)
    assert planned(found)[1].processes == then[1]


def test_where_another_number_gives_other_bits_or_cannot_be_started_here(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, said = pasted(tiny("strategy.exact=false", "launch.processes=2", output="out"), 2, "verify")
    assert "same training" in said
    run = tiny("launch.name=slurm", output="my out")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert the_same_elsewhere(run, World(run))[0] == "lockstep evaluate 'my out'"


def pasted(run: Run, processes: int, command: str = "train") -> tuple[Run, str]:
    """What the command makes of OUTPUT/run.yaml, and what it is said to do."""
    run.folder.mkdir(parents=True)
    (run.folder / "run.yaml").write_text(run.dump())
    world = World(run)
    world.size = processes
    words, said = the_same_elsewhere(run, world)
    name, verb, *rest = shlex.split(words)
    assert (name, verb) == ("lockstep", command)
    path, overrides = rest[0], rest[1:]
    return load(path, overrides), said
