"""Passes over data loaders and the examples that each step took from them.

In: one rank of a trace. Out: passes and their examples, used by the other rules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from lockstep_trace.read import Rank, Step


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
