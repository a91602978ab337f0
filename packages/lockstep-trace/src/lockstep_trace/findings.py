"""Faults that one run shows by itself: invariants of training that a trace breaks.

In: a trace. Out: `Finding`s, the first cause first. What follows from a finding is not another one: replicas whose
gradients are not reduced also come apart, and that is not said.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from lockstep_trace import causes, epochs
from lockstep_trace.causes import few
from lockstep_trace.losses import losses_of
from lockstep_trace.merge import Whole, merged, merged_buffers, merged_start
from lockstep_trace.ranks import data_ranks, model_parallel, pipelined, scales_of_clipping
from lockstep_trace.read import Rank, Step, Trace, Value

PATIENCE = 3  # steps in which something is so before it is a finding


@dataclass(frozen=True)
class Finding:
    """`code`: of the kind; `what`: what was seen, with step, rank and names; `cause`: what is likely wrong and what to
    change."""

    code: str
    what: str
    cause: str
    step: int | None = None


def findings(trace: Trace) -> list[Finding]:
    """All of a trace."""
    all_findings: list[Finding] = []
    for optimizer in trace.optimizers:
        if stale := _stale(trace, optimizer):
            all_findings.append(stale)
            continue
        for look in LOOKS:
            all_findings += look(trace, optimizer)
    if any(each.code in ("stale-optimizer", "untied") for each in all_findings):  # what follows from it
        all_findings = [each for each in all_findings if each.code not in ("in-no-optimizer", "no-gradient")]
    skipped = next((each for each in all_findings if each.code == "skipped-some"), None)
    if skipped is not None:  # from there on ranks count other steps
        all_findings = [e for e in all_findings if e is skipped or e.step is None or e.step < (skipped.step or 0)]
    all_findings += _modes(trace)
    all_findings += [Finding(code, what, cause, step) for code, what, cause, step in epochs.findings(trace)]
    return list(dict.fromkeys(all_findings))


def _first(trace: Trace, optimizer: int, of: Callable[[Step], bool], count: int = 1) -> tuple[int, int] | None:
    """(rank, step) of the first step in which it holds, where it does in at least `count` steps of that rank."""
    for rank in trace.ranks:
        steps = [n for n, s in sorted(rank.steps.get(optimizer, {}).items()) if of(s)]
        if len(steps) >= count:
            return rank.number, steps[0]
    return None


# -- replicas --------------------------------------------------------------------------------------------------------


def _replicas(trace: Trace, optimizer: int) -> list[Finding]:
    """Where ranks that should be alike come apart: the first step, and the first thing in it."""
    if trace.world < 2 or pipelined(trace, optimizer):
        return []
    start = {n: w for n, w in merged_start(trace, optimizer).items() if w.differences}
    if start:
        rank, cause = (
            _rank_of(start),
            "seed every rank alike before the model is made, or wrap it in DDP, which sends weights",
        )
        what = f"rank {rank} starts from other weights than rank 0: {few(list(start))}"
        return [Finding("replicas-start", what, cause, 0)]
    for step in trace.steps(optimizer):
        records = trace.at(optimizer, step)
        if all(s.measured for _, s in records) and (finding := _replicas_at(trace, optimizer, step)):
            return [finding]
    return []


def _replicas_at(trace: Trace, optimizer: int, step: int) -> Finding | None:
    def differing_replicas(of: Callable[[Step], Mapping[str, Value]]) -> dict[str, Whole]:
        return {n: w for n, w in merged(trace, optimizer, step, of).items() if w.differences}

    if differing := differing_replicas(lambda s: s.before):
        cause = (
            "something beside the optimizer writes to weights on some ranks only (loading, averaging, a branch by rank)"
        )
        what = f"before step {step} rank {_rank_of(differing)} has other weights: {few(list(differing))}"
        return Finding("replicas-weights", what, cause, step)
    if differing := differing_replicas(lambda s: s.unclipped):
        if not differing_replicas(lambda s: s.grads):
            cause = "clip after gradients are reduced: each rank scales by the norm of its own gradient here"
            what = f"step {step}: gradients are clipped before they are reduced over ranks"
            return Finding("clip-before-reduce", what, cause, step)
        return _not_reduced(
            trace, optimizer, step, list(differing), max(_largest(w.differences) for w in differing.values())
        )
    if (options := _unequal_options(trace.at(optimizer, step))) is not None:
        cause = "every rank has to use the same learning rate and options"
        return Finding("replicas-options", f"step {step}: {options}", cause, step)
    if differing := differing_replicas(lambda s: s.grads):
        cause = "each rank clips by a norm or a limit of its own: clip reduced gradients, by one norm and one limit"
        what = f"step {step}: after clipping ranks have other gradients: {few(list(differing))}"
        return Finding("replicas-clipping", what, cause, step)
    if differing := _differing_buffers(trace, optimizer, step):
        cause = "nobody keeps these buffers alike: DDP sends rank 0's, FSDP and a loop by hand do not; reduce them"
        what = f"after step {step} rank {_rank_of(differing)} has other buffers: {few(list(differing))}"
        return Finding("replicas-buffers", what, cause, step)
    if (moments := _differing_moments(trace, optimizer, step)) is not None:
        state, names = moments
        cause = "gradients agree: the optimizer's state was loaded or changed on some ranks only: load it on every rank"
        what = f"after step {step} rank {_rank_of(names)} has other moments ({state}): {few(list(names))}"
        return Finding("replicas-moments", what, cause, step)
    if differing := differing_replicas(lambda s: s.weights):
        cause = (
            "equal gradients make other weights: the optimizer's state (moments) or its options differ between ranks"
        )
        what = f"after step {step} rank {_rank_of(differing)} has other weights: {few(list(differing))}"
        return Finding("replicas-weights", what, cause, step)
    return None


def _differing_buffers(trace: Trace, optimizer: int, step: int) -> dict[str, Whole]:
    """Buffers that differ between ranks. Those of batch norm do so under DDP until the next forward."""
    sent = any("DistributedDataParallel" in m["wrappers"] for r in trace.ranks for m in r.models)
    buffers = {n: w for n, w in merged_buffers(trace, optimizer, step).items() if w.differences}
    return {n: w for n, w in buffers.items() if not sent or not n.rpartition(".")[2].startswith(("running_", "num_ba"))}


def _differing_moments(trace: Trace, optimizer: int, step: int) -> tuple[str, dict[str, Whole]] | None:
    """The first state of an optimizer that differs between ranks, where the step has measured it. A rank that holds
    zeros leaves the update to others."""
    states = {state: None for _, s in trace.at(optimizer, step) for _, state in s.moments}
    for state in states:
        wholes = merged(
            trace,
            optimizer,
            step,
            lambda s: {n: v for (n, k), v in s.moments.items() if k == state and v.square},  # noqa: B023
        )
        if names := {n: w for n, w in wholes.items() if w.differences}:
            return state, names
    return None


def _rank_of(norms: Mapping[str, Whole]) -> int:
    return min(rank for whole in norms.values() for rank in whole.differences)


def _largest(differences: object) -> float:
    values = [v for v in differences.values() if v is not None]  # type: ignore[attr-defined]
    return max(values, default=math.nan)


def _not_reduced(trace: Trace, optimizer: int, step: int, names: list[str], largest: float) -> Finding:
    every = len(merged(trace, optimizer, step, lambda s: s.unclipped))
    what = (
        f"step {step}: ranks have different gradients of {few(names)} ({len(names)} of {every} "
        f"parameters, by {largest:.2g})"
    )
    if len(names) > 0.9 * every:
        ddp = any("DistributedDataParallel" in m["wrappers"] for r in trace.ranks for m in r.models)
        fsdp = any(m.get("fsdp") for r in trace.ranks for m in r.models)
        cause = (
            "the forward goes around the DDP wrapper (model.module), or the step's backward runs under no_sync"
            if ddp
            else "FSDP does not reduce over these ranks: a mesh with sharding groups of one rank, or a forward that "
            "goes around the wrapper"
            if fsdp
            else "gradients are not reduced over ranks: the model that is called is not wrapped in DDP or FSDP"
        )
        return Finding("not-reduced", what, cause, step)
    cause = (
        "these parameters are not reduced over ranks: DDP ignores them, they were added after "
        "wrapping, or a hook changes them"
    )
    return Finding("not-reduced-some", what, cause, step)


def _unequal_options(records: Sequence[tuple[object, Step]]) -> str | None:
    first = records[0][1]
    for rank, step in records[1:]:
        for one, other in zip(first.groups, step.groups, strict=False):
            for key in ("lr", "weight_decay", "betas", "momentum"):
                if one.get(key) != other.get(key):
                    return f"rank {rank.number} has {key} {other.get(key)}, rank 0 has {one.get(key)}"  # type: ignore[attr-defined]
    return None


def _same_examples(trace: Trace, optimizer: int) -> list[Finding]:
    ranks = data_ranks(trace, optimizer)
    if len(ranks) < 2 or (model_parallel(trace, optimizer) and len(ranks) == 1):
        return []
    pairs_of_steps = []
    for step in trace.steps(optimizer):
        lists = [tuple(sorted(r.steps[optimizer][step].examples or ())) for r in ranks]
        if all(lists):
            pairs = [
                (ranks[i].number, ranks[j].number) for j in range(len(lists)) for i in range(j) if lists[i] == lists[j]
            ]
            pairs_of_steps.append((step, pairs))
    same = [(step, pairs) for step, pairs in pairs_of_steps if pairs]
    if not same or len(same) < max(0.8 * len(pairs_of_steps), min(2, len(pairs_of_steps))):
        return []
    step, pairs = same[0]
    cause = (
        "give each rank its share: DistributedSampler, accelerator.prepare of the loader, or "
        "split_dataset_by_node; and a seed that is the same on all ranks"
    )
    return [
        Finding(
            "same-examples",
            f"step {step}: ranks {pairs[0][0]} and {pairs[0][1]} train on the same examples",
            cause,
            step,
        )
    ]


# -- parameters ------------------------------------------------------------------------------------------------------


def _parameters(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """In no optimizer, or in no model; ranks and optimizers are merged first."""
    records = [s for o in trace.optimizers for r in trace.ranks for s in r.steps.get(o, {}).values()]
    if optimizer == trace.optimizers[0]:
        optimized = {p.name for s in records for p in s.layout.parameters}
        last = [r.steps[optimizer][max(r.steps[optimizer])] for r in trace.ranks if r.steps.get(optimizer)]
        outside = {n: has for s in last for n, has in (s.outside or {}).items() if n not in optimized and n != "?"}
        trained = [n for n, has in outside.items() if has]
        if trained:
            cause = (
                "add them to the optimizer, or set requires_grad to False; modules made after the "
                "optimizer are not in it"
            )
            yield Finding("in-no-optimizer", f"{few(trained)}: get gradients and are in no optimizer", cause)


def _stale(trace: Trace, optimizer: int) -> Finding | None:
    for rank in trace.ranks:
        for step in rank.steps.get(optimizer, {}).values():
            parameters = step.layout.parameters
            if parameters and not any(p.held for p in parameters):
                cause = (
                    "make the optimizer after the model is moved, wrapped or replaced, from the parameters of the "
                    "model that is called"
                )
                what = f"no model that was called holds the parameters of {step.layout.optimizer}"
                return Finding("stale-optimizer", what, cause)
            break
    return None


def _still(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Parameters that never get a gradient, and those that do not change though they have one."""
    steps = [s for s in trace.steps(optimizer) if all(r.measured for _, r in trace.at(optimizer, s))]
    if len(steps) < PATIENCE:
        return
    never: set[str] | None = None
    still: set[str] | None = None
    for step in steps:
        records = trace.at(optimizer, step)
        grads = merged(trace, optimizer, step, lambda s: s.grads)
        names = {p.name for _, s in records for p in s.layout.parameters if p.trained and p.held}
        none = {n for n in names if n not in grads or grads[n].value.square == 0}
        rates = {p.name: s.groups[p.group].get("lr") for _, s in records for p in s.layout.parameters}
        changed = {n for _, s in records for n, w in s.weights.items() if w.fingerprint != s.before[n].fingerprint}
        same = {n for n in names - none if n not in changed and (rates.get(n) or 0) > 0}
        never = none if never is None else never & none
        still = same if still is None else still & same
    if still:
        dtypes = {p.name: p.dtype for _, s in trace.at(optimizer, steps[0]) for p in s.layout.parameters}
        half = all("16" in dtypes[n] for n in still)
        cause = (
            "the change is smaller than the last bit of half precision: keep the weights in float32"
            if half
            else "the optimizer's step does not reach them: the parameter was replaced, or its gradient is "
            "cleared before the step"
        )
        yield Finding(
            "unchanged", f"{few(sorted(still))}: have gradients and do not change in {len(steps)} steps", cause
        )
    if never:
        listed = sorted(never)
        every = {p.name for _, s in trace.at(optimizer, steps[0]) for p in s.layout.parameters if p.trained}
        if len(never) < len(every):
            cause = (
                "the computation is cut (detach, no_grad, argmax, .item()), or these parameters are "
                "not used; freeze them if that is meant"
            )
            yield Finding(
                "no-gradient",
                f"{few(listed)}: get no gradient in {len(steps)} steps ({len(listed)} of {len(every)})",
                cause,
            )
        else:
            yield Finding(
                "all-zero", f"no parameter gets a gradient in {len(steps)} steps", _why_zero(trace, optimizer)
            )


