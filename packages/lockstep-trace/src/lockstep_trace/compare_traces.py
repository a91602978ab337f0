"""Compares two traces and reports the first difference: the first step and, in causal order, the first quantity.

In: a reference trace and another, of any command or of a run's own steps (proof/verify.py), and a tolerance. Out:
`Comparison`.

Parameters are matched by name: two names match if they are equal, or if one is a dotted suffix of the other
(`net.0.weight`, `0.weight`), with equal shapes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lockstep_trace import causes
from lockstep_trace.causes import few
from lockstep_trace.coded import TraceError
from lockstep_trace.ranks import (
    UNSEEN,
    Losses,
    Whole,
    agreeing,
    difference,
    examples_of,
    losses_of,
    merged,
    merged_buffers,
    merged_start,
    scales_of_clipping,
)
from lockstep_trace.read import Trace

COLUMNS = ["step", "loss", "differs", "norm", "differs", "gradients", "changes"]
SAFETY = 10  # tolerance: this multiple of the effect of a perturbed last bit
SMALL = 1e-3  # of the total gradient norm: smaller gradients contain the rounding of larger numbers
NOTHING = 1e-5  # of the total gradient norm: Adam turns smaller gradients, pure rounding, into full steps
FLOORS = {"loss": 1e-6, "gradient": 4e-6, "update": 1e-3, "buffers": 1e-5}
FLOORS_HALF = {  # rounding of half-precision products, which flipping last bits of float32 weights does not show
    "bfloat16": {"loss": 4e-3, "gradient": 4e-2, "update": 0.2, "buffers": 1e-2},
    "float16": {"loss": 4e-3, "gradient": 2e-2, "update": 0.1, "buffers": 2e-3},
}
ROUNDED = {"bfloat16": 2**-8, "float16": 2**-11}  # largest relative error of a float32 number that is kept in them
WITHOUT_REFERENCE = {
    "float32": {"loss": 1e-4, "gradient": 1e-4, "update": 1e-2, "buffers": 1e-3},
    "half": {"loss": 2e-2, "gradient": 0.1, "update": 0.3, "buffers": 5e-2},
}


@dataclass(frozen=True)
class StepDifferences:
    """Comparison of one step: the reference's loss and gradient norm, and the largest relative difference of each kind
    with its parameter. None: not compared, for example after the first difference."""

    step: int
    losses: float | None = None  # the reference's
    loss: float | None = None
    norms: float | None = None  # the reference's
    norm: float | None = None
    gradient: float | None = None
    gradient_of: str = ""
    update: float | None = None
    update_of: str = ""


@dataclass(frozen=True)
class Comparison:
    """Result of a comparison. `first`: the first difference, a kind; None: all is within the
    tolerance. `lines`: what differs. `cause`: the likely cause, one sentence."""

    optimizer: int
    first: str | None
    step: int | None
    lines: tuple[str, ...]
    cause: str
    rows: tuple[StepDifferences, ...]
    tolerance: str

    @property
    def exact(self) -> bool:
        """Whether all compared numbers are bitwise equal."""
        return self.first is None and all(not (r.loss or r.gradient or r.update) for r in self.rows)


class _Parted(Exception):
    def __init__(self, first: str, lines: Sequence[str], cause: str) -> None:
        super().__init__(first)
        self.first, self.lines, self.cause = first, tuple(lines), cause


@dataclass(frozen=True)
class Tolerance:
    """Largest relative difference allowed, by step and kind. `words`: its description for the user."""

    by_step: Mapping[int, Mapping[str, float]]
    default: Mapping[str, float]
    words: str

    def at(self, step: int) -> Mapping[str, float]:
        return self.by_step.get(step, self.default)


EXACT = Tolerance({}, dict.fromkeys(FLOORS, 0.0), "the same bits (--exact)")


def compare_traces(
    a: Trace,
    b: Trace,
    perturbed: Trace | None = None,
    exact: bool = False,
    optimizer: int = 0,
    tolerance: Tolerance | None = None,
) -> Comparison:
    """Compare trace `b` with the reference `a`.

    `perturbed`: the reference traced with weights perturbed in their last bit, to measure the effect of rounding.
    `exact`: allow no difference. `tolerance`: overrides both. Errors: `TraceError` if the traces have no parameter name
    or no step in common."""
    names = match(a, b, optimizer)
    steps = [s for s in a.steps(optimizer) if s in set(b.steps(optimizer))]
    if not steps:
        raise TraceError("LS9000", f"{a.folder} and {b.folder} have no step in common")
    tolerance = tolerance or (EXACT if exact else _tolerance(a, perturbed, optimizer))
    rows: list[StepDifferences] = []
    at: int | None = None
    try:
        _start(a, b, optimizer, names, tolerance.at(steps[0]))
        _scores(a, b, tolerance.at(steps[0])["loss"])
        for at in steps:
            numbers: dict[str, Any] = {}
            try:
                _step(_Pair(a, b, optimizer, at, names), tolerance.at(at), numbers)
            finally:
                rows.append(StepDifferences(at, **numbers))
        _lengths(a, b, optimizer)
    except _Parted as parted:
        return Comparison(optimizer, parted.first, at, parted.lines, parted.cause, tuple(rows), tolerance.words)
    return Comparison(optimizer, None, None, (), "", tuple(rows), tolerance.words)


def gradient_differences(a: Trace, b: Trace, optimizer: int, step: int) -> dict[str, float]:
    """Return parameter of the reference `a` -> relative gradient difference; empty if the step is not measured."""
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
    names: Mapping[str, str]  # name in a -> name in b

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
        words = (
            f"{default['gradient']:g} for gradients, typical for rounding of {half or 'float32'}; `verify` measures it"
        )
        return Tolerance({}, default, words)
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
    words = (
        f"{SAFETY} times the effect of the weights' last bit; {largest['gradient']:.1e} for gradients in the last step"
    )
    return Tolerance(tolerances, largest if tolerances else default, words)


def _loss_difference(pair: _Pair) -> float | None:
    one, other = losses_of(pair.a, pair.optimizer, pair.step), losses_of(pair.b, pair.optimizer, pair.step)
    return None if one is None or other is None else _relative(one.summed, other.summed)


def _measured(pair: _Pair) -> tuple[float | None, float | None, float | None]:
    gradient = _differences(*pair.both("unclipped"), pair.names, SMALL)
    update = _differences(*pair.both("updates"), pair.names, None, whole=True)
    buffers = _buffer_differences(pair)
    return tuple(max(d.values(), default=None) for d in (gradient, update, buffers))  # type: ignore[return-value]


# -- comparisons in causal order -------------------------------------------------------------------------------------


def _start(a: Trace, b: Trace, optimizer: int, names: Mapping[str, str], limits: Mapping[str, float]) -> None:
    one, other = merged_start(a, optimizer), merged_start(b, optimizer)
    lonely = [n for n in one if n not in names], [m for m in other if m not in set(names.values())]
    if any(lonely):
        ties = [_ties(t, optimizer) for t in (a, b)]
        tied = [n for n in lonely[0] if n in ties[1]] + [m for m in lonely[1] if m in ties[0]]
        lines = [
            f"trained in {side} alone: {few(each)}"
            for side, each in zip(("the reference", "this run"), lonely, strict=True)
            if each
        ]
        here = bool(tied) and all(n in ties[1] for n in tied)
        raise _Parted("start weights", tuple(lines), causes.of_names(tied, here))
    differences = _differences(one, other, names, None)
    limit = limits.get("start weights", 1e-6 if any(limits.values()) else 0.0)
    beyond_limit = {n: d for n, d in differences.items() if d > limit or math.isnan(d)}
    if beyond_limit:
        lines = [f"the weights differ before the first step: {_listed(beyond_limit)}"]
        split = sorted({rank for w in other.values() for rank in w.differences})
        cause = _of_dtypes(a, b, optimizer, names, beyond_limit) or causes.of_start(
            len(beyond_limit), len(differences), split
        )
        raise _Parted("start weights", tuple(lines), cause)


def _of_dtypes(
    a: Trace, b: Trace, optimizer: int, names: Mapping[str, str], differences: Mapping[str, float]
) -> str | None:
    starts = ([r.starts[optimizer][0] for r in t.ranks if optimizer in r.starts] for t in (a, b))
    one, other = ({p.name: p.dtype for layout in layouts for p in layout.parameters} for layouts in starts)
    pairs = {(one[name], other[names[name]]) for name in differences}
    if len(pairs) != 1:
        return None
    there, here = pairs.pop()
    limit = max(ROUNDED.get(dtype, 0.0) for dtype in (there, here))
    return causes.of_dtypes(there, here) if there != here and all(d <= limit for d in differences.values()) else None


def _scores(a: Trace, b: Trace, limit: float) -> None:
    one, other = (t.about.get("scores") or {} for t in (a, b))
    for name in (n for n in one if n in other):
        x, y = one[name], other[name]
        if name != "loss" and (limit > 0 or (math.isnan(x) and math.isnan(y))):
            continue
        if not _relative(x, y) <= limit:
            text = f"before training, {name} without dropout: {x!r} in the reference, {y!r} here"
            raise _Parted("scores", (text,), causes.of_scores(x, y))


def _ties(trace: Trace, optimizer: int) -> set[str]:
    steps = (s for rank in trace.ranks for s in list(rank.steps.get(optimizer, {}).values())[:1])
    return {name for step in steps for names in step.layout.ties for name in names}


def _step(pair: _Pair, limits: Mapping[str, float], numbers: dict[str, Any]) -> None:
    _examples(pair)
    losses = _loss(pair, limits["loss"], numbers)
    measured = all(s.measured for side in pair.records() for s in side)
    if measured:
        _gradient(pair, limits["gradient"], losses, numbers)
        _clipping(pair, limits["gradient"])
    _rates(pair)
    if measured:
        _update(pair, limits, numbers)
        _buffers(pair, limits["buffers"])


def _examples(pair: _Pair) -> None:
    for side, records in zip(("in the reference", "here"), pair.records(), strict=True):
        expected, targets = next((s.raw.get("targets_of_step") for s in records), None), causes.targets_of(records)
        if expected is not None and targets is not None and targets != expected:
            text = f"{targets:.10g} of the step's {expected:.10g} targets went through the model {side}"
            raise _Parted("examples", (text,), causes.LEFT_OUT)
    one, other = (Counter(examples_of(t, pair.optimizer, pair.step)) for t in (pair.a, pair.b))
    if not one or not other or one == other:
        return
    n, m, shared = one.total(), other.total(), (one & other).total()
    text = f"other examples: {n} in the reference, {m} here, {shared} of them in both"
    raise _Parted("examples", (text,), causes.of_examples(pair.a, pair.b, pair.optimizer, pair.step, one, other))


def _loss(pair: _Pair, limit: float, numbers: dict[str, Any]) -> tuple[Losses, Losses, str] | None:
    one, other = losses_of(pair.a, pair.optimizer, pair.step), losses_of(pair.b, pair.optimizer, pair.step)
    if one is None or other is None:
        return None
    how, relative = agreeing(one, other, limit)
    numbers |= {"losses": one.summed, "loss": relative}
    if how is None:
        text = f"the loss: {one.summed:.8g} in the reference, {other.summed:.8g} here"
        where = _micro_batches(pair, limit)
        lines = [
            f"micro-batch {i}, on rank {rank}: {x:.8g} in the reference, {y:.8g} here" for i, rank, x, y in where or ()
        ]
        raise _Parted(
            "loss",
            (text, *lines[:3], *_first_module(pair, limit, "modules", "whose output differs")),
            causes.of_loss(one, other, *pair.records(), _stochastic(pair), micro_batches=where, exact=not limit),
        )
    return one, other, how


def _micro_batches(pair: _Pair, limit: float) -> list[tuple[int, int, float, float]] | None:
    sides = []
    for trace in (pair.a, pair.b):
        losses: dict[int, tuple[int, float]] = {}
        for rank, step in trace.at(pair.optimizer, pair.step):
            losses |= {int(i): (rank.number, x) for i, x in (step.raw.get("micro_batches") or {}).items()}
        sides.append(losses)
    if not sides[0] or sides[0].keys() != sides[1].keys():
        return None
    rows = [(i, sides[1][i][0], sides[0][i][1], sides[1][i][1]) for i in sorted(sides[0])]
    return [row for row in rows if not _relative(row[2], row[3]) <= max(limit, 1e-6)]


def _first_module(pair: _Pair, limit: float, kind: str, what: str) -> list[str]:
    """Describe the first module whose output (`kind`: modules) or output gradient (returned) differs, or return [].

    Needs `--level modules`, and a rank that computed outputs of equal shapes from the same examples in the same order
    in both traces: sketches of outputs cannot be merged across different splits of a batch."""
    for one, other in zip(*pair.records(), strict=False):
        calls = [sorted(side.raw.get(f"{kind}_of", [])) for side in (one, other)]
        if not calls[0] or calls[0] != calls[1] or one.examples != other.examples:
            continue
        values: dict[str, list[Any]] = {}
        for name, value in getattr(other, kind):
            values.setdefault(name, []).append(value)
        for name, value in getattr(one, kind):
            distance = difference(value, values[name].pop(0))
            if distance is None or not distance <= SAFETY * limit:
                by = "" if distance is None or math.isnan(distance) else f" by {distance:.2g}"
                return [f"the first module {what}: {name}{by}"]
    return []


def _stochastic(pair: _Pair) -> bool:
    return any(m["stochastic"] for trace in (pair.a, pair.b) for rank in trace.ranks for m in rank.models)


def _gradient(pair: _Pair, limit: float, losses: tuple[Losses, Losses, str] | None, numbers: dict[str, Any]) -> None:
    one, other = pair.both("unclipped")
    absent = [n for n, m in pair.names.items() if (n in one) != (m in other)]
    real = [n for n in absent if (one.get(n) or other[pair.names[n]]).value.square != 0]  # NaN counts as a gradient
    if real:
        text = f"{few(real)}: a gradient only on one side"
        raise _Parted("gradient", (text,), causes.MISSING_GRADIENT)
    split = {n: w for n, w in other.items() if w.differences}
    differences = _differences(one, other, pair.names, SMALL)
    norms = [_norm(side) for side in (one, other)]
    numbers |= {
        "norms": norms[0],
        "norm": _relative(*norms),
        "gradient": _largest(differences),
        "gradient_of": _worst(differences),
    }
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
        sides = (wrong, differences, factors)
        stochastic = _stochastic(pair)
        cause = causes.of_gradient(pair.b, pair.optimizer, pair.step, sides, set(split), losses, stochastic)
        if not limit and not split and all(d < causes.ROUNDING for d in wrong.values()):
            cause = causes.BY_ROUNDING
        small = all(d < WITHOUT_REFERENCE["half"]["gradient"] for d in wrong.values())
        if (small or cause == causes.ELSEWHERE) and len({s.autocast for side in pair.records() for s in side}) > 1:
            cause = causes.PRECISION
        where = _first_module(pair, limit, "returned", "in backward whose output gets another gradient")
        raise _Parted("gradient", (f"gradients differ: {_listed(wrong)}", *where), cause)


def _clipping(pair: _Pair, limit: float) -> None:
    sides = [list(s[0].clips or []) for s in pair.records()]
    limits = [[(c["how"], c["limit"]) for c in side] for side in sides]
    if limits[0] != limits[1]:
        words = [", ".join(f"{how}({limit})" for how, limit in side) or "none" for side in limits]
        text = f"clipping: {words[0]} in the reference, {words[1]} here"
        raise _Parted("clipping", (text,), causes.of_clip_limits(sides[0], sides[1]))
    norms = [[c["norm"] for c in side if c.get("whole")] for side in sides]  # as reported
    if norms[0] and norms[1] and not _relative(norms[0][0], norms[1][0]) <= limit:
        text = f"the gradient norm: {norms[0][0]!r} in the reference, {norms[1][0]!r} here; the gradients agree"
        raise _Parted("clipping", (text,), causes.NORM)
    if any(c.get("unseen") for side in sides for c in side):
        return  # an engine clips inside its step
    one, other = pair.both("grads")
    differences = _differences(one, other, pair.names, SMALL)
    wrong = {n: d for n, d in differences.items() if d > 2 * limit}
    if wrong:
        factors = {n: factor(one[n], other[pair.names[n]]) for n in wrong}
        text = f"gradients agree before clipping and differ after it: {_listed(wrong)}"
        scales = scales_of_clipping(pair.b.at(pair.optimizer, pair.step))
        own = causes.own_norms(scales) if scales else None
        raise _Parted("clipping", (text,), own or causes.of_clipping(factors))


def _rates(pair: _Pair) -> None:
    one, other = (_options(s) for s in (side[0] for side in pair.records()))
    shared = [(n, m) for n, m in pair.names.items() if n in one and m in other]
    for key in ("lr", "weight_decay", "betas", "momentum", "eps", "nesterov", "amsgrad"):
        wrong = [n for n, m in shared if not _close(one[n].get(key), other[m].get(key))]
        if wrong:
            x, y = one[wrong[0]].get(key), other[pair.names[wrong[0]]].get(key)
            what = "the learning rate" if key == "lr" else f"the optimizer's {key}"
            text = f"{what} of {few(wrong)}: {x} in the reference, {y} here"
            raise _Parted("learning rate", (text,), causes.of_rate(key, x, y, pair.b, *pair.records()))


def _options(step: Any) -> dict[str, dict[str, Any]]:
    return {p.name: step.groups[p.group] for p in step.layout.parameters}


def _close(x: Any, y: Any) -> bool:
    if isinstance(x, float | int) and isinstance(y, float | int):
        return math.isclose(x, y, rel_tol=1e-9, abs_tol=0.0)
    return bool(x == y) or x is None or y is None


def _update(pair: _Pair, limits: Mapping[str, float], numbers: dict[str, Any]) -> None:
    one, other = pair.both("updates")
    differences = _differences(one, other, pair.names, None, whole=True)
    numbers |= {"update": _largest(differences), "update_of": _worst(differences)}
    wrong = {n: d for n, d in differences.items() if d > limits["update"] or math.isnan(d)}
    if wrong and any(limits.values()):
        gradients = pair.both("unclipped")[0]
        least = NOTHING * _norm(gradients)
        wrong = {n: d for n, d in wrong.items() if n not in gradients or not gradients[n].value.norm <= least}
    if wrong:
        factors = {n: factor(one[n], other[pair.names[n]]) for n in wrong}
        text = f"the change of weights differs: {_listed(wrong)}"
        raise _Parted("update", (text,), causes.of_update(factors, *pair.records()))


def _buffer_differences(pair: _Pair) -> dict[str, float]:
    one, other = (merged_buffers(t, pair.optimizer, pair.step) for t in (pair.a, pair.b))
    names = {n: n for n in one if n in other and one[n].shape == other[n].shape}
    return _differences(one, other, names, None, infinite=True)


def _buffers(pair: _Pair, limit: float) -> None:
    wrong = {n: d for n, d in _buffer_differences(pair).items() if d > limit or math.isnan(d)}
    if wrong:
        raise _Parted("buffers", (f"buffers differ after the step: {_listed(wrong)}",), causes.of_buffers(list(wrong)))


def _lengths(a: Trace, b: Trace, optimizer: int) -> None:
    one, other = a.steps(optimizer), b.steps(optimizer)
    complete = all(rank.ended is not None for t in (a, b) for rank in t.ranks)
    if complete and len(one) != len(other) and a.about.get("steps") == b.about.get("steps"):
        text = f"{len(one)} steps in the reference, {len(other)} here; they agree up to step {min(one[-1], other[-1])}"
        raise _Parted("examples", (text,), causes.of_lengths(a, b, optimizer))


# -- numbers ---------------------------------------------------------------------------------------------------------


def _differences(
    one: Mapping[str, Whole],
    other: Mapping[str, Whole],
    names: Mapping[str, str],
    small: float | None,
    whole: bool = False,
    infinite: bool = False,
) -> dict[str, float]:
    """Return name -> 2-norm of the difference, relative to the tensor's norm: 0 only for equal bits, NaN if a value is
    not finite.

    `small`: lower bound of the tensor's norm, as a share of the total norm. `whole`: relative to the total norm, used
    for updates. `infinite`: equal infinities, as in masks, are no difference."""
    pairs = [(n, one[n].value, other[m].value) for n, m in names.items() if n in one and m in other]
    total = math.sqrt(sum(v.square for _, v, _ in pairs if math.isfinite(v.square)))
    differences = {}
    for name, x, y in pairs:
        same = x.fingerprint == y.fingerprint
        if not (math.isfinite(x.square) and math.isfinite(y.square)):
            differences[name] = 0.0 if same and infinite and math.isinf(x.square) else math.nan
            continue
        if same:
            differences[name] = 0.0
            continue
        if x.sketch is None or y.sketch is None:
            distance = abs(x.norm - y.norm)
        else:
            distance = float(np.linalg.norm(x.sketch - y.sketch))
        scale = total if whole else max(x.norm, y.norm, (small or 0.0) * total)
        differences[name] = max(distance / scale if scale > 0 else 0.0, UNSEEN)
    return differences


def _norm(tensors: Mapping[str, Whole]) -> float:
    return math.sqrt(sum(w.value.square for w in tensors.values()))


def _worst(differences: Mapping[str, float]) -> str:
    name = max(differences, key=lambda n: math.inf if math.isnan(differences[n]) else differences[n], default="")
    return name if name and differences[name] else ""


def _largest(differences: Mapping[str, float]) -> float | None:
    if not differences:
        return None
    name = _worst(differences)
    return differences[name] if name else 0.0


def factor(one: Whole, other: Whole) -> tuple[float, float]:
    """Return (f, cosine) of the fit other = f * one, by sketches; (NaN, 0) without sketches."""
    x, y = one.value.sketch, other.value.sketch
    if x is None or y is None or not np.any(x) or not np.any(y):
        return math.nan, 0.0
    inner, square = float(x @ y), float(x @ x)
    return inner / square, inner / math.sqrt(square * float(y @ y))


def _relative(x: float, y: float) -> float:
    if not (math.isfinite(x) and math.isfinite(y)):
        return math.nan
    scale = max(abs(x), abs(y))
    return abs(x - y) / scale if scale > 0 else 0.0


def _listed(differences: Mapping[str, float]) -> str:
    worst = sorted(differences, key=lambda n: -differences[n] if not math.isnan(differences[n]) else -math.inf)[:3]
    text = ", ".join(
        f"{n} is not finite" if math.isnan(differences[n]) else f"{n} by {differences[n]:.2g}" for n in worst
    )
    return f"{len(differences)}, most of all {text}" if len(differences) > 3 else text


def row_cells(row: StepDifferences) -> list[str]:
    """Return the cells of a table row with `COLUMNS`."""
    numbers = ["" if x is None else f"{x:.6f}" for x in (row.losses, row.norms)]
    cells = [_in_words(x) for x in (row.loss, row.norm, row.gradient, row.update)]
    return [str(row.step), numbers[0], cells[0], numbers[1], *cells[1:]]


def _in_words(difference: float | None) -> str:
    if difference is None:
        return ""
    if math.isnan(difference):
        return "not finite"
    return "same bits" if difference == 0 else f"{difference:.1e}"


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
