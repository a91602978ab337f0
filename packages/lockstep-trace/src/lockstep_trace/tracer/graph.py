"""Reads the loss functions from the autograd graph of a loss: kind, shape, number of targets, preceding operations.

In: the tensor passed to `backward`. Out: a `LossFunction` for each torch loss in its graph. Computes only a hash of the
targets, on their device.
"""

from __future__ import annotations

import functools
import math
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from .fingerprint import signed
from .inputs import hash_of, hash_of_each

NODES = 256  # nodes of a graph to visit, starting at the loss
ATTENTION_NODES = 4096
ROWS = 4096  # max. classes of a loss that are hashed one by one
MOST = 8  # loss functions per backward
LOOKED_AT = 64  # losses of one form
WEIGHTS = 1024  # a weight of 1 in `LossFunction.targets`
WITHOUT: Counter[tuple[str, ...]] = Counter()  # losses without one of `KINDS`, by the names of their last operations
RATIO_LOOKS = 1, 96  # losses to look at: without a ratio that the loss clips (PPO), and with one
VIEWS = ("View", "Reshape", "Unsqueeze", "Squeeze", "Transpose", "Permute", "Alias", "Slice", "ToCopy", "Clone", "T")
LAYERS = ("Addmm", "Mm", "Linear", "Convolution")  # their outputs are not log-probabilities
KINDS = {
    "NllLoss": "cross entropy",
    "NllLoss2D": "cross entropy",
    "MseLoss": "squared error",
    "SmoothL1Loss": "smooth absolute error",
    "HuberLoss": "Huber loss",
    "BinaryCrossEntropy": "binary cross entropy",
    "BinaryCrossEntropyWithLogits": "binary cross entropy of logits",
}


@dataclass(frozen=True)
class LossFunction:
    """A loss function in a graph. `about`: facts known on the host. `targets`: int64 [7]: number of targets that are
    not ignored, an order-dependent and an order-independent hash of them, whether they are class numbers that are all
    equal, whether they are 0, 1, ... where classes are gathered over ranks, the sum of their class weights, and a hash
    of the weights of all classes; None if the graph does not hold targets. `classes`: int64 [B], a hash of each if they
    are one class for each example."""

    about: dict[str, Any]
    targets: Tensor | None
    classes: Tensor | None = None


def objectives(loss: Any) -> list[LossFunction]:
    """Return the loss functions in a tensor's graph, nearest to the loss first."""
    nodes = loss_nodes(loss)
    rows = [loss_function(node) for node in nodes]
    node = nodes[0] if len(nodes) == 1 else None
    if getattr(node, "_saved_weight", None) is not None:
        mean, numbers = divisors(loss)
        rows[0].about["by"] = numbers if mean else None
    return rows


def walk(nodes: Sequence[Any], goes_on: Callable[[str], bool] = lambda _: True, most: int = 64) -> Iterator[Any]:
    """Yield nodes and those that they are computed from, breadth first, each once and at most `most`. `goes_on`: takes
    a node's name, whether to visit what it is computed from."""
    queue, known = deque(nodes), set[Any]()
    while queue and len(known) < most:
        node = queue.popleft()
        if node is not None and node not in known:
            known.add(node)
            yield node
            queue.extend(inputs_of(node) if goes_on(name_of(node)) else ())


def nodes_of(loss: Any, most: int) -> Iterator[Any]:
    """Yield the nodes of a loss's graph as `walk` does."""
    return walk([getattr(loss, "grad_fn", None)], most=most)


def loss_nodes(loss: Any) -> list[Any]:
    """Return the graph nodes of `objectives`."""
    top = getattr(loss, "grad_fn", None)
    kind = tuple(name_of(node) for node in walk([top], most=8))
    if WITHOUT[kind] == LOOKED_AT:  # losses that begin alike have none
        return []
    nodes = walk([top], lambda name: name not in KINDS, NODES)
    ends = [node for node in nodes if name_of(node) in KINDS][:MOST]
    WITHOUT[kind] += 0 if ends else 1
    return ends


