"""Reference for gradient accumulation: the micro-batches of a step as one batch.

In: the recorded calls of a step and its backwards. Out: observations, dictionaries with `reference` and `result`.
Dropout is off on both sides, since one batch draws other masks than its parts.

It detects models that depend on the batch size and, if the model computes its loss, wrong sums of the micro-batches'
losses. Losses outside the model, such as contrastive ones, are not checked: the recorded gradient of the outputs is
used as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import placement
from . import replay
from .calls import ModuleCall, NotRecomputable, mapped, tensors
from .gradients import Backward
from .precision import distance_between, exactly, first_difference
from .rows import batch_of, limit_of, quiet

Gradients = dict[int, Tensor]


def accumulation(calls: Sequence[ModuleCall], backwards: Sequence[Backward], own: set[int]) -> list[dict[str, Any]]:
    """Compare the gradient of all micro-batches with that of one batch of their examples. `own`: ids of the optimizer's
    parameters. Returns nothing for a step of one micro-batch."""
    parts = [(b, _call_of(b, calls, own)) for b in backwards]
    if len(parts) < 2:
        return []
    first = parts[0][1]
    if any(call.module is not first.module for _, call in parts):
        raise NotRecomputable("micro-batches go through different models")
    if any(isinstance(m, placement.BATCH_NORM) and m.training for m in first.module.modules()):
        raise NotRecomputable("batch norm: each micro-batch has its own statistics")
    for _, call in parts:
        if not replay.is_compiled(call.module):
            replay.require_reproduced(call)
    sizes = [batch_of(call, least=1) for _, call in parts]
    union = _joined([(call.args, call.kwargs) for _, call in parts], sizes)
    if exactly(*(replay.run(quiet(first, True), union, first, seed=seed) for seed in (1, 2))) > 0:
        raise NotRecomputable("the model draws random numbers with dropout off, or is not deterministic")
    separate: Gradients = {}
    outputs: list[list[Tensor]] = []
    for backward, call in parts:
        result, gradients = _gradients(call, (call.args, call.kwargs), _arrived(call, backward.number))
        outputs.append(result)
        separate = {k: separate[k] + g if k in separate else g for k, g in (separate | gradients).items() if k in own}
    seeds = _together([_arrived(call, b.number) for b, call in parts], outputs, sizes)
    together_outputs, together = _gradients(first, union, seeds)
    return [_compared(first, union, sizes, (outputs[0], together_outputs), (separate, together), own)]


def _call_of(backward: Backward, calls: Sequence[ModuleCall], own: set[int]) -> ModuleCall:
    if backward.reason:
        raise NotRecomputable(backward.reason)
    rows = [c for c in calls if any(backward.number in o.gradients for o in c.outputs)]
    rows = [c for c in rows if any(id(p) in own for p in c.module.parameters())]
    if len(rows) != 1:
        raise NotRecomputable(f"a loss is computed from {len(rows)} calls of models")
    return rows[0]


def _arrived(call: ModuleCall, number: int) -> dict[int, Tensor]:
    fired = {i: row.gradients[number] for i, row in enumerate(call.outputs) if number in row.gradients}
    seeds = [i for i in call.seeds.get(number, []) if i in fired]
    if not seeds and len(fired) != 1:
        raise NotRecomputable("the loss depends on several outputs in an unknown way")
    return {i: fired[i] for i in seeds or fired}


def _joined(inputs: list[Any], sizes: list[int]) -> Any:
    flat = [list(tensors(each)) for each in inputs]
    if len({len(each) for each in flat}) != 1:
        raise NotRecomputable("micro-batches have different inputs")
    joined: dict[int, Tensor] = {}
    for same in zip(*flat, strict=True):
        one = same[0]
        rows = all(t.dim() and t.shape[0] == n for t, n in zip(same, sizes, strict=True))
        if rows and len({(t.shape[1:], t.dtype) for t in same}) == 1:
            joined[id(one)] = torch.cat([t.detach() for t in same]).requires_grad_(one.requires_grad)
        elif rows:
            raise NotRecomputable("micro-batches are padded to different lengths, and cannot be joined as they are")
        elif all(t.shape == one.shape and torch.equal(t, one) for t in same):
            joined[id(one)] = one
        else:
            raise NotRecomputable("an input without rows differs between micro-batches")
    values = [repr(list(_values(each))) for each in inputs]
    if len(set(values)) != 1:
        raise NotRecomputable("an option of the call differs between micro-batches")
    return mapped(inputs[0], lambda t: joined[id(t)])


def _values(value: Any) -> Any:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield key
            yield from _values(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _values(inner)
    elif not isinstance(value, Tensor):
        yield value


def _gradients(call: ModuleCall, inputs: Any, arrived: Mapping[int, Tensor]) -> tuple[list[Tensor], Gradients]:
    twin = quiet(call, True)
    result = replay.run(twin, inputs, call, gradients=True, seed=1)
    roots = [(result.floats[i], g) for i, g in arrived.items() if i < len(result.floats)]
    roots = [(t, g.to(t.dtype)) for t, g in roots if t.requires_grad]
    if len(roots) != len(arrived) or any(t.shape != g.shape for t, g in roots):
        raise NotRecomputable("the repeated forward returned different outputs")
    own = [p for p in replay.unwrapped(call.module).parameters() if p.requires_grad]
    twins = [p for p in twin.parameters() if p.requires_grad]
    parts = torch.autograd.grad([t for t, _ in roots], twins, [g for _, g in roots], allow_unused=True)
    named = {id(p): g.detach() for p, g in zip(own, parts, strict=True) if g is not None}
    return [t.detach() for t in result.floats], named


def _together(arrived: list[dict[int, Tensor]], outputs: list[list[Tensor]], sizes: list[int]) -> dict[int, Tensor]:
    if len({tuple(each) for each in arrived}) != 1:
        raise NotRecomputable("the losses of micro-batches are computed from different outputs")
    together = {}
    for i in arrived[0]:
        parts = [each[i] for each in arrived]
        if all(t.dim() and t.shape[0] == n for t, n in zip(parts, sizes, strict=True)):
            if len({t.shape[1:] for t in parts}) != 1:
                raise NotRecomputable("outputs of micro-batches have different shapes")
            together[i] = torch.cat(parts)
        elif all(t.numel() == 1 for t in parts):
            together[i] = torch.stack([t.reshape(()) for t in parts]).sum().reshape(outputs[0][i].shape)
        else:
            raise NotRecomputable("an output has no row for each example")
    return together


def _compared(
    call: ModuleCall,
    union: Any,
    sizes: list[int],
    outputs: tuple[list[Tensor], list[Tensor]],
    gradients: tuple[Gradients, Gradients],
    own: set[int],
) -> dict[str, Any]:
    separate, together = gradients
    keys = [key for key in together if key in own]
    ones = [separate[k].double().flatten() if k in separate else torch.zeros(together[k].numel()) for k in keys]
    vectors = torch.cat(ones), torch.cat([together[k].double().flatten() for k in keys])
    rows = [o for o in outputs[1] if o.dim() and o.shape[0] == sum(sizes)]
    observation: dict[str, Any] = {"reference": "accumulation", "micro": len(sizes), "loss": not rows}
    limit = max((limit_of(call, o) for o in outputs[0]), default=1e-4)
    observation["apart"] = distance = distance_between(*vectors)
    if distance <= 10 * limit:
        return observation | {"result": "same"}

    def differ(a: Tensor, b: Tensor) -> bool:
        if a.dim() and b.dim() and a.shape[0] == sizes[0] and b.shape == (sum(sizes), *a.shape[1:]):
            return distance_between(a, b[: sizes[0]]) > limit_of(call, a)
        return False

    pair = (quiet(call, True), (call.args, call.kwargs)), (quiet(call, True), union)
    module, operation = first_difference(*pair, call, differ, seed=1)
    return observation | {"result": "differs", "module": module, "operation": operation}
