"""Private parts of torch that this package uses outside of the engines, and asynchronous copies.

See each function for in and out. If a torch release moves one of the private parts (the default store, groups, pickles,
the flight recorder, gloo's threads, the parts of a sparse tensor, the kernel of attention), only this file breaks;
src/lockstep/strategies/engines/README.md lists what stops working then.

`torch.tensor(..., device=)`, `.to()` and `.item()` wait until the device has finished its queue; copies between
page-locked memory and the device do not. `to_device`, `on_device` and `ToHost` use such copies for a few numbers.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.config.lazy import lazy

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from lockstep.distributed import network
else:
    (network,) = lazy("lockstep.distributed", "network")


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Whether a value is a DTensor, without importing its module, which takes half a second."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def by_host(tensor: Tensor, group: dist.ProcessGroup | None) -> bool:
    """Whether a tensor must go through host memory to reach other ranks of a group: ranks that share a GPU use gloo,
    which supports CUDA only in all_reduce, all_gather and broadcast."""
    return tensor.device.type == "cuda" and dist.get_backend(group) == "gloo"


def may_attend_by_cudnn(device: torch.device) -> bool:
    """Whether torch's variable-length attention may run cuDNN's kernel on a CUDA device. The gradient of that kernel
    need not repeat its bits (pytorch#187770). No release up to 2.13 prefers it; 2.14 does on devices of capability 9
    and 10. True where torch does not say."""
    from torch.nn.attention import varlen

    prefers = getattr(varlen, "_should_use_cudnn", None)
    return prefers is None or bool(prefers(device.index or 0))


def rows_of(gradient: Tensor) -> Tensor:
    """Return the row indices of a row-sparse tensor: int64 [N], with repetitions unless coalesced."""
    return gradient._indices()[0]


def values_of(gradient: Tensor) -> Tensor:
    """Return the values of a row-sparse tensor, [N, D]: the memory itself, without a graph."""
    return gradient._values()


def default_store() -> Any:
    """Return the store of the default group."""
    return dist.distributed_c10d._get_default_store()


def groups() -> list[Any]:
    """Return all process groups of this process, including those of meshes."""
    return list(dist.distributed_c10d._world.pg_map)


def set_timeout(group: Any, timeout: timedelta) -> None:
    """Set the collective timeout of a group (None: the default group) from now on."""
    dist.distributed_c10d._set_pg_timeout(timeout, group)


def open_collectives() -> list[str]:
    """Describe the collectives that this rank has entered and that have not ended, from torch's flight recorder; empty
    if torch was built without it."""
    dump = getattr(getattr(torch._C, "_distributed_c10d", None), "_dump_fr_trace_json", None)
    collectives = []
    for entry in json.loads(dump(True, False)).get("entries", []) if dump is not None else []:
        if not entry["retired"]:
            tensors = zip(entry["input_dtypes"], entry["input_sizes"], strict=False)
            what = ", ".join(f"{kind} {size}" for kind, size in tensors)
            group = entry["process_group"][1] or "its group"
            collectives.append(f"{entry['profiling_name']} number {entry['collective_seq_id']} of {group} ({what})")
    return collectives


def seal_pickles(key: str) -> None:
    """Sign every object that torch, an engine or lockstep sends between ranks from now on, and unpickle only signed
    ones. Does nothing without a secret. A second call changes the secret."""
    if not key:
        return

    class SealedPickler:
        def __init__(self, file: io.BytesIO) -> None:
            self._file = file

        def dump(self, value: Any) -> None:
            self._file.write(network.seal(key, "object", pickle.dumps(value)))

    class SealedUnpickler:
        def __init__(self, file: io.BytesIO) -> None:
            self._file = file

        def load(self) -> Any:
            return pickle.loads(network.unseal(key, "object", self._file.read()))

    module: Any = dist.distributed_c10d
    module._pickler, module._unpickler = SealedPickler, SealedUnpickler


def gloo_threads(count: int) -> None:
    """Set the number of threads of each gloo group formed from now on in this process; torch's default is two per
    network device. A second call changes the number.

    With two threads, memory may be freed twice: both write the name of the collective they finished into one string
    without a lock (`ProcessGroupGloo::runLoop` of torch 2.13). Names of up to 15 characters are stored inline and are
    harmless; those of a functional all-gather, which DTensors use, and of an all-reduce of sparse tensors are longer.
    """
    module: Any = dist.distributed_c10d
    torchs: Any = dist.ProcessGroupGloo

    class Kind(type(torchs)):  # type: ignore[misc]
        def __instancecheck__(cls, value: object) -> bool:
            return isinstance(value, torchs)

    class ThreadGroup(torchs, metaclass=Kind):
        def __new__(cls, store: Any, rank: int, size: int, timeout: timedelta, **newer: Any) -> Any:
            interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
            options: Any = torchs._Options()
            options._devices = [torchs.create_device(interface=name) for name in interfaces]
            options._devices = options._devices or [torchs.create_default_device()]
            options._threads, options._timeout = count, timeout
            for name, value in newer.items():  # torch 2.14: enable_reconfigure
                setattr(options, name, value)
            return torchs(store, rank, size, options)

    module.ProcessGroupGloo = ThreadGroup


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor from the host to a device asynchronously; returns a tensor already on the device as it is."""
    return tensor if device.type in ("cpu", tensor.device.type) else tensor.pin_memory().to(device, non_blocking=True)


def on_device(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Copy integers to a device asynchronously: int64 [N]."""
    return to_device(torch.tensor(numbers, dtype=torch.int64), device)


class ToHost:
    """An asynchronous copy of small tensors to the host."""

    def __init__(self, *tensors: Tensor) -> None:
        cuda = any(tensor.device.type == "cuda" for tensor in tensors)
        self._host_tensors = [tensor.detach().to("cpu", non_blocking=True) for tensor in tensors]  # page-locked
        self._arrived = torch.cuda.Event() if cuda else None
        if self._arrived is not None:
            self._arrived.record()

    def wait(self) -> list[Tensor]:
        """Return the tensors in host memory. Waits only for work queued on the device before the copy."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._host_tensors


def local(tensor: Tensor | None) -> Tensor:
    """Return this rank's part, without communication."""
    assert tensor is not None
    if not is_dtensor(tensor):
        return tensor
    with torch.no_grad():  # the tensor itself, not a view with a graph
        return tensor.to_local()
