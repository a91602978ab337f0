"""`lockstep verify`: a few steps of the user's own job under the run's strategy, and as one process; then compare.

In: a run. Out: what differs between the two jobs, by name, and whether that is what the strategy promises. With
`--write golden.json` a small file of hashes, of every gradient and every weight after every step; `--against
golden.json` says which of them is another one under this commit, this torch, this driver, this number of processes.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from lockstep.config import key_aliases
from lockstep.config.run import Run, RunError, keep
from lockstep.data.arrow_cache import Prepared
from lockstep.distributed.activity import ACTIVITY
from lockstep.distributed.event_log import versions
from lockstep.distributed.hardware import processor
from lockstep.distributed.randomness import UNCOVERED
from lockstep.launchers import start
from lockstep.launchers.processes import accelerate_config
from lockstep.tools import against_plain
from lockstep.track.console import Console
from lockstep.training.recording import RecordedStep, Recording, read

RECORD = "lockstep.training.recording.record"  # the job that every rank does
DRIFT = 1e-2  # of the whole change: AdamW blows rounding up where a gradient is all but zero
SMALL = 1e-3  # of the whole gradient: smaller ones are sums that cancel (key biases), and hold the whole's rounding
COLUMNS = ["step", "loss", "differs", "norm", "differs", "gradients", "changes"]
# -- comparing -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """The largest difference of some tensors in one step: `0.0` means the same bits."""

    largest: float  # relative (2-norm of the difference over the 2-norm of the single process's)
    where: str  # the parameter's name
    wrong: tuple[str, ...]  # parameters that differ by more than is allowed


@dataclass(frozen=True)
class Compared:
    """One step of both jobs."""

    step: RecordedStep
    single: RecordedStep
    gradients: Difference
    changes: Difference
    buffers: Difference  # everything that is kept beside weights that are trained
    factors: dict[str, float]  # parameter -> (its gradient . the single process's) / |the single process's|^2


def compare(ours: Path, single: Path) -> list[Compared]:
    """Step by step, parameter by parameter; tensors are read one at a time."""
    mine, alone = read(ours), read(single)
    allowed = 0.0 if mine.bits else mine.rounding
    found = []
    for place, (a, b) in enumerate(zip(mine.steps, alone.steps, strict=True)):
        names = (f"step-{place - 1}" if place else "start", f"step-{place}")
        (mine_before, mine_after), (alone_before, alone_after) = (
            [safe_open(folder / f"{n}.safetensors", "pt") for n in names] for folder in (ours, single)
        )
        keys = [k.removeprefix("gradient.") for k in alone_after.keys() if k.startswith("gradient.")]  # noqa: SIM118
        gradients, changes, factors = {}, {}, {}
        for key in keys:
            g, h = (f.get_tensor(f"gradient.{key}").double() for f in (mine_after, alone_after))
            gradients[key] = (float((g - h).norm()), float(h.norm()))
            factors[key] = float((g * h).sum() / h.square().sum().clamp(min=1e-300))
            c, d = (
                after.get_tensor(f"weight.{key}").double() - before.get_tensor(f"weight.{key}").double()
                for before, after in ((mine_before, mine_after), (alone_before, alone_after))
            )
            changes[key] = (float((c - d).norm()), float(d.norm()))
        drift = 0.0 if mine.bits else max(DRIFT, mine.rounding)
        others = [k for k in alone_after.keys() if k.startswith("weight.") and k.removeprefix("weight.") not in keys]  # noqa: SIM118
        buffers = {k.removeprefix("weight."): _apart(mine_after, alone_after, k) for k in others}
        differences = (_largest(gradients, allowed, SMALL), _largest(changes, drift, 1.0), _largest(buffers, drift, 0))
        found.append(Compared(a, b, *differences, factors))
    return found


def _apart(mine: Any, alone: Any, key: str) -> tuple[float, float]:
    """2-norm of the difference of a tensor of two files, and of the second one. An infinity that both hold, as masks
    do, is no difference."""
    a, b = mine.get_tensor(key), alone.get_tensor(key)
    return 0.0 if torch.equal(a, b) else float((a.double() - b.double()).norm()), float(b.double().norm())


def _largest(norms: dict[str, tuple[float, float]], allowed: float, least: float) -> Difference:
    """`norms`: parameter -> (2-norm of its difference, 2-norm of the single process's). A difference is measured beside
    the parameter's own norm, which counts for at least `least` of the norm of all."""
    whole = sum(size**2 for _, size in norms.values() if math.isfinite(size)) ** 0.5 or 1.0
    apart = {n: _beside(difference, max(size, least * whole)) for n, (difference, size) in norms.items()}
    if not apart:
        return Difference(0.0, "", ())
    where = max(apart, key=lambda name: apart[name])
    wrong = sorted((n for n in apart if apart[n] > allowed), key=lambda n: -apart[n])
    return Difference(apart[where], where if apart[where] else "", tuple(wrong))


def _beside(difference: float, size: float) -> float:
    """A difference beside a norm; infinite where it is not finite: comparisons with NaN would let it pass."""
    if not math.isfinite(difference):
        return math.inf
    return difference and difference / (size or 1.0)


def relative(a: float, b: float) -> float:
    """How far `a` is from `b`, beside `b`; infinite where one of them is not finite, whatever the other is."""
    return abs(a - b) / max(abs(b), 1e-30) if math.isfinite(a) and math.isfinite(b) else math.inf


def findings(mine: Recording, alone: Recording, steps: list[Compared]) -> list[str]:
    """What differs by more than the strategy is allowed, each line naming it; none when all is as promised."""
    allowed = 0.0 if mine.bits else mine.rounding
    said: list[str] = []
    for name, value in alone.probe.items():
        if name != "loss" and math.isnan(value) and math.isnan(mine.probe[name]):
            continue  # a score that so few examples leave undefined
        if (mine.bits or name == "loss") and (apart := relative(mine.probe[name], value)) > allowed:
            if math.isinf(apart):
                what = f"is {mine.probe[name]}, and {value} on one process: not a finite number"
            else:
                what = f"differs by {apart:.1e}: the models are not the same, or evaluation changes them"
            return [f"before training: {name} without dropout {what}", *_suspected(mine)]
    for step in steps:
        at = f"step {step.step.number}"
        if step.step.seen != step.step.targets:
            said.append(f"{at}: {step.step.seen:.10g} of {step.step.targets:.10g} targets went through the model")
        if (apart := relative(step.step.loss, step.single.loss)) > allowed:
            said.append(f"{at}: loss {step.step.loss!r} instead of {step.single.loss!r} (differs by {apart:.1e})")
        if (apart := relative(step.step.norm, step.single.norm)) > allowed:
            said.append(
                f"{at}: gradient norm {step.step.norm!r} instead of {step.single.norm!r} (differs by {apart:.1e})"
            )
        compared = (("gradient of", step.gradients), ("change of", step.changes), ("buffer", step.buffers))
        for what, difference in compared:
            if difference.wrong and math.isinf(difference.largest):
                more = f" and {len(difference.wrong) - 1} more" if len(difference.wrong) > 1 else ""
                said.append(f"{at}: the {what} {difference.where} is not finite, or its difference is not{more}")
            elif difference.wrong:
                more = f" and {len(difference.wrong) - 1} more" if len(difference.wrong) > 1 else ""
                said.append(f"{at}: the {what} {difference.wrong[0]} differs by {difference.largest:.1e}{more}")
        if said:  # what comes after a wrong step differs because of it
            return said + _guess(step, allowed) + _suspected(mine)
    return said


def _suspected(mine: Recording) -> list[str]:
    """What was found in the user's own code before anything was trained."""
    return mine.doubts + ([f"{UNCOVERED}: {', '.join(mine.uncovered)}"] if mine.uncovered else [])


def _guess(step: Compared, allowed: float) -> list[str]:
    """What the pattern of a wrong step points at."""
    numbers = (step.step.loss, step.single.loss, step.step.norm, step.single.norm)
    parts = (step.gradients, step.changes, step.buffers)
    if not all(map(math.isfinite, numbers)) or any(math.isinf(part.largest) for part in parts):
        return ["numbers that are not finite prove nothing, also where both hold the same ones: look at the loss"]
    losses_agree = relative(step.step.loss, step.single.loss) <= max(allowed, 1e-6)
    wrong, count = step.gradients.wrong, len(step.factors)
    factors = sorted(step.factors[n] for n in wrong)
    middle = factors[len(factors) // 2] if factors else 1.0
    same_factor = bool(factors) and factors[-1] - factors[0] < 1e-3 * abs(middle) and abs(middle - 1) > 1e-3
    if step.step.seen != step.step.targets:
        return ["a part of the step's examples was left out"]
    if not losses_agree:
        return [
            "the loss differs although the same model scores the same without dropout: either random numbers (dropout) "
            "depend on the process, or some of the step's losses are missing from the sum or counted twice"
        ]
    if same_factor and len(wrong) == count:
        return [
            f"every gradient is {middle:.4g} times what it should be: a sum that was counted twice, or a mean where a "
            "sum was meant"
        ]
    if wrong and len(wrong) <= count / 2:
        return [f"only {', '.join(wrong[:4])}: the gradient may not have been summed over all processes"]
    if wrong:
        return [
            "gradients point elsewhere: micro-batches of unequal size were weighted equally (a mean of means), or "
            "some were left out"
        ]
    if step.buffers.wrong and not step.changes.wrong:
        return ["this is no weight: every process makes something else of it while it trains"]
    return ["gradients agree and weights do not: look at clipping, the learning rate and the optimizer"]


def rows(steps: list[Compared]) -> list[list[str]]:
    """The table: a line a step."""

    def format_difference(difference: float) -> str:
        return "not finite" if math.isinf(difference) else "same bits" if difference == 0 else f"{difference:.1e}"

    return [
        [
            str(s.step.number),
            f"{s.single.loss:.6f}",
            format_difference(relative(s.step.loss, s.single.loss)),
            f"{s.single.norm:.6f}",
            format_difference(relative(s.step.norm, s.single.norm)),
            format_difference(s.gradients.largest),
            format_difference(s.changes.largest),
        ]
        for s in steps
    ]


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


def verify(run: Run, steps: int, verdict: Path | None = None, plain: bool = True, single: bool = True) -> int:
    """Record the job under its strategy; compare it with the same job as one process (`single`), and with the plain
    reference (`plain`). `verdict`: a file that the result is written to, as JSON. Under torchrun and its like this
    process is one rank. Returns 0 when all is as promised, 1 when not, or a job's own exit status. Errors:
    `RunError`."""
    launcher, job = None, None
    start.task_of_srun(run)
    if start.joining():
        accelerate_config.check_variables(run, os.environ)
    else:
        launcher, _, job = start.resolved(run)
    folder = Path(tempfile.mkdtemp(prefix="lockstep-verify-"))
    try:
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
            status = tell(console, folder / "run", folder / "alone", verdict)
        return max(status, against_plain.tell(console, run, folder / "run", verdict) if plain else 0)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def recorded(run: Run, folder: Path, steps: int) -> tuple[int, Prepared | None]:
    """A few steps of a run that this process starts, written down in a folder: the job's exit status, and the data.
    Errors: `RunError`."""
    launcher, _, job = start.resolved(run)
    status = start.start_ranks(launcher, job.into(str(folder)), _words(steps))
    return status or int(not (folder / "recording.json").exists()), job.data


def _words(steps: int, plain: int = 0) -> tuple[str, ...]:
    """What each rank does: record so many steps, and so many without dropout."""
    return (RECORD, str(steps), "0", str(plain))


def record_alone(run: Run, folder: Path, steps: int, timed: int = 0) -> int:
    """Run the job as one process, in a process of its own. Returns its exit status."""
    values: dict[str, Any] = run.model_dump(mode="json")
    values["strategy"] = {"name": "single", "exact": run.strategy.exact, "options": {}}
    own = type(run.launch).model_fields  # without those of its launcher
    values["launch"] = {k: v for k, v in values["launch"].items() if k in own} | {"name": "local", "processes": 1}
    values["output"] = str(folder)
    keep(Run.model_validate(values))
    code = "import sys; from lockstep.training.rank import main_of_file as main; main(sys.argv[1], sys.argv[2:])"
    command = [sys.executable, "-c", code, str(folder / "run.yaml"), RECORD, str(steps), str(timed)]
    launched = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "GROUP_", "ROLE_", "TORCHELASTIC_")
    return subprocess.run(command, env={k: v for k, v in os.environ.items() if not k.startswith(launched)}).returncode


def tell(console: Console, ours: Path, single: Path, verdict: Path | None = None) -> int:
    """Print the table and the verdict. Returns the exit status."""
    mine, alone = read(ours), read(single)
    steps = compare(ours, single)
    wrong = findings(mine, alone, steps)
    if verdict is not None:
        found = {"agrees": not wrong, "promise": "bits" if mine.bits else "rounding", "differences": wrong}
        verdict.write_text(json.dumps(found), encoding="utf-8")
    title = f"{mine.strategy} on {mine.processes} process(es), beside one process"
    console.table(title, COLUMNS, rows(steps), key="steps")
    for what in ("gradients", "changes"):
        step = max(steps, key=lambda s: getattr(s, what).largest)
        if (most := getattr(step, what)).where:
            console.say(f"{what} are furthest apart in {most.where} (step {step.step.number})")
    kinds = (f"{what} {' and '.join(names)}" for what, names in mine.dtypes.items())
    console.say(f"kept in: {', '.join(kinds)}".replace("torch.", ""))
    console.say(promise(mine))
    if mine.uncovered:
        console.say(f"{UNCOVERED}: {', '.join(mine.uncovered)}")
    for doubt in mine.doubts:
        console.say(doubt)
    if not wrong:
        console.say("found: " + ("the same bits" if mine.bits else "equal to rounding") + ". All is as promised")
        return 0
    console.say("found: NOT what was promised")
    for line in wrong:
        console.say(f"  {line}")
    return 1


FORMAT = 1
_SHOWN = 12  # keys that differ


def write(run: Run, steps: int, path: Path) -> int:
    """Record and write down. Returns 0, or the job's own exit status. Errors: `RunError`."""
    if not path.parent.is_dir():
        raise RunError("LS8390", f"--write: no such folder: {path.parent}")
    console = Console(True)
    found = taken(run, steps, console)
    if isinstance(found, int):
        return found
    try:
        path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise RunError("LS8391", f"--write: {path}: {error.strerror}") from error
    console.say(f"{len(found['steps'])} steps are written down in {path}; lockstep verify ... --against {path}")
    return 0


def against(run: Run, path: Path) -> int:
    """Record as many steps as are written down, and compare. Returns 0 for the same bits, 1 for others, or the job's
    own exit status. Errors: `RunError`."""
    then, console = opened(path), Console(True)
    now = taken(run, then["asked"], console)
    if isinstance(now, int):
        return now
    beside = differences(then, now)
    if (first := first_difference(then, now)) is None:
        console.say(
            f"found: the same bits as in {path}, in {len(now['steps'])} steps, each of its "
            f"{len(now['steps'][0]['tensors'])} gradients and weights"
        )
        for line in beside:
            console.say(f"  (other than then: {line})")
        return 0
    console.say(f"found: NOT the bits of {path}: {first}")
    for line in beside or ["nothing else that is written down differs: look at the code, the driver, the processor"]:
        console.say(f"  {line}")
    return 1


def opened(path: Path) -> dict[str, Any]:
    """What was written down. Errors: `RunError`."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RunError("LS8392", f"--against: {path}: {error.strerror}") from error
    except ValueError:
        raise RunError("LS8393", f"--against: {path} is not JSON") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT or not found.get("steps"):
        raise RunError(
            "LS8394", f"--against: {path} was not written by lockstep verify --write, or by another version of it"
        )
    return found


def taken(run: Run, steps: int, console: Console) -> dict[str, Any] | int:
    """The hashes of a few steps of a run on this machine, or the status of a job that did not end well. Errors:
    `RunError` for a strategy that promises no bits."""
    if start.joining():
        raise RunError(
            "LS8395", "lockstep verify --write and --against start their own processes; run it without torchrun"
        )
    folder = Path(tempfile.mkdtemp(prefix="lockstep-golden-"))
    try:
        status, prepared = recorded(run, folder / "run", steps)
        if status or prepared is None:
            return status
        told = read(folder / "run")
        if not told.bits:
            raise RunError(
                "LS8396",
                f"strategy.name: {told.strategy} sums in its own order with these options, so its result is not "
                "bitwise reproducible and cannot be compared; use one that is, such as ddp",
            )
        return _described(run, prepared, told) | {"asked": steps, "steps": list(_steps(folder / "run", told))}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _described(run: Run, prepared: Prepared, told: Recording) -> dict[str, Any]:
    cuda = torch.cuda.is_available() and run.launch.device != "cpu"
    return {
        "format": FORMAT,
        "run": run.arithmetic(),
        "data": prepared.key,
        "versions": versions(run),
        "device": torch.cuda.get_device_name() if cuda else processor(),
        "threads": run.launch.threads,
        "strategy": told.strategy,
        "processes": told.processes,
        "uncovered": told.uncovered,
    }


def _steps(folder: Path, told: Recording) -> Iterator[dict[str, Any]]:
    for place, step in enumerate(told.steps):
        with safe_open(folder / f"step-{place}.safetensors", "pt") as file:
            tensors = {name: _hash(file.get_tensor(name)) for name in sorted(file.keys())}
            bad = [name.partition(".")[2] for name in file.keys() if _not_finite(name, file.get_tensor(name))]  # noqa: SIM118
        if bad or not (math.isfinite(step.loss) and math.isfinite(step.norm)):
            what = f"its {bad[0]}" if bad else f"loss {step.loss!r} or gradient norm {step.norm!r}"
            raise RunError("LS8397", f"step {step.number}: {what} is not finite, so the step is not compared")
        yield {"step": step.number, "loss": step.loss.hex(), "grad_norm": step.norm.hex(), "tensors": tensors}


def _not_finite(name: str, tensor: torch.Tensor) -> bool:
    """Of gradients every number has to be finite; weights may be masks, in which infinities are meant."""
    found = torch.isfinite(tensor) if name.startswith("gradient.") else ~torch.isnan(tensor)
    return not bool(found.all())


def _hash(tensor: torch.Tensor) -> str:
    told = f"{tensor.dtype} {tuple(tensor.shape)} ".encode()
    return hashlib.sha256(told + tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


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
    former = key_aliases.of_checkpoint(then["run"])
    keys = sorted(k for k in former.keys() | now["run"].keys() if former.get(k) != now["run"].get(k))
    found = [f"{key}: {former.get(key)!r} then, {now['run'].get(key)!r} now" for key in keys[:_SHOWN]]
    found += [f"{len(keys) - _SHOWN} more keys of the run file"] if len(keys) > _SHOWN else []
    if then["data"] != now["data"]:
        found.append("the data, or the tokenizer, hold something else than then")
    both = {
        name: (then["versions"].get(name), now["versions"].get(name)) for name in then["versions"] | now["versions"]
    }
    both |= {name: (then[name], now[name]) for name in ("device", "threads", "strategy", "processes")}
    return found + [f"{name}: {old} then, {new} now" for name, (old, new) in both.items() if old != new]
