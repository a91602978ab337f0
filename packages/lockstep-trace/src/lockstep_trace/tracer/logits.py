"""Examines a loss in its graph: the axis of the classes, products of embeddings, answers in the input, all pairs, and
attention.

In: a loss before backward, the inputs of the calls that computed it, and the columns of the batch. Out: (note, bool on
its device, or None if the graph suffices); counts of attention, named by `SEEN`.

A class is a channel of a layer. A view that merges or replaces the channel axis with another one turns positions into
"classes": `transpose` and `permute` move an axis, `view` and `reshape` cut memory. Skipped while hooks on saved tensors
are in use: reading a saved tensor would recompute a checkpointed forward pass.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .fingerprint import signed
from .graph import (
    LAYERS,
    NODES,
    NOTHING,
    factor_of,
    factors_of,
    inputs_of,
    loss_nodes,
    name_of,
    nodes_of,
    only,
    shape_of,
    walk,
)
from .inputs import trailing
from .placement import is_plain_tensor

DEPTH = 24  # operations between a loss and the layer that its logits come from
WHOLE = ("Clone", "ToCopy", "Alias", "Div", "Mul", "Neg", "Slice")  # leave axes as they are
CLOSE = 1e-5  # of a row's spread: two equal logits, summed in different orders, may differ by this
CERTAIN = 30.0  # negative logarithm of the probability that all rows have such a pair by chance
LARGEST = 1 << 22  # max. logits to compare
Note = tuple[tuple[str, str], Tensor | None]  # (kind, argument), and whether it holds


def logits_notes(loss: Any) -> list[Note]:
    """Return the notes on the logits of a classification loss, or an empty list."""
    notes: list[Note] = []
    for node in loss_nodes(loss):
        if name_of(node).startswith("NllLoss"):
            softmax = _softmax(node)
            if softmax is not None and is_plain_tensor(softmax._saved_result):
                notes += [*_axes(softmax), *_twice(node, softmax), *_self(node, softmax), *_narrow(softmax)]
    return notes


def _softmax(node: Any) -> Any:
    for _ in range(4):
        node = next(iter(inputs_of(node)), None)
        if node is None or name_of(node) == "LogSoftmax":
            return node
    return None


# -- axes --------------------------------------------------------------------------------------------------------------


def _axes(softmax: Any) -> Iterator[Note]:
    shape = shape_of(softmax)
    axis: int | None = signed(int(softmax._saved_dim)) % max(len(shape), 1)
    classes = shape[axis] if axis is not None and len(shape) > 1 else 0
    node, text = only(softmax), ""
    for _ in range(DEPTH):
        if node is None or classes < 2:
            return
        name = name_of(node)
        if name in LAYERS:
            size = shape_of(node)
            channel = 1 if name == "Convolution" else len(size) - 1
            if text and axis != channel and len(size) > 1 and size[channel] == classes:
                yield ("classes", text), None
            return
        if name in ("View", "UnsafeView", "ReshapeAlias"):
            before, after = [int(n) for n in node._saved_self_sym_sizes], shape_of(node)
            if len(before) == 2 and before[-1] == after[-1] and name_of(only(node) or node) in ("Addmm", "Mm"):
                # a layer of several axes, which it puts together beforehand
                if text and axis != len(after) - 1 and after[-1] == classes:
                    yield ("classes", text), None
                return
            here = None if axis is None else place(before, after, axis)
            if here is None and axis is not None and is_union(before, after, axis):
                return  # classes are positions, as in a heat map
            if axis is not None and (here is None or before[here] != classes):
                text = text or f"{before} to {after}"
            axis = here
        elif name in ("Transpose", "T", "Permute"):
            axis = _unmoved(node, axis)
        elif name not in WHOLE or len(shape_of(node)) != len(shape_of(only(node) or node)):
            return
        node = only(node)


CUT = ("View", "UnsafeView", "ReshapeAlias", "Reshape")  # cut memory
ASIDE = (*CUT, "Expand", "Clone", "ToCopy", "Mul", "Div", "Transpose", "Permute")


def heads(node: Any) -> Iterator[Note]:
    """Yield views that exchange positions and heads, [B, L, heads * D] or [B, L, heads, D] and [B, heads, L, D], where
    one side is a layer's output and the other attention's, with nothing between that moves axes.

    A layer that has more outputs than inputs may give several positions at once. Attention whose inputs keep their axes
    may be of windows."""
    if name_of(node) in CUT:
        sizes, below = [*map(int, node._saved_self_sym_sizes)], only(node)
        while below is not None and name_of(below) in (*CUT, "Clone"):
            below = only(below)
        if below is not None and name_of(below).startswith(("Bmm", "ScaledDotProduct")) and _transposed(below, sizes):
            yield from _exchanged(shape_of(node), sizes, f"{sizes} to {shape_of(node)}")
        return
    for under in inputs_of(node)[:3]:
        for _ in range(12):
            if under is None or name_of(under) not in ASIDE:
                break
            sizes = [*map(int, under._saved_self_sym_sizes)] if name_of(under) in CUT else []
            below = only(under)
            while sizes and below is not None and name_of(below) in CUT:
                below = only(below)
            if sizes and below is not None and _square(below):
                yield from _exchanged(sizes, shape_of(under), f"{sizes} to {shape_of(under)}")
            under = only(under)


def _square(node: Any) -> bool:
    sizes = getattr(node, "_saved_mat2_sym_sizes", None) if name_of(node) in ("Addmm", "Mm") else None
    return sizes is not None and int(sizes[0]) == int(sizes[1])


def _transposed(attention: Any, sizes: list[int]) -> bool:
    """Return whether an input of attention is a transpose of [B, L, heads, D] to `sizes`."""
    for under in inputs_of(attention)[:3]:
        for _ in range(12):
            if under is None or name_of(under) not in ASIDE:
                break
            if name_of(under) in ("Transpose", "Permute") and shape_of(under)[:3] == sizes[:3]:
                return True
            under = only(under)
    return False


def _exchanged(rows: list[int], cut: list[int], text: str) -> Iterator[Note]:
    if len(cut) == 4 and cut[1] > 1 < cut[2] != cut[1]:
        batch, count, length, width = cut
        if rows in ([batch, length, count * width], [batch, length, count, width]):
            yield ("heads", text), None


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
        return signed(int(node._saved_dims[axis])) % count
    pair = (0, 1) if name_of(node) == "T" else (node._saved_dim0, node._saved_dim1)
    one, other = (signed(int(n)) % count for n in pair)
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
    sizes = [shape_of(n) for n in inputs_of(joined)]
    if len(sizes) < 2 or any(len(size) != 2 or size[0] != shape[0] for size in sizes) or [shape[0], 1] not in sizes:
        return
    result = softmax._saved_result.detach()
    rows = target.clamp(min=0).unsqueeze(1)
    own, spread = result.gather(1, rows), result.std(1, keepdim=True)
    near = ((result - own).abs() <= CLOSE * spread).sum(1) - 1
    again = (
        result.sort(1).values.diff(dim=1) <= 0
    ).float().mean() > 0.25  # all candidates occur twice, not only positives
    pair = "positive among negatives", ""
    yield pair, ((near >= 1) & (near <= shape[1] // 4) & (spread[:, 0] > 1e-3)).all() & ~again


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
    yield ("itself among candidates", ""), holds & unit
    yield ("itself among products", ""), holds & ~unit


def _narrow(softmax: Any) -> Iterator[Note]:
    """Yield whether similarities of unit vectors are multiplied by so small a number that all classes stay alike."""
    shape, node, factor = shape_of(softmax), only(softmax), 1.0
    for _ in range(8):
        if node is None or name_of(node) not in ("Mul", "Div", "MaskedFill", "CopySlices", "Clone", "T", "Transpose"):
            break
        factor *= factor_of(node) if name_of(node) in ("Mul", "Div") else 1
        node = only(node)
    saved = (getattr(node, n, None) for n in ("_saved_self", "_saved_mat2"))
    sides = [s for s in saved if isinstance(s, Tensor) and is_plain_tensor(s)]
    if len(shape) != 2 or shape[1] < 8 or name_of(node or NOTHING) != "Mm" or len(sides) != 2:
        return
    least = math.log1p((shape[1] - 1) * math.exp(-2 * abs(factor)))  # at similarities of 1 and -1
    if math.isfinite(factor) and factor and least > 0.8 * math.log(shape[1]):
        lengths = torch.cat([sides[0].detach().float().norm(dim=1), sides[1].detach().float().norm(dim=0)])
        about = f"{abs(factor):.3g}, which keeps the loss above {least:.3g} ({math.log(shape[1]):.3g}"
        yield ("narrow", about), (lengths - 1).abs().max() < 1e-3


def _equally_long(node: Any, count: int) -> Tensor | None:
    rows = next((r for r in (node._saved_self, node._saved_mat2) if isinstance(r, Tensor)), None)
    if rows is None or not is_plain_tensor(rows):
        return None
    lengths = (rows if rows.shape[0] == count else rows.t()).detach().float().norm(dim=1)
    return (lengths - lengths.mean()).abs().max() <= 1e-3 * lengths.mean()


def _scaled(node: Any) -> Any:
    node = only(node)
    while node is not None and name_of(node) in ("Div", "Mul") and is_number(node):
        node = only(node)
    return NOTHING if node is None else node


def _over_moves(node: Any) -> Any:
    return only(node) if name_of(node) in ("T", "Transpose", "Permute") else node


SOFTMAX = ("Softmax", "SafeSoftmax")
ANSWER_NODES = 4096
LEAST = 8  # targets
MOVES = 0.3  # share of tokens that differ from their predecessor
# move positions, or mix them
MOVING = ("Cat", "Slice", "Roll", "ConstantPadNd", "Index", "IndexSelect", "Gather", "Flip", "Convolution", "Stack")
MIXING = ("Bmm", "Baddbmm", "Mean", "Sum", "Max", "CopySlices", "SliceScatter", "IndexPut", *SOFTMAX)


def answer_notes(loss: Any, floats: Sequence[Tensor], drawn: bool) -> list[Note]:
    """Return the notes on answers among the inputs. `floats`: inputs [N, F] of the calls since the last backward;
    `drawn`: random numbers may have been drawn since the forward began."""
    nodes = loss_nodes(loss)
    notes: list[Note] = []
    for node in nodes:
        target = getattr(node, "_saved_target", None)
        classes = name_of(node).startswith(("NllLoss", "BinaryCrossEntropy"))
        if classes and isinstance(target, Tensor) and is_plain_tensor(target):
            notes += _columns(target, floats)
    of_tokens = [n for n in nodes if name_of(n).startswith("NllLoss")]
    return notes + (_decoded(loss, of_tokens[0], drawn) if len(of_tokens) == 1 else [])


def _columns(target: Tensor, floats: Sequence[Tensor]) -> Iterator[Note]:
    flat = target.detach().reshape(-1)
    if not (LEAST <= len(flat) == target.shape[0]):
        return
    for rows in floats:
        if rows.dim() == 2 and len(rows) == len(flat) and rows.shape[1] > 1 and rows.device == flat.device:
            equal = (rows == flat.to(rows.dtype).unsqueeze(1)).all(0).any()
            yield ("answer in a column", ""), equal & (flat != flat[0]).any()


def _decoded(loss: Any, node: Any, drawn: bool) -> list[Note]:
    """Return notes on whether a causal decoder reads the targets themselves, each at its own position.

    Excluded: decoders that shift their input, autoencoders (an encoder without a causal mask, or a bottleneck narrower
    than the embedding), denoisers (numbers added to the embeddings) and taggers (which change some tokens)."""
    if not is_plain_tensor(node._saved_target):
        return []
    target = node._saved_target.detach().reshape(-1)
    counted = target != signed(int(node._saved_ignore_index))
    same = [node for node in nodes_of(loss, ANSWER_NODES) if name_of(node) == "Embedding" and _fits(node, target)]
    looks = attentions(loss) if same else None
    for embedding in same if looks else ():
        ids = embedding._saved_indices
        reads = [each for each in looks or () if _directly(each[0], embedding, ids.shape, drawn)]
        if reads and _is_wide(node, embedding, ids.shape):
            causal = torch.stack([_is_causal(each, ids) for each in reads]).any()
            equal = ((ids.reshape(-1) == target) | ~counted).all() & (counted.sum() >= LEAST)
            moves = (ids[:, 1:] != ids[:, :-1]).float().mean() > MOVES
            notes = ("answer at its position", equal & moves & causal), ("another at its position", causal & ~equal)
            return [((kind, ""), holds) for kind, holds in notes]
    return []


def _is_wide(loss: Any, embedding: Any, size: tuple[int, ...]) -> bool:
    width = shape_of(embedding)[-1]
    waiting: list[tuple[Any, bool]] = [(loss, False)]
    known: set[Any] = set()
    while waiting and len(known) < ANSWER_NODES:
        node, below = waiting.pop()
        if node is embedding:
            return True
        if node is None or node in known:
            continue
        known.add(node)
        shape = shape_of(node)
        of_tokens = len(shape) in (2, 3) and math.prod(shape[:-1]) == math.prod(size)
        if below and of_tokens and 2 * shape[-1] < width:
            continue
        below = below or name_of(node) in LAYERS
        waiting += [(n, below) for n, _ in node.next_functions]
    return False


def _is_causal(look: tuple[Any, Any], ids: Tensor) -> Tensor:
    sees = weights_of(*look, ids)
    if sees is None or sees is ALL or sees.shape[1] != ids.shape[1]:
        return torch.zeros((), dtype=torch.bool, device=ids.device)
    return ~sees.triu(1).any() & sees.tril(-1).any() & sees.diagonal(0, 1, 2).any()


def _fits(node: Any, target: Tensor) -> bool:
    ids = node._saved_indices
    fits = isinstance(ids, Tensor) and ids.dim() == 2 and ids.shape[1] > 2 and ids.numel() == len(target)
    return fits and is_plain_tensor(ids)


def _directly(attention: Any, embedding: Any, size: tuple[int, ...], drawn: bool) -> bool:
    waiting: list[Any] = [n for n, _ in attention.next_functions]
    known: set[Any] = set()
    if name_of(attention) in SOFTMAX:
        products = (n for n in walk(waiting, lambda name: "Bmm" not in name) if "bmm" in name_of(n).lower())
        waiting = inputs_of(next(products, NOTHING))
    while waiting and len(known) < ANSWER_NODES:
        node = waiting.pop()
        if node is embedding:
            return True
        name = "" if node is None else name_of(node)
        if node is None or node in known or name in (*MOVING, *MIXING) or name.startswith("ScaledDotProduct"):
            continue
        known.add(node)
        if drawn and name == "Add" and any(n is None for n, _ in node.next_functions):
            continue
        if any(n in (size[1], size[0] * size[1]) for n in shape_of(node)):  # it still has positions
            waiting += [n for n, _ in node.next_functions]
    return False


def floats_of(values: Any) -> list[Tensor]:
    """Return the inputs [N, F] of a call that are not token ids."""
    rows = [v for v in values if is_plain_tensor(v) and v.dim() == 2 and v.layout == torch.strided]
    return [v.detach() for v in rows if v.is_floating_point() and not v.requires_grad and v.numel() <= 1 << 20]


CLOSE_PAIRS = 1e-6
# element-wise operations, and reductions of their results
ALONE = (
    "Abs",
    "Pow",
    "Sqrt",
    "Log",
    "Log1P",
    "Exp",
    "Expm1",
    "Cosh",
    "Tanh",
    "Neg",
    "Softplus",
    "Sigmoid",
    "Square",
    "Clamp",
    "ClampMin",
    "ClampMax",
    "Relu",
    "LeakyRelu",
    "LogSigmoid",
)
TOGETHER = ("Mean", "Sum", "Add", "Sub", "Div", "Mul", "Maximum", "Minimum")


def columns(batch: Any) -> list[Tensor]:
    """Return the columns of a batch that have one number for each example."""
    values = batch.values() if isinstance(batch, Mapping) else batch
    if not isinstance(values, list | tuple | type({}.values())):
        return []
    rows = [v.detach() for v in values if isinstance(v, Tensor) and v.dim() == 1 and len(v) > 2]
    return [row for row in rows if not row.is_complex()][:4]


def compares_all(loss: Any, targets: Sequence[Tensor]) -> Tensor | None:
    """Return whether a loss is a function of the differences [N, N] between outputs [N, 1] and a column [N] of the
    batch, in which all pairs count equally: int64 [1]; None for other losses."""
    waiting: list[Any] = [getattr(loss, "grad_fn", None)]
    known: list[Any] = []
    pairs = None
    for _ in range(NODES):
        node = waiting.pop() if waiting else None
        if node is None:
            break
        if _is_of_pairs(node) and pairs in (None, node):
            pairs = node
            continue
        name, before = name_of(node), inputs_of(node)
        weighted = name in ("Mul", "Div") and len(before) < 2 and not is_number(node)
        weighted |= name in ("Maximum", "Minimum") and len(before) < 2
        weighted |= any(isinstance(getattr(node, bound, None), Tensor) for bound in ("_saved_min", "_saved_max"))
        if weighted or not before or (name not in ALONE and name not in TOGETHER):
            return None
        known.append(node)
        waiting += [n for n in before if all(n is not k for k in known)]
    if pairs is None:
        return None
    value = next((v for n in known if (v := _multiple(n, pairs)) is not None), None)
    return None if value is None else _matches(value, targets)


def _multiple(node: Any, pairs: Any) -> Tensor | None:
    value, under = getattr(node, "_saved_self", None), node.next_functions[0][0]
    while under is not pairs and under is not None and (name_of(under) == "Neg" or name_of(under) in ("Mul", "Div")):
        under = under.next_functions[0][0] if len(under.next_functions) == 1 or is_number(under) else None
    fits = under is pairs and isinstance(value, Tensor) and list(value.shape) == shape_of(pairs)
    return value.detach() if fits and isinstance(value, Tensor) else None


def _is_of_pairs(node: Any) -> bool:
    shape, before = shape_of(node), [n for n, _ in node.next_functions]
    if name_of(node) != "Sub" or len(shape) != 2 or shape[0] != shape[1] or before.count(None) != 1 or len(before) != 2:
        return False
    under = before[0] or before[1]
    return shape_of(under) == [shape[0], 1] and name_of(under) in ("Addmm", "Mm")


def is_number(node: Any) -> bool:
    """Return whether a product's other factor is a number, not a tensor of weights."""
    return all(value.dim() == 0 for value in factors_of(node))


