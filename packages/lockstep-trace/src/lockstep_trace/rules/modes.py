"""Rules on modes: dropout and batch norm active during evaluation or inactive during training; stale autocast casts;
packed rows without a document mask. Rules on losses: equal weights for unequal numbers of targets, and loss functions
with wrong inputs, from the graph of the loss (`tracer/graph.py`).

Optimizers that are recreated with empty moments may be meant, so that finding is never `wrong`.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from lockstep_trace.causes import few
from lockstep_trace.ranks import losses_of, targets_of_micro
from lockstep_trace.read import Rank, Trace
from lockstep_trace.rules import PATIENCE, SUSPICIOUS, WRONG, Finding, premises, weakened


def evaluated(trace: Trace) -> Iterator[Finding]:
    """Report dropout or batch norm in training mode during the evaluation of a trained model.

    A pass without gradients may have other purposes (batch-norm statistics, pseudo-labels, Monte Carlo dropout, cached
    outputs). The finding is proved only for a complete pass over a loader whose examples are never trained on, occur
    once each, and are never evaluated in evaluation mode."""
    for rank in trace.ranks[:1]:
        calm = {h for r in rank.evaluations if r.get("trained") and not r["active"] for h in r["examples"]}
        for record in rank.evaluations:
            if not record["active"] or record["count"] < 2 or not record.get("trained") or record.get("between"):
                continue
            what = (
                f"{record['count']} examples go through {record['model']} without gradients in "
                f"training mode: {few(record['active'])} active"
            )
            cause = "call model.eval() before evaluating, and model.train() after it"
            otherwise = "a pass for batch-norm statistics, pseudo-labels or cached outputs, or Monte Carlo dropout"
            finding = Finding("evaluated-in-training-mode", what, cause)
            proved = (_held_out(rank, record) or _again(rank, record)) and not calm & set(record["examples"])
            yield weakened(finding, proved, otherwise, "whether the pass computes a score")
            return


def _held_out(rank: Rank, record: Mapping[str, Any]) -> bool:
    name, hashes = record["loader"], record["examples"]
    whole = name is not None and name in {r["loader"] for r in rank.passed}
    trained = {h for steps in rank.steps.values() for s in steps.values() for h in s.examples or ()}
    mode = record.get("mode") or {}
    every = all(on == count for on, count in (mode.get("dropout", [0, 0]), mode.get("norms", [0, 0])))
    passes = [r for r in rank.evaluations if r["loader"] == name and r.get("trained")]
    once = len(hashes) == len(set(hashes)) and len(passes) == 1
    separate = all(name not in premises.examples_of_passes(rank, optimizer) for optimizer in rank.steps)
    return whole and once and every and separate and not trained & set(hashes)


def _again(rank: Rank, record: Mapping[str, Any]) -> bool:
    hashes, mode = record["examples"], record.get("mode") or {}
    dropout, norms = mode.get("dropout", [0, 0]), mode.get("norms", [0, 0])
    alike = [r for r in rank.evaluations if r["examples"] == hashes and r.get("trained") and not r.get("between")]
    stretches = {tuple(r["steps"]) for r in alike}
    hashed = {h for steps in rank.steps.values() for s in steps.values() for h in s.examples or ()}
    once = len(hashes) == len(set(hashes)) and len(stretches) == len(alike) > 1
    every = dropout[0] == dropout[1] > 0 and norms[0] == norms[1]
    return once and every and not hashed & set(hashes)


def trained(trace: Trace) -> Iterator[Finding]:
    """Report a model that trains with dropout or batch norm off.

    This may be intended (a frozen body, a final phase). The finding is proved if the whole model is in training mode
    until its first evaluation, and never again."""
    for rank in trace.ranks[:1]:
        if not any(m["stochastic"] for m in rank.models):
            continue
        for optimizer in sorted(rank.steps):
            steps = sorted(rank.steps[optimizer].items())
            off = [n for n, s in steps if s.training is False]
            if len(off) < 2:
                continue
            dropout = any(m.get("dropout") for m in rank.models)
            on = any(s.training for _, s in steps)
            parts = "dropout and batch norm are off" if dropout else "batch norm does not update its statistics"
            cause = "call model.train() after each evaluation" if on else f"call model.train() before training: {parts}"
            what = f"from step {off[0]} on the model trains in evaluation mode ({parts})"
            otherwise = "a frozen part, or training without dropout on purpose"
            finding = Finding("trained-in-evaluation-mode", what, cause, off[0])
            decides = "whether the script should call model.train() here"
            yield weakened(finding, on and _left(rank, optimizer, off), otherwise, decides, _swings(rank, optimizer))
            break


def _swings(rank: Rank, optimizer: int) -> bool:
    """Return whether evaluations turn the whole model off again and again, and the script turns it on later."""
    steps = rank.steps[optimizer]
    left = {n for n, s in steps.items() if s.training is False and n - 1 in steps and steps[n - 1].training}
    whole = all((steps[n - 1].mode or {}).get("root") and not (steps[n].mode or {}).get("root", True) for n in left)
    return len(left) > 1 and whole and left <= _evaluated_at(rank, optimizer)


def _evaluated_at(rank: Rank, optimizer: int) -> set[int]:
    """Return the steps that begin with an evaluation of the trained model."""
    return {r["steps"][optimizer] for r in rank.evaluations if r.get("trained") and len(r["steps"]) > optimizer}


def _left(rank: Rank, optimizer: int, off: list[int]) -> bool:
    steps = sorted(rank.steps[optimizer].items())
    modes = {n: s.mode or {} for n, s in steps}
    on = [n for n, _ in steps if n < off[0]]
    whole = all(modes[n].get("root") for n in on) and not any(modes[n].get("root", True) for n in off)
    first = min(_evaluated_at(rank, optimizer), default=None)
    return bool(on) and whole and off == [n for n, _ in steps if n >= off[0]] and first == off[0]


def norms(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Report batch norms with frozen weights whose running statistics still follow the batches.

    Statistics may adapt under frozen weights on purpose. The finding is proved if the script put these batch norms, or
    a part of the model that contains them, into evaluation mode, and a later `train()` of the model undid that, either
    before any forward pass or after training steps in evaluation mode."""
    rank = next((r for r in trace.ranks if r.steps.get(optimizer)), None)
    if rank is None:
        return
    modes = [(s, *(s.mode or {}).get("frozen", [0, 0])) for _, s in sorted(rank.steps[optimizer].items())]
    rows = [(s, count, undone) for s, count, undone in modes if count]
    undone = [row for row in rows if row[2]]
    if len(rows) < PATIENCE:
        return
    step, count, _ = (undone or rows)[0]
    what = f"from step {step.step} on {count} batch norms whose weight and bias are frozen update their statistics"
    if undone:
        what += ": the script put them into evaluation mode, and model.train() turned them on again"
    cause = "put them into evaluation mode after each model.train(), or override train() of the model"
    proved = len(undone) >= PATIENCE
    otherwise = "statistics that adapt to the data on purpose"
    finding = Finding("norm-not-frozen", what, cause, step.step)
    yield weakened(finding, proved, otherwise, "whether the statistics should stay those of the pretrained model")


