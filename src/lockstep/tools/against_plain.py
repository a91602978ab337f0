"""A run's own steps beside those of `lockstep.plain`: which loss, gradient or weight differs by more than rounding.

In: what `training/plain_steps.py` recorded, and the run. Out: lines that name what differs, and what plain does not
cover. How much may differ is measured: by a second plain run whose weights differ in their last bit (TTrace,
arXiv:2506.09280).
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from lockstep.config.run import Run
from lockstep.data import source
from lockstep.plain.job import Plain
from lockstep.plain.rows import NotCovered
from lockstep.plain.train import StepRecord, build_model, train_steps
from lockstep.training.plain_steps import FOLDER, PlainRecord

FACTOR = 10.0  # of what a change of the last bit comes to, may differ
LEAST = {"loss": 2e-6, "norm": 1e-5, "gradient": 2e-5, "change": 1e-3}  # may differ whatever that comes to, relatively
FLOOR = 1e-3  # of the whole: the norm that a parameter counts for at least, as gradients that cancel hold its rounding
NOTHING = 1e-5  # of the whole: a gradient below it is zero but for rounding


@dataclass(frozen=True)
class Beside:
    """One step of the run beside the plain one. Relative differences, and what is allowed."""

    number: int
    found: dict[str, float]  # loss, norm, gradient, change: the largest one
    allowed: dict[str, float]
    where: dict[str, str]  # gradient, change: the parameter that is furthest apart


@dataclass(frozen=True)
class Verdict:
    """What came of a comparison."""

    steps: list[Beside] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)  # none: as plain computes it
    uncovered: str | None = None  # what plain does not compute, in words


def differences(run: Run, steps: int = 2) -> Verdict:
    """Train some steps in this process under `single`, and compare them with plain's. Errors: `RunError`."""
    from lockstep.distributed.world import World
    from lockstep.training import plain_steps

    folder = Path(tempfile.mkdtemp(prefix="lockstep-plain-"))
    values = run.model_dump(mode="json")
    values["strategy"] = {"name": "single", "exact": run.strategy.exact, "options": {}}
    alone = Run.load(values | {"output": str(folder), "launch": {"device": run.launch.device, "processes": 1}})
    world = World(alone)
    try:
        plain_steps.record(alone, world, str(steps))
        return compare(run, folder / FOLDER)
    finally:
        world.close()
        shutil.rmtree(folder, ignore_errors=True)


def compare(run: Run, folder: Path) -> Verdict:
    """What plain makes of the steps recorded in a folder."""
    record, verdict = PlainRecord.read(folder), Verdict()
    try:
        job = Plain(plain_run(run, folder), record.tokenizer)
        _check_numbers(job, record)
        plain, perturbed = (_trained(job, record, folder, last_bit) for last_bit in (False, True))
        for place, (ours, theirs, other) in enumerate(zip(_recorded(record, folder), plain, perturbed, strict=True)):
            beside = _beside(ours, theirs, other, record.steps[place].number)
            verdict.steps.append(beside)
            if lines := _lines(beside, ours, theirs):
                verdict.differences.extend(lines)
                break  # what comes after a wrong step differs because of it
    except NotCovered as error:
        return Verdict(verdict.steps, verdict.differences, str(error))
    return verdict


def plain_run(run: Run, folder: Path) -> dict[str, Any]:
    """The run as plain reads it; rows that only lockstep makes are written to files first."""
    values = run.model_dump(mode="json")
    if run.data.source == source.BUILTIN:
        rows = source.load(run.data.model_copy(update={"filter": {}, "limit": None}), run.seed)
        (folder / "rows").mkdir(exist_ok=True)
        for split, dataset in rows.splits.items():
            text = "".join(json.dumps(row) + "\n" for row in dataset)
            (folder / "rows" / f"{split}.jsonl").write_text(text, encoding="utf-8")
        values["data"]["source"] = str(folder / "rows")
        if run.task.name == "classification" and not values["task"]["label_names"]:
            values["task"]["label_names"] = rows.splits["train"].features["label"].names
    return values


def _check_numbers(job: Plain, record: PlainRecord) -> None:
    known = len(job.examples("train"))
    most = max(i for step in record.steps for group in step.micro_batches for i in group)
    if most >= known:
        raise ValueError(f"the run trains example {most}, and plain makes {known} of the same data")


