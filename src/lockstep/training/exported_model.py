"""`lockstep evaluate` and `lockstep predict`: what an exported model scores, and what it makes of a text.

In: OUTPUT of a finished run. Out: metrics of its splits, as at the end of training; or a line for each text.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.config import plugins
from lockstep.config.run import Run, RunError, load, overrides_of
from lockstep.distributed.world import World
from lockstep.tasks.models import adapters
from lockstep.track.console import Console
from lockstep.training.loop import evaluate as evaluated
from lockstep.training.session import build_session, prepare_and_join


def finished(output: Path, overrides: Sequence[str] | Mapping[str, Any]) -> tuple[Run, Path]:
    """The run of an output folder, with overrides, and its export. Errors: `RunError`."""
    if not (output / "run.yaml").is_file():
        raise RunError(f"{output} is not the output folder of a run: it has no run.yaml")
    export = output / "export"
    if not (export / "config.json").is_file():
        raise RunError(f"{output} has no export: its run is not finished; lockstep train goes on with it")
    run = load(output / "run.yaml", overrides)
    if run.model.trust_remote_code and "model.trust_remote_code" not in overrides_of(overrides):
        raise RunError(
            f"model.trust_remote_code: {output / 'run.yaml'} asks for it, and code of a folder runs only if you do, "
            "too: read it, then add model.trust_remote_code=true (lockstep predict: --set model.trust_remote_code=true)"
        )
    return run, export


def of_export(run: Run, export: Path, output: Path) -> Run:
    """The same run with the exported model, as one process."""
    values: dict[str, Any] = run.model_dump(mode="json")
    if not adapters.is_adapter(export):
        remote = run.model.trust_remote_code
        values["model"] = {"source": str(export), "attention": run.model.attention, "trust_remote_code": remote}
    values["strategy"] = {"name": "single", "exact": run.strategy.exact, "options": {}}
    values["launch"] |= {"name": "local", "processes": 1, "master": None, "rank": None, "world_size": None}
    return Run.model_validate(values | {"output": str(output)})


def scores(
    output: Path, split: str | None, overrides: Sequence[str] | Mapping[str, Any]
) -> tuple[str, dict[str, dict[str, float]]]:
    """What the data are called, and metrics of a split (default: validation, and test where there is one). This process
    becomes the only rank of a job. Errors: `RunError`."""
    run, export = finished(output, overrides)
    alone = of_export(run, export, output)
    world = World(alone)
    session = build_session(alone, world, prepare_and_join(alone, world, data=run))
    task, strategy = session.task, session.strategy
    wanted = [split] if split is not None else [name for name in ("validation", "test") if name in task.splits]
    if split is not None and split not in task.splits:
        raise RunError(f"split: this run has no split {split!r}; it has {', '.join(task.splits)}")
    if adapters.is_adapter(export):
        adapters.load(strategy.model, export)
    found = {name: evaluated(alone, world, task, strategy, task.splits[name]) for name in wanted}
    strategy.close()
    del session, strategy
    world.close()
    return str(task.prepared.facts["source"]), found


def evaluate(output: Path, split: str | None, overrides: list[str]) -> int:
    """Print the metrics of a split (default: validation, and test where there is one). Returns the exit status."""
    source, found = scores(output, split, overrides)
    console = Console(True)
    console.facts({"model": str(output / "export"), "data": source})
    metrics = next(iter(found.values()))
    rows = [[metric, *(f"{values[metric]:,.6g}" for values in found.values())] for metric in metrics]
    console.table("scores", ["", *found], rows)
    return 0


def predictions(output: Path, texts: list[str], overrides: Sequence[str] | Mapping[str, Any]) -> list[str]:
    """A line for each text. Errors: `RunError`."""
    run, export = finished(output, overrides)
    task_class: Any = plugins.find("tasks", run.task.name)
    return task_class.predict(run, export, texts)


def predict(output: Path, texts: list[str], overrides: list[str]) -> int:
    """Print a line for each text; without texts, for each line of standard input. Returns the exit status."""
    finished(output, overrides)  # told before anything is read
    texts = texts or [line.rstrip("\n") for line in sys.stdin]
    if not texts:
        raise RunError('predict: give a text: lockstep predict OUTPUT "some text", or lines on standard input')
    console = Console(True)
    for line in predictions(output, texts, overrides):
        console.say(line)
    return 0
