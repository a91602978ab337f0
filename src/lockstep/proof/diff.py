"""`lockstep diff A B` and `lockstep replay OUTPUT --step N`: recompute steps of finished runs and compare them.

`diff`. In: two OUTPUT folders with fingerprints. Out: the first step whose fingerprints differ; the first value within
that step that differs, after the step was recomputed for both runs on one process and under each run's own strategy;
and the likely cause.

`replay`. In: one OUTPUT and a step. Out: whether the recomputed steps have the recorded fingerprints, for any number of
processes, and the contents of the step: examples with their losses, gradient norms by layer, clipping.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.config.run import Run, RunError, load, overrides_of, require_output
from lockstep.config.sections import ALONE
from lockstep.launchers import start
from lockstep.strategies.job import Job
from lockstep.track.console import Console
from lockstep.track.report.history import lines_of
from lockstep.training import fingerprints
from lockstep_trace import causes
from lockstep_trace.plurals import quantity

if TYPE_CHECKING:
    from torch import Tensor, nn

    from lockstep.data.batch import StepBatch
    from lockstep.proof.replaying import Entry


JOB = "lockstep.proof.replaying.take_apart"
# keys of a line of fingerprints.jsonl -> what differs where they do
_HASHES = dict.fromkeys(("hash", "loss", "grad_norm"), "loss or gradient norm")
_HASHES |= {"weights": "the weights", "optimizer": "the optimizer's state"}
_MOST = 12


@dataclass(frozen=True)
class Divergence:
    """The first step whose fingerprints differ between two runs."""

    step: int
    what: tuple[str, ...]  # keys of _HASHES that differ
    lines: tuple[Mapping[str, Any], Mapping[str, Any]]


def first_divergence(a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]]) -> Divergence | None:
    """Return the first step that both runs recorded with different values, or None."""
    other = {line["step"]: line for line in b}
    for line in sorted(a, key=lambda line: line["step"]):
        there = other.get(line["step"], {})
        what = tuple(name for name in _HASHES if name in line and name in there and line[name] != there[name])
        if what:
            return Divergence(line["step"], what, (line, there))
    return None


def diff(a: Path, b: Path, overrides: Sequence[str], look: bool = True) -> int:
    """Print the first difference of two runs. Returns 0 if no step differs, 1 if one does, or the exit status of a job
    that failed. `look`: recompute that step. Errors: `RunError`."""
    if start.joining():
        raise RunError("LS8150", "lockstep diff starts its own processes; run it without torchrun or another launcher")
    console, both = Console(True), (a, b)
    for folder in both:
        require_output(folder)
    lines_of_runs = [list(lines_of(folder / fingerprints.FILE, ("step", "hash"))) for folder in both]
    for folder, lines in zip(both, lines_of_runs, strict=True):
        if not lines:
            raise RunError(
                "LS8151",
                f"{folder} has no {fingerprints.FILE} or an empty one, so its steps cannot be compared; set "
                "fingerprints.every when training",
            )
    faulty = [fault for folder, lines in zip(both, lines_of_runs, strict=True) for fault in faults(folder, lines)]
    divergence = first_divergence(*lines_of_runs)
    other_differences = differing_settings(a, b, overrides)
    if divergence is None:
        shared = {line["step"] for line in lines_of_runs[0]} & {line["step"] for line in lines_of_runs[1]}
        if not shared:
            raise RunError("LS8152", f"{a} and {b} have no step in common")
        if faulty:
            _tell(console, "no step differs, but these lines prove nothing:", faulty)
            return 1
        console.say(f"the same bits in all {len(shared)} steps that both have, up to step {max(shared)}")
        _tell(console, "settings that differ, without changing a weight so far:", other_differences)
        return 0
    one, other = divergence.lines
    what = " and ".join(dict.fromkeys(_HASHES[each] for each in divergence.what))
    console.say(
        f"first difference: step {divergence.step}, {what}: loss {one.get('loss')!r} in {a}, {other.get('loss')!r} in "
        f"{b}; gradient norm {one.get('grad_norm')!r} and {other.get('grad_norm')!r}"
    )
    _tell(console, "invalid lines:", faulty)
    _tell(console, "settings that differ:", other_differences)
    try:
        return _recompute(console, both, divergence, overrides) if look else 1
    except _Failed as caught:
        return caught.status


def faults(folder: Path, lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return messages about the first few lines that are invalid, whatever the other run holds."""
    skips = fingerprints.skips(load(folder / "run.yaml", [])) if (folder / "run.yaml").is_file() else False
    reasons = [
        f"{folder / fingerprints.FILE}: step {line['step']}: {fault}"
        for line in lines
        if (fault := fingerprints.fault(line, skips)) is not None
    ]
    return reasons[:_MOST] + ([f"... and {len(reasons) - _MOST} more"] if len(reasons) > _MOST else [])


