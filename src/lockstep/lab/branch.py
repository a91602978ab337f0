"""`lockstep branch OUTPUT@N run.yaml`: start a run from the first N steps of another one, without recomputing them.

In: the OUTPUT of a run, and a run whose first N steps use the same arithmetic. Out: a separate OUTPUT with a copy of
the other run's checkpoint. Training from there gives the same bits as training from the start.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lockstep.checkpoint.folder import rename_into_place
from lockstep.checkpoint.manifest import (
    Manifest,
    averaged,
    best_first,
    broken,
    changed_code,
    code_of,
    differing_keys,
    folder_of,
    name_of,
    newest_first,
)
from lockstep.config.error_messages import value_text
from lockstep.config.errors import DONE, FAILED, coded
from lockstep.config.output_files import open_file, replace_text, require_output
from lockstep.config.run import Run, RunError, load, write_run_yaml
from lockstep.config.sections import CheckpointSection
from lockstep.data.job import Job
from lockstep.launchers import output_lock, start
from lockstep.track.console import Console, error
from lockstep.track.history import lines_of
from lockstep.training import fingerprints
from lockstep.training.shared_prefix import OF_STEPS, Course, course, parting, shares_nothing
from lockstep.training.step_record import by_step, record_differences


@dataclass(frozen=True)
class Begun:
    """The starting point of a branched run."""

    output: Path  # of the original run
    step: int
    manifest: Manifest
    needed: tuple[Manifest, ...]  # earlier checkpoints that the export may use
    scored: bool  # whether both runs make the same evaluations up to this step


def branch(spec: str, run: Run) -> int:
    """Copy a checkpoint into OUTPUT and train from there. Returns the exit status of `train`, or 1 if recomputed steps
    differ from the recorded ones. Errors: `RunError`."""
    output, step = parsed(spec)
    console = Console(True, voice=run.track.console)
    if start.joining():
        raise RunError(
            "LS8050", "lockstep branch starts its own processes; run it without torchrun or another launcher"
        )
    if run.folder.resolve() == output.resolve():
        raise RunError(
            "LS8051", f"output: {run.folder} is the output of the original run; give the branch another output=FOLDER"
        )
    begun = None
    if next(newest_first(run.folder), None) is None:  # otherwise an earlier start has placed it, and this one resumes
        with output_lock.owned(run.folder, console.note):
            begun = _begun(output, step, run, console)
    status = start.train(run)
    if status != DONE or begun is None:
        return status
    return _compared(output, run.folder, begun.step, step)


def parsed(spec: str) -> tuple[Path, int]:
    """Parse `OUTPUT@N`. Errors: `RunError`."""
    output, _, step = spec.rpartition("@")
    if not output or not step.isdecimal() or not int(step):
        raise RunError(
            "LS8052", f"{spec!r} is not a run and a step; expected OUTPUT@STEP, for example outputs/run@1200"
        )
    require_output(Path(output))
    return Path(output), int(step)


def _begun(output: Path, step: int, run: Run, console: Console) -> Begun:
    job = start.resolved(run)[1]
    manifest = next((manifest_there for _, manifest_there in newest_first(output)), None)
    if manifest is None:
        raise RunError("LS8054", f"{output} has no checkpoint to start from")
    ours = course(job)
    same, why = shared(output, job, manifest, ours)
    if step > same:
        at = f"; {output}@{same} is possible" if same else ""
        raise RunError("LS8055", f"cannot branch at {output}@{step}: {why}{at}")
    begun = take(output, step, job, ours)
    place(begun, job, ours)
    again = f"steps {begun.step + 1} to {step} are" if begun.step + 1 < step else f"step {step} is"
    rest = f"; {again} recomputed" if begun.step < step else ""
    console.say(f"branched   {job.run.folder} begins with the checkpoint of step {begun.step} of {output}{rest}")
    return begun


def load_of(output: Path) -> Run:
    """Load the run of OUTPUT, wherever the folder is now. Errors: `RunError`."""
    return load(output / "run.yaml", {"output": str(output)})


def shared(output: Path, job: Job, manifest: Manifest, ours: Course) -> tuple[int, str]:
    """Return how many of their first steps both runs share, and why the next one differs. `manifest`: of any
    checkpoint of OUTPUT. Errors: `RunError`."""
    run, prepared = job.run, job.data
    differing = differing_keys(job, manifest)
    fixed = {key: values for key, values in differing.items() if key not in OF_STEPS}
    if fixed:
        key, (then, now) = next(iter(fixed.items()))
        more = f" (and {', '.join([*fixed][1:])})" if len(fixed) > 1 else ""
        return 0, f"{key} is {value_text(then)} there and {value_text(now)} here{more}, which changes every step"
    if manifest.data != prepared.key:
        return 0, "its data or tokenizer differ in content from those of this run"
    if (why := shares_nothing(job, differing)) is not None:
        return 0, why
    if not manifest.bits:
        return 0, f"it was trained by {manifest.strategy}, which is not bitwise reproducible"
    if files := changed_code(code_of(run.task, run.optim, run.strategy), manifest):
        return 0, f"it was trained with other versions of your code: {', '.join(files)} changed since"
    theirs = load_of(output)
    if other := differing_keys(replace(Job.of(theirs), prepared=prepared), manifest):
        raise RunError(
            "LS8056",
            f"{output}/run.yaml differs from the run file of its checkpoints in {next(iter(other))}; restore "
            "that value",
        )
    same, why = parting(course(replace(Job.of(theirs), prepared=prepared)), ours)
    differences = f"{', '.join(sorted(differing))}: " if differing else ""
    ends = f"one of the runs ends there ({manifest.steps} steps there, {len(ours.rates)} here)"
    return same, f"{differences}{why or ends}"


def take(output: Path, step: int, job: Job, ours: Course) -> Begun:
    """Return the newest intact checkpoint of at most `step` steps. Errors: `RunError`."""
    theirs, faults = load_of(output), list[str]()
    there = {manifest.step: (path, manifest) for path, manifest in newest_first(output)}
    for at in sorted((each for each in there if each <= step), reverse=True):
        path, manifest = there[at]
        if (fault := broken(path, manifest)) is not None:
            faults.append(f"{path.name}: {fault}")
            continue
        scored = _evaluated(theirs) == _evaluated(job.run)
        return Begun(output, at, manifest, _needed(theirs.folder, job, at, ours, scored), scored)
    listed = ", ".join(map(str, sorted(there))) or "none"
    damaged = f"; damaged: {'; '.join(faults)}" if faults else ""
    raise RunError(
        "LS8057",
        f"{output}@{step}: no checkpoint of at most {step} steps exists (existing: {listed}){damaged}, so a "
        "branch would save nothing; use `lockstep train`. A run keeps the checkpoints of checkpoint.at",
    )


def _evaluated(run: Run) -> dict[str, Any]:
    """Return all settings that decide when a run evaluates and with which result."""
    values = run.model_dump(mode="json")
    return {"evaluate": values["evaluate"], "metrics": values["metrics"], "best": values["checkpoint"]["best"]}


def _needed(output: Path, job: Job, step: int, ours: Course, scored: bool) -> tuple[Manifest, ...]:
    """Return the checkpoints of OUTPUT before `step` that the export may need. Errors: `RunError` if they are
    missing."""
    run = job.run
    every = interval(run.checkpoint, ours)
    if run.average.last is not None and (first := averaged(run.average.last, len(ours.rates), every)[0]) < step:
        raise RunError(
            "LS8058",
            f"average.last: the export is the mean of checkpoints from step {first} on, but this run would "
            f"start from step {step}; branch at step {first} or before",
        )
    if run.export != "best" and run.evaluate.patience is None:
        return ()
    if not scored:
        raise RunError(
            "LS8059",
            "export, evaluate.patience: the best model depends on evaluations before the branch, but evaluate, metrics "
            "or checkpoint.best differ between the two runs; make them equal, or set export=last",
        )
    lines = lines_of(output / "metrics.jsonl", ("step", "split"))
    evaluations = {line["step"]: line for line in lines if line["split"] == "validation" and line["step"] <= step}
    there = newest_first(output)
    available = {manifest.step: manifest for path, manifest in there if broken(path, manifest) is None}
    best = best_first(run.checkpoint.best, evaluations)[:1]
    if best and best[0].step not in available:
        raise RunError(
            "LS8060",
            f"export: the best model before step {step} is from step {best[0].step}, and {output} no "
            "longer has its checkpoint; set export=last, or train from the start",
        )
    return tuple(available[each.step] for each in best if each.step != step)


def interval(checkpoint: CheckpointSection, ours: Course) -> int:
    """Steps between checkpoints."""
    every = checkpoint.every
    return ours.order.steps_per_epoch if every == "epoch" else every


def place(begun: Begun, job: Job, ours: Course) -> None:
    """Place the checkpoint of the original run in this run's folder, with the log lines up to its step. Files are hard
    links if the disk supports them: they are never written again. The checkpoint is placed last, so an interrupted
    attempt starts over. Errors: `RunError`."""
    run = job.run
    write_run_yaml(run)
    try:
        folder_of(run.folder).mkdir(parents=True, exist_ok=True)
        _lines(begun, run.folder)
        for manifest in (*begun.needed, begun.manifest):
            source, aside = begun.output / "checkpoints" / name_of(manifest.step), f".{name_of(manifest.step)}.partial"
            _linked(source, folder_of(run.folder) / aside, manifest.hashes)
            rename_into_place(run.folder, _own(manifest, job, ours, begun.scored), folder_of(run.folder) / aside)
    except OSError as caught:
        raise RunError(
            "LS8061", f"output: cannot write to {run.folder}: {caught.strerror or caught}; choose another output"
        ) from caught


def _own(manifest: Manifest, job: Job, ours: Course, scored: bool) -> Manifest:
    """Return the manifest as if this run had saved the checkpoint, on the hosts of the original run."""
    every = interval(job.run.checkpoint, ours) if job.run.average.last is not None else 0
    compiled = {key: value for key, value in manifest.arithmetic.items() if key == "model.compile"}
    arithmetic = compiled | job.arithmetic()  # lacks model.compile until `auto` is resolved
    adjusted = replace(manifest, arithmetic=arithmetic, steps=len(ours.rates), every=every, trackers={})
    return adjusted if scored else replace(adjusted, scores={}, progress={})


def _linked(source: Path, aside: Path, names: Mapping[str, str]) -> None:
    """Link or copy `names` of `source` into `aside`. Errors: `OSError`."""
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    for name in names:
        try:
            os.link(source / name, aside / name)
        except OSError:  # another disk, or a file system without links
            shutil.copyfile(source / name, aside / name)


def _lines(begun: Begun, folder: Path) -> None:
    """Return the original run's log lines up to the branch, marked with their origin."""
    for name in (fingerprints.FILE, "metrics.jsonl"):
        lines = [
            line
            for line in lines_of(begun.output / name, ("step",))
            if line["step"] <= begun.step and (begun.scored or line.get("split", "train") == "train")
        ]
        replace_text(folder / name, "".join(json.dumps(line) + "\n" for line in lines))
    event = {"time": round(time.time(), 3), "event": "branch", "step": begun.step, "from": str(begun.output)}
    with suppress(OSError), open_file(folder / "events.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps(event) + "\n")


def _compared(output: Path, branched: Path, begun: int, step: int) -> int:
    """Check that the recomputed steps `begun` + 1 to `step` equal the recorded ones."""
    then, now = (by_step(fingerprints.recorded(folder)) for folder in (output, branched))
    for each in range(begun + 1, step + 1):
        if each in then and each in now and record_differences(then[each], now[each]):
            error(
                coded(
                    "LS8062",
                    f"step {each} was recomputed and differs from the record of {output} (loss {now[each].loss!r} "
                    f"now, {then[each].loss!r} then): the processor, package versions or threads differ. "
                    f"{branched} does not continue {output} bit for bit; run lockstep diff for the first difference",
                )
            )
            return FAILED
    return DONE
