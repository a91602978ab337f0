"""No padding is computed: the real tokens of a micro-batch are laid end to end before the first block of a stack, and
taken apart after the last.

In: a model of transformers whose attention is `NAME`. Out: the same model, whose blocks see hidden states [1, N, H] of
the N real tokens, and whose heads and poolers see [B, T, H] as before, zeros where there is padding.

Nothing is remembered between calls. transformers asks `masked` for each mask that a model makes, and hands what it
returns, a `Layout`, to every block; hooks around the blocks find it among their arguments, and so does `attention`.
Only `attention` pads again (on a CPU), or is told where examples end (on CUDA).

Letters: B examples, T padded length, N real tokens, H width, h heads, d their width, S padded length of a source.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask

NAME = "lockstep_unpadded"  # `attn_implementation`


class Cannot(Exception):
    """Why a family's padding has to be computed."""


class Layout:
    """Where the real tokens of a padded batch are: what a block is given for its attention mask."""

    def __init__(self, real: Tensor, mask: Tensor | None, kind: Callable[..., Any] | None) -> None:
        """`real`: bool [B, T]. `mask`: what transformers' own attention would be given, bool [B, 1, T or other, T].
        `kind`: the function that says which of the real tokens see each other."""
        self.mask = mask
        self.rows, self.width = real.shape
        lengths = real.sum(1)
        self.shortest, self.longest = int(lengths.min()), int(lengths.max())  # on CUDA the host waits here
        self.padded = 0 < self.shortest < self.width
        if self.padded:
            self.index = real.flatten().nonzero().flatten()  # [N], into B x T
            self.columns = self.index % self.width  # [N]
            self.ends = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)  # [B + 1], into N
        on_the_right = bool((real[:, :-1] >= real[:, 1:]).all())
        self.causal = kind is causal_mask_function and on_the_right  # then no real token sees padding: no mask
        self.plain = self.causal or kind is bidirectional_mask_function
        self._laid: dict[int, tuple[Tensor, Tensor]] = {}  # what all blocks are given alike, such as rotary positions

    def lay(self, value: Any) -> Any:
        """What is [B, T, ...] or [1, T, ...] as [1, N, ...]; what is [T] as [N]; anything else as it is."""
        if isinstance(value, tuple | list):
            return type(value)(self.lay(each) for each in value)
        if not isinstance(value, Tensor):
            return value
        if value.ndim > 1 and value.shape[:2] == (self.rows, self.width):
            place, source = self.index, value.flatten(0, 1)
        elif value.ndim > 1 and value.shape[:2] == (1, self.width):
            place, source = self.columns, value[0]
        elif value.shape == (self.width,):
            return value.index_select(0, self.columns)
        else:
            return value
        if value.requires_grad:
            return _Collect.apply(source, place, len(source))[None] if place is self.index else source[place][None]
        if id(value) not in self._laid:  # kept with what it was made of, whose id is nobody else's meanwhile
            self._laid[id(value)] = value, source.index_select(0, place)[None]
        return self._laid[id(value)][1]

    def take_apart(self, value: Any) -> Any:
        """What is [1, N, ...] as [B, T, ...], zeros where there is padding; anything else as it is."""
        if isinstance(value, tuple | list):
            return type(value)(self.take_apart(each) for each in value)
        if not isinstance(value, Tensor) or value.shape[:2] != (1, len(self.index)):
            return value
        return self.spread(value[0])

    def spread(self, value: Tensor) -> Tensor:
        """[N, ...] -> [B, T, ...]."""
        return _Spread.apply(value, self.index, self.rows * self.width).unflatten(0, (self.rows, self.width))

    def collect(self, value: Tensor) -> Tensor:
        """[B, T, ...] -> [N, ...]."""
        return _Collect.apply(value.flatten(0, 1), self.index, self.rows * self.width)


class Across:
    """What a block is given for the mask of its attention to a source: its own layout, and that of the source."""

    def __init__(self, own: Layout, source: Layout) -> None:
        self.own, self.source, self.mask = own, source, source.mask


