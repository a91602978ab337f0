"""Rules on replicas that diverge: the first step and the first quantity that differ between ranks.

Consequences of a difference are not reported. A difference is `wrong` if the trace shows that ranks are replicas
(`premises.py`) and they still differ at the end. Otherwise ranks may hold parts of a model that is split by hand, or
independent models (an ensemble, a sweep), or average their weights later (local SGD).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from lockstep_trace.causes import few
from lockstep_trace.ranks import Whole, data_ranks, merged, merged_buffers, merged_start, model_parallel, pipelined
from lockstep_trace.read import Step, Trace, Value
from lockstep_trace.rules import INFO, PATIENCE, SUSPICIOUS, WRONG, Finding, premises, weakened

PARTS = "ranks may hold parts of a model that is split by hand, independent models, or weights that are averaged later"
MEANT = "whether ranks should hold the same model; if so, wrap it in DDP, or reduce every gradient"
DISTINCT = 3  # shared batches; fewer may be chance


def replicas(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Report replicas that diverge. No correct program has declared or reduced replicas that differ at the end."""
    if trace.world < 2 or pipelined(trace, optimizer):
        return
    start = {n: w for n, w in merged_start(trace, optimizer).items() if w.differences}
    if start:
        cause = "seed every rank alike before creating the model, or wrap it in DDP, which broadcasts weights"
        what = f"rank {_rank_of(start)} starts from different weights than rank 0: {few(list(start))}"
        alike = set(start) & premises.reduced(trace, optimizer)
        if alike:
            what += f"; the same gradients are applied to them ({few(sorted(alike))})"
        proved = premises.apart_at_end(trace, optimizer) and bool(alike)
        yield weakened(Finding("replicas-start", what, cause, 0), proved, PARTS, MEANT)
        return
    buffers = None
    for step in trace.measured(optimizer):
        if (finding := _at(trace, optimizer, step)) is not None:
            yield finding
            break
        if buffers is None and (names := _differing_buffers(trace, optimizer, step)):
            buffers = _buffers(trace, optimizer, names, step)
            yield buffers


def _at(trace: Trace, optimizer: int, step: int) -> Finding | None:
    def differing(of: Callable[[Step], Mapping[str, Value]]) -> dict[str, Whole]:
        return {n: w for n, w in merged(trace, optimizer, step, of).items() if w.differences}

    if names := differing(lambda s: s.before):
        cause = "code besides the optimizer writes to weights on some ranks only (loading, averaging, a branch by rank)"
        what = f"before step {step} rank {_rank_of(names)} has different weights: {few(list(names))}"
        return _judged(trace, optimizer, Finding("replicas-weights", what, cause, step), set(names))
    if (names := differing(lambda s: s.unclipped)) and not _largest(names) < premises.DIFFERENT:
        if not differing(lambda s: s.grads):
            cause = "clip after gradients are reduced: here each rank scales by the norm of its own gradient"
            what = f"step {step}: gradients are clipped before they are reduced over ranks"
            private = "ranks that clip their own share on purpose, as private and robust averaging do"
            finding = Finding("clip-before-reduce", what, cause, step)
            return weakened(finding, False, private, "whether the limit applies to each rank's own gradient")
        return _not_reduced(trace, optimizer, step, list(names), _largest(names))
    if (options := _unequal_options(trace.at(optimizer, step))) is not None:
        cause = "use the same learning rate and options on every rank"
        finding = Finding("replicas-options", f"step {step}: {options}", cause, step)
        return _judged(trace, optimizer, finding, premises.reduced(trace, optimizer))
    if (names := differing(lambda s: s.grads)) and not _largest(names) < premises.DIFFERENT:
        cause = "each rank clips with its own norm or limit: clip reduced gradients, with one norm and one limit"
        what = f"step {step}: gradients agree between ranks before clipping, but not after it: {few(list(names))}"
        before = merged(trace, optimizer, step, lambda s: s.unclipped)
        alike = {n for n in names if not before[n].differences and before[n].value.square > 0}
        return _judged(trace, optimizer, Finding("replicas-clipping", what, cause, step), alike, alike)
    if (moments := _differing_moments(trace, optimizer, step)) is not None:
        state, names = moments
        cause = "gradients agree: the optimizer's state was loaded or changed on some ranks only: load it on every rank"
        what = f"after step {step} rank {_rank_of(names)} has different moments ({state}): {few(list(names))}"
        return _judged(trace, optimizer, Finding("replicas-moments", what, cause, step), set(names))
    if names := differing(lambda s: s.weights):
        cause = (
            "gradients are equal but updates differ: the optimizer's state (moments) or its options differ "
            "between ranks"
        )
        what = f"after step {step} rank {_rank_of(names)} has different weights: {few(list(names))}"
        return _judged(trace, optimizer, Finding("replicas-weights", what, cause, step), set(names))
    return None


