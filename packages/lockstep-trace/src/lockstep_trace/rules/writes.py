"""Rules on what other code than an optimizer's step does to weights and moments: weights that are written to between
steps, steps that are undone, optimizers that are made anew.

Right programs do each of these on purpose: they clip, project and mask weights, average them (Lookahead, local SGD), go
back to the best ones, draw low-rank parts anew. So none of the findings is `wrong`. Weights that are swapped for an
evaluation and back are as before, and no finding.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from lockstep_trace.causes import few
from lockstep_trace.read import Rank, Step, Trace, Value
from lockstep_trace.rules.finding import INFO, PATIENCE, SUSPICIOUS, Finding

ROUNDING, ROUNDING_HALF = 1e-5, 2e-2  # relative: what adding and subtracting a change leaves
OFTEN = 0.4  # share of steps before which weights are written to by design
ENOUGH = 8  # steps, each of which begins with the same weights


def between(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Report weights that differ before a step from those after the last one, where no model loaded a state_dict, or
    loaded one before it was evaluated and none afterwards."""
    rank = next((r for r in trace.ranks if r.steps.get(optimizer)), None)
    if rank is None or not all(s.measured for steps in rank.steps.values() for s in steps.values()):
        return
    steps = [s for _, s in sorted(rank.steps[optimizer].items())]
    if any(s.closure for s in steps):  # weights are measured inside of the step
        return
    written = {s.step: names for s, names in _written(rank, optimizer) if not _loaded(s)}
    if not written:
        return
    if (undone := _undone(steps)) is not None:
        yield undone
        return
    at = sorted(written)
    names = sorted(set().union(*written.values()))
    what = f"before step {at[0]}, other code than the optimizer writes to {few(names)}"
    if len(at) > 1:
        what += f", and before {len(at)} of {len(steps) - 1} steps"
    gaps = {b - a for a, b in itertools.pairwise(at)}
    evaluated = [s.step for s in steps[1:] if s.evaluated]
    if set(at) <= set(evaluated) and len(at) >= 0.5 * len(evaluated) and len(evaluated) < OFTEN * len(steps):
        what += ": each time after an evaluation, and the training goes on from there"
        cause = "put the trained weights back after an evaluation of others (an average, a checkpoint)"
        otherwise = "a return to the best weights, or an average that is trained further (Lookahead)"
        decides = "which weights the steps after an evaluation are to begin with"
        yield Finding("weights-written", what, cause, at[0], SUSPICIOUS, otherwise, decides)
    elif len(at) >= OFTEN * len(steps) or (len(at) >= PATIENCE and len(gaps) == 1):
        cause = "as clipping, projections, masks and averages do"
        yield Finding("weights-written", what, cause, at[0], INFO)
    else:
        if (back := _again(steps, at[0])) is not None:
            what += f"; they are those of before step {back}"
        cause = "moments belong to the weights that were replaced: load the optimizer's state, too, or make it anew"
        otherwise = "a merge, a pruning, or weights that were kept for this"
        yield Finding("weights-written", what, cause, at[0], SUSPICIOUS, otherwise, "what writes to the weights here")


def _loaded(step: Step) -> bool:
    """Return whether a state_dict was loaded to go on from, as of the best weights after an evaluation."""
    return step.loaded_model == "after" or (step.loaded_model == "before" and not step.evaluated)


def _written(rank: Rank, optimizer: int) -> Iterator[tuple[Step, list[str]]]:
    """Yield the steps before which weights were written to, beyond rounding, by something else than an optimizer."""
    known: dict[tuple[str, object, str], Value] = {}
    at = sorted((s for steps in rank.steps.values() for s in steps.values()), key=lambda s: int(s.raw["at"]))
    for step in at:
        rows = {p.name: (p.name, p.block, p.dtype) for p in step.layout.parameters}
        if step.opt == optimizer and step.step:
            changed = [
                n
                for n, key in rows.items()
                if key in known and n in step.before and step.before[n].fingerprint != known[key].fingerprint
            ]
            if changed and _beyond_rounding(step, changed):
                yield step, changed
        known |= {rows[n]: value for n, value in step.weights.items()}


def _beyond_rounding(step: Step, names: list[str]) -> bool:
    """Return whether weights differ by more than rounding; True if unknown, as after a write through `.data`."""
    if not all(n in step.written for n in names):
        return True
    change = math.sqrt(sum(step.written[n].square for n in names))
    size = math.sqrt(sum(step.before[n].square for n in names))
    half = any("16" in p.dtype for p in step.layout.parameters if p.name in names)
    return not change <= (ROUNDING_HALF if half else ROUNDING) * size


def _state(step: Step) -> tuple[int, ...]:
    return tuple(v.fingerprint for v in step.before.values())


def _undone(steps: list[Step]) -> Finding | None:
    """Return the finding of steps each of which begins with the weights of the first and changes them, or None."""
    begins = {_state(s) for s in steps}
    changes = all(any(s.weights[n].fingerprint != v.fingerprint for n, v in s.before.items()) for s in steps)
    if len(steps) < ENOUGH or len(begins) > 1 or not changes:
        return None
    what = f"each of {len(steps)} steps begins with the weights of step 0: what a step learns is undone before the next"
    cause = "something restores weights between steps: weights that are put back after an evaluation have to be those "
    cause += "of before it, not those of the beginning"
    otherwise = "a measure of what one step would change (influence of examples, a search for a rate)"
    return Finding("steps-undone", what, cause, 1, SUSPICIOUS, otherwise, "whether weights are to move at all")


def _again(steps: list[Step], number: int) -> int | None:
    """Return the earlier step that began with the weights of a step, if there is one."""
    now = next(s for s in steps if s.step == number)
    return next((s.step for s in steps if s.step < number and _state(s) == _state(now)), None)


def anew(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Report optimizers of one kind that follow each other twice or more, each of them with the same parameters, the
    weights that the last one left, and empty moments."""
    rank = next((r for r in trace.ranks if r.steps.get(optimizer)), None)
    if rank is None:
        return
    chain = [optimizer]
    followers = {one: other for one, other in itertools.permutations(rank.steps, 2) if _follows(rank, one, other)}
    if optimizer in followers.values():
        return
    while chain[-1] in followers:
        chain.append(followers[chain[-1]])
    if len(chain) < 3:
        return
    firsts = [rank.steps[o][min(rank.steps[o])] for o in chain]
    counts = list(dict.fromkeys(str(len(rank.steps[o])) for o in chain))
    kind = firsts[0].layout.optimizer
    what = f"{kind} is made anew {len(chain) - 1} times for the same parameters, after {few(counts)} steps, and begins "
    what += "with empty moments each time"
    cause = "make the optimizer once; a scheduler, or group['lr'], changes its rate"
    otherwise = "warm restarts, rounds of federated learning, or low-rank parts that are drawn anew"
    decides = "whether moments are to begin anew"
    yield Finding("optimizer-made-anew", what, cause, None, SUSPICIOUS, otherwise, decides)


def _follows(rank: Rank, one: int, other: int) -> bool:
    """Return whether an optimizer goes on where another one has ended, without its moments."""
    last, first = (rank.steps[o][pick(rank.steps[o])] for o, pick in ((one, max), (other, min)))
    if first.raw["at"] != last.raw["at"] + 1 or first.step != 0 or first.loaded or not first.moments:
        return False
    if first.layout.optimizer != last.layout.optimizer or not (first.measured and last.measured):
        return False
    left = {p.name: last.weights[p.name].fingerprint for p in last.layout.parameters}
    return left == {p.name: first.before[p.name].fingerprint for p in first.layout.parameters}