def inputs_of(node: Any) -> list[Any]:
    """Return the nodes that a node is computed from; constants have none."""
    return [n for n, _ in node.next_functions if n is not None]


def only(node: Any) -> Any:
    """Return the one node that a node is computed from, or None."""
    before = inputs_of(node)
    return before[0] if len(before) == 1 else None


class _Nothing:
    """Stands for no node."""

    next_functions: tuple[Any, ...] = ()

    def name(self) -> str:
        return ""


NOTHING = _Nothing()


def factors_of(node: Any) -> list[Tensor]:
    """Return the tensors that a product, sum or quotient keeps for its gradient."""
    return [t for name in ("_saved_self", "_saved_other") if isinstance(t := getattr(node, name, None), Tensor)]


def name_of(node: Any) -> str:
    """Return the name of a node without torch's suffix, such as `NllLoss`."""
    return _short(str(node.name()))


@functools.lru_cache(maxsize=4096)
def _short(name: str) -> str:
    return name.rpartition("::")[2].partition("Backward")[0]


def loss_function(node: Any) -> LossFunction:
    """Return the facts about a loss function's node."""
    name, target = name_of(node), getattr(node, "_saved_target", None)
    reduction, ignored = getattr(node, "_saved_reduction", -1), getattr(node, "_saved_ignore_index", None)
    before = inputs_of(node)
    chain: list[str] = []
    expanded, normalized, viewed = None, None, False
    while before and len(chain) < 6:
        step = name_of(before[0])
        if step == "Expand" and not chain:
            node = before[0]
            expanded = [list(getattr(node, "_saved_self_sym_sizes", [])), shape_of(node)]
        if step not in VIEWS and step != "Expand":
            chain.append(step)
            if normalized is None and step in ("LogSoftmax", "Softmax"):
                normalized = _normalized(before[0], viewed)
        elif step != "Expand":
            viewed = True
        before = inputs_of(before[0])
    about = {
        "kind": KINDS[name],
        "of": name,
        "before": chain[:3],
        "expanded": expanded,
        "normalized": normalized,
        "reduction": int(reduction),
        "shape": list(target.shape) if isinstance(target, Tensor) else None,
    }
    if not isinstance(target, Tensor) or not target.numel():
        return LossFunction(about, None)
    counted = target.numel()
    numbers = [torch.full((), counted, dtype=torch.int64, device=target.device), *hash_of(target)]
    if ignored is not None and not target.is_floating_point():
        numbers[0] = (target != signed(int(ignored))).sum()  # torch 2.4: -100 without its sign
    numbers.append((target == target.flatten()[0]).all())
    ranks = torch.distributed.is_available() and torch.distributed.is_initialized()
    about["gathered"] = _gathered(node) if name == "NllLoss" and ranks else None
    diagonal = torch.zeros_like(numbers[0])
    if about["gathered"] is not None and target.dim() == 1:
        diagonal = (target == torch.arange(counted, device=target.device)).all()
    numbers.append(diagonal)
    weighs = reduction == 1 and getattr(node, "_saved_weight", None) is not None and name == "NllLoss"
    none = torch.zeros_like(numbers[0])
    numbers += [node._saved_total_weight * WEIGHTS, hash_of(node._saved_weight)[0]] if weighs else [none, none]
    one_each = counted == len(target) <= ROWS if target.dim() else False
    named = name.startswith(("NllLoss", "BinaryCrossEntropy"))
    values = target * 4096 if target.is_floating_point() else target  # soft labels
    classes = hash_of_each(values.reshape(counted)) if one_each and named else None
    return LossFunction(about, torch.stack([n.reshape(()).long() for n in numbers]), classes)


