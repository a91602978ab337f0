"""Two traces compared: the first step and, in causal order, the first thing in which they part.

In: a reference trace, another, and, where there is one, the reference traced again with weights perturbed in their last
bit. Out: `Verdict`. Order: start weights, examples, loss, gradient, clipping, learning rate, update, buffers. What
follows from the first difference is not looked at.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.trace import causes
from lockstep.trace.errors import TraceError
from lockstep.trace.losses import Losses, agreeing, losses_of
from lockstep.trace.matching import match
from lockstep.trace.merge import Whole, difference, merged, merged_buffers, merged_start
from lockstep.trace.ranks import data_ranks, examples_of
from lockstep.trace.read import Trace

ORDER = ("start weights", "examples", "loss", "gradient", "clipping", "learning rate", "update", "buffers")
SAFETY = 10  # times what a perturbed last bit changes
SMALL = 1e-3  # of the whole gradient's norm: a smaller gradient holds the rounding of larger numbers
FLOORS = {"loss": 1e-6, "gradient": 4e-6, "update": 1e-3, "buffers": 1e-5}
FLOORS_HALF = {  # products round to this, wherever the batch is cut, and last bits of float32 weights do not show it
    "bfloat16": {"loss": 4e-3, "gradient": 4e-2, "update": 0.2, "buffers": 1e-2},
    "float16": {"loss": 4e-3, "gradient": 2e-2, "update": 0.1, "buffers": 2e-3},
}
WITHOUT_REFERENCE = {
    "float32": {"loss": 1e-4, "gradient": 1e-4, "update": 1e-2, "buffers": 1e-3},
    "half": {"loss": 2e-2, "gradient": 0.1, "update": 0.3, "buffers": 5e-2},
}


@dataclass(frozen=True)
class Row:
    """What a step's comparison came to: the largest relative difference of each kind; None: not compared."""

    step: int
    loss: float | None
    gradient: float | None
    update: float | None
    cells: Mapping[str, float] = field(default_factory=dict)  # gradient, by parameter


@dataclass(frozen=True)
class Verdict:
    """`first`: of `ORDER`, None where nothing differs beyond rounding. `lines`: what differs. `cause`: one sentence."""

    optimizer: int
    first: str | None
    step: int | None
    lines: tuple[str, ...]
    cause: str
    rows: tuple[Row, ...]
    exact: bool  # every fingerprint is the same
    tolerance: str
    parameters: tuple[str, ...]


@dataclass(frozen=True)
class _Parted(Exception):
    first: str
    lines: tuple[str, ...]
    cause: str


@dataclass(frozen=True)
class Tolerance:
    """What may differ, relatively, by kind, at a step; `words` for the user."""

    by_step: Mapping[int, Mapping[str, float]]
    default: Mapping[str, float]
    words: str

    def at(self, step: int) -> Mapping[str, float]:
        return self.by_step.get(step, self.default)


EXACT = Tolerance({}, dict.fromkeys(FLOORS, 0.0), "the same bits (--exact)")


def compare(a: Trace, b: Trace, perturbed: Trace | None = None, exact: bool = False, optimizer: int = 0) -> Verdict:
    """`a`: the reference. Errors: `TraceError` where they share no parameter name or no step."""
    names = match(a, b, optimizer)
    steps = [s for s in a.steps(optimizer) if s in set(b.steps(optimizer))]
    if not steps:
        raise TraceError("LS9000", f"{a.folder} and {b.folder} have no step in common")
    tolerance = EXACT if exact else _tolerance(a, perturbed, optimizer)
    rows: list[Row] = []
    try:
        _start(a, b, optimizer, names, exact)
        for step in steps:
            rows.append(_step(_Pair(a, b, optimizer, step, names), tolerance.at(step), rows))
        _lengths(a, b, optimizer)
    except _Parted as parted:
        step_of = (
            None if parted.first == "start weights" else (steps[len(rows)] if len(rows) < len(steps) else steps[-1])
        )
        return Verdict(
            optimizer,
            parted.first,
            step_of,
            parted.lines,
            parted.cause,
            tuple(rows),
            False,
            tolerance.words,
            tuple(names),
        )
    same = all(not (r.loss or r.gradient or r.update) for r in rows)
    return Verdict(optimizer, None, None, (), "", tuple(rows), same, tolerance.words, tuple(names))


