"""Looks in the graph of the first losses for values that a function excludes, mixed examples, shapes that spread over
all pairs, padding, noise, and its terms.

In: a loss before backward; inputs and outputs of the calls since the last one; arguments of torch's loss functions.
Out: (kind, argument), and a bool on its device, or None if the graph suffices. Terms of a loss: means or sums over the
batch, and factors and targets with a gradient. Skipped while hooks on saved tensors are in use.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .fingerprint import signed
from .graph import (
    KINDS,
    LAYERS,
    NODES,
    NOTHING,
    SIMPLE,
    VIEWS,
    factors_of,
    inputs_of,
    is_mean,
    loss_nodes,
    name_of,
    nodes_of,
    only,
    shape_of,
    summands,
    walk,
)
from .inputs import trailing, wrapped
from .logits import ALONE, TOGETHER, _unmoved, heads, is_number, place
from .placement import is_plain_tensor

LEAST = 8  # examples
MANY = 30  # targets of a class, on average, whose frequencies are compared
BOUNDED = ("Sigmoid", "Relu", "LogSigmoid", "Softplus")
ATTENTION = ("View", "UnsafeView", "ReshapeAlias", "Reshape", "Permute", "Transpose", "T", "Unsqueeze", "Squeeze")
Note = tuple[tuple[str, str], Tensor | None]
SAME = ("Clone", "Alias", "Expand", "ToCopy", "NativeDropout")  # leave the axes of an attention's weights as they are


def notes_on(
    loss: Any,
    calls: Calls,
    columns: Sequence[Tensor],
    counts: dict[int, Tensor],
    later: Callable[[tuple[str, str], Tensor], None],
) -> list[Note]:
    """Return the notes on a loss. `counts`: targets of each class in earlier losses, by number of classes. `later`:
    takes the notes that depend on its gradients."""
    notes: list[Note] = [*_all_pairs(loss, calls.rows, calls.inputs)]
    for node in nodes_of(loss, 4 * NODES):
        name = name_of(node)
        if name in OF_NODES:
            notes += OF_NODES[name](node)
        if name == "NllLoss":
            notes += _classes(node, calls.rows, counts)
        if name.startswith("NllLoss"):
            notes += _bounded(node)
        if name == "CtcLoss":
            notes += _ctc(loss, node, later)
        if name == "SoftMarginLoss" and _alone(loss, node):
            notes += _margin(node)
        if name in ("View", "UnsafeView", "ReshapeAlias", "Reshape", "Softmax"):
            notes += [*_batch(node, name, calls), *(heads(node) if name != "Softmax" else ())]
        if name == "Bmm" or name.startswith("ScaledDotProduct"):
            notes += heads(node)
        if name == "Select":
            _picked(node, calls.inputs, later)
        if name == "Embedding":
            notes += [*_padding(node, loss, later, calls), *_ids(node)]
    notes += [*notes_on_terms(loss, calls), *notes_on_gradients(loss)]
    _margins(loss, later)
    return [*notes, *_weights(loss, columns), *_noise(loss, calls)]


class Calls:
    """Inputs and outputs of the calls since the last backward. `inputs`: tensors of the last call. `known`: the batch
    axis cannot be told by its length, because an axis of a parameter or an example, or a part of one, may be as long.
    `wide`: a layer (a convolution, a bidirectional one) reads positions behind its own, so padding as well; so do
    layers with as many inputs as there are positions, or numbers at all of them (`read`)."""

    def __init__(
        self, models: Sequence[nn.Module], outputs: Sequence[Any], rows: int, inputs: Sequence[Tensor]
    ) -> None:
        self.rows, self.inputs = rows, inputs
        plain = [o for o in outputs if is_plain_tensor(o) and o.is_floating_point() and not wrapped(o)]
        self.outputs = [o.detach() for o in plain]
        owned = {n for m in models for p in m.parameters() for n in p.shape} if rows >= LEAST else set[int]()
        around = {n + more for tensor in inputs for n in tensor.shape[1:] for more in (0, 1, -1)}
        layers = [layer for m in models for layer in m.modules()]
        self.wide = any(isinstance(x, nn.Conv1d | nn.Conv2d) or getattr(x, "bidirectional", False) for x in layers)
        self.read = {x.in_features for x in layers if isinstance(x, nn.Linear)}
        self.known = any(n % rows == 0 for n in owned | around if n) if rows else True


# -- values that torch's functions do not take -------------------------------------------------------------------------


def _ctc(loss: Any, node: Any, later: Callable[[tuple[str, str], Tensor], None]) -> Iterator[Note]:
    under = _below_views(node)
    if _alone(loss, node) and under is not None and name_of(under) in (*LAYERS, "Softmax"):
        sums = node._saved_log_probs.detach().float().logsumexp(-1)
        yield ("ctc", ""), (sums > 0.01).float().mean() > 0.5
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
    under = only(node)
    masked |= under is not None and (name_of(under) in ("MaskedFill", "Where") or name_of(under) == "Mul")
    if is_plain_tensor(target) and target.numel() and not masked:
        mean = target.float().mean()
        yield ("target beyond", ""), (target < -0.5).any() | (target > 1.5).any()
        yield ("target outside", ""), (target.abs() == 1).all() & (target < 0).any() | ((mean - 0.5).abs() > 2.5)
        if isinstance(weight, Tensor) and weight.numel() == 1:
            share = target.float().mean()
            yield ("rare weighs", ""), ((weight < 0.8) & (share < 0.3) | (weight > 1.25) & (share > 0.7)).all()


def _margins(loss: Any, later: Callable[[tuple[str, str], Tensor], None]) -> None:
    """Note whether margins are all zero and have a gradient: a term of weight zero has none."""

    def watch(node: Any, zero: Tensor) -> None:
        node.register_prehook(lambda gradients: later(("margins of zero", ""), zero & (gradients[0] != 0).all()))

    for node in _terms(loss):
        under = node if name_of(node) in ("LogSigmoid", "Softplus") else NOTHING
        while under is node or (under is not None and name_of(under) in ("Mul", "Neg", *VIEWS)):
            under = only(under)
        if name_of(under or NOTHING) == "Sub" and is_plain_tensor(node._saved_self) and node._saved_self.numel() > 3:
            watch(node, (node._saved_self == 0).all())


def _margin(node: Any) -> Iterator[Note]:
    target = node._saved_target
    if is_plain_tensor(target) and node._saved_reduction:
        yield ("target 0", ""), ((target == 0) | (target == 1)).all() & (target == 0).any()


def _classes(node: Any, rows: int, counts: dict[int, Tensor]) -> Iterator[Note]:
    target, weight = node._saved_target, node._saved_weight
    if not isinstance(weight, Tensor) or not is_plain_tensor(target) or not 1 < (size := len(weight)) <= 4096:
        return
    target, weight = target.detach().reshape(-1).long(), weight.detach().float()
    place = target.where((target >= 0) & (target < size), size)
    now = torch.zeros(size + 1, dtype=torch.int64, device=target.device).scatter_add_(0, place, torch.ones_like(place))
    now = now[:size]
    if len(target) >= 4 * size >= LEAST:
        there = (now > 0) & (weight > 0)
        number, of_there = there.sum(), [v.float().where(there, 0.0) for v in (now, weight)]
        (low, high), (least, most) = ((v.where(there, math.inf).min(), v.max()) for v in of_there)
        spread = [(v - v.sum() / number).where(there, 0.0) for v in of_there]
        alike = (spread[0] * spread[1]).sum() > 0.7 * spread[0].norm() * spread[1].norm()
        yield ("frequent weighs", ""), (number > 1) & (high >= 3 * low) & (most >= 1.5 * least) & alike
    if size > 2 and node._saved_target.shape == (rows,):
        counts[size] = total = now + counts.get(size, 0)
        ordered = weight.sort().values * total.sort(descending=True).values
        own = weight * total
        inverse = (ordered.max() <= 2 * ordered.min()) & (own.max() >= 4 * own.min()) & (total.sum() >= MANY * size)
        yield ("weights of others", ""), inverse & (total > 0).all()


def _bounded(node: Any) -> Iterator[Note]:
    under = _below_views(node)
    below = _below_views(under) if under is not None and name_of(under) in ("LogSoftmax", "Log") else under
    if below is not None and name_of(below) in BOUNDED:
        yield ("bounded", name_of(below).lower()), None


def _below_views(node: Any) -> Any:
    node = only(node)
    while node is not None and name_of(node) in VIEWS:
        node = only(node)
    return node


OF_NODES: dict[str, Callable[[Any], Iterator[Note]]] = {
    "BinaryCrossEntropy": _binary,
    "BinaryCrossEntropyWithLogits": _binary,
    "Bmm": lambda node: _summed(node),
}


# -- axes --------------------------------------------------------------------------------------------------------------


def _batch(node: Any, name: str, calls: Calls) -> Iterator[Note]:
    shape, rows = shape_of(node), calls.rows
    if rows < LEAST or calls.known or shape.count(rows) != 1:
        return
    axis = shape.index(rows)
    if name == "Softmax":
        if math.prod(shape) > rows and signed(int(node._saved_dim)) % len(shape) == axis:
            yield ("softmax over the batch", f"{shape}"), None
        return
    before = [int(n) for n in getattr(node, "_saved_self_sym_sizes", ())]
    if before.count(rows) == 1 and place(before, shape, axis) != before.index(rows):
        yield ("batch", f"{before} to {shape}"), None


def _summed(node: Any) -> Iterator[Note]:
    for (operand, _), axis in zip(node.next_functions[:2], (2, 1), strict=False):
        here: int | None = axis
        while operand is not None and here is not None and name_of(operand) in (*ATTENTION, *SAME, "Mul"):
            name, shape, under = name_of(operand), shape_of(operand), only(operand)
            if name in ("Permute", "Transpose", "T"):
                here = _unmoved(operand, here)
            elif name in ATTENTION:
                before = shape_of(under) if under is not None else []
                here = place(before, shape, here) if before and shape[here] > 1 else None
            operand = under
        size = shape_of(operand) if operand is not None and here is not None else []
        if here is not None and size and name_of(operand) == "Softmax":
            over = signed(int(operand._saved_dim)) % len(size)
            scores = only(operand)
            constant = scores is None or name_of(scores) == "AccumulateGrad"  # transitions that are a parameter
            if over != here and size[over] == size[here] > 2 and not constant:
                yield ("softmax", f"axis {over} of {size}, sum over axis {here}"), None


# -- padding -----------------------------------------------------------------------------------------------------------


def _padding(node: Any, loss: Any, later: Callable[[tuple[str, str], Tensor], None], calls: Calls) -> Iterator[Note]:
    ids, ignored = node._saved_indices, signed(int(node._saved_padding_idx))
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
    run = trailing(same)
    lengths = run.sum(1)
    padded: Tensor = (lengths.max() > lengths.min()) & ((lengths > 1).sum() >= 2) & (lengths < ids.shape[1]).all()
    alone: Tensor = ~(same & ~run).any()
    inner = run & torch.roll(run, 1, 1)
    inner[:, 0] = False
    holds = padded & alone & ((value == ignored) | (ignored < 0))
    masks = [t for t in calls.inputs if t.shape == ids.shape and t is not ids and not t.is_floating_point()]
    known = (value == ignored) | torch.stack([run.new_zeros(()), *(((m == 0) == run).all() for m in masks)]).any()
    yield from notes_on_tokens(ids, inner & holds, known, loss_nodes(loss))
    if calls.wide or calls.read & {ids.shape[1], ids.shape[1] * shape_of(node)[-1]}:
        return

    def arrived(gradients: Any) -> None:
        later(("padding reaches", ""), holds & _reached(gradients[0], inner, ignored >= 0))

    node.register_prehook(arrived)
    for end in loss_nodes(loss) if ignored >= 0 else ():
        target, softmax = getattr(end, "_saved_target", None), only(end)
        classes = shape_of(softmax)[1:2] if softmax is not None else []
        if not isinstance(target, Tensor) or not is_plain_tensor(target):
            continue
        if name_of(end) == "NllLoss" and classes == [node._saved_weight_sym_argsize_0]:
            taught = target.eq(ignored).any() & (signed(int(end._saved_ignore_index)) != ignored)
            yield ("padding index", str(ignored)), padded & (value == ignored) & ~alone & taught


def _picked(node: Any, inputs: Sequence[Tensor], later: Callable[[tuple[str, str], Tensor], None]) -> None:
    """Note whether the last position [B, D] of values [B, T, D] gets gradients in rows that end in padding: a mask of
    the same call leaves out the ends of rows, where another input has one value."""
    size = [int(n) for n in getattr(node, "_saved_self_sym_sizes", ())]
    if len(size) != 3 or size[1] < 3 or signed(int(node._saved_dim)) % 3 != 1:
        return
    masks = [m.detach() * 1.0 for m in inputs if list(m.shape) == size[:2]]
    rows = []
    for mask in (
        [m for one in masks for m in (one, 1 - one)] if (signed(int(node._saved_index)) + 1) % size[1] == 0 else ()
    ):
        others = [value for value in inputs if value.shape != mask.shape or not torch.is_floating_point(value)]
        padded = [p for value in others for p in _ends_in_padding(value, mask, False)]
        ends = (mask[:, 1:] <= mask[:, :-1]).all() & (mask[:, 0] == 1).all() & ((mask == 0) | (mask == 1)).all()
        if padded:
            varied = mask.sum(1).max() > mask.sum(1).min()
            rows.append((ends & varied & torch.stack(padded).any(), mask[:, -1] == 0))

    def arrived(gradients: Any) -> None:
        for holds, short in rows if is_plain_tensor(gradients[0]) else ():
            later(("padding picked", ""), holds & ((gradients[0].detach() != 0).any(-1) & short).any())

    if rows:
        node.register_prehook(arrived)


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
        shape, before, saved = shape_of(node), inputs_of(node), factors_of(node)
        if name_of(node) != "Mul" or len(shape) != 2 or shape[0] != shape[1] or is_number(node):
            continue
        if len(before) != 1 or len(node.next_functions) != 2 or len(saved) != 1 or shape[0] < LEAST:
            continue
        value, weight, n = shape_of(before[0]), saved[0], shape[0]
        if [value, list(weight.shape)] in ([[n, 1], [n]], [[n, 1], [1, n]], [[n], [n, 1]], [[1, n], [n, 1]]):
            flat = weight.detach().reshape(-1)
            rows = [(flat == column.to(flat.device)).all() for column in columns if len(column) == n]
            spread = flat.max() > flat.min()
            if rows and 1 in (len(value), weight.dim()):  # else both were given a second axis on purpose
                yield ("own weights", str(n)), spread & torch.stack(rows).any()


def _alone(loss: Any, end: Any) -> bool:
    node = getattr(loss, "grad_fn", None)
    while node is not None and node is not end:
        node = only(node)
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
            waiting += inputs_of(node)


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
    for factor, divided, node in summands(loss, rows):
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


def _of_layers(node: Any) -> bool:
    """Return whether a term depends on a layer's output; a penalty depends on parameters alone."""
    return any(name_of(n) in LAYERS for n in walk([node]))