def _gathered(loss: Any) -> list[int] | None:
    queue: deque[tuple[Any, int]] = deque((n, 0) for n, _ in loss.next_functions)
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    rows: list[int] | None = None
    while queue:
        node, depth = queue.popleft()
        if node is None or depth > 12:
            continue
        name = name_of(node)
        if name in ("Mm", "Addmm") and rows is None:
            rows = shape_of(node)
        if "AllGather" in name or name == "Cat":
            count = (shape_of(node) or [0])[0]
            place = rank if name != "Cat" else _own_place(node, world, rank)
            if rows is None or place is None or count not in rows or count % world:
                return None
            other = rows[0] if count == rows[-1] else rows[-1]
            return [other, count, place]
        if name in (*VIEWS, *PRODUCTS) or name.startswith("LogSoftmax"):
            queue.extend((n, depth + 1) for n, _ in node.next_functions)
    return None


PRODUCTS = ("Mm", "Addmm", "Mul", "Div", "Exp", "Clamp", "Neg")


def _own_place(cat: Any, world: int, rank: int) -> int | None:
    parts = cat.next_functions
    if len(parts) != world or world < 2:
        return None
    with_gradient = [i for i, (node, _) in enumerate(parts) if node is not None]
    if len(with_gradient) == 1:  # parts of the others are constants
        return with_gradient[0]
    nodes = {node for node, _ in parts}
    if len(nodes) == 1 and None not in nodes and [i for _, i in parts] == list(range(world)):
        return rank
    return None


def _normalized(node: Any, viewed: bool) -> list[Any]:
    shape = shape_of(node)
    dim = getattr(node, "_saved_dim", None)
    if viewed or dim is None or not shape:
        return []
    return [signed(int(dim)) % len(shape), shape]


def handmade(loss: Any) -> list[tuple[str, str]]:
    """Return notes on hand-written losses in a graph.

    `spread squares`, N: the square of a difference [N, N] of an output [N, 1] and a constant, averaged or summed
    without weights; `kl of probabilities`: the form of kl_div, a constant minus its product with the output of a
    softmax."""
    queue: deque[Any] = deque([(getattr(loss, "grad_fn", None), ())])
    notes: list[tuple[str, str]] = []
    for _ in range(NODES):
        node, above = queue.popleft() if queue else (None, ())
        if node is None:
            continue
        name, before = name_of(node), [n for n, _ in node.next_functions]
        if name == "Sub" and len(before) == 2 and (before[0] is None) != (before[1] is None):
            under = before[0] or before[1]
            notes += _spread(node, under, above)
            factors = [n for n, _ in under.next_functions] if before[0] is None and name_of(under) == "Mul" else []
            softmax = [n for n in factors if n is not None and name_of(n) == "Softmax"]
            if len(factors) == 2 and None in factors and softmax:
                notes.append(("kl of probabilities", ""))
        if name in SIMPLE:
            queue.extend((n, (*above, (name, shape_of(node), getattr(node, "_saved_exponent", None)))) for n in before)
    return list(dict.fromkeys(notes))


SIMPLE = ("Mean", "Sum", "Div", "Mul", "Add", "Sub", "Pow", "Abs", "Neg")


def _spread(node: Any, under: Any, above: tuple[Any, ...]) -> list[tuple[str, str]]:
    shape = shape_of(node)
    n = shape[0] if len(shape) == 2 and shape[0] == shape[1] else 0
    if n < 2 or not above or shape_of(under) != [n, 1]:
        return []
    kind, _, exponent = above[-1]
    plain = len(above) > 1 and above[-2][0] in ("Mean", "Sum") and not above[-2][1]
    proved = kind == "Pow" and exponent == 2 and plain and all(not size for _, size, _ in above[:-2])
    return [("spread squares", str(n))] if proved else []


def factor_of(node: Any) -> float:
    """Return the number by which a product or quotient multiplies, or NaN."""
    number = getattr(node, "_saved_other", None)
    if isinstance(number, Tensor):
        with _disable_current_modes():  # which would be given the number instead of its tensor
            number = number.item() if number.numel() == 1 and number.device.type == "cpu" else None
    by = float(number) if isinstance(number, int | float) and number else math.nan
    return by if name_of(node) == "Mul" else 1 / by