def _judged(
    trace: Trace, optimizer: int, finding: Finding, names: set[str], reduced: set[str] | None = None
) -> Finding:
    replicated = names - premises.left_alone(trace)
    declared = premises.declared(trace) and bool(replicated)
    alike = bool(replicated & (_reduced_until(trace, optimizer, finding.step) if reduced is None else reduced))
    return weakened(finding, (declared or alike) and premises.apart_at_end(trace, optimizer), PARTS, MEANT)


def _reduced_until(trace: Trace, optimizer: int, step: int | None) -> set[str]:
    names: set[str] = set()
    for number in [s for s in trace.measured(optimizer) if step is None or s <= step]:
        wholes = merged(trace, optimizer, number, lambda s: s.grads)
        losses = {tuple(v for v, _ in s.losses or ()) for _, s in trace.at(optimizer, number)}
        if len(losses) > 1:
            names |= {n for n, w in wholes.items() if not w.differences and w.value.square > 0}
    return names


def _not_reduced(trace: Trace, optimizer: int, step: int, names: list[str], largest: float) -> Finding:
    every = sum(w.value.square > 0 for w in merged(trace, optimizer, step, lambda s: s.unclipped).values())
    what = (
        f"step {step}: ranks have different gradients of {few(names)} ({len(names)} of {every} "
        f"parameters, by {largest:.2g})"
    )
    diverged = premises.apart_at_end(trace, optimizer)
    enough = trace.complete or len(trace.steps(optimizer)) >= 32
    if len(names) > 0.9 * every:
        ddp, fsdp = premises.wrapped(trace), any(m.get("fsdp") for r in trace.ranks for m in r.models)
        cause = "gradients are not reduced over ranks: the model that is called is not wrapped in DDP or FSDP"
        if ddp:
            cause = (
                "the forward pass bypasses the DDP wrapper (model.module), or the step's backward runs under no_sync"
            )
        elif fsdp:
            cause = (
                "FSDP does not reduce over these ranks: a mesh with sharding groups of one rank, or a "
                "forward pass that "
                "bypasses the wrapper"
            )
        unsent = not premises.exchanges(trace, optimizer)
        alone = unsent and premises.partitioned(trace) and not any(each["hooked"] for each in ddp)
        if alone and not ddp:
            what += "; a DistributedSampler divides the examples among ranks, and no collective carries gradients"
        proved = (
            diverged
            and enough
            and ((unsent and premises.declared(trace)) or (alone and not fsdp) or (fsdp and not ddp))
        )
        return weakened(Finding("not-reduced", what, cause, step), proved, PARTS, MEANT)
    cause = (
        "gradients of these parameters are not reduced over ranks: DDP ignores them, they were added "
        "after wrapping, or a hook changes them"
    )
    covered = premises.declared(trace) and not any(g["part"] for g in premises.groups(trace))
    proved = diverged and enough and covered and bool(set(names) - premises.left_alone(trace))
    otherwise = "parts that each rank has for itself on purpose: experts, a separate head, tensor parallelism by hand"
    outside = diverged and enough and _outside_wrapped(trace, optimizer, set(names))
    if outside and not proved:
        what += "; another model is wrapped and its gradients are reduced; these start alike and end different"
        cause = "wrap this module, too, or make it a part of the wrapped model"
        proved = premises.partitioned(trace) and _mixed_examples(trace, optimizer)
    return weakened(Finding("not-reduced-some", what, cause, step), proved, otherwise, MEANT, outside)