def _trained(job: Plain, record: PlainRecord, folder: Path, perturb: bool) -> Iterator[StepRecord]:
    start = load_file(folder / "start.safetensors")
    weights, state = _named("model.", start), _named("optimizer.", start)
    steps, numbers = [step.micro_batches for step in record.steps], [step.number for step in record.steps]
    model = build_model(job, weights)
    masks = [step.masked for step in record.steps] if record.steps[0].masked else []
    return train_steps(job, model, steps, record.total, numbers, perturb, state, masks)


def _recorded(record: PlainRecord, folder: Path) -> Iterator[StepRecord]:
    """What the run did, step by step."""
    before = _named("model.", load_file(folder / "start.safetensors"))
    for place, step in enumerate(record.steps):
        held = load_file(folder / f"step-{place}.safetensors")
        gradients, after = _named("gradient.", held), _named("model.", held)
        changes = {name: after[name] - before[name] for name in gradients}
        yield StepRecord(step.loss, step.norm, math.nan, gradients, changes)
        before = after


def _named(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those whose name begins so, without it."""
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


# -- comparing ---------------------------------------------------------------------------------------------------------


def _beside(ours: StepRecord, plain: StepRecord, perturbed: StepRecord, number: int) -> Beside:
    found, where = _apart(ours, plain)
    spread, _ = _apart(perturbed, plain)
    return Beside(number, found, {key: max(LEAST[key], FACTOR * spread[key]) for key in found}, where)


def _apart(a: StepRecord, b: StepRecord) -> tuple[dict[str, float], dict[str, str]]:
    """Relative differences of two records of a step, and where the largest ones are."""
    found, where = {"loss": _relative(a.loss, b.loss), "norm": _relative(a.norm, b.norm)}, {}
    sizes, whole = _sizes(b.gradients)
    kinds = [("gradient", a.gradients, b.gradients, [*sizes], FLOOR * whole)]
    if b.changes:  # Adam makes whole steps of a gradient that is nothing but rounding
        moved = [name for name, size in sizes.items() if size > NOTHING * whole]
        kinds.append(("change", a.changes, b.changes, moved, _sizes(b.changes)[1]))
    for kind, mine, theirs, names, least in kinds:
        apart = {}
        for name in names:
            difference = float((mine.get(name, 0.0 * theirs[name]).double() - theirs[name].double()).norm())
            size = max(float(theirs[name].double().norm()), least)
            apart[name] = difference / size if math.isfinite(difference) else math.inf
        where[kind] = max(apart, key=lambda name: apart[name], default="")
        found[kind] = apart.get(where[kind], 0.0)
    return found, where


def _sizes(tensors: Mapping[str, Tensor]) -> tuple[dict[str, float], float]:
    """The 2-norm of each, and of all together."""
    sizes = {name: float(tensor.double().norm()) for name, tensor in tensors.items()}
    return sizes, math.sqrt(sum(size**2 for size in sizes.values() if math.isfinite(size))) or 1.0


def _relative(a: float, b: float) -> float:
    return abs(a - b) / max(abs(b), 1e-30) if math.isfinite(a) and math.isfinite(b) else math.inf


def _lines(beside: Beside, ours: StepRecord, plain: StepRecord) -> list[str]:
    """What differs in a step, each line naming it."""
    at, said = f"step {beside.number}", []
    for key, apart in beside.found.items():
        if apart <= beside.allowed[key]:
            continue
        limit = f"differs by {apart:.1e}, and rounding comes to {beside.allowed[key]:.1e}"
        if key in ("loss", "norm"):
            name = "loss" if key == "loss" else "gradient norm"
            said.append(f"{at}: {name} {getattr(ours, key)!r}, and {getattr(plain, key)!r} by plain ({limit})")
        else:
            said.append(f"{at}: the {key} of {beside.where[key]} {limit}")
    if extra := sorted(ours.gradients.keys() - plain.gradients.keys()):
        held = [name for name in extra if bool(ours.gradients[name].any())]
        said += [f"{at}: {name} gets a gradient, and none by plain" for name in held[:1]]
    return said
