"""Combines the ranks of a trace: which ranks are data-parallel, a step's examples and loss over all of them, and full
tensors.

In: a trace, an optimizer, a step. Out: ranks and hashes of examples; `Losses`; `Whole` by name.

- Ranks of one tensor-parallel group, and the stages of a pipeline, share examples and count once.
- The loss of a step is reduced in the ways common in scripts: the mean over ranks of the sum over micro-batches (its
  gradient is what averaging over ranks computes), the mean of all, and the mean weighted by targets or examples.
- Shards are added. Of replicas the lowest rank's value is used; others are listed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lockstep_trace.read import Parameter, Rank, Step, Trace, Value

MODEL_AXES = ("tp", "tensor", "cp", "sp", "pp", "ep", "mp", "pipe")


def pipelined(trace: Trace, optimizer: int) -> bool:
    """Return whether ranks are pipeline stages: they hold different, unsharded parameters.

    Optimizers sharded by parameter (ZeroRedundancyOptimizer) do so, too, but every rank calls the whole model."""
    names = {frozenset(p.name for p in layout.parameters) for _, layout in _layouts(trace, optimizer)}
    models = {layout.models for _, layout in _layouts(trace, optimizer)}
    parameters_of_layouts = [{p.name for p in layout.parameters} for _, layout in _layouts(trace, optimizer)]
    disjoint = len(parameters_of_layouts) > 1 and not set.intersection(*parameters_of_layouts)
    return len(names) > 1 and disjoint and bool(models) and not _sharded_optimizer(trace, optimizer)


def _sharded_optimizer(trace: Trace, optimizer: int) -> bool:
    layouts = dict(_layouts(trace, optimizer))
    for number, layout in layouts.items():
        others = {p.name for n, other in layouts.items() if n != number for p in other.parameters}
        step = next(iter(_rank(trace, number).steps[optimizer].values()))
        if not others & set(step.outside or {}) and others - {p.name for p in layout.parameters}:
            return False
    return True


def _rank(trace: Trace, number: int) -> Rank:
    return next(r for r in trace.ranks if r.number == number)


def _layouts(trace: Trace, optimizer: int):  # type: ignore[no-untyped-def]
    return [
        (rank.number, next(iter(rank.steps[optimizer].values())).layout)
        for rank in trace.ranks
        if rank.steps.get(optimizer)
    ]


def model_parallel(trace: Trace, optimizer: int) -> list[int]:
    """Return the mesh dimensions that shard the model, not the data. A mesh without FSDP shards the model."""
    mesh = next((layout.mesh for _, layout in _layouts(trace, optimizer) if layout.mesh), None)  # with all dimensions
    if mesh is None:
        return []
    names = mesh["names"] or [""] * len(mesh["sizes"])
    fsdp = any(model.get("fsdp") for rank in trace.ranks for model in rank.models)
    named = [i for i, name in enumerate(names) if any(axis in str(name).split("_") for axis in MODEL_AXES)]
    if named or fsdp:
        return named
    sharded = [i for i, p in enumerate(mesh["placements"]) if "S" in p]
    return sharded or list(range(len(names)))


def data_ranks(trace: Trace, optimizer: int) -> list[Rank]:
    """Return one rank per group of ranks that share examples."""
    ranks = [rank for rank in trace.ranks if rank.steps.get(optimizer)]
    if pipelined(trace, optimizer):
        first = next((r for r in ranks if _examples(next(iter(r.steps[optimizer].values())))), ranks[0])
        own = {p.name for p in next(iter(first.steps[optimizer].values())).layout.parameters}
        return [r for r in ranks if {p.name for p in next(iter(r.steps[optimizer].values())).layout.parameters} == own]
    axes = model_parallel(trace, optimizer)
    if not axes:
        return ranks
    by_place: dict[tuple[int, ...], Rank] = {}
    for rank in ranks:
        mesh = next(iter(rank.steps[optimizer].values())).layout.mesh or {"at": [rank.number]}
        by_place.setdefault(tuple(x for i, x in enumerate(mesh["at"]) if i not in axes), rank)
    return list(by_place.values())


def _examples(step: Step) -> list[str]:
    examples, micro = list(step.examples or []), list(step.micro or [])
    spare = len(micro) - (step.backwards or 0)
    if spare <= 0 or not step.backwards or sum(micro) != len(examples):
        return examples
    hashes: list[str] = []
    counted: set[tuple[str, ...]] = set()
    at = 0
    for size in micro:
        part = tuple(examples[at : at + size])
        at += size
        if part in counted and spare:
            spare -= 1
            continue
        counted.add(part)
        hashes += part
    return hashes


def examples_of(trace: Trace, optimizer: int, step: int) -> list[str]:
    """Return the hashes of a step's examples over all data-parallel ranks."""
    return [
        h
        for r in data_ranks(trace, optimizer)
        if step in r.steps[optimizer]
        for h in _examples(r.steps[optimizer][step])
    ]


