"""Rules on gradients that no step uses, and on steps that use the same gradients again.

Evidence: `tracer/gradient_history.py`, and the fingerprints of gradients.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from lockstep_trace.read import Step, Trace
from lockstep_trace.rules import epochs
from lockstep_trace.rules.finding import PATIENCE, WRONG, Finding, weakened

MOST = 0.8  # share of steps


def cleared(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Report steps that use only the last micro-batch's gradient, because those of earlier ones were cleared.

    The finding is proved if, in nearly all steps, all backwards take consecutive batches of one pass over a loader, and
    no code modified the gradients: then each epoch trains on one batch of k. Programs that read a gradient and drop it
    (meta-learning, gradient surgery, perturbed weights or inputs) modify gradients before the step, or use the same
    batch again, or a batch of another loader."""
    rank = next((r for r in trace.ranks if r.steps.get(optimizer)), None)
    if rank is None:
        return
    steps = [s for _, s in sorted(rank.steps[optimizer].items()) if (s.backwards or 0) > 1 and not s.closure]
    rows = [s for s in steps if s.cleared == s.backwards - 1 and not s.rewritten and _distinct_examples(s)]
    if len(rows) < PATIENCE or len(rows) < MOST * len(rank.steps[optimizer]):
        return
    step, count = rows[0], rows[0].backwards
    what = (
        f"step {step.step}: the gradients of the first {count - 1} of {count} backwards are cleared before "
        "the last one, "
    )
    what += f"in {len(rows)} steps: no step uses the gradients of their examples"
    cause = "call zero_grad() once a step, after optimizer.step(), not before each backward"
    proved = all(_following(s) for s in rows) and not any(c.get("early") for s in rows for c in s.clips or ())
    proved = proved and not step.layout.own
    otherwise = "gradients that are only inspected, as for task weights"
    finding = Finding("gradients-cleared", what, cause, step.step)
    yield weakened(finding, proved, otherwise, "what reads the gradients of the first backwards")