def differing_settings(a: Path, b: Path, overrides: Sequence[str]) -> list[str]:
    """Return the differences between two runs in keys that decide weights, and in versions and hardware."""
    runs = [run_to_recompute(folder, overrides, None, 1) for folder in (a, b)]
    keys = [run.arithmetic() for run in runs]
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
            "threads a process": begun[i].get("threads"),
            "processes": begun[i].get("processes"),
            "git commit": (begun[i].get("git") or {}).get("commit"),
        }
        for i in range(2)
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


def _recompute(console: Console, both: tuple[Path, Path], divergence: Divergence, overrides: Sequence[str]) -> int:
    def alone(folder: Path, step: int) -> list[Entry]:
        return anatomy_of(run_to_recompute(folder, overrides, None, 1), folder, step)

    a, b = both
    console.say(f"recomputing step {divergence.step} of both runs on one process ...")
    if _tell_first_difference(console, divergence.step, partial(alone, a), partial(alone, b), ""):
        return 1
    console.say("on one process both runs give the same bits here: data, settings and code are not the cause")
    for folder in both:
        run = run_to_recompute(folder, overrides, "own", int(start_of(folder).get("processes") or 1))
        if run.strategy.alone:
            continue
        how = f"{run.strategy.name}, {quantity(run.launch.processes, 'process')}"
        console.say(f"recomputing step {divergence.step} as {folder} trained it: {how} ...")
        if _tell_first_difference(
            console, divergence.step, partial(alone, folder), partial(anatomy_of, run, folder), f"{folder}, "
        ):
            return 1
    norm = next((e.value for e in alone(a, divergence.step) if e.kind == "norm"), None)
    right = [str(f) for f, line in zip(both, divergence.lines, strict=True) if line.get("grad_norm") == norm]
    console.say(
        f"all strategies give the same bits here. {f'{right[0]} recorded these bits. ' if len(right) == 1 else ''}"
        "Remaining causes: another kind of processor or GPU, other versions or threads (listed above if recorded), "
        "code that has changed since, or a machine that computed wrongly"
    )
    return 1


ComputeStep = Callable[[int], "list[Entry]"]


def _tell_first_difference(console: Console, step: int, a: ComputeStep, b: ComputeStep, where: str) -> bool:
    """Print the first value that differs between two ways to compute a step; return whether there is one. If the
    weights before the step differ already, look at the step before."""
    mine, theirs = a(step), b(step)
    first = first_difference(mine, theirs)
    while step > 1 and first is not None and first.kind == "weights before":
        step -= 1
        console.say(f"the weights before this step differ already; recomputing step {step} ...")
        mine, theirs = a(step), b(step)
        first = first_difference(mine, theirs) or first
    if first is None:
        return False
    console.say(f"first differing value: {where}step {step}, {describe(first)}")
    console.say(f"  {cause_of(mine, theirs, first)}")
    return True


