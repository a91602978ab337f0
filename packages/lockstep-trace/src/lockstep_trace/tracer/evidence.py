"""Looks in the graph of the first losses for values that a function excludes, mixed examples, padding, noise, and its
terms.

In: a loss before backward; inputs and outputs of the calls since the last one. Out: (kind, argument), and a bool on its
device, or None if the graph suffices. Terms of a loss: means or sums over the batch, and factors and targets with a
gradient. `rules/observed.py` explains each kind. Skipped while hooks on saved tensors are in use.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .graph import KINDS, LAYERS, NODES, SIMPLE, VIEWS, is_mean, loss_nodes, name_of, nodes_of, shape_of
from .inputs import wrapped
from .logits import _only, _signed, _unmoved, factor_of, is_number, place
from .placement import is_plain_tensor

LEAST = 8  # examples
ATTENTION = ("View", "UnsafeView", "ReshapeAlias", "Reshape", "Permute", "Transpose", "T", "Unsqueeze", "Squeeze")
Note = tuple[tuple[str, str], Tensor | None]
SAME = ("Clone", "Alias", "Expand", "ToCopy", "NativeDropout")  # leave the axes of an attention's weights as they are


def notes_on(
    loss: Any, calls: Calls, columns: Sequence[Tensor], later: Callable[[tuple[str, str], Tensor], None]
) -> list[Note]:
    """Return the notes on a loss. `later`: takes the notes that depend on its gradients."""
    notes: list[Note] = []
    for node in nodes_of(loss, 4 * NODES):
        name = name_of(node)
        if name in OF_NODES:
            notes += OF_NODES[name](node)
        if name == "CtcLoss":
            _ctc(node, later)
        if name == "SoftMarginLoss" and _alone(loss, node):
            notes += _margin(node)
        if name in ("View", "UnsafeView", "ReshapeAlias", "Reshape", "Softmax"):
            notes += _batch(node, name, calls)
        if name == "Embedding":
            notes += _padding(node, loss, later, calls)
    notes += [*notes_on_terms(loss, calls), *notes_on_gradients(loss)]
    return [*notes, *_weights(loss, columns), *_noise(loss, calls)]


class Calls:
    """Inputs and outputs of the calls since the last backward. `inputs`: tensors of the last call. `known`: the batch
    axis cannot be told by its length, because an axis of a parameter or an example, or a part of one, may be as long.
    `wide`: a layer (a convolution, a bidirectional one) reads positions behind its own, so padding as well."""

    def __init__(
        self, models: Sequence[nn.Module], outputs: Sequence[Any], rows: int, inputs: Sequence[Tensor]
    ) -> None:
        self.rows, self.inputs = rows, inputs
        plain = [o for o in outputs if is_plain_tensor(o) and o.is_floating_point() and not wrapped(o)]
        self.outputs = [o.detach() for o in plain]
        owned = {n for m in models for p in m.parameters() for n in p.shape} if rows >= LEAST else set[int]()
        around = {n + more for tensor in inputs for n in tensor.shape[1:] for more in (0, 1, -1)}
        layers = [layer for m in models for layer in m.modules()]
        self.wide = any(isinstance(x, nn.Conv1d) or getattr(x, "bidirectional", False) for x in layers)
        self.known = any(n % rows == 0 for n in owned | around if n) if rows else True


# -- values that torch's functions do not take -------------------------------------------------------------------------


def _ctc(node: Any, later: Callable[[tuple[str, str], Tensor], None]) -> None:
    targets, lengths, blank = node._saved_targets, node._saved_target_lengths, int(node._saved_blank)
    if not is_plain_tensor(targets):
        return
    lengths = torch.as_tensor(lengths, device=targets.device)
    place = torch.arange(targets.shape[-1], device=targets.device)
    if targets.dim() == 2:
        bad = ((targets == blank) & (place < lengths.unsqueeze(1))).any(1)  # behind, there may be anything
    else:
        rows = torch.searchsorted(lengths.cumsum(0), place, right=True)
        bad = (
            torch.zeros(len(lengths) + 1, device=targets.device).index_add(0, rows, (targets == blank).float())[:-1] > 0
        )

    def arrived(gradients: Any) -> None:  # a row without a gradient is left out of the loss
        if gradients[0] is not None and gradients[0].numel() == len(bad):
            later(("blank", str(blank)), (bad & (gradients[0].detach().reshape(-1) != 0)).any())

    node.register_prehook(arrived)


def _binary(node: Any) -> Iterator[Note]:
    target, weight = node._saved_target, getattr(node, "_saved_pos_weight", None)
    masked = node._saved_reduction == 0 or isinstance(node._saved_weight, Tensor)  # may leave out what has no label
    under = _only(node)
    masked |= under is not None and (name_of(under) in ("MaskedFill", "Where") or name_of(under) == "Mul")
    if is_plain_tensor(target) and target.numel() and not masked:
        mean = target.float().mean()
        yield ("target beyond", ""), (target < -0.5).any() | (target > 1.5).any()
        yield ("target outside", ""), (target.abs() == 1).all() & (target < 0).any() | ((mean - 0.5).abs() > 2.5)
        if isinstance(weight, Tensor) and weight.numel() == 1:
            share = target.float().mean()
            yield ("rare weighs", ""), ((weight < 0.8) & (share < 0.3) | (weight > 1.25) & (share > 0.7)).all()


def _margin(node: Any) -> Iterator[Note]:
    target = node._saved_target
    if is_plain_tensor(target) and node._saved_reduction:
        yield ("target 0", ""), ((target == 0) | (target == 1)).all() & (target == 0).any()


def _classes(node: Any) -> Iterator[Note]:
    target, weight = node._saved_target, node._saved_weight
    if isinstance(weight, Tensor) and is_plain_tensor(target) and target.numel() >= 4 * weight.numel() >= LEAST:
        inside = target[(target >= 0) & (target < weight.numel())]
        counts = torch.bincount(inside, minlength=weight.numel()).float()
        there = (counts > 0) & (weight > 0)
        table = torch.stack([counts[there], weight.detach().float()[there]])
        if table.shape[1] > 1:
            low, high = table.amin(1), table.amax(1)
            uneven = (high[0] >= 3 * low[0]) & (high[1] >= 1.5 * low[1])
            yield ("frequent weighs", ""), uneven & (torch.corrcoef(table)[0, 1] > 0.7)


OF_NODES: dict[str, Callable[[Any], Iterator[Note]]] = {
    "BinaryCrossEntropy": _binary,
    "BinaryCrossEntropyWithLogits": _binary,
    "NllLoss": _classes,
    "Bmm": lambda node: _summed(node),
}


# -- axes --------------------------------------------------------------------------------------------------------------


def _batch(node: Any, name: str, calls: Calls) -> Iterator[Note]:
    shape, rows = shape_of(node), calls.rows
    if rows < LEAST or calls.known or shape.count(rows) != 1:
        return
    axis = shape.index(rows)
    if name == "Softmax":
        if math.prod(shape) > rows and _signed(int(node._saved_dim)) % len(shape) == axis:
            yield ("softmax over the batch", f"{shape}"), None
        return
    before = [int(n) for n in getattr(node, "_saved_self_sym_sizes", ())]
    if before.count(rows) == 1 and place(before, shape, axis) != before.index(rows):
        yield ("batch", f"{before} to {shape}"), None


def _summed(node: Any) -> Iterator[Note]:
    for (operand, _), axis in zip(node.next_functions[:2], (2, 1), strict=False):
        here: int | None = axis
        while operand is not None and here is not None and name_of(operand) in (*ATTENTION, *SAME, "Mul"):
            name, shape, under = name_of(operand), shape_of(operand), _only(operand)
            if name in ("Permute", "Transpose", "T"):
                here = _unmoved(operand, here)
            elif name in ATTENTION:
                before = shape_of(under) if under is not None else []
                here = place(before, shape, here) if before and shape[here] > 1 else None
            operand = under
        size = shape_of(operand) if operand is not None and here is not None else []
        if here is not None and size and name_of(operand) == "Softmax":
            over = _signed(int(operand._saved_dim)) % len(size)
            scores = _only(operand)
            constant = scores is None or name_of(scores) == "AccumulateGrad"  # transitions that are a parameter
            if over != here and size[over] == size[here] > 2 and not constant:
                yield ("softmax", f"axis {over} of {size}, sum over axis {here}"), None


# -- padding -----------------------------------------------------------------------------------------------------------


def _padding(node: Any, loss: Any, later: Callable[[tuple[str, str], Tensor], None], calls: Calls) -> Iterator[Note]:
    ids, ignored = node._saved_indices, _signed(int(node._saved_padding_idx))
    if is_plain_tensor(ids) and ids.shape[1:].numel() == 1 and len(ids) >= LEAST and ignored >= 0:
        count, rows = (ids == ignored).sum(), int(node._saved_weight_sym_argsize_0)
        if rows >= LARGE_TABLE:  # it comes about as often as the others: not what is missing
            kinds = ids.unique().numel() if ids.device.type == "cpu" else 8
            ordinary = count * kinds <= 2 * len(ids)
            yield ("item is padding", str(ignored)), (count > 0) & ordinary
    if not is_plain_tensor(ids) or ids.dim() != 2 or ids.shape[1] < 3 or len(ids) < 4:
        return
    if ids.shape[0] == ids.shape[1]:
        return  # may be a matrix of relative positions (T5's bias), where distant ones share an index
    value = ids[:, -1].mode().values
    same = ids == value
    run = same.flip(1).long().cumprod(1).flip(1).bool()
    lengths = run.sum(1)
    padded: Tensor = (lengths.max() > lengths.min()) & ((lengths > 1).sum() >= 2) & (lengths < ids.shape[1]).all()
    alone: Tensor = ~(same & ~run).any()
    inner = run & torch.roll(run, 1, 1)
    inner[:, 0] = False
    holds = padded & alone & ((value == ignored) | (ignored < 0))
    masks = [t for t in calls.inputs if t.shape == ids.shape and t is not ids and not t.is_floating_point()]
    known = (value == ignored) | torch.stack([run.new_zeros(()), *(((m == 0) == run).all() for m in masks)]).any()
    yield from notes_on_tokens(ids, inner & holds, known, loss_nodes(loss))
    if calls.wide:
        return

    def arrived(gradients: Any) -> None:
        later(("padding reaches", ""), holds & _reached(gradients[0], inner, ignored >= 0))

    node.register_prehook(arrived)
    for end in loss_nodes(loss) if ignored >= 0 else ():
        target, softmax = getattr(end, "_saved_target", None), _only(end)
        classes = shape_of(softmax)[1:2] if softmax is not None else []
        if not isinstance(target, Tensor) or not is_plain_tensor(target):
            continue
        if name_of(end) == "NllLoss" and classes == [node._saved_weight_sym_argsize_0]:
            taught = target.eq(ignored).any() & (_signed(int(end._saved_ignore_index)) != ignored)
            yield ("padding index", str(ignored)), padded & (value == ignored) & ~alone & taught


def _reached(gradient: Any, where: Tensor, zero: bool) -> Tensor:
    if gradient is None or not is_plain_tensor(gradient):
        return where.new_zeros(())
    gradient = gradient.detach()
    reached = (gradient != 0).any(-1)
    if zero:
        reached = reached & ((gradient - gradient[:, :1]).abs().amax(-1) > 1e-3 * gradient[:, :1].abs().amax(-1))
    return (reached & where).sum() > 0.5 * where.sum()


# -- losses by hand ----------------------------------------------------------------------------------------------------


def _weights(loss: Any, columns: Sequence[Tensor]) -> Iterator[Note]:
    for node in _terms(loss):
        shape, before = shape_of(node), [n for n, _ in node.next_functions]
        if name_of(node) != "Mul" or len(shape) != 2 or shape[0] != shape[1] or len(before) != 2 or is_number(node):
            continue
        saved = [t for n in ("_saved_self", "_saved_other") if isinstance(t := getattr(node, n, None), Tensor)]
        value = next((shape_of(n) for n in before if n is not None), [])
        if before.count(None) != 1 or len(saved) != 1 or shape[0] < LEAST:
            continue
        weight, n = saved[0], shape[0]
        if [value, list(weight.shape)] in ([[n, 1], [n]], [[n, 1], [1, n]], [[n], [n, 1]], [[1, n], [n, 1]]):
            flat = weight.detach().reshape(-1)
            rows = [(flat == column.to(flat.device)).all() for column in columns if len(column) == n]
            spread = flat.max() > flat.min()
            if rows and 1 in (len(value), weight.dim()):  # else both were given a second axis on purpose
                yield ("own weights", str(n)), spread & torch.stack(rows).any()


def _alone(loss: Any, end: Any) -> bool:
    node = getattr(loss, "grad_fn", None)
    while node is not None and node is not end:
        before = [n for n, _ in node.next_functions if n is not None]
        node = before[0] if len(before) == 1 else None
    return node is end


def _terms(loss: Any) -> Iterator[Any]:
    waiting: list[Any] = [getattr(loss, "grad_fn", None)]
    for _ in range(NODES):
        node = waiting.pop() if waiting else None
        if node is None:
            return
        yield node
        name, shape = name_of(node), shape_of(node)
        of_pairs = name in ("Add", "Sub") and len(shape) == 2 and shape[0] == shape[1]  # each pair has its own term
        if name in SIMPLE and (name != "Mul" or is_number(node)) and not of_pairs:
            waiting += [n for n, _ in node.next_functions if n is not None]


def _noise(loss: Any, calls: Calls) -> Iterator[Note]:
    for node in _terms(loss):
        target = getattr(node, "_saved_target", None) if name_of(node) == "MseLoss" else None
        if name_of(node) == "Pow" and isinstance(getattr(node, "_saved_self", None), Tensor):
            difference = node._saved_self.detach()
            output = next((o for o in calls.outputs if o.shape == difference.shape), None)
            target = None if output is None else output - difference
        if isinstance(target, Tensor) and is_plain_tensor(target) and target.numel() >= 128 and target.dim() > 1:
            alike = [t for t in calls.inputs if t.shape == target.shape and t.is_floating_point()]
            if len(alike) == 1 < len(calls.inputs) and is_plain_tensor(alike[0]) and alike[0].device == target.device:
                yield from _correlated(target.detach().float().reshape(-1), alike[0].detach().float().reshape(-1))
            return


def _correlated(target: Tensor, value: Tensor) -> Iterator[Note]:
    count = len(target)
    deviation, mean = torch.std_mean(target)
    z = (target - mean) / deviation
    bound = 5 / count**0.5
    normal = (mean.abs() < bound) & ((deviation - 1).abs() < bound) & ((z**4).mean() - 3).abs().lt(5 * bound)
    strength = torch.corrcoef(torch.stack([target, value]))[0, 1].abs() * count**0.5
    yield ("noise in no", ""), normal & (strength < 4)
    yield ("noise in an", ""), normal & (strength >= 4)


ERRORS = ("MseLoss", "SmoothL1Loss", "HuberLoss")
JOINED = (*VIEWS, "Select", "Stack", "Cat")
PASSED = (*JOINED, "Sub", "Div", "Neg", "Mul")  # between an advantage and a product with it
CHOSEN = (*JOINED, "Max", "Amax", "Gather", "Index", "Minimum", "Sub", "Mul", "Sum")  # of values of a state
# operations that leave rows apart
PER_ROW = {
    *(*JOINED, "Add", "Sub", "Neg", "Mul", "Div", "Pow", "Exp", "Log", "Log1P", "Sqrt", "Abs", "Split", "Relu"),
    *("Softplus", "Sigmoid", "Tanh", "Clamp", "LogSoftmax", "Gather", "Where", "Xlogy", "KlDiv"),
}
LARGE_TABLE = 16  # rows of a table of items
WEIGHT = 0.05  # factor of a term; what weighs less was weighed on purpose


def notes_on_terms(loss: Any, calls: Calls) -> Iterator[Note]:
    """Yield notes on the terms of a loss."""
    means, sums, rows = list[Any](), list[Any](), calls.rows
    for factor, divided, node in _summands(loss, rows):
        name = name_of(node)
        if not WEIGHT <= abs(factor) < math.inf or not _of_layers(node):
            continue
        if is_mean(node):
            means.append(node)
            yield from _masked(node, calls.inputs) if factor == factor and not divided else ()
        elif name == "Sum" and shape_of(node) == []:
            sizes = [int(n) for n in getattr(node, "_saved_self_sym_sizes", ())]
            sums += [sizes] if sizes[:1] == [rows] and not divided and _of_rows(node, rows) else []
        elif name in KINDS and getattr(node, "_saved_reduction", 0) == 2:
            sums += [] if divided else [[rows]]
    if means and sums and rows > 3:
        yield ("mean beside sum", f"{sums[0]}"), None


def _summands(loss: Any, rows: int) -> Iterator[tuple[float, bool, Any]]:
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
            if name == "Div" and isinstance(number, Tensor):  # a number that was counted
                waiting.append((factor, True, before[0]))
                continue
            by = factor_of(node)
            waiting.append((factor * by, divided or abs(by) * rows <= 1, before[0]))
        else:
            yield factor, divided, node


def _of_layers(node: Any) -> bool:
    """Return whether a term depends on a layer's output; a penalty depends on parameters alone."""
    return any(name_of(n) in LAYERS for n in _below(node, lambda _: True))


