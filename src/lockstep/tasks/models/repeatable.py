"""Deterministic attention and embedding on CUDA for a micro-batch that is compiled whole (`model.compile: whole`).

In: a model whose forward is traced within `masks.region()`. Out: the same function; its attention and its embeddings
are custom operations, so the compiler keeps them as they are. Two operations would not be deterministic otherwise:
torch's flash attention adds the gradient of the queries in the order in which blocks finish, and the compiler turns an
embedding's gradient into atomic additions. Here each of their calls sets torch's deterministic switch for its own
duration, so that the rest of the region, which is deterministic anyway, does not pay for it.

Letters: B examples, T tokens, h heads, d head size, V rows of an embedding, H its width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.tasks.models import masks


@contextmanager
def _deterministic(tensor: Tensor, always: bool = False) -> Iterator[None]:
    """A context with torch's deterministic switch set; on CUDA only, unless `always`."""
    if not (tensor.is_cuda or always) or torch.are_deterministic_algorithms_enabled():
        yield
        return
    mode = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("error")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)


# -- attention --------------------------------------------------------------------------------------------------------


def _by_token(tensor: Tensor) -> Tensor:
    """Return [B, h, T, d] with [B, T, h, d] in memory, the layout of torch's kernels on CUDA."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def _empty_by_token(like: Tensor) -> Tensor:
    rows, heads, length, size = like.shape
    return like.new_empty(rows, length, heads, size).transpose(1, 2)


@torch.library.custom_op("lockstep::attention", mutates_args=())
def _attention(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, dropout: float, scale: float | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Flash attention [B, h, T, d] -> (result, logsumexp, two tensors of the state of its dropout)."""
    if query.is_cuda:
        result = torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, dropout, causal, False, scale=scale
        )
        return _by_token(result[0]), result[1], result[6].clone(), result[7].clone()
    out, total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, dropout, causal, scale=scale
    )
    return _by_token(out), total, query.new_zeros(0, dtype=torch.int64), query.new_zeros(0, dtype=torch.int64)


@_attention.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, dropout: float, scale: float | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if query.is_cuda:
        result = torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, dropout, causal, False, scale=scale
        )
        return _empty_by_token(query), result[1], torch.empty_like(result[6]), torch.empty_like(result[7])
    _, total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, dropout, causal, scale=scale
    )
    return _empty_by_token(query), total, query.new_empty(0, dtype=torch.int64), query.new_empty(0, dtype=torch.int64)


