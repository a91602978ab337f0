"""`lockstep evaluate` and `lockstep predict`: what an exported model scores, and what it makes of a text.

In: OUTPUT of a finished run. Out: metrics of its splits, as at the end of training; or a line for each text.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from lockstep import adapters, plugins, train
from lockstep.console import Console
from lockstep.data.prepare import prepare
from lockstep.run import Run, RunError, load
from lockstep.strategies import strategy as strategies
from lockstep.world import World


def finished(output: Path, overrides: list[str]) -> tuple[Run, Path]:
    """The run of an output folder, with `key=value` overrides, and its export. Errors: `RunError`."""
    if not (output / "run.yaml").is_file():
        raise RunError(f"{output} is not the output folder of a run: it has no run.yaml")
    export = output / "export"
    if not (export / "config.json").is_file():
        raise RunError(f"{output} has no export: its run is not finished; lockstep train goes on with it")
    return load(output / "run.yaml", overrides), export


def of_export(run: Run, export: Path, output: Path) -> Run:
    """The same run with the exported model, as one process."""
    values: dict[str, Any] = run.model_dump(mode="json")
    if not adapters.is_adapter(export):
        remote = run.model.trust_remote_code
        values["model"] = {"source": str(export), "attention": run.model.attention, "trust_remote_code": remote}
    values["strategy"] = {"name": "single", "exact": run.strategy.exact, "options": {}}
    values["launch"] |= {"name": "local", "processes": 1, "master": None, "rank": None, "world_size": None}
    return Run.model_validate(values | {"output": str(output)})


def evaluate(output: Path, split: str | None, overrides: list[str]) -> int:
    """Print the metrics of a split (default: validation, and test where there is one). Returns the exit status."""
    run, export = finished(output, overrides)
    alone = of_export(run, export, output)
    task_class: Any = plugins.find("tasks", run.task.name)
    task = task_class(alone, prepare(run, task_class))
    wanted = [split] if split is not None else [name for name in ("validation", "test") if name in task.splits]
    if split is not None and split not in task.splits:
        raise RunError(f"--split: this run has no split {split!r}; it has {', '.join(task.splits)}")
    world = World(alone)
    world.join()
    strategy = strategies.of(alone)(alone, world)
    strategy.build(task)
    if adapters.is_adapter(export):
        adapters.load(strategy.model, export)
    scores = {name: train.evaluate(alone, world, task, strategy, task.splits[name]) for name in wanted}
    console = Console(True)
    console.facts({"model": str(export), "data": str(task.prepared.facts["source"])})
    console.table(
        "scores",
        ["", *wanted],
        [[metric, *(f"{scores[name][metric]:,.6g}" for name in wanted)] for metric in scores[wanted[0]]],
    )
    strategy.close()
    world.close()
    return 0


def predict(output: Path, texts: list[str], overrides: list[str]) -> int:
    """Print a line for each text; without texts, for each line of standard input. Returns the exit status."""
    run, export = finished(output, overrides)
    texts = texts or [line.rstrip("\n") for line in sys.stdin]
    if not texts:
        raise RunError('predict: give a text: lockstep predict OUTPUT "some text", or lines on standard input')
    task_class: Any = plugins.find("tasks", run.task.name)
    console = Console(True)
    for line in task_class.predict(run, export, texts):
        console.say(line)
    return 0