def _of_rows(node: Any, rows: int) -> bool:
    """Return whether a sum is taken over a layer's output with one row for each example. Products and means over
    examples do not count, nor do weights that add to 1."""
    waiting, ends = [n for n, _ in node.next_functions if n is not None], 0
    for _ in range(64):
        if not waiting:
            break
        each = waiting.pop()
        name, before = name_of(each), [n for n, _ in each.next_functions if n is not None]
        constants = [t for n in ("_saved_self", "_saved_other") if isinstance(t := getattr(each, n, None), Tensor)]
        weights = [t for t in constants if name == "Mul" and len(before) == 1 and t.numel() == rows]
        if name in LAYERS:
            leaves = [n for e in before for n in [e, _only(e)] if n is not None and name_of(n) == "AccumulateGrad"]
            ends += bool(leaves)
            if not leaves:
                return False
        elif name not in PER_ROW or weights or shape_of(each)[:1] not in ([rows], []):
            return False
        else:
            waiting += before
    return ends > 0


def _below(node: Any, goes_on: Callable[[str], bool], most: int = 64) -> Iterator[Any]:
    waiting, known = [node], set[Any]()
    while waiting and len(known) < most:
        node = waiting.pop(0)
        if node is not None and node not in known:
            known.add(node)
            yield node
            waiting += [n for n, _ in node.next_functions] if goes_on(name_of(node)) else []


