"""Rules on code besides the optimizer that changes weights and moments: weights written between steps, steps that are
undone, optimizers that are recreated.

Correct programs do each of these on purpose: they clip, project and mask weights, average them (Lookahead, local SGD),
restore the best ones, redraw low-rank parts. So none of the findings is `wrong`. Weights that are swapped for an
evaluation and swapped back are unchanged, and cause no finding.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from lockstep_trace.causes import few
from lockstep_trace.read import Rank, Step, Trace, Value
from lockstep_trace.rules.finding import INFO, PATIENCE, SUSPICIOUS, Finding

ROUNDING, ROUNDING_HALF = 1e-5, 2e-2  # relative: rounding left after adding and subtracting a change
OFTEN = 0.4  # share of steps; writes before more steps than this are a design
ENOUGH = 8  # steps that all start with the same weights


def between(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Report weights that change between two steps, unless the script loaded a state_dict to continue from.

    A state_dict that is loaded before an evaluation, with none loaded after it, counts as a change."""
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
        what += ": each time after an evaluation, and training continues from these weights"
        cause = "restore the trained weights after evaluating other weights (an average, a checkpoint)"
        otherwise = "restoring the best weights, or continuing from an average (Lookahead)"
        decides = "which weights training should continue from after an evaluation"
        yield Finding("weights-written", what, cause, at[0], SUSPICIOUS, otherwise, decides)
    elif len(at) >= OFTEN * len(steps) or (len(at) >= PATIENCE and len(gaps) == 1):
        cause = "clipping, projections, masks and averages of weights do this"
        yield Finding("weights-written", what, cause, at[0], INFO)
    else:
        if (back := _again(steps, at[0])) is not None:
            what += f"; they equal the weights before step {back}"
        cause = "the moments belong to the replaced weights: load the optimizer's state, too, or create a new optimizer"
        otherwise = "merging, pruning, or restoring stored weights on purpose"
        yield Finding(
            "weights-written", what, cause, at[0], SUSPICIOUS, otherwise, "which code writes to the weights here"
        )


def _loaded(step: Step) -> bool:
    return step.loaded_model == "after" or (step.loaded_model == "before" and not step.evaluated)


def _written(rank: Rank, optimizer: int) -> Iterator[tuple[Step, list[str]]]:
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
    if not all(n in step.written for n in names):
        return True
    change = math.sqrt(sum(step.written[n].square for n in names))
    size = math.sqrt(sum(step.before[n].square for n in names))
    half = any("16" in p.dtype for p in step.layout.parameters if p.name in names)
    return not change <= (ROUNDING_HALF if half else ROUNDING) * size


def _state(step: Step) -> tuple[int, ...]:
    return tuple(v.fingerprint for v in step.before.values())


def _undone(steps: list[Step]) -> Finding | None:
    begins = {_state(s) for s in steps}
    changes = all(any(s.weights[n].fingerprint != v.fingerprint for n, v in s.before.items()) for s in steps)
    if len(steps) < ENOUGH or len(begins) > 1 or not changes:
        return None
    what = f"each of {len(steps)} steps starts with the weights of step 0: every update is undone before the next step"
    cause = "code restores weights between steps: after an evaluation, restore the weights from before it, not the "
    cause += "initial ones"
    otherwise = "measuring the effect of single steps (influence of examples, a learning rate search)"
    return Finding("steps-undone", what, cause, 1, SUSPICIOUS, otherwise, "whether the weights should change at all")


def _again(steps: list[Step], number: int) -> int | None:
    now = next(s for s in steps if s.step == number)
    return next((s.step for s in steps if s.step < number and _state(s) == _state(now)), None)


def anew(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Report three or more optimizers of one kind in succession, each with the same parameters, the weights that the
    previous one left, and empty moments."""
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
    what = f"{kind} is recreated {len(chain) - 1} times for the same parameters, after {few(counts)} steps, and starts "
    what += "with empty moments each time"
    cause = "create the optimizer once; a scheduler, or group['lr'], changes its learning rate"
    otherwise = "warm restarts, rounds of federated learning, or redrawn low-rank parts"
    decides = "whether the moments should restart"
    yield Finding("optimizer-made-anew", what, cause, None, SUSPICIOUS, otherwise, decides)


def _follows(rank: Rank, one: int, other: int) -> bool:
    last, first = (rank.steps[o][pick(rank.steps[o])] for o, pick in ((one, max), (other, min)))
    if first.raw["at"] != last.raw["at"] + 1 or first.step != 0 or first.loaded or not first.moments:
        return False
    if first.layout.optimizer != last.layout.optimizer or not (first.measured and last.measured):
        return False
    left = {p.name: last.weights[p.name].fingerprint for p in last.layout.parameters}
    return left == {p.name: first.before[p.name].fingerprint for p in first.layout.parameters}


NEAR = 0.12  # of one update


def follows(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Report a weight average that stays within a small part of one update of the trained model: its factors are
    swapped, so it takes nearly all of the new weights and almost none of the old ones.

    An average with decay d lags about d / (1 - d) updates behind the model; an exact copy has distance 0. A decay that
    ramps up from near 0 over thousands of steps also stays close in early steps, so the finding is never proved."""
    rank = next((r for r in trace.ranks if r.steps.get(optimizer)), None)
    if rank is None:
        return
    rows: dict[str, list[tuple[int, float]]] = {}
    for number, step in sorted(rank.steps[optimizer].items()):
        for name, distance, update in step.averages or ():
            rows.setdefault(name, []).append((number, distance / update if update > 0 else 1.0))
    for name, ratios in rows.items():
        parts = [ratio for _, ratio in ratios]
        if len(parts) < PATIENCE or min(parts) < 1e-5 or max(parts) > NEAR:
            continue
        at = ratios[0][0]
        what = f"before step {at} {name} differs from the trained model by only {parts[0]:.2g} of the last update; in "
        what += f"{len(parts)} steps it nearly equals the model after each step"
        cause = "the factors are swapped: use average = decay * average + (1 - decay) * weights, with a decay near 1"
        otherwise = "a copy that is meant to follow immediately, or a decay that ramps up from near 0"
        decides = "how far the average is meant to lag behind the model"
        yield Finding("average-follows", what, cause, at, SUSPICIOUS, otherwise, decides)