def _of_rows(node: Any, rows: int) -> bool:
    """Return whether a sum is taken over a layer's output with one row for each example. Products and means over
    examples do not count, nor do weights that add to 1."""
    waiting, ends = inputs_of(node), 0
    for _ in range(64):
        if not waiting:
            break
        each = waiting.pop()
        name, before = name_of(each), inputs_of(each)
        weights = [t for t in factors_of(each) if name == "Mul" and len(before) == 1 and t.numel() == rows]
        if name in LAYERS:
            leaves = [n for e in before for n in [e, only(e)] if n is not None and name_of(n) == "AccumulateGrad"]
            ends += bool(leaves)
            if not leaves:
                return False
        elif name not in PER_ROW or weights or shape_of(each)[:1] not in ([rows], []):
            return False
        else:
            waiting += before
    return ends > 0


def _masked(mean: Any, inputs: Sequence[Tensor]) -> Iterator[Note]:
    node = next(iter(inputs_of(mean)), None)
    if name_of(mean) != "Mean" or node is None or name_of(node) != "Mul" or shape_of(mean):
        return
    mask = factors_of(node)
    if len(mask) == 1 and is_plain_tensor(mask[0]) and mask[0].dim() == 2 and list(mask[0].shape) == shape_of(node):
        one = mask[0].detach().float()
        ends = (one[:, 1:] <= one[:, :-1]).all() | (one[:, 1:] >= one[:, :-1]).all()
        counts = one.sum(1)
        binary = ((one == 0) | (one == 1)).all() & (counts.max() > counts.min())
        padded = [p for value in inputs for p in _ends_in_padding(value, one)]
        if padded:
            yield ("masked mean", ""), ends & binary & torch.stack(padded).any()