def _masked(mean: Any, inputs: Sequence[Tensor]) -> Iterator[Note]:
    node = next((n for n, _ in mean.next_functions if n is not None), None)
    if name_of(mean) != "Mean" or node is None or name_of(node) != "Mul" or shape_of(mean):
        return
    mask = [t for n in ("_saved_self", "_saved_other") if isinstance(t := getattr(node, n, None), Tensor)]
    if len(mask) == 1 and is_plain_tensor(mask[0]) and mask[0].dim() == 2 and list(mask[0].shape) == shape_of(node):
        one = mask[0].detach().float()
        ends = (one[:, 1:] <= one[:, :-1]).all() | (one[:, 1:] >= one[:, :-1]).all()
        counts = one.sum(1)
        binary = ((one == 0) | (one == 1)).all() & (counts.max() > counts.min())
        padded = [p for value in inputs for p in _ends_in_padding(value, one)]
        if padded:
            yield ("masked mean", ""), ends & binary & torch.stack(padded).any()


def _ends_in_padding(value: Tensor, mask: Tensor) -> Iterator[Tensor]:
    """Yield whether an input is the mask, or has one value where the mask is 0; it may be one position longer."""
    if value.dim() not in (2, 3) or value.shape[0] != mask.shape[0] or value.device != mask.device:
        return
    length = mask.shape[1]
    for part in (value[:, 1:], value[:, :-1]) if value.shape[1] == length + 1 else [value]:
        if part.shape[1] == length:
            rest = (part if part.dim() == 3 else part.unsqueeze(2)) * 1.0
            out = (mask == 0).unsqueeze(2)
            low, high = rest.masked_fill(~out, math.inf).amin((0, 1)), rest.masked_fill(~out, -math.inf).amax((0, 1))
            yield (low == high).all()