def _matches(value: Tensor, targets: Sequence[Tensor]) -> Tensor | None:
    row = (value[0] - value[0, 0]).double()
    rows = []
    for target in targets:
        if len(target) == len(row):
            other = target.to(row.device).double()
            other = other - other[0]
            sizes = row.dot(row) * other.dot(other)
            rows.append((sizes > 0) & (row.dot(other).square() >= (1 - CLOSE_PAIRS) * sizes))
    return torch.stack(rows).any().reshape(1).long() if rows else None


ATTENTION_NODES = 8192  # nodes of a graph to visit
MOST = 256  # attentions
LEAST_ROWS = -30.0  # added to scores of visible positions; masks with large negative numbers are below
MOST_SEEN = 0.8  # share of targets
LARGEST_WEIGHTS = 1 << 24  # max. elements of weights or masks to look at
SEEN = ("targets", "next", "attentions", "answered", "padded", "inverted")


def attention_counts(loss: Any, calls: Sequence[Sequence[Tensor]]) -> Tensor | None:
    """Return int64 [len(SEEN)], or None without token numbers or a loss over classes of one call.

    `targets`: that count; `next`: of these, equal to the next token of the input. `attentions` over all positions;
    `answered`: of these, where such targets' positions attend to the next one. `padded`: rows that end in padding;
    `inverted`: of these, where the first masked attention sees the padding and nothing else."""
    nodes = [n for n in loss_nodes(loss) if name_of(n).startswith("NllLoss")]
    if len(nodes) != 1 or len(calls) != 1 or not calls[0]:
        return None
    looks = attentions(loss)
    if looks is None or any(
        not is_plain_tensor(t) for node, _ in looks for t in (*_saved(node), getattr(node, "_saved_query", loss))
    ):
        return None  # not all attentions are known, or reading one would communicate
    ids = calls[0][0]
    rows = [weights_of(node, parent, ids) for node, parent in looks]
    weights = [w for w in rows if w is not None]
    counts = _targets(nodes[0], calls[0])
    zero = torch.zeros((), dtype=torch.int64, device=ids.device)
    answered = zero
    if counts is None:
        following: list[Tensor] = [zero, zero]
    else:
        *following, positions = counts
        for each in weights:
            if each is ALL:
                answered = answered + 1
            elif each.shape[1] <= ids.shape[1]:  # otherwise the positions of tokens are unknown
                sees = each.diagonal(1, 1, 2)[:, : positions.shape[1]]
                here = positions[:, : sees.shape[1]]
                answered = answered + ((sees & here).sum() > MOST_SEEN * here.sum())  # dropout may hide some positions
    padded = _padding(ids, [w for w in weights if w is not ALL])
    number = zero + len(weights)
    return torch.stack([n.reshape(()).long() for n in (*following, number, answered, *padded)])