class _Spread(torch.autograd.Function):
    """Rows to their places among zeros; its gradient is a copy, where that of `index_put` adds up."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, index: Tensor, size: int) -> Tensor:
        ctx.save_for_backward(index)
        return value.new_zeros(size, *value.shape[1:]).index_copy_(0, index, value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (index,) = ctx.saved_tensors
        return gradient.index_select(0, index), None, None


class _Collect(torch.autograd.Function):
    """The way back."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, index: Tensor, size: int) -> Tensor:
        ctx.save_for_backward(index)
        ctx.size = size
        return value.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (index,) = ctx.saved_tensors
        return gradient.new_zeros(ctx.size, *gradient.shape[1:]).index_copy_(0, index, gradient), None, None


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
) -> Layout | Tensor | None:
    """A model's mask, as a `Layout` where there are several examples, all of them there as a whole."""
    mask = sdpa_mask(
        batch_size,
        q_length,
        kv_length,
        q_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        device=device,
        **more,
    )
    if batch_size == 1 or (attention_mask is not None and attention_mask.shape != (batch_size, kv_length)):
        return mask
    real = torch.ones(batch_size, kv_length, dtype=torch.bool, device=device)
    return Layout(real if attention_mask is None else attention_mask.bool(), mask, mask_function)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Layout | Across | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Attention of examples laid end to end: query, key and value [1, h, N, d] -> [1, N, h, d]. Of others as
    transformers has it."""
    if isinstance(attention_mask, Layout | Across) and query.shape[0] != 1:
        attention_mask = attention_mask.mask
    if not isinstance(attention_mask, Layout | Across):
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **more)
    if more.get("position_bias") is not None:
        raise Cannot("its attention adds a bias by position, which is made for one text")
    layout = attention_mask
    to, of = (layout, layout) if isinstance(layout, Layout) else (layout.own, layout.source)
    query, key, value = (each.transpose(1, 2)[0] for each in (query, key, value))  # [N, h, d]
    if query.is_cuda and of.plain and not dropout and query.dtype in (torch.bfloat16, torch.float16):
        return _by_length(query, key, value, to, of, scaling)[None], None
    query = to.spread(query).transpose(1, 2)  # [B, h, T, d]
    key, value = (of.spread(each).transpose(1, 2) if of.padded else _cut(each, of) for each in (key, value))
    causal = of.causal and to is of
    mask = None if causal else layout.mask
    more["is_causal"] = causal
    found, _ = sdpa_attention_forward(module, query, key, value, mask, dropout, scaling, **more)  # [B, T, h, d]
    return to.collect(found)[None], None


def _cut(value: Tensor, of: Layout) -> Tensor:
    """Of sources that are all alike: [B x S, h, d] -> [B, h, S, d]."""
    return value.unflatten(0, (of.rows, of.width)).transpose(1, 2)


def _by_length(query: Tensor, key: Tensor, value: Tensor, to: Layout, of: Layout, scaling: float | None) -> Tensor:
    """torch's attention of examples of any length, which pads nothing; on CUDA, in half precision, without dropout."""
    from torch.nn.attention.varlen import varlen_attn

    window = (-1, 0) if of.causal else (-1, -1)
    grouped = query.shape[1] != key.shape[1]
    query, key, value = (each.contiguous() for each in (query, key, value))
    ends = to.ends, of.ends
    longest = to.longest, of.longest
    return varlen_attn(
        query, key, value, *ends, *longest, scale=scaling, window_size=window, enable_gqa=grouped
    )  # [N, h, d]


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, masked)


# -- around the blocks -----------------------------------------------------------------------------------------------


def install(model: nn.Module) -> None:
    """Put hooks around the blocks of a model. They do nothing where no block is given a `Layout` with padding."""
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
    names = [*_names(type(block))[: len(args)], *kwargs]
    given = [*args, *kwargs.values()]
    own = next((v for n, v in zip(names, given, strict=True) if isinstance(v, Layout) and not _of_source(n)), None)
    source = next((v for n, v in zip(names, given, strict=True) if isinstance(v, Layout) and _of_source(n)), None)
    if own is None or not own.padded or _cached(kwargs):
        found = [value.mask if isinstance(value, Layout) else value for value in given]
    else:
        found = [_laid(name, value, own, source) for name, value in zip(names, given, strict=True)]
    return tuple(found[: len(args)]), dict(zip(kwargs, found[len(args) :], strict=True))


def _laid(name: str, value: Any, own: Layout, source: Layout | None) -> Any:
    if not _of_source(name):
        return own.lay(value)
    if source is None:
        return value
    if value is source:
        return Across(own, source)
    return source.lay(value) if source.padded else _flat(value, source)


def _flat(value: Any, source: Layout) -> Any:
    """Sources that are all alike, [B, S, ...], as [1, B x S, ...]."""
    whole = isinstance(value, Tensor) and value.ndim > 1 and value.shape[:2] == (source.rows, source.width)
    return value.flatten(0, 1)[None] if whole else value


def take_apart(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """After the last block of a stack."""
    names = [*_names(type(block))[: len(args)], *kwargs]
    for name, value in zip(names, [*args, *kwargs.values()], strict=True):
        if isinstance(value, Layout) and not _of_source(name) and value.padded:
            return value.take_apart(output)
    return output


@cache
def _names(kind: type[nn.Module]) -> tuple[str, ...]:
    """Of the arguments of its forward."""
    return tuple(inspect.signature(kind.forward).parameters)[1:]


def _of_source(name: str) -> bool:
    """Whether an argument of a decoder's block is about what the encoder gave."""
    return name.startswith("encoder")


def _cached(kwargs: dict[str, Any]) -> bool:
    """Whether a text is being written, token by token."""
    return kwargs.get("past_key_values") is not None or kwargs.get("past_key_value") is not None
