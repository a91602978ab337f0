"""Examines the logits of a classification loss in its graph: the axis of their classes, and products of embeddings.

In: a loss before backward. Out: (note, bool on its device, or None if the graph suffices). A class is a channel of a
layer. A view that merges or replaces the channel axis with another one turns positions into "classes": `transpose` and
`permute` move an axis, `view` and `reshape` cut memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .all_pairs import is_number
from .graph import loss_nodes, name_of, shape_of
from .placement import is_plain_tensor

DEPTH = 24  # operations between a loss and the layer that its logits come from
WHOLE = ("Clone", "ToCopy", "Alias", "Div", "Mul", "Neg", "Slice")  # leave axes as they are
CLOSE = 1e-5  # of a row's spread: two equal logits, summed in different orders, may differ by this
CERTAIN = 30.0  # negative logarithm of the probability that all rows have such a pair by chance
LARGEST = 1 << 22  # most logits to compare
Note = tuple[str, Tensor | None]


def logits_notes(loss: Any) -> list[Note]:
    """Return the notes on the logits of a classification loss, or an empty list."""
    notes: list[Note] = []
    for node in loss_nodes(loss):
        if name_of(node).startswith("NllLoss"):
            softmax = _softmax(node)
            if softmax is not None and is_plain_tensor(softmax._saved_result):
                notes += [*_axes(softmax), *_twice(node, softmax), *_self(node, softmax)]
    return notes


def _softmax(node: Any) -> Any:
    for _ in range(4):
        node = next((n for n, _ in node.next_functions if n is not None), None)
        if node is None or name_of(node) == "LogSoftmax":
            return node
    return None


def _only(node: Any) -> Any:
    before = [n for n, _ in node.next_functions if n is not None]
    return before[0] if len(before) == 1 else None


def _signed(number: int) -> int:
    return number - (1 << 64 if number >= 1 << 63 else 0)


# -- axes --------------------------------------------------------------------------------------------------------------


def _axes(softmax: Any) -> Iterator[Note]:
    shape = shape_of(softmax)
    axis: int | None = _signed(int(softmax._saved_dim)) % max(len(shape), 1)
    classes = shape[axis] if axis is not None and len(shape) > 1 else 0
    node, text = _only(softmax), ""
    for _ in range(DEPTH):
        if node is None or classes < 2:
            return
        name = name_of(node)
        if name in ("Addmm", "Mm", "Linear", "Convolution"):
            size = shape_of(node)
            channel = 1 if name == "Convolution" else len(size) - 1
            if text and axis != channel and len(size) > 1 and size[channel] == classes:
                yield f"classes of {text}", None
            return
        if name in ("View", "UnsafeView", "ReshapeAlias"):
            before, after = [int(n) for n in node._saved_self_sym_sizes], shape_of(node)
            if len(before) == 2 and before[-1] == after[-1] and name_of(_only(node) or node) in ("Addmm", "Mm"):
                # a layer of several axes, which it puts together beforehand
                if text and axis != len(after) - 1 and after[-1] == classes:
                    yield f"classes of {text}", None
                return
            here = None if axis is None else place(before, after, axis)
            if here is None and axis is not None and is_union(before, after, axis):
                return  # classes are positions, as in a heat map
            if axis is not None and (here is None or before[here] != classes):
                text = text or f"{before} to {after}"
            axis = here
        elif name in ("Transpose", "T", "Permute"):
            axis = _unmoved(node, axis)
        elif name not in WHOLE or len(shape_of(node)) != len(shape_of(_only(node) or node)):
            return
        node = _only(node)


def place(before: list[int], after: list[int], axis: int) -> int | None:
    """Return the axis of `before` that contains an axis of its view `after`; None if that spans several."""
    inner = math.prod(after[axis + 1 :])
    outer = inner * after[axis]
    for i, size in enumerate(before):
        stride = math.prod(before[i + 1 :])
        if size > 1 and inner % stride == 0 and stride <= inner and (size * stride) % outer == 0:
            return i
    return None


def is_union(before: list[int], after: list[int], axis: int) -> bool:
    """Return whether an axis of `after` merges several whole axes of `before`."""
    inner = math.prod(after[axis + 1 :])
    strides = [math.prod(before[i + 1 :]) for i in range(len(before))]
    return inner in strides and inner * after[axis] in [n * s for n, s in zip(before, strides, strict=True)]


def _unmoved(node: Any, axis: int | None) -> int | None:
    if axis is None:
        return None
    count = len(shape_of(node))
    if name_of(node) == "Permute":
        return _signed(int(node._saved_dims[axis])) % count
    pair = (0, 1) if name_of(node) == "T" else (node._saved_dim0, node._saved_dim1)
    one, other = (_signed(int(n)) % count for n in pair)
    return {one: other, other: one}.get(axis, axis)


# -- pairs -------------------------------------------------------------------------------------------------------------


def _twice(node: Any, softmax: Any) -> Iterator[Note]:
    target, shape = node._saved_target, shape_of(softmax)
    if len(shape) != 2 or target.dim() != 1 or not shape[0] >= 8 or not shape[1] >= 4 or math.prod(shape) > LARGEST:
        return
    chance = 1 - math.exp(-2 * CLOSE * shape[1])
    joined = _scaled(softmax)
    if name_of(joined) != "Cat" or -shape[0] * math.log(chance) < CERTAIN:
        return
    sizes = [shape_of(n) for n, _ in joined.next_functions if n is not None]
    if len(sizes) < 2 or any(len(size) != 2 or size[0] != shape[0] for size in sizes) or [shape[0], 1] not in sizes:
        return
    result = softmax._saved_result.detach()
    rows = target.clamp(min=0).unsqueeze(1)
    own, spread = result.gather(1, rows), result.std(1, keepdim=True)
    near = ((result - own).abs() <= CLOSE * spread).sum(1) - 1
    again = (
        result.sort(1).values.diff(dim=1) <= 0
    ).float().mean() > 0.25  # all candidates occur twice, not only positives
    yield "positive among negatives", ((near >= 1) & (near <= shape[1] // 4) & (spread[:, 0] > 1e-3)).all() & ~again


def _self(node: Any, softmax: Any) -> Iterator[Note]:
    target, shape = node._saved_target, shape_of(softmax)
    if len(shape) != 2 or shape[0] != shape[1] or shape[0] < 4 or target.shape != (shape[0],):
        return
    product = _scaled(softmax)
    if name_of(product) != "Mm":
        return
    (one, _), (other, _) = product.next_functions[:2]
    if one is None or other is None or one is not _over_moves(other):
        return
    own = torch.arange(shape[0], device=target.device)
    result = softmax._saved_result.detach()
    holds = (target != own).all() & (result.diagonal() > -50).all()
    unit = _equally_long(product, shape[0])
    if unit is None:
        return
    yield "itself among candidates", holds & unit
    yield "itself among products", holds & ~unit


def _equally_long(node: Any, count: int) -> Tensor | None:
    rows = next((r for r in (node._saved_self, node._saved_mat2) if isinstance(r, Tensor)), None)
    if rows is None or not is_plain_tensor(rows):
        return None
    lengths = (rows if rows.shape[0] == count else rows.t()).detach().float().norm(dim=1)
    return (lengths - lengths.mean()).abs().max() <= 1e-3 * lengths.mean()


def _scaled(node: Any) -> Any:
    node = _only(node)
    while node is not None and name_of(node) in ("Div", "Mul") and is_number(node):
        node = _only(node)
    return _NOTHING if node is None else node


def _over_moves(node: Any) -> Any:
    return _only(node) if name_of(node) in ("T", "Transpose", "Permute") else node


class _Nothing:
    """Stands for no node."""

    next_functions: tuple[Any, ...] = ()

    def name(self) -> str:
        return ""


_NOTHING = _Nothing()