@torch.library.custom_op("lockstep::attention_backward", mutates_args=())
def _attention_backward(
    slope: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    total: Tensor,
    seed: Tensor,
    offset: Tensor,
    causal: bool,
    dropout: float,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value."""
    if not query.is_cuda:
        of_query, of_key, of_value = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            slope, query, key, value, out, total, dropout, causal, scale=scale
        )
    else:
        sizes = None, None, query.shape[2], key.shape[2]
        with _deterministic(query):
            of_query, of_key, of_value = torch.ops.aten._scaled_dot_product_flash_attention_backward(
                slope, query, key, value, out, total, *sizes, dropout, causal, seed, offset, scale=scale
            )
    return _by_token(of_query), _by_token(of_key), _by_token(of_value)


@_attention_backward.register_fake
def _(slope: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_by_token(query), _empty_by_token(key), _empty_by_token(value)


def _remember_attention(ctx: Any, inputs: Any, output: Any) -> None:
    query, key, value, ctx.causal, ctx.dropout, ctx.scale = inputs
    ctx.save_for_backward(query, key, value, *output)
    ctx.mark_non_differentiable(*output[1:])


def _attention_gradients(ctx: Any, slope: Tensor, *others: Any) -> Any:
    saved = ctx.saved_tensors
    slope = slope.to(saved[0].dtype)
    gradients = _attention_backward(slope, *saved, ctx.causal, ctx.dropout, ctx.scale)
    return (*gradients, None, None, None)


_attention.register_autograd(_attention_gradients, setup_context=_remember_attention)


def attention(query: Tensor, key: Tensor, value: Tensor, causal: bool, dropout: float, scale: float | None) -> Tensor:
    """Attention without a mask: query [B, h, T, d], key and value [B, fewer heads, S, d] -> [B, T, h, d]."""
    times = query.shape[1] // key.shape[1]  # query heads per key head
    if times > 1:
        key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
    return _attention(query, key, value, causal, dropout, scale)[0].transpose(1, 2)


def fits(query: Tensor, value: Tensor, dropout: float) -> bool:
    """Whether flash attention computes these tensors: head sizes up to 256, multiples of 8; 16 bits on CUDA, no
    dropout on a CPU."""
    size = query.shape[-1]
    supported = query.dtype in (torch.bfloat16, torch.float16) if query.is_cuda else not dropout
    return supported and size % 8 == 0 and size <= 256 and value.shape[-1] == size


SHORT = 512  # tokens; scores of longer texts need too much memory


def is_short(query: Tensor, key: Tensor, mask: Tensor | None) -> bool:
    """Whether `written_out` computes these tensors: texts with padding and, on CUDA, others that `fits` excludes."""
    return (query.is_cuda or mask is not None) and query.shape[2] <= SHORT and key.shape[2] <= SHORT


def written_out(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, causal: bool, dropout: float, scale: float | None
) -> Tensor:
    """Attention by matrix products, which the compiler fuses with the softmax: query [B, h, T, d], key and value
    [B, fewer heads, S, d], `visible` bool [B or 1, 1, T or 1, S] -> [B, T, h, d]."""
    times = query.shape[1] // key.shape[1]  # query heads per key head
    if times > 1:
        key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = torch.matmul(query * scale, key.transpose(2, 3)).float()  # [B, h, T, S]
    if causal:
        visible = torch.ones(scores.shape[2:], dtype=torch.bool, device=scores.device).tril()
    if visible is not None:
        scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
    chances = F.dropout(torch.softmax(scores, -1), dropout)
    return torch.matmul(chances.to(value.dtype), value).transpose(1, 2).contiguous()


# -- sums by index ----------------------------------------------------------------------------------------------------


@torch.library.custom_op("lockstep::index_put_sum", mutates_args=())
def _index_put_sum(into: Tensor, indices: Sequence[Tensor | None], values: Tensor) -> Tensor:
    """Compute `index_put` with accumulation, which sorts the indices. It is the gradient of reading rows by index, such
    as the last token of each text."""
    with _deterministic(into, always=True):
        return torch.ops.aten.index_put.default(into, indices, values, True)


@_index_put_sum.register_fake
def _(into: Tensor, indices: Sequence[Tensor | None], values: Tensor) -> Tensor:
    return torch.empty_like(into)


def replace_sums(graph: torch.fx.Graph) -> None:
    """Replace accumulating `index_put`, of which the compiler would make atomic additions, in a graph of aten
    operations."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.index_put.default):
        into, indices, values, *accumulate = node.args
        if accumulate == [True]:
            node.target, node.args = torch.ops.lockstep.index_put_sum.default, (into, indices, values)


# -- embeddings -------------------------------------------------------------------------------------------------------


@torch.library.custom_op("lockstep::embedding", mutates_args=())
def _embedding(weight: Tensor, ids: Tensor, padding: int) -> Tensor:
    """Rows of `weight` [V, H] -> [..., H]; `padding`: the row without a gradient, -1 for none."""
    return F.embedding(ids, weight)


@_embedding.register_fake
def _(weight: Tensor, ids: Tensor, padding: int) -> Tensor:
    return weight.new_empty(*ids.shape, weight.shape[1])


@torch.library.custom_op("lockstep::embedding_backward", mutates_args=())
def _embedding_backward(slope: Tensor, ids: Tensor, rows: int, padding: int) -> Tensor:
    """Gradient of the weight: [V, H]."""
    with _deterministic(slope):
        return torch.ops.aten.embedding_dense_backward(slope.contiguous(), ids, rows, padding, False)


@_embedding_backward.register_fake
def _(slope: Tensor, ids: Tensor, rows: int, padding: int) -> Tensor:
    return slope.new_empty(rows, slope.shape[-1])


def _remember_embedding(ctx: Any, inputs: Any, output: Any) -> None:
    weight, ids, ctx.padding = inputs
    ctx.rows = len(weight)
    ctx.save_for_backward(ids)


def _embedding_gradient(ctx: Any, slope: Tensor) -> Any:
    return _embedding_backward(slope, *ctx.saved_tensors, ctx.rows, ctx.padding), None, None


_embedding.register_autograd(_embedding_gradient, setup_context=_remember_embedding)


def install(model: nn.Module) -> None:
    """Make the embeddings of a model use the operation of this module within `region`. Those with options of their own
    (`max_norm`, `scale_grad_by_freq`, `sparse`) and other classes stay as they are."""
    for module in model.modules():
        plain = type(module) is nn.Embedding and "forward" not in vars(module)
        if plain and module.max_norm is None and not module.scale_grad_by_freq and not module.sparse:
            module.forward = MethodType(_forward, module)


def _forward(module: nn.Embedding, input: Tensor) -> Tensor:
    if not masks.inside():
        return F.embedding(input, module.weight, module.padding_idx)
    padding = -1 if module.padding_idx is None else module.padding_idx
    return _embedding(module.weight, input, padding)
