"""`lockstep verify RUN.yaml --write golden.json`, and later `--against golden.json`: does this commit, this torch, this
driver, this number of processes change a bit of the training?

In: a recording of a few steps. Out: a small file of hashes, of every gradient and every weight after every step; or the
first of them that is another one now, and what else is not as it was.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from lockstep.config import key_aliases
from lockstep.config.run import Run, RunError
from lockstep.data.tokens import Prepared
from lockstep.distributed.event_log import versions
from lockstep.distributed.processor import processor
from lockstep.launchers import start
from lockstep.tools.verify import recorded
from lockstep.track.console import Console
from lockstep.training.recording import Recording, read

FORMAT = 1
_SHOWN = 12  # keys that differ


def write(run: Run, steps: int, path: Path) -> int:
    """Record and write down. Returns 0, or the job's own exit status. Errors: `RunError`."""
    if not path.parent.is_dir():
        raise RunError(f"--write: there is no folder {path.parent}")
    console = Console(True)
    found = taken(run, steps, console)
    if isinstance(found, int):
        return found
    try:
        path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise RunError(f"--write: {path}: {error.strerror}") from error
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
        raise RunError(f"--against: {path}: {error.strerror}") from error
    except ValueError:
        raise RunError(f"--against: {path} is not JSON") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT or not found.get("steps"):
        raise RunError(f"--against: {path} was not written by lockstep verify --write, or by another version of it")
    return found


def taken(run: Run, steps: int, console: Console) -> dict[str, Any] | int:
    """The hashes of a few steps of a run on this machine, or the status of a job that did not end well. Errors:
    `RunError` for a strategy that promises no bits."""
    if start.joining():
        raise RunError(
            "lockstep verify --write and --against start their processes themselves: call it without torchrun"
        )
    folder = Path(tempfile.mkdtemp(prefix="lockstep-golden-"))
    try:
        status, prepared = recorded(run, folder / "run", steps)
        if status or prepared is None:
            return status
        told = read(folder / "run")
        if not told.bits:
            raise RunError(
                f"strategy.name: {told.strategy} adds in an order of its own under these options, and promises no bits "
                "that could be compared; take one that does, such as ddp"
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
            raise RunError(f"step {step.number}: {what} is not finite; such a step proves nothing, and is not compared")
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
