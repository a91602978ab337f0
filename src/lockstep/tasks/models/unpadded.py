"""Run a model without padding: the real tokens of a micro-batch are concatenated before the first block of a stack, and
separated after the last.

In: a transformers model with the attention implementation `NAME`. Out: the same model; its blocks see hidden states [1,
N, H] of the N real tokens, its heads and poolers see [B, T, H] as before, zeros at padding.

No state is kept between calls. transformers calls `masked` for each mask that a model creates and passes the returned
`RowMap` to every block; hooks around the blocks, and `attention`, take it from their arguments. Only `attention` pads
again (on a CPU), or receives the ends of the examples (on CUDA).

Letters: B examples, T padded length, N real tokens, H width, h heads, d head size, S padded length of a source.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_unary
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

from lockstep.data import host_facts
from lockstep.data.host_facts import RealTokens
from lockstep.distributed.torch_internals import may_attend_by_cudnn, to_device
from lockstep.tasks.models import masks, repeatable
from lockstep.tasks.models.model_configs import UNPADDED

NAME = UNPADDED
# Maximum padded length for written-out attention on a CPU: measured, benchmarks/log.md.
SHORT = {torch.float32: 64, torch.bfloat16: 128}


class Cannot(Exception):
    """A model family cannot run without padding; the text says why."""


class RowMap:
    """Positions of the real tokens in a padded batch; passed to blocks in place of the attention mask."""

    def __init__(self, real: Tensor, mask: Tensor | None, causal: bool, both_ways: bool) -> None:
        """`real`: bool [B, T]. `mask`: the mask for transformers' own attention, bool [B, 1, T or other, T].

        `causal`, `both_ways`: a real token sees the real tokens up to itself, or all of its text; otherwise only `mask`
        says what it sees. Synchronizes with CUDA only if there are no `RealTokens` facts of `real`."""
        self.rows, self.width = real.shape
        tokens = host_facts.facts(real, RealTokens)
        if tokens is None:
            tokens = RealTokens.of(real.cpu())
        self.shortest, self.longest = min(tokens.lengths), max(tokens.lengths)
        self.index = to_device(tokens.index, real.device)  # [N], into B x T
        self.ends = to_device(tokens.ends, real.device)  # [B + 1], into N
        self.padded_mask = mask
        full = self.shortest == self.width
        self.stays_padded = full and real.is_cuda  # removing padding gains nothing
        self.causal = causal and tokens.on_the_right  # then no real token sees padding
        self.plain = self.causal or both_ways  # full or causal attention within each text
        self.mask = None if self.causal or (both_ways and full) else mask  # beside `causal`
        self.complete = self.mask is not None or self.causal or (both_ways and full)  # else attention is unknown
        visible = real[:, None, None] if both_ways and not full else self.mask  # the same, small
        short = real.device.type == "cpu" and self.width <= max(SHORT.values())
        self.bias = self._biased(visible) if short else None
        self._laid: dict[int, tuple[Tensor, Tensor]] = {}  # arguments shared by all blocks, such as rotary positions
        self._places: dict[tuple[int, bool], Tensor] = {}

    def fits(self, hidden: Tensor) -> bool:
        """Whether hidden states belong to these examples, padded or unpadded."""
        return hidden.shape[:2] in ((self.rows, self.width), (1, len(self.index)))

    def lay(self, value: Any) -> Any:
        """Remove padding: [B, T, ...] or [1, T, ...] -> [1, N, ...], [T] -> [N]; other values unchanged."""
        if isinstance(value, tuple | list):
            return type(value)(self.lay(each) for each in value)
        if not isinstance(value, Tensor):
            return value
        if value.ndim > 1 and value.shape[:2] == (self.rows, self.width):
            if value.requires_grad:
                return _Collect.apply(value.flatten(0, 1), self.index)[None]
            return self._once(value, lambda: value.flatten(0, 1).index_select(0, self.index)[None])
        if value.ndim > 1 and value.shape[:2] == (1, self.width) and not value.requires_grad:
            return self._once(value, lambda: value[0].index_select(0, self.index % self.width)[None])
        if value.shape == (self.width,):
            return value.index_select(0, self.index % self.width)
        return value

    def _once(self, value: Tensor, laid: Callable[[], Tensor]) -> Tensor:
        if id(value) not in self._laid:  # stored with its source, so that the source's id is not reused
            self._laid[id(value)] = value, laid()
        return self._laid[id(value)][1]

    def take_apart(self, value: Any) -> Any:
        """Restore padding: [1, N, ...] -> [B, T, ...], zeros at padding; other values unchanged."""
        if isinstance(value, tuple | list):
            return type(value)(self.take_apart(each) for each in value)
        if not isinstance(value, Tensor) or value.shape[:2] != (1, len(self.index)):
            return value
        return _Spread.apply(value[0], self.index, (self.rows, self.width, *value.shape[2:]))

    def spread(self, value: Tensor) -> Tensor:
        """[1, h, N, d] -> [B, h, T, d], contiguous, zeros at padding."""
        _, heads, count, width = value.shape
        by_head = value.is_contiguous()
        rows = (value if by_head else value.transpose(1, 2)).reshape(heads * count, width)
        # reshaped afterwards: torch.compile cannot order writes into a view
        padded = _Spread.apply(rows, self._place(heads, by_head), (self.rows * heads * self.width, width))
        return padded.view(self.rows, heads, self.width, width)

    def collect(self, value: Tensor) -> Tensor:
        """[B, h, T, d] -> [1, N, h, d]."""
        _, heads, _, width = value.shape
        return _Collect.apply(value.reshape(-1, width), self._place(heads, False)).view(1, -1, heads, width)

    def _place(self, heads: int, by_head: bool) -> Tensor:
        """Index of each (token, head), or (head, token), in B x h x T; computed once for all layers."""
        if (heads, by_head) in self._places and not torch.compiler.is_compiling():
            return self._places[heads, by_head]
        row, column = self.index // self.width, self.index % self.width
        head = torch.arange(heads, device=row.device) * self.width
        place = (row * heads * self.width + column)[:, None] + head  # [N, h]
        place = (place.T if by_head else place).flatten()
        if not torch.compiler.is_compiling():  # all layers have the same code, the first one among them
            self._places[heads, by_head] = place
        return place

    def _biased(self, visible: Tensor | None) -> Tensor | None:
        """Additive attention bias: float32 [B or 1, 1, T or 1, T]; finite, so that padding rows stay finite."""
        if self.causal:
            visible = torch.ones(1, 1, self.width, self.width, dtype=torch.bool, device=self.index.device).tril()
        if visible is None:
            return None
        least = torch.finfo(torch.float32).min
        return torch.zeros(visible.shape, device=visible.device).masked_fill_(~visible, least)


class Across:
    """Mask argument of cross-attention: the block's own layout and the source's."""

    def __init__(self, own: RowMap, source: RowMap) -> None:
        self.own, self.source = own, source


class _Spread(torch.autograd.Function):
    """Scatter rows into zeros of a given shape. The result is not a view, because FSDP hooks block outputs; the
    gradient is a copy, where that of `index_put` accumulates."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, index: Tensor, shape: tuple[int, ...]) -> Tensor:
        ctx.save_for_backward(index)
        ctx.row = value.shape[1:]
        padded = value.new_zeros(shape)
        _put(padded if padded.dim() == value.dim() else padded.view(-1, *ctx.row), index, value)
        return padded

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (index,) = ctx.saved_tensors
        return gradient.reshape(-1, *ctx.row).index_select(0, index), None, None


