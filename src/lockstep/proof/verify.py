"""`lockstep verify`: train a few steps of a job under its strategy and on one process, and compare them.

In: a run. Out: the first difference between the two jobs, by name, and whether the strategy allows it. Both jobs are
recorded as traces, and `lockstep_trace` compares them like the traces of any command. `--write golden.jsonl` keeps
the records of the steps: hashes of every gradient, and of every weight after every step; `--against golden.jsonl`
reports the first of them that differs under this commit, torch, driver and number of processes.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from lockstep.config.error_messages import value_text
from lockstep.config.run import Run, RunError, write_run_yaml
from lockstep.data.arrow_cache import Prepared
from lockstep.data.job import Job, arithmetic_of, strategy_class, task_class
from lockstep.distributed.event_log import versions
from lockstep.distributed.hardware import processor
from lockstep.distributed.randomness import UNCOVERED
from lockstep.launchers import start
from lockstep.launchers.processes import accelerate_config
from lockstep.proof import against_plain
from lockstep.proof.recording import FILE as RECORDS
from lockstep.proof.recording import TRACE, Recording, read
from lockstep.track.busy import ACTIVITY
from lockstep.track.console import Console
from lockstep.training.step_record import StepRecord, compare_records, read_records, write_records
from lockstep_trace import compare_traces as comparing
from lockstep_trace.coded import quantity
from lockstep_trace.compare_traces import Comparison, Tolerance
from lockstep_trace.read import read as read_trace
from lockstep_trace.report import write as write_page
from lockstep_trace.terminal import lines_of, say_numbers

RECORD = "lockstep.proof.recording.record"  # entry point of every rank
DRIFT = 1e-2  # relative to the whole update: AdamW amplifies rounding where a gradient is almost zero


def compare_recordings(ours: Path, single: Path) -> Comparison:
    """Compare two recordings: the first difference that the strategy of the first one does not allow. Errors:
    `TraceError`."""
    return comparing.compare_traces(read_trace(single / TRACE), read_trace(ours / TRACE), tolerance=allowed(read(ours)))


def allowed(mine: Recording) -> Tolerance:
    """Return the differences that the strategy allows: none if it promises the same bits."""
    if mine.bits:
        return Tolerance({}, dict.fromkeys(comparing.FLOORS, 0.0), f"the same bits, as {mine.strategy} promises")
    drift = max(DRIFT, mine.rounding)
    limits = dict.fromkeys(("loss", "gradient"), mine.rounding) | dict.fromkeys(("update", "buffers"), drift)
    return Tolerance({}, limits | {"start weights": drift}, f"{mine.rounding:.0e}, as {mine.strategy} promises")


def findings(mine: Recording, verdict: Comparison) -> list[str]:
    """Return lines about the first difference that is not allowed, with warnings about the user's code that may explain
    it; empty if there is none."""
    lines = lines_of(verdict)
    if not lines:
        return []
    return lines + mine.doubts + ([f"{UNCOVERED}: {', '.join(mine.uncovered)}"] if mine.uncovered else [])


def promise(recording: Recording, as_result: bool = False) -> str:
    """Describe the expected result and its reason. `as_result`: as the result, which is as expected."""
    before, after = ("result: ", ", as expected") if as_result else ("expected: ", "")
    if recording.bits:
        return f"{before}the same bits{after}: {recording.strategy} adds micro-batches in a fixed order"
    return (
        f"{before}equal within rounding ({recording.rounding:.0e}){after}: {recording.strategy} adds in its own order "
        "here (strategy.exact is false, or the engine or an option cannot keep the fixed order)"
    )


# -- the command -----------------------------------------------------------------------------------------------------


def verify(
    run: Run, steps: int, verdict: Path | None = None, plain: bool = True, single: bool = True, keep: Path | None = None
) -> int:
    """Record the job under its strategy; compare it with the same job on one process (`single`) and with the plain
    reference (`plain`). `verdict`: file to write the result to, as JSON. `keep`: folder for both traces and a page. If
    a launcher such as torchrun started this process, it is one rank of the job. Returns 0 if the result is as expected,
    1 if not, or the exit status of a job that failed. Errors: `RunError`."""
    launcher, job = None, None
    start.task_of_srun(run.launch)
    if start.joining():
        accelerate_config.check_variables(run, os.environ)
    else:
        launcher, job = start.resolved(run)
        run = job.run
    with tempfile.TemporaryDirectory(prefix="lockstep-verify-", ignore_cleanup_errors=True) as aside:
        folder = Path(aside)
        console = Console(os.environ.get("RANK", "0") == "0")
        console.say(f"training {quantity(steps, 'step')} under {run.strategy.name} ...")
        ACTIVITY.set(f"computing {steps} steps under {run.strategy.name}")
        looked_at = against_plain.STEPS if plain and task_class(run.task.name).built_in() else 0
        words = _words(steps, looked_at)
        if launcher is None or job is None:
            from lockstep.training import rank as worker

            status = worker.main(run.into(folder / "run"), words=words)
        else:
            status = start.start_ranks(launcher, job.into(folder / "run"), words)
        if status or not (folder / "run" / RECORDS).exists():  # only rank 0 has the records
            return status
        if single:
            console.say("training the same steps on one process ...")
            ACTIVITY.set(f"computing the same {steps} steps as one process")
            if status := record_alone(run, folder / "alone", steps):
                return status
            status = tell(console, folder / "run", folder / "alone", verdict, keep)
        return max(status, against_plain.tell(console, job or Job.of(run), folder / "run", verdict) if plain else 0)


def record_run(run: Run, folder: Path, steps: int, begin: int | None = None) -> tuple[int, Prepared | None]:
    """Start a job that records a few steps into a folder; return its exit status and the data. `begin`: the first step.
    Errors: `RunError`."""
    launcher, job = start.resolved(run)
    status = start.start_ranks(launcher, job.into(folder), _words(steps, begin=begin))
    return status or int(not (folder / RECORDS).exists()), job.data


def _words(steps: int, plain: int = 0, begin: int | None = None) -> tuple[str, ...]:
    """Return the entry point of each rank and its arguments: record `steps` steps, and `plain` steps without
    dropout."""
    return (RECORD, str(steps), "0", str(plain), *([] if begin is None else [str(begin)]))


def record_alone(run: Run, folder: Path, steps: int, timed: int = 0) -> int:
    """Record the job on one process, in a subprocess. Returns its exit status."""
    write_run_yaml(run.as_one_process().into(folder))
    code = "import sys; from lockstep.training.rank import main_of_file as main; main(sys.argv[1], sys.argv[2:])"
    command = [sys.executable, "-c", code, str(folder / "run.yaml"), RECORD, str(steps), str(timed)]
    launched = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "GROUP_", "ROLE_", "TORCHELASTIC_")
    return subprocess.run(command, env={k: v for k, v in os.environ.items() if not k.startswith(launched)}).returncode


def tell(console: Console, ours: Path, single: Path, verdict: Path | None = None, folder: Path | None = None) -> int:
    """Print the table and the verdict. `folder`: keeps both traces and a page. Returns the exit status."""
    mine, compared = read(ours), compare_recordings(ours, single)
    wrong = findings(mine, compared)
    if verdict is not None:
        answer = {"agrees": not wrong, "promise": "bits" if mine.bits else "rounding", "differences": wrong}
        verdict.write_text(json.dumps(answer), encoding="utf-8")
    processes = quantity(mine.processes, "process")
    say_numbers(console, compared, f"{mine.strategy} on {processes}, compared with one process")
    kinds = (f"{what} {' and '.join(names)}" for what, names in mine.dtypes.items())
    console.say(f"dtypes: {', '.join(kinds)}".replace("torch.", ""), 2)
    if wrong:
        console.say(promise(mine), 2)
    if mine.uncovered:
        console.say(f"{UNCOVERED}: {', '.join(mine.uncovered)}", 2)
    for doubt in mine.doubts:
        console.say(doubt, 2)
    if not wrong:
        console.say(promise(mine, as_result=True), 2)
    else:
        console.say("result: DIFFERENT from what was expected")
        for line in wrong:
            console.say(f"  {line}", 4)
    if folder is not None:
        for name, recording in (("reference", single), ("job", ours)):
            shutil.rmtree(folder / name, ignore_errors=True)
            shutil.copytree(recording / TRACE, folder / name)
        console.say(str(write_page(folder / "job", folder / "reference", [compared])))
    return int(bool(wrong))


_MOST_KEYS = 12  # keys that differ


def write(run: Run, steps: int, path: Path) -> int:
    """Record a few steps and write their hashes to a file. Returns 0, or the exit status of a job that failed. Errors:
    `RunError`."""
    if not path.parent.is_dir():
        raise RunError("LS8390", f"--write: no such folder: {path.parent}; make it, or choose another file")
    console = Console(True)
    golden = record_golden(run, steps)
    if isinstance(golden, int):
        return golden
    try:
        write_records(path, *golden)
    except OSError as error:
        raise RunError("LS8391", f"--write: {path}: {error.strerror}; choose another file") from error
    console.say(f"{path}: hashes of {len(golden[1])} steps; compare with lockstep verify ... --against {path}")
    return 0


def against(run: Run, path: Path) -> int:
    """Record the steps that a file has hashes of, and compare. Returns 0 for the same bits, 1 for others, or the exit
    status of a job that failed. Errors: `RunError`."""
    (then, old), console = read_golden(path), Console(True)
    golden = record_golden(run, then["asked"], old[0].step)
    if isinstance(golden, int):
        return golden
    now, new = golden
    other_differences = changes(then, now)
    if (first := first_difference(old, new)) is None:
        count = len(new[0].gradients) + len(new[0].after)
        console.say(f"result: the same bits as in {path}: {len(new)} steps, each with {count} gradients and weights")
        for line in other_differences:
            console.say(f"  (changed: {line})")
        return 0
    console.say(f"result: DIFFERENT from {path}: {first}", 2)
    for line in other_differences or [
        "no other recorded value has changed: check the code, the driver and the processor"
    ]:
        console.say(f"  {line}", 4)
    return 1


def read_golden(path: Path) -> tuple[dict[str, Any], list[StepRecord]]:
    """Read a file of records: facts, and steps. Errors: `RunError`."""
    try:
        facts, steps = read_records(path)
    except OSError as error:
        raise RunError("LS8392", f"--against: {path}: {error.strerror}; lockstep verify --write makes it") from error
    except ValueError as error:
        if error.code == "LS9150":  # type: ignore[attr-defined]
            raise RunError(
                "LS8393", f"--against: {path} is not JSON; write it again with lockstep verify --write"
            ) from None
        facts, steps = {}, []
    if "asked" not in facts or not steps:
        raise RunError("LS8394", f"--against: {path} was not written by this version of lockstep verify --write")
    return facts, steps


def record_golden(run: Run, steps: int, begin: int | None = None) -> tuple[dict[str, Any], list[StepRecord]] | int:
    """Return facts and records of a few steps of a run on this machine, or the exit status of a job that failed.
    `begin`: the first step. Errors: `RunError` for a strategy that is not bitwise reproducible."""
    if start.joining():
        raise RunError(
            "LS8395", "lockstep verify --write and --against start their own processes; run it without torchrun"
        )
    with tempfile.TemporaryDirectory(prefix="lockstep-golden-", ignore_cleanup_errors=True) as aside:
        folder = Path(aside)
        status, prepared = record_run(run, folder / "run", steps, begin)
        if status or prepared is None:
            return status
        recording = read(folder / "run")
        if not recording.bits:
            raise RunError(
                "LS8396",
                f"strategy.name: {recording.strategy} sums in its own order with these options, so its result is not "
                "bitwise reproducible and cannot be compared; set strategy.exact=true and leave such options out",
            )
        for step in recording.steps:
            if (fault := step.fault()) is not None:
                raise RunError("LS8397", f"step {step.step}: {fault}, so the step is not compared")
        return _facts(run, prepared, recording) | {"asked": steps}, recording.steps


def _facts(run: Run, prepared: Prepared, recording: Recording) -> dict[str, Any]:
    cuda = torch.cuda.is_available() and run.launch.device != "cpu"
    return {
        "run": arithmetic_of(run),
        "data": prepared.key,
        "versions": versions(run.model, strategy_class(run).needs),
        "device": torch.cuda.get_device_name() if cuda else processor(),
        "threads": run.launch.threads,
        "strategy": recording.strategy,
        "processes": recording.processes,
        "uncovered": recording.uncovered,
    }


def first_difference(then: Sequence[StepRecord], now: Sequence[StepRecord]) -> str | None:
    """Describe the first value that differs, or return None."""
    if [record.step for record in then] != [record.step for record in now]:
        return "the steps differ, because the length of an epoch has changed"
    differing = compare_records(then, now)
    if not differing:
        return None
    first, text = differing[0], f"step {differing[0].step}: {differing[0]}"
    if first.missing:
        return f"{text} exists only {'then' if first.missing == 'second' else 'now'}"
    return text if first.values is None else f"{text} is {first.values[1]!r}, and was {first.values[0]!r}"


def changes(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Describe what has changed since the file was written: keys of the run file, data, versions, hardware."""
    former = then["run"]
    keys = sorted(k for k in former.keys() | now["run"].keys() if former.get(k) != now["run"].get(k))
    rows = [
        f"{key}: {value_text(former.get(key))} then, {value_text(now['run'].get(key))} now" for key in keys[:_MOST_KEYS]
    ]
    rows += [f"{len(keys) - _MOST_KEYS} more keys of the run file"] if len(keys) > _MOST_KEYS else []
    if then["data"] != now["data"]:
        rows.append("the data or the tokenizer have changed")
    both = {
        name: (then["versions"].get(name), now["versions"].get(name)) for name in then["versions"] | now["versions"]
    }
    both |= {name: (then[name], now[name]) for name in ("device", "threads", "strategy", "processes")}
    return rows + [f"{name}: {old} then, {new} now" for name, (old, new) in both.items() if old != new]