def gradient_differences(a: Trace, b: Trace, optimizer: int, step: int) -> dict[str, float]:
    """Relative differences of gradients by parameter of the reference `a`; empty where the step is not measured."""
    pair = _Pair(a, b, optimizer, step, match(a, b, optimizer))
    if not all(s.measured for side in pair.records() for s in side):
        return {}
    return _differences(*pair.both("unclipped"), pair.names, SMALL)


@dataclass(frozen=True)
class _Pair:
    a: Trace
    b: Trace
    optimizer: int
    step: int
    names: Mapping[str, str]  # of a -> of b

    def both(self, of: str) -> tuple[dict[str, Whole], dict[str, Whole]]:
        one, other = (merged(t, self.optimizer, self.step, lambda s: getattr(s, of)) for t in (self.a, self.b))
        return one, other

    def records(self) -> tuple[list[Any], list[Any]]:
        return (
            [s for _, s in self.a.at(self.optimizer, self.step)],
            [s for _, s in self.b.at(self.optimizer, self.step)],
        )


def _tolerance(a: Trace, perturbed: Trace | None, optimizer: int) -> Tolerance:
    records = [s for _, s in a.at(optimizer, a.steps(optimizer)[0])]
    dtypes = {s.autocast for s in records if s.autocast} | {p.dtype for s in records for p in s.layout.parameters}
    half = next((d for d in FLOORS_HALF if d in dtypes), None)
    default = WITHOUT_REFERENCE["half" if half else "float32"]
    if perturbed is None:
        return Tolerance({}, default, f"of {half or 'float32'}, without a perturbed reference")
    names = {n: n for n in merged_start(a, optimizer)}
    tolerances: dict[int, dict[str, float]] = {}
    largest = dict(FLOORS_HALF.get(half or "", FLOORS))
    for step in (s for s in a.steps(optimizer) if s in set(perturbed.steps(optimizer))):
        pair = _Pair(a, perturbed, optimizer, step, names)
        row = _measured(pair)
        now = {"loss": _loss_difference(pair), "gradient": row[0], "update": row[1], "buffers": row[2]}
        for kind, value in now.items():
            if value is not None and math.isfinite(value):
                largest[kind] = max(largest[kind], min(SAFETY * value, 0.9))
        tolerances[step] = dict(largest)
    words = f"{SAFETY} times what the last bit of the weights changes; gradients {largest['gradient']:.1e} at the end"
    return Tolerance(tolerances, largest if tolerances else default, words)


def _loss_difference(pair: _Pair) -> float | None:
    one, other = losses_of(pair.a, pair.optimizer, pair.step), losses_of(pair.b, pair.optimizer, pair.step)
    return None if one is None or other is None else _relative(one.summed, other.summed)


def _measured(pair: _Pair) -> tuple[float | None, float | None, float | None]:
    gradient = _differences(*pair.both("unclipped"), pair.names, SMALL)
    update = _differences(*pair.both("updates"), pair.names, None)
    buffers = _buffer_differences(pair)
    return tuple(max(d.values(), default=None) for d in (gradient, update, buffers))  # type: ignore[return-value]


# -- one thing after another -----------------------------------------------------------------------------------------


