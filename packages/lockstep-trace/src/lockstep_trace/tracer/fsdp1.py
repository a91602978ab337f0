"""Splits FSDP1's flat parameters into the original parameters.

In: an optimizer's parameters and the called models. Out: `FlatPart`s with their blocks of the full parameters. No
public API describes a rank's shard, so this file reads `_handle` and `_shard_param_infos`, in torch since 2.1.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from .fingerprint import Block
from .placement import FlatPart, plain_name

MODULE = "torch.distributed.fsdp"


def wrapper() -> Any:
    """Return `FullyShardedDataParallel` if the script has imported it, else None."""
    return getattr(sys.modules.get(MODULE), "FullyShardedDataParallel", None)


def expanded(parameters: Iterable[Any], roots: Iterable[nn.Module]) -> list[list[Any]]:
    """Return for each parameter [itself], or the `FlatPart`s of a rank's shard. A part of length 0 is a parameter that
    the rank does not hold."""
    known = dict(_known(roots)) if wrapper() is not None else {}
    return [known.get(id(p)) or [p] for p in parameters]


def _known(roots: Iterable[nn.Module]) -> Iterator[tuple[int, list[FlatPart]]]:
    for root in roots:
        for name, module in root.named_modules():
            handle = getattr(module, "_handle", None) if isinstance(module, wrapper()) else None
            if handle is None or not handle.uses_sharded_strategy:
                continue  # unsharded: its parameters are views of full tensors
            flat, prefix = handle.flat_param, plain_name(name) if name else ""
            infos = list(zip(flat._fqns, flat._shapes, flat._shard_param_infos, strict=True))
            names = [plain_name(f"{prefix}.{fqn}" if prefix else fqn) for fqn, *_ in infos]
            if flat._params is None:
                yield (
                    id(flat),
                    [_part(flat, n, shape, info, True) for n, (_, shape, info) in zip(names, infos, strict=True)],
                )
                continue
            for n, parameter, (_, shape, info) in zip(names, flat._params, infos, strict=True):
                yield id(parameter), [_part(parameter, n, shape, info, False)]


def _part(source: Any, name: str, shape: Any, info: Any, flat: bool) -> FlatPart:
    size = info.numel_in_shard if info.in_shard else 0
    start = info.intra_param_start_idx if info.in_shard else 0
    block = Block(tuple(shape), (start,), (size,))
    first = info.offset_in_shard if flat and info.in_shard else 0

    def own(tensor: Tensor) -> Tensor:
        return tensor.detach().reshape(-1)[first : first + size]

    grad = None if source.grad is None else FlatPart(source, own(source.grad), block)
    return FlatPart(source, own(source), block, grad, name)


def install(hooks: Any) -> None:
    """Wrap `FullyShardedDataParallel.clip_grad_norm_`, which clips by the norm over all ranks."""
    kind = wrapper()
    if kind is None or hasattr(kind.clip_grad_norm_, "lockstep"):
        return
    original = kind.clip_grad_norm_

    @functools.wraps(original)
    def clip(self: Any, max_norm: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = hooks.recorder
        if recorder is None:
            return original(self, max_norm, *args, **kwargs)
        hooks.guarded(recorder.clipping, list(self.parameters()), "clip_grad_norm_", max_norm)
        with hooks.clipping():
            return original(self, max_norm, *args, **kwargs)

    clip.lockstep = True  # type: ignore[attr-defined]
    kind.clip_grad_norm_ = clip
