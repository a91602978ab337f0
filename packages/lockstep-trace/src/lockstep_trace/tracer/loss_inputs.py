"""Examines what the first losses are given: shapes that spread over all pairs, values outside of a loss's domain,
weights of other classes, and a start token that comes twice.

In: a loss before backward, the calls since the last one; arguments of torch's loss functions. Out: notes as in
`evidence.py`. `rules/observed.py` explains each kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .evidence import _alone
from .graph import KINDS, LAYERS, NODES, VIEWS, loss_nodes, name_of, nodes_of, shape_of
from .logits import ALONE, TOGETHER, _only, _signed, is_number
from .placement import is_plain_tensor

Note = tuple[tuple[str, str], Tensor | None]
MANY = 30  # targets of a class, on average, whose frequencies are compared
# element-wise operations of a loss by hand, besides `ALONE` and `TOGETHER`
ELEMENTS = {*ALONE, *TOGETHER, *KINDS, "Where", "Expand", "Rsub", "Xlogy", "Log1P", "Reciprocal", "Rsqrt", "Lgamma"}
PARTS = ("Split", "Slice", "Gather", "Chunk")  # leave the last axis of one number there
BOUNDED = ("Sigmoid", "Relu", "LogSigmoid", "Softplus")


def notes_on_inputs(loss: Any, rows: int, inputs: list[Tensor], counts: dict[int, Tensor]) -> Iterator[Note]:
    """Yield notes. `rows`, `inputs`: of the last call; `counts`: targets of each class in earlier losses, by number of
    classes."""
    yield from _all_pairs(loss, rows, inputs)
    for node in loss_nodes(loss):
        under = _below_views(node)
        if name_of(node).startswith("NllLoss") and is_plain_tensor(node._saved_target):
            yield from _classes(node, rows, counts)
            if under is not None:
                below = _below_views(under) if name_of(under) in ("LogSoftmax", "Log") else under
                if below is not None and name_of(below) in BOUNDED:
                    yield ("bounded", name_of(below).lower()), None
    for node in nodes_of(loss, 4 * NODES):
        name = name_of(node)
        if name == "CtcLoss" and _alone(loss, node):
            under = _below_views(node)
            if under is not None and name_of(under) in (*LAYERS, "Softmax"):
                sums = node._saved_log_probs.detach().float().logsumexp(-1)
                yield ("ctc", ""), (sums > 0.01).float().mean() > 0.5
        if name == "Embedding" and is_plain_tensor(node._saved_indices):
            yield from _ids(node)


def _below_views(node: Any) -> Any:
    node = _only(node)
    while node is not None and name_of(node) in VIEWS:
        node = _only(node)
    return node


# -- pairs -------------------------------------------------------------------------------------------------------------


def _all_pairs(loss: Any, n: int, inputs: list[Tensor]) -> Iterator[Note]:
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
        before = [b for b, _ in node.next_functions if b is not None]
        if shape == [] and name in ELEMENTS:
            waiting += before
        elif shape == [n, n]:
            saved = [t for s in ("_saved_self", "_saved_other") if isinstance(t := getattr(node, s, None), Tensor)]
            constant = len(before) < 2 and name in ("Mul", "Div") and not is_number(node)
            if name not in ELEMENTS or (constant and any(t.dim() > 1 and t.shape[-1] == n for t in saved)):
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
        before = [b for b, _ in node.next_functions if b is not None]
        if name_of(node) in LAYERS or (name_of(node) in PARTS and len(shape_of(before[0])) == 2):
            continue
        if name_of(node) not in ELEMENTS or len(known) > 32 or not before:
            return False
        waiting += before
    return True


# -- classes and tokens ------------------------------------------------------------------------------------------------


def _classes(node: Any, rows: int, counts: dict[int, Tensor]) -> Iterator[Note]:
    target, weight = node._saved_target.detach(), node._saved_weight
    shape = shape_of(_only(node))
    size = shape[1] if len(shape) > 1 else 0
    if target.dim() != 1 or not 1 < size <= 4096 or len(target) != rows:
        return
    if not isinstance(weight, Tensor) or size < 3:
        return
    place = target.where((target >= 0) & (target < size), size)
    now = torch.zeros(size + 1, dtype=torch.int64, device=target.device).scatter_add_(0, place, torch.ones_like(place))
    counts[size] = total = now[:size] + counts.get(size, 0)
    ordered = weight.detach().sort().values * total.sort(descending=True).values
    own = weight.detach() * total
    inverse = (ordered.max() <= 2 * ordered.min()) & (own.max() >= 4 * own.min()) & (total.sum() >= MANY * size)
    yield ("weights of others", ""), inverse & (total > 0).all()


def _ids(node: Any) -> Iterator[Note]:
    ids = node._saved_indices.detach()
    if ids.dim() == 2 and len(ids) >= 4 and ids.shape[1] > 4 and ids.shape[0] != ids.shape[1]:
        same = ids == ids[0, 0]
        end = same.flip(1).long().cumprod(1).flip(1).bool()  # an end token, or padding
        twice = same[:, :2].all() & ~(same & ~end)[:, 2:].any() & ~same[:, 2].any()
        yield (
            ("start twice", ""),
            twice & (ids[0, 0] != _signed(int(node._saved_padding_idx))) & ids[:, 2].ne(ids[0, 2]).any(),
        )


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