def _start(a: Trace, b: Trace, optimizer: int, names: Mapping[str, str], exact: bool) -> None:
    one, other = merged_start(a, optimizer), merged_start(b, optimizer)
    lonely = [n for n in one if n not in names], [m for m in other if m not in set(names.values())]
    if any(lonely):
        ties = [_ties(t, optimizer) for t in (a, b)]
        tied = [n for n in lonely[0] if n in ties[1]] + [m for m in lonely[1] if m in ties[0]]
        lines = [
            f"trained in {side} alone: {_few(each)}"
            for side, each in zip(("the reference", "this run"), lonely, strict=True)
            if each
        ]
        raise _Parted("start weights", tuple(lines), causes.of_names(tied))
    differences = _differences(one, other, names, None)
    apart = {n: d for n, d in differences.items() if d > (0 if exact else 1e-6)}
    if apart:
        lines = [f"the weights differ before the first step: {_listed(apart)}"]
        split = sorted({rank for w in other.values() for rank in w.apart})
        raise _Parted("start weights", tuple(lines), causes.of_start(len(apart), len(differences), split))


def _ties(trace: Trace, optimizer: int) -> set[str]:
    """Names of parameters that share a tensor with another name."""
    steps = (s for rank in trace.ranks for s in list(rank.steps.get(optimizer, {}).values())[:1])
    return {name for step in steps for names in step.layout.ties for name in names}


def _step(pair: _Pair, limits: Mapping[str, float], before: Sequence[Row]) -> Row:
    _examples(pair)
    loss, losses = _loss(pair, limits["loss"])
    gradient = update = None
    cells: dict[str, float] = {}
    records = pair.records()
    if all(s.measured for side in records for s in side):
        cells = _gradient(pair, limits["gradient"], losses)
        gradient = max(cells.values(), default=None)
        _clipping(pair, limits["gradient"])
    _rates(pair)
    if all(s.measured for side in records for s in side):
        update = _update(pair, limits["update"])
        _buffers(pair, limits["buffers"])
    return Row(pair.step, loss, gradient, update, cells)


def _examples(pair: _Pair) -> None:
    one, other = (Counter(examples_of(t, pair.optimizer, pair.step)) for t in (pair.a, pair.b))
    if not one or not other or one == other:
        return
    n, m, shared = one.total(), other.total(), (one & other).total()
    text = f"other examples: {n} in the reference, {m} here, {shared} of them in both"
    raise _Parted("examples", (text,), causes.of_examples(pair.b, pair.optimizer, pair.step, one, other))


def _loss(pair: _Pair, limit: float) -> tuple[float | None, tuple[Losses, Losses, str] | None]:
    one, other = losses_of(pair.a, pair.optimizer, pair.step), losses_of(pair.b, pair.optimizer, pair.step)
    if one is None or other is None:
        return None, None
    how, apart = agreeing(one, other, limit)
    if how is None:
        text = f"the loss: {one.summed:.8g} in the reference, {other.summed:.8g} here"
        raise _Parted(
            "loss",
            (text, *_first_module(pair, limit, "modules", "whose output differs")),
            causes.of_loss(one, other, *pair.records(), stochastic=_stochastic(pair)),
        )
    return apart, (one, other, how)


def _first_module(pair: _Pair, limit: float, kind: str, what: str) -> list[str]:
    """At `--level modules`: the first module whose output (`kind`: modules), or whose output's gradient in backward
    (returned), differs, where a rank of both computed outputs of the same shapes from the same examples in the same
    order. Sketches of outputs do not add up over other cuts of a batch."""
    for one, other in zip(*pair.records(), strict=False):
        calls = [sorted(side.raw.get(f"{kind}_of", [])) for side in (one, other)]
        if not calls[0] or calls[0] != calls[1] or one.examples != other.examples:
            continue
        values: dict[str, list[Any]] = {}
        for name, value in getattr(other, kind):
            values.setdefault(name, []).append(value)
        for name, value in getattr(one, kind):
            apart = difference(value, values[name].pop(0))
            if apart is None or not apart <= SAFETY * limit:
                by = "" if apart is None or math.isnan(apart) else f" by {apart:.2g}"
                return [f"the first module {what}: {name}{by}"]
    return []


def _stochastic(pair: _Pair) -> bool:
    return any(m["stochastic"] for trace in (pair.a, pair.b) for rank in trace.ranks for m in rank.models)