ALL = torch.ones(())  # stands for attention without a mask


def attentions(loss: Any) -> list[tuple[Any, Any]] | None:
    """Return (node, its user) of fused attentions and softmaxes, nearest to the loss first; None if the graph, or the
    weights or masks of one of them, are too large."""
    queue: deque[Any] = deque([(getattr(loss, "grad_fn", None), None)])
    known: set[Any] = set()
    rows: list[tuple[Any, Any]] = []
    while queue:
        if len(known) >= ATTENTION_NODES or len(rows) >= MOST:
            return None
        node, parent = queue.popleft()
        if node is None or node in known:
            continue
        known.add(node)
        if name_of(node).startswith("ScaledDotProduct") or name_of(node) in SOFTMAX:
            rows.append((node, parent))
        queue.extend((n, node) for n, _ in node.next_functions)
    return None if any(t.numel() > LARGEST_WEIGHTS for node, _ in rows for t in _saved(node)) else rows


def _saved(node: Any) -> list[Tensor]:
    names = ("_saved_result", "_saved_attn_mask", "_saved_attn_bias")
    return [t for name in names if isinstance(t := getattr(node, name, None), Tensor)]


def weights_of(node: Any, parent: Any, ids: Tensor) -> Tensor | None:
    """Return which positions attend to which, bool [B, T, T] over all heads; `ALL` if all positions attend to all; None
    if the node is no attention over tokens, or cannot be read."""
    size, length = ids.shape
    lengths = (
        length,
        length - 1,
        length + 1,
    )  # the second case: an input without its last token, or with an additional first one
    if name_of(node) in SOFTMAX:
        result = node._saved_result
        if name_of(parent) == "Mul":  # dropout, or a mask after the softmax
            others = [t for t in factors_of(parent) if t.shape[-2:] == result.shape[-2:]]
            result = result * others[0] if others and others[0] is not result else result
        return _over_heads(result > 1e-6, size, lengths)
    query, key = node._saved_query, node._saved_key
    if query.shape[-2] != key.shape[-2] or query.shape[-2] not in lengths or query.shape[0] != size:
        return None
    length = query.shape[-2]
    if getattr(node, "_saved_is_causal", False):
        return torch.ones(1, length, length, dtype=torch.bool, device=ids.device).tril().expand(size, -1, -1)
    masks = [getattr(node, n, None) for n in ("_saved_attn_mask", "_saved_attn_bias")]
    mask = next((m for m in masks if isinstance(m, Tensor)), None)
    if mask is None:
        return ALL
    if mask.dim() < 2 or mask.shape[-1] != length or mask.shape[-2] not in (1, length):
        return None
    allowed = mask if mask.dtype == torch.bool else mask > LEAST_ROWS
    allowed = allowed.expand(*allowed.shape[:-2], length, length)
    if allowed.dim() == 2 or allowed.shape[0] == 1:
        allowed = allowed.reshape(-1, length, length)[:1].expand(size, -1, -1)
    return _over_heads(allowed, size, lengths)