def _ends_in_padding(value: Tensor, mask: Tensor, itself: bool = True) -> Iterator[Tensor]:
    """Yield whether an input has one value where the mask is 0; it may be one position longer. `itself`: it may be the
    mask."""
    if value.dim() not in (2, 3) or value.shape[0] != mask.shape[0] or value.device != mask.device:
        return
    length = mask.shape[1]
    for part in (value[:, 1:], value[:, :-1]) if value.shape[1] == length + 1 else [value]:
        if part.shape[1] == length:
            rest = (part if part.dim() == 3 else part.unsqueeze(2)) * 1.0
            out = (mask == 0).unsqueeze(2)
            low, high = rest.masked_fill(~out, math.inf).amin((0, 1)), rest.masked_fill(~out, -math.inf).amax((0, 1))
            yield (low == high).all() & (itself | (rest > 1).any())


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
            values.update(n for s in sides for n in walk([s], JOINED.__contains__) if name_of(n) in LAYERS)
            pair = [None if s is None else _is_bootstrapped(s) for s in sides]
            if len(sides) == 2 and None not in sides and pair[0] != pair[1] and _one_layer(sides):
                yield ("target with a gradient", ""), None
        if name == "Mul" and len(before) == 2 and None not in before and not is_number(node):
            products += [(before[0], before[1]), (before[1], before[0])]
    for factor, other in products:
        layer = _advantage(factor)
        if layer is None or layer not in values or _advantage(other) in values:  # of two errors, both are trained
            continue
        if layer not in set(walk([other])):
            yield ("advantage with a gradient", ""), None
            return