# -- factors and targets with a gradient -------------------------------------------------------------------------------


def notes_on_gradients(loss: Any) -> Iterator[Note]:
    """Yield notes on products and errors in a loss of which both sides have a gradient."""
    values = set[Any]()  # outputs of layers that are compared with a target
    products = list[tuple[Any, Any]]()
    for node in nodes_of(loss, NODES):
        name, before = name_of(node), [n for n, _ in node.next_functions]
        under = before[0] if before else None
        if name in ERRORS or (name in ("Pow", "Abs") and under is not None and name_of(under) == "Sub"):
            sides = before[:2] if name in ERRORS or under is None else [n for n, _ in under.next_functions]
            values.update(n for s in sides for n in _below(s, JOINED.__contains__) if name_of(n) in LAYERS)
            pair = [None if s is None else _is_bootstrapped(s) for s in sides]
            if len(sides) == 2 and None not in sides and pair[0] != pair[1] and _one_layer(sides):
                yield ("target with a gradient", ""), None
        if name == "Mul" and len(before) == 2 and None not in before and not is_number(node):
            products += [(before[0], before[1]), (before[1], before[0])]
    for factor, other in products:
        layer = _advantage(factor)
        if layer is None or layer not in values or _advantage(other) in values:  # of two errors, both are trained
            continue
        if layer not in set(_below(other, lambda _: True)):
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


