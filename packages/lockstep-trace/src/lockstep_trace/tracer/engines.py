"""Parts of parameters in the flat tensors of FSDP1 and DeepSpeed: their blocks of the full parameters.

In: an optimizer's parameters and the called models; an engine at its step. Out: `FlatPart`s; of an engine, records like
those of one optimizer. No public API describes a rank's shard, or works without communication: this reads `_handle` and
`_shard_param_infos` of FSDP1, and `_hp_mapping` of DeepSpeed's stages 1 and 2; stage 3 has `safe_get_local_*`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from .fingerprint import Block
from .placement import FlatPart, plain_name


class EngineOptimizer:
    """Stands for the engine's optimizer in the recorder."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.optimizer = engine.optimizer
        self.kind = type(engine.optimizer).__name__
        self.state: dict[Any, Any] = {}
        self.param_groups: list[dict[str, Any]] = []
        self._parts: dict[int, FlatPart] = {}

    def refresh(self, gradients: bool) -> None:
        """Read the current parts of this rank."""
        groups: dict[int, list[FlatPart]] = {}
        for parameter in self.engine.module.parameters():
            gradient_part = _part(parameter, gradients)
            if gradient_part is None:
                continue
            number, part = gradient_part
            known = self._parts.setdefault(id(parameter), part)
            known.tensor, known.grad = part.tensor, part.grad
            groups.setdefault(number, []).append(known)
        options = self.engine.optimizer.param_groups
        self.param_groups = [
            {k: v for k, v in options[min(n, len(options) - 1)].items() if k != "params"} | {"params": parts}
            for n, parts in sorted(groups.items())
        ]
        scale = float(getattr(self.engine.optimizer, "loss_scale", 1.0) or 1.0)
        for part in (p for parts in groups.values() for p in parts if p.grad is not None and scale != 1.0):
            assert part.grad is not None
            part.grad.tensor = part.grad.tensor.float() / scale


def _part(parameter: Any, gradients: bool) -> tuple[int, FlatPart] | None:
    mapping = getattr(parameter, "_hp_mapping", None)
    if mapping is not None:
        start = mapping.lp_fragment_address.start
        shape, tensor = tuple(parameter.shape), mapping.hp_fragment
        block = Block(shape, (start,), (tensor.numel(),))
        grad = mapping.get_lp_grad_fragment(parameter._index_in_param_group) if gradients else None
        part = None if grad is None else FlatPart(parameter, grad.reshape(-1)[: tensor.numel()], block)
        return mapping.param_group_index, FlatPart(parameter, tensor.detach().reshape(-1), block, part)
    if hasattr(parameter, "ds_id") and parameter.ds_tensor is not None:
        return _of_stage_3(parameter, gradients)
    return None


def _of_stage_3(parameter: Any, gradients: bool) -> tuple[int, FlatPart] | None:
    from deepspeed.utils import safe_get_local_fp32_param, safe_get_local_grad

    tensor = safe_get_local_fp32_param(parameter)
    if tensor is None:
        return None
    import torch.distributed as dist

    rank = dist.get_rank(parameter.ds_process_group) if dist.is_initialized() else 0
    numel, start = parameter.ds_tensor.ds_numel, rank * parameter.ds_tensor.ds_numel
    count = max(min(numel, parameter.ds_numel - start), 0)  # the last parts are padded
    block = Block(tuple(parameter.ds_shape), (min(start, parameter.ds_numel),), (count,))
    grad = safe_get_local_grad(parameter) if gradients else None
    part = None if grad is None else FlatPart(parameter, _flat(grad)[:count], block)
    return 0, FlatPart(parameter, _flat(tensor)[:count], block, part)


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1)


def install_deepspeed(hooks: Any) -> None:
    """Wrap the engine's step, after deepspeed is imported."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    original = DeepSpeedEngine.step
    optimizers: dict[int, EngineOptimizer] = {}

    @functools.wraps(original)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = hooks.recorder
        partitioned = any(
            getattr(p, "_hp_mapping", None) is not None or hasattr(p, "ds_id") for p in self.module.parameters()
        )
        if recorder is None or not partitioned or not self.is_gradient_accumulation_boundary():
            return original(self, *args, **kwargs)
        optimizer = optimizers.setdefault(id(self), EngineOptimizer(self))
        hooks.guarded(optimizer.refresh, True)
        limit = self.gradient_clipping()
        if limit:
            recorder.since.clips.append({"how": "clip_grad_norm_", "limit": float(limit), "unseen": True})
        here = hooks.guarded(recorder.before_step, optimizer)
        skipped, hooks.engine_steps = self.skipped_steps, True
        try:
            result = original(self, *args, **kwargs)
        finally:
            hooks.engine_steps = False
        if self.skipped_steps > skipped:
            hooks.guarded(recorder.skipped, optimizer)
        elif here is not None:
            hooks.guarded(optimizer.refresh, False)
            hooks.guarded(_after, recorder, optimizer, here)
        return result

    DeepSpeedEngine.step = step


def _after(recorder: Any, optimizer: EngineOptimizer, here: dict[str, Any]) -> None:
    if "measured" in here:
        here["measured"].locals = [(p.tensor, p.block, "") for p, _ in here["parameters"]]
    recorder.after_step(optimizer, here)


# -- FSDP1 -------------------------------------------------------------------------------------------------------------


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
                pairs = zip(names, infos, strict=True)
                yield id(flat), [_part_of_shard(flat, n, shape, info, True) for n, (_, shape, info) in pairs]
                continue
            for n, parameter, (_, shape, info) in zip(names, flat._params, infos, strict=True):
                yield id(parameter), [_part_of_shard(parameter, n, shape, info, False)]


def _part_of_shard(source: Any, name: str, shape: Any, info: Any, flat: bool) -> FlatPart:
    size = info.numel_in_shard if info.in_shard else 0
    start = info.intra_param_start_idx if info.in_shard else 0
    block = Block(tuple(shape), (start,), (size,))
    first = info.offset_in_shard if flat and info.in_shard else 0

    def own(tensor: Tensor) -> Tensor:
        return tensor.detach().reshape(-1)[first : first + size]

    grad = None if source.grad is None else FlatPart(source, own(source.grad), block)
    return FlatPart(source, own(source), block, grad, name)


def install_fsdp1(hooks: Any) -> None:
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
