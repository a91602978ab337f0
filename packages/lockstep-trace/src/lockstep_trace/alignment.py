"""Aligns two traces whose steps have different examples: the first window of steps with equal sets of examples.

In: two traces. Out: `Window`, with losses and the change of all weights over it, or None.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from lockstep_trace.losses import losses_of
from lockstep_trace.merge import merged
from lockstep_trace.ranks import examples_of
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
