"""Rules on gradients between backward and step: not zeroed, not finite, clipped or scaled in the wrong place."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from lockstep_trace import causes
from lockstep_trace.causes import few
from lockstep_trace.ranks import model_parallel, scales_of_clipping
from lockstep_trace.read import Rank, Step, Trace
from lockstep_trace.rules import premises
from lockstep_trace.rules.finding import PATIENCE, SUSPICIOUS, WRONG, Finding, weakened

UNSCALED_LIMIT = 100.0  # a limit this many times below the loss scale was not multiplied by it


def _first(trace: Trace, optimizer: int, of: Callable[[Step], bool], count: int = 1) -> tuple[Rank, Step] | None:
    for rank in trace.ranks:
        steps = [s for _, s in sorted(rank.steps.get(optimizer, {}).items()) if of(s)]
        if len(steps) >= count:
            return rank, steps[0]
    return None


def zeroed(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Report gradients of the previous step that backward adds to: the same, unmodified, nonzero tensors.

    No correct program applies a gradient twice; one that decays gradients by hand modifies them."""
    if (row := _first(trace, optimizer, lambda s: f"not zeroed: {optimizer}" in (s.notes or ()), 2)) is not None:
        rank, step = row
        cause = "call zero_grad() of the optimizer that holds these parameters once a step"
        what = f"step {step.step}: backward adds to the gradients of the previous step (rank {rank.number})"
        yield Finding("not-zeroed", what, cause, step.step, WRONG)


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
    """Report shards of the same tensors that the script's own code scales by a different factor on each rank.

    No correct program changes the direction of a gradient along the boundaries of shards."""
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
    """Report a clipping limit far below the loss scale that is applied to scaled gradients and nearly erases them.

    A correct program multiplies the limit by the scale, or unscales the gradients first."""

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


ACCUMULATED = ("momentum_buffer", "momentum", "velocity", "exp_avg", "exp_avg_sq", "sum", "square_avg", "m", "v")


def shared(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Report optimizer state that shares memory with the gradients, so that zero_grad clears it between steps.

    Backward then adds the new gradient to zeros, and the state loses what it accumulated. A correct program that keeps
    momentum in the gradients does not clear them. State under an unknown name may be only for inspection."""
    rank = next((r for r in trace.ranks if r.steps.get(optimizer)), None)
    steps = [] if rank is None else [s for _, s in sorted(rank.steps[optimizer].items()) if s.shared_state]
    if len(steps) < PATIENCE:
        return
    name = next((n for n in steps[0].shared_state if n in ACCUMULATED), steps[0].shared_state[0])
    what = (
        f"step {steps[0].step}: the state {name} of {steps[0].layout.optimizer} shares memory with the gradients, which"
    )
    what += f" zero_grad clears before backward, as in {len(steps)} steps: it keeps nothing of earlier steps"
    cause = "clone the gradient when creating the state: state[name] = grad.clone()"
    otherwise, decides = "state that is only inspected", "whether a later step reads it"
    yield weakened(Finding("state-cleared", what, cause, steps[0].step), name in ACCUMULATED, otherwise, decides)


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
