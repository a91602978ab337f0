"""Detects faults in a single trace: contradictions in its records.

In: a trace. Out: `Finding`s, proved ones first. Consequences of a finding are not reported: replicas whose gradients
are not reduced also diverge. Each rule in `rules/` states why no correct program violates it; they are listed in
docs/reference/trace-findings.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from lockstep_trace.read import Trace
from lockstep_trace.rules import (
    LEVELS,
    SUSPICIOUS,
    WRONG,
    Finding,
    checks,
    data,
    gradients,
    inputs,
    modes,
    observed,
    parameters,
    replicas,
    schedules,
)

__all__ = ["LIKELY", "Finding", "findings", "likely", "proved"]

LOOKS: tuple[Callable[[Trace, int], Iterable[Finding]], ...] = (
    replicas.equal_shards,
    replicas.replicas,
    replicas.same_examples,
    replicas.reduced_late,
    replicas.same_noise,
    parameters.ties,
    parameters.in_no_optimizer,
    parameters.unregistered,
    modes.casts,
    modes.packed,
    modes.norms,
    modes.functions,
    modes.one_class,
    modes.contrastive,
    parameters.dtypes,
    observed.notes,
    observed.settings,
    schedules.direction,
    inputs.tokens,
    parameters.decay,
    parameters.still,
    parameters.frozen_moves,
    parameters.in_two,
    parameters.one_memory,
    inputs.made_in_forward,
    inputs.alike,
    inputs.over_examples,
    modes.follows,
    inputs.seeded_again,
    inputs.seeded_each_step,
    inputs.restarted,
    inputs.overlapping,
    modes.ratios,
    gradients.zeroed,
    gradients.stale,
    gradients.scaled,
    gradients.finite,
    gradients.leaked,
    gradients.never_finite,
    gradients.clipping,
    gradients.shared,
    inputs.changing,
    gradients.cleared,
    gradients.undivided,
    gradients.divided_twice,
    gradients.repeated,
    gradients.clipped,
    gradients.of_nothing,
    gradients.doubled,
    gradients.overflow,
    schedules.after_load,
    schedules.anew,
    schedules.resumed,
    schedules.elsewhere,
    schedules.often,
    schedules.never,
    schedules.unit,
    schedules.rising,
    schedules.overwritten,
    schedules.unread,
    parameters.rate_zero,
    schedules.vanishing,
    modes.anew,
    modes.means,
    modes.weighted,
    checks.checked,
)
OF_ALL: tuple[Callable[[Trace], Iterable[Finding]], ...] = (
    replicas.of_one_rank,
    modes.evaluated,
    modes.trained,
    parameters.self_loads,
    parameters.empty_loads,
    inputs.repeated,
    inputs.adapters,
    inputs.in_evaluation,
    inputs.scales,
    schedules.wrong_way,
    data.one_batch,
    data.whole_stream,
    data.unreached,
    data.orders,
    modes.without_statistics,
    data.same_order,
    data.counts,
    data.trained_on,
    data.evaluations,
    data.workers,
    data.flags,
    observed.facts,
    observed.split_apart,
    observed.statements,
)
# Suspicions that the default output lists: no correct script of the held-out sets raised the code, and its other
# explanations are rare or known to the author. Not codes of ordinary styles: losses that share parts, one seed on all
# ranks, Monte Carlo dropout, noisy teachers, weights that are clipped, pruned or restored.
LIKELY = {
    "accumulation-undivided",
    "adapter-frozen",
    "average-follows",
    "decay-of-vectors",
    "evaluation-part",
    "examples-as-time",
    "flag-shared",
    "gradient-left",
    "gradient-not-cleared",
    "gradients-cleared",
    "inputs-on-another-scale",
    "loaded-nothing",
    "norm-not-frozen",
    "not-zeroed",
    "one-class-batches",
    "one-layer",
    "one-rank-steps",
    "padding-seen",
    "pairs-change",
    "parts-overlap",
    "rate-vanishes",
    "rate-zero",
    "ratio-of-one",
    "reduced-after-step",
    "rows-unreached",
    "same-workers",
    "schedule-anew",
    "scheduler-direction",
    "setting-unusual",
    "split-by-rank",
    "state-not-loaded",
    "unchanged",
    "unregistered",
    "whole-stream",
}
LIKELY |= {code for code, _, _, otherwise, _ in observed.KINDS.values() if otherwise}
LIKELY -= {"loss-of-logits", "loss-of-probabilities"}
FOLLOWS = {  # finding -> its consequences, which are not reported beside it
    "stale-optimizer": ("in-no-optimizer", "no-gradient", "all-zero"),
    "frozen-optimizer": ("in-no-optimizer", "no-gradient", "all-zero"),
    "untied": ("in-no-optimizer", "no-gradient"),
    "one-batch": ("same-order", "seen-part"),
    "same-examples": ("seen-often", "seen-twice", "replicas-start", "not-reduced"),
    "stale-gradient": ("not-zeroed", "step-repeated"),
    "not-zeroed": ("not-finite", "check-gradient"),
    "not-reduced": ("check-gradient",),
    "reduced-after-step": ("not-reduced",),
    "unchanged": ("updates-lost",),
    "layers-in-forward": ("unregistered",),
    "equal-shards": ("same-examples",),
    "trained-on": ("optimizer-made-anew",),
    "optimizer-made-anew": ("state-not-loaded",),
    "check-tokens": ("check-one-batch",),
    "check-accumulation": ("accumulation-undivided",),
    "divided-twice": ("check-accumulation", "check-gradient"),
    "answer-in-input": ("labels-not-shifted",),
    "padding-seen": ("padding-used",),
    "padding-picked": ("padding-used",),
    "padding-learned": ("padding-used",),
    "mask-inverted": ("padding-used",),
}


def findings(trace: Trace) -> list[Finding]:
    """Return all findings of a trace, level `wrong` first."""
    rows: list[Finding] = []
    for optimizer in trace.optimizers:
        unused = parameters.frozen(trace, optimizer) or parameters.stale(trace, optimizer)
        if unused is not None:
            rows.append(unused)
            continue
        for look in LOOKS:
            rows += look(trace, optimizer)
    skipped = next((each for each in rows if each.code == "skipped-some"), None)
    if skipped is not None:  # step numbers differ between ranks from then on
        rows = [e for e in rows if e is skipped or e.step is None or e.step < (skipped.step or 0)]
    for look_at_all in OF_ALL:
        rows += look_at_all(trace)
    rows = list(dict.fromkeys(rows))
    # a suspected finding does not hide a proved one
    follow = {(code, level) for each in rows for code in FOLLOWS.get(each.code, ()) for level in _at_most(each.level)}
    rows = [each for each in rows if (each.code, each.level) not in follow]
    return sorted(rows, key=lambda each: LEVELS.index(each.level))


def _at_most(level: str) -> Sequence[str]:
    return LEVELS[LEVELS.index(level) :]


def proved(rows: Sequence[Finding]) -> list[Finding]:
    """Return the findings of level `wrong`, which are printed by default."""
    return [each for each in rows if each.level == WRONG]


def likely(rows: Sequence[Finding]) -> list[Finding]:
    """Return the suspicions that are printed by default: those of `LIKELY`, or marked by their rule."""
    return [each for each in rows if each.level == SUSPICIOUS and (each.likely or each.code in LIKELY)]
