"""Rules on gradients between backward and step: not zeroed, not finite, clipped or scaled at the wrong place."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from lockstep_trace import causes
from lockstep_trace.causes import few
from lockstep_trace.ranks import model_parallel, scales_of_clipping
from lockstep_trace.read import Rank, Step, Trace
from lockstep_trace.rules import premises
from lockstep_trace.rules.finding import PATIENCE, WRONG, Finding, weakened

UNSCALED_LIMIT = 100.0  # a limit this many times below the loss scale was not multiplied by it


def _first(trace: Trace, optimizer: int, of: Callable[[Step], bool], count: int = 1) -> tuple[Rank, Step] | None:
    """Return the first (rank, step) where `of` is true, if it is in at least `count` steps of that rank, else None."""
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
        cause = "call optimizer.zero_grad() once a step, for the optimizer that holds these parameters"
        what = f"step {step.step}: backward adds to the gradients of the step before (rank {rank.number})"
        yield Finding("not-zeroed", what, cause, step.step, WRONG)


def finite(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Report weights that are finite before a step, but neither after it nor at the end, as in no correct program. If
    weights stay finite in a step with nonfinite gradients, the script handled it."""
    row = _first(trace, optimizer, _breaks)
    if row is None:
        return
    rank, step = row
    bad = [n for n, v in step.grads.items() if not math.isfinite(v.square)]
    if bad:
        cause = "the step has to be skipped (GradScaler.step does it), or the loss and learning rate looked at"
        what = f"step {step.step}, rank {rank.number}: gradients that are not finite were applied: {few(bad)}"
    else:
        names = [n for n, v in step.weights.items() if not math.isfinite(v.square)]
        cause = "gradients are finite: the learning rate is too high, or the optimizer divides by zero (eps)"
        what = f"step {step.step}, rank {rank.number}: weights are not finite: {few(names)}"
    last = [s for _, s in sorted(rank.steps[optimizer].items()) if s.measured][-1]
    ends = any(not math.isfinite(v.square) for v in last.weights.values())
    otherwise = "the script went back to weights that it had kept"
    yield weakened(Finding("not-finite", what, cause, step.step), ends, otherwise, "how it deals with such steps")


def _breaks(step: Step) -> bool:
    broken = {n for n, v in step.weights.items() if not math.isfinite(v.square)}
    return any(n in broken and math.isfinite(v.square) for n, v in step.before.items())