def _why_zero(trace: Trace, optimizer: int) -> str:
    steps = [s for r in trace.ranks for s in r.steps.get(optimizer, {}).values()]
    backwards = any(s.backwards for s in steps)
    losses = [value for s in steps for value, _ in s.losses or ()]
    if losses and not any(losses):
        return (
            "the loss is 0 in each step, whatever the model computes: cross entropy over a single class, or a mask "
            "that leaves nothing"
        )
    return (
        "gradients are zeroed between backward and step: call zero_grad() before backward or after step"
        if backwards
        else "backward is not called between steps"
    )


def _gradients(trace: Trace, optimizer: int) -> Iterator[Finding]:
    steps = _first(trace, optimizer, lambda s: f"not zeroed: {optimizer}" in (s.notes or ()), 2)
    if steps:
        rank, step = steps
        cause = "call optimizer.zero_grad() once a step, for the optimizer that holds these parameters"
        yield Finding(
            "not-zeroed", f"step {step}: backward adds to the gradients of the step before (rank {rank})", cause, step
        )
    bad = _first(trace, optimizer, lambda s: any(not math.isfinite(v.square) for v in s.grads.values()))
    worse = _first(trace, optimizer, lambda s: any(not math.isfinite(v.square) for v in s.weights.values()))
    if bad:
        record = next(r for r in trace.ranks if r.number == bad[0]).steps[optimizer][bad[1]]
        names = [n for n, v in record.grads.items() if not math.isfinite(v.square)]
        cause = "the step has to be skipped (GradScaler.step does it), or the loss and learning rate looked at"
        what = f"step {bad[1]}, rank {bad[0]}: gradients that are not finite were applied: {few(names)}"
        yield Finding("not-finite", what, cause, bad[1])
    elif worse:
        record = next(r for r in trace.ranks if r.number == worse[0]).steps[optimizer][worse[1]]
        names = [n for n, v in record.weights.items() if not math.isfinite(v.square)]
        cause = "gradients are finite: the learning rate is too high, or the optimizer divides by zero (eps)"
        what = f"step {worse[1]}, rank {worse[0]}: weights are not finite: {few(names)}"
        yield Finding("not-finite", what, cause, worse[1])


