"""References for one call that change its batch: rows in another order, half of the rows, rows without padding.

In: a `ModuleCall`. Out: observations. Dropout is off in each of them. A model that draws random numbers with dropout
off is not compared: another batch would draw others.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .. import placement
from . import replay
from .calls import ModuleCall, NotRecomputable, mapped, tensors
from .precision import distance_between, exactly, first_difference
from .replay import Replay

LIMITS = {torch.float64: 1e-7, torch.float32: 1e-4}  # relative differences that kernels for another batch size explain
LIMIT_HALF = 5e-2
LABELS = ("labels", "label", "label_ids")


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

    pairs = [(d, a) for a, b in zip(result.floats, other.floats, strict=False) if (d := distance(a, b)) is not None]
    observation: dict[str, Any] = {"reference": reference, "rows": size, "of": count}
    if not pairs:
        raise NotRecomputable("no output has a row for each example")
    worst = max(d for d, _ in pairs)
    observation["apart"] = worst
    if not any(d > limit_of(call, a) for d, a in pairs):
        return [observation | {"result": "same"}]

    def differ(a: Tensor, b: Tensor) -> bool:
        d = distance(a, b)
        return d is not None and d > limit_of(call, a)

    pair = (quiet(call, True), (call.args, call.kwargs)), (quiet(call, True), changed)
    module, operation = first_difference(*pair, call, differ, seed=1)
    inner = dict(quiet(call, True).named_modules()).get(module)
    kind = type(inner).__name__ if inner is not None else ""
    norms = isinstance(inner, placement.BATCH_NORM) or operation == "batch_norm"
    about = {"module": module, "kind": kind, "operation": operation, "batch_norm": norms}
    if isinstance(inner, nn.RNNBase | nn.MultiheadAttention):
        about["time_first"] = not inner.batch_first
    return [observation | {"result": "differs"} | about]


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

    pairs = [(d, a) for a, b in zip(one.floats, other.floats, strict=False) if (d := distance(a, b)) is not None]
    if not pairs:
        return results
    observation = {
        "reference": "padding",
        "row": row,
        "tokens": len(keep),
        "padding": length - len(keep),
        "left": bool(keep[0] > 0),
        "how": how,
        "apart": max(d for d, _ in pairs),
    }
    if not any(d > 10 * limit_of(call, a) for d, a in pairs):
        return [*results, observation | {"result": "same"}]

    def differ(a: Tensor, b: Tensor) -> bool:
        d = distance(a, b)
        return d is not None and d > 10 * limit_of(call, a)

    pair = (quiet(call, False), alone_), (quiet(call, False), trimmed)
    module, operation = first_difference(*pair, call, differ, seed=1)
    return [*results, observation | {"result": "differs", "module": module, "operation": operation}]


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
            run = (ids == value).flip(1).long().cumprod(1).sum(1)
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


REFERENCES = (order, alone, padding)
