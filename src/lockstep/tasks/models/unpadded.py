"""No padding is computed: the real tokens of a micro-batch are laid end to end before the first block of a stack, and
taken apart after the last.

In: a model of transformers whose attention is `NAME`. Out: the same model, whose blocks see hidden states [1, N, H] of
the N real tokens, and whose heads and poolers see [B, T, H] as before, zeros where there is padding.

Nothing is remembered between calls. transformers asks `masked` for each mask that a model makes, and hands what it
returns, a `RowMap`, to every block; hooks around the blocks find it among their arguments, and so does `attention`.
Only `attention` pads again (on a CPU), or is told where examples end (on CUDA).

Letters: B examples, T padded length, N real tokens, H width, h heads, d their width, S padded length of a source.
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
from lockstep.distributed.torch_internals import to_device
from lockstep.tasks.models import masks
from lockstep.tasks.models.model_configs import UNPADDED

NAME = UNPADDED
# Tokens of a padded text up to which attention on a CPU is written out: measured, benchmarks/log.md.
SHORT = {torch.float32: 64, torch.bfloat16: 128}


class Cannot(Exception):
    """Why a family's padding has to be computed."""


class RowMap:
    """Where the real tokens of a padded batch are: what a block is given for its attention mask."""

    def __init__(self, real: Tensor, mask: Tensor | None, causal: bool, both_ways: bool) -> None:
        """`real`: bool [B, T]. `mask`: what transformers' own attention would be given, bool [B, 1, T or other, T].
        `causal`, `both_ways`: a real token sees the real tokens up to itself, or all of its text; where neither holds,
        `mask` alone says what it sees. On CUDA the host waits only where it has no `RealTokens` of `real`."""
        self.rows, self.width = real.shape
        tokens = host_facts.facts(real, RealTokens)
        if tokens is None:
            tokens = RealTokens.of(real.cpu())
        self.shortest, self.longest = min(tokens.lengths), max(tokens.lengths)
        self.index = to_device(tokens.index, real.device)  # [N], into B x T
        self.ends = to_device(tokens.ends, real.device)  # [B + 1], into N
        self.padded_mask = mask
        full = self.shortest == self.width
        self.stays_padded = full and real.is_cuda  # nothing is gained by laying it end to end
        self.causal = causal and tokens.on_the_right  # then no real token sees padding
        self.plain = self.causal or both_ways  # each text sees all of itself, or all that is before
        self.mask = None if self.causal or (both_ways and full) else mask  # beside `causal`
        self.complete = self.mask is not None or self.causal or (both_ways and full)  # else nothing says who sees whom
        visible = real[:, None, None] if both_ways and not full else self.mask  # the same, small
        short = real.device.type == "cpu" and self.width <= max(SHORT.values())
        self.bias = self._biased(visible) if short else None
        self._laid: dict[int, tuple[Tensor, Tensor]] = {}  # what all blocks are given alike, such as rotary positions
        self._places: dict[tuple[int, bool], Tensor] = {}

    def fits(self, hidden: Tensor) -> bool:
        """Whether hidden states are of these examples, end to end or not."""
        return hidden.shape[:2] in ((self.rows, self.width), (1, len(self.index)))

    def lay(self, value: Any) -> Any:
        """What is [B, T, ...] or [1, T, ...] as [1, N, ...]; what is [T] as [N]; anything else as it is."""
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
        """What is [1, N, ...] as [B, T, ...], zeros where there is padding; anything else as it is."""
        if isinstance(value, tuple | list):
            return type(value)(self.take_apart(each) for each in value)
        if not isinstance(value, Tensor) or value.shape[:2] != (1, len(self.index)):
            return value
        return _Spread.apply(value[0], self.index, (self.rows, self.width, *value.shape[2:]))

    def spread(self, value: Tensor) -> Tensor:
        """[1, h, N, d] -> [B, h, T, d], contiguous, zeros where there is padding."""
        _, heads, count, width = value.shape
        by_head = value.is_contiguous()
        rows = (value if by_head else value.transpose(1, 2)).reshape(heads * count, width)
        # not at once in this shape: torch.compile cannot order what writes into a view
        padded = _Spread.apply(rows, self._place(heads, by_head), (self.rows * heads * self.width, width))
        return padded.view(self.rows, heads, self.width, width)

    def collect(self, value: Tensor) -> Tensor:
        """[B, h, T, d] -> [1, N, h, d]."""
        _, heads, _, width = value.shape
        return _Collect.apply(value.reshape(-1, width), self._place(heads, False)).view(1, -1, heads, width)

    def _place(self, heads: int, by_head: bool) -> Tensor:
        """Of each token and head, or of each head and token, into B x h x T: made once, for all layers."""
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
        """What is added to scores: float32 [B or 1, 1, T or 1, T]; finite, so that a row of padding is a number."""
        if self.causal:
            visible = torch.ones(1, 1, self.width, self.width, dtype=torch.bool, device=self.index.device).tril()
        if visible is None:
            return None
        least = torch.finfo(torch.float32).min
        return torch.zeros(visible.shape, device=visible.device).masked_fill_(~visible, least)


class Across:
    """What a block is given for the mask of its attention to a source: its own layout, and that of the source."""

    def __init__(self, own: RowMap, source: RowMap) -> None:
        self.own, self.source = own, source