def _clipping(trace: Trace, optimizer: int) -> Iterator[Finding]:
    steps = _first(trace, optimizer, lambda s: any(c.get("scaled") for c in s.clips or ()))
    if steps:
        cause = "call scaler.unscale_(optimizer) before clip_grad_norm_; the limit applies to scaled gradients else"
        yield Finding(
            "clip-before-unscale",
            f"step {steps[1]}, rank {steps[0]}: gradients are clipped while they are scaled",
            cause,
            steps[1],
        )
    for step in trace.steps(optimizer):
        scales = scales_of_clipping(trace.at(optimizer, step))
        if scales and (own := causes.own_norms(scales)) is not None:
            yield Finding("clip-own-shards", f"step {step}: ranks clip by different norms", own, step)
            break
    early = _first(trace, optimizer, lambda s: any(c.get("early") for c in s.clips or ()))
    if early:
        cause = "clip once, after the last backward of the step"
        yield Finding(
            "clip-early",
            f"step {early[1]}, rank {early[0]}: backward runs after clipping: accumulation is not over",
            cause,
            early[1],
        )


def _overflow(trace: Trace, optimizer: int) -> Iterator[Finding]:
    by_rank = {r.number: {s["step"] for s in r.skipped if s["opt"] == optimizer} for r in trace.ranks}
    counts = {n: len(each) for n, each in by_rank.items()}
    if trace.world > 1 and len(set(counts.values())) > 1 and not model_parallel(trace, optimizer):
        rank = max(counts, key=lambda n: counts[n])
        cause = (
            "all ranks have to skip together: let the scaler see reduced gradients, or agree on found_inf over ranks"
        )
        least = min(counts, key=lambda n: counts[n])
        step = min(by_rank[rank] - by_rank[least], default=min(by_rank[rank]))
        what = (
            f"step {step}: rank {rank} skips a step for overflow, rank {least} does not (they skip {counts[rank]} and "
            f"{counts[least]} steps)"
        )
        yield Finding("skipped-some", what, cause, step)


