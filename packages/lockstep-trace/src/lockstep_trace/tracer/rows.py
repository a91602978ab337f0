"""Repeats a recorded call in other ways, as references for `--check`: other rows, other random numbers, other kernels.

In: a `ModuleCall`. Out: observations, dictionaries with `reference`, `result` (`same`, `differs`) and the evidence.

- Rows: in another order, half of them, or without padding. Dropout is off. A model that draws random numbers with
  dropout off is not compared, because another batch would draw others.
- Random numbers: a second seed should change what dropout does in training, and nothing in evaluation mode. Only
  outputs of the model are compared.
- The same call, eager, and in float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from . import placement, replay
from .inputs import trailing
from .replay import ModuleCall, NotRecomputable, Replay, mapped, tensors

LIMITS = {torch.float64: 1e-7, torch.float32: 1e-4}  # relative differences that kernels for another batch size explain
LIMIT_HALF = 5e-2


def quiet(call: ModuleCall, norms: bool) -> nn.Module:
    """Return a copy in evaluation mode. `norms`: batch norm keeps the mode of the call."""
    twin = replay.copied(call)
    for module in twin.modules():
        if not (norms and isinstance(module, placement.BATCH_NORM)):
            module.training = False
    return twin


def limit_of(call: ModuleCall, tensor: Tensor) -> float:
    half = call.autocast is not None or any(
        p.dtype in (torch.bfloat16, torch.float16) for p in call.module.parameters()
    )
    return LIMIT_HALF if half else LIMITS.get(tensor.dtype, LIMIT_HALF)


def batch_of(call: ModuleCall, least: int = 2) -> int:
    """Return the size of the batch, the first dimension of the inputs. Errors: `NotRecomputable` if they disagree, look
    like something other than examples, or are fewer than `least`."""
    inputs = [t for t in tensors((call.args, call.kwargs)) if t.dim() and t.numel()]
    if not inputs:
        raise NotRecomputable("no input has rows")
    size = inputs[0].shape[0]
    if size < least:
        raise NotRecomputable("the batch has one row")
    for tensor in inputs:
        square = tensor.dim() == 2 and tensor.shape[0] == tensor.shape[1]
        if tensor.shape[0] == size and not (square and len(inputs) > 1):
            continue
        hidden = tensor.dim() == 3 and tensor.shape[1] == size  # a state of a recurrent module, layers first
        if hidden or (tensor.shape[0] != 1 and not (square and tensor.shape[0] != size)):
            raise NotRecomputable("inputs have different first dimensions, so rows are unknown")
    return int(size)


def _prepared(call: ModuleCall) -> tuple[int, nn.Module, Replay]:
    size = batch_of(call)
    if not replay.is_compiled(call.module):  # which draws other random numbers
        replay.require_reproduced(call)
    inputs = call.args, call.kwargs
    results = [replay.run(quiet(call, True), inputs, call, seed=seed) for seed in (1, 2)]
    if exactly(*results) > 0:
        raise NotRecomputable("the model draws random numbers with dropout off, or is not deterministic")
    if not any(t.dim() and t.shape[0] == size for t in results[0].floats):
        raise NotRecomputable("no output has a row for each example")
    return size, quiet(call, True), results[0]


def picked(call: ModuleCall, size: int, index: Tensor) -> Any:
    """Return the inputs of some rows."""

    def pick(tensor: Tensor) -> Tensor:
        if tensor.dim() and tensor.shape[0] == size:
            return tensor.detach()[index.to(tensor.device)].requires_grad_(tensor.requires_grad)
        return tensor

    return mapped((call.args, call.kwargs), pick)


def order(call: ModuleCall) -> list[dict[str, Any]]:
    """Compute the call with its rows in another order: each row's output should move with it."""
    size, _, result = _prepared(call)
    index = torch.arange(size).roll(1)
    return _compared("order", call, size, result, index)


