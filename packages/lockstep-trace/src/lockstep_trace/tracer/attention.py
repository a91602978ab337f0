"""Detects attention that sees later tokens, or only padding, from the graph of a language model's first losses.

In: the loss before backward, the token ids that the model received. Out: counts on their device, `SEEN`. Skipped while
hooks on saved tensors are in use: reading a saved tensor would recompute a checkpointed forward pass.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .graph import loss_nodes, name_of
from .placement import is_plain_tensor

NODES = 8192  # nodes of a graph to visit
MOST = 256  # attentions
LEAST = -30.0  # added to scores of visible positions; masks with large negative numbers are below
MOST_SEEN = 0.8  # share of targets
LARGEST = 1 << 24  # most elements of weights or masks to look at
SOFTMAX = ("Softmax", "SafeSoftmax")
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
        if len(known) >= NODES or len(rows) >= MOST:
            return None
        node, parent = queue.popleft()
        if node is None or node in known:
            continue
        known.add(node)
        if name_of(node).startswith("ScaledDotProduct") or name_of(node) in SOFTMAX:
            rows.append((node, parent))
        queue.extend((n, node) for n, _ in node.next_functions)
    return None if any(t.numel() > LARGEST for node, _ in rows for t in _saved(node)) else rows


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
            other = [getattr(parent, n, None) for n in ("_saved_self", "_saved_other")]
            others = [t for t in other if isinstance(t, Tensor) and t.shape[-2:] == result.shape[-2:]]
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
    allowed = mask if mask.dtype == torch.bool else mask > LEAST
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
    ignored = int(ignored) - (1 << 64 if int(ignored) >= 1 << 63 else 0)
    counted = target != ignored
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
    run = (ids == value).flip(1).long().cumprod(1).flip(1).bool()
    lengths = run.sum(1)
    alone = ~((ids == value) & ~run).any()
    rows = (lengths > 1) & (lengths < counts) & alone & (lengths.max() != lengths.min())
    keys = first.any(1)[:, first.shape[1] - ids.shape[1] :]  # [B, T]: whether anything attends to it
    return rows.sum(), (rows & (keys == run).all(1)).sum()
