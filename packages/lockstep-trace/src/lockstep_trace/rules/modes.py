"""Rules on modes: dropout and batch norm active during evaluation or inactive during training; stale autocast casts;
packed rows without a document mask.

Optimizers that are recreated with empty moments may be meant, so that finding is never `wrong`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from lockstep_trace.causes import few
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
            proved = on and _left(rank, optimizer, off)
            yield weakened(finding, proved, otherwise, "whether the script should call model.train() here")
            break


def _left(rank: Rank, optimizer: int, off: list[int]) -> bool:
    steps = sorted(rank.steps[optimizer].items())
    modes = {n: s.mode or {} for n, s in steps}
    on = [n for n, _ in steps if n < off[0]]
    whole = all(modes[n].get("root") for n in on) and not any(modes[n].get("root", True) for n in off)
    evaluations = [r["steps"][optimizer] for r in rank.evaluations if r.get("trained") and len(r["steps"]) > optimizer]
    first = min(evaluations, default=None)
    return bool(on) and whole and off == [n for n, _ in steps if n >= off[0]] and first == off[0]


def norms(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Report batch norms with frozen weights whose running statistics still follow the batches.

    Statistics may adapt under frozen weights on purpose. The finding is proved if the script put these batch norms, or
    a part of the model that contains them, into evaluation mode, and a later `train()` of the model undid that, either
    before any forward pass or after training steps in evaluation mode. A program that lets them adapt from some step on
    calls `train()` on the batch norms or on the part that it froze."""
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