def _gradient(pair: _Pair, limit: float, losses: tuple[Losses, Losses, str] | None) -> dict[str, float]:
    one, other = pair.both("unclipped")
    absent = [n for n, m in pair.names.items() if (n in one) != (m in other)]
    real = [n for n in absent if (one.get(n) or other[pair.names[n]]).value.square > 0]
    if real:
        text = f"{_few(real)}: a gradient on one side alone"
        raise _Parted("gradient", (text,), causes.MISSING_GRADIENT)
    split = {n: w for n, w in other.items() if w.apart}
    differences = _differences(one, other, pair.names, SMALL)
    wrong = {n: d for n, d in differences.items() if d > limit or math.isnan(d)}
    if wrong:
        factors = {n: factor(one[n], other[pair.names[n]]) for n in wrong}
        counts = [len(side[0].clips or ()) for side in pair.records()]
        if counts[0] != counts[1] and not split:
            text = (
                f"clipping: {counts[0]} times in the reference, {counts[1]} times here; gradients "
                f"differ: {_listed(wrong)}"
            )
            raise _Parted("clipping", (text,), causes.CLIPPED_ELSEWHERE)
        cause = causes.of_gradient(pair.b, pair.optimizer, pair.step, (wrong, differences, factors), set(split), losses)
        where = _first_module(pair, limit, "returned", "in backward whose output gets another gradient")
        raise _Parted("gradient", (f"gradients differ: {_listed(wrong)}", *where), cause)
    return differences


def _clipping(pair: _Pair, limit: float) -> None:
    sides = [list(s[0].clips or []) for s in pair.records()]
    limits = [[(c["how"], c["limit"]) for c in side] for side in sides]
    if limits[0] != limits[1]:
        words = [", ".join(f"{how}({limit})" for how, limit in side) or "none" for side in limits]
        text = f"clipping: {words[0]} in the reference, {words[1]} here"
        raise _Parted("clipping", (text,), causes.of_clip_limits(sides[0], sides[1]))
    if any(c.get("unseen") for side in sides for c in side):
        return  # an engine clips inside of its step
    one, other = pair.both("grads")
    differences = _differences(one, other, pair.names, SMALL)
    wrong = {n: d for n, d in differences.items() if d > 2 * limit}
    if wrong:
        factors = {n: factor(one[n], other[pair.names[n]]) for n in wrong}
        text = f"gradients agree before clipping and differ after it: {_listed(wrong)}"
        raise _Parted("clipping", (text,), causes.of_clipping(factors))


def _rates(pair: _Pair) -> None:
    one, other = (_options(s) for s in (side[0] for side in pair.records()))
    shared = [(n, m) for n, m in pair.names.items() if n in one and m in other]
    for key in ("lr", "weight_decay", "betas", "momentum", "eps", "nesterov", "amsgrad"):
        wrong = [n for n, m in shared if not _close(one[n].get(key), other[m].get(key))]
        if wrong:
            x, y = one[wrong[0]].get(key), other[pair.names[wrong[0]]].get(key)
            what = "the learning rate" if key == "lr" else f"the optimizer's {key}"
            text = f"{what} of {_few(wrong)}: {x} in the reference, {y} here"
            raise _Parted("learning rate", (text,), causes.of_rate(key, x, y, pair.b, *pair.records()))


def _options(step: Any) -> dict[str, dict[str, Any]]:
    return {p.name: step.groups[p.group] for p in step.layout.parameters}


def _close(x: Any, y: Any) -> bool:
    if isinstance(x, float | int) and isinstance(y, float | int):
        return math.isclose(x, y, rel_tol=1e-9, abs_tol=0.0)
    return bool(x == y) or x is None or y is None


def _update(pair: _Pair, limit: float) -> float | None:
    one, other = pair.both("updates")
    differences = _differences(one, other, pair.names, None, whole=True)
    wrong = {n: d for n, d in differences.items() if d > limit or math.isnan(d)}
    if wrong:
        factors = {n: factor(one[n], other[pair.names[n]]) for n in wrong}
        text = f"the change of weights differs: {_listed(wrong)}"
        raise _Parted("update", (text,), causes.of_update(factors, *pair.records()))
    return max(differences.values(), default=None)


