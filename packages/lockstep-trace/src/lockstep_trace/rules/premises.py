"""What a trace shows that ranks are meant to be: replicas of one model, on parts of one data set.

A rule may accuse only where its premise is seen here. In: a trace, an optimizer. Out: names, and whether something
holds. Ranks may also hold parts of a model that are cut by hand, or models of their own, which no trace can tell apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lockstep_trace.merge import merged
from lockstep_trace.read import Rank, Step, Trace

DIFFERENT = 1e-4  # relative: gradients that differ by less are summed in another order


def groups(trace: Trace) -> list[Mapping[str, Any]]:
    """Of each model of each rank in DistributedDataParallel what it says of itself; empty where a model is in none."""
    rows = [model.get("group") for rank in trace.ranks for model in rank.models]
    return [row for row in rows if row is not None] if all(rows) else []


def declared(trace: Trace) -> bool:
    """Whether DistributedDataParallel is to keep every model alike on all ranks, with no communication hook, which may
    leave gradients apart on purpose (post-local SGD)."""
    rows = groups(trace)
    return bool(rows) and all(row["ranks"] == trace.world and not row["hooked"] for row in rows)


def left_alone(trace: Trace) -> set[str]:
    """Parameters that DistributedDataParallel is told to leave alone."""
    return {name for row in groups(trace) for name in row["ignored"]}


def reduced(trace: Trace, optimizer: int) -> set[str]:
    """Parameters whose gradients are the same bits on all ranks in each measured step though ranks have other losses:
    they are reduced over ranks, by whatever means."""
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
    """Whether replicas still hold different weights in the last step that was measured. Where they do not, they come
    together again by design: averaging of weights, local SGD. Where ranks make other numbers of steps (uneven inputs),
    the end of one is not that of the others, and nobody knows."""
    steps = trace.measured(optimizer)
    if len({len(rank.steps.get(optimizer, {})) for rank in trace.ranks}) > 1:
        return False
    return bool(steps) and any(w.differences for w in merged(trace, optimizer, steps[-1], lambda s: s.weights).values())


def partitioned(trace: Trace) -> bool:
    """Whether a DistributedSampler divides what is trained on among all ranks."""
    return all(
        any(r["sampler"] == "DistributedSampler" and r["replicas"] == trace.world for r in rank.loaders)
        for rank in trace.ranks
    )


def exchanges(trace: Trace, optimizer: int) -> bool:
    """Whether collectives between steps carry as much as a model's parameters: then ranks may average something."""
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
    """Whether two ranks computed the loss of the same examples: with the same targets, or to the same bits. Ranks that
    share the examples and each take a part of the loss (sequence or class parallelism by hand) do neither."""
    hashes = [[tuple(o.get("hashes", ())) for o in s.objectives or ()] for s in (one, other)]
    if all(hashes) and all(all(each) for each in hashes):
        return hashes[0] == hashes[1]
    losses = [[v for v, _ in s.losses or ()] for s in (one, other)]
    return bool(losses[0]) and losses[0] == losses[1]


def sharded(trace: Trace) -> bool:
    """Whether FSDP cuts every model, over all ranks."""
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