def _schedules(trace: Trace, optimizer: int) -> Iterator[Finding]:
    for rank in trace.ranks[:1]:
        steps = [s for n, s in sorted(rank.steps.get(optimizer, {}).items()) if n > 0]
        if len(steps) < PATIENCE:
            return
        for name in sorted({n for s in steps for n in s.schedulers or ()}):
            counts = [(s.schedulers or {}).get(name, 0) for s in steps]
            usual = max(set(counts), key=counts.count)
            if name.endswith(" by accelerate"):
                continue  # once a process, by design: docs/how-to/trace.md
            if usual == 0 and (interval := _seldom(rank, optimizer, name)) is not None:
                why = "step it where the optimizer steps: its length counts the optimizer's steps"
                what = f"from step {interval[0]} on {name} is stepped once in {interval[1]} steps of the optimizer"
                yield Finding("scheduler", what, why, interval[0])
            if usual < 2 or counts.count(usual) < 0.6 * len(counts):
                continue
            at = steps[counts.index(usual)].step
            micro = steps[0].backwards
            why = (
                "it is stepped with each micro-batch: step it where the optimizer steps"
                if usual == micro
                else "it is stepped with each rank or twice: call scheduler.step() once for each optimizer.step()"
            )
            what = f"before step {at} {name} is stepped {usual} times between two steps of the optimizer"
            yield Finding("scheduler", what, why, at)


