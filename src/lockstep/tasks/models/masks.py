"""Attention masks of transformers without waiting for the GPU.

transformers checks whether each mask [B, T] hides anything and whether positions hold several texts per row; on CUDA
each check synchronizes, at least once per micro-batch. Here host-side facts about the tensor (`data/host_facts.py`)
answer both. In and out: exactly those of transformers' functions; a tensor without facts is checked as before.

`install` replaces transformers' functions, for all models of the process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionMaskInterface, PreTrainedModel, masking_utils

from lockstep.data import host_facts
from lockstep.data.host_facts import RealTokens, TextsOfRows

_sdpa_mask = masking_utils.sdpa_mask
_packed = masking_utils.find_packed_sequence_indices
_inside = [False]  # whether a region is being traced or run


@contextmanager
def region() -> Iterator[None]:
    """A context for a micro-batch that is compiled whole: no value is read on the host, so texts have no padding and
    masks no facts, and models use the operations of `repeatable.py`."""
    before, _inside[0] = _inside[0], True
    try:
        yield
    finally:
        _inside[0] = before


def inside() -> bool:
    """Whether the caller runs within `region`."""
    return _inside[0]


def sdpa_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> Tensor | None:
    """transformers' `sdpa_mask`: bool [B, 1, T, S], or None if attention needs no mask."""
    real = host_facts.facts(attention_mask, RealTokens)
    fits = real is not None and (len(real.lengths), real.width) == (batch_size, kv_length)
    if fits and real is not None and isinstance(q_offset, int) and q_offset == kv_offset == 0:
        if real.full:  # nothing is hidden; transformers would inspect the mask to learn this
            attention_mask = None
        elif q_length == kv_length or not options.get("allow_is_causal_skip", True):
            options |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}  # it hides something
    sizes = (batch_size, q_length, kv_length, q_offset, kv_offset)
    return _sdpa_mask(*sizes, mask_function, attention_mask, **options)


def packed(position_ids: Tensor) -> Tensor | None:
    """transformers' `find_packed_sequence_indices`: index of each token's text within its row, int64 [B, T]; None if
    each row is one text."""
    if inside():  # each row is one text
        return None
    texts = host_facts.facts(position_ids, TextsOfRows)
    if texts is None:
        return _packed(position_ids)
    if all(texts.single):
        return None
    return (torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1) != 1).cumsum(-1)


def as_bool(mask: Tensor) -> Tensor:
    """Convert a mask to bool and keep its host-side facts."""
    return _knowing(mask, mask.bool())


def _knowing(mask: object, other: Any) -> Any:
    """Attach the facts of `mask` to `other`, a tensor of the same values."""
    real = None if inside() else _real_tokens(mask)
    if real is None or not isinstance(other, Tensor) or other.shape != (len(real.lengths), real.width):
        return other
    return host_facts.attach(other, real)


def _real_tokens(mask: object) -> RealTokens | None:
    """Facts about a mask, or about its base if the mask is a view of the same shape (GPT-2 creates one)."""
    if not isinstance(mask, Tensor):
        return None
    real, base = host_facts.facts(mask, RealTokens), mask._base
    if real is not None or base is None or base.shape != mask.shape or base.stride() != mask.stride():
        return real
    return host_facts.facts(base, RealTokens) if base.storage_offset() == mask.storage_offset() else None


def _preprocessing(before: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(before)
    def preprocess(config: Any, inputs_embeds: Any, attention_mask: Any, *args: Any, **options: Any) -> Any:
        """Convert the mask to bool as transformers does, and keep its facts."""
        result = before(config, inputs_embeds, attention_mask, *args, **options)
        _knowing(attention_mask, result[1])
        return result

    return preprocess


def prepare(model: nn.Module) -> None:
    """Disable checks in a model that read its inputs on the device. `model`: one whose inputs lockstep provides."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel):  # it would check for padding at every forward
            module.warn_if_padding_and_no_attention_mask = _no_warning  # type: ignore[method-assign]
    whole = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
    if whole is not None and whole.config.is_encoder_decoder:  # inside an adapter, if any
        whole.register_forward_pre_hook(_whole_decoder_mask, with_kwargs=True)


def _no_warning(input_ids: Tensor, attention_mask: Tensor | None) -> None:
    """Do nothing: lockstep passes a mask wherever there is padding."""


def _whole_decoder_mask(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    """Add an all-ones decoder mask before a training forward on CUDA if none is passed. The model would create the same
    mask and then inspect it on the device."""
    read = kwargs.get("decoder_input_ids")
    if read is None or not read.is_cuda or not model.training or kwargs.get("decoder_attention_mask") is not None:
        return None
    ones = torch.ones_like(read)
    host_facts.attach(ones, RealTokens.everywhere(len(read), read.shape[1], read.device))
    return args, {**kwargs, "decoder_attention_mask": ones}


def install() -> None:
    """Replace transformers' mask functions in this process. Idempotent."""
    if masking_utils.find_packed_sequence_indices is packed:
        return
    masking_utils.find_packed_sequence_indices = packed
    masking_utils._preprocess_mask_arguments = _preprocessing(masking_utils._preprocess_mask_arguments)
    AttentionMaskInterface.register("sdpa", sdpa_mask)


install()