class _Spread(torch.autograd.Function):
    """Rows to their places among zeros, in a tensor of some shape, which is no view: FSDP puts hooks on what a block
    gives. Its gradient is a copy, where that of `index_put` adds up."""

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
    """The way back."""

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
    """Rows to places that all differ. Where torch shall be deterministic it sorts places first on CUDA, ten kernels for
    one, lest two of them be the same."""
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
    """A model's mask, as a `RowMap` where there are several examples, all of them there as a whole."""
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
    if mask is None and not (causal or both_ways):  # such as a window that is wider than the texts
        # transformers left the mask out for one of two reasons: it asks its attention for causality, or for nothing
        causal = masks.sdpa_mask(*sizes, **options | {"allow_is_bidirectional_skip": False}) is None
        both_ways = not causal
    layout = RowMap(masks.as_bool(real), mask, causal, both_ways)
    return layout if layout.shortest and layout.complete else mask  # an example of no tokens has no place of its own


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
    """Attention of examples laid end to end: query, key and value [1, h, N, d] -> [1, N, h, d]. Of others as
    transformers has it."""
    if has_torch_function_unary(query):  # of a layer whose products are cut into leaves
        named = {"dropout": dropout, "scaling": scaling, **more}
        return handle_torch_function(attention, (query,), module, query, key, value, attention_mask, **named)
    if isinstance(attention_mask, RowMap) and query.shape[0] != 1:  # outside of a stack
        attention_mask = attention_mask.padded_mask
    if not isinstance(attention_mask, RowMap | Across):
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **more)
    if more.get("position_bias") is not None:
        raise Cannot("its attention adds a bias by position, which is made for one text")
    if more.get("softcap") is not None:
        raise Cannot("its attention caps scores")
    if isinstance(attention_mask, Across):
        to, of = attention_mask.own, attention_mask.source
    else:
        to = of = attention_mask
    causal = of.causal and to is of
    if query.is_cuda and of.plain and not dropout and query.dtype in (torch.bfloat16, torch.float16):
        return _by_length(query, key, value, to, of, scaling), None
    query, key, value = to.spread(query), of.spread(key), of.spread(value)  # [B, h, T, d]
    if query.device.type == "cpu" and max(to.width, of.width) <= SHORT.get(query.dtype, 0):
        return to.collect(_written_out(query, key, value, of.bias, dropout, scaling)), None
    more["is_causal"] = causal
    attended, _ = sdpa_attention_forward(module, query, key, value, of.mask, dropout, scaling, **more)  # [B, T, h, d]
    return to.collect(attended.transpose(1, 2)), None


def _written_out(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, dropout: float, scaling: float | None
) -> Tensor:
    """softmax(query key^T) value in float32, as torch has it on a CPU where there is dropout, without its detours;
    for short texts quicker than its flash kernel, in bf16 several times. [B, h, T, d] each."""
    rows, heads, length, width = query.shape
    shared = key.shape[1]  # heads of keys and values, each for several of queries
    scale = width**-0.5 if scaling is None else scaling
    with torch.autocast("cpu", enabled=False):
        of_query = query.float().view(rows * shared, -1, width) * scale
        of_key, of_value = (each.float().flatten(0, 1) for each in (key, value))  # [B x shared, S, d]
        scores = torch.bmm(of_query, of_key.transpose(1, 2)).view(rows, heads, length, -1)  # [B, h, T, S]
        chances = torch.softmax(scores if bias is None else scores.add_(bias), -1)
        chances = torch.dropout(chances, dropout, train=True).view(rows * shared, -1, of_key.shape[1])
        return torch.bmm(chances, of_value).view(rows, heads, length, -1).to(value.dtype)


def _by_length(query: Tensor, key: Tensor, value: Tensor, to: RowMap, of: RowMap, scaling: float | None) -> Tensor:
    """torch's attention of texts of any length, which pads nothing: on CUDA, in half precision, without dropout."""
    from torch.nn.attention.varlen import varlen_attn

    times = query.shape[1] // key.shape[1]  # heads of queries a head of keys: repeated, as torch 2.11 has no other way
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
    assert isinstance(attended, Tensor)  # a tuple where more is asked for
    return attended[None]


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, masked)


# -- around the blocks -----------------------------------------------------------------------------------------------


def install(model: nn.Module) -> None:
    """Put hooks around the blocks of a model. They do nothing where no block is given a `RowMap` with padding."""
    for stack in stacks(model):
        for block in stack:
            block.register_forward_pre_hook(lay, with_kwargs=True)
        stack[-1].register_forward_hook(take_apart, with_kwargs=True)


def stacks(model: nn.Module) -> Iterator[nn.ModuleList]:
    """The outermost lists of modules of one kind."""
    inner: set[int] = set()
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and id(module) not in inner and len({type(item) for item in module}) == 1:
            inner |= {id(below) for item in module for below in item.modules()}
            yield module


def lay(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Before a block: lay end to end what it is given, unless the block before has done so."""
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
    """After the last block of a stack."""
    names = [*_names(type(block).forward)[: len(args)], *kwargs]
    for name, value in zip(names, [*args, *kwargs.values()], strict=True):
        if isinstance(value, RowMap) and not _of_source(name):
            return value.take_apart(output)
    return output


@cache
def _names(forward: Callable[..., Any]) -> tuple[str, ...]:
    """The names of a function's arguments, without `self`."""
    return tuple(inspect.signature(forward).parameters)[1:]


def _of_source(name: str) -> bool:
    """Whether an argument of a decoder's block is about what the encoder gave."""
    return name.startswith("encoder")


def _cached(names: Sequence[str], values: Sequence[Any]) -> bool:
    """Whether a text is being written, token by token."""
    return any(
        name in ("past_key_values", "past_key_value") and v is not None for name, v in zip(names, values, strict=True)
    )
