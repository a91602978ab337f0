"""Premises of the rules: evidence in a trace that ranks are replicas of one model and share one data set.

A rule reports a fault as proved only if its premise holds. In: a trace, an optimizer. Out: parameter names, or whether
a premise holds. A trace cannot distinguish manually sharded or independent models from faulty replicas.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lockstep_trace.merge import merged
from lockstep_trace.read import Rank, Step, Trace

DIFFERENT = 1e-4  # relative: smaller gradient differences come from summation order


def wrapped(trace: Trace) -> list[Mapping[str, Any]]:
    """Return the recorded DistributedDataParallel attributes of the models that are wrapped in it."""
    return [model["group"] for rank in trace.ranks for model in rank.models if model.get("group")]


def groups(trace: Trace) -> list[Mapping[str, Any]]:
    """Return what `wrapped` does; empty if a model is not wrapped, such as a teacher beside the trained one."""
    rows = wrapped(trace)
    return rows if len(rows) == sum(len(rank.models) for rank in trace.ranks) else []


def declared(trace: Trace) -> bool:
    """Return whether DistributedDataParallel synchronizes every model over all ranks, without a communication hook,
    which may leave gradients different on purpose (post-local SGD)."""
    rows = groups(trace)
    return bool(rows) and all(row["ranks"] == trace.world and not row["hooked"] for row in rows)


def left_alone(trace: Trace) -> set[str]:
    """Return the parameters that DistributedDataParallel ignores."""
    return {name for row in groups(trace) for name in row["ignored"]}


def reduced(trace: Trace, optimizer: int) -> set[str]:
    """Return the parameters whose gradients are bitwise equal on all ranks in each measured step although losses
    differ: they are reduced over ranks, by any means."""
    names: set[str] | None = None
    steps = [s for s in trace.measured(optimizer) if _losses_differ(trace, optimizer, s)]
    for step in steps:
        wholes = merged(trace, optimizer, step, lambda s: s.grads)
        ranks = {r.number for r, _ in trace.at(optimizer, step)}
        alike = {n for n, w in wholes.items() if not w.differences and w.value.square > 0 and len(ranks) > 1}
        names = alike if names is None else names & alike
    return names or set() if len(steps) > 1 else set()


def _losses_differ(trace: Trace, optimizer: int, step: int) -> bool:
    losses = [tuple(v for v, _ in s.losses or ()) for _, s in trace.at(optimizer, step)]
    return len(set(losses)) > 1


def apart_at_end(trace: Trace, optimizer: int) -> bool:
    """Return whether replicas still have different weights in the last measured step.

    If not, they converge by design: weight averaging, local SGD. With unequal numbers of steps per rank (uneven inputs)
    this is undecidable."""
    steps = trace.measured(optimizer)
    if len({len(rank.steps.get(optimizer, {})) for rank in trace.ranks}) > 1:
        return False
    return bool(steps) and any(w.differences for w in merged(trace, optimizer, steps[-1], lambda s: s.weights).values())


def partitioned(trace: Trace) -> bool:
    """Return whether a DistributedSampler partitions the training data over all ranks."""
    return all(
        any(r["sampler"] == "DistributedSampler" and r["replicas"] == trace.world for r in rank.loaders)
        for rank in trace.ranks
    )


def exchanges(trace: Trace, optimizer: int) -> bool:
    """Return whether collectives between steps carry at least half as many elements as the parameters have, so that
    ranks may average them."""
    for rank in trace.ranks:
        steps = rank.steps.get(optimizer, {})
        size = sum(_count(p.size) for s in list(steps.values())[:1] for p in s.layout.parameters)
        carried = sum(elements for s in steps.values() for _, elements in (s.collectives or {}).values())
        if carried >= 0.5 * size:
            return True
    return False


def _count(size: tuple[int, ...]) -> int:
    count = 1
    for n in size:
        count *= n
    return count


def same_computation(one: Step, other: Step) -> bool:
    """Return whether two ranks computed the same loss of the same examples: with equal targets or equal bits.

    Ranks that share examples but compute parts of the loss (manual sequence or class parallelism) do neither."""
    hashes = [[tuple(o.get("hashes", ())) for o in s.objectives or ()] for s in (one, other)]
    if all(hashes) and all(all(each) for each in hashes):
        return hashes[0] == hashes[1]
    losses = [[v for v, _ in s.losses or ()] for s in (one, other)]
    return bool(losses[0]) and losses[0] == losses[1]


def sharded(trace: Trace) -> bool:
    """Return whether FSDP shards every model over all ranks."""
    models = [m for rank in trace.ranks for m in rank.models]
    if not models or not all(m.get("fsdp") for m in models):
        return False
    for rank in trace.ranks:
        for steps in rank.steps.values():
            mesh = next(iter(steps.values())).layout.mesh if steps else None
            if mesh is not None and _count(tuple(mesh["sizes"])) != trace.world:
                return False
    return True


def model_of(rank: Rank) -> str:
    return str(rank.models[0]["name"]) if rank.models else "the model"
