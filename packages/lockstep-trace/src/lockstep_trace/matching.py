"""Matches the parameters of two traces by name.

Two names match if they are equal, or if one is a dotted suffix of the other (`net.0.weight`, `0.weight`), with equal
shapes.
"""

from __future__ import annotations

from collections.abc import Mapping

from lockstep_trace.causes import few
from lockstep_trace.errors import TraceError
from lockstep_trace.read import Trace


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