def _one_layer(sides: Sequence[Any]) -> bool:
    """Return whether both sides come from one layer, as values of two states do."""
    leaves = [_weights_of(next((n for n in _below(s, lambda _: True) if name_of(n) in LAYERS), None)) for s in sides]
    return bool(leaves[0] & leaves[1])


def _weights_of(layer: Any) -> set[int]:
    before = [n for n, _ in layer.next_functions if n is not None] if layer is not None else []
    ends = [e for n in before for e in (n, _only(n)) if e is not None and name_of(e) == "AccumulateGrad"]
    return {id(e.variable) for e in ends}


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


def notes_on_tokens(ids: Tensor, padding: Tensor, known: Tensor, ends: Sequence[Any]) -> Iterator[Note]:
    """Yield notes on classification losses that have a target for each token. `padding`: [B, T], False where none.
    `known`: a mask or length tells the model about it; otherwise equal symbols, such as silence, may be data."""
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
        real = counted & ~padding
        equal = real & (target == ids)
        share = equal.sum() / real.sum().clamp(min=1)
        classes = shape_of(_only(end))[1:2] if _only(end) is not None else []
        next_token = (share < 0.5) & ((target == ids) | ~padding).all()  # padding is a token of the vocabulary
        next_token &= ids.max() < (classes or [0])[0]
        learned = (there.sum() >= 0.1 * ids.numel()) & (there == padding).all() & (least == most)
        yield ("padding learned", ""), learned & (known | next_token)
        other = ids[real & (target != ids)] if ids.device.type == "cpu" else ids.new_zeros(0)
        if len(other):  # one symbol stands for what is hidden, and for nothing else
            hidden = (other == other.mode().values).float().mean() > 0.7
            only = ~(equal & (ids == other.mode().values)).any()
            yield ("copies learned", ""), (share > 0.5) & (share < 0.95) & hidden & only