def undivided(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Report steps whose gradient is the sum of the means of k batches of one loader, none of them divided by k.

    This may be intended, with a learning rate that accounts for it, and Adam ignores a constant factor. In
    transformers' Trainer it is a fault: a user who returns a mean expects Trainer to divide it, as documented, but
    Trainer divides no loss of a function that takes `num_items_in_batch`."""
    rank = next((r for r in trace.ranks if r.steps.get(optimizer)), None)
    if rank is None:
        return
    steps = [s for _, s in sorted(rank.steps[optimizer].items())]
    rows = [s for s in steps if (s.backwards or 0) > 1 and s.means == s.backwards and not (s.cleared or s.rewritten)]
    trainer = any(
        "own loss of a Trainer" in (s.notes or ()) for s in steps
    )  # Trainer fetches the batches of a step beforehand
    rows = [s for s in rows if trainer or (_distinct_examples(s) and _following(s))]
    if len(rows) < PATIENCE or len(rows) < MOST * len(steps):
        return
    step, count = rows[0], rows[0].backwards
    what = f"step {step.step}: the gradient is the sum of {count} means over {count} consecutive batches, and no loss "
    what += f"is divided: it is {count} times that of one large batch"
    cause = f"divide each loss by the number of batches of a step ({count}) before backward"
    if trainer:
        cause = "Trainer does not divide a loss that takes num_items_in_batch: return the sum divided by that number"
    otherwise = (
        "a learning rate that accounts for the sum (a constant factor affects clipping and decay, not Adam's updates)"
    )
    decides = "whether a step should equal that of one large batch"
    yield weakened(Finding("accumulation-undivided", what, cause, step.step), trainer, otherwise, decides)


def divided_twice(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Report means that are divided twice by the number of batches of a step.

    No correct program makes the gradient k times smaller than that of the mean of k batches. A loss weight may be 1/k
    by chance, so the finding is proved only for two divisions by an integer and more than two batches."""
    rank = next((r for r in trace.ranks if r.steps.get(optimizer)), None)
    steps = [] if rank is None else [s for _, s in sorted(rank.steps[optimizer].items())]
    ways = ("divided twice", "weighted")
    steps = [s for s in steps if s.backwards]
    counts = {w: [s for s in steps if (s.notes or []).count(f"{w} by {s.backwards}") == s.backwards > 1] for w in ways}
    way = max(ways, key=lambda w: len(counts[w]))
    rows = counts[way]
    rows = [s for s in rows if _distinct_examples(s)]
    if len(rows) < PATIENCE or len(rows) < MOST * len(steps):
        return
    step, count = rows[0], rows[0].backwards
    what = (
        f"step {step.step}: the mean of each of {count} batches is divided by {count} twice: the gradient is {count} "
    )
    what += "times smaller than that of one large batch"
    cause = f"divide by {count} only once: Accelerate, Trainer and Lightning already divide"
    otherwise = "a factor that belongs to the loss"
    finding = Finding("divided-twice", what, cause, step.step)
    yield weakened(finding, count > 2 and way != "weighted", otherwise, "who divides the loss")


def _distinct_examples(step: Step) -> bool:
    parts = _parts(step)
    every = [h for part in parts for h in part]
    return all(parts) and len(parts) == step.backwards and len(set(every)) > 0.9 * len(every)


def _parts(step: Step) -> list[list[str]]:
    ends = list(step.inputs_at or ())
    inputs = [hashes for _, _, hashes in epochs.fed(step)]
    return [[h for each in inputs[a:b] for h in each] for a, b in itertools.pairwise([0, *ends])]


def _following(step: Step) -> bool:
    fed = [(name, batch) for name, batch in step.fed or ()]
    names, batches = {name for name, _ in fed}, [batch for _, batch in fed]
    return len(names) == 1 and None not in names and all(b - a == 1 for a, b in itertools.pairwise(batches))


def doubled(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Report steps that call backward twice on the same loss, so that its gradient counts twice.

    Programs that call it twice on purpose clear or change the first gradients, request gradients of certain inputs, or
    pass their own gradient."""
    rank = next((r for r in trace.ranks if r.steps.get(optimizer)), None)
    steps = [] if rank is None else [s for _, s in sorted(rank.steps[optimizer].items())]
    rows = [s for s in steps if "backward twice" in (s.notes or ()) and not s.rewritten and not s.closure]
    if len(rows) >= PATIENCE and len(rows) >= MOST * len(steps):
        what = f"step {rows[0].step}: backward is called twice on the same loss, in {len(rows)} of {len(steps)} steps: "
        what += "its gradient is added twice"
        cause = "call backward once on each loss"
        yield Finding("backward-twice", what, cause, rows[0].step, WRONG)


def repeated(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Report steps that apply the same gradients again: no backward since the last step, and the same bits.

    No correct program with a torch optimizer does so: one that steps without a backward writes other gradients, and a
    closure recomputes them."""
    rank = next((r for r in trace.ranks if r.steps.get(optimizer)), None)
    if rank is None:
        return
    steps = [s for _, s in sorted(rank.steps[optimizer].items())]
    rows = [b for a, b in itertools.pairwise(steps) if _again(a, b)]
    if len(rows) < PATIENCE:
        return
    step = rows[0]
    what = (
        f"step {step.step}: no backward since the previous step, and all gradients have the same bits, as in "
        f"{len(rows)} "
    )
    what += f"of {len(steps)} steps: each gradient is applied more than once"
    cause = "step once for each backward; a scaler, a trainer or a hook may already step"
    otherwise = "an optimizer that takes several steps with one gradient by design"
    finding = Finding("step-repeated", what, cause, step.step)
    yield weakened(finding, not step.layout.own, otherwise, "the optimizer's source")


def _again(one: Step, other: Step) -> bool:
    if other.backwards or other.closure or other.rewritten or not one.backwards or other.loaded:
        return False
    if one.groups != other.groups or not any(group.get("lr") for group in other.groups):
        return False
    before = one.unclipped if other.factor_of_clipping else one.grads
    now = other.unclipped if other.factor_of_clipping else other.grads
    if before.keys() != now.keys() or not any(v.square > 0 for v in now.values()):
        return False
    changes = any(other.weights[n].fingerprint != v.fingerprint for n, v in other.before.items())
    return changes and all(v.fingerprint == before[n].fingerprint for n, v in now.items())


def clipped(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Report clipping that never changes a gradient that a step uses: it runs after the step, or before any backward.

    No correct program sets a limit without effect. Clipping that only logs the norm has an infinite limit, or its norm
    stays below the limit."""
    rank = next((r for r in trace.ranks if r.steps.get(optimizer)), None)
    if rank is None:
        return
    steps = [s for n, s in sorted(rank.steps[optimizer].items()) if n]
    rows = [s for s in steps if s.clips]
    if len(rows) < PATIENCE or len(rows) < MOST * len(steps) or any(c.get("unseen") for s in rows for c in s.clips):
        return  # DeepSpeed clips inside of its step
    if rank.steps[optimizer].get(0) and any(c["backwards"] for c in rank.steps[optimizer][0].clips or ()):
        return
    after = all(c.get("unused") and c["of"] for s in rows for c in s.clips)
    before = all(_nothing(s, c) for s in rows for c in s.clips)
    limits = [c["limit"] for s in rows for c in s.clips]
    if not (after or before) or not all(x is not None and 0 < x < math.inf for x in limits):
        return
    if after and not any((c.get("norm") or 0) > c["limit"] for s in rows for c in s.clips):
        return
    where = "after the step that uses them, and then cleared" if after else "before backward, when they are zero"
    what = (
        f"step {rows[0].step}: gradients are clipped at {limits[0]:g} {where}, in {len(rows)} of {len(steps)} steps: "
    )
    what += "no step uses a clipped gradient"
    cause = "clip between backward and optimizer.step()"
    finding = Finding("clip-unused", what, cause, rows[0].step)
    otherwise = "gradients of parameters that have none yet"
    yield weakened(finding, True, otherwise, "")


def of_nothing(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Report clipping that receives no parameters after a backward, such as an exhausted generator.

    No correct program sets a limit for an empty list."""
    rank = next((r for r in trace.ranks if r.steps.get(optimizer)), None)
    steps = [] if rank is None else [s for _, s in sorted(rank.steps[optimizer].items()) if s.clips]
    rows = [s for s in steps if all(c.get("given") == 0 and c["backwards"] for c in s.clips)]
    if len(rows) < PATIENCE or len(rows) < MOST * len(steps) or not any(s.unclipped for s in rows):
        return
    what = f"step {rows[0].step}: clipping receives no parameters, in {len(rows)} steps, and clips no gradient"
    cause = "pass model.parameters() each time: a generator is empty after its first use, for example by the optimizer"
    yield Finding("clip-unused", what, cause, rows[0].step, WRONG)


def _nothing(step: Step, clip: dict[str, object]) -> bool:
    if clip["backwards"] or clip.get("used") or not clip.get("all"):
        return False
    same = clip["all"] == len([p for p in step.layout.parameters if p.trained])
    return same and bool(step.unclipped or step.grads) and (clip["of"] == 0 or clip.get("norm") == 0.0)