class _Collect(torch.autograd.Function):
    """Inverse of `_Spread`: gather rows."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.size = len(value)
        return value.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        return _put(gradient.new_zeros(ctx.size, *gradient.shape[1:]), index, gradient), None


def _put(padded: Tensor, index: Tensor, rows: Tensor) -> Tensor:
    """Write rows to distinct indices. Disables torch's deterministic mode on CUDA for this call: it would sort the
    indices first (ten kernels instead of one) in case two are equal."""
    if not padded.is_cuda or torch.compiler.is_compiling() or not torch.are_deterministic_algorithms_enabled():
        return padded.index_copy_(0, index, rows)
    mode = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode(0)
    try:
        return padded.index_copy_(0, index, rows)
    finally:
        torch.set_deterministic_debug_mode(mode)


# -- what transformers calls -----------------------------------------------------------------------------------------


def masked(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **more: Any,
) -> RowMap | Tensor | None:
    """Create a model's mask: a `RowMap` if there are several complete examples."""
    if masks.inside():  # the host must not read values
        # padding is on the right, where causal attention does not see it
        hidden = None if mask_function is causal_mask_function or attention_mask is None else attention_mask.bool()
        if hidden is not None and mask_function is bidirectional_mask_function:
            return hidden[:, None, None, :]
        return masks.sdpa_mask(
            batch_size, q_length, kv_length, q_offset, mask_function=mask_function, attention_mask=hidden, **more
        )
    sizes = batch_size, q_length, kv_length, q_offset
    options = more | {"mask_function": mask_function, "attention_mask": attention_mask, "device": device}
    mask = masks.sdpa_mask(*sizes, **options)
    if batch_size == 1 or (attention_mask is not None and attention_mask.shape != (batch_size, kv_length)):
        return mask
    real = attention_mask
    if real is None:
        real = torch.ones(batch_size, kv_length, dtype=torch.bool, device=device)
        if real.is_cuda:
            host_facts.attach(real, RealTokens.everywhere(batch_size, kv_length, device))
    causal, both_ways = mask_function is causal_mask_function, mask_function is bidirectional_mask_function
    if mask is None and not (causal or both_ways):  # such as a window wider than the texts
        # transformers omits the mask if attention is causal or unrestricted
        causal = masks.sdpa_mask(*sizes, **options | {"allow_is_bidirectional_skip": False}) is None
        both_ways = not causal
    layout = RowMap(masks.as_bool(real), mask, causal, both_ways)
    return layout if layout.shortest and layout.complete else mask  # an example without tokens has no position


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: RowMap | Across | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Attention of unpadded examples: query, key and value [1, h, N, d] -> [1, N, h, d]. Padded inputs use
    transformers' attention."""
    if has_torch_function_unary(query):  # a layer whose products are split into leaves
        named = {"dropout": dropout, "scaling": scaling, **more}
        return handle_torch_function(attention, (query,), module, query, key, value, attention_mask, **named)
    if isinstance(attention_mask, RowMap) and query.shape[0] != 1:  # outside of a stack
        attention_mask = attention_mask.padded_mask
    if masks.inside() and _is_plain(more) and not isinstance(attention_mask, RowMap | Across):
        causal = more.get("is_causal")
        causal = query.shape[2] > 1 and (getattr(module, "is_causal", True) if causal is None else causal)
        if attention_mask is None and repeatable.fits(query, value, dropout):
            return repeatable.attention(query, key, value, bool(causal), dropout, scaling), None
        if repeatable.is_short(query, key, attention_mask):
            visible, causal = attention_mask, attention_mask is None and bool(causal)
            return repeatable.written_out(query, key, value, visible, causal, dropout, scaling), None
    if not isinstance(attention_mask, RowMap | Across):
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **more)
    if more.get("position_bias") is not None:
        raise Cannot("its attention adds a position bias that is built for a single text")
    if more.get("softcap") is not None:
        raise Cannot("its attention caps scores")
    if isinstance(attention_mask, Across):
        to, of = attention_mask.own, attention_mask.source
    else:
        to = of = attention_mask
    causal = of.causal and to is of
    half = query.dtype in (torch.bfloat16, torch.float16)
    if query.is_cuda and of.plain and not dropout and half and not may_attend_by_cudnn(query.device):
        return _by_length(query, key, value, to, of, scaling), None
    query, key, value = to.spread(query), of.spread(key), of.spread(value)  # [B, h, T, d]
    if query.device.type == "cpu" and max(to.width, of.width) <= SHORT.get(query.dtype, 0):
        return to.collect(_written_out(query, key, value, of.bias, dropout, scaling)), None
    more["is_causal"] = causal
    attended, _ = sdpa_attention_forward(module, query, key, value, of.mask, dropout, scaling, **more)  # [B, T, h, d]
    return to.collect(attended.transpose(1, 2)), None


