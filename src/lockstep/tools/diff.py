"""`lockstep diff A B`: the first step at which two runs part, the first thing in that step that is another one, and
why, as far as can be told.

In: two OUTPUT folders with fingerprints. Out: the step by their fingerprints; then the step is computed again for both,
as one process and with each run's own strategy, and compared thing by thing in the order of computation.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.config.run import Run, RunError, load
from lockstep.launchers import start
from lockstep.tools.replay import again, start_of
from lockstep.track.console import Console
from lockstep.track.report.history import lines_of
from lockstep.training import fingerprints

if TYPE_CHECKING:
    from lockstep.training.replaying import Entry

JOB = "lockstep.training.replaying.take_apart"
_HASHES = ("hash", "loss", "grad_norm", "weights", "optimizer")
_SHOWN = 12


@dataclass(frozen=True)
class Parting:
    """Where two runs part, by their fingerprints."""

    step: int
    what: tuple[str, ...]  # of _HASHES
    lines: tuple[Mapping[str, Any], Mapping[str, Any]]


def first_parting(a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]]) -> Parting | None:
    """The first step that both have and in which something that both wrote down differs."""
    other = {line["step"]: line for line in b}
    for line in sorted(a, key=lambda line: line["step"]):
        there = other.get(line["step"], {})
        what = tuple(name for name in _HASHES if name in line and name in there and line[name] != there[name])
        if what:
            return Parting(line["step"], what, (line, there))
    return None


def diff(a: Path, b: Path, overrides: Sequence[str], look: bool = True) -> int:
    """Tell. Returns 0 where no step differs, 1 where one does, or a job's own exit status. `look`: compute the step
    again. Errors: `RunError`."""
    if start.joining():
        raise RunError("lockstep diff starts its processes itself: call it without torchrun and its like")
    console, both = Console(True), (a, b)
    written = [list(lines_of(folder / fingerprints.FILE, ("step", "hash"))) for folder in both]
    for folder, lines in zip(both, written, strict=True):
        if not lines:
            raise RunError(f"{folder} has no {fingerprints.FILE}, or nothing in it: which steps differ cannot be told")
    faulty = [fault for folder, lines in zip(both, written, strict=True) for fault in faults(folder, lines)]
    parting = first_parting(*written)
    beside = differing(a, b, overrides)
    if parting is None:
        shared = {line["step"] for line in written[0]} & {line["step"] for line in written[1]}
        if not shared:
            raise RunError(f"{a} and {b} have no step in common")
        if faulty:
            _tell(console, "no step differs, and these prove nothing:", faulty)
            return 1
        console.say(f"the same bits in all {len(shared)} steps that both have, up to step {max(shared)}")
        _tell(console, "what differs otherwise decides no weight so far:", beside)
        return 0
    one, other = parting.lines
    told = dict.fromkeys(("hash", "loss", "grad_norm"), "loss or gradient norm")
    told |= {"weights": "weights", "optimizer": "optimizer state"}
    what = " and ".join(dict.fromkeys(told[each] for each in parting.what))
    console.say(
        f"they part in step {parting.step}, in {what}: loss {one.get('loss')!r} in {a}, {other.get('loss')!r} in {b}; "
        f"gradient norm {one.get('grad_norm')!r} and {other.get('grad_norm')!r}"
    )
    _tell(console, "what is wrong with lines by themselves:", faulty)
    _tell(console, "what the runs were given and did not share:", beside)
    try:
        return _looked(console, both, parting, overrides) if look else 1
    except _Failed as caught:
        return caught.status


def faults(folder: Path, lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """What is wrong with a run's lines by themselves; a few of them."""
    skips = fingerprints.skips(load(folder / "run.yaml", [])) if (folder / "run.yaml").is_file() else False
    found = [
        f"{folder / fingerprints.FILE}: step {line['step']}: {fault}"
        for line in lines
        if (fault := fingerprints.fault(line, skips)) is not None
    ]
    return found[:_SHOWN] + ([f"... and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else [])


def differing(a: Path, b: Path, overrides: Sequence[str]) -> list[str]:
    """Keys that decide weights, data, versions, hardware: what differs between two runs."""
    runs = [again(folder, overrides, None, 1) for folder in (a, b)]
    keys = [run.arithmetic() for run in runs]
    found = [
        f"{key}: {keys[0].get(key)!r} and {keys[1].get(key)!r}"
        for key in sorted(keys[0].keys() | keys[1].keys())
        if keys[0].get(key) != keys[1].get(key)
    ]
    found += [f"... and {len(found) - _SHOWN} more keys"] if len(found) > _SHOWN else []
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
    return found[: _SHOWN + 1] + [
        f"{name}: {facts[0].get(name)} and {facts[1].get(name)}"
        for name in facts[0] | facts[1]
        if facts[0].get(name) != facts[1].get(name)
    ]


def _tell(console: Console, title: str, lines: Sequence[str]) -> None:
    if lines:
        console.say(title)
        for line in lines:
            console.say(f"  {line}")


# -- the step, computed again ----------------------------------------------------------------------------------------


def _looked(console: Console, both: tuple[Path, Path], parting: Parting, overrides: Sequence[str]) -> int:
    def alone(folder: Path, step: int) -> list[Entry]:
        return apart(again(folder, overrides, None, 1), folder, step)

    def own(folder: Path, step: int) -> list[Entry]:
        run = again(folder, overrides, "own", int(start_of(folder).get("processes") or 1))
        return apart(run, folder, step)

    a, b = both
    console.say(f"step {parting.step} is computed again for both, as one process ...")
    if _parted(console, parting.step, lambda step: alone(a, step), lambda step: alone(b, step), ""):
        return 1
    console.say("computed here as one process, both come to the same bits: it is not what they were given")
    for folder in both:
        run = again(folder, overrides, "own", int(start_of(folder).get("processes") or 1))
        if (run.strategy.name, run.launch.processes) == ("single", 1):
            continue
        how = f"{run.strategy.name}, {run.launch.processes} process(es)"
        console.say(f"step {parting.step} as {folder} trained it: {how} ...")
        if _parted(console, parting.step, partial(alone, folder), partial(own, folder), f"{folder}, "):
            return 1
    norm = next((e.value for e in alone(a, parting.step) if e.kind == "norm"), None)
    right = [str(f) for f, line in zip(both, parting.lines, strict=True) if line.get("grad_norm") == norm]
    console.say(
        f"no strategy makes a difference here. {f'{right[0]} has what is computed here. ' if len(right) == 1 else ''}"
        "What is left: another kind of processor or GPU, other versions or threads (above, if they were written down), "
        "code that has changed since, or a machine that computed wrongly"
    )
    return 1


Computed = Callable[[int], "list[Entry]"]  # a step


def _parted(console: Console, step: int, a: Computed, b: Computed, where: str) -> bool:
    """Tell the first thing that differs between two ways to compute a step, if there is one; where that is the weights
    before it, of the step before, whose loss and gradient were the same."""
    mine, theirs = a(step), b(step)
    first = first_other(mine, theirs)
    while step > 1 and first is not None and first.kind == "weights before":
        step -= 1
        console.say(f"the weights were others before it: step {step} is computed again ...")
        mine, theirs = a(step), b(step)
        first = first_other(mine, theirs) or first
    if first is None:
        return False
    console.say(f"first: {where}step {step}, {described(first)}")
    console.say(f"  {cause(mine, theirs, first)}")
    return True


class _Failed(Exception):
    """A job did not end well, and has said why: its exit status."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


def apart(run: Run, output: Path, step: int) -> list[Entry]:
    """The entries of a step. Errors: `RunError`, `_Failed`."""
    from lockstep.training.replaying import ANATOMY, read_anatomy

    folder = Path(tempfile.mkdtemp(prefix="lockstep-diff-"))
    try:
        run = run.model_copy(update={"output": str(folder / "run")})
        launcher, _, job = start.resolved(run)
        status = start.start_ranks(launcher, job, (JOB, str(output.resolve()), str(step)))
        if status or not (run.folder / ANATOMY).exists():
            raise _Failed(status or 1)
        return read_anatomy(run.folder)[0]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def first_other(a: Sequence[Entry], b: Sequence[Entry]) -> Entry | None:
    """The first entry of `a` that is not in `b` with the same hash, in the order of computation; what only one of them
    could listen to is passed over."""
    there: dict[tuple[str, str, int], list[str]] = {}
    for entry in b:
        there.setdefault((entry.kind, entry.name, entry.micro_batch), []).append(entry.hash)
    kinds = {e.kind for e in b}
    seen: dict[tuple[str, str, int], int] = {}
    for entry in a:
        key = (entry.kind, entry.name, entry.micro_batch)
        count = seen[key] = seen.get(key, 0) + 1
        hashes = there.get(key, [])
        if len(hashes) >= count and hashes[count - 1] != entry.hash:
            return entry
        if len(hashes) < count and entry.kind in kinds and entry.kind in ("inputs", "loss", "gradient", "update"):
            return entry
    return None


def described(entry: Entry) -> str:
    """In words."""
    of = f"micro-batch {entry.micro_batch}" if entry.micro_batch >= 0 else ""
    name = entry.name or "the model"
    return {
        "weights before": f"the weights before it: {name}",
        "rows": "the examples it is made of",
        "inputs": f"{of}: the tokens that go into the model",
        "forward": f"{of}: what {name} gives in forward",
        "loss": f"{of}: the loss",
        "backward": f"{of}: the gradient of what {name} gives, in backward",
        "leaf": f"{of}: the gradient of {name}",
        "gradient": f"the gradient of {name}, summed over micro-batches",
        "norm": "the norm of the gradient",
        "rate": "the learning rate",
        "update": f"the update: {name}",
    }[entry.kind]


def cause(a: Sequence[Entry], b: Sequence[Entry], first: Entry) -> str:
    """What the first thing that differs points at."""
    if first.kind == "gradient":
        return _of_sums(a, b)
    return {
        "weights before": "the runs began from other weights: the model, its source, or the seed",
        "rows": "the order of the data: seed, batch_size, data, or a filter",
        "inputs": "the same rows hold other tokens: the data, the tokenizer, how examples are cut, or micro_batches",
        "forward": "the same weights and tokens: random numbers (dropout, their seed), precision, or code of the model",
        "loss": "the same outputs: the task's loss or its targets",
        "backward": "forward agrees: code of the model's backward, precision, or an option that recomputes",
        "leaf": "what the layer is given agrees: how its weight's gradient is computed, or changed by a hook",
        "norm": "the gradient agrees and its norm does not: it is not summed over all of it",
        "rate": "the schedule: optim.learning_rate, its warm-up, or the number of steps",
        "update": "all agrees up to the gradient: clipping, weight decay, or the optimizer and its options",
    }[first.kind]


def _of_sums(a: Sequence[Entry], b: Sequence[Entry]) -> str:
    """What the sum being wrong of gradients that are right points at; as `lockstep verify` guesses."""
    theirs = {e.name: e for e in b if e.kind == "gradient"}
    pairs = [(e, theirs[e.name]) for e in a if e.kind == "gradient" and e.name in theirs]
    wrong = [(x, y) for x, y in pairs if x.hash != y.hash]
    factors = sorted((y.norm or 0.0) / x.norm for x, y in wrong if x.norm)
    if not factors:
        return "the sum over micro-batches"
    middle = factors[len(factors) // 2]
    if len(wrong) == len(pairs) and factors[-1] - factors[0] < 1e-3 * middle and abs(middle - 1) > 1e-3:
        return (
            f"every gradient is {middle:.4g} times the other run's: a sum that was counted twice, a mean where a sum "
            "was meant, or another number of targets"
        )
    if len(wrong) <= len(pairs) / 2:
        return f"only {', '.join(x.name for x, _ in wrong[:4])}: not summed over all processes, or a row too few"
    if all(abs(f - 1) < 1e-4 for f in factors):
        return "to rounding they agree: the micro-batches are added in another order (strategy.exact, micro_batches)"
    return "micro-batches of unequal size were weighted equally (a mean of means), or some were left out"
