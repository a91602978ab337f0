"""`lockstep verify`: a few steps of the user's own job under the run's strategy, and as one process; then compare.

In: a run. Out: what differs between the two jobs, by name, and whether that is what the strategy promises. Both are
recorded as traces, and `lockstep_trace` compares them, as it does those of any command. With `--write golden.json` a
small file of hashes, of every gradient and every weight after every step; `--against golden.json` says which of them
is another one under this commit, this torch, this driver, this number of processes.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from lockstep.config.run import Run, RunError, keep
from lockstep.data.arrow_cache import Prepared
from lockstep.distributed.activity import ACTIVITY
from lockstep.distributed.event_log import versions
from lockstep.distributed.hardware import processor
from lockstep.distributed.randomness import UNCOVERED
from lockstep.launchers import start
from lockstep.launchers.processes import accelerate_config
from lockstep.proof import against_plain
from lockstep.proof.recording import TRACE, Recording, read
from lockstep.track.console import Console
from lockstep_trace import compare as comparing
from lockstep_trace.compare import Comparison, Tolerance
from lockstep_trace.plurals import quantity
from lockstep_trace.read import read as read_trace
from lockstep_trace.report import write as write_page
from lockstep_trace.terminal import lines_of, say_numbers

RECORD = "lockstep.proof.recording.record"  # the job that every rank does
DRIFT = 1e-2  # of the whole change: AdamW blows rounding up where a gradient is all but zero


def compare(ours: Path, single: Path) -> Comparison:
    """The first thing in which two recordings part by more than the strategy of the first one promises. Errors:
    `TraceError`."""
    return comparing.compare(read_trace(single / TRACE), read_trace(ours / TRACE), tolerance=allowed(read(ours)))


def allowed(mine: Recording) -> Tolerance:
    """What may differ: nothing where bits are promised."""
    if mine.bits:
        return Tolerance({}, dict.fromkeys(comparing.FLOORS, 0.0), f"the same bits, as {mine.strategy} promises")
    drift = max(DRIFT, mine.rounding)
    limits = dict.fromkeys(("loss", "gradient"), mine.rounding) | dict.fromkeys(("update", "buffers"), drift)
    return Tolerance({}, limits | {"start weights": drift}, f"{mine.rounding:.0e}, as {mine.strategy} promises")


def findings(mine: Recording, verdict: Comparison) -> list[str]:
    """What differs by more than the strategy is allowed, and what was found in the user's own code before anything was
    trained; none when all is as promised."""
    lines = lines_of(verdict)
    if not lines:
        return []
    return lines + mine.doubts + ([f"{UNCOVERED}: {', '.join(mine.uncovered)}"] if mine.uncovered else [])


def promise(recording: Recording) -> str:
    """What was expected, and why."""
    if recording.bits:
        return (
            f"expected: the same bits. {recording.strategy} adds the micro-batches of a step over one fixed tree, "
            "whatever the number of processes"
        )
    return (
        f"expected: equal to rounding, within {recording.rounding:.0e}. Here {recording.strategy} adds in an order of "
        "its own (strategy.exact is false, or the engine or an option cannot keep the order)"
    )


# -- the command -----------------------------------------------------------------------------------------------------


def verify(
    run: Run, steps: int, verdict: Path | None = None, plain: bool = True, single: bool = True, keep: Path | None = None
) -> int:
    """Record the job under its strategy; compare it with the same job as one process (`single`), and with the plain
    reference (`plain`). `verdict`: a file that the result is written to, as JSON. `keep`: a folder for both traces and
    a page. Under torchrun and its like this
    process is one rank. Returns 0 when all is as promised, 1 when not, or a job's own exit status. Errors:
    `RunError`."""
    launcher, job = None, None
    start.task_of_srun(run)
    if start.joining():
        accelerate_config.check_variables(run, os.environ)
    else:
        launcher, _, job = start.resolved(run)
        run = job.run
    with tempfile.TemporaryDirectory(prefix="lockstep-verify-", ignore_cleanup_errors=True) as aside:
        folder = Path(aside)
        console = Console(os.environ.get("RANK", "0") == "0")
        console.say(f"{steps} steps under {run.strategy.name} ...")
        ACTIVITY.at(f"computing {steps} steps under {run.strategy.name}")
        looked_at = against_plain.STEPS if plain and against_plain.covers(run) else 0
        words = _words(steps, looked_at)
        if launcher is None or job is None:
            from lockstep.training import rank as worker

            status = worker.main(run.model_copy(update={"output": str(folder / "run")}), words=words)
        else:
            status = start.start_ranks(launcher, job.into(str(folder / "run")), words)
        if status or not (folder / "run" / "recording.json").exists():  # the latter on every rank but the first
            return status
        if single:
            console.say("the same steps as one process ...")
            ACTIVITY.at(f"computing the same {steps} steps as one process")
            if status := record_alone(run, folder / "alone", steps):
                return status
            status = tell(console, folder / "run", folder / "alone", verdict, keep)
        return max(status, against_plain.tell(console, run, folder / "run", verdict) if plain else 0)


def record_run(run: Run, folder: Path, steps: int, begin: int | None = None) -> tuple[int, Prepared | None]:
    """A few steps of a run that this process starts, written down in a folder: the job's exit status, and the data.
    `begin`: the first of them. Errors: `RunError`."""
    launcher, _, job = start.resolved(run)
    status = start.start_ranks(launcher, job.into(str(folder)), _words(steps, begin=begin))
    return status or int(not (folder / "recording.json").exists()), job.data


def _words(steps: int, plain: int = 0, begin: int | None = None) -> tuple[str, ...]:
    """The function that each rank calls, with its arguments: record `steps` steps, and `plain` steps without
    dropout."""
    return (RECORD, str(steps), "0", str(plain), *([] if begin is None else [str(begin)]))


def record_alone(run: Run, folder: Path, steps: int, timed: int = 0) -> int:
    """Run the job as one process, in a process of its own. Returns its exit status."""
    values: dict[str, Any] = run.model_dump(mode="json")
    values["strategy"] |= {"name": "single", "options": {}}
    fields = type(run.launch).model_fields  # without those of its launcher
    values["launch"] = {k: v for k, v in values["launch"].items() if k in fields} | {"name": "local", "processes": 1}
    values["output"] = str(folder)
    keep(Run.model_validate(values).as_written(run.written_keys))
    code = "import sys; from lockstep.training.rank import main_of_file as main; main(sys.argv[1], sys.argv[2:])"
    command = [sys.executable, "-c", code, str(folder / "run.yaml"), RECORD, str(steps), str(timed)]
    launched = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "GROUP_", "ROLE_", "TORCHELASTIC_")
    return subprocess.run(command, env={k: v for k, v in os.environ.items() if not k.startswith(launched)}).returncode


def tell(console: Console, ours: Path, single: Path, verdict: Path | None = None, folder: Path | None = None) -> int:
    """Print the table and the verdict. `folder`: keeps both traces and a page. Returns the exit status."""
    mine, compared = read(ours), compare(ours, single)
    wrong = findings(mine, compared)
    if verdict is not None:
        answer = {"agrees": not wrong, "promise": "bits" if mine.bits else "rounding", "differences": wrong}
        verdict.write_text(json.dumps(answer), encoding="utf-8")
    say_numbers(console, compared, f"{mine.strategy} on {quantity(mine.processes, 'process')}, beside one process")
    kinds = (f"{what} {' and '.join(names)}" for what, names in mine.dtypes.items())
    console.say(f"kept in: {', '.join(kinds)}".replace("torch.", ""), 2)
    console.say(promise(mine), 2)
    if mine.uncovered:
        console.say(f"{UNCOVERED}: {', '.join(mine.uncovered)}", 2)
    for doubt in mine.doubts:
        console.say(doubt, 2)
    if not wrong:
        console.say("found: " + ("the same bits" if mine.bits else "equal to rounding") + ". All is as promised")
    else:
        console.say("found: NOT what was promised")
        for line in wrong:
            console.say(f"  {line}", 4)
    if folder is not None:
        for name, recording in (("reference", single), ("job", ours)):
            shutil.rmtree(folder / name, ignore_errors=True)
            shutil.copytree(recording / TRACE, folder / name)
        console.say(str(write_page(folder / "job", folder / "reference", [compared])))
    return int(bool(wrong))


FORMAT = 1
_MOST_KEYS = 12  # keys that differ


def write(run: Run, steps: int, path: Path) -> int:
    """Record and write down. Returns 0, or the job's own exit status. Errors: `RunError`."""
    if not path.parent.is_dir():
        raise RunError("LS8390", f"--write: no such folder: {path.parent}")
    console = Console(True)
    hashes = record_hashes(run, steps)
    if isinstance(hashes, int):
        return hashes
    try:
        path.write_text(json.dumps(hashes, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise RunError("LS8391", f"--write: {path}: {error.strerror}") from error
    console.say(f"{len(hashes['steps'])} steps are written down in {path}; lockstep verify ... --against {path}")
    return 0


def against(run: Run, path: Path) -> int:
    """Record as many steps as are written down, and compare. Returns 0 for the same bits, 1 for others, or the job's
    own exit status. Errors: `RunError`."""
    then, console = read_golden(path), Console(True)
    now = record_hashes(run, then["asked"], then["steps"][0]["step"])
    if isinstance(now, int):
        return now
    other_differences = differences(then, now)
    if (first := first_difference(then, now)) is None:
        console.say(
            f"found: the same bits as in {path}, in {len(now['steps'])} steps, each of its "
            f"{len(now['steps'][0]['tensors'])} gradients and weights"
        )
        for line in other_differences:
            console.say(f"  (other than then: {line})")
        return 0
    console.say(f"found: NOT the bits of {path}: {first}", 2)
    for line in other_differences or [
        "nothing else that is written down differs: look at the code, the driver, the processor"
    ]:
        console.say(f"  {line}", 4)
    return 1


def read_golden(path: Path) -> dict[str, Any]:
    """What was written down. Errors: `RunError`."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RunError("LS8392", f"--against: {path}: {error.strerror}") from error
    except ValueError:
        raise RunError("LS8393", f"--against: {path} is not JSON") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT or not content.get("steps"):
        raise RunError(
            "LS8394", f"--against: {path} was not written by lockstep verify --write, or by another version of it"
        )
    return content


def record_hashes(run: Run, steps: int, begin: int | None = None) -> dict[str, Any] | int:
    """The hashes of a few steps of a run on this machine, or the status of a job that did not end well.
    `begin`: the first of them. Errors: `RunError` for a strategy that promises no bits."""
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
        return _golden_values(run, prepared, recording) | {"asked": steps, "steps": list(_steps(recording))}


def _golden_values(run: Run, prepared: Prepared, recording: Recording) -> dict[str, Any]:
    cuda = torch.cuda.is_available() and run.launch.device != "cpu"
    return {
        "format": FORMAT,
        "run": run.arithmetic(),
        "data": prepared.key,
        "versions": versions(run),
        "device": torch.cuda.get_device_name() if cuda else processor(),
        "threads": run.launch.threads,
        "strategy": recording.strategy,
        "processes": recording.processes,
        "uncovered": recording.uncovered,
    }


def _steps(recording: Recording) -> Iterator[dict[str, Any]]:
    for step in recording.steps:
        if step.not_finite or not (math.isfinite(step.loss) and math.isfinite(step.norm)):
            what = f"its {step.not_finite[0]}" if step.not_finite else f"loss {step.loss!r} or norm {step.norm!r}"
            raise RunError("LS8397", f"step {step.number}: {what} is not finite, so the step is not compared")
        yield {"step": step.number, "loss": step.loss.hex(), "grad_norm": step.norm.hex(), "tensors": step.hashes}


def first_difference(then: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """The first thing that is another one, in the order in which it is computed: loss, gradients, norm, weights."""
    if [s["step"] for s in then["steps"]] != [s["step"] for s in now["steps"]]:
        return "the steps that are looked at are others: an epoch has another length"
    for old, new in zip(then["steps"], now["steps"], strict=True):
        at = f"step {old['step']}"
        if old["loss"] != new["loss"]:
            return f"{at}: the loss is {float.fromhex(new['loss'])!r}, and was {float.fromhex(old['loss'])!r}"
        if old["tensors"].keys() != new["tensors"].keys():
            names = sorted(old["tensors"].keys() ^ new["tensors"].keys())
            return f"{at}: {names[0].partition('.')[2]} is there only {'then' if names[0] in old['tensors'] else 'now'}"
        for kind, called in (("gradient.", "the gradient of"), ("weight.", "after it")):
            names = [n for n in old["tensors"] if n.startswith(kind) and old["tensors"][n] != new["tensors"][n]]
            if names:
                more = f" and {len(names) - 1} more" if len(names) > 1 else ""
                return f"{at}: {called} {names[0].partition('.')[2]}{more}"
            if kind == "gradient." and old["grad_norm"] != new["grad_norm"]:
                norms = (float.fromhex(each["grad_norm"]) for each in (new, old))
                return "{}: the gradient norm is {!r}, and was {!r}".format(at, *norms)
    return None


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What is not as it was when the file was written: keys of the run file, data, versions, hardware."""
    former = then["run"]
    keys = sorted(k for k in former.keys() | now["run"].keys() if former.get(k) != now["run"].get(k))
    rows = [f"{key}: {former.get(key)!r} then, {now['run'].get(key)!r} now" for key in keys[:_MOST_KEYS]]
    rows += [f"{len(keys) - _MOST_KEYS} more keys of the run file"] if len(keys) > _MOST_KEYS else []
    if then["data"] != now["data"]:
        rows.append("the data, or the tokenizer, hold something else than then")
    both = {
        name: (then["versions"].get(name), now["versions"].get(name)) for name in then["versions"] | now["versions"]
    }
    both |= {name: (then[name], now[name]) for name in ("device", "threads", "strategy", "processes")}
    return rows + [f"{name}: {old} then, {new} now" for name, (old, new) in both.items() if old != new]
