"""Premises of the rules: evidence that ranks are replicas of one model and share one data set; and passes over data
loaders.

A rule reports a fault as proved only if its premise holds. In: a trace, an optimizer. Out: parameter names, or whether
a premise holds; passes and the examples that each step took from them. A trace cannot distinguish manually sharded or
independent models from faulty replicas.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from lockstep_trace.ranks import merged
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


def passes_of(rank: Rank) -> dict[str, Mapping[str, Any]]:
    """Return name -> start record of each pass that ended while steps were recorded."""
    last = {o: max(steps) + 1 for o, steps in rank.steps.items()}
    cut = rank.ended is None or any(n > last.get(o, 0) for o, n in enumerate(rank.ended["steps"]))
    ended = {  # in a truncated trace without the last one: a prefetching loader ends before its last step
        r["loader"]: r.get("batches")
        for r in rank.passed
        if all(n + cut <= last.get(o, 0) for o, n in enumerate(r["steps"]))
    }
    return {r["loader"]: {**r, "batches": ended[r["loader"]]} for r in rank.loaders if r["loader"] in ended}


def fed(step: Step) -> Iterator[tuple[str | None, int, list[str]]]:
    """Yield (pass, batch number, hashes of examples) for each input of a step."""
    examples, at = list(step.examples or ()), 0
    for (name, batch), size in zip(step.fed or (), step.micro or (), strict=False):
        yield name, batch, examples[at : at + size]
        at += size


def examples_of_passes(rank: Rank, optimizer: int | None = None) -> dict[str, list[str]]:
    """Return pass -> training examples, in order. `optimizer`: None for the first one."""
    by_epoch: dict[str, list[str]] = {}
    for number in sorted(rank.steps)[:1] if optimizer is None else [optimizer]:
        for _, step in sorted(rank.steps.get(number, {}).items()):
            for name, _, hashes in fed(step):
                if name is not None:
                    by_epoch.setdefault(name, []).extend(hashes)
    return by_epoch


def batches_of_passes(rank: Rank, optimizer: int) -> dict[str, dict[int, list[str]]]:
    """Return pass -> batch number -> training examples."""
    by_pass: dict[str, dict[int, list[str]]] = {}
    for _, step in sorted(rank.steps.get(optimizer, {}).items()):
        for name, batch, hashes in fed(step):
            if name is not None:
                by_pass.setdefault(name, {}).setdefault(batch, []).extend(hashes)
    return by_pass


def repeats(rank: Rank, optimizer: int) -> bool:
    """Return whether a rank completed an epoch: a pass over a loader ended, or, without a loader, the first step's
    examples came again."""
    if loaders := examples_of_passes(rank).keys():
        now = rank.steps[optimizer][max(rank.steps[optimizer])].loader
        return bool(loaders & passes_of(rank).keys() - ({now} if rank.ended is None else set()))
    first, *later = [set(s.examples or ()) for _, s in sorted(rank.steps[optimizer].items())]
    return bool(first) and first <= set().union(*later)


def rounds(rank: Rank, optimizer: int) -> int:
    """Return the number of epochs of a rank: finished passes; without a loader, how often each example comes, or the
    first step's examples."""
    if loaders := examples_of_passes(rank, optimizer).keys():
        return len(loaders & passes_of(rank).keys())
    counts = Counter(h for s in rank.steps[optimizer].values() for h in s.examples or ())
    if counts and len({*counts.values()}) == 1:
        return next(iter(counts.values()))
    first, *later = [set(s.examples or ()) for _, s in sorted(rank.steps[optimizer].items())]
    return 1 + sum(first <= each for each in later) if first else 0


def first_step(rank: Rank, name: str, optimizer: int | None = None) -> int | None:
    """Return the first step of a pass, or None."""
    numbers = sorted(rank.steps)[:1] if optimizer is None else [optimizer]
    steps = (n for o in numbers for n, s in sorted(rank.steps[o].items()) if any(f[0] == name for f in s.fed or ()))
    return next(steps, None)


def known(step: Step) -> list[str]:
    """Return the hashes of a step's examples, without labels if the model is given labels."""
    return list(step.unlabelled or step.examples or ())
