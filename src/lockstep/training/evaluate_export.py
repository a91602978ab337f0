"""`lockstep evaluate`: score an exported model or a checkpoint, and locate these models.

In: OUTPUT of a finished run, or one of its checkpoints. Out: metrics of its splits, as at the end of training.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.checkpoint import export_hashes
from lockstep.config.output_files import require_output
from lockstep.config.run import Run, RunError, load, overrides_of
from lockstep.data import hub, tokenizer
from lockstep.data.arrow_cache import Prepared
from lockstep.data.job import Job
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
        also = f", or name its newest checkpoint, {newest}, instead" if newest.exists() else ""
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


def edits_of(folder: Path) -> str | None:
    """Name the JSON files of an output folder's export that were edited; None if none were, or for a checkpoint."""
    output, checkpoint = hub.parts(folder)
    return export_hashes.note_of_edits(output) if checkpoint is None else None


def note_edited(folder: Path) -> None:
    """Note, on standard error, the JSON files of an output folder's export that were edited."""
    if (text := edits_of(folder)) is not None:
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


def _with_tokens_of(alone: Run, export: Path) -> Run:
    """The run that prepares other data than in training: with the export's labels and tokenizer, which the training
    split defined."""
    if not (export / "tokenizer_config.json").is_file():
        return alone
    section = alone.tokenizer.model_validate({"source": str(export)})
    return alone.model_copy(update={"tokenizer": section})


def _prepared_for(
    output: Path, run: Run, alone: Run, world: World, export: Path, others: Mapping[str, Any]
) -> tuple[Job, bool]:
    """Return the job of the only rank, and whether it reads other data than the run did. Where only files to score are
    named and the run's own data cannot be read any more, those files alone are prepared, with the export's labels and
    tokens. `others`: the overrides. Errors: `RunError`."""
    keys = {key for key in others if key.split(".")[0] == "data"}
    if not keys:
        return for_rank(alone, world, data=run), False
    with_files = _with_tokens_of(alone, export)
    try:
        return for_rank(alone, world, data=with_files), True
    except RunError:
        scored = keys <= {"data.test", "data.validation"} and with_files.tokenizer.source == str(export)
        fault = (
            _unreadable(output, export, world, {k: v for k, v in others.items() if k not in keys}) if scored else None
        )
        if fault is None:
            raise
    files: Any = with_files.data.test or with_files.data.validation
    only = dict.fromkeys(("train", "validation", "test"), files) | {
        "validation": with_files.data.validation if "data.validation" in keys else files
    }
    none = dict.fromkeys(("source", "sources", "config", "revision", "split_column"))
    off = dict.fromkeys(("stream", "deduplicate", "decontaminate"), False)
    data = with_files.data.model_copy(update=none | off | only)
    job = for_rank(alone, world, data=with_files.model_copy(update={"data": data}))
    text = f"{job.data.facts['source']} is read without the training data, which cannot be read: {fault}"
    streams.put(sys.stderr, f"note: {printable(text)}\n", flush=True)
    return job, True


def _unreadable(output: Path, export: Path, world: World, others: Mapping[str, Any]) -> RunError | None:
    """Return why the data of the run itself cannot be read; None if they can."""
    run, _ = finished(output, others)
    try:
        for_rank(of_export(run, export, run.folder), world, data=run)
    except RunError as error:
        return error
    return None


def scores(
    output: Path, split: str | None, overrides: Sequence[str] | Mapping[str, Any]
) -> tuple[str, dict[str, dict[str, float]]]:
    """Name of the data, and metrics by split (default: those whose files `overrides` name, else validation, and test if
    there is one). This process becomes the only rank of a job. Errors: `RunError`."""
    run, export = finished(output, overrides)
    others = overrides_of(overrides)
    files_given = [name for name in ("validation", "test") if f"data.{name}" in others]
    alone = of_export(run, export, run.folder)
    world = World(alone)
    job, other_data = _prepared_for(output, run, alone, world, export, others)
    join_ranks(job, world)
    if job.task.head is not None and not adapters.is_adapter(export):
        source_files.check_export(job.run.model, job.task.head)
    session = build_session(job, world, trained=True)
    task, strategy = session.task, session.strategy
    if other_data or edits_of(output) is None:
        _check_prepared(task.prepared, export, run.model.trust_remote_code)
    split_names = [name for name in files_given or ("validation", "test") if name in task.splits]
    split_names = split_names if split is None else [split]
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
    named = [run.data.splits_named.get(name) for name in split_names]
    files = [file for some in named for file in some or ()] if all(named) else []
    return ", ".join(files) or str(task.prepared.facts["source"]), metrics


def _check_prepared(prepared: Prepared, export: Path, trusted: bool) -> None:
    """Check that the data were prepared with the model's labels and tokens: the training split defines both, and it may
    be another one than the model was trained on. Errors: `RunError`."""
    named = {
        code: str(name)
        for code, name in json.loads((export / "config.json").read_text(encoding="utf-8")).get("id2label", {}).items()
    }
    labels = {str(code): str(name) for code, name in enumerate(prepared.facts.get("labels", []))}
    fault = None
    if labels and named and labels != named:
        fault = f"its labels are {', '.join(labels.values())}, and the model's {', '.join(named.values())}"
    if prepared.tokenizer and (export / "tokenizer_config.json").is_file():
        ids, ids_of_model = (tokenizer.load(str(f), trusted).get_vocab() for f in (prepared.tokenizer, export))
        fault = fault or ("a tokenizer made for it has other tokens than the model's" if ids != ids_of_model else None)
    if fault is not None:
        raise RunError(
            "LS5055",
            f"{prepared.facts['source']} is not what the model was trained on: {fault}. Leave data and tokenizer as in "
            "OUTPUT/run.yaml, and name the file to score: lockstep evaluate OUTPUT FILE",
        )


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
