"""What a loss is made of, read from the graph that autograd keeps: which loss function, of which shape, on how many
targets, and what stands before it.

In: the tensor that `backward` is called on. Out: a `LossFunction` for each one of torch in its graph. Nothing is
computed but a hash of the targets, on their device.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .inputs import hash_of

NODES = 256  # of a graph that are looked at, from the loss on
ATTENTION_NODES = 4096
MOST = 8  # loss functions of one backward
VIEWS = ("View", "Reshape", "Unsqueeze", "Squeeze", "Transpose", "Permute", "Alias", "Slice", "ToCopy", "Clone", "T")
KINDS = {
    "NllLoss": "cross entropy",
    "NllLoss2D": "cross entropy",
    "MseLoss": "squared error",
    "L1Loss": "absolute error",
    "SmoothL1Loss": "smooth absolute error",
    "HuberLoss": "Huber loss",
    "BinaryCrossEntropy": "binary cross entropy",
    "BinaryCrossEntropyWithLogits": "binary cross entropy of logits",
}


@dataclass(frozen=True)
class LossFunction:
    """`about`: what is known on the host. `targets`: int64 [3]: the number of targets that count, a hash of them in
    their order, and one without; None: the graph keeps no targets."""

    about: dict[str, Any]
    targets: Tensor | None


def objectives(loss: Any) -> list[LossFunction]:
    """Of a tensor with a graph, nearest to the loss first."""
    rows: list[LossFunction] = []
    queue: deque[Any] = deque([getattr(loss, "grad_fn", None)])
    known: set[Any] = set()
    count = 0
    while queue and count < NODES and len(rows) < MOST:
        node = queue.popleft()
        if node is None or node in known:
            continue
        known.add(node)
        count += 1
        if name_of(node) in KINDS:
            rows.append(_objective(node))
        else:
            queue.extend(before for before, _ in node.next_functions)
    return rows


def name_of(node: Any) -> str:
    """Such as `NllLoss`, without what torch appends."""
    name = str(node.name()).rpartition("::")[2]
    return name.partition("Backward")[0]


def _objective(node: Any) -> LossFunction:
    name, target = name_of(node), getattr(node, "_saved_target", None)
    reduction, ignored = getattr(node, "_saved_reduction", -1), getattr(node, "_saved_ignore_index", None)
    before = [n for n, _ in node.next_functions if n is not None]
    chain: list[str] = []
    expanded = None
    while before and len(chain) < 6:
        step = name_of(before[0])
        if step == "Expand" and not chain:
            node = before[0]
            expanded = [list(getattr(node, "_saved_self_sym_sizes", [])), _shape(node)]
        if step not in VIEWS and step != "Expand":
            chain.append(step)
        before = [n for n, _ in before[0].next_functions if n is not None]
    about = {
        "kind": KINDS[name],
        "of": name,
        "before": chain[:3],
        "expanded": expanded,
        "reduction": int(reduction),
        "shape": list(target.shape) if isinstance(target, Tensor) else None,
    }
    if not isinstance(target, Tensor) or not target.numel():
        return LossFunction(about, None)
    counted = target.numel()
    numbers = [torch.full((), counted, dtype=torch.int64, device=target.device), *hash_of(target)]
    if ignored is not None and not target.is_floating_point():
        numbers[0] = (target != int(ignored)).sum()
    return LossFunction(about, torch.stack([n.reshape(()) for n in numbers]))


def _shape(node: Any) -> list[int]:
    metadata = getattr(node, "_input_metadata", None)
    return list(metadata[0].shape) if metadata else []


def unmasked_attention(loss: Any) -> bool | None:
    """Whether each query sees all tokens before it: the first fused attention in a loss's graph is causal and has no
    mask. None: the graph has no fused attention."""
    queue: deque[Any] = deque([getattr(loss, "grad_fn", None)])
    known: set[Any] = set()
    while queue and len(known) < ATTENTION_NODES:
        node = queue.popleft()
        if node is None or node in known:
            continue
        known.add(node)
        if name_of(node).startswith("ScaledDotProduct"):
            masks = [getattr(node, n, None) for n in ("_saved_attn_mask", "_saved_attn_bias")]
            return bool(getattr(node, "_saved_is_causal", False)) and all(mask is None for mask in masks)
        queue.extend(before for before, _ in node.next_functions)
    return None
