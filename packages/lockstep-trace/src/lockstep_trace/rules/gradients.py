"""Rules on gradients between backward and step: not zeroed, not finite, clipped or scaled in the wrong place.

Rules on gradients that no step uses, and on steps that use the same gradients again.

Evidence: `tracer/gradient_history.py`, and the fingerprints of gradients.
"""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Callable, Iterator

from lockstep_trace import causes
from lockstep_trace.causes import few
from lockstep_trace.ranks import model_parallel, scales_of_clipping
from lockstep_trace.read import Rank, Step, Trace
from lockstep_trace.rules import PATIENCE, SUSPICIOUS, WRONG, Finding, premises, weakened

BY_HAND = "updates by hand"  # `tracer/lifetimes.py`
UNSCALED_LIMIT = 100.0  # a limit this many times below the loss scale was not multiplied by it


def _first(trace: Trace, optimizer: int, of: Callable[[Step], bool], count: int = 1) -> tuple[Rank, Step] | None:
    for rank in trace.ranks:
        steps = [s for _, s in sorted(rank.steps.get(optimizer, {}).items()) if of(s)]
        if len(steps) >= count:
            return rank, steps[0]
    return None


def zeroed(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Report gradients of the previous step that backward adds to: the same, unmodified, nonzero tensors.

    No correct program applies a gradient twice; one that decays gradients by hand modifies them. Updates by hand may
    use the sum of all gradients, so of them it is only suspected."""
    if (row := _first(trace, optimizer, lambda s: f"not zeroed: {optimizer}" in (s.notes or ()), 2)) is not None:
        rank, step = row
        cause = "call zero_grad() of the optimizer that holds these parameters once a step"
        what = f"step {step.step}: backward adds to the gradients of the previous step (rank {rank.number})"
        finding, by_hand = Finding("not-zeroed", what, cause, step.step), step.layout.optimizer == BY_HAND
        yield weakened(finding, not by_hand, "a sum of all gradients (dual averaging)", "what updates use")


def finite(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Report weights that are finite before a step, but neither after it nor at the end: no correct program continues
    so.

    If weights stay finite in a step with nonfinite gradients, the script handled them."""
    row = _first(trace, optimizer, _breaks)
    if row is None:
        return
    rank, step = row
    bad = [n for n, v in step.grads.items() if not math.isfinite(v.square)]
    if bad:
        cause = "skip such steps (GradScaler.step does), or check the loss and the learning rate"
        what = f"step {step.step}, rank {rank.number}: nonfinite gradients were applied: {few(bad)}"
    else:
        names = [n for n, v in step.weights.items() if not math.isfinite(v.square)]
        cause = "gradients are finite: the learning rate is too high, or the optimizer divides by zero (eps)"
        what = f"step {step.step}, rank {rank.number}: weights are not finite: {few(names)}"
    last = [s for _, s in sorted(rank.steps[optimizer].items()) if s.measured][-1]
    ends = any(not math.isfinite(v.square) for v in last.weights.values())
    otherwise = "a script that later restores weights it kept"
    yield weakened(Finding("not-finite", what, cause, step.step), ends, otherwise, "how the script handles such steps")


def _breaks(step: Step) -> bool:
    broken = {n for n, v in step.weights.items() if not math.isfinite(v.square)}
    return any(n in broken and math.isfinite(v.square) for n, v in step.before.items())


def scaled(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Report optimizer steps with gradients of a scaled loss that nothing unscaled.

    No correct program takes such steps without the scaler, unless it unscales by hand, which modifies the gradients."""

    def applies(step: Step) -> bool:
        every = all(scale not in (None, 1.0) for _, scale in step.losses or [(None, None)])
        return every and not step.by_scaler and not step.unscaled and not step.rewritten and not step.grad_scale

    row = _first(trace, optimizer, applies, PATIENCE)
    if row is None or any(r.skipped for r in trace.ranks):
        return
    rank, step = row
    scale = next(scale for _, scale in step.losses)
    what = (
        f"step {step.step}, rank {rank.number}: the loss is multiplied by {scale:g}, and the optimizer steps with "
        "gradients that nothing has divided by it"
    )
    cause = "call scaler.step(optimizer) and scaler.update() in place of optimizer.step()"
    proved = not step.layout.own
    otherwise = "an optimizer whose step divides by the scale"
    yield weakened(Finding("scaled-step", what, cause, step.step), proved, otherwise, "the optimizer's source")


def clipping(trace: Trace, optimizer: int) -> Iterator[Finding]:
    yield from _before_unscale(trace, optimizer)
    for number in trace.steps(optimizer):
        scales = scales_of_clipping(trace.at(optimizer, number))
        if scales and (own := causes.own_norms(scales)) is not None:
            what = f"step {number}: ranks clip shards of the same tensors by different norms"
            yield Finding("clip-own-shards", what, own, number, WRONG)
            break
    yield from _by_hand(trace, optimizer)
    early = _first(trace, optimizer, lambda s: any(c.get("early") for c in s.clips or ()))
    if early is None:
        return
    rank, step = early
    cause = "clip once, after the last backward of the step"
    what = f"step {step.step}, rank {rank.number}: backward adds to gradients that were already clipped"
    clips = [(c["how"], c["limit"], c.get("of")) for c in step.clips or ()]
    again = len(clips) > 1 and len(set(clips)) == 1
    if again:
        what += f"; the step clips them {len(clips)} times, at the same limit"
    otherwise = "parts of a loss that are clipped separately on purpose"
    yield weakened(
        Finding("clip-early", what, cause, step.step),
        again,
        otherwise,
        "whether the limit applies to the whole gradient",
    )


def _by_hand(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Report shards of the same tensors that the script's own code scales by a different factor on each rank."""
    rows = [(n, scales) for n in trace.steps(optimizer) if (scales := _scales_by_hand(trace, optimizer, n))]
    rows = [(n, scales) for n, scales in rows if causes.own_norms(scales) is not None]
    if len(rows) >= 2:
        number, scales = rows[0]
        what = f"step {number}: the script scales shards of the same tensors by a different factor on each rank"
        yield Finding("clip-own-shards", what, str(causes.own_norms(scales)), number, WRONG)


def _scales_by_hand(trace: Trace, optimizer: int, number: int) -> dict[int, float]:
    scales: dict[int, float] = {}
    for rank, step in trace.at(optimizer, number):
        sharded = [p.name for p in step.layout.parameters if not p.whole and p.name in step.arrived]
        pairs = [(v.square, step.grads[n].square) for n, v in step.arrived.items() if v.square > 0]
        factors = [(after / before) ** 0.5 for before, after in pairs]
        if step.clips or len(sharded) < 2 or not factors or max(factors) > 1.001 * min(factors):
            return {}
        scales[rank.number] = sum(factors) / len(factors)
    return scales if len(scales) > 1 else {}


def stale(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Report an optimizer that steps in a backward hook before the hook's gradient is accumulated.

    Each step then reads the gradients of the previous backward, which belong to other weights and examples."""
    row = _first(trace, optimizer, lambda s: f"stale gradient: {optimizer}" in (s.notes or ()), PATIENCE)
    if row is not None:
        what = "optimizers step inside of backward before it has accumulated their gradients: each step reads the "
        what += f"gradients of the previous backward (rank {row[0].number})"
        cause = "step in register_post_accumulate_grad_hook: Tensor.register_hook runs before .grad is written"
        yield Finding("stale-gradient", what, cause, None, WRONG)


def _before_unscale(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Report a clipping limit far below the loss scale that is applied to scaled gradients and nearly erases them."""

    def applies(step: Step) -> bool:
        return any(_small(c, step.scale) for c in step.clips or ())

    row = _first(trace, optimizer, applies, 2)
    if row is None:
        return
    rank, step = row
    clip = next(c for c in step.clips if _small(c, step.scale))
    cause = "call scaler.unscale_(optimizer) before clip_grad_norm_; otherwise the limit applies to scaled gradients"
    what = (
        f"step {step.step}, rank {rank.number}: gradients are clipped at {clip['limit']:g} while they are scaled by "
        f"{step.scale:g}"
    )
    yield Finding("clip-before-unscale", what, cause, step.step, WRONG)


def _small(clip: dict[str, object], scale: float | None) -> bool:
    limit = clip.get("limit")
    known = bool(clip.get("scaled")) and not clip.get("rewritten") and isinstance(limit, float) and scale is not None
    return known and math.isfinite(limit) and limit * UNSCALED_LIMIT <= scale  # type: ignore[arg-type, operator]


def overflow(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Report ranks that skip different steps: no correct program lets replicas or shards take different steps."""
    by_rank = {r.number: {s["step"] for s in r.skipped if s["opt"] == optimizer} for r in trace.ranks}
    counts = {n: len(each) for n, each in by_rank.items()}
    if trace.world < 2 or len(set(counts.values())) == 1 or model_parallel(trace, optimizer):
        return
    rank, least = max(counts, key=lambda n: counts[n]), min(counts, key=lambda n: counts[n])
    cause = "all ranks must skip together: let the scaler see reduced gradients, or all-reduce found_inf"
    step = min(by_rank[rank] - by_rank[least], default=min(by_rank[rank]))
    what = (
        f"step {step}: rank {rank} skips the step because of overflow, rank {least} does not (they skip "
        f"{counts[rank]} and "
        f"{counts[least]} steps in all)"
    )
    proved = premises.declared(trace) or any(m.get("fsdp") for r in trace.ranks for m in r.models)
    otherwise = "ranks that train independent models"
    yield weakened(Finding("skipped-some", what, cause, step), proved, otherwise, "whether ranks train one model")


def leaked(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Report steps whose gradient includes one that the loss of another optimizer left.

    A generator's loss leaves gradients in its discriminator, and an actor's in its critic. Both losses may train a part
    on purpose: by an exact minimax, or a reversed gradient."""
    for rank in trace.ranks[:1]:
        steps = [s for _, s in sorted(rank.steps.get(optimizer, {}).items())]
        rows = [(s, n) for s in steps for n in s.notes or () if n.startswith(f"leak {optimizer} ")]
        if len(rows) < PATIENCE:
            continue
        step, other = rows[0][0], rows[0][1].split()[2]
        what = f"step {step.step} of optimizer {optimizer}: its gradient includes that of another loss, by which "
        what += f"optimizer {other} has stepped before and which was not cleared; so in {len(rows)} steps"
        cause = f"call zero_grad() of optimizer {optimizer} before the backward of its own loss"
        otherwise, decides = "a part that both losses are to train", "which loss is to train which part"
        yield Finding("gradient-left", what, cause, step.step, SUSPICIOUS, otherwise, decides)


def never_finite(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Report a run that ends without further steps because its gradients stay nonfinite, though losses and weights are
    finite.

    The script skips such steps without clearing the gradients, so each backward adds to NaN. It is proved if the script
    clips in these backwards, and so decides by the norm; otherwise it may need gradients of inputs only."""
    rank = trace.ranks[0]
    steps = [s for _, s in sorted(rank.steps.get(optimizer, {}).items())]
    row = (rank.ended or {}).get("nonfinite")
    if not row or not steps or not rank.ended or optimizer != trace.optimizers[0]:
        return
    count, usual = rank.ended["backwards"], max(s.backwards or 1 for s in steps)
    gradients, weights, losses, clips = row
    if count >= 4 * usual and gradients and not weights and losses >= 4:
        what = f"after step {steps[-1].step} the last {count} backwards have no step: the gradients of {gradients}"
        what += " parameters are not finite, though losses and weights are"
        cause = "call zero_grad() also where a step is skipped: a NaN that stays in .grad is in every later sum"
        finding = Finding("gradient-not-cleared", what, cause, steps[-1].step)
        decides = "what reads these gradients"
        yield weakened(finding, clips >= count // 2, "gradients that are not used", decides)


MOST = 0.8  # share of steps
MANY = 4  # micro-batches


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

    This may be intended, with a learning rate that accounts for it, and Adam ignores a constant factor: without a
    loader, which tells micro-batches from tasks, it counts for SGD and many equal batches, if examples come equally
    often and change their places in a step, as those of tasks and domains do not. In transformers' Trainer it is a
    fault: a user who returns a mean expects Trainer to divide it, as documented, but Trainer divides no loss of a
    function that takes `num_items_in_batch`."""
    rank = next((r for r in trace.ranks if r.steps.get(optimizer)), None)
    if rank is None:
        return
    steps = [s for _, s in sorted(rank.steps[optimizer].items())]
    rows = [s for s in steps if (s.backwards or 0) > 1 and s.means == s.backwards and not (s.cleared or s.rewritten)]
    trainer = any(
        "own loss of a Trainer" in (s.notes or ()) for s in steps
    )  # Trainer fetches the batches of a step beforehand
    alike = _one_pool(steps)
    rows = [s for s in rows if trainer or (_distinct_examples(s) and _following(s)) or (alike and _alike(s))]
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
    inputs = [hashes for _, _, hashes in premises.fed(step)]
    return [[h for each in inputs[a:b] for h in each] for a, b in itertools.pairwise([0, *ends])]


def _alike(step: Step) -> bool:
    """Return whether many equal batches that no loader made have one kind of loss, and a factor matters."""
    kinds = {o["kind"] for o in step.objectives or ()}
    alone = not any(name for name, _ in step.fed or ()) and len({*(step.micro or ())}) == len(kinds) == 1
    return alone and _distinct_examples(step) and step.backwards >= MANY and step.layout.optimizer == "SGD"


def _one_pool(steps: list[Step]) -> bool:
    """Return whether examples come equally often, more than once, and at several places of a step."""
    places = collections.defaultdict[str, list[int]](list)
    for step in steps:
        for place, part in enumerate(_parts(step)):
            for each in part:
                places[each].append(place)
    counts = {len(p) for p in places.values()}
    moves = sum(len({*p}) > 1 for p in places.values())
    return bool(counts) and max(counts) > 1 and max(counts) - min(counts) < 2 and moves > 0.4 * len(places)


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


def shared(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Report momentum that shares memory with the gradients, so that zero_grad clears it between steps.

    Backward then adds the new gradient to zeros. A correct program that keeps momentum in the gradients does not clear
    them."""
    if (row := _first(trace, optimizer, lambda s: "state cleared" in (s.notes or ()), PATIENCE)) is not None:
        rank, step = row
        what = f"step {step.step}: momentum of {step.layout.optimizer} shares memory with the gradients, which "
        what += f"zero_grad clears before backward (rank {rank.number}): it keeps nothing of earlier steps"
        cause = "clone the gradient when creating the state: grad.clone()"
        yield Finding("state-cleared", what, cause, step.step, WRONG)
