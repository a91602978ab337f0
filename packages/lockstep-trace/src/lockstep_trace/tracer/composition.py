"""Reads what a loss is made of: terms that are means or sums over the batch, and factors and targets with a gradient.

In: the graph of a loss before backward. Out: notes as in `evidence.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from .all_pairs import is_number
from .graph import KINDS, LAYERS, NODES, VIEWS, is_mean, name_of, nodes_of, shape_of
from .placement import is_plain_tensor

Note = tuple[tuple[str, str], Tensor | None]
ERRORS = ("MseLoss", "SmoothL1Loss", "HuberLoss")
JOINED = (*VIEWS, "Select", "Stack", "Cat")
PASSED = (*JOINED, "Sub", "Div", "Neg", "Mul")  # between an advantage and a product with it
CHOSEN = (*JOINED, "Max", "Amax", "Gather", "Index", "Minimum", "Sub", "Mul", "Sum")  # of values of a state
WEIGHT = 0.05  # factor of a term; what weighs less was weighed on purpose


def notes_on_terms(loss: Any, rows: int) -> Iterator[Note]:
    """Yield notes on the terms of a loss. `rows`: examples of the last call."""
    means, sums = list[Any](), list[Any]()
    for factor, divided, node in _terms(loss, rows):
        name = name_of(node)
        if not WEIGHT <= abs(factor) < math.inf or not _of_layers(node):
            continue
        if is_mean(node):
            means.append(node)
            yield from _masked(node)
        elif name == "Sum" and shape_of(node) == []:
            sizes = [int(n) for n in getattr(node, "_saved_self_sym_sizes", ())]
            sums += [sizes] if sizes[:1] == [rows] and not divided else []
        elif name in KINDS and getattr(node, "_saved_reduction", 0) == 2:
            sums += [] if divided else [[rows]]
    if means and sums and rows > 3:
        yield ("mean beside sum", f"{sums[0]}"), None


def _terms(loss: Any, rows: int) -> Iterator[tuple[float, bool, Any]]:
    """Yield the summands of a loss: factor, whether it is divided by the number of rows or more, node."""
    waiting: list[tuple[float, bool, Any]] = [(1.0, False, getattr(loss, "grad_fn", None))]
    for _ in range(NODES):
        factor, divided, node = waiting.pop() if waiting else (0.0, False, None)
        if node is None:
            continue
        name, before = name_of(node), [n for n, _ in node.next_functions if n is not None]
        if name in ("Add", "Sub", "Neg", "View", "Squeeze") and not shape_of(node):
            waiting += [(factor, divided, n) for n in before]
        elif name in ("Mul", "Div") and len(before) == 1 and not shape_of(node):
            number = getattr(node, "_saved_other", None)
            if isinstance(number, Tensor):
                number = number.item() if number.numel() == 1 and number.device.type == "cpu" else None
            known = isinstance(number, int | float) and number != 0
            by = (number if name == "Mul" else 1 / number) if known else math.nan
            waiting.append((factor * by, divided or abs(by) * rows <= 1, before[0]))
        else:
            yield factor, divided, node


def _of_layers(node: Any) -> bool:
    """Return whether a term depends on a layer's output; a penalty depends on parameters alone."""
    return any(name_of(n) in LAYERS for n in _below(node, lambda _: True))


def _below(node: Any, goes_on: Callable[[str], bool], most: int = 64) -> Iterator[Any]:
    waiting, known = [node], set[Any]()
    while waiting and len(known) < most:
        node = waiting.pop(0)
        if node is not None and node not in known:
            known.add(node)
            yield node
            waiting += [n for n, _ in node.next_functions] if goes_on(name_of(node)) else []