def summands(loss: Any, rows: int) -> Iterator[tuple[float, bool, Any]]:
    """Yield the summands of a loss: factor, whether it is divided by the number of rows or more, node."""
    waiting: list[tuple[float, bool, Any]] = [(1.0, False, getattr(loss, "grad_fn", None))]
    for _ in range(NODES):
        factor, divided, node = waiting.pop() if waiting else (0.0, False, None)
        if node is None:
            continue
        name, before = name_of(node), inputs_of(node)
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


def is_mean(node: Any) -> bool:
    """Return whether a node computes a mean: a loss function's, or a hand-written one."""
    before = inputs_of(node)
    if name_of(node) == "Add" and len(before) == 2 and all(name_of(n) == "Mul" for n in before):  # smoothed labels
        other = before[1].next_functions[0][0]
        node = before[0]
        share = getattr(node, "_saved_other", None)
        node = node.next_functions[0][0]
        if not isinstance(share, float) or not 0 < share < 1 or other is None or name_of(other) not in ("Div", "Mean"):
            return False
        return node is not None and name_of(node).startswith("NllLoss") and getattr(node, "_saved_reduction", 0) == 1
    return name_of(node) == "Mean" or (name_of(node) in KINDS and getattr(node, "_saved_reduction", None) == 1)


def divisors(loss: Any) -> tuple[bool, list[float]]:
    """Return whether a loss is a mean, and its divisors other than 1, the last one first; integers if it is divided by
    integers."""
    node, numbers = getattr(loss, "grad_fn", None), list[float]()
    while node is not None and name_of(node) in ("Div", "Mul") and len(node.next_functions) < 3:
        before = inputs_of(node)
        number = getattr(node, "_saved_other", None)
        if isinstance(number, Tensor) and number.dim() == 0 and number.device.type == "cpu":
            number = number.item()
        if len(before) != 1 or not isinstance(number, float | int) or not number:
            break
        numbers.append(number if name_of(node) == "Div" else 1 / float(number))
        node = before[0]
    return node is not None and is_mean(node), [n for n in numbers if n != 1]


def shape_of(node: Any) -> list[int]:
    """Return the shape of a node's result."""
    metadata = getattr(node, "_input_metadata", None)
    return list(metadata[0].shape) if metadata else []


def unmasked_attention(loss: Any) -> bool | None:
    """Return whether the first fused attention in a loss's graph is causal without a mask, so that each query attends
    to all earlier tokens; None if the graph has no fused attention."""
    for node in nodes_of(loss, ATTENTION_NODES):
        if name_of(node).startswith("ScaledDotProduct"):
            masks = [getattr(node, n, None) for n in ("_saved_attn_mask", "_saved_attn_bias")]
            return bool(getattr(node, "_saved_is_causal", False)) and all(mask is None for mask in masks)
    return None


def ratios_all_one(loss: Any) -> Tensor | None:
    """Return whether all clipped ratios in the graph of a loss are 1, int64 [1]; None if it has none."""
    for node in nodes_of(loss, NODES):
        before = [n for n, _ in node.next_functions]
        if name_of(node) == "Clamp" and before and before[0] is not None:
            one = _ratio_is_one(before[0])
            if one is not None:
                return one.reshape(1).long()
    return None


def _ratio_is_one(node: Any) -> Tensor | None:
    inner = next(iter(inputs_of(node)), None)
    if name_of(node) == "Exp" and inner is not None and name_of(inner) == "Sub":
        ratio = node._saved_result.detach()
        return (ratio == 1).all()
    if name_of(node) == "Div" and isinstance(getattr(node, "_saved_other", None), Tensor):
        one, other = node._saved_self, node._saved_other
        if isinstance(one, Tensor) and one.shape == other.shape and one.dim():
            return (one.detach() == other.detach()).all()
    return None