def scaled(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Report steps with gradients of a scaled loss: no correct program makes them without the scaler, unless it
    unscales by hand, which modifies the gradients."""

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
        "gradients that nobody has divided by it"
    )
    cause = "call scaler.step(optimizer) and scaler.update() in place of optimizer.step()"
    proved = not step.layout.own
    otherwise = "an optimizer that divides by the scale in its own step"
    yield weakened(Finding("scaled-step", what, cause, step.step), proved, otherwise, "the optimizer's source")


def clipping(trace: Trace, optimizer: int) -> Iterator[Finding]:
    yield from _before_unscale(trace, optimizer)
    for number in trace.steps(optimizer):
        scales = scales_of_clipping(trace.at(optimizer, number))
        if scales and (own := causes.own_norms(scales)) is not None:
            what = f"step {number}: ranks clip the shards of the same tensors by different norms"
            yield Finding("clip-own-shards", what, own, number, WRONG)
            break
    yield from _by_hand(trace, optimizer)
    early = _first(trace, optimizer, lambda s: any(c.get("early") for c in s.clips or ()))
    if early is None:
        return
    rank, step = early
    cause = "clip once, after the last backward of the step"
    what = f"step {step.step}, rank {rank.number}: a backward adds to gradients that were clipped before"
    clips = [(c["how"], c["limit"], c.get("of")) for c in step.clips or ()]
    again = len(clips) > 1 and len(set(clips)) == 1
    if again:
        what += f"; they are clipped {len(clips)} times in the step, by the same limit"
    otherwise = "parts of a loss that are bounded one by one"
    yield weakened(
        Finding("clip-early", what, cause, step.step), again, otherwise, "whether the limit is for the whole gradient"
    )


def _by_hand(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Report shards of the same tensors that code of the script's own scales by different factors on the ranks, each
    rank all of its shards by one: no correct program changes the direction of a gradient along the bounds of shards."""
    rows = [(n, scales) for n in trace.steps(optimizer) if (scales := _scales_by_hand(trace, optimizer, n))]
    rows = [(n, scales) for n, scales in rows if causes.own_norms(scales) is not None]
    if len(rows) >= 2:
        number, scales = rows[0]
        what = f"step {number}: the script scales the shards of the same tensors by different factors on the ranks"
        yield Finding("clip-own-shards", what, str(causes.own_norms(scales)), number, WRONG)


def _scales_by_hand(trace: Trace, optimizer: int, number: int) -> dict[int, float]:
    """Return rank -> factor between the gradients after backward and those of the step; empty without one factor of
    all parameters, as where a rank's experts are scaled by themselves."""
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
    """Report an optimizer that steps in a hook inside of backward before the hook's gradient is added: each step reads
    the gradients of the backward before, which are those of other weights and examples."""
    row = _first(trace, optimizer, lambda s: f"stale gradient: {optimizer}" in (s.notes or ()), PATIENCE)
    if row is not None:
        what = "optimizers step inside of backward before it has added to any gradient of theirs: each step reads the "
        what += f"gradients of the backward before (rank {row[0].number})"
        cause = "step in register_post_accumulate_grad_hook: Tensor.register_hook runs before .grad is written"
        yield Finding("stale-gradient", what, cause, None, WRONG)


def _before_unscale(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Report a clipping limit far below the loss scale that is applied to scaled gradients, which makes them vanish.

    A correct program multiplies the limit by the scale, or unscales the gradients first."""

    def applies(step: Step) -> bool:
        return any(_small(c, step.scale) for c in step.clips or ())

    row = _first(trace, optimizer, applies, 2)
    if row is None:
        return
    rank, step = row
    clip = next(c for c in step.clips if _small(c, step.scale))
    cause = "call scaler.unscale_(optimizer) before clip_grad_norm_; the limit applies to scaled gradients else"
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
    """Report ranks that skip different steps. No correct program lets replicas or shards make different steps."""
    by_rank = {r.number: {s["step"] for s in r.skipped if s["opt"] == optimizer} for r in trace.ranks}
    counts = {n: len(each) for n, each in by_rank.items()}
    if trace.world < 2 or len(set(counts.values())) == 1 or model_parallel(trace, optimizer):
        return
    rank, least = max(counts, key=lambda n: counts[n]), min(counts, key=lambda n: counts[n])
    cause = "all ranks have to skip together: let the scaler see reduced gradients, or agree on found_inf over ranks"
    step = min(by_rank[rank] - by_rank[least], default=min(by_rank[rank]))
    what = (
        f"step {step}: rank {rank} skips a step for overflow, rank {least} does not (they skip {counts[rank]} and "
        f"{counts[least]} steps)"
    )
    proved = premises.declared(trace) or any(m.get("fsdp") for r in trace.ranks for m in r.models)
    otherwise = "ranks that train models of their own"
    yield weakened(Finding("skipped-some", what, cause, step), proved, otherwise, "whether ranks train one model")


ACCUMULATED = ("momentum_buffer", "momentum", "velocity", "exp_avg", "exp_avg_sq", "sum", "square_avg", "m", "v")


def shared(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Report an optimizer's state that is the memory of the gradients, which zero_grad clears between steps.

    Backward then adds the new gradient to it, and what the state has accumulated is gone. A right program that keeps
    momentum in the gradients does not clear them. A state under another name may be one to look at."""
    rank = next((r for r in trace.ranks if r.steps.get(optimizer)), None)
    steps = [] if rank is None else [s for _, s in sorted(rank.steps[optimizer].items()) if s.shared_state]
    if len(steps) < PATIENCE:
        return
    name = next((n for n in steps[0].shared_state if n in ACCUMULATED), steps[0].shared_state[0])
    what = (
        f"step {steps[0].step}: the state {name} of {steps[0].layout.optimizer} is the memory of the gradients, which"
    )
    what += f" zero_grad clears before backward, as in {len(steps)} steps: nothing of earlier steps is left in it"
    cause = "clone the gradient where the state begins: state[name] = grad.clone()"
    otherwise, decides = "a state that is only looked at", "whether a later step reads it"
    yield weakened(Finding("state-cleared", what, cause, steps[0].step), name in ACCUMULATED, otherwise, decides)
