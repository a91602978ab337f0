"""References for one call: repeated, eager instead of compiled, float32 instead of half precision.

In: a `ModuleCall`. Out: observations, dictionaries with `reference`, `result` (`same`, `differs`) and the evidence.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from . import replay
from .calls import ModuleCall, NotRecomputable, mapped
from .replay import Replay

HALF = (torch.bfloat16, torch.float16)
EPSILON = {torch.bfloat16: 2**-8, torch.float16: 2**-11}


def distance_between(one: Tensor, other: Tensor) -> float:
    """Return the norm of the difference relative to the larger norm. Equal values, NaN and infinities included, are 0
    apart."""
    if one.shape != other.shape:
        return float("inf")
    a, b = one.detach().double(), other.detach().double()
    alike = (a == b) | (a.isnan() & b.isnan())
    a, b = a.masked_fill(alike, 0.0), b.masked_fill(alike, 0.0)
    size = max(float(one.detach().double().nan_to_num().norm()), float(other.detach().double().nan_to_num().norm()))
    distance = float((a - b).norm())
    return distance / size if size and distance == distance else distance


def exactly(one: Replay, other: Replay) -> float:
    return max((distance_between(a, b) for a, b in zip(one.floats, other.floats, strict=True)), default=0.0)


def first_difference(
    one: tuple[nn.Module, Any],
    other: tuple[nn.Module, Any],
    call: ModuleCall,
    differ: Any,
    seed: int | None = None,
    other_seed: int | None = None,
) -> tuple[str, str]:
    """Return the (module, operation) whose output first differs between two runs of a model; "" if none is seen.
    `one`, `other`: (copy, inputs). `differ`: called with two outputs. `seed`, `other_seed`: their seeds."""
    pairs = (one, seed), (other, seed if other_seed is None else other_seed)
    a, b = (replay.run(*each, call, modules=True, seed=s) for each, s in pairs)
    name = _first(a.watched, b.watched, differ)
    if name is None:
        return "", ""
    a, b = (replay.run(*each, call, inside=name[0], seed=s) for each, s in pairs)
    operation = _first(a.watched, b.watched, differ)
    return name[0], operation[1] if operation is not None else ""


def _first(one: list[tuple[str, str, Tensor]], other: list[tuple[str, str, Tensor]], differ: Any) -> Any:
    for (name, operation, a), (other_name, other_operation, b) in zip(one, other, strict=False):
        if (name, operation) != (other_name, other_operation):
            return None
        if a.is_floating_point() and b.is_floating_point() and differ(a, b):
            return name, operation
    return None


def twice(call: ModuleCall) -> list[dict[str, Any]]:
    """Compute a call twice from the same inputs, weights and random numbers."""
    inputs = call.args, call.kwargs
    one, other = (replay.run(replay.copied(call), inputs, call) for _ in range(2))
    distance = exactly(one, other)
    if not distance:
        return [{"reference": "twice", "result": "same"}]

    def differ(a: Tensor, b: Tensor) -> bool:
        return distance_between(a, b) > 0

    pair = (replay.copied(call), inputs), (replay.copied(call), inputs)
    module, operation = first_difference(*pair, call, differ)
    return [{"reference": "twice", "result": "differs", "apart": distance, "module": module, "operation": operation}]


def eager(call: ModuleCall) -> list[dict[str, Any]]:
    """Compute the call of a compiled model without the compiler, and compare with the outputs of training."""
    if not replay.is_compiled(call.module):
        return []
    twin = replay.copied(call)
    if _draws(twin, call):
        raise NotRecomputable("a compiled model draws other random numbers than its modules do")
    distance = replay.reproduced(call, replay.run(twin, (call.args, call.kwargs), call))
    limit = 3e-2 if call.autocast else 1e-3
    return [{"reference": "eager", "result": "differs" if distance > limit else "same", "apart": distance}]


def _draws(twin: nn.Module, call: ModuleCall) -> bool:
    inputs = call.args, call.kwargs
    return bool(exactly(*(replay.run(twin, inputs, call, seed=seed) for seed in (1, 2))))


def float32(call: ModuleCall) -> list[dict[str, Any]]:
    """Compute the call in float32, and compare outputs and the gradient with those of half precision. Names the
    module that enlarges the error of its inputs most."""
    half = {p.dtype for p in call.module.parameters()} & set(HALF)
    dtype = call.autocast[1] if call.autocast is not None else next(iter(half), None)
    if dtype not in HALF:
        return []
    twin, wide = replay.copied(call), replay.copied(call).float()
    inputs = call.args, call.kwargs
    widened = mapped(inputs, lambda t: t.float() if t.dtype in HALF else t)
    one = replay.run(twin, inputs, call, modules=True)
    other = replay.run(wide, widened, call, modules=True, autocast=False)
    distance = exactly(one, other)
    rows = [
        (name, distance_between(a, b))
        for (name, _, a), (_, _, b) in zip(one.watched, other.watched, strict=False)
        if a.shape == b.shape
    ]
    before, worst, largest = EPSILON[dtype], "", 0.0
    for name, value in rows:
        if value / max(before, EPSILON[dtype]) > largest:
            worst, largest = name, value / max(before, EPSILON[dtype])
        before = max(before, value)
    expected = EPSILON[dtype] * max(len(rows), 1) ** 0.5
    return [
        {
            "reference": "float32",
            "result": "differs" if distance > max(10 * expected, 0.25) else "same",
            "apart": distance,
            "expected": expected,
            "module": worst,
            "operation": "",
            "dtype": str(dtype).removeprefix("torch."),
        }
    ]


REFERENCES = (twice, eager, float32)