def _outside_wrapped(trace: Trace, optimizer: int, names: set[str]) -> bool:
    """Return whether these gradients differ in each step, and all others, those of a wrapped model, are reduced.

    With a DistributedSampler that gives each rank other examples in other epochs, no rank has data, and so parameters,
    of its own; parts that are split by hand exchange what they compute."""
    models = [m for rank in trace.ranks for m in rank.models]
    rows = premises.wrapped(trace)
    if any(row["hooked"] or row["ranks"] != trace.world or names & {*row["ignored"]} for row in rows):
        return False
    whole = [bool(m.get("group") or m.get("fsdp")) for m in models]
    for number in trace.measured(optimizer):
        wholes = merged(trace, optimizer, number, lambda s: s.unclipped)
        if {n for n, w in wholes.items() if w.differences} != names:
            return False
    return any(whole) and not all(whole) and not premises.exchanges(trace, optimizer)


def _mixed_examples(trace: Trace, optimizer: int) -> bool:
    rows = [{h for s in r.steps.get(optimizer, {}).values() for h in premises.known(s)} for r in trace.ranks]
    return len(set.intersection(*rows)) >= 0.25 * max(map(len, rows)) > 0


def reduced_late(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Report gradients that are all-reduced after the step that used them, and cleared before the next backward, while
    ranks step with different ones: no step uses a mean.

    Gradients that already agree are reduced for a log, and those of a delayed step are not cleared. Ranks that train
    models of their own may reduce in place for a log, so it is never proved."""
    numbers = [n for n in trace.measured(optimizer) if all(s.reduced_late for _, s in trace.at(optimizer, n))]
    if trace.world < 2 or len(numbers) < PATIENCE or optimizer != trace.optimizers[0]:
        return
    wholes = [merged(trace, optimizer, n, lambda s: s.unclipped) for n in numbers]
    if all(any(w.differences for w in each.values()) and not _largest(each) < premises.DIFFERENT for each in wholes):
        count = trace.at(optimizer, numbers[0])[0][1].reduced_late
        what = f"after step {numbers[0] - 1}, which has used them, {count} gradients are all-reduced and then cleared, "
        what += f"as in {len(numbers)} steps; gradients differ between ranks, and no step uses a reduced one"
        cause = "call all_reduce between backward and optimizer.step()"
        otherwise = "gradients that are reduced for a log, of models that each rank trains for itself"
        yield Finding("reduced-after-step", what, cause, numbers[0] - 1, SUSPICIOUS, otherwise, MEANT)


def of_one_rank(trace: Trace) -> Iterator[Finding]:
    """Report an optimizer that steps on rank 0 only, while its parameters get gradients on another rank, too, and
    nothing is sent that holds as many numbers as one of them.

    Requires that ranks reduce gradients of another optimizer. Never proved: weights may be sent by other means."""
    if not trace.complete or not any(premises.reduced(trace, o) for o in trace.optimizers):
        return
    first, *others = trace.ranks
    for rank in others:
        for optimizer in sorted(first.steps.keys() - rank.steps.keys()):
            layout = next(iter(first.steps[optimizer].values())).layout
            steps = [s for o in sorted(rank.steps)[:1] for s in rank.steps[o].values()]
            names = {p.name for p in layout.parameters}
            alone = all(names <= {n for n, there in (s.outside or {}).items() if there} for s in steps)
            least = min((math.prod(p.size) for p in layout.parameters), default=0)
            sent = any(n >= least for s in steps for _, n in (s.collectives or {}).values())
            if len(steps) < PATIENCE or not names or not alone or sent:
                continue
            what = (
                f"the optimizer of {few(sorted(names))} makes {len(first.steps[optimizer])} steps on rank 0 and none "
            )
            what += f"on rank {rank.number}, where they get gradients in {len(steps)} steps, and nothing sends them"
            cause = "step it on every rank, with gradients that are reduced over ranks (DDP does both)"
            otherwise = "weights that are sent by other means"
            yield Finding("one-rank-steps", what, cause, None, SUSPICIOUS, otherwise, MEANT)
            return


def _buffers(trace: Trace, optimizer: int, names: Mapping[str, Whole], step: int) -> Finding:
    """Return the finding: likely under DDP that does not send buffers, if several ranks evaluate with theirs and the
    script does not send as many numbers."""
    cause = (
        "nothing synchronizes these buffers: DDP broadcasts rank 0's, FSDP and hand-written loops do not; reduce them"
    )
    what = f"after step {step} rank {_rank_of(names)} has different buffers: {few(list(names))}"
    statistics = any(n.rpartition(".")[2].startswith(("running_", "num_ba")) for n in names)
    level = SUSPICIOUS if statistics else INFO
    otherwise = (
        "statistics of each rank's own batches, where rank 0's are saved" if statistics else "state of each rank"
    )
    decides = "which rank's buffers are saved and evaluated"
    least = min(math.prod(whole.shape) for n, whole in names.items() if not n.endswith("tracked")) if statistics else 0
    steps = [s for r in trace.ranks for s in r.steps.get(optimizer, {}).values()]
    sent = any(n >= least for s in steps for _, n in (s.collectives or {}).values())
    evaluated = sum(any(e.get("trained") for e in rank.evaluations) for rank in trace.ranks) > 1
    likely = statistics and bool(premises.wrapped(trace)) and not sent and trace.complete and evaluated
    return Finding("replicas-buffers", what, cause, step, level, otherwise, decides, likely)


def _differing_buffers(trace: Trace, optimizer: int, step: int) -> dict[str, Whole]:
    rows = premises.wrapped(trace)
    sent = any("DistributedDataParallel" in m["wrappers"] for r in trace.ranks for m in r.models)
    sent = sent and all(row.get("buffers", True) for row in rows)
    buffers = {n: w for n, w in merged_buffers(trace, optimizer, step).items() if w.differences}
    return {n: w for n, w in buffers.items() if not sent or not n.rpartition(".")[2].startswith(("running_", "num_ba"))}


def _differing_moments(trace: Trace, optimizer: int, step: int) -> tuple[str, dict[str, Whole]] | None:
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


def _largest(wholes: Mapping[str, Whole]) -> float:
    values = [v for w in wholes.values() for v in w.differences.values() if v is not None]
    return max(values, default=math.nan)


def _unequal_options(records: Sequence[tuple[object, Step]]) -> str | None:
    first = records[0][1]
    for rank, step in records[1:]:
        for one, other in zip(first.groups, step.groups, strict=False):
            for key in ("lr", "weight_decay", "betas", "momentum"):
                if one.get(key) != other.get(key):
                    return f"rank {rank.number} has {key} {other.get(key)}, rank 0 has {one.get(key)}"  # type: ignore[attr-defined]
    return None


def same_noise(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Report an input of the model that has several numbers, the same on all ranks in each of the first steps and new
    in each, while another input is new on every rank, and the ranks' generators are in one state: timesteps or noise
    drawn from one seed.

    Inputs that belong to examples differ with them, and what depends on the step alone has equal or ordered rows. Ranks
    whose generators differ share numbers on purpose, as do those that send each other activations or numbers. Ranks may
    share negatives on purpose, so it is never proved."""
    ranks = data_ranks(trace, optimizer)
    if len(ranks) < 2 or not (premises.declared(trace) or premises.reduced(trace, optimizer)):
        return
    steps = [[r.steps[optimizer][n] for r in ranks] for n in trace.steps(optimizer)]
    steps = [row for row in steps if all(s.parts for s in row)]
    if any(name in SENT for row in steps[1:] for s in row for name in s.collectives or ()):
        return
    if any(not s.drawn or s.drawn[0] != row[0].drawn[0] for row in steps for s in row):
        return
    calls = [[[h for call in s.parts for h in call] for s in row] for row in steps]
    counts = {len(each) for row in calls for each in row}
    if len(calls) < PATIENCE or len(counts) > 1:
        return
    columns = [[[each[i] for each in row] for row in calls] for i in range(counts.pop())]
    same = [c for c in columns if all(row[0] and len({*row}) == 1 for row in c) and len({r[0] for r in c}) == len(c)]
    if same and any(len({h for row in c for h in row}) == len(c) * len(ranks) for c in columns):
        what = f"an input of the model is the same on all ranks in each of {len(calls)} steps, and new in each, though "
        what += "other inputs differ: random numbers of one seed"
        cause = "seed the generator that draws it by rank: seed + rank"
        otherwise = "numbers that ranks share on purpose (a grid, negatives)"
        yield Finding("same-noise", what, cause, None, SUSPICIOUS, otherwise, "where this input comes from", True)


SENT = ("all_gather", "broadcast", "all_to_all", "all_to_all_single", "send", "recv", "isend", "irecv")


def equal_shards(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Report equal shards on different ranks.

    In a correct program, shards of one randomly initialized tensor are not equal; experts copied from one layer are a
    few tensors, not nearly all."""
    contents: dict[str, set[int]] = {}
    counts: dict[str, int] = {}
    constant: set[str] = set()
    for rank in trace.ranks:
        for name, (content, same) in rank.shards.get(optimizer, {}).items():
            contents.setdefault(name, set()).add(content)
            counts[name] = counts.get(name, 0) + 1
            if same:
                constant.add(name)
    blocks = {
        n: {
            p.block
            for r in trace.ranks
            if optimizer in r.starts
            for p in r.starts[optimizer][0].parameters
            if p.name == n
        }
        for n in counts
    }
    even = [n for n in counts if len(blocks[n]) > 1 and len({size for _, size in blocks[n]}) == 1]
    drawn = [n for n in even if n not in constant]
    equal = [n for n in drawn if len(contents[n]) == 1]
    if len(equal) >= 2 and len(equal) >= 0.9 * len(drawn):
        what = f"the shards of a tensor start with the same numbers on all ranks: {few(equal)} ({len(equal)} tensors)"
        cause = (
            "each rank draws its shard from the same random numbers: load or initialize the weights before "
            "sharding, or broadcast them (set_model_state_dict with broadcast_from_rank0), or seed by rank"
        )
        yield Finding("equal-shards", what, cause, 0, WRONG)


def same_examples(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Report ranks that train on the same examples.

    No correct program averages gradients over ranks that compute the same loss of the same examples and targets in
    every step. Ranks that share examples and divide the computation have different targets or losses."""
    ranks = data_ranks(trace, optimizer)
    if len(ranks) < 2 or (model_parallel(trace, optimizer) and len(ranks) == 1):
        return
    rows = []
    for step in trace.steps(optimizer):
        lists = [tuple(sorted(r.steps[optimizer][step].examples or ())) for r in ranks]
        if all(lists):
            pairs = [(i, j) for j in range(len(lists)) for i in range(j) if lists[i] == lists[j]]
            rows.append((step, pairs, lists))
    same = [row for row in rows if row[1]]
    if not same or len(same) < max(0.8 * len(rows), min(2, len(rows))):
        return
    step, pairs, _ = same[0]
    i, j = pairs[0]
    work = [premises.same_computation(ranks[i].steps[optimizer][s], ranks[j].steps[optimizer][s]) for s, *_ in same]
    distinct = len({lists[i] for _, _, lists in same})
    together = premises.declared(trace) or premises.sharded(trace) or bool(premises.reduced(trace, optimizer))
    proved = together and all(work) and distinct >= DISTINCT and len(same) >= PATIENCE
    cause = (
        "give each rank its own share (DistributedSampler, accelerator.prepare of the loader, or "
        "split_dataset_by_node), with the same seed on all ranks"
    )
    what = f"step {step}: ranks {ranks[i].number} and {ranks[j].number} train on the same examples"
    what += f", and in {len(same)} of {len(rows)} steps"
    otherwise = "ranks that each compute a part of the same loss, or independent models; or a trial on one batch"
    decides = "whether ranks should see different examples"
    yield weakened(Finding("same-examples", what, cause, step), proved, otherwise, decides)
