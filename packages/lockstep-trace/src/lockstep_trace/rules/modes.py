"""Modes: dropout and batch norm that train while a model is evaluated, or are off while it trains; casts that are older
than the weights; packed rows whose documents see each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lockstep_trace.causes import few
from lockstep_trace.read import Rank, Trace
from lockstep_trace.rules import epochs
from lockstep_trace.rules.finding import WRONG, Finding, weakened


def evaluated(trace: Trace) -> Iterator[Finding]:
    """A trained model whose dropout, or batch norm, is active while it is evaluated. A pass without gradients may have
    other ends (statistics of batch norm, labels for training, Monte Carlo dropout, a cache of outputs), so that it is
    proved only of a whole pass over a loader whose examples are never trained on, once each, and are never evaluated
    in evaluation mode."""
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
            otherwise = "statistics of batch norm, labels or outputs for training, dropout that is sampled on purpose"
            finding = Finding("evaluated-in-training-mode", what, cause)
            proved = (_held_out(rank, record) or _again(rank, record)) and not calm & set(record["examples"])
            yield weakened(finding, proved, otherwise, "whether what it returns is a score")
            return


def _held_out(rank: Rank, record: Mapping[str, Any]) -> bool:
    """Whether a pass without gradients is a whole one over a loader of its own, each example once, never trained on."""
    name, hashes = record["loader"], record["examples"]
    whole = name is not None and name in {r["loader"] for r in rank.passed}
    trained = {h for steps in rank.steps.values() for s in steps.values() for h in s.examples or ()}
    mode = record.get("mode") or {}
    every = all(on == count for on, count in (mode.get("dropout", [0, 0]), mode.get("norms", [0, 0])))
    passes = [r for r in rank.evaluations if r["loader"] == name and r.get("trained")]
    once = len(hashes) == len(set(hashes)) and len(passes) == 1
    separate = name not in epochs.examples_of_passes(rank)
    return whole and once and every and separate and not trained & set(hashes)


def _again(rank: Rank, record: Mapping[str, Any]) -> bool:
    """Whether the same examples, never trained on and once each, go through the model with its dropout between two
    stretches of training and after the second one: that is an evaluation, by whatever loop."""
    hashes, mode = record["examples"], record.get("mode") or {}
    dropout, norms = mode.get("dropout", [0, 0]), mode.get("norms", [0, 0])
    alike = [r for r in rank.evaluations if r["examples"] == hashes and r.get("trained") and not r.get("between")]
    stretches = {tuple(r["steps"]) for r in alike}
    hashed = {h for steps in rank.steps.values() for s in steps.values() for h in s.examples or ()}
    once = len(hashes) == len(set(hashes)) and len(stretches) == len(alike) > 1
    every = dropout[0] == dropout[1] > 0 and norms[0] == norms[1]
    return once and every and not hashed & set(hashes)


def trained(trace: Trace) -> Iterator[Finding]:
    """A model that trains with dropout, or batch norm, off. It may be meant (a frozen body, a last phase); it is proved
    where the whole model trains in training mode, is evaluated for the first time, and never trains so again."""
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
            parts = "dropout and batch norm are off" if dropout else "batch norm keeps its statistics"
            cause = "call model.train() after each evaluation" if on else f"call model.train() before training: {parts}"
            what = f"from step {off[0]} on the model trains in evaluation mode ({parts})"
            otherwise = "a frozen part, or training without dropout on purpose"
            finding = Finding("trained-in-evaluation-mode", what, cause, off[0])
            proved = on and _left(rank, optimizer, off)
            yield weakened(finding, proved, otherwise, "whether model.train() is meant to be called here")
            break


def _left(rank: Rank, optimizer: int, off: list[int]) -> bool:
    """Whether all of a model was in training mode until its first evaluation, which left it in the other."""
    steps = sorted(rank.steps[optimizer].items())
    modes = {n: s.mode or {} for n, s in steps}
    on = [n for n, _ in steps if n < off[0]]
    whole = all(modes[n].get("root") for n in on) and not any(modes[n].get("root", True) for n in off)
    evaluations = [r["steps"][optimizer] for r in rank.evaluations if r.get("trained") and len(r["steps"]) > optimizer]
    first = min(evaluations, default=None)
    return bool(on) and whole and off == [n for n, _ in steps if n >= off[0]] and first == off[0]


def casts(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Weights whose casts are older than their last update: autocast keeps the cast of each weight until its outermost
    region ends. No right program makes a step inside of a region and goes on in it, unless it clears the cache."""
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
            f"from step {steps[0].step} on the forward does not see the updates: autocast ({steps[0].autocast}) keeps "
            f"the casts of {few(stale)} and others that it made before, in {len(steps)} steps of one region"
        )
        cause = "put `with torch.autocast(...)` around the forward and the loss of each step, not around all steps"
        yield Finding("stale-cast", what, cause, steps[0].step, WRONG)


def packed(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Rows of several documents, by positions that begin anew, in which attention has no mask but a causal one: tokens
    of different documents with the same position see each other. No right program numbers tokens so."""
    rank = next((r for r in trace.ranks if r.steps.get(optimizer)), None)
    if rank is None:
        return
    steps = [s for _, s in sorted(rank.steps[optimizer].items()) if s.unmasked and s.restarts]
    if steps:
        what = (
            f"step {steps[0].step}: position_ids begin anew in {steps[0].restarts} rows, and attention is causal over "
            "the whole row: documents of a row see those before them"
        )
        cause = (
            "pass use_cache=False, or an attention implementation that cuts rows at positions, or a block-diagonal mask"
        )
        yield Finding("packed-rows", what, cause, steps[0].step, WRONG)
