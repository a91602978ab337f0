"""ZeRO's stage 3 without another arithmetic: the graph of a model stays what it is without DeepSpeed.

In: a model whose weights DeepSpeed gathers before a module computes, and lets go of afterwards. Out: forward and
backward of PyTorch's own operations, in their own order. Two things of DeepSpeed's are replaced:

- It hears of backward by nodes of its own in the graph, around the inputs and outputs of every module. Gradients that
  meet at an input are added up in other groups then: (query + key + value) + residual (`keep_sums`).
- Its `memory_efficient_linear` puts another function in the place of `torch.nn.functional.linear`, for the whole
  process, which rounds in another way. It is there because autograd would keep gathered weights in memory until
  backward. Here autograd keeps where in which weight the numbers lie, whatever the operation.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

# Of their input each of these makes one thing: a node of DeepSpeed's in between adds nothing up.
_USE_ONCE = (nn.Linear, nn.LayerNorm, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d, Conv1D)


def keep_sums(model: nn.Module) -> None:
    """Leave DeepSpeed's nodes where they change no sum, once it has put them in: after a module that has weights and no
    modules within it, and before one that uses its input once. Other modules with weights have hooks of tensors, and
    those without weights nothing, as there is nothing to gather."""
    for module in model.modules():
        functions = {name: vars(module)[name] for name in ("pre_bwd_fn", "post_bwd_fn") if name in vars(module)}
        weights, inner = any(True for _ in module.parameters(recurse=False)), any(True for _ in module.children())
        for name, function in functions.items():
            if not weights:
                setattr(module, name, _Nothing)
            elif inner or (name == "post_bwd_fn" and not isinstance(module, _USE_ONCE)):
                setattr(module, name, _TensorHook(function))


class _Nothing:
    """Takes the place of an autograd function of DeepSpeed's."""

    @staticmethod
    def apply(tensor: Tensor) -> Tensor:
        """The tensor itself."""
        return tensor


class _TensorHook:
    """Does what an autograd function of DeepSpeed's does, of which every gradient is that of its input."""

    def __init__(self, function: Any) -> None:
        self._function = function

    def apply(self, tensor: Tensor) -> Tensor:
        """The tensor itself. Of several of its hooks the last one hears first, as nodes of the graph would."""
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


class SavedByName(torch.autograd.graph.saved_tensors_hooks):
    """A context for the forward pass. Instead of a gathered weight, or a view of one, autograd saves where it lies in
    the weight."""

    def __init__(self, model: nn.Module, coordinator: Any) -> None:
        """`coordinator`: DeepSpeed's, which gathers weights in advance."""
        super().__init__(self._pack, self._unpack)
        self._arriving = coordinator._PartitionedParameterCoordinator__inflight_param_registry  # weight -> handle
        self._weights: dict[int, Any] = {}  # the storage of a gathered weight -> the weight
        for module in model.modules():
            if any(hasattr(p, "ds_id") for p in module.parameters(recurse=False)):
                module.register_forward_pre_hook(self._note)  # after DeepSpeed's, which gathers
                module.register_forward_hook(self._forget, prepend=True)  # before DeepSpeed's, which lets go
        for weight in (p for p in model.parameters() if p.requires_grad):
            weight.register_hook(partial(self._before_gradient, weight))
        self._wait_where_read(model)

    def _wait_where_read(self, model: nn.Module) -> None:
        """Gather a weight in time for another module than its own that reads it, as in LayoutLMv3. DeepSpeed's mapping
        gathers it if it is not there, and does not wait for a gather that is under way. Where activations are computed
        again, torch keeps a frozen weight itself until backward, and that is empty once DeepSpeed has let go of it; a
        detached one stays, as that of a trained weight does."""
        arriving = self._arriving
        kind: Any = type(next(model.modules())._parameters)

        class Arrived(kind):
            """DeepSpeed's mapping, which waits."""

            def __getitem__(self, name: str) -> Any:
                weight = super().__getitem__(name)
                if weight is not None and weight in arriving:
                    arriving.pop(weight).wait()
                if weight is not None and not weight.requires_grad and torch.is_grad_enabled():
                    return weight.detach()
                return weight

        for module in model.modules():
            if type(module._parameters) is kind:
                module._parameters.__class__ = Arrived

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
        if not weight.numel() or weight.untyped_storage()._cdata != storage:  # let go of, and the memory is reused
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
        """See that a weight is there, also where DeepSpeed has not heard of the backward of its module yet, or has let
        go of it: autograd lays a gradient as its weight lies."""
        if weight in self._arriving:  # asked for in advance
            self._arriving.pop(weight).wait()
        if weight.ds_status.name == "NOT_AVAILABLE":
            weight.all_gather()
        assert weight.ds_status.name == "AVAILABLE", weight.ds_summary()
