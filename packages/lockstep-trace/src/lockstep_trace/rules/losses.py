"""Rules on losses: equal weights for unequal numbers of targets, and loss functions with wrong inputs.

Evidence: the autograd graph of the loss (`tracer/graph.py`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

from lockstep_trace.ranks import losses_of, targets_of_micro
from lockstep_trace.read import Trace
from lockstep_trace.rules import PATIENCE, SUSPICIOUS, WRONG, Finding

LAYERS = ("Addmm", "Mm", "Linear", "Convolution")  # layers whose outputs are not log-probabilities
REGRESSIONS = ("MseLoss", "SmoothL1Loss", "HuberLoss")  # l1_loss has no operation of its own: see `handmade`


def means(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Report losses of ranks or micro-batches that do not grow with their numbers of targets: means over unequal
    counts, which then count equally.

    This may be intended, to weigh examples equally whatever their length."""
    rows: list[tuple[float, float]] = []  # (log targets, log loss), relative to the step's
    unequal: tuple[int, int, int] | None = None
    for step in trace.steps(optimizer):
        losses = losses_of(trace, optimizer, step)
        pairs = [] if losses is None else list(zip(sum(losses.counts, ()), sum(losses.each, ()), strict=True))
        if (
            len(pairs) < 2
            or not all(n > 0 and math.isfinite(x) and x > 0 for n, x in pairs)
            or not _labelled(trace, optimizer, step)
        ):
            continue
        logs = [(math.log(n), math.log(x)) for n, x in pairs]
        middle = [sum(column) / len(logs) for column in zip(*logs, strict=True)]
        rows += [(n - middle[0], x - middle[1]) for n, x in logs]
        counts = [n for n, _ in pairs]
        if unequal is None and len(set(counts)) > 1:
            unequal = step, min(counts), max(counts)
    square = sum(n * n for n, _ in rows)
    if unequal is None or len(rows) < 8 or square / len(rows) < 0.01:
        return
    slope = sum(n * x for n, x in rows) / square  # 1: sums over targets, divided by one number; 0: means
    if slope < 0.3:
        step, low, high = unequal
        cause = "divide the sum of losses over all ranks and micro-batches by the number of all targets of the step"
        what = f"step {step}: losses are means over unequal numbers of targets ({low} to {high}) and count equally"
        otherwise = "batches that count equally on purpose, whatever their number of targets"
        decides = "whether training should equal that of one large batch: `lockstep diff` with it"
        yield Finding("mean-of-means", what, cause, step, SUSPICIOUS, otherwise, decides)


def _labelled(trace: Trace, optimizer: int, step: int) -> bool:
    return all(None not in (targets_of_micro(s) or [None]) for _, s in trace.at(optimizer, step) if s.losses)