def scales_of_clipping(records: Sequence[tuple[Rank, Step]]) -> dict[int, float]:
    """Return rank -> factor by which norm clipping scaled its shards; empty if unknown."""
    scales: dict[int, float] = {}
    for rank, step in records:
        clips = [c for c in step.clips or () if not c.get("unseen")]
        sharded = any(not p.whole for p in step.layout.parameters)
        if not sharded or len(clips) != 1 or clips[0]["how"] != "clip_grad_norm_" or "unclipped" not in step.raw:
            return {}
        before = sum(v.square for v in step.unclipped.values())
        after = sum(v.square for v in step.grads.values())
        if before > 0 and after > 0:
            scales[rank.number] = float((after / before) ** 0.5)
    return scales if len(scales) > 1 else {}


@dataclass(frozen=True)
class Losses:
    """Losses of a step. `counts`: targets, else examples, of each loss; empty if unknown. `reported`: the step's loss
    as the program reports it; if set, only this is compared."""

    each: tuple[tuple[float, ...], ...]  # by rank
    counts: tuple[tuple[int, ...], ...]
    reported: float | None = None

    @property
    def summed(self) -> float:
        """The mean over ranks of the sum over micro-batches."""
        if self.reported is not None:
            return self.reported
        return sum(sum(own) for own in self.each) / len(self.each)

    @property
    def mean(self) -> float:
        flat = [x for own in self.each for x in own]
        return sum(flat) / len(flat)

    @property
    def weighted(self) -> float | None:
        """The mean weighted by `counts`, or None."""
        flat = [
            (x, n) for own, counts in zip(self.each, self.counts, strict=True) for x, n in zip(own, counts, strict=True)
        ]
        total = sum(n for _, n in flat)
        return sum(x * n for x, n in flat) / total if total else None

    @property
    def total(self) -> float:
        return sum(sum(own) for own in self.each)

    @property
    def equal_counts(self) -> bool:
        return len({n for counts in self.counts for n in counts}) < 2

    @property
    def micro_batches(self) -> int:
        return max(len(own) for own in self.each)


def losses_of(trace: Trace, optimizer: int, step: int) -> Losses | None:
    """Return the losses of a step, or None if no rank called `backward` on a scalar."""
    each, counts, reported = [], [], None
    for rank in _with_loss(trace, optimizer, step):
        record = rank.steps[optimizer][step]
        own = tuple(v / (s or 1.0) for v, s in record.losses if v is not None)
        targets = targets_of_micro(record)
        sizes = [t if t is not None else n for t, n in zip(targets, record.micro or [], strict=False)]
        reported = record.raw.get("loss", reported)
        each.append(own)
        counts.append(tuple(sizes) if len(sizes) == len(own) else (0,) * len(own))
    return Losses(tuple(each), tuple(counts), reported) if each else None


def targets_of_micro(record: Step) -> list[int | None]:
    """Return the number of targets of each micro-batch: from labels passed to the model, else from the loss functions
    in the graph, if each loss has one."""
    targets: list[int | None] = list(record.targets or [])
    functions = record.objectives or []
    if (not targets or None in targets) and len(functions) == len(record.losses or ()):
        return [each.get("targets") for each in functions]
    return targets


def _with_loss(trace: Trace, optimizer: int, step: int):  # type: ignore[no-untyped-def]
    def has(rank):  # type: ignore[no-untyped-def]
        return step in rank.steps.get(optimizer, {}) and bool(rank.steps[optimizer][step].losses)

    own = [rank for rank in data_ranks(trace, optimizer) if has(rank)]
    return own or [rank for rank in trace.ranks if has(rank)]  # the last stage of a pipeline