def alone(call: ModuleCall) -> list[dict[str, Any]]:
    """Compute the first half of the rows without the others: their outputs should stay."""
    size, _, result = _prepared(call)
    return _compared("alone", call, size, result, torch.arange(size // 2 if size > 3 else 1))


def _compared(reference: str, call: ModuleCall, size: int, result: Replay, index: Tensor) -> list[dict[str, Any]]:
    changed = picked(call, size, index)
    other = replay.run(quiet(call, True), changed, call, seed=1)
    count = len(index)

    def distance(a: Tensor, b: Tensor) -> float | None:
        if a.dim() and a.shape[0] == size and b.dim() and b.shape == (count, *a.shape[1:]):
            return distance_between(a[index.to(a.device)], b)
        return None

    pair = (quiet(call, True), (call.args, call.kwargs)), (quiet(call, True), changed)
    about = {"reference": reference, "rows": size, "of": count}
    observation = _observed(about, call, (result, other), distance, pair)
    if observation is None:
        raise NotRecomputable("no output has a row for each example")
    if observation["result"] == "differs":
        inner = dict(quiet(call, True).named_modules()).get(observation["module"])
        norms = isinstance(inner, placement.BATCH_NORM) or observation["operation"] == "batch_norm"
        observation["batch_norm"] = norms
    return [observation]


def _observed(
    about: dict[str, Any], call: ModuleCall, results: tuple[Replay, Replay], distance: Any, pair: Any, by: float = 1.0
) -> dict[str, Any] | None:
    """Compare the outputs of two calls, and name the first operation that differs; None if no outputs are comparable.
    `distance`: of two outputs, None if they cannot be compared. `pair`: (copy, inputs) of each. `by`: multiplies the
    limits."""
    outputs = zip(results[0].floats, results[1].floats, strict=False)
    pairs = [(d, a) for a, b in outputs if (d := distance(a, b)) is not None]
    if not pairs:
        return None
    observation = about | {"apart": max(d for d, _ in pairs)}
    if not any(d > by * limit_of(call, a) for d, a in pairs):
        return observation | {"result": "same"}

    def differ(a: Tensor, b: Tensor) -> bool:
        d = distance(a, b)
        return d is not None and d > by * limit_of(call, a)

    module, operation = first_difference(pair[0], pair[1], call, differ, seed=1)
    return observation | {"result": "differs", "module": module, "operation": operation}


# -- padding ---------------------------------------------------------------------------------------------------------


def padding(call: ModuleCall) -> list[dict[str, Any]]:
    """Compute the row with the most padding alone, with its padding and without it: outputs at its own tokens should
    stay. Also measure how much of the loss's gradient arrives at padding."""
    size = batch_of(call)
    marked = _real(call, size)
    if marked is None:
        return []
    real, how = marked
    results = _arriving(call, real, how)
    counts = real.sum(1)
    row = int(torch.where(counts > 0, counts, counts.max() + 1).argmin())
    keep = real[row].nonzero().squeeze(1)
    length = real.shape[1]
    if not 0 < len(keep) < length:
        return results
    alone_, trimmed = picked(call, size, torch.tensor([row])), _trimmed(call, size, row, keep, length)
    twins = quiet(call, False), quiet(call, False)
    one = replay.run(twins[0], alone_, call, seed=1)
    other = replay.run(twins[1], trimmed, call, seed=1)
    if exactly(one, replay.run(quiet(call, False), alone_, call, seed=2)) > 0:
        raise NotRecomputable("the model draws random numbers with dropout off")

    def distance(a: Tensor, b: Tensor) -> float | None:
        if a.shape == b.shape and length not in a.shape:
            return distance_between(a, b) if a.dim() else None
        for dim in range(min(a.dim(), 3)):
            same = (*a.shape[:dim], len(keep), *a.shape[dim + 1 :])
            if a.shape[dim] == length and b.shape == same:
                return distance_between(a.index_select(dim, keep.to(a.device)), b)
        return None

    about = {
        "reference": "padding",
        "row": row,
        "tokens": len(keep),
        "padding": length - len(keep),
        "left": bool(keep[0] > 0),
        "how": how,
    }
    pair = (quiet(call, False), alone_), (quiet(call, False), trimmed)
    observation = _observed(about, call, (one, other), distance, pair, 10)
    return results if observation is None else [*results, observation]


def _real(call: ModuleCall, size: int) -> tuple[Tensor, str] | None:
    """Return which positions hold an example's own tokens, bool [B, T], and how that is known; None without padding.

    `mask`: by an input named attention_mask. `run`: at least two rows of an integer input end, or begin, with repeats
    of one value that occurs nowhere else in them, in different lengths."""
    mask = call.kwargs.get("attention_mask")
    if isinstance(mask, Tensor) and mask.dim() == 2 and mask.shape[0] == size and not mask.is_floating_point():
        real = mask.bool().cpu()
        return (real, "mask") if not bool(real.all()) else None
    for tensor in tensors((call.args, call.kwargs)):
        if tensor.dim() != 2 or tensor.dtype not in (torch.int32, torch.int64) or tensor.shape[0] != size:
            continue
        if bool((tensor.diff(dim=1) >= 0).all()):  # numbers of documents, or positions
            continue
        for left in (False, True):
            ids = tensor.cpu().flip(1) if left else tensor.cpu()
            values, counts = ids[:, -1].unique(return_counts=True)
            value = values[counts.argmax()]
            run = trailing(ids == value).sum(1)
            inner = (ids == value).sum(1) - run
            if bool(inner.any()) or int(run.max()) < 2 or len(run.unique()) < 2 or int(run.max()) == ids.shape[1]:
                continue
            if int((run > 1).sum()) < 2:  # one row alone: another value ends each row, as numbers of documents do
                continue
            real = torch.arange(ids.shape[1])[None] < (ids.shape[1] - run)[:, None]
            return (real.flip(1) if left else real), "run"
    return None


def _trimmed(call: ModuleCall, size: int, row: int, keep: Tensor, length: int) -> Any:
    def trim(tensor: Tensor) -> Tensor:
        t = tensor.detach()
        if t.dim() and t.shape[0] == size:
            t = t[row : row + 1]
            if t.dim() > 1 and t.shape[1] == length:
                t = t.index_select(1, keep.to(t.device))
            if t.dim() == 4 and t.shape[2] == t.shape[3] == length:
                t = t.index_select(2, keep.to(t.device)).index_select(3, keep.to(t.device))
        elif t.dim() == 2 and t.shape == (length, length):
            t = t.index_select(0, keep.to(t.device)).index_select(1, keep.to(t.device))
        elif t.dim() == 2 and t.shape == (1, length):
            t = t[:, : len(keep)]
        return t.requires_grad_(tensor.requires_grad)

    return mapped((call.args, call.kwargs), trim)


def _arriving(call: ModuleCall, real: Tensor, how: str) -> list[dict[str, Any]]:
    padding_ = ~real
    edge = torch.zeros_like(real)
    edge[:, 1:] |= real[:, :-1]
    edge[:, :-1] |= real[:, 1:]
    inside = padding_ & ~edge
    for row in call.outputs:
        for gradient in row.gradients.values():
            if gradient.dim() == 3 and gradient.shape[:2] == real.shape:
                squares = gradient.double().square().sum(-1).cpu()
                whole, there = float(squares.sum()), float((squares * inside).sum())
                touched = int(((squares > 0) & inside).sum())
                if whole > 0 and touched:
                    share = there / whole
                    counted = int((squares > 0).sum())
                    about = {"reference": "padded targets", "result": "differs", "apart": share, "how": how}
                    return [about | {"positions": touched, "counted": counted}]
                if whole > 0:
                    return [{"reference": "padded targets", "result": "same"}]
    return []


def seed(call: ModuleCall) -> list[dict[str, Any]]:
    """Compute the call with two seeds, in training and in evaluation mode."""
    if replay.is_compiled(call.module):
        raise NotRecomputable("a compiled model draws other random numbers than its modules do")
    replay.require_reproduced(call)
    return [*_training(call), *_evaluation(call)]


def _training(call: ModuleCall) -> list[dict[str, Any]]:
    inputs = call.args, call.kwargs
    one, other = (replay.run(replay.copied(call), inputs, call, seed=s) for s in (1, 2))
    masks = [(m, a, b) for (m, a), (n, b) in zip(one.dropped, other.dropped, strict=False) if m == n]
    if not masks or len(one.dropped) != len(other.dropped):
        return []
    distance = exactly(one, other) if len(one.floats) == len(other.floats) else 1.0
    observation = {"reference": "seed", "apart": distance, "masks": len(masks)}
    if all(torch.equal(a, b) for _, a, b in masks):
        return [observation | {"result": "differs", "module": masks[0][0], "operation": "dropout"}]
    return [observation | {"result": "same"}]


def _evaluation(call: ModuleCall) -> list[dict[str, Any]]:
    inputs = call.args, call.kwargs
    one, other = (replay.run(quiet(call, False), inputs, call, seed=s) for s in (1, 2))
    observation = {"reference": "seed in evaluation", "apart": exactly(one, other)}
    if not observation["apart"]:
        return [observation | {"result": "same"}]

    def differ(a: Tensor, b: Tensor) -> bool:
        return distance_between(a, b) > 0

    pair = (quiet(call, False), inputs), (quiet(call, False), inputs)
    module, operation = first_difference(*pair, call, differ, seed=1, other_seed=2)
    dropout = bool(one.dropped)
    return [observation | {"result": "differs", "module": module, "operation": operation, "dropout": dropout}]


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


REFERENCES = (twice, eager, float32, order, alone, padding)