def _masked(mean: Any) -> Iterator[Note]:
    node = next((n for n, _ in mean.next_functions if n is not None), None)
    if name_of(mean) != "Mean" or node is None or name_of(node) != "Mul" or shape_of(mean):
        return
    mask = [t for n in ("_saved_self", "_saved_other") if isinstance(t := getattr(node, n, None), Tensor)]
    if len(mask) == 1 and is_plain_tensor(mask[0]) and mask[0].dim() == 2 and list(mask[0].shape) == shape_of(node):
        one = mask[0].detach().float()
        ends = (one[:, 1:] <= one[:, :-1]).all() | (one[:, 1:] >= one[:, :-1]).all()
        counts = one.sum(1)
        yield ("masked mean", ""), ends & ((one == 0) | (one == 1)).all() & (counts.max() > counts.min())


# -- factors and targets with a gradient -------------------------------------------------------------------------------


def notes_on_gradients(loss: Any) -> Iterator[Note]:
    """Yield notes on products and errors in a loss of which both sides have a gradient."""
    values = set[Any]()  # outputs of layers that are compared with a target
    products = list[tuple[Any, Any]]()
    for node in nodes_of(loss, NODES):
        name, before = name_of(node), [n for n, _ in node.next_functions]
        under = before[0] if before else None
        if name in ERRORS or (name in ("Pow", "Abs") and under is not None and name_of(under) == "Sub"):
            sides = before[:2] if name in ERRORS else [n for n, _ in under.next_functions]
            values.update(n for s in sides for n in _below(s, JOINED.__contains__) if name_of(n) in LAYERS)
            pair = [None if s is None else _is_bootstrapped(s) for s in sides]
            if len(sides) == 2 and None not in sides and pair[0] != pair[1]:
                yield ("target with a gradient", ""), None
        if name == "Mul" and len(before) == 2 and None not in before and not is_number(node):
            products += [(before[0], before[1]), (before[1], before[0])]
    for factor, other in products:
        layer = _advantage(factor)
        if layer is not None and layer in values and layer not in set(_below(other, lambda _: True)):
            yield ("advantage with a gradient", ""), None
            return


def _advantage(node: Any) -> Any:
    """Return the layer of one output per row that a constant minus its output comes from, or None."""
    for each in _below(node, PASSED.__contains__, 24):
        sides = [n for n, _ in each.next_functions] if name_of(each) == "Sub" else []
        for side in sides if len(sides) == 2 and None in sides else ():
            for end in _below(side, JOINED.__contains__) if side is not None else ():
                if name_of(end) in LAYERS and shape_of(end)[-1:] == [1]:
                    return end
    return None


def _is_bootstrapped(node: Any) -> bool:
    """Return whether a value is a constant (a reward) plus a multiple of a layer's output."""
    for each in _below(node, VIEWS.__contains__, 6):
        sides = [n for n, _ in each.next_functions] if name_of(each) == "Add" else []
        rest = next((n for n in sides if n is not None), None)
        if len(sides) == 2 and None in sides and rest is not None and name_of(rest) == "Mul":
            parts = [n for n, _ in rest.next_functions]
            if len([n for n in parts if n is not None]) == 1:
                return any(name_of(n) in LAYERS for n in _below(rest, CHOSEN.__contains__, 24))
    return False


# -- rows of tokens ----------------------------------------------------------------------------------------------------


def notes_on_tokens(ids: Tensor, padding: Tensor, ends: Sequence[Any]) -> Iterator[Note]:
    """Yield notes on classification losses that have a target for each token. `padding`: [B, T], False where none."""
    for end in ends:
        target = getattr(end, "_saved_target", None)
        mean = getattr(end, "_saved_reduction", 0)
        if not isinstance(target, Tensor) or target.numel() != ids.numel() or not mean or target.is_floating_point():
            continue
        target = target.detach().reshape(ids.shape)
        ignored = int(end._saved_ignore_index)
        counted = target != (ignored - (1 << 64) if ignored >= 1 << 63 else ignored)
        there = padding & counted
        least = target.masked_fill(~padding, 1 << 30).min()
        most = target.masked_fill(~padding, -1).max()
        yield ("padding learned", ""), (there.sum() >= 0.1 * ids.numel()) & (there == padding).all() & (least == most)
        real = counted & ~padding
        share = (real & (target == ids)).sum() / real.sum().clamp(min=1)
        yield ("copies learned", ""), (share > 0.5) & (share < 0.95)