def _advantage(node: Any) -> Any:
    """Return the layer of one output per row that a constant minus its output comes from, or None."""
    for each in walk([node], PASSED.__contains__, 24):
        sides = [n for n, _ in each.next_functions] if name_of(each) == "Sub" else []
        for side in sides if len(sides) == 2 and None in sides else ():
            for end in walk([side], JOINED.__contains__):
                if name_of(end) in LAYERS and shape_of(end)[-1:] == [1]:
                    return end
    return None


def _one_layer(sides: Sequence[Any]) -> bool:
    """Return whether both sides come from one layer, as values of two states do."""
    leaves = [_weights_of(next((n for n in walk([s]) if name_of(n) in LAYERS), None)) for s in sides]
    return bool(leaves[0] & leaves[1])


def _weights_of(layer: Any) -> set[int]:
    ends = [e for n in inputs_of(layer or NOTHING) for e in (n, only(n)) if e is not None]
    return {id(e.variable) for e in ends if name_of(e) == "AccumulateGrad"}


def _is_bootstrapped(node: Any) -> bool:
    """Return whether a value is a constant (a reward) plus a multiple of a layer's output."""
    for each in walk([node], VIEWS.__contains__, 6):
        sides = [n for n, _ in each.next_functions] if name_of(each) == "Add" else []
        rest = next((n for n in sides if n is not None), None)
        if len(sides) == 2 and None in sides and name_of(rest or NOTHING) == "Mul" and only(rest) is not None:
            return any(name_of(n) in LAYERS for n in walk([rest], CHOSEN.__contains__, 24))
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
        counted = target != signed(int(end._saved_ignore_index))
        there = padding & counted
        least = target.masked_fill(~padding, 1 << 30).min()
        most = target.masked_fill(~padding, -1).max()
        real = counted & ~padding
        equal = real & (target == ids)
        share = equal.sum() / real.sum().clamp(min=1)
        classes = shape_of(only(end))[1:2] if only(end) is not None else []
        next_token = (share < 0.5) & ((target == ids) | ~padding).all()  # padding is a token of the vocabulary
        next_token &= ids.max() < (classes or [0])[0]
        learned = (there.sum() >= 0.1 * ids.numel()) & (there == padding).all() & (least == most)
        yield ("padding learned", ""), learned & (known | next_token)
        other = ids[real & (target != ids)] if ids.device.type == "cpu" else ids.new_zeros(0)
        if len(other):  # one symbol stands for what is hidden, and for nothing else
            hidden = (other == other.mode().values).float().mean() > 0.7
            alone = ~(equal & (ids == other.mode().values)).any()
            yield ("copies learned", ""), (share > 0.5) & (share < 0.95) & hidden & alone


