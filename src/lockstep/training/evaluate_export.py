"""`lockstep evaluate`: score an exported model or a checkpoint, and locate these models.

In: OUTPUT of a finished run, or one of its checkpoints. Out: metrics of its splits, as at the end of training.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.checkpoint import export_hashes
from lockstep.config.run import Run, RunError, load, overrides_of, require_output
from lockstep.data import hub
from lockstep.distributed.world import World
from lockstep.tasks.models import adapters, source_files
from lockstep.tasks.task import Calibrates
from lockstep.track.console import Console
from lockstep.training.checkpoint_model import exported_checkpoint
from lockstep.training.evaluation import evaluate as evaluated
from lockstep.training.resolve import for_rank
from lockstep.training.session import build_session, join_ranks
from lockstep_trace import streams
from lockstep_trace.redaction import printable


def finished(folder: Path, overrides: Sequence[str] | Mapping[str, Any]) -> tuple[Run, Path]:
    """Return the run of an output folder, with overrides, and its export folder; for a checkpoint, an equivalent export
    in the cache. Errors: `RunError`."""
    output, checkpoint = hub.parts(folder)
    require_output(output)
    export = output / "export"
    if checkpoint is None and not export.is_dir():
        newest = output / "checkpoints" / "latest"
        also = f", and {newest} is its newest checkpoint" if newest.exists() else ""
        raise RunError(
            "LS5051",
            f"{output} has no export: its run is not finished, or the export was deleted; run lockstep train again "
            f"to write it{also}",
        )
    run = load(output / "run.yaml", overrides)
    if run.model.trust_remote_code and "model.trust_remote_code" not in overrides_of(overrides):
        raise RunError(
            "LS5052",
            f"model.trust_remote_code: {output / 'run.yaml'} sets it, but code from a folder runs only if you "
            "set it too: read the code, then add model.trust_remote_code=true (lockstep predict: --set "
            "model.trust_remote_code=true)",
        )
    if checkpoint is not None:
        return run, exported_checkpoint(output, checkpoint, run.model.trust_remote_code)
    export_hashes.require_whole(output)
    return run, export


def note_edited(folder: Path) -> None:
    """Note, on standard error, the JSON files of an output folder's export that were edited."""
    output, checkpoint = hub.parts(folder)
    if checkpoint is None and (text := export_hashes.note_of_edits(output)) is not None:
        streams.put(sys.stderr, f"note: {printable(text)}\n", flush=True)


def of_export(run: Run, export: Path, output: Path) -> Run:
    """The run with the exported model, in one process."""
    values: dict[str, Any] = run.model_dump(mode="json")
    if not adapters.is_adapter(export):
        remote = run.model.trust_remote_code
        values["model"] = {"source": str(export), "attention": run.model.attention, "trust_remote_code": remote}
        if run.model.trained_in_bfloat16:
            values["model"]["dtype"] = run.model.dtype
    values["model"]["compile"] = False  # training only
    values["average"] = {}
    return Run.model_validate(values | {"output": str(output)}).as_written(run.written_keys).as_one_process()


def scores(
    output: Path, split: str | None, overrides: Sequence[str] | Mapping[str, Any]
) -> tuple[str, dict[str, dict[str, float]]]:
    """Name of the data, and metrics by split (default: validation, and test if there is one). This process becomes the
    only rank of a job. Errors: `RunError`."""
    run, export = finished(output, overrides)
    alone = of_export(run, export, run.folder)
    world = World(alone)
    job = for_rank(alone, world, data=run)
    join_ranks(job, world)
    if job.task.head is not None and not adapters.is_adapter(export):
        source_files.check_export(job.run.model, job.task.head)
    session = build_session(job, world, trained=True)
    task, strategy = session.task, session.strategy
    split_names = [split] if split is not None else [name for name in ("validation", "test") if name in task.splits]
    if split is not None and split not in task.splits:
        raise RunError("LS5053", f"split: this run has no split {split!r}; it has {', '.join(task.splits)}")
    if adapters.is_adapter(export):
        adapters.load(strategy.model, export)
    if isinstance(task, Calibrates):
        task.calibrate(task.calibration_in(export))
        if task.needs_calibration and split_names != ["validation"]:  # a checkpoint without an evaluation
            task.calibrate(evaluated(world, task, strategy, task.splits["validation"]))
    metrics = {name: evaluated(world, task, strategy, task.splits[name]) for name in split_names}
    strategy.close()
    del session, strategy
    world.close()
    return str(task.prepared.facts["source"]), metrics


def evaluate(output: Path, split: str | None, overrides: list[str]) -> int:
    """Print the metrics of a split (default: validation, and test if there is one). Returns the exit status."""
    source, of_splits = scores(output, split, overrides)
    note_edited(output)
    console = Console(True)
    console.facts({"model": str(output if hub.parts(output)[1] else output / "export"), "data": source})
    metrics = next(iter(of_splits.values()))
    rows = [[metric, *(f"{values[metric]:,.6g}" for values in of_splits.values())] for metric in metrics]
    console.table("scores", ["", *of_splits], rows, key="scores")
    return 0