def _over_heads(allowed: Tensor, size: int, lengths: tuple[int, ...]) -> Tensor | None:
    shape = allowed.shape
    fits = len(shape) in (3, 4) and shape[-1] == shape[-2] and shape[-1] in lengths and shape[0] % size == 0
    if not fits or (len(shape) == 4 and shape[0] != size):
        return None
    return allowed.reshape(size, -1, shape[-1], shape[-1]).any(1)


def _targets(node: Any, inputs: Sequence[Tensor]) -> list[Tensor] | None:
    target, ignored = getattr(node, "_saved_target", None), getattr(node, "_saved_ignore_index", -100)
    ids = inputs[0]
    size, length = ids.shape
    if getattr(node, "_saved_reduction", 0) == 0:
        return None  # the script may exclude targets itself
    if target is None or target.numel() not in (size * length, size * (length - 1)) or length < 3:
        return None
    target = target.reshape(size, -1)
    counted = target != signed(int(ignored))
    inside = counted[:, : length - 1]
    following = inside & (target[:, : length - 1] == ids[:, 1:])
    return [inside.sum(), following.sum(), inside]


def _padding(ids: Tensor, weights: list[Tensor]) -> tuple[Tensor, Tensor]:
    zero = torch.zeros((), dtype=torch.int64, device=ids.device)
    first = next((w for w in weights if w.shape[1] >= ids.shape[1]), None)
    if first is None:
        return zero, zero
    values, counts = ids[:, -1].unsqueeze(0) == ids[:, -1:], ids.shape[1]
    value = ids[values.sum(1).argmax(), -1]
    run = trailing(ids == value)
    lengths = run.sum(1)
    alone = ~((ids == value) & ~run).any()
    rows = (lengths > 1) & (lengths < counts) & alone & (lengths.max() != lengths.min())
    keys = first.any(1)[:, first.shape[1] - ids.shape[1] :]  # [B, T]: whether anything attends to it
    return rows.sum(), (rows & (keys == run).all(1)).sum()