def _ids(node: Any) -> Iterator[Note]:
    ids = node._saved_indices.detach()
    if is_plain_tensor(ids) and ids.dim() == 2 and len(ids) >= 4 and ids.shape[1] > 4 and ids.shape[0] != ids.shape[1]:
        same = ids == ids[0, 0]
        end = trailing(same)  # an end token, or padding
        twice = same[:, :2].all() & ~(same & ~end)[:, 2:].any() & ~same[:, 2].any()
        yield (
            ("start twice", ""),
            twice & (ids[0, 0] != signed(int(node._saved_padding_idx))) & ids[:, 2].ne(ids[0, 2]).any(),
        )


# -- pairs -------------------------------------------------------------------------------------------------------------

# element-wise operations of a loss by hand, besides `ALONE` and `TOGETHER`
ELEMENTS = {*ALONE, *TOGETHER, *KINDS, "Where", "Expand", "Rsub", "Xlogy", "Log1P", "Reciprocal", "Rsqrt", "Lgamma"}
PARTS = ("Split", "Slice", "Gather", "Chunk")  # leave the last axis of one number there


def _all_pairs(loss: Any, n: int, inputs: Sequence[Tensor]) -> Iterator[Note]:
    """Yield whether values [N, 1] of a layer are combined with others to [N, N], of which all pairs count equally."""
    if n < 4 or any(n in t.shape[1:] for t in inputs):
        return
    waiting: list[Any] = [getattr(loss, "grad_fn", None)]
    known, spread = set[Any](), False
    while waiting and len(known) < NODES:
        node = waiting.pop()
        if node in known:
            continue
        known.add(node)
        name, shape = name_of(node), shape_of(node)
        before = inputs_of(node)
        if shape == [] and name in ELEMENTS:
            waiting += before
        elif shape == [n, n]:
            constant = len(before) < 2 and name in ("Mul", "Div") and not is_number(node)
            if name not in ELEMENTS or (constant and any(t.dim() > 1 and t.shape[-1] == n for t in factors_of(node))):
                return  # pairs that were made, masked or weighted on purpose
            sizes = [shape_of(b) for b in before]
            waiting += [b for b, size in zip(before, sizes, strict=True) if size == [n, n]]
            narrow = [b for b, size in zip(before, sizes, strict=True) if size == [n, 1]]
            if any(size not in ([n, n], [n, 1], []) for size in sizes):
                return  # [N]: of two outputs, pairs may be meant
            if narrow and [n, n] not in sizes and (name == "Expand" or len(narrow) < len(node.next_functions)):
                if not all(_of_a_layer(b) for b in narrow):
                    return
                spread = True
    if spread:
        yield ("all pairs", str(n)), None


