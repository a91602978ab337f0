"""ZeRO stage 3 with unchanged arithmetic: the autograd graph of a model equals that without DeepSpeed.

In: a model whose weights DeepSpeed gathers before a module computes, and frees afterwards. Out: forward and backward of
PyTorch's own operations, in their own order. Two parts of DeepSpeed are replaced:

- DeepSpeed detects backward by its own autograd nodes around the inputs and outputs of every module. They regroup the
sum of gradients that meet at an input: (query + key + value) + residual (`keep_sums`).
- Its `memory_efficient_linear` replaces `torch.nn.functional.linear` for the whole process, and rounds differently. It
exists because autograd would keep gathered weights in memory until backward. Here, autograd instead saves the position
of the data within a weight, for any operation (`SavedByName`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

# Modules that use their input once: a DeepSpeed node before them sums nothing.
_USE_ONCE = (nn.Linear, nn.LayerNorm, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d, Conv1D)


def keep_sums(model: nn.Module) -> None:
    """Keep DeepSpeed's autograd nodes only where they change no sum: after a module that has weights and no submodules,
    and before one that uses its input once. On other modules with weights, replace them by tensor hooks; on modules
    without weights, remove them, as there is nothing to gather."""
    for module in model.modules():
        functions = {name: vars(module)[name] for name in ("pre_bwd_fn", "post_bwd_fn") if name in vars(module)}
        weights, inner = any(True for _ in module.parameters(recurse=False)), any(True for _ in module.children())
        for name, function in functions.items():
            if not weights:
                setattr(module, name, _Nothing)
            elif inner or (name == "post_bwd_fn" and not isinstance(module, _USE_ONCE)):
                setattr(module, name, _TensorHook(function))


class _Nothing:
    """Replaces one of DeepSpeed's autograd functions by the identity."""

    @staticmethod
    def apply(tensor: Tensor) -> Tensor:
        """Return the tensor."""
        return tensor


class _TensorHook:
    """Replaces one of DeepSpeed's autograd functions, which pass gradients through unchanged, by a tensor hook."""

    def __init__(self, function: Any) -> None:
        self._function = function

    def apply(self, tensor: Tensor) -> Tensor:
        """Hook the tensor and return it. The last of several functions on a tensor runs first, as graph nodes would."""
        if tensor.requires_grad and torch.is_grad_enabled():
            context = SimpleNamespace()
            self._function.setup_context(context, (tensor,), tensor)
            hearing: list[tuple[Any, Any]] | None = getattr(tensor, "lockstep_hearing", None)
            if hearing is None:
                hearing = tensor.lockstep_hearing = []  # type: ignore[attr-defined]
                tensor.register_hook(partial(_hear, hearing))
            hearing.append((self._function, context))
        return tensor


def _hear(hearing: list[tuple[Any, Any]], gradient: Tensor) -> None:
    for function, context in reversed(hearing):
        function.backward(context, gradient)


def _arriving(coordinator: Any) -> dict[Any, Any]:
    """Return DeepSpeed's gathers in progress: weight -> handle."""
    arriving: dict[Any, Any] = coordinator._PartitionedParameterCoordinator__inflight_param_registry
    return arriving


def wait_where_read(model: nn.Module, coordinator: Any, read: Callable[[Any], None] = lambda weight: None) -> None:
    """Make weights available where another module reads them, as in LayoutLMv3, or an entry of a `ParameterList`, and
    call `read` with each. DeepSpeed's mapping gathers a weight that is missing, but does not wait for a gather in
    progress. With recomputed activations, torch keeps a frozen weight itself until backward, when DeepSpeed has freed
    it; a detached tensor stays, like that of a trained weight."""
    arriving = _arriving(coordinator)
    kind: Any = type(next(model.modules())._parameters)

    class Arrived(kind):
        """DeepSpeed's mapping of parameters, but waiting for gathers in progress."""

        def __getitem__(self, name: str) -> Any:
            weight = super().__getitem__(name)
            if weight is not None and weight in arriving:
                arriving.pop(weight).wait()
            if weight is not None and not weight.requires_grad and torch.is_grad_enabled():
                return weight.detach()
            if weight is not None:
                read(weight)
            return weight

    for module in model.modules():
        if type(module._parameters) is kind:
            module._parameters.__class__ = Arrived


class SavedByName(torch.autograd.graph.saved_tensors_hooks):
    """A context for the forward pass in which autograd saves the position within a weight instead of a gathered weight
    or a view of one."""

    def __init__(self, model: nn.Module, coordinator: Any) -> None:
        """`coordinator`: DeepSpeed's, which prefetches weights."""
        super().__init__(self._pack, self._unpack)
        self._arriving = _arriving(coordinator)
        self._weights: dict[int, Any] = {}  # the storage of a gathered weight -> the weight
        for module in model.modules():
            if any(hasattr(p, "ds_id") for p in module.parameters(recurse=False)):
                module.register_forward_pre_hook(self._note)  # after DeepSpeed's hook, which gathers
                module.register_forward_hook(self._forget, prepend=True)  # before DeepSpeed's hook, which frees
        for weight in (p for p in model.parameters() if p.requires_grad):
            weight.register_hook(partial(self._before_gradient, weight))
        wait_where_read(model, coordinator, self._keep)

    def _keep(self, weight: Any) -> None:
        """Note a gathered weight that is read outside of its module's forward, as an entry of a `ParameterList` is."""
        if weight.requires_grad and weight.numel():
            self._weights[weight.untyped_storage()._cdata] = weight

    def _note(self, module: nn.Module, _: Any) -> None:
        for weight in module.parameters(recurse=False):
            if weight.numel():
                self._weights[weight.untyped_storage()._cdata] = weight

    def _forget(self, module: nn.Module, *_: Any) -> None:
        for weight in module.parameters(recurse=False):
            if weight.numel():
                self._weights.pop(weight.untyped_storage()._cdata, None)

    def _before_gradient(self, weight: Any, _: Tensor) -> None:
        self._gather(weight)

    def _pack(self, tensor: Tensor) -> Any:
        storage = tensor.untyped_storage()._cdata
        weight = self._weights.get(storage)
        if weight is None or weight.dtype != tensor.dtype:
            return tensor
        if not weight.numel() or weight.untyped_storage()._cdata != storage:  # freed, and the memory is reused
            del self._weights[storage]
            return tensor
        return weight, tensor.size(), tensor.stride(), tensor.storage_offset()

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        weight, size, stride, offset = packed
        self._gather(weight)
        return weight.data.as_strided(size, stride, offset)

    def _gather(self, weight: Any) -> None:
        """Gather a weight, unless it is gathered already. DeepSpeed may not have noticed its module's backward yet, or
        may have freed the weight, but autograd needs it: a gradient gets the memory layout of its weight."""
        if weight in self._arriving:  # prefetched
            self._arriving.pop(weight).wait()
        if weight.ds_status.name == "NOT_AVAILABLE":
            weight.all_gather()
        assert weight.ds_status.name == "AVAILABLE", weight.ds_summary()
