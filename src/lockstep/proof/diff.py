"""`lockstep diff A B`: the first difference of two finished runs.

In: two OUTPUT folders with fingerprints. Out: the first step whose fingerprints differ; the first value within that
step that differs, after the step was recomputed for both runs on one process and under each run's own strategy; and the
likely cause.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from lockstep.config.output_files import require_output
from lockstep.config.run import Run, RunError, load
from lockstep.data.job import arithmetic_of
from lockstep.launchers import start
from lockstep.proof.replay import run_to_recompute, start_of, what_of
from lockstep.track.console import Console
from lockstep.training import fingerprints
from lockstep.training.step_record import (
    StepRecord,
    by_step,
    compare_records,
    factors_of,
    read_records,
    record_differences,
)
from lockstep_trace import causes
from lockstep_trace.coded import quantity

JOB = "lockstep.proof.replay_rank.record_modules"
_MOST = 12
CAUSES = {  # where both compute the same values before it, and nothing else is known
    "start weights": "likely: the runs started from different weights (the model, its source, or the seed)",
    "examples": "likely: a different order of the data (seed, batch_size, data, or a filter)",
    "inputs": "likely: the same rows were tokenized differently (data, tokenizer, truncation, or micro_batches)",
    "output": "weights and tokens are equal; likely: dropout or its seed, precision, or code of the model",
    "loss": "the outputs are equal; likely: the task's loss or its targets",
    "output gradient": "forward is equal; likely: the model's backward, precision, or an option that recomputes",
    "leaf gradient": "the layer's inputs are equal; likely: how its weight gradient is computed, or a hook on it",
    "norm": f"likely: {causes.NORM}",
    "loss sum": "the loss of each micro-batch is equal; likely: how they are added, which changes no weight",
    "learning rate": "likely: the schedule (optim.learning_rate, its warm-up, or the number of steps)",
    "update": "all gradients are equal; likely: clipping, weight decay, or the optimizer and its options",
}


def diff(a: Path, b: Path, overrides: Sequence[str], look: bool = True) -> int:
    """Print the first difference of two runs. Returns 0 if no step differs, 1 if one does, or the exit status of a job
    that failed. `look`: recompute that step. Errors: `RunError`."""
    if start.joining():
        raise RunError("LS8150", "lockstep diff starts its own processes; run it without torchrun or another launcher")
    console, both = Console(True), (a, b)
    for folder in both:
        require_output(folder)
    records = [fingerprints.recorded(folder) for folder in both]
    for folder, own in zip(both, records, strict=True):
        if not own:
            raise RunError(
                "LS8151",
                f"{folder} has no {fingerprints.FILE} or an empty one, so its steps cannot be compared; set "
                "fingerprint.every when training",
            )
    faulty = [fault for folder, own in zip(both, records, strict=True) for fault in faults(folder, own)]
    differing = compare_records(*records)
    other_differences = differing_settings(a, b, overrides)
    if not differing:
        shared = by_step(records[0]).keys() & by_step(records[1]).keys()
        if not shared:
            raise RunError(
                "LS8152",
                f"{a} and {b} have no fingerprints of a common step; train both with the same fingerprint.every",
            )
        if faulty:
            _tell(console, "no step differs, but these lines are invalid:", faulty)
            return 1
        console.say(f"the same bits in all {len(shared)} common steps, up to step {max(shared)}")
        _tell(console, "also different, with no effect on the weights so far:", other_differences)
        return 0
    step = differing[0].step
    one, other = (by_step(own)[step] for own in records)
    console.say(
        f"first difference: step {step}, {what_of(differing)}: loss {one.loss!r} in {a}, {other.loss!r} in {b}; "
        f"gradient norm {one.grad_norm!r} and {other.grad_norm!r}"
    )
    _tell(console, "invalid lines:", faulty)
    _tell(console, "settings that differ:", other_differences)
    try:
        return _recompute(console, both, (one, other), overrides) if look else 1
    except _Failed as caught:
        return caught.status


def faults(folder: Path, records: Sequence[StepRecord]) -> list[str]:
    """Return messages about the first few invalid records of one run."""
    skips = load(folder / "run.yaml", []).skips_nonfinite if (folder / "run.yaml").is_file() else False
    reasons = [
        f"{folder / fingerprints.FILE}: step {record.step}: {fault}"
        for record in records
        if (fault := record.fault(skips)) is not None
    ]
    return reasons[:_MOST] + ([f"... and {len(reasons) - _MOST} more"] if len(reasons) > _MOST else [])


def differing_settings(a: Path, b: Path, overrides: Sequence[str]) -> list[str]:
    """Return the differences between two runs in keys that decide weights, and in versions and hardware."""
    runs = [run_to_recompute(folder, overrides, None, 1) for folder in (a, b)]
    keys = [arithmetic_of(run) for run in runs]
    rows = [
        f"{key}: {keys[0].get(key)!r} and {keys[1].get(key)!r}"
        for key in sorted(keys[0].keys() | keys[1].keys())
        if keys[0].get(key) != keys[1].get(key)
    ]
    rows += [f"... and {len(rows) - _MOST} more keys"] if len(rows) > _MOST else []
    begun = [start_of(folder) for folder in (a, b)]
    versions = [each.get("versions", {}) for each in begun]
    facts = [
        {f"version of {n}": v for n, v in versions[i].items()}
        | {
            "devices": sorted(set(begun[i].get("devices", []))),
            "threads per process": begun[i].get("threads"),
            "strategy": written.strategy.name,
            "processes": begun[i].get("processes"),
            "git commit": (begun[i].get("git") or {}).get("commit"),
        }
        for i, written in enumerate(load(folder / "run.yaml", []) for folder in (a, b))
    ]
    return rows[: _MOST + 1] + [
        f"{name}: {facts[0].get(name)} and {facts[1].get(name)}"
        for name in facts[0] | facts[1]
        if facts[0].get(name) != facts[1].get(name)
    ]


def _tell(console: Console, title: str, lines: Sequence[str]) -> None:
    if lines:
        console.say(title)
        for line in lines:
            console.say(f"  {line}")


# -- recomputing the step --------------------------------------------------------------------------------------------


def _recompute(
    console: Console, both: tuple[Path, Path], recorded: tuple[StepRecord, StepRecord], overrides: Sequence[str]
) -> int:
    def alone(folder: Path, step: int) -> StepRecord:
        return modules_of(run_to_recompute(folder, overrides, None, 1), folder, step)

    (a, b), step = both, recorded[0].step
    console.say(f"recomputing step {step} of both runs on one process ...")
    if _tell_first_difference(console, step, partial(alone, a), partial(alone, b), ""):
        return 1
    console.say("on one process both runs are bitwise equal in this step: data, settings and code are not the cause")
    for folder in both:
        run = run_to_recompute(folder, overrides, "own", int(start_of(folder).get("processes") or 1))
        if run.strategy.alone:
            continue
        how = f"{run.strategy.name}, {quantity(run.launch.processes, 'process')}"
        console.say(f"recomputing step {step} as {folder} trained it: {how} ...")
        if _tell_first_difference(
            console, step, partial(alone, folder), partial(modules_of, run, folder), f"{folder}, "
        ):
            return 1
    norm = alone(a, step).grad_norm
    right = [str(folder) for folder, own in zip(both, recorded, strict=True) if own.grad_norm == norm]
    console.say(
        "all strategies are bitwise equal in this step. "
        f"{f'{right[0]} recorded these bits. ' if len(right) == 1 else ''}"
        "Remaining causes: another kind of processor or GPU, other versions or threads (listed above if recorded), "
        "code changed since, or a machine that computed wrongly"
    )
    return 1


ComputeStep = Callable[[int], StepRecord]


def _tell_first_difference(console: Console, step: int, a: ComputeStep, b: ComputeStep, where: str) -> bool:
    """Print the first value that differs between two ways to compute a step; return whether there is one. If the
    weights before the step differ already, look at the step before."""
    mine, theirs = a(step), b(step)
    differing = record_differences(mine, theirs)
    while step > 1 and differing and differing[0].kind == "start weights":
        step -= 1
        console.say(f"the weights before this step differ already; recomputing step {step} ...")
        mine, theirs = a(step), b(step)
        differing = record_differences(mine, theirs) or differing
    if not differing:
        return False
    console.say(f"first differing value: {where}step {step}, {differing[0]}")
    console.say(f"  {cause_of(mine, theirs, differing[0].kind)}")
    return True


class _Failed(Exception):
    """A job failed with this exit status, after it printed why."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


def modules_of(run: Run, output: Path, step: int) -> StepRecord:
    """Recompute a step and return its record at the level `modules`. Errors: `RunError`, `_Failed`."""
    from lockstep.proof.replay_rank import RECORDS

    with tempfile.TemporaryDirectory(prefix="lockstep-diff-", ignore_cleanup_errors=True) as folder:
        run = run.into(Path(folder) / "run")
        launcher, job = start.resolved(run)
        status = start.start_ranks(launcher, job, (JOB, str(output.resolve()), str(step)))
        if status or not (run.folder / RECORDS).exists():
            raise _Failed(status or 1)
        return read_records(run.folder / RECORDS)[1][0]


def cause_of(a: StepRecord, b: StepRecord, kind: str) -> str:
    """Return the likely cause, by the kind of the first value that differs."""
    if kind != "gradient":
        return CAUSES[kind]
    wrong, factors = factors_of(a, b)  # the gradients of all micro-batches are equal
    if factors and all(abs(f - 1) < 1e-4 for f in factors):
        return "equal within rounding; likely: another order of summation (strategy.exact, micro_batches)"
    return f"likely: {causes.of_sums(wrong, len(a.gradients), factors, unequal=True)}"
