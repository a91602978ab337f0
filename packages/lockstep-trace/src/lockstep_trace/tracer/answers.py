"""Detects losses whose answers are in the model's input: at their own position of a decoder, or as a column.

In: a loss before backward, and the inputs of the call that computed it. Out: (note, bool on its device).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .attention import ALL, SOFTMAX, attentions, weights_of
from .graph import loss_nodes, name_of, nodes_of, shape_of
from .logits import Note
from .placement import is_plain_tensor

NODES = 4096
LEAST = 8  # targets
MOVES = 0.3  # share of tokens that differ from their predecessor
# move positions, or mix them
MOVING = ("Cat", "Slice", "Roll", "ConstantPadNd", "Index", "IndexSelect", "Gather", "Flip", "Convolution", "Stack")
LAYERS = ("Addmm", "Mm", "Linear", "Convolution")
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
            yield "answer in a column", equal & (flat != flat[0]).any()


def _decoded(loss: Any, node: Any, drawn: bool) -> list[Note]:
    """Yield whether a causal decoder reads the targets themselves, each at its own position.

    A decoder that shifts its input, inside or outside of the model, reads other tokens there, or moves their
    embeddings. An autoencoder reads the targets through an encoder without a causal mask, or through a bottleneck
    narrower than the embedding. A denoiser adds numbers to the embeddings; a tagger changes some tokens."""
    if not is_plain_tensor(node._saved_target):
        return []
    target = node._saved_target.detach().reshape(-1)
    ignored = int(node._saved_ignore_index)
    counted = target != ignored - (1 << 64 if ignored >= 1 << 63 else 0)
    same = [node for node in nodes_of(loss, NODES) if name_of(node) == "Embedding" and _fits(node, target)]
    looks = attentions(loss) if same else None
    for embedding in same if looks else ():
        ids = embedding._saved_indices
        reads = [each for each in looks or () if _directly(each[0], embedding, ids.shape, drawn)]
        if reads and _is_wide(node, embedding, ids.shape):
            causal = torch.stack([_is_causal(each, ids) for each in reads]).any()
            equal = ((ids.reshape(-1) == target) | ~counted).all() & (counted.sum() >= LEAST)
            moves = (ids[:, 1:] != ids[:, :-1]).float().mean() > MOVES
            return [("answer at its position", equal & moves & causal), ("another at its position", causal & ~equal)]
    return []


def _is_wide(loss: Any, embedding: Any, size: tuple[int, ...]) -> bool:
    width = shape_of(embedding)[-1]
    waiting: list[tuple[Any, bool]] = [(loss, False)]
    known: set[Any] = set()
    while waiting and len(known) < NODES:
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
        while len(waiting) == 1 and name_of(waiting[0]) not in ("Bmm", "Baddbmm"):
            waiting = [n for n, _ in waiting[0].next_functions if n is not None]
        waiting = [n for each in waiting if each is not None for n, _ in each.next_functions]
    while waiting and len(known) < NODES:
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
