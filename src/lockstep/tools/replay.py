"""`lockstep replay OUTPUT --step N`: a step of a run computed again, here, by any number of processes, and looked at.

In: the OUTPUT of a run. Out: whether the steps on the way come to what was written down when they were trained, and
what the step was made of: its examples with their losses, gradients by layer, clipping.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.config import plugins
from lockstep.config.run import Run, RunError, load, overrides_of
from lockstep.launchers import start
from lockstep.track.console import Console
from lockstep.track.report.history import lines_of
from lockstep.training import fingerprints

if TYPE_CHECKING:
    from torch import Tensor, nn

    from lockstep.data.batch import StepBatch

JOB = "lockstep.training.replaying.replay"
SHOWN = 8  # examples and layers


def again(output: Path, overrides: Sequence[str] | Mapping[str, Any], strategy: str | None, processes: int) -> Run:
    """The run of OUTPUT as it is computed again on this machine, of as many processes. `strategy`: its name; `own`: the
    run's; None: one that gives the run's bits if there is one. Errors: `RunError`."""
    if not (output / "run.yaml").is_file():
        raise RunError(f"{output} is not the output folder of a run: it has no run.yaml")
    trained = load(output / "run.yaml", overrides)
    if trained.model.trust_remote_code and "model.trust_remote_code" not in overrides_of(overrides):
        raise RunError(
            f"model.trust_remote_code: {output / 'run.yaml'} asks for it, and code of a folder runs only if you do, "
            "too: read it, then add model.trust_remote_code=true"
        )
    values: dict[str, Any] = trained.model_dump(mode="json")
    if strategy is None:
        exact = plugins.find("strategies", trained.strategy.name).gives_bits(trained)  # type: ignore[attr-defined]
        strategy = "single" if exact and processes == 1 else "ddp" if exact else trained.strategy.name
    if strategy not in ("own", trained.strategy.name):
        values["strategy"] = {"name": strategy, "exact": trained.strategy.exact, "options": {}}
    own = type(trained.launch).model_fields  # without those of its launcher
    values["launch"] = {k: v for k, v in values["launch"].items() if k in own}
    values["launch"] |= {"name": "local", "processes": processes, "max_restarts": 0}
    if "launch.threads" not in overrides_of(overrides) and (threads := start_of(output).get("threads")):
        values["launch"]["threads"] = threads
    values |= {"track": {"console": "quiet"}, "max_time": None, "hub": {}, "profile": {}}
    return Run.model_validate(values)


def start_of(output: Path) -> dict[str, Any]:
    """What OUTPUT says of the last time that training started."""
    starts = [line for line in lines_of(output / "events.jsonl", ("event", "step")) if line["event"] == "start"]
    return starts[-1] if starts else {}


@contextmanager
def replayed(run: Run, output: Path, step: int, begin: int | None = None) -> Iterator[tuple[int, Path]]:
    """The status of a replay, and the folder with what was found, which is gone afterwards. Errors: `RunError`."""
    from lockstep.training.replaying import FOUND

    if step < 1:
        raise RunError(f"--step: {step} is none of this run's steps, which count from 1")
    folder = Path(tempfile.mkdtemp(prefix="lockstep-replay-"))
    try:
        run = run.model_copy(update={"output": str(folder / "run")})
        try:
            launcher, _, job = start.resolved(run)
        except RunError as caught:
            raise RunError(f"{caught}{written(output, step)}") from caught
        words = (JOB, str(output.resolve()), str(step), str(step if begin is None else begin))
        status = start.start_ranks(launcher, job, words)
        yield status or int(not (run.folder / FOUND).exists()), run.folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def written(output: Path, step: int) -> str:
    """What OUTPUT tells of a step that cannot be computed here; empty where it tells nothing."""
    lines = lines_of(output / fingerprints.FILE, ("step", "hash"))
    told = next((line for line in lines if line["step"] == step), None)
    if told is None:
        return ""
    return f"; of step {step} is written down: loss {told.get('loss')!r}, gradient norm {told.get('grad_norm')!r}"


def replay(
    output: Path, step: int, overrides: Sequence[str], strategy: str | None, processes: int, begin: int | None
) -> int:
    """Compute a step again, and tell. Returns 0 when all fingerprints on the way are the same, 1 when not, or the job's
    own exit status. Errors: `RunError`."""
    from lockstep.training.replaying import FOUND

    if start.joining():
        raise RunError("lockstep replay starts its processes itself: call it without torchrun and its like")
    run, console = again(output, overrides, strategy, processes), Console(True)
    if not (output / fingerprints.FILE).is_file():
        console.note(f"{output} has no {fingerprints.FILE}: the step is shown, and compared with nothing")
    with replayed(run, output, step, begin) as (status, folder):
        if status:
            return status
        found = json.loads((folder / FOUND).read_text(encoding="utf-8"))
    for note in found["notes"]:
        console.note(note)
    began = f"the checkpoint of step {found['from']}" if found["from"] else "the start"
    how = f"{run.strategy.name}, {processes} process(es), {run.launch.threads} thread(s) each"
    console.say(f"step {step} of {found['total']}, computed again from {began} on ({how})")
    same = tell_steps(console, found["steps"], fingerprints.skips(run))
    tell_step(console, run, found["step"])
    return int(not same)


def tell_steps(console: Console, steps: Sequence[Mapping[str, Any]], skips: bool = False) -> bool:
    """Whether every step on the way came to what was written down; the first that did not is told."""
    known = [each for each in steps if each["then"] and "hash" in each["now"]]
    hashed = sum("weights" in each["then"] for each in known)
    if (wrong := first_wrong(steps, skips)) is not None:
        console.say(f"NOT what was trained: {wrong}")
    elif known:
        computed = sum("hash" in each["now"] for each in steps)
        console.say(f"{len(known)} of {computed} steps are written down: all the same bits, weights of {hashed} too")
    return wrong is None


def first_wrong(steps: Sequence[Mapping[str, Any]], skips: bool = False) -> str | None:
    """The first of some steps that did not come to what was written down, or not to finite numbers, in words; None: all
    did. `skips`: whether the run leaves out steps that are not finite."""
    what = dict.fromkeys(("hash", "loss", "grad_norm"), "loss or gradient norm")
    what |= {"weights": "the weights", "optimizer": "the optimizer's state"}
    for each in steps:
        now, then = each["now"], each["then"]
        if not now.get("finite", True):
            return f"after step {now['step']} there are weights that are not finite; such steps prove nothing"
        for which, line in (("computed now", now), ("written down", then)):
            if (fault := fingerprints.fault(line, skips)) is not None:
                return f"step {now['step']}, as {which}: {fault}"
        differing = [what[name] for name in what if name in then and name in now and then[name] != now[name]]
        differing = list(dict.fromkeys(differing))
        if differing and "hash" not in now:
            return f"{' and '.join(differing)} of the checkpoint of step {now['step']} are not those of that step"
        if differing:
            return (
                f"in step {now['step']} {' and '.join(differing)} differ (loss {now['loss']!r} now, "
                f"{then.get('loss')!r} then; gradient norm {now['grad_norm']!r} now, {then.get('grad_norm')!r} then)"
            )
    return None


def tell_step(console: Console, run: Run, found: Mapping[str, Any]) -> None:
    """The examples with the highest losses, the layers with the largest gradients, and what was clipped."""
    texts = texts_of(run, found["rows"])
    where = {place: m for m, group in enumerate(found["micro_batches"]) for place in group}
    order = sorted(range(len(found["rows"])), key=lambda i: -found["losses"][i])
    rows = [
        [
            str(found["rows"][i]),
            str(where[i]),
            str(found["tokens"][i]),
            f"{found['losses'][i]:.4f}",
            texts[i],
        ]
        for i in order[:SHOWN]
    ]
    mean = sum(found["losses"]) / max(1, len(found["losses"]))
    console.table(
        f"the {len(rows)} of {len(order)} examples with the highest losses, each alone and without dropout (mean "
        f"{mean:.4f})",
        ["row", "micro-batch", "length", "loss", "text"],
        rows,
    )
    norms = sorted(found["layers"].items(), key=lambda pair: -pair[1])
    told = [[name, f"{norm:.6g}"] for name, norm in norms[:SHOWN]]
    console.table(f"gradient norms, the {len(told)} largest of {len(norms)} layers", ["layer", "norm"], told)
    whole = sum(norm**2 for norm in found["norms"].values()) ** 0.5
    limit = found["clip"]
    clipped = f"clipped to {limit:g}: times {limit / whole:.4g}" if found["clipped"] else "not clipped"
    console.say(f"gradient norm {whole:.6g}, {clipped}; learning rate {found['learning_rate']:g}")


def texts_of(run: Run, rows: Sequence[int]) -> list[str]:
    """The beginnings of training examples, as far as their tokens say; empty where the task has none."""
    from lockstep.data.prepare import prepare

    task_class: Any = plugins.find("tasks", run.task.name)
    if task_class.own_model:
        return [""] * len(rows)
    task = task_class(run, prepare(run, task_class))
    columns, tokenizer = task.splits["train"], getattr(task, "tokenizer", None)
    if tokenizer is None or "input_ids" not in columns.names:
        return [""] * len(rows)
    ids = columns.ragged("input_ids")
    return [" ".join(tokenizer.decode(ids.row(r)[:64], skip_special_tokens=True).split())[:60] for r in rows]


# -- from Python -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Replayed:
    """A step of a run, as it was computed again."""

    step: int  # updates done after it
    model: nn.Module  # with the weights from before the step, in training mode, float32 on the CPU
    batch: StepBatch  # all micro-batches of the step
    gradients: Mapping[str, Tensor]  # of the whole step, before clipping, by parameter name
    losses: Mapping[int, float]  # row of the training split -> its loss per target, alone and without dropout
    same: bool  # whether every fingerprint on the way is the one that was written down


def opened(output: Path, step: int, overrides: Mapping[str, Any], processes: int, strategy: str | None) -> Replayed:
    """Recompute a step, for callers in Python. Errors: `RunError`."""
    import torch
    from safetensors.torch import load_file

    from lockstep.data.prepare import prepare
    from lockstep.training.data_loader import StepLoader
    from lockstep.training.replaying import FOUND, GRADIENTS, WEIGHTS

    run = again(output, overrides, strategy, processes)
    with replayed(run, output, step) as (status, folder):
        if status:
            raise RunError(f"replay of {output}: it ended with status {status}; what it said is above")
        found = json.loads((folder / FOUND).read_text(encoding="utf-8"))
        weights, gradients = load_file(folder / WEIGHTS), load_file(folder / GRADIENTS)
    task_class: Any = plugins.find("tasks", run.task.name)
    task = task_class(run, prepare(run, task_class))
    model = task.model()
    model.load_state_dict(weights, strict=False)  # what is computed and not kept is in no checkpoint
    feed = StepLoader(run, task, range(run.micro_batches), torch.device("cpu"))
    losses = dict(zip(found["step"]["rows"], found["step"]["losses"], strict=True))
    same = tell_steps(Console(False), found["steps"], fingerprints.skips(run))
    return Replayed(step, model.train(), feed.make(step - 1), gradients, losses, same)
