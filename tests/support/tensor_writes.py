"""Peak memory of written tensors: what a system that allocates pages on first touch must provide. Counted per tensor,
independent of allocators, threads and other processes.

In: operations inside of `Written()`. Out: `most`, in bytes.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lockstep.distributed.torch_internals import values_of

_UNTOUCHED = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


class Written(TorchDispatchMode):
    """Counts a storage from its first write on, by the written bytes, until it is freed."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._held: dict[int, int] = {}  # storage -> bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if DTensor in types:  # its operations on local tensors are dispatched separately
            return NotImplemented
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func.namespace == "c10d":  # collectives write to their arguments, which their schemas do not declare
            written = tree_leaves((args, kwargs))
        else:
            slots = zip(func._schema.arguments, args, strict=False)
            written = [value for slot, value in slots if slot.alias_info is not None and slot.alias_info.is_write]
            written += [kwargs[s.name] for s in func._schema.arguments if s.name in kwargs and s.is_out]
            fresh = [slot.alias_info is None for slot in func._schema.returns]
            if all(fresh) and func._schema.name.split("::")[1] not in _UNTOUCHED:
                written.append(out)
        for tensor in tree_leaves(written):
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
                self._count(tensor)
        return out

    def _count(self, tensor: torch.Tensor) -> None:
        if tensor.is_sparse:
            tensor = values_of(tensor)
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._held:
            weakref.finalize(storage, self._held.pop, key, None)
        written = self._held.get(key, 0) + tensor.numel() * tensor.element_size()
        self._held[key] = min(storage.nbytes(), written)
        self.most = max(self.most, sum(self._held.values()))