def functions(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Report loss functions with wrong inputs, from the graph of the loss.

    No correct program broadcasts predictions against targets (torch warns about it), or passes probabilities to a loss
    that expects logits."""
    rank = next((r for r in trace.ranks if r.steps.get(optimizer)), None)
    if rank is None:
        return
    counts: Counter[str] = Counter()
    first: dict[str, tuple[int, dict[str, Any]]] = {}
    for number, step in sorted(rank.steps[optimizer].items()):
        kinds = {code: o for o in step.objectives or () if (code := _misused(o)) is not None}
        for code, objective in kinds.items():
            counts[code] += 1
            first.setdefault(code, (number, objective))
    for code, count in counts.items():
        if count >= PATIENCE:
            number, objective = first[code]
            what, cause = _in_words(code, objective)
            yield Finding(code, f"step {number}: {what}, in {count} steps", cause, number, WRONG)


def _misused(objective: dict[str, Any]) -> str | None:
    before, of = objective.get("before") or [""], objective["of"]
    if of in REGRESSIONS and (expanded := objective.get("expanded")):
        return "loss-broadcast" if _spread(*expanded) else None
    if of.startswith("NllLoss") and _over_examples(objective):
        return "softmax-dimension"
    if of.startswith("NllLoss") and before[:1] == ["Softmax"]:
        return "loss-of-probabilities"  # probabilities instead of log-probabilities
    if of.startswith("NllLoss") and before[0] in LAYERS:
        return "loss-of-logits"
    if of.startswith("NllLoss") and before[:2] == ["LogSoftmax", "Softmax"]:
        return "softmax-twice"
    if of == "BinaryCrossEntropyWithLogits" and before[0] in ("Sigmoid", "Softmax"):
        return "sigmoid-twice"
    return None


def _spread(shape: list[int], taken: list[int]) -> bool:
    n = taken[-1] if taken else 0
    return n > 1 and taken[-2:] == [n, n] and (shape == [n, 1] or shape == [n])


def _over_examples(objective: dict[str, Any]) -> bool:
    """Return whether the input of nll_loss was normalized over another dimension than the classes (the second one).

    If both dimensions have the same size, the input may be a matrix of pair similarities, used in both directions."""
    before = objective.get("before") or [""]
    if not objective.get("normalized") or not (before[0] == "LogSoftmax" or before[:2] == ["Log", "Softmax"]):
        return False
    dim, shape = objective["normalized"]
    return len(shape) > 1 and dim != 1 and shape[dim] != shape[1] and shape[1] > 1


def _in_words(code: str, objective: dict[str, Any]) -> tuple[str, str]:
    kind = objective["kind"]
    if code == "loss-broadcast":
        shape, spread = objective["expanded"]
        return (
            f"the {kind} compares each prediction with each target: predictions are broadcast from {shape} to {spread}",
            "give predictions and targets the same shape (squeeze or unsqueeze the last dimension of one)",
        )
    if code == "softmax-dimension":
        dim, shape = objective["normalized"]
        return (
            f"nll_loss takes dimension 1 of {shape} as classes, and its input was normalized over dimension {dim}",
            "apply the softmax over the classes: dim=1, or dim=-1 before the class axis is moved",
        )
    if code == "loss-of-probabilities":
        return "nll_loss is given probabilities", "use cross_entropy on logits, or log_softmax in place of softmax"
    if code == "loss-of-logits":
        return "nll_loss is given the output of a layer", "use cross_entropy, or log_softmax before nll_loss"
    if code == "softmax-twice":
        return "cross_entropy is given the output of a softmax", "pass logits: cross_entropy applies a softmax itself"
    return (
        f"the {kind} is given the output of a {objective['before'][0].lower()}",
        "pass logits: binary_cross_entropy_with_logits applies a sigmoid itself",
    )


def one_class(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Report batches that each hold a single class: rows that are sorted by class and not shuffled.

    Learning classes one after the other on purpose (continual learning) looks the same, so the finding is never
    proved."""
    rank = next((r for r in trace.ranks if r.steps.get(optimizer)), None)
    if rank is None:
        return
    rows = [
        (number, o)
        for number, step in sorted(rank.steps[optimizer].items())
        for o in step.objectives or ()
        if o["of"].startswith("NllLoss") and o.get("targets", 0) >= 4
    ]
    equal = [(n, o) for n, o in rows if o.get("equal")]
    classes = {tuple(o["hashes"]) for _, o in equal if o["targets"] == equal[0][1]["targets"]}
    if len(equal) < 8 or len(equal) < 0.75 * len(rows) or len(classes) < 2:
        return
    number, objective = equal[0]
    what = (
        f"step {number}: all {objective['targets']} targets have one class, as in {len(equal)} of {len(rows)} batches"
    )
    what += f", which hold at least {len(classes)} classes"
    cause = "rows are sorted by class: shuffle them (shuffle=True in the loader)"
    otherwise, decides = (
        "classes that are learned one after the other on purpose",
        "the intended order of rows",
    )
    yield Finding("one-class-batches", what, cause, number, SUSPICIOUS, otherwise, decides)


def ratios(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Report clipped probability ratios that are all exactly 1, even when steps revisit the same examples.

    The old probabilities then come from the current weights: they are recomputed in each step, so clipping never acts.
    If each example is used in only one step, a ratio of 1 is correct. The finding requires that the same set of
    examples recurs after steps that changed the weights. It is never proved, because actions for these examples may be
    drawn again."""
    rank = next((r for r in trace.ranks if r.steps.get(optimizer)), None)
    steps = [] if rank is None else [s for _, s in sorted(rank.steps[optimizer].items()) if s.ratios]
    if len(steps) < PATIENCE or not all(all(s.ratios) for s in steps):
        return
    again = _taken_again([list(s.examples or ()) for s in steps])
    if again is not None:
        step = steps[again]
        what = f"step {step.step}: all ratios of new to old probabilities are exactly 1, as in {len(steps)} steps, and "
        what += f"step {steps[0].step} already trained on its examples, with other weights"
        cause = "store the old probabilities when collecting examples, and use them in all epochs"
        otherwise, decides = "actions that are drawn again for the same examples", "whether the actions recur, too"
        yield Finding("ratio-of-one", what, cause, step.step, SUSPICIOUS, otherwise, decides)


def _taken_again(lists: list[list[str]]) -> int | None:
    for count in range(1, len(lists) // 2 + 1):
        one, other = (sorted(h for each in lists[i : i + count] for h in each) for i in (0, count))
        varied = Counter(one).values()  # few kinds of examples, each a certain number of times
        if one == other and (len(varied) >= 8 or (len(one) >= 64 and len({*varied}) >= 4)):
            return count
    return None


def contrastive(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Report a loss over candidates gathered from all ranks whose targets are 0, 1, ... on every rank: those of rank 0.

    A correct program adds the offset of a rank's own candidates, or puts these first, which the graph shows: the
    finding requires that they are at the rank's offset. Ranks that train on the same examples share candidates and are
    excluded."""
    rows: list[tuple[int, list[int]]] = []
    for number in trace.steps(optimizer):
        records = trace.at(optimizer, number)
        looks = [(r.number, o) for r, s in records for o in s.objectives or () if o.get("gathered")]
        wrong = [o["gathered"] for rank, o in looks if rank and o.get("diagonal") and o["gathered"][2] == rank]
        wrong = [g for g in wrong if g[1] == trace.world * g[0]]
        examples = {tuple(sorted(s.examples or ())) for _, s in records}
        whole = all(o.get("diagonal") for _, o in looks) and len({rank for rank, _ in looks}) == trace.world
        if wrong and whole and len(examples) == trace.world > 1:
            rows.append((number, wrong[0]))
    if len(rows) >= PATIENCE:
        number, (size, classes, _) = rows[0]
        what = (
            f"step {number}: {classes} candidates are gathered from {trace.world} ranks, but on every rank the targets "
        )
        what += f"of {size} rows are 0 to {size - 1}: the candidates of rank 0"
        cause = f"add rank * {size}, the offset of a rank's own candidates, to its targets"
        yield Finding("labels-without-offset", what, cause, number, WRONG)
