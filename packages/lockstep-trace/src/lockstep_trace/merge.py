"""Merges the ranks' shards of tensors: fingerprint, norm and sketch of each full tensor.

In: a trace, an optimizer, a step. Out: `Whole` by name. Different blocks of a tensor are added. Equal blocks are
replicas: the lowest rank's value is used, and ranks with a different one are listed. Replicas are never averaged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from lockstep_trace.read import Parameter, Step, Trace, Value

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