def _unstepped(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """A scheduler that an epoch of training goes by without."""
    for rank in trace.ranks[:1]:
        steps = [s for _, s in sorted(rank.steps.get(optimizer, {}).items())]
        if len(steps) < PATIENCE or not epochs.repeats(rank, optimizer):
            return
        later = (rank.ended or {}).get("stepped", ())
        idle = [name for number, name in steps[-1].idle or () if number not in later]
        rates = {tuple(group.get("lr") for group in s.groups) for s in steps}
        if idle and len(rates) == 1:
            why = (
                "call scheduler.step() after each optimizer.step(), or after each epoch where its length counts epochs"
            )
            rate = ", ".join(f"{x:g}" for x in dict.fromkeys(rates.pop()) if x is not None)
            what = f"{idle[-1]} is never stepped: the learning rate is {rate} in all {len(steps)} steps"
            yield Finding("scheduler-not-stepped", what, why)


def _seldom(rank: Rank, optimizer: int, name: str) -> tuple[int, int] | None:
    """(first step, every how many) where a scheduler is stepped at each N-th step, which is the end of neither an epoch
    nor an evaluation."""
    steps = rank.steps[optimizer]
    at = [n for n, s in sorted(steps.items()) if (s.schedulers or {}).get(name)]
    every = {b - a for a, b in itertools.pairwise(at)}
    if len(at) < 3 or len(every) != 1 or name.startswith("ReduceLROnPlateau"):
        return None
    ends = {n for r in (*rank.passed, *rank.evaluations) for n in r["steps"][optimizer : optimizer + 1]}
    return None if ends & set(at) else (at[0], every.pop())


def _means(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Losses of ranks or micro-batches that do not grow with their numbers of targets: means over unequal numbers."""
    rows: list[tuple[float, float]] = []  # logarithms of targets and loss, beside the step's
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
        means = [sum(column) / len(logs) for column in zip(*logs, strict=True)]
        rows += [(n - means[0], x - means[1]) for n, x in logs]
        counts = [n for n, _ in pairs]
        if unequal is None and len(set(counts)) > 1:
            unequal = step, min(counts), max(counts)
    square = sum(n * n for n, _ in rows)
    if unequal is None or len(rows) < 8 or square / len(rows) < 0.01:
        return
    slope = sum(n * x for n, x in rows) / square  # 1: sums over targets, divided by one number; 0: means
    if slope < 0.3:
        step, low, high = unequal
        cause = "divide the sum of all ranks' and micro-batches' losses by the number of all targets of the step"
        what = f"step {step}: losses are means over unequal numbers of targets ({low} to {high}), and count alike"
        yield Finding("mean-of-means", what, cause, step)


def _labelled(trace: Trace, optimizer: int, step: int) -> bool:
    return all(None not in (s.targets or [None]) for _, s in trace.at(optimizer, step) if s.losses)


def _dtypes(trace: Trace, optimizer: int) -> Iterator[Finding]:
    for rank in trace.ranks[:1]:
        dtypes: dict[str, str] = {}
        for number, step in sorted(rank.steps.get(optimizer, {}).items()):
            now = {p.name: p.dtype for p in step.layout.parameters}
            changed = [n for n in now if n in dtypes and dtypes[n] != now[n]]
            if changed:
                n = changed[0]
                cause = "something casts the model while it trains (.half(), .to(dtype), loading a checkpoint)"
                yield Finding(
                    "dtype", f"step {number}: {few(changed)} turned from {dtypes[n]} into {now[n]}", cause, number
                )
                return
            dtypes = now


def _ties(trace: Trace, optimizer: int) -> Iterator[Finding]:
    for rank in trace.ranks[:1]:
        steps = sorted(rank.steps.get(optimizer, {}).items())
        first = steps[0][1].layout.ties if steps else ()
        names = {p.name for p in steps[0][1].layout.parameters} if steps else set()
        for number, step in steps:
            if step.layout.untied:
                cause = (
                    "call model.tie_weights() after embeddings are replaced, resized or loaded; both "
                    "halves train apart else"
                )
                yield Finding(
                    "untied", "the model's config ties input and output embeddings, and they are two parameters", cause
                )
                return
            lost = [t for t in first if t not in step.layout.ties and set(t) & names]
            if lost and step.layout.ties != first:
                cause = "one of the names was given a new parameter: tie it again"
                yield Finding(
                    "untied", f"step {number}: {' and '.join(lost[0])} were one parameter and are two", cause, number
                )
                return


LOOKS: tuple[Callable[[Trace, int], Iterable[Finding]], ...] = (
    _replicas,
    _same_examples,
    _ties,
    _parameters,
    _still,
    _gradients,
    _clipping,
    _overflow,
    _schedules,
    _unstepped,
    _means,
    _dtypes,
)


# -- modes -----------------------------------------------------------------------------------------------------------


def _modes(trace: Trace) -> Iterator[Finding]:
    for rank in trace.ranks[:1]:
        trained = {m["name"] for m in rank.models}
        for record in rank.evaluations:
            if record["active"] and record["training"] and record["model"] in trained and record["count"] > 1:
                what = (
                    f"{record['count']} examples go through {record['model']} without gradients in "
                    f"training mode: {few(record['active'])} active"
                )
                yield Finding(
                    "evaluated-in-training-mode",
                    what,
                    "call model.eval() before evaluating, and model.train() after it",
                )
                break
        if not any(m["stochastic"] for m in rank.models):
            continue
        for optimizer in sorted(rank.steps):
            steps = sorted(rank.steps[optimizer].items())
            off = [n for n, s in steps if s.training is False]
            if len(off) >= 2:
                on = any(s.training for _, s in steps)
                cause = (
                    "call model.train() after each evaluation"
                    if on
                    else "call model.train() before training: dropout is off"
                )
                yield Finding(
                    "trained-in-evaluation-mode",
                    f"from step {off[0]} on the model trains in evaluation mode",
                    cause,
                    off[0],
                )
                break