class _Failed(Exception):
    """A job failed with this exit status, after it printed why."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


def anatomy_of(run: Run, output: Path, step: int) -> list[Entry]:
    """Recompute a step and return its entries. Errors: `RunError`, `_Failed`."""
    from lockstep.proof.replaying import ANATOMY, read_anatomy

    with tempfile.TemporaryDirectory(prefix="lockstep-diff-", ignore_cleanup_errors=True) as folder:
        run = run.model_copy(update={"output": str(Path(folder) / "run")})
        launcher, _, job = start.resolved(run)
        status = start.start_ranks(launcher, job, (JOB, str(output.resolve()), str(step)))
        if status or not (run.folder / ANATOMY).exists():
            raise _Failed(status or 1)
        return read_anatomy(run.folder)[0]


def first_difference(a: Sequence[Entry], b: Sequence[Entry]) -> Entry | None:
    """Return the first entry of `a`, in the order of computation, that `b` lacks or has with another hash. Kinds that
    only one of them could record are skipped."""
    there: dict[tuple[str, str, int], list[str]] = {}
    for entry in b:
        there.setdefault((entry.kind, entry.name, entry.micro_batch), []).append(entry.hash)
    kinds = {e.kind for e in b}
    counts: dict[tuple[str, str, int], int] = {}
    for entry in a:
        key = (entry.kind, entry.name, entry.micro_batch)
        count = counts[key] = counts.get(key, 0) + 1
        hashes = there.get(key, [])
        if len(hashes) >= count and hashes[count - 1] != entry.hash:
            return entry
        if len(hashes) < count and entry.kind in kinds and entry.kind in ("inputs", "loss", "gradient", "update"):
            return entry
    return None


def describe(entry: Entry) -> str:
    """Describe the value that an entry stands for."""
    of = f"micro-batch {entry.micro_batch}" if entry.micro_batch >= 0 else ""
    name = entry.name or "the model"
    return {
        "weights before": f"weights before the step: {name}",
        "rows": "examples of the step",
        "inputs": f"{of}: inputs of the model",
        "forward": f"{of}: forward output of {name}",
        "loss": f"{of}: loss",
        "backward": f"{of}: gradient of the output of {name}",
        "leaf": f"{of}: gradient of {name}",
        "gradient": f"gradient of {name}, summed over micro-batches",
        "norm": "gradient norm",
        "rate": "learning rate",
        "update": f"weights after the step: {name}",
    }[entry.kind]


def cause_of(a: Sequence[Entry], b: Sequence[Entry], first: Entry) -> str:
    """Return the likely cause, by the kind of the first entry that differs."""
    if first.kind == "gradient":
        return _of_sums(a, b)
    return {
        "weights before": "likely: the runs began with other weights (the model, its source, or the seed)",
        "rows": "likely: another order of the data (seed, batch_size, data, or a filter)",
        "inputs": "likely: the same rows became other tokens (data, tokenizer, truncation, or micro_batches)",
        "forward": "weights and tokens are equal; likely: dropout or its seed, precision, or code of the model",
        "loss": "the outputs are equal; likely: the task's loss or its targets",
        "backward": "forward is equal; likely: the model's backward, precision, or an option that recomputes",
        "leaf": "the layer's inputs are equal; likely: how its weight gradient is computed, or a hook on it",
        "norm": "the gradient is equal; likely: its norm leaves out a part of it",
        "rate": "likely: the schedule (optim.learning_rate, its warm-up, or the number of steps)",
        "update": "all gradients are equal; likely: clipping, weight decay, or the optimizer and its options",
    }[first.kind]


def _of_sums(a: Sequence[Entry], b: Sequence[Entry]) -> str:
    """Return the likely cause if the gradients of all micro-batches are equal and their sum differs, in the words of
    `lockstep verify`."""
    theirs = {e.name: e for e in b if e.kind == "gradient"}
    pairs = [(e, theirs[e.name]) for e in a if e.kind == "gradient" and e.name in theirs]
    wrong = [(x, y) for x, y in pairs if x.hash != y.hash]
    factors = [(y.norm or 0.0) / x.norm for x, y in wrong if x.norm]
    if factors and all(abs(f - 1) < 1e-4 for f in factors):
        return "equal within rounding; likely: another order of summation (strategy.exact, micro_batches)"
    return f"likely: {causes.of_sums([x.name for x, _ in wrong], len(pairs), factors, unequal=True)}"


REPLAY_JOB = "lockstep.proof.replaying.replay"
MOST_ROWS = 8  # examples and layers


def run_to_recompute(
    output: Path, overrides: Sequence[str] | Mapping[str, Any], strategy: str | None, processes: int
) -> Run:
    """Return the run of OUTPUT, changed so that `processes` local processes recompute it. `strategy`: a name; "own":
    that of the run; None: a replicated one if it gives the run's bits, else the run's. Errors: `RunError`."""
    require_output(output)
    trained = load(output / "run.yaml", overrides)
    if trained.model.trust_remote_code and "model.trust_remote_code" not in overrides_of(overrides):
        raise RunError(
            "LS8154",
            f"model.trust_remote_code: {output / 'run.yaml'} sets it, but code from a folder runs only if you "
            "set it too: read the code, then add model.trust_remote_code=true",
        )
    values: dict[str, Any] = trained.model_dump(mode="json")
    if strategy is None:
        exact = Job.of(trained).same_bits
        strategy = trained.strategy.name
        if exact:
            strategy = ALONE if processes == 1 else "ddp"
    if strategy not in ("own", trained.strategy.name):
        values["strategy"] |= {"name": strategy, "options": {}}
    fields = type(trained.launch).model_fields  # without those of its launcher
    values["launch"] = {k: v for k, v in values["launch"].items() if k in fields}
    values["launch"] |= {"name": "local", "processes": processes, "max_restarts": 0}
    if "launch.threads" not in overrides_of(overrides) and (threads := start_of(output).get("threads")):
        values["launch"]["threads"] = threads
    values |= {"track": {"console": "quiet"}, "max_time": None, "hub": {}, "profile": {}}
    return Run.model_validate(values).as_written(trained.written_keys)


def start_of(output: Path) -> dict[str, Any]:
    """Return the newest `start` event of OUTPUT, or an empty dict."""
    starts = [line for line in lines_of(output / "events.jsonl", ("event", "step")) if line["event"] == "start"]
    return starts[-1] if starts else {}


@contextmanager
def replayed(run: Run, output: Path, step: int, begin: int | None = None) -> Iterator[tuple[int, Path]]:
    """Replay a step; yield the exit status and the folder with the results, which is removed afterwards. Errors:
    `RunError`."""
    from lockstep.proof.replaying import REPLAY

    if step < 1:
        raise RunError("LS8155", f"--step: {step} is not a step of this run; steps count from 1")
    with tempfile.TemporaryDirectory(prefix="lockstep-replay-", ignore_cleanup_errors=True) as folder:
        run = run.model_copy(update={"output": str(Path(folder) / "run")})
        try:
            launcher, _, job = start.resolved(run)
        except RunError as caught:
            raise RunError(caught.code, f"{caught.message}{recorded_line(output, step)}") from caught
        words = (REPLAY_JOB, str(output.resolve()), str(step), str(step if begin is None else begin))
        status = start.start_ranks(launcher, job, words)
        yield status or int(not (run.folder / REPLAY).exists()), run.folder


def recorded_line(output: Path, step: int) -> str:
    """Return the recorded numbers of a step that cannot be recomputed, for a message; empty if there are none."""
    lines = lines_of(output / fingerprints.FILE, ("step", "hash"))
    recorded = next((line for line in lines if line["step"] == step), None)
    if recorded is None:
        return ""
    return f"; recorded for step {step}: loss {recorded.get('loss')!r}, gradient norm {recorded.get('grad_norm')!r}"


def replay(
    output: Path, step: int, overrides: Sequence[str], strategy: str | None, processes: int, begin: int | None
) -> int:
    """Recompute a step and print it. Returns 0 if all recomputed steps have the recorded fingerprints, 1 if not, or the
    exit status of a job that failed. Errors: `RunError`."""
    from lockstep.proof.replaying import REPLAY

    if start.joining():
        raise RunError(
            "LS8156", "lockstep replay starts its own processes; run it without torchrun or another launcher"
        )
    run, console = run_to_recompute(output, overrides, strategy, processes), Console(True)
    with replayed(run, output, step, begin) as (status, folder):
        if status:
            return status
        recorded = json.loads((folder / REPLAY).read_text(encoding="utf-8"))
    for note in recorded["notes"]:
        console.note(note)
    began = f"the checkpoint of step {recorded['from']}" if recorded["from"] else "the start"
    how = f"{run.strategy.name}, {quantity(processes, 'process')}, {quantity(run.launch.threads, 'thread')} each"
    console.say(f"step {step} of {recorded['total']}, recomputed from {began} ({how})")
    same = tell_steps(console, recorded["steps"], fingerprints.skips(run))
    tell_step(console, run, recorded["step"])
    return int(not same)


def tell_steps(console: Console, steps: Sequence[Mapping[str, Any]], skips: bool = False) -> bool:
    """Print whether all recomputed steps have the recorded fingerprints, or the first that does not; return the
    answer."""
    compared = [each for each in steps if each["then"] and "hash" in each["now"]]
    hashed = sum("weights" in each["then"] for each in compared)
    if (wrong := first_mismatch(steps, skips)) is not None:
        console.say(f"DIFFERENT from what was trained: {wrong}")
    elif compared:
        computed = sum("hash" in each["now"] for each in steps)
        console.say(f"{len(compared)} of {computed} steps were recorded; all have the same bits (weights: {hashed})")
    else:
        console.note(f"{fingerprints.FILE} has none of these steps, so they are shown and not compared")
    return wrong is None


def first_mismatch(steps: Sequence[Mapping[str, Any]], skips: bool = False) -> str | None:
    """Describe the first recomputed step that differs from its record or is not finite; None if there is none.
    `skips`: whether the run skips steps that are not finite."""
    for each in steps:
        now, then = each["now"], each["then"]
        if not now.get("finite", True):
            return f"after step {now['step']} there are weights that are not finite; such steps prove nothing"
        for which, line in (("recomputed", now), ("recorded", then)):
            if (fault := fingerprints.fault(line, skips)) is not None:
                return f"step {now['step']}, {which}: {fault}"
        shared = {name: words for name, words in _HASHES.items() if name in then and name in now}
        differing = list(dict.fromkeys(words for name, words in shared.items() if then[name] != now[name]))
        if differing and "hash" not in now:
            return f"{' and '.join(differing)} of the checkpoint of step {now['step']} are not those of that step"
        if differing:
            return (
                f"in step {now['step']} {' and '.join(differing)} differ (loss {now['loss']!r} now, "
                f"{then.get('loss')!r} then; gradient norm {now['grad_norm']!r} now, {then.get('grad_norm')!r} then)"
            )
    return None


def tell_step(console: Console, run: Run, step: Mapping[str, Any]) -> None:
    """Print the examples with the highest losses, the layers with the largest gradients, and the clipping."""
    texts = texts_of(run, step["rows"])
    where = {place: m for m, group in enumerate(step["micro_batches"]) for place in group}
    order = sorted(range(len(step["rows"])), key=lambda i: -step["losses"][i])
    rows = [
        [str(step["rows"][i]), str(where[i]), str(step["tokens"][i]), f"{step['losses'][i]:.4f}", texts[i]]
        for i in order[:MOST_ROWS]
    ]
    mean = sum(step["losses"]) / max(1, len(step["losses"]))
    console.table(
        f"the {len(rows)} of {len(order)} examples with the highest losses, each alone and without dropout (mean "
        f"{mean:.4f})",
        ["row", "micro-batch", "length", "loss", "text"],
        rows,
        key="examples",
    )
    norms = sorted(step["layers"].items(), key=lambda pair: -pair[1])
    largest = [[name, f"{norm:.6g}"] for name, norm in norms[:MOST_ROWS]]
    console.table(
        f"gradient norms, the {len(largest)} largest of {len(norms)} layers", ["layer", "norm"], largest, key="layers"
    )
    whole = sum(norm**2 for norm in step["norms"].values()) ** 0.5
    limit = step["clip"]
    clipped = f"clipped to {limit:g}: times {limit / whole:.4g}" if step["clipped"] else "not clipped"
    console.say(f"gradient norm {whole:.6g}, {clipped}; learning rate {step['learning_rate']:g}")


def texts_of(run: Run, rows: Sequence[int]) -> list[str]:
    """Return the decoded beginnings of training examples; empty strings if the task has no tokens."""

    job = Job.of(run)
    if job.task.own_model:
        return [""] * len(rows)
    task = job.with_data().make_task()
    columns, tokenizer = task.splits["train"], getattr(task, "tokenizer", None)
    if tokenizer is None or "input_ids" not in columns.names:
        return [""] * len(rows)
    ids = columns.ragged("input_ids")
    return [" ".join(tokenizer.decode(ids.row(r)[:64], skip_special_tokens=True).split())[:60] for r in rows]


# -- from Python -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Replayed:
    """A recomputed step of a run."""

    step: int  # updates done after it
    model: nn.Module  # with the weights from before the step, in training mode, float32 on the CPU
    batch: StepBatch  # all micro-batches of the step
    gradients: Mapping[str, Tensor]  # of the whole step, before clipping, by parameter name
    losses: Mapping[int, float]  # row of the training split -> its loss per target, alone and without dropout
    same: bool  # whether all recomputed steps have the recorded fingerprints, if any were recorded


def open_replay(
    output: Path, step: int, overrides: Mapping[str, Any], processes: int, strategy: str | None
) -> Replayed:
    """Recompute a step, for callers in Python. Errors: `RunError`."""
    import torch
    from safetensors.torch import load_file

    from lockstep.proof.replaying import GRADIENTS, REPLAY, WEIGHTS
    from lockstep.training.data_loader import StepLoader

    run = run_to_recompute(output, overrides, strategy, processes)
    with replayed(run, output, step) as (status, folder):
        if status:
            raise RunError("LS8157", f"replay of {output}: it ended with status {status}; see its output above")
        content = json.loads((folder / REPLAY).read_text(encoding="utf-8"))
        weights, gradients = load_file(folder / WEIGHTS), load_file(folder / GRADIENTS)
    task = Job.of(run).with_data().make_task()
    model = task.model()
    model.load_state_dict(weights, strict=False)  # what is computed and not kept is in no checkpoint
    feed = StepLoader(run, task, range(run.micro_batches), torch.device("cpu"))
    losses = dict(zip(content["step"]["rows"], content["step"]["losses"], strict=True))
    same = tell_steps(Console(False), content["steps"], fingerprints.skips(run))
    return Replayed(step, model.train(), feed.make(step - 1), gradients, losses, same)
