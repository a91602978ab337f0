"""Aligns two traces whose steps have different examples: the first window of steps with equal sets of examples.

In: two traces. Out: `Window`, with losses and the change of all weights over it, or None.

Matches the parameters of two traces by name.

Two names match if they are equal, or if one is a dotted suffix of the other (`net.0.weight`, `0.weight`), with equal
shapes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from lockstep_trace.causes import few
from lockstep_trace.errors import TraceError
from lockstep_trace.merge import merged
from lockstep_trace.ranks import examples_of, losses_of
from lockstep_trace.read import Trace


@dataclass(frozen=True)
class Window:
    """The first `a` and `b` steps of two traces, over the same number of `examples`. `losses`: mean over the steps of
    each. `change`: relative difference of the weights' changes over the window; None if not measured."""

    a: int
    b: int
    examples: int
    losses: tuple[float, float] | None
    change: float | None


def window(a: Trace, b: Trace, optimizer: int, names: Mapping[str, str]) -> Window | None:
    """Return the first window of two traces, or None. `names`: name in `a` -> name in `b`."""
    one, other = Counter[str](), Counter[str]()
    steps, others = a.steps(optimizer), b.steps(optimizer)
    i = j = 0
    while i < len(steps) or j < len(others):
        if j >= len(others) or (i < len(steps) and one.total() <= other.total()):
            one.update(examples_of(a, optimizer, steps[i]))
            i += 1
        else:
            other.update(examples_of(b, optimizer, others[j]))
            j += 1
        if i and j and one and one == other:
            losses = _losses(a, optimizer, steps[:i]), _losses(b, optimizer, others[:j])
            change = _change((a, steps[:i]), (b, others[:j]), optimizer, names)
            known = (losses[0], losses[1]) if losses[0] is not None and losses[1] is not None else None
            return Window(i, j, one.total(), known, change)
    return None


def _losses(trace: Trace, optimizer: int, steps: list[int]) -> float | None:
    means = [losses.mean for s in steps if (losses := losses_of(trace, optimizer, s)) is not None]
    return sum(means) / len(means) if means else None


def _change(
    a: tuple[Trace, list[int]], b: tuple[Trace, list[int]], optimizer: int, names: Mapping[str, str]
) -> float | None:
    sums: list[dict[str, np.ndarray]] = []
    for trace, steps in (a, b):
        total: dict[str, np.ndarray] = {}
        for step in steps:
            for name, whole in merged(trace, optimizer, step, lambda s: s.updates).items():
                if whole.value.sketch is not None:
                    total[name] = total.get(name, 0) + whole.value.sketch
        sums.append(total)
    pairs = [(sums[0][n], sums[1][m]) for n, m in names.items() if n in sums[0] and m in sums[1]]
    scale = sum(float(x @ x) for x, _ in pairs)
    return (sum(float((x - y) @ (x - y)) for x, y in pairs) / scale) ** 0.5 if scale > 0 else None


def shapes(trace: Trace, optimizer: int) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of an optimizer's parameters on all ranks."""
    shapes_by_name: dict[str, tuple[int, ...]] = {}
    for rank in trace.ranks:
        for step in list(rank.steps.get(optimizer, {}).values())[:1]:
            shapes_by_name |= {p.name: p.shape for p in step.layout.parameters}
    return shapes_by_name


def match(a: Trace, b: Trace, optimizer: int) -> dict[str, str]:
    """Return name in `a` -> name in `b`. Errors: `TraceError` if no name matches, or the shapes of a pair differ."""
    one, other = shapes(a, optimizer), shapes(b, optimizer)
    pairs = {n: n for n in one if n in other}
    left, right = [n for n in one if n not in pairs], [n for n in other if n not in pairs]
    pairs |= _by_suffix(left, right, one, other)
    if not pairs:
        lists = "\n".join(f"  {t.folder}: {few(list(s), 8)}" for t, s in ((a, one), (b, other)))
        raise TraceError(
            "LS9010", f"the traces have no parameter name in common; check that both trace the same model:\n{lists}"
        )
    wrong = [n for n, m in pairs.items() if one[n] != other[m]]
    if wrong:
        n = wrong[0]
        raise TraceError(
            "LS9011", f"{n} has the shape {list(one[n])} in {a.folder} and {list(other[pairs[n]])} in {b.folder}"
        )
    return pairs


def _by_suffix(
    left: list[str], right: list[str], one: Mapping[str, tuple[int, ...]], other: Mapping[str, tuple[int, ...]]
) -> dict[str, str]:
    pairs = {}
    for n in left:
        ends = [m for m in right if one[n] == other[m] and _ends(m, n)]
        back = [k for k in left if len(ends) == 1 and one[k] == one[n] and _ends(k, ends[0])]
        if len(ends) == 1 and back == [n]:
            pairs[n] = ends[0]
    return pairs


def _ends(a: str, b: str) -> bool:
    return a.endswith(f".{b}") or b.endswith(f".{a}")
