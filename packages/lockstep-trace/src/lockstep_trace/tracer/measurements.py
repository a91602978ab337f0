"""Measures an optimizer's tensors at a step: gradients and weights before it; weights, changes, moments and buffers
after it.

In: parameters, optimizer state, modules. Out: vectors of `fingerprint.measure`, on the tensors' devices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from . import placement
from .fingerprint import Block, heads, measure, subtracted, whole
from .layouts import SketchedLayout, nested
from .records import Since
from .versions import local_shape, written

SPARSE = 8  # measure moments, and weights that seem unmodified, every so many steps

Local = tuple[Tensor, Block, str]  # local tensor, its block, "partial" or an empty text


@dataclass
class Before:
    """Measured before a step. `weights`: of all parameters; `start`: the same at the first step, with the contents of
    shards. `grads`: of the parameters numbered `present`, None if they are `unclipped` times the clipping's factor;
    `unclipped`: measured before clipping, None where that is not known."""

    locals: list[Local]
    weights: list[Tensor]
    start: list[Tensor] | None
    shards: list[Tensor]
    present: list[int]
    absent: list[int]
    partial: list[int]
    grads: list[Tensor] | None
    unclipped: list[Tensor | None] = field(default_factory=list)


def measured_gradients(parameters: Sequence[Any], sketch: bool = True) -> list[Tensor]:
    """Measure the gradients of parameters that all have one."""
    return measured_locals([placement.local(p.grad) for p in parameters], sketch)


def measured_locals(tensors: Sequence[Local], sketch: bool = True) -> list[Tensor]:
    """Measure local tensors."""
    return measure([t for t, _, _ in tensors], [b for _, b, _ in tensors], sketch=sketch)


def before_step(
    layout: SketchedLayout,
    params: Sequence[Any],
    unclipped: dict[Any, Tensor],
    known: bool,
    fresh: bool,
    often: bool,
    evaluated: bool = False,
) -> Before:
    """Measure weights and gradients. `unclipped`: by key of parameter. `known`: whether gradients are `unclipped` times
    a factor. `fresh`: measure weights even if they seem unmodified. `often`: every step is recorded. `evaluated`: the
    model was evaluated since the last step, where weights may be swapped through `.data`."""
    locals_ = [placement.local(p) for p in params]
    start, shards = None, []
    modified = evaluated or [written(p) for p in params] != layout.versions
    if layout.sketches is not None and not modified and not fresh:
        weights = layout.sketches
    else:  # with a sketch if the last step may not be recorded, or weights were written to since
        weights = measured_locals(locals_, sketch=modified or layout.sketches is None or not often)
    if layout.sketches is None:
        layout.sketches = start = weights
        shards = _contents([t for (t, b, _) in locals_ if b.size != b.shape])
    present = [i for i, p in enumerate(params) if p.grad is not None]
    absent = [i for i, p in enumerate(params) if p.grad is None]
    grads = [placement.local(params[i].grad) for i in present]
    clipped = [unclipped.get(placement.key(params[i])) for i in present] if unclipped else []
    partial = [i for i, (_, _, kind) in zip(present, grads, strict=True) if kind]
    if known and clipped and all(v is not None for v in clipped):
        return Before(locals_, weights, start, shards, present, absent, partial, None, clipped)
    vectors = measured_locals(grads, sketch=not clipped or any(v is None for v in clipped))
    return Before(locals_, weights, start, shards, present, absent, partial, vectors, clipped)


def after_step(
    layout: SketchedLayout, before: Before, parameters: Sequence[Any], record: dict[str, Any]
) -> dict[str, list[Tensor]]:
    """Measure weights and their changes; return both, and the measurements before the step, by name. Adds the
    parameters' numbers to the record."""
    after = measured_locals(before.locals)
    last = layout.sketches or after
    earlier = [b if b.numel() == a.numel() else c for a, b, c in zip(after, before.weights, last, strict=True)]
    layout.sketches = after
    layout.versions = [written(p) for p in parameters]
    record["none"], record["partial"] = before.absent, before.partial
    vectors = {"before": heads(before.weights), "weights": heads(after), "updates": subtracted(after, earlier)}
    if before.start is not None:
        vectors["start"], vectors["shards"] = before.start, before.shards
        record["shards_of"] = [i for i, (_, b, _) in enumerate(before.locals) if b.size != b.shape]
    unclipped = [v for v in before.unclipped if v is not None]
    if before.grads is None:
        record["factor_of_clipping"] = True
        vectors["unclipped"] = unclipped
    elif unclipped and len(unclipped) == len(before.unclipped):
        vectors["grads"], vectors["unclipped"] = heads(before.grads), unclipped
    else:
        vectors["grads"] = before.grads
    return vectors


def moments(optimizer: Any, parameters: Sequence[Any], record: dict[str, Any]) -> list[Tensor]:
    """Measure the optimizer's elementwise state, without sketches, and add its names to the record."""
    tensors, blocks, names = [], [], []
    holders = [o.state for o in nested(optimizer) if isinstance(getattr(o, "state", None), Mapping)]
    for i, p in enumerate(parameters):
        source = getattr(p, "source", p)
        for name, value in next((s[source] for s in holders if s.get(source)), {}).items():
            if isinstance(value, Tensor) and value.shape == local_shape(p) and value.numel() > 1:
                tensor, block, _ = placement.local(value)
                tensors.append(tensor)
                blocks.append(p.block if isinstance(p, placement.FlatPart) else block)
                names.append((i, str(name)))
    record["moments_of"] = names
    return measure(tensors, blocks, sketch=False)


def buffers(roots: Sequence[nn.Module], record: dict[str, Any]) -> list[Tensor]:
    """Measure the models' buffers, and add their names, shapes and dtypes to the record."""
    tensors: dict[str, Tensor] = {}
    for root in roots:
        for name, buffer in root.named_buffers():
            if placement.is_plain_tensor(buffer) and buffer.numel() and buffer.layout == torch.strided:
                tensors.setdefault(placement.plain_name(name), buffer)
    chosen = list(tensors.items())[:2000]
    record["buffers_of"] = [(name, list(t.shape), placement.dtype_name(t)) for name, t in chosen]
    return measure([t for _, t in chosen], [whole(t) for _, t in chosen])


def modules(since: Since, record: dict[str, Any]) -> dict[str, list[Tensor]]:
    """Return the measurements of modules at the level `modules`, and add the modules' names and shapes to the
    record."""
    vectors: dict[str, list[Tensor]] = {}
    for kind, rows in (("modules", since.modules), ("returned", since.returned)):
        if rows:
            record[f"{kind}_of"] = [(name, list(shape)) for name, _, shape in rows]
            vectors[kind] = [v for _, v, _ in rows]
    return vectors


def _contents(tensors: list[Tensor]) -> list[Tensor]:
    tensors = [t.detach() for t in tensors]
    rotated = [t.reshape(-1).roll(1).view(t.shape) for t in tensors]
    blocks = [whole(t) for t in tensors]
    return [*measure(tensors, blocks, sketch=False), *measure(rotated, blocks, sketch=False)]
