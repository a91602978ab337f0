"""Private parts of torch that this package uses outside of the engines, and copies for which the host does not wait.

In and out: see each function. A release of torch that moves one of the private parts (the store ranks met in, groups,
pickles, the flight recorder, gloo's threads, the parts of a sparse tensor) breaks this file and no other;
docs/explanation/engines.md says what no longer works then.

`torch.tensor(..., device=)`, `.to()` and `.item()` wait until the device has done all that it was given before; what is
copied between page-locked memory and the device need not. So a few numbers travel by `to_device`, `on_device` and
`ToHost`.
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

from lockstep.distributed import network

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Whether a value is a DTensor. Whoever made one has imported its module, which takes half a second."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def by_host(tensor: Tensor, group: dist.ProcessGroup | None) -> bool:
    """Whether a tensor goes to other ranks of a group by way of the host: ranks that share a GPU meet over gloo, which
    knows no CUDA but in its own all_reduce, all_gather and broadcast."""
    return tensor.device.type == "cuda" and dist.get_backend(group) == "gloo"


def rows_of(gradient: Tensor) -> Tensor:
    """Which rows a row-sparse tensor has: int64 [N], with repetitions where it is not coalesced."""
    return gradient._indices()[0]


def values_of(gradient: Tensor) -> Tensor:
    """Their numbers, [N, D]: the memory itself, without a graph."""
    return gradient._values()


def default_store() -> Any:
    """The store that the default group's ranks met in."""
    return dist.distributed_c10d._get_default_store()


def groups() -> list[Any]:
    """All groups that this process is in now: the default one and those that were formed beside it, for meshes too."""
    return list(dist.distributed_c10d._world.pg_map)


def set_timeout(group: Any, timeout: timedelta) -> None:
    """Set how long the collectives of a group (None: the default one) may wait from now on."""
    dist.distributed_c10d._set_pg_timeout(timeout, group)


def open_collectives() -> list[str]:
    """The collectives that this rank has entered and that have not ended, as torch's flight recorder has them; nothing
    where it was built without one."""
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
    """From now on every object that torch, an engine or lockstep sends between ranks of this process's groups bears the
    job's seal, and none without it is unpickled. Does nothing without a secret. Calling it again changes the secret."""
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
    """With how many threads each gloo group of this process that is formed from now on works off its collectives; torch
    gives it two a network device. Calling it again changes the number.

    With two, memory may be freed twice: both write the name of what they have ended into one string, with no lock
    (`ProcessGroupGloo::runLoop` of torch 2.13). Names of up to 15 characters lie in the string itself and do no harm;
    those of a functional all-gather, as DTensors make it, and of an all-reduce of sparse tensors are longer."""
    module: Any = dist.distributed_c10d
    torchs: Any = dist.ProcessGroupGloo

    class Kind(type(torchs)):  # type: ignore[misc]
        def __instancecheck__(cls, value: object) -> bool:
            return isinstance(value, torchs)

    class ThreadGroup(torchs, metaclass=Kind):
        def __new__(cls, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
            interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
            options: Any = torchs._Options()
            options._devices = [torchs.create_device(interface=name) for name in interfaces]
            options._devices = options._devices or [torchs.create_default_device()]
            options._threads, options._timeout = count, timeout
            return torchs(store, rank, size, options)

    module.ProcessGroupGloo = ThreadGroup


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host, or of the device itself, on a device; the copy may still be under way."""
    return tensor if device.type in ("cpu", tensor.device.type) else tensor.pin_memory().to(device, non_blocking=True)


def on_device(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Whole numbers: int64 [N]."""
    return to_device(torch.tensor(numbers, dtype=torch.int64), device)


class ToHost:
    """Small tensors on their way to the host, from where the device is now."""

    def __init__(self, *tensors: Tensor) -> None:
        cuda = any(tensor.device.type == "cuda" for tensor in tensors)
        self._host_tensors = [tensor.detach().to("cpu", non_blocking=True) for tensor in tensors]  # page-locked
        self._arrived = torch.cuda.Event() if cuda else None
        if self._arrived is not None:
            self._arrived.record()

    def wait(self) -> list[Tensor]:
        """The tensors in host memory. Waits for what the device was given before them, and for nothing that came
        later."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._host_tensors