def _of_a_layer(node: Any) -> bool:
    """Return whether values [N, 1] are those of a layer, and no axis was added to them on purpose."""
    waiting, known = [node], set[Any]()
    while waiting:
        node = waiting.pop()
        if node in known or shape_of(node) == []:
            continue
        known.add(node)
        before = inputs_of(node)
        if name_of(node) in LAYERS or (name_of(node) in PARTS and len(shape_of(before[0])) == 2):
            continue
        if name_of(node) not in ELEMENTS or len(known) > 32 or not before:
            return False
        waiting += before
    return True


# -- arguments of loss functions ---------------------------------------------------------------------------------------


def _signs(name: str) -> Callable[..., Iterator[Note]]:
    def look(*args: Any, target: Any = None, **_: Any) -> Iterator[Note]:
        tensors = [a for a in (*args, target) if isinstance(a, Tensor)]
        value = tensors[-1]
        if value.numel() > 3:
            yield ("pairs of 0", name), ((value == 0) | (value == 1)).all() & (value == 0).any() & (value == 1).any()

    return look


def _divergence(
    input: Any,
    target: Any,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
    log_target: bool = False,
) -> Iterator[Note]:
    if not is_plain_tensor(target) or target.dim() < 2 or target.shape != input.shape or reduction == "none":
        return
    own, other = input.detach().float().exp().sum(-1), target.detach().float()
    if log_target:
        yield (
            ("target of kl_div", "log_target=True, and its targets are above 0"),
            (other > 1e-3).any() & (other >= 0).all(),
        )
    else:
        normal = (own - 1).abs().max() < 0.01
        yield ("target of kl_div", "targets that do not add to 1"), normal & ((other.sum(-1) - 1).abs().min() > 0.05)


ARGUMENTS: dict[str, Callable[..., Iterator[Note]]] = {
    "kl_div": _divergence,
    "cosine_embedding_loss": _signs("cosine_embedding_loss"),
    "hinge_embedding_loss": _signs("hinge_embedding_loss"),
    "margin_ranking_loss": _signs("margin_ranking_loss"),
}