def agreeing(one: Losses, other: Losses, limit: float) -> tuple[str | None, float]:
    """Return the reduction by which both agree ("as summed", or a pair of means; None: none), and the relative
    difference."""
    ways = [("as summed", one.summed, other.summed)]
    for x in (one.summed, one.mean, one.weighted) if one.reported is None or other.reported is None else ():
        for name, y in (
            ("mean", other.mean),
            ("weighted", other.weighted),
            ("total", other.total),
            ("summed", other.summed),
        ):
            if x is not None and y is not None:
                ways.append((name, x, y))
    differences = [
        (name, abs(x - y) / max(abs(x), abs(y), 1e-30) if math.isfinite(x) and math.isfinite(y) else math.nan)
        for name, x, y in ways
    ]
    return next(((n, d) for n, d in differences if d <= limit), (None, differences[0][1]))


_MASK = (1 << 64) - 1
UNSEEN = 1e-16  # relative difference reported for unequal bits with equal sketches (float32)


@dataclass(frozen=True)
class Whole:
    """A tensor merged over ranks. `value`: of the recorded blocks. `missing`: number of elements that no rank recorded.
    `differences`: rank -> relative difference of its replica from the lowest rank's (None without sketches), if any."""

    value: Value
    shape: tuple[int, ...]
    missing: int
    differences: Mapping[int, float | None]


def merged(trace: Trace, optimizer: int, step: int, of: Callable[[Step], Mapping[str, Value]]) -> dict[str, Whole]:
    """Merge the tensors of a step. `of`: selects them, for example `lambda s: s.grads`."""
    parts: dict[str, list[tuple[int, Parameter, Value, bool]]] = {}
    for rank, record in trace.at(optimizer, step):
        values, partial = of(record), {record.layout.parameters[i].name for i in record.raw.get("partial", ())}
        for parameter in record.layout.parameters:
            if parameter.name in values:
                row = (rank.number, parameter, values[parameter.name], parameter.name in partial)
                parts.setdefault(parameter.name, []).append(row)
    return {name: _whole(rows) for name, rows in parts.items()}


def merged_start(trace: Trace, optimizer: int) -> dict[str, Whole]:
    """Merge the weights before the first step."""
    parts: dict[str, list[tuple[int, Parameter, Value, bool]]] = {}
    for rank in trace.ranks:
        if optimizer in rank.starts:
            layout, values = rank.starts[optimizer]
            for parameter in layout.parameters:
                parts.setdefault(parameter.name, []).append((rank.number, parameter, values[parameter.name], False))
    return {name: _whole(rows) for name, rows in parts.items()}


def merged_buffers(trace: Trace, optimizer: int, step: int) -> dict[str, Whole]:
    """Merge the buffers of all ranks, which are full replicas."""
    parts: dict[str, list[tuple[int, Parameter, Value, bool]]] = {}
    for rank, record in trace.at(optimizer, step):
        for name, value in record.buffers.items():
            shape = next(tuple(s) for n, s, _ in record.raw["buffers_of"] if n == name)
            whole = Parameter(name, shape, (0,) * len(shape), shape, 0, "", "", 0, True, False, "")
            parts.setdefault(name, []).append((rank.number, whole, value, False))
    return {name: _whole(rows) for name, rows in parts.items()}


def _whole(rows: list[tuple[int, Parameter, Value, bool]]) -> Whole:
    shape = rows[0][1].shape
    if any(partial for *_, partial in rows):
        return Whole(_sum([v for _, _, v, _ in rows]), shape, 0, {})
    blocks: dict[object, tuple[Parameter, Value]] = {}
    differences: dict[int, float | None] = {}
    for rank, parameter, value, _ in rows:
        first = blocks.setdefault(parameter.block, (parameter, value))[1]
        if first.fingerprint != value.fingerprint:
            differences[rank] = difference(first, value)
    covered = sum(int(np.prod(p.size)) for p, _ in blocks.values())
    return Whole(_sum([v for _, v in blocks.values()]), shape, int(np.prod(shape)) - covered, differences)


def _sum(values: list[Value]) -> Value:
    sketches = [v.sketch for v in values if v.sketch is not None]
    sketch = np.sum(sketches, axis=0) if len(sketches) == len(values) else None
    return Value(sum(v.fingerprint for v in values) & _MASK, sum(v.square for v in values), sketch)


def difference(a: Value, b: Value) -> float | None:
    """Return the 2-norm of the difference, relative to the larger norm: 0 only for equal bits; None without
    sketches."""
    if a.fingerprint == b.fingerprint:
        return 0.0
    if a.sketch is None or b.sketch is None:
        return None
    scale = max(a.norm, b.norm)
    return max(float(np.linalg.norm(a.sketch - b.sketch)) / scale if scale > 0 else 0.0, UNSEEN)