def _is_plain(more: dict[str, Any]) -> bool:
    """Whether these arguments of an attention leave its scores unchanged."""
    return more.get("position_bias") is None and more.get("softcap") is None


def _written_out(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, dropout: float, scaling: float | None
) -> Tensor:
    """softmax(query key^T) value in float32, as torch's CPU implementation with dropout but with fewer copies; faster
    than its flash kernel for short texts, several times in bf16. [B, h, T, d] each."""
    rows, heads, length, width = query.shape
    shared = key.shape[1]  # key-value heads, each shared by several query heads
    scale = width**-0.5 if scaling is None else scaling
    with torch.autocast("cpu", enabled=False):
        of_query = query.float().view(rows * shared, -1, width) * scale
        of_key, of_value = (each.float().flatten(0, 1) for each in (key, value))  # [B x shared, S, d]
        scores = torch.bmm(of_query, of_key.transpose(1, 2)).view(rows, heads, length, -1)  # [B, h, T, S]
        chances = torch.softmax(scores if bias is None else scores.add_(bias), -1)
        chances = torch.dropout(chances, dropout, train=True).view(rows * shared, -1, of_key.shape[1])
        return torch.bmm(chances, of_value).view(rows, heads, length, -1).to(value.dtype)


def _by_length(query: Tensor, key: Tensor, value: Tensor, to: RowMap, of: RowMap, scaling: float | None) -> Tensor:
    """torch's variable-length attention, without padding: on CUDA, in half precision, without dropout."""
    from torch.nn.attention.varlen import varlen_attn

    times = query.shape[1] // key.shape[1]  # query heads per key head: repeated, as torch 2.11 requires
    key, value = (each.repeat_interleave(times, 1) if times > 1 else each for each in (key, value))
    query, key, value = (each[0].transpose(0, 1).contiguous() for each in (query, key, value))  # [N, h, d]
    attended = varlen_attn(
        query,
        key,
        value,
        to.ends,
        of.ends,
        to.longest,
        of.longest,
        scale=scaling,
        window_size=(-1, 0) if of.causal and to is of else (-1, -1),
    )
    assert isinstance(attended, Tensor)  # a tuple only if more outputs are requested
    return attended[None]


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, masked)