def casts(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Report autocast casts older than the last update: autocast caches each weight's cast until its outermost region
    ends.

    No correct program steps inside a region and continues in it without clearing the cache."""
    rank = next((r for r in trace.ranks if r.steps.get(optimizer)), None)
    if rank is None:
        return
    steps = [s for _, s in sorted(rank.steps[optimizer].items()) if s.stale_casts]
    trained_steps = [s for s in steps if s.measured and any(v.square for v in s.grads.values())]
    if len(steps) < 2 or not trained_steps:
        return
    names = {p.name for p in steps[0].layout.parameters}
    stale = [n for n in steps[0].stale_casts if n in names]
    if stale:
        what = (
            f"from step {steps[0].step} on the forward pass does not see the updates: autocast ({steps[0].autocast}) "
            f"reuses old casts of {few(stale)} and others, in {len(steps)} steps of one region"
        )
        cause = "put `with torch.autocast(...)` around the forward pass and loss of each step, not around all steps"
        yield Finding("stale-cast", what, cause, steps[0].step, WRONG)


def packed(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Report packed rows (positions restart) with only a causal attention mask, so that documents attend to each other.

    No correct program restarts positions in that case."""
    rank = next((r for r in trace.ranks if r.steps.get(optimizer)), None)
    if rank is None:
        return
    steps = [s for _, s in sorted(rank.steps[optimizer].items()) if s.unmasked and s.restarts]
    if steps:
        what = (
            f"step {steps[0].step}: position_ids restart in {steps[0].restarts} rows, but attention is causal over the "
            "whole row: each document attends to the ones before it"
        )
        cause = (
            "pass use_cache=False and no attention_mask (not even ones), or use an attention "
            "implementation that splits "
            "rows where positions restart, or a block-diagonal mask"
        )
        yield Finding("packed-rows", what, cause, steps[0].step, WRONG)


def without_statistics(trace: Trace) -> Iterator[Finding]:
    """Report an evaluated copy of a trained model whose weights change while all its batch norms keep their initial
    statistics (mean 0, variance 1), although the trained model collects statistics.

    A weight average needs statistics, too: averaged or recomputed ones. An untrained baseline has the same weights in
    every evaluation, and is excluded. No correct program normalizes by statistics of no data."""
    for rank in trace.ranks[:1]:
        models = {m["name"] for m in rank.models}
        modes = [(s.mode or {}).get("norms", [0, 0]) for steps in rank.steps.values() for s in steps.values()]
        counts = {total for on, total in modes if on == total}
        rows = [r for r in rank.evaluations if r.get("unused_norms") and r["model"] in models and not r["trained"]]
        for name in sorted({r["model"] for r in rows}):
            looks = [r["unused_norms"] for r in rows if r["model"] == name]
            if all(initial and count in counts for count, initial, _ in looks) and any(new for *_, new in looks):
                what = f"a copy of {name} is evaluated {len(looks)} times with changing weights, but its {looks[0][0]} "
                what += "batch norms still have their initial statistics: mean 0, variance 1"
                cause = "copy or average buffers with the parameters (AveragedModel(use_buffers=True), update_bn)"
                yield Finding("norms-without-statistics", what, cause, None, WRONG)
                return


def anew(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Report three or more successive optimizers of one class with the same parameters, each of which starts from the
    weights that the previous one left, with empty moments."""
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


# -- losses -----------------------------------------------------------------------------------------------------------

LAYERS = ("Addmm", "Mm", "Linear", "Convolution")  # layers whose outputs are not log-probabilities
REGRESSIONS = ("MseLoss", "SmoothL1Loss", "HuberLoss")  # l1_loss has no operation of its own: see `handmade`


def weighted(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Report weighted means over micro-batches whose class weights add up to very different sums: an example counts
    more if its micro-batch has few that weigh much.

    Each batch may count equally on purpose, so it is never proved. Losses with other weights, numbers of targets or
    factors are of several tasks, or corrected by hand."""
    rows = []
    for number in trace.steps(optimizer):
        steps = [s for _, s in trace.at(optimizer, number)]
        losses = [[o for o in s.objectives or () if o.get("weight")] for s in steps]
        kinds = {(o["weights"], o["targets"], str(o.get("by"))) for each in losses for o in each}
        counted = all(len(each) == s.backwards > 1 for each, s in zip(losses, steps, strict=True))
        if counted and len(kinds) == 1 and all("None" not in kind for kind in kinds):
            sums = [o["weight"] for each in losses for o in each]
            rows.append((number, min(sums), max(sums)))
    uneven = [row for row in rows if row[2] >= UNEVEN * row[1]]
    if len(uneven) >= max(PATIENCE, 0.8 * len(trace.steps(optimizer))):
        number, low, high = uneven[0]
        what = (
            f"step {number}: class weights add up to {high / low:.2g} times as much in one micro-batch as in another, "
        )
        what += "and each is divided by its own sum: an example's weight depends on its micro-batch"
        cause = "divide the sum over all micro-batches by the sum of their weights: reduction='sum'"
        otherwise, decides = (
            "micro-batches that count equally on purpose",
            "whether a step should equal one large batch",
        )
        yield Finding("mean-of-means", what, cause, number, SUSPICIOUS, otherwise, decides, True)


UNEVEN = 4  # times


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