def _buffer_differences(pair: _Pair) -> dict[str, float]:
    one, other = (merged_buffers(t, pair.optimizer, pair.step) for t in (pair.a, pair.b))
    return _differences(one, other, {n: n for n in one if n in other and one[n].shape == other[n].shape}, None)


def _buffers(pair: _Pair, limit: float) -> None:
    wrong = {n: d for n, d in _buffer_differences(pair).items() if d > limit}
    if wrong:
        raise _Parted("buffers", (f"buffers differ after the step: {_listed(wrong)}",), causes.of_buffers(list(wrong)))


def _lengths(a: Trace, b: Trace, optimizer: int) -> None:
    one, other = a.steps(optimizer), b.steps(optimizer)
    complete = all(rank.ended is not None for t in (a, b) for rank in t.ranks)
    if complete and len(one) != len(other) and a.about.get("steps") == b.about.get("steps"):
        text = f"{len(one)} steps in the reference, {len(other)} here; they agree up to step {min(one[-1], other[-1])}"
        raise _Parted("examples", (text,), causes.LENGTHS)


# -- numbers ---------------------------------------------------------------------------------------------------------


def _differences(
    one: Mapping[str, Whole],
    other: Mapping[str, Whole],
    names: Mapping[str, str],
    small: float | None,
    whole: bool = False,
) -> dict[str, float]:
    """Of each tensor the 2-norm of the difference, relative to its own norm. `small`: which counts as at least so much
    of the norm of all. `whole`: relative to the norm of all, as changes are."""
    pairs = [(n, one[n].value, other[m].value) for n, m in names.items() if n in one and m in other]
    total = math.sqrt(sum(v.square for _, v, _ in pairs if math.isfinite(v.square)))
    differences = {}
    for name, x, y in pairs:
        if x.print == y.print:
            differences[name] = 0.0
            continue
        if not (math.isfinite(x.square) and math.isfinite(y.square)):
            differences[name] = 0.0 if repr(x.square) == repr(y.square) else math.nan
            continue
        if x.sketch is None or y.sketch is None:
            distance = abs(x.norm - y.norm)
        else:
            distance = float(np.linalg.norm(x.sketch - y.sketch))
        scale = total if whole else max(x.norm, y.norm, (small or 0.0) * total)
        differences[name] = distance / scale if scale > 0 else 0.0
    return differences


def factor(one: Whole, other: Whole) -> tuple[float, float]:
    """(f, cosine) of other = f * one, by sketches."""
    x, y = one.value.sketch, other.value.sketch
    if x is None or y is None or not np.any(x) or not np.any(y):
        return math.nan, 0.0
    inner, square = float(x @ y), float(x @ x)
    return inner / square, inner / math.sqrt(square * float(y @ y))


def _relative(x: float, y: float) -> float:
    scale = max(abs(x), abs(y))
    return abs(x - y) / scale if scale > 0 else 0.0


def _listed(differences: Mapping[str, float]) -> str:
    worst = sorted(differences, key=lambda n: -differences[n] if not math.isnan(differences[n]) else -math.inf)[:3]
    text = ", ".join(f"{n} by {differences[n]:.2g}" for n in worst)
    return f"{len(differences)} of them, furthest {text}" if len(differences) > 3 else text


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def table(verdict: Verdict) -> list[tuple[str, ...]]:
    """Rows for a table: step, loss, gradient, update."""
    return [(str(r.step), *(_number(x) for x in (r.loss, r.gradient, r.update))) for r in verdict.rows]


def _number(value: float | None) -> str:
    return "" if value is None else "same" if value == 0 else f"{value:.1e}"


def folder_name(path: Path) -> str:
    return path.name or str(path)


__all__ = [
    "ORDER",
    "Row",
    "Tolerance",
    "Verdict",
    "compare",
    "data_ranks",
    "factor",
    "gradient_differences",
    "table",
]