# -- around the blocks -----------------------------------------------------------------------------------------------


def install(model: nn.Module) -> None:
    """Add hooks around the blocks of a model. They do nothing unless a block receives a `RowMap` with padding."""
    for stack in stacks(model):
        for block in stack:
            block.register_forward_pre_hook(lay, with_kwargs=True)
        stack[-1].register_forward_hook(take_apart, with_kwargs=True)


def stacks(model: nn.Module) -> Iterator[nn.ModuleList]:
    """Yield the outermost module lists of one module type."""
    inner: set[int] = set()
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and id(module) not in inner and len({type(item) for item in module}) == 1:
            inner |= {id(below) for item in module for below in item.modules()}
            yield module


def lay(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Pre-hook of a block: remove padding from its inputs, unless the previous block has done so."""
    if masks.inside():  # no padding
        return args, kwargs
    names = [*_names(type(block).forward)[: len(args)], *kwargs]
    values = [*args, *kwargs.values()]
    own = next((v for n, v in zip(names, values, strict=True) if isinstance(v, RowMap) and not _of_source(n)), None)
    source = next((v for n, v in zip(names, values, strict=True) if isinstance(v, RowMap) and _of_source(n)), None)
    if own is None or not own.fits(next(v for v in values if isinstance(v, Tensor))) or _cached(names, values):
        end_to_end = False
    else:
        end_to_end = not (own.stays_padded and (source is None or source.stays_padded))
    if not end_to_end:
        arguments = [value.padded_mask if isinstance(value, RowMap) else value for value in values]
    else:
        assert own is not None
        arguments = [_laid(name, value, own, source) for name, value in zip(names, values, strict=True)]
    return tuple(arguments[: len(args)]), dict(zip(kwargs, arguments[len(args) :], strict=True))


def _laid(name: str, value: Any, own: RowMap, source: RowMap | None) -> Any:
    if not _of_source(name):
        return own.lay(value)
    if source is None:
        return value
    return Across(own, source) if value is source else source.lay(value)


def take_apart(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """Hook after the last block of a stack: restore padding."""
    if masks.inside():
        return output
    names = [*_names(type(block).forward)[: len(args)], *kwargs]
    for name, value in zip(names, [*args, *kwargs.values()], strict=True):
        if isinstance(value, RowMap) and not _of_source(name):
            return value.take_apart(output)
    return output


@cache
def _names(forward: Callable[..., Any]) -> tuple[str, ...]:
    """Parameter names of a function, without `self`."""
    return tuple(inspect.signature(forward).parameters)[1:]


def _of_source(name: str) -> bool:
    """Whether an argument of a decoder block concerns the encoder's output."""
    return name.startswith("encoder")


def _cached(names: Sequence[str], values: Sequence[Any]) -> bool:
    """Whether a KV cache is in use (generation)."""
    caches = ("past_key_values", "past_key_value", "cache")  # the last from transformers 5.24 on
    return any(name in caches and v is not None for name, v in zip(names, values, strict=True))
